"""Objectives for randomized smoothing: Gaussian, Stability, Consistency, MACER, SmoothAdv and
SmoothMix."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from equipoise.core import losses
from equipoise.core.geometry import per_example
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.training.objective import Memory, Objective, ObjectiveOutput, correct_predictions
from equipoise.training.objectives.noisy_attacks import (
    clip_last,
    draw_noise,
    log_average,
    noisy_logits,
    smoothed_ddn,
    smoothed_pgd,
)


def mean_cross_entropy(z: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """(B, S, K) logits → (B,): cross-entropy, averaged over the noises."""
    count, noises, _ = z.shape
    repeated = y.unsqueeze(1).expand(count, noises).flatten()
    return (
        losses.cross_entropy(z.flatten(0, 1), repeated, smoothing).view(count, noises).mean(dim=1)
    )


def growth(epoch: int, warmup_epochs: int) -> float:
    """Share of the final value that a setting has in an epoch (from 0 on) of a linear warm-up."""
    return min(1.0, (epoch + 1) / max(warmup_epochs, 1))


@dataclass(frozen=True, kw_only=True)
class SmoothingObjective(Objective):
    """Base of the objectives for randomized smoothing; validated on clean images and under
    noise."""

    sigma: float = setting(
        0.5, "Standard deviation of the noise, in units of [0, 1] pixels.", fraction=True
    )

    def validation_metrics(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream
    ) -> dict[str, Tensor]:
        """Clean, and by the probabilities averaged over eight noises."""
        z = noisy_logits(model, x, draw_noise(x, self.sigma, 8, stream))
        return {
            "clean": correct_predictions(model(x), y),
            "noisy": correct_predictions(log_average(z), y),
        }


@dataclass(frozen=True, kw_only=True)
class Gaussian(SmoothingObjective):
    r"""Training under Gaussian noise [Cohen2019].

    .. math:: \frac1m \sum_i \ell(f(x + \delta_i), y)

    [SmoothMix, (4)]; one noise per image, m = 1, in [Cohen2019].
    """

    name = "gaussian"

    noises: int = setting(1, "Noise samples per image, m.", least=1)
    label_smoothing: float = setting(0.0, "Label smoothing.", share=True)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        z = noisy_logits(model, x, draw_noise(x, self.sigma, self.noises, stream))
        correct = correct_predictions(log_average(z.detach()), y)
        return ObjectiveOutput(mean_cross_entropy(z, y, self.label_smoothing), correct)


@dataclass(frozen=True, kw_only=True)
class Stability(SmoothingObjective):
    r"""Stability training [Li2019]: accuracy on the clean image, and the same prediction under
    noise.

    .. math:: \ell(f(x), y) - \lambda \sum_k p_k(x) \log p_k(x + \delta)

    [Li2019, (11)], in the form of the SmoothMix code: the first term is on the *clean* image, and
    the gradient flows through both factors of the second.
    """

    name = "stability"

    weight: float = setting(2.0, "Weight of the noisy term, λ.", fraction=True)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        logits = model(x)
        z = noisy_logits(model, x, draw_noise(x, self.sigma, 1, stream)).squeeze(1)
        instability = -(torch.softmax(logits, dim=1) * torch.log_softmax(z, dim=1)).sum(dim=1)
        return ObjectiveOutput(
            losses.cross_entropy(logits, y) + self.weight * instability, correct_predictions(z, y)
        )


@dataclass(frozen=True, kw_only=True)
class Consistency(SmoothingObjective):
    r"""Consistency regularisation [Jeong2020]: the same prediction under every noise.

    .. math::
        \frac1m\sum_i \ell(f(x+\delta_i), y) + \lambda \frac1m \sum_i \mathrm{KL}(\bar p \,\|\, p_i)
        + \eta H(\bar p)

    [Jeong2020, (8), (9)]; p̄ is the average of the predictions p_i, and the gradient flows through
    it. With `eps` the images are those of the attack of SmoothAdv within that radius, under the
    same noises, as in the official code for "Consistency + SmoothAdv".
    """

    name = "consistency"

    noises: int = setting(2, "Noise samples per image, m.", least=2)
    weight: float = setting(5.0, "Weight of the divergence from the average, λ.", fraction=True)
    eta: float = setting(0.5, "Weight of the entropy.", fraction=True)
    eps: float | None = setting(
        None, "With SmoothAdv: radius of its attack in ℓ2; no attack if not given.", fraction=True
    )
    steps: int = setting(10, "Gradient steps of that attack.", least=1)
    warmup_epochs: int = setting(10, "Epochs over which its radius grows.", least=0)

    def at_epoch(self, epoch: int, epochs: int) -> Self:
        """The radius of this epoch."""
        eps = None if self.eps is None else self.eps * growth(epoch, self.warmup_epochs)
        return dataclasses.replace(self, eps=eps, warmup_epochs=0)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        noise = draw_noise(x, self.sigma, self.noises, stream)
        if self.eps is not None:
            x = smoothed_pgd(
                model,
                x,
                y,
                noise,
                eps=self.eps,
                step_size=2 * self.eps / self.steps,
                steps=self.steps,
                clips_last=True,
            )[-1]
        z = noisy_logits(model, x, noise)
        log_p = torch.log_softmax(z, dim=2)
        average = log_p.exp().mean(dim=1)
        divergence = losses.kl_divergence(log_p, average.unsqueeze(1).expand_as(log_p)).mean(dim=1)
        entropy = -(average * average.clamp_min(1e-20).log()).sum(dim=1)
        loss = mean_cross_entropy(z, y) + self.weight * divergence + self.eta * entropy
        return ObjectiveOutput(loss, correct_predictions(average, y))


@dataclass(frozen=True, kw_only=True)
class MACER(SmoothingObjective):
    r"""MACER [Zhai2020]: maximise the certified radius.

    .. math::
        -\log \bar p_y + \lambda \frac{\sigma}{2}
        \big[\gamma - (\Phi^{-1}(\hat p_1) - \Phi^{-1}(\hat p_2))\big]_{\text{correct, gap} \le
        \gamma}

    [Zhai2020, (9), (10)]: cross-entropy of the averaged probabilities, plus a hinge on the radius
    of the images that are classified correctly. The averages with a hat are of softmax(β·z); p̂₁ ≥
    p̂₂ are the two greatest. In the form of the SmoothMix code: images whose gap exceeds γ or is
    not finite have no hinge, the mean is over all images of the batch, and λ is zero in the first
    epochs ("deferred").
    """

    name = "macer"

    noises: int = setting(16, "Noise samples per image, m.", least=1)
    weight: float = setting(16.0, "Weight of the radius, λ.", fraction=True)
    beta: float = setting(
        16.0, "Inverse temperature of the probabilities in the radius.", positive=True
    )
    gamma: float = setting(8.0, "Gap at which the hinge ends.", positive=True)
    defer: int = setting(0, "First epochs, without the radius.", least=0)

    def at_epoch(self, epoch: int, epochs: int) -> Self:
        """No radius in the deferred epochs."""
        return dataclasses.replace(self, weight=0.0 if epoch < self.defer else self.weight, defer=0)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        z = noisy_logits(model, x, draw_noise(x, self.sigma, self.noises, stream))
        average = torch.softmax(z, dim=2).mean(dim=1)
        loss = -torch.log(average.gather(1, y.unsqueeze(1)).squeeze(1) + 1e-10)
        if self.weight:
            loss = loss + self.weight * self.hinge(z, y)
        return ObjectiveOutput(loss, correct_predictions(average, y))

    def hinge(self, z: Tensor, y: Tensor) -> Tensor:
        """(B, S, K) logits → (B,): σ/2·(γ − gap) where the label leads by a gap of at most γ, else
        0."""
        sharp = torch.softmax(self.beta * z, dim=2).mean(dim=1)
        first, second = sharp.topk(2, dim=1).values.unbind(dim=1)
        with torch.no_grad():
            gap = torch.special.ndtri(first) - torch.special.ndtri(second)
            counted = correct_predictions(sharp, y) & gap.isfinite() & (gap <= self.gamma)
        # Elsewhere a harmless value keeps infinities out of the gradient.
        first, second = (torch.where(counted, p, 0.5) for p in (first, second))
        gap = torch.special.ndtri(first) - torch.special.ndtri(second)
        return torch.where(counted, (self.gamma - gap) * (self.sigma / 2), 0.0)


@dataclass(frozen=True, kw_only=True)
class SmoothAdv(SmoothingObjective):
    r"""SmoothAdv [Salman2019]: adversarial training of the smoothed classifier.

    .. math:: x' = \arg\max_{\|x'-x\|_2 \le \varepsilon} -\log \tfrac1m \sum_i p_y(x' + \delta_i)

    Cross-entropy under noise at x' [SmoothMix, (5), (6)]. As in the official code: ℓ2, no random
    start, step 2·eps/steps, evaluation mode in the attack, the same m noises in attack and loss,
    and a radius that grows linearly over the first epochs. (Where the gradient is exactly zero the
    official code steps at random; here such an image stays.) With `attack="ddn"` x' is the nearest
    misclassified image that DDN [Rony2019] finds, shrunk to the ball.
    """

    name = "smoothadv"

    noises: int = setting(4, "Noise samples per image, m.", least=1)
    eps: float = setting(255 / 256, "Radius in ℓ2, in units of [0, 1] pixels.", fraction=True)
    steps: int = setting(10, "Gradient steps of the attack.", least=1)
    attack: str = setting(
        "pgd", "pgd, or ddn: the nearest misclassified image.", among=("pgd", "ddn")
    )
    gamma: float = setting(0.05, "For ddn: relative change of the norm in a step.", share=True)
    warmup_epochs: int = setting(10, "Epochs over which the radius grows.", least=0)

    def at_epoch(self, epoch: int, epochs: int) -> Self:
        """The radius of this epoch."""
        return dataclasses.replace(
            self, eps=self.eps * growth(epoch, self.warmup_epochs), warmup_epochs=0
        )

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        noise = draw_noise(x, self.sigma, self.noises, stream)
        if self.attack == "ddn":
            x_adv = smoothed_ddn(
                model, x, y, noise, eps=self.eps, steps=self.steps, gamma=self.gamma
            )
        else:
            x_adv = smoothed_pgd(
                model,
                x,
                y,
                noise,
                eps=self.eps,
                step_size=2 * self.eps / self.steps,
                steps=self.steps,
            )[-1]
        z = noisy_logits(model, x_adv, noise)
        return ObjectiveOutput(
            mean_cross_entropy(z, y), correct_predictions(log_average(z.detach()), y)
        )


@dataclass(frozen=True, kw_only=True)
class SmoothMix(SmoothingObjective):
    r"""SmoothMix [SmoothMix]: mixup with adversarial images, against over-confidence near the
    decision boundary.

    .. math::
        L = \tfrac1m\sum_i \ell(f(x+\delta_i), y) + \eta \tfrac1m\sum_i D\big(y^{mix},
        f(x^{mix}+\delta_i)\big), \\ x^{mix} = (1-\lambda)x + \lambda\tilde x, \quad y^{mix} =
        (1-\lambda)\hat F(x) + \lambda/K, \quad \lambda \sim U[0, \tfrac12]

    (7) to (11): x̃ is reached by `steps` steps of length `step_size` that lower the averaged
    probability of the label, in evaluation mode, with the same m noises, and no ball but [0, 1];
    with `max_norm` every iterate is first projected to that ball, then clipped to [0, 1]. With
    `one_step` the first iterate replaces x in the whole formula. In the form `code` (the default;
    the published figures come from it) D is the KL divergence, its target carries gradient, and
    images whose averaged prediction is wrong have no second term; in the form `paper` D is the
    cross-entropy (10) with a fixed target, over all images. η and the radius of `one_step` grow
    linearly over the first epochs.
    """

    name = "smoothmix"
    version = 2  # an attack with `max_norm` is clipped to [0, 1] last

    noises: int = setting(4, "Noise samples per image, m.", least=1)
    steps: int = setting(4, "Gradient steps of the attack, T.", least=1)
    step_size: float = setting(1.0, "Length of a step in ℓ2, α.", fraction=True)
    eta: float = setting(5.0, "Weight of the mixed images.", fraction=True)
    one_step: bool = setting(False, "Train on the first iterate instead of the clean image.")
    one_step_norm: float | None = setting(
        None, "Largest ℓ2 norm of the first step; default: step_size.", fraction=True
    )
    max_norm: float | None = setting(
        None, "Largest ℓ2 norm of the attack; unlimited if not given.", fraction=True
    )
    form: str = setting(
        "code",
        "Variant of the loss: of the official code or of the paper.",
        among=("code", "paper"),
    )
    warmup_epochs: int = setting(10, "Epochs over which eta and one_step_norm grow.", least=0)

    def at_epoch(self, epoch: int, epochs: int) -> Self:
        """The weight and the first step of this epoch."""
        share = growth(epoch, self.warmup_epochs)
        norm = self.step_size if self.one_step_norm is None else self.one_step_norm
        return dataclasses.replace(
            self, eta=self.eta * share, one_step_norm=norm * share, warmup_epochs=0
        )

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory
    ) -> ObjectiveOutput:
        """See :class:`Objective`."""
        noise = draw_noise(x, self.sigma, self.noises, stream)
        iterates = smoothed_pgd(
            model,
            x,
            y,
            noise,
            eps=self.max_norm,
            step_size=self.step_size,
            steps=self.steps,
            clips_last=True,
        )
        if self.one_step:
            norm = self.step_size if self.one_step_norm is None else self.one_step_norm
            x = clip_last(iterates[1], x, norm)
        z = noisy_logits(model, x, noise)
        average = torch.softmax(z, dim=2).mean(dim=1)
        correct = correct_predictions(average, y)
        mixed = self.mixed_loss(model, x, iterates[-1], average, noise, stream)
        if self.form == "code":
            mixed = correct * mixed
        return ObjectiveOutput(mean_cross_entropy(z, y) + self.eta * mixed, correct)

    def mixed_loss(
        self,
        model: nn.Module,
        x: Tensor,
        x_adv: Tensor,
        average: Tensor,
        noise: Tensor,
        stream: Stream,
    ) -> Tensor:
        """(B,) divergence (or cross-entropy) of the mixed images from the mixed targets, averaged
        over the noises."""
        ratio = stream.at("ratio").uniform(high=0.5).to(x.dtype)
        lam = per_example(ratio, x)
        z = noisy_logits(model, (1 - lam) * x + lam * x_adv, noise)
        log_p, ratio = torch.log_softmax(z, dim=2), ratio.to(average.dtype).unsqueeze(1)
        target = ((1 - ratio) * average + ratio / average.shape[1]).unsqueeze(1).expand_as(log_p)
        if self.form == "paper":
            return -(target.detach() * log_p).sum(dim=2).mean(dim=1)
        return losses.kl_divergence(log_p, target).mean(dim=1)
