"""Algorithm 1 against an independent restatement of it: plain loops, written from the paper and its
published code."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from equipoise import data, models
from equipoise.core.checks import InputError
from equipoise.fitting.paper import PUBLISHED, GridSearch, algorithm_1, published_for, top_margins

Array = NDArray[np.float64]


def oracle_margin(z: Array, s: float, p: float, c: float, clamp: str) -> float:
    """Top probability minus runner-up of one image after the map of Eq. (4)."""
    top = sorted(z.tolist(), reverse=True)[:250]
    mean = math.fsum(top) / len(top)
    variance = math.fsum((value - mean) ** 2 for value in top) / (len(top) - 1)
    mapped = []
    for value in z.tolist():
        u = (value - mean) / math.sqrt(variance + 1e-8) + c
        u = {"gelu": u * 0.5 * (1 + math.erf(u / math.sqrt(2))), "relu": max(u, 0.0), "linear": u}[
            clamp
        ]
        mapped.append(s * math.copysign(abs(u) ** p, u) if u else 0.0)
    highest = max(mapped)
    weights = sorted((math.exp(value - highest) for value in mapped), reverse=True)
    return (weights[0] - weights[1]) / math.fsum(weights)


def oracle(
    attacked: Array,
    clean: Array,
    beta: float,
    box: tuple[tuple[float, float], ...],
    clamp: str = "gelu",
    steps: int = 8,
) -> tuple[dict[tuple[int, int, int], float], dict[tuple[int, int, int], float]]:
    """Thresholds and objectives by the places (s, c, p) of eight values each."""
    (s_low, s_high), (p_low, p_high), (c_low, c_high) = box
    cutoffs, objectives = {}, {}
    for i in range(steps):
        s = 10 ** (math.log10(s_low) + i * (math.log10(s_high) - math.log10(s_low)) / (steps - 1))
        for j in range(steps):
            p = p_low + j * (p_high - p_low) / (steps - 1)
            for k in range(steps):
                c = c_low + k * (c_high - c_low) / (steps - 1)
                margins = sorted(oracle_margin(z, s, p, c, clamp) for z in attacked)
                rank = (1 - beta) * (len(margins) - 1)
                low = min(int(rank), len(margins) - 1)
                high = min(low + 1, len(margins) - 1)
                q = margins[low] + (rank - low) * (margins[high] - margins[low])
                reached = [oracle_margin(z, s, p, c, clamp) >= min(q, 1 - 1e-9) for z in clean]
                cutoffs[i, k, j], objectives[i, k, j] = q, sum(reached) / len(reached)
    return cutoffs, objectives


def random_logits(
    classes: int, attacked: int, clean: int, seed: int, scale: float = 1.5
) -> tuple[Array, Array]:
    """Logits whose first class stands out more at attacked points that survive than at clean
    errors."""
    rng = np.random.default_rng(seed)
    logits = [scale * rng.standard_normal((count, classes)) for count in (attacked, clean)]
    for z, lead in zip(logits, (2.0, 0.7), strict=True):
        z[:, 0] = z.max(axis=1) + lead * rng.random(len(z))
    return logits[0].astype(np.float32).astype(np.float64), logits[1].astype(np.float32).astype(
        np.float64
    )


def compare(found: GridSearch, expected: tuple[dict[tuple[int, int, int], float], ...]) -> None:
    """Every threshold, objective, the set of optima, and the selected candidate."""
    cutoffs, objectives = expected
    for place, q in cutoffs.items():
        assert found.q[place] == pytest.approx(q, rel=1e-9, abs=1e-13)
        assert found.objective[place] == objectives[place]
    lowest = min(objectives.values())
    optima = [place for place in sorted(objectives) if objectives[place] == lowest]
    assert found.optima == optima
    stable = [place for place in optima if cutoffs[place] < 1 - found.saturation] or optima
    largest = max(cutoffs[place] for place in stable)
    assert cutoffs[found.best] == pytest.approx(largest, rel=1e-9) and found.best in stable
    s, c, p = found.best
    assert found.candidate == (found.axes[0][s], found.axes[1][p], found.axes[2][c])
    assert found.alpha == pytest.approx(1 / (1 + cutoffs[found.best]), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "classes", "attacked", "clean", "beta"),
    [
        ("cifar10", 3, 7, 4, 0.9),
        ("cifar10", 10, 11, 5, 0.985),
        ("cifar10", 4, 2, 3, 1.0),
        ("cifar100", 30, 4, 2, 0.935),
        ("cifar10", 5, 3, 2, 0.0),
    ],
)
def test_equals_the_restatement(
    name: str, classes: int, attacked: int, clean: int, beta: float
) -> None:
    own = PUBLISHED[name]
    survived, errors = random_logits(classes, attacked, clean, seed=classes + attacked)
    found = algorithm_1(
        torch.from_numpy(survived).float(), torch.from_numpy(errors).float(), beta, own.axes()
    )
    compare(found, oracle(survived, errors, beta, (own.s, own.p, own.c)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_equals_the_restatement_on_more_logits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes = int(rng.choice([3, 7, 10, 20, 100, 300]))
    own, beta = PUBLISHED[published_for(classes)], float(rng.uniform(0.3, 1))
    size = max(4, 600 // classes)
    survived, errors = random_logits(
        classes, size, size // 2, seed, scale=float(rng.uniform(0.3, 5))
    )
    found = algorithm_1(torch.from_numpy(survived), torch.from_numpy(errors), beta, own.axes())
    compare(found, oracle(survived, errors, beta, (own.s, own.p, own.c)))


@pytest.mark.slow
@pytest.mark.reference
def test_equals_the_restatement_on_a_real_model(real_data: Path, real_weights: Path) -> None:
    """The robust ResNet-8 on CIFAR-10: clean errors, and images that one signed-gradient step does
    not break."""
    model = models.load(f"{real_weights}/cifar10_resnet8_pgd_at_linf8.safetensors").eval()
    images = data.load_data("cifar10", data_dir=real_data, count=60)
    x, y = images.images.float() / 255, images.labels
    x.requires_grad_()
    clean = model(x)
    torch.nn.functional.cross_entropy(clean, y).backward()
    with torch.no_grad():
        attacked = model((x + 8 / 255 * x.grad.sign()).clamp(0, 1))  # type: ignore[union-attr]
    survived, errors = attacked[attacked.argmax(1) == y], clean.detach()[clean.argmax(1) != y]
    own = PUBLISHED["cifar10"]
    for beta in (0.985, 0.9):
        found = algorithm_1(survived, errors, beta, own.axes())
        compare(
            found,
            oracle(survived.double().numpy(), errors.double().numpy(), beta, (own.s, own.p, own.c)),
        )


@pytest.mark.parametrize("clamp", ["relu", "linear"])
def test_other_clamps(clamp: str) -> None:
    survived, errors = random_logits(10, 10, 6, seed=3)
    box = ((0.1, 2.0), (1.0, 3.0), (-1.0, 0.0))
    axes = (np.logspace(-1, math.log10(2), 4), np.linspace(1, 3, 4), np.linspace(-1, 0, 4))
    found = algorithm_1(torch.from_numpy(survived), torch.from_numpy(errors), 0.9, axes, clamp)
    compare(found, oracle(survived, errors, 0.9, box, clamp, steps=4))


def test_more_than_250_classes_use_the_largest_logits_for_the_layer_norm() -> None:
    survived, errors = random_logits(300, 5, 3, seed=4)
    box = ((0.01, 0.2), (2.0, 3.0), (-2.0, 0.0))
    axes = (np.array(box[0]), np.array(box[1]), np.array(box[2]))
    found = algorithm_1(torch.from_numpy(survived), torch.from_numpy(errors), 0.9, axes)
    compare(found, oracle(survived, errors, 0.9, box, steps=2))


@pytest.mark.parametrize("name", PUBLISHED)
def test_released_optima_are_points_of_the_grid(name: str) -> None:
    """To the last bit or its neighbour; only the released c for CIFAR-100 is that of a box that
    ended at 0."""
    own, (s, p, c) = PUBLISHED[name], PUBLISHED[name].axes()
    c = np.linspace(-2.5, 0, 8) if name == "cifar100" else c
    released = own.released
    nearest = [
        np.abs(axis / value - 1).min()
        for value, axis in ((released.s, s), (released.p, p), (released.c, c))
    ]
    assert max(nearest) < 4e-16
    assert all(len(axis) == 8 for axis in own.axes())
    assert published_for(own.classes) == name and own.logit_map().clamp == "gelu"


def test_ties_prefer_a_threshold_that_is_not_saturated_then_the_largest() -> None:
    axes = (np.array([1.0, 2.0]), np.array([1.0, 3.0]), np.array([-1.0, 0.0]))
    objective = np.full((2, 2, 2), 0.5)
    q = np.array([[[0.1, 0.3], [1 - 1e-7, 0.3]], [[0.2, 0.9], [0.3, 0.0]]])
    objective[1, 0, 1] = 0.6  # the largest of those that are not saturated is no optimum
    found = GridSearch(axes, q, objective)
    assert (
        found.best == (0, 0, 1) and found.candidate == (1.0, 3.0, -1.0) and len(found.optima) == 7
    )
    assert found.edges() == ["s low", "p high", "c low"]
    saturated = GridSearch(axes, np.full((2, 2, 2), 1.0), objective)
    assert saturated.best == (0, 0, 0) and saturated.alpha == 0.5


def test_saturated_margins_count_from_just_below_one() -> None:
    """With all attacked margins 1, the objective would be 0 for every margin that rounds below
    1."""
    far = torch.tensor([[90.0, 0.0, 0.0], [80.0, 0.0, 1.0]])
    axes = (np.array([100.0]), np.array([4.0]), np.array([0.0]))
    found = algorithm_1(far, far, 0.9, axes)
    assert found.q.item() == 1.0 and found.objective.item() == 1.0 and found.alpha == 0.5


def test_margins_are_those_of_the_top_class() -> None:
    assert top_margins(torch.tensor([[0.0, math.log(3), 0.0]])) == pytest.approx([0.4])


@pytest.mark.parametrize(
    ("attacked", "clean", "sentence"),
    [
        (0, 2, "hold a point that the robust model classifies correctly"),
        (2, 0, "hold an image that the robust model misclassifies"),
    ],
)
def test_nothing_to_fit_on(attacked: int, clean: int, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        algorithm_1(
            torch.zeros(attacked, 3), torch.zeros(clean, 3), 0.9, PUBLISHED["cifar10"].axes()
        )


def test_two_classes() -> None:
    with pytest.raises(InputError, match="`rule` must not be paper with two classes"):
        published_for(2)
