"""Adversarial images of a model: the public function `attack`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.attacks import Attack, BatchAttack, attack_dataset, make_attack
from equipoise.core import checks, format, memory, rng, stats
from equipoise.core.device import check_precision, full_precision, move, resolve
from equipoise.core.modes import inference
from equipoise.core.threat import Threat
from equipoise.data import as_dataset, pixels
from equipoise.evaluation.job import MODULE, check_common
from equipoise.models import check_forward, name_failing_model


@dataclass(frozen=True, eq=False)
class AttackedImages:
    """N attacked images, on the CPU, and what the model predicts for them."""

    images: Tensor  # (N, C, H, W) in [0, 1]
    labels: Tensor  # (N,)
    predicted: Tensor  # (N,)
    threat: Threat

    @property
    def robust(self) -> Tensor:
        """(N,) bool: which images are still classified correctly."""
        return self.predicted == self.labels

    def __str__(self) -> str:
        e = stats.share(self.robust.tolist())
        return (f"{format.percent(e.value)} {format.interval(e.low, e.high)} of {e.n} images classified correctly "
                f"under attack, {self.threat}")


@name_failing_model
def attack(model: nn.Module, data: Any, *, threat: Threat, attack: str | Attack = "pgd", device: str = "auto",
           batch_size: int = 128, precision: str = "auto", seed: int = 0, **settings: Any) -> AttackedImages:
    """Attack a model on images, as :func:`~equipoise.evaluation.evaluate` does, and return the attacked images.

    Only the given attack is run: against a mixture that hides its gradients, `evaluate` also runs adaptive attacks.

    `data`, `threat`, `attack` and `device` are as there; the model returns logits (B, K) for images (B, C, H, W) in
    [0, 1]. The batch size is halved when memory runs out. `precision` (auto, fp32 or bf16) is that of the search:
    success is decided in full precision. `settings` are those of an attack given by name, such as `steps=50`.
    """
    checks.instance("model", model, nn.Module, MODULE)
    check_common(checks.instance("threat", threat, Threat, "be a Threat"), device=device)
    checks.instance("attack", attack, (str, Attack), "be the name of an attack or an Attack")
    checks.require(isinstance(attack, str) or not settings, "settings", "be left out beside an attack object, which "
                   "has its own", sorted(settings))
    checks.whole("batch_size", batch_size, least=1)
    checks.seed(seed)
    chosen = make_attack(attack, **settings) if isinstance(attack, str) else attack
    name = attack if isinstance(attack, str) else chosen.name
    where, images = resolve(device), as_dataset(data)
    check_precision(precision, where)
    model = move(model, where)
    check_forward("model", model, pixels(images.images[:1].to(where)))
    if not isinstance(chosen, BatchAttack):
        state = attack_dataset(chosen, model, images, threat=threat, seed=seed, precision=precision,
                               batch_size=batch_size, device=where, keep_images=True, title=name)
        assert state.images is not None
        return AttackedImages(state.images, images.labels, state.predicted, threat)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        x, y = pixels(images.images[rows].to(where)), images.labels[rows].to(where)
        stream = rng.stream(seed, name, images.index[rows].to(where))
        with inference(model):
            x_adv = chosen(model, x, y, threat=threat, stream=stream, precision=precision)
            with torch.no_grad(), full_precision(where):
                return x_adv.cpu(), model(x_adv).argmax(dim=1).cpu()

    parts = [part for _, part in memory.in_batches(run, len(images), batch_size)]
    attacked, predicted = (torch.cat(side) for side in zip(*parts, strict=True))
    return AttackedImages(attacked, images.labels, predicted, threat)
