"""One pass of a mixture's bases for all that an attack step needs: its surrogate, its own logits
and the extra term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class SharedBases(nn.Module):
    """What the bases of a mixture return, side by side in columns; copies of it are made faster
    like any network.

    Args:
        mixture: a model with `base_outputs(x)`, tensors (B, K) or (B,).
        example: an image (1, C, H, W).
    """

    def __init__(self, mixture: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.mixture = mixture
        with torch.no_grad():
            outputs = self._outputs(example)
        self.widths = [output.shape[1] if output.dim() == 2 else None for output in outputs]
        self.columns = [width or 1 for width in self.widths]
        self.joinable = all(output.is_floating_point() and output.dim() <= 2 for output in outputs)

    def _outputs(self, x: Tensor) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = self.mixture.base_outputs(x)  # type: ignore[operator]
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, columns)."""
        return torch.cat(
            [output if output.dim() == 2 else output.unsqueeze(1) for output in self._outputs(x)],
            dim=1,
        )

    def split(self, columns: Tensor) -> list[Tensor]:
        """The base outputs again."""
        parts = columns.split(self.columns, dim=1)
        return [
            part if width else part.squeeze(1)
            for part, width in zip(parts, self.widths, strict=True)
        ]


def shared_bases(model: nn.Module, others: Sequence[Any], example: Tensor) -> SharedBases | None:
    """The bases of a model if all the others (a surrogate, an extra term) are functions of their
    outputs.

    Such a function has `reads_bases_of(model)` and `from_base_outputs(*outputs)`. None where a
    single network pass, or separate passes, do better.
    """
    if not others or not all(
        getattr(part, "reads_bases_of", lambda model: False)(model) for part in (model, *others)
    ):
        return None
    bases = SharedBases(model, example[:1])
    return bases if bases.joinable else None
