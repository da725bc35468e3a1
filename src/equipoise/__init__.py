"""Equipoise: one classifier that is both accurate and robust, out of two.

Letters used in every docstring: `B` batch, `C, H, W` image, `K` classes, `S` noise samples, `R` radii,
`T` steps. Images are in [0, 1]; models answer with logits `(B, K)`.
"""

__version__ = "0.1.0"
