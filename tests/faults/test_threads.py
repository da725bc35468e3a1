"""Eight threads on one mixture: every output equals the one computed alone, and every flag comes
back."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.attacks import make_attack
from equipoise.attacks.square import Square
from equipoise.core import device, rng
from equipoise.core.modes import inference
from equipoise.core.threat import Threat
from equipoise.evaluation import attack
from equipoise.mixing import GatedClassifier, LogitMap, MixedClassifier, new_gate
from equipoise.models import build
from equipoise.models.layers.tta import TTAClassifier

THREADS = 8
SHAPE, K = (3, 8, 8), 5
KINDS = ("plain", "mapped", "gated", "tta")


@pytest.fixture(autouse=True)
def _switch_threads_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _mixture(kind: str, place: str = "cpu") -> MixedClassifier:
    return _mixture_on_cpu(kind).to(place)


def _mixture_on_cpu(kind: str) -> MixedClassifier:
    g, h = (
        build("cnn_small", num_classes=K, image_shape=SHAPE, seed=seed).eval() for seed in (1, 2)
    )
    if kind == "gated":
        return GatedClassifier(
            g, h, new_gate(g, h, _images(0), width=2), alpha_min=0.2, alpha_max=0.9
        ).eval()
    if kind == "mapped":
        return MixedClassifier(g, h, 0.6, logit_map=LogitMap(2.0, 1.5, -0.3), hard=True).eval()
    return MixedClassifier(g, TTAClassifier(h, 6) if kind == "tta" else h, 0.6).eval()


def _images(number: int, count: int = 3) -> Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(number))


def _in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """`work` of the numbers below `count`, computed in all threads at once."""
    start = threading.Barrier(THREADS)

    def run(thread: int) -> list[tuple[int, Any]]:
        start.wait()
        return [(number, work(number)) for number in range(thread, count, THREADS)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = dict(pair for part in pool.map(run, range(THREADS)) for pair in part)
    return [results[number] for number in range(count)]


def _wrong(work: Callable[[int], Tensor], count: int) -> int:
    expected = [work(number) for number in range(count)]
    return sum(
        not torch.equal(a, b) for a, b in zip(_in_threads(work, count), expected, strict=True)
    )


def _prediction_errors(kind: str, count: int) -> int:
    mixture = _mixture(kind)

    def work(number: int) -> Tensor:
        with torch.no_grad():
            x = _images(number)
            return torch.cat(
                (mixture(x), mixture.predict(x).unsqueeze(1), mixture.alphas(x).unsqueeze(1)), dim=1
            )

    return _wrong(work, count)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions(kind: str) -> None:
    assert _prediction_errors(kind, 48) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_predictions(kind: str) -> None:
    count = 2000
    errors = _prediction_errors(kind, count)
    print(
        f"{kind}: {3 * count} images in {THREADS} threads, {errors} outputs of {count} batches wrong"
    )
    assert errors == 0


def _flags(model: nn.Module) -> list[bool]:
    return [
        *(sub.training for sub in model.modules()),
        *(p.requires_grad for p in model.parameters()),
    ]


def _attack_errors(
    kind: str, name: str, count: int, steps: dict[str, int], place: str = "cpu"
) -> int:
    mixture = _mixture(kind, place)
    mixture.accurate.train()
    mixture.robust.requires_grad_(True)
    flags, tf32 = _flags(mixture), torch.backends.cudnn.allow_tf32
    algorithm = make_attack(name, **steps)

    def work(number: int) -> Tensor:
        x, y = _images(number).to(place), torch.arange(3, device=place) % K
        stream = rng.stream(number, "attack", torch.arange(len(x)))
        return algorithm(mixture, x, y, threat=Threat("linf", 0.1), stream=stream)

    errors = _wrong(work, count)
    assert _flags(mixture) == flags and any(flags) and torch.backends.cudnn.allow_tf32 == tf32
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_attacks(kind: str) -> None:
    assert _attack_errors(kind, "pgd", 16, {"steps": 3}) == 0


def test_attacks_with_faster_copies() -> None:
    """The search of APGD runs on a fused copy, made while other threads use the model."""
    assert _attack_errors("gated", "apgd", 16, {"steps": 3}) == 0


def test_a_suite_on_a_data_set() -> None:
    """Square makes many passes without gradients."""
    mixture = _mixture("mapped")

    def work(number: int) -> Tensor:
        data = _images(number, 4), torch.arange(4) % K
        return attack(
            mixture, data, threat=Threat("linf", 0.1), attack=Square(queries=20), device="cpu"
        ).images

    assert _wrong(work, 8) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pgd", "apgd", "square"])
@pytest.mark.parametrize("kind", KINDS)
def test_many_attacks(kind: str, name: str) -> None:
    count = 160
    errors = _attack_errors(kind, name, count, {"steps": 20})
    print(f"{kind}, {name}: {count} attacks in {THREADS} threads, {errors} wrong")
    assert errors == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pgd", "apgd"])
@pytest.mark.parametrize("kind", ["mapped", "gated"])
def test_attacks_on_a_gpu(kind: str, name: str) -> None:
    """Passes are recorded as CUDA graphs, and verdicts switch TF32 off for the whole process."""
    assert _attack_errors(kind, name, 24, {"steps": 10}, "cuda") == 0


def test_a_copy_made_while_others_predict() -> None:
    mixture, x = _mixture("gated"), _images(1)
    expected = mixture(x)

    def work(number: int) -> Tensor:
        copied: nn.Module = (
            copy.deepcopy(mixture) if number % 2 else pickle.loads(pickle.dumps(mixture))
        )
        with torch.no_grad():
            mixture(x)
            output: Tensor = copied(x)
            return output

    assert all(torch.equal(output, expected) for output in _in_threads(work, 48))


def test_full_precision_is_restored_by_the_last_thread() -> None:
    """Contexts that overlap without being nested, in the order that used to leave TF32 switched
    off."""
    before = torch.backends.cudnn.allow_tf32
    assert before
    first, second = (
        device.full_precision(torch.device("cpu")),
        device.full_precision(torch.device("cpu")),
    )
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        one.submit(first.__exit__, None, None, None).result()
        assert not torch.backends.cudnn.allow_tf32
        other.submit(second.__exit__, None, None, None).result()
    assert torch.backends.cudnn.allow_tf32


def test_overlapping_inference_contexts_restore_the_flags() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential())
    first, second = inference(model), inference(model, model[0])
    with first:
        second.__enter__()
    assert not any(_flags(model))
    second.__exit__(None, None, None)
    assert all(_flags(model))


def test_hooks_leave_with_the_last_mixture() -> None:
    def hooks(*models: nn.Module) -> int:
        return sum(len(sub._forward_hooks) for model in models for sub in model.modules())

    mixture = _mixture("gated")
    assert isinstance(mixture, GatedClassifier)
    g, h = mixture.accurate, mixture.robust
    other, copied = mixture.with_range(0.1, 0.5), copy.deepcopy(mixture)
    assert hooks(g, h) == hooks(copied) == 4
    expected = other(_images(1))
    del mixture
    gc.collect()
    assert hooks(g, h) == 4 and torch.equal(other(_images(1)), expected)
    bases = copied.accurate, copied.robust
    del other, copied
    gc.collect()
    assert hooks(g, h, *bases) == 0
