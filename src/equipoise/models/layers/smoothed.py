"""A randomly smoothed classifier as a model: the mean of a base model's probabilities over noisy
copies of an image."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise.core import checks, rng
from equipoise.models.inspection import Described

SAMPLES, MAX_SAMPLES = 100, 10_000
CHUNK = 4  # copies per pass: a few, because a pass then has so many times the images of a batch


class RandomlySmoothedClassifier(Described):
    r"""The soft smoothed classifier of [Salman2019] with N samples,

    .. math:: \log \tfrac{1}{N} \sum_{i=1}^{N} \mathrm{softmax}\, f(x + \sigma z_i), \quad z_i \sim
    \mathcal{N}(0, I).

    The noise is fixed: :math:`z_i` depends on `seed` and i alone and is the same for every image.
    So the model is deterministic and differentiable, and any attack applies to it; an attack that
    finds nothing says nothing about other samples. With `fresh` every pass and image has new noise
    from torch's global generator, as a randomised defence has, which the attack `rand` is for.

    How this compares with a certificate of `certify` for the same base model and sigma: accuracy
    under attack is an upper bound on the robust accuracy of this very classifier; certified
    accuracy is a lower bound, with confidence, on that of the ideal one, whose number of samples is
    infinite and which votes with classes instead of probabilities. For many samples both are nearly
    the same classifier, and its robust accuracy lies between the two.

    Args:
        model: the base model, usually trained with noise.
        sigma: standard deviation of the noise, in units of the pixels in [0, 1].
        samples: N. A prediction costs N passes; a gradient needs the memory of :data:`CHUNK` of
            them at a time.
        seed: of the fixed noise.
        fresh: new noise in every pass.
    """

    description = ("smoothed", "sigma", "samples", "seed", "fresh")

    def __init__(
        self,
        model: nn.Module,
        sigma: float,
        samples: int = SAMPLES,
        *,
        seed: int = 0,
        fresh: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.fresh = model, fresh
        self.sigma = float(checks.positive("sigma", sigma))
        self.samples = checks.whole("samples", samples, least=1, most=MAX_SAMPLES)
        self.seed = checks.seed(seed)
        self._noise: Tensor | None = (
            None  # no buffer: it is a function of the settings and the shape of the images
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K) log-probabilities."""
        parts = [self._log_probabilities(x, start) for start in range(0, self.samples, CHUNK)]
        # Samples last, one row per image and class: then rounding does not depend on the size of
        # the batch.
        return torch.cat(parts).permute(1, 2, 0).contiguous().logsumexp(dim=2) - math.log(
            self.samples
        )

    def _log_probabilities(self, x: Tensor, start: int) -> Tensor:
        """(S, B, K) for the samples from `start` on, at most :data:`CHUNK`."""
        count = min(CHUNK, self.samples - start)
        noise = (
            torch.randn(count, *x.shape, device=x.device, dtype=x.dtype)
            if self.fresh
            else self._fixed_noise(x)[start : start + count].unsqueeze(1)
        )
        noisy = (x + self.sigma * noise).flatten(0, 1)
        # Activations are computed again in the backward pass: those of all samples would not fit
        # into memory.
        logits = (
            checkpoint(self.model, noisy, use_reentrant=False, preserve_rng_state=False)
            if noisy.requires_grad
            else self.model(noisy)
        )
        return F.log_softmax(logits, dim=1).view(count, len(x), -1)

    def _fixed_noise(self, x: Tensor) -> Tensor:
        """(N, C, H, W), computed once per shape of the images."""
        noise = self._noise
        if (
            noise is None
            or noise.shape[1:] != x.shape[1:]
            or noise.device != x.device
            or noise.dtype != x.dtype
        ):
            with torch.inference_mode(False):  # a gradient may be asked for later
                numbers = rng.stream(
                    self.seed, "smoothed", torch.arange(self.samples, device=x.device)
                )
                parts = [
                    numbers[start : start + CHUNK].normal(*x.shape[1:])
                    for start in range(0, self.samples, CHUNK)
                ]
                self._noise = noise = torch.cat(parts).to(x.dtype)
        return noise
