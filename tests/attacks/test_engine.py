"""The driver over a data set: results do not depend on batches, shards, interruptions or memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from attack_models import THREAT, BatchSizeDependent, ConvNet, make_data
from torch import Tensor, nn

from equipoise.attacks import (
    Apgd,
    AttackState,
    Fab,
    SearchResult,
    Square,
    Suite,
    TargetedApgd,
    attack_dataset,
    suite,
)
from equipoise.attacks.engine import Driver, Stage
from equipoise.attacks.search_state import AttackBatch
from equipoise.core import losses, rng
from equipoise.core.checks import InputError
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels

SUITE = Suite(
    (
        Apgd("margin", 9),
        TargetedApgd(12, (1,)),
        TargetedApgd(12, (2,), margin_ratio_below=0.5),
        Fab(10, (1,)),
        Square(60),
    )
)
NAMES = [stage.name for stage in SUITE.stages()]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ConvNet().eval()


@pytest.fixture(scope="module")
def whole(model: nn.Module) -> AttackState:
    return attack_dataset(SUITE, model, make_data(model), threat=THREAT, seed=0)


def _numbers(state: AttackState) -> tuple[list[int], list[int], list[float]]:
    return state.broken_stage.tolist(), state.predicted.tolist(), state.margin.tolist()


def test_state_is_what_the_model_predicts(model: nn.Module, whole: AttackState) -> None:
    data = make_data(model)
    state = attack_dataset(SUITE, model, data, threat=THREAT, seed=0, keep_images=True)
    assert _numbers(state) == _numbers(whole)
    assert state.images is not None
    with torch.no_grad():
        z = model(state.images)
    assert torch.equal(z.argmax(dim=1) != data.labels, ~state.survived)
    assert torch.equal(z.argmax(dim=1), state.predicted)
    torch.testing.assert_close(
        losses.probability_margin(z, data.labels), state.margin, rtol=0, atol=1e-5
    )
    assert float((state.images - pixels(data.images)).abs().max()) <= THREAT.eps


def test_broken_by_names_the_stage(whole: AttackState) -> None:
    names = [whole.broken_by(row) for row in range(37)]
    assert {None, "clean", "apgd-margin@9"} <= set(names), "some survive, some are broken"
    assert names.count("clean") == 8


@pytest.mark.parametrize("size", [1, 5, 8, 24, 1000])
def test_batch_size_does_not_matter(model: nn.Module, whole: AttackState, size: int) -> None:
    state = attack_dataset(SUITE, model, make_data(model), threat=THREAT, seed=0, batch_size=size)
    assert _numbers(state) == _numbers(whole)


@pytest.mark.parametrize(
    ("count", "large_image", "block"), [(37, 36, 16), (12, 36, 12), (20, 35, 8)]
)
def test_passes_on_the_cpu_have_one_size_that_depends_on_the_data_alone(
    count: int, large_image: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network whose logits depend on the batch size gets the same rows with any `batch_size` and
    in any shard."""
    monkeypatch.setattr(suite, "LARGE_IMAGE", large_image)  # the images have 35 pixels
    model = BatchSizeDependent().eval()
    data = make_data(model, count)

    def run(part: Dataset, batch_size: int) -> tuple[list[Any], ...]:
        model.batch_sizes.clear()
        state = attack_dataset(
            SUITE, model, part, threat=THREAT, seed=0, batch_size=batch_size, whole=data
        )
        assert set(model.batch_sizes) == {8, block}, "8 for the example images"
        return _numbers(state)

    expected = run(data, 128)
    for batch_size in (1, 5, 33):
        assert run(data, batch_size) == expected
    rows = torch.arange(1, count, 3)
    assert run(data.take(rows), 2) == tuple([column[row] for row in rows] for column in expected)


@pytest.mark.parametrize(
    ("size", "block"), [(28, 512), (32, 512), (48, 128), (64, 128), (96, 64), (224, 64)]
)
def test_passes_on_a_gpu_have_fewer_large_images(size: int, block: int) -> None:
    images = torch.zeros(1, 3, size, size, dtype=torch.uint8)
    data = Dataset(
        "black", "test", images, torch.zeros(1, dtype=torch.int64), torch.arange(1), ("a", "b")
    )
    assert suite._cuda_block(data) == block


@pytest.mark.parametrize("world", [2, 3])
def test_shards_do_not_matter(model: nn.Module, whole: AttackState, world: int) -> None:
    data = make_data(model)
    for rank in range(world):
        shard = data.take(torch.arange(rank, len(data), world))
        state = attack_dataset(SUITE, model, shard, threat=THREAT, seed=0)
        assert _numbers(state) == tuple(column[rank::world] for column in _numbers(whole))


GROUPED = Suite(
    (
        TargetedApgd(3, (3, 2, 7, 1)),
        Fab(10, (1, 2, 3)),
        Apgd("margin", 4, restarts=2),
        TargetedApgd(12, (1, 2, 3), margin_ratio_below=0.9),
        Square(20),
    )
)


class OneByOne(Suite):
    """The same suite without stages that share batches."""

    def stages(self) -> tuple[Stage, ...]:
        return tuple(replace(stage, group=None) for stage in super().stages())


@pytest.mark.parametrize("size", [3, 16, 100])
def test_stages_that_share_batches_give_what_they_give_one_by_one(
    model: nn.Module, size: int
) -> None:
    arguments: dict[str, Any] = {"threat": Threat("linf", 0.08), "seed": 0, "keep_images": True}
    one_by_one, together = (
        attack_dataset(suite, model, make_data(model, 60), batch_size=size, **arguments)
        for suite in (OneByOne(GROUPED.attacks), GROUPED)
    )
    for name in (
        "broken_stage",
        "predicted",
        "margin",
        "logit_margin",
        "passes",
        "next_stage",
        "images",
    ):
        assert torch.equal(getattr(one_by_one, name), getattr(together, name)), name
    assert len(set(together.broken_stage.tolist())) > 4


def test_stages_that_share_batches_fill_them() -> None:
    model = BatchSizeDependent().eval()
    data = make_data(model, 4)

    def blocks(suite: Suite) -> int:
        stages, driver = suite.stages(), _fixed_size_driver(model, data, slots=16)
        driver.threat = Threat("linf", 1e-6)  # nothing breaks
        model.batch_sizes.clear()
        driver.run(stages, AttackState.new([stage.name for stage in stages], len(data)))
        return model.batch_sizes.count(16)

    attacks = (TargetedApgd(20, (1, 2, 3, 4)),)
    assert blocks(Suite(attacks)) == pytest.approx(blocks(OneByOne(attacks)) / 4, abs=4)


def _fixed_size_driver(model: nn.Module, data: Dataset, slots: int, **options: Any) -> Driver:
    """The driver as `attack_dataset` uses it on CUDA, where every pass has one batch size."""

    def load(rows: Tensor) -> AttackBatch:
        part = data.take(rows)
        return AttackBatch(pixels(part.images), part.labels, rng.stream(0, "attack", part.index))

    return Driver(
        model,
        load,
        load(torch.arange(8) % len(data)),
        threat=Threat("linf", 0.02),
        precision="auto",
        slots=slots,
        **{"block": slots, **options},
    )


def _run_fixed(model: nn.Module, data: Dataset, slots: int, **options: Any) -> AttackState:
    state = AttackState.new(NAMES, len(data))
    _fixed_size_driver(model, data, slots, **options).run(SUITE.stages(), state)
    return state


def test_fixed_batches_have_one_size_for_every_part_of_the_data() -> None:
    """A shard or a rest with fewer images than slots is filled up."""
    model = BatchSizeDependent().eval()
    data = make_data(model)
    expected = _numbers(_run_fixed(model, data, slots=16))
    for rows in (torch.arange(0, 37, 2), torch.arange(3, 9), torch.tensor([36])):
        model.batch_sizes.clear()
        part = _numbers(_run_fixed(model, data.take(rows), slots=16))
        assert part == tuple([column[row] for row in rows] for column in expected)
        assert set(model.batch_sizes) == {8, 16}, "8 for the example images"


def test_fixed_blocks_without_a_surviving_image_are_not_computed() -> None:
    model = BatchSizeDependent().eval()
    data = make_data(model, 8)
    model.batch_sizes.clear()
    first = _run_fixed(model, data, slots=8, block=3)
    blocks = model.batch_sizes.count(3)
    assert set(model.batch_sizes) == {8, 3}
    labels = data.labels.clone()
    labels[:6] = (labels[:6] + 1) % 6  # misclassified clean
    model.batch_sizes.clear()
    second = _run_fixed(model, replace(data, labels=labels), slots=8, block=3)
    assert second.margin[6:].tolist() == first.margin[6:].tolist()
    assert model.batch_sizes.count(3) < 0.6 * blocks


class KilledError(Exception):
    pass


@pytest.mark.parametrize("fatal", [2, 4, 5, 7, 9])
def test_stages_that_share_batches_are_continued(model: nn.Module, fatal: int) -> None:
    """Also where some images have met more stages of a group than others."""
    data, threat = make_data(model, 60), Threat("linf", 0.08)
    expected = attack_dataset(GROUPED, model, data, threat=threat, seed=0, batch_size=16)
    states: list[AttackState] = []

    def on_result(number: int, result: SearchResult, state: AttackState) -> None:
        states.append(state)
        if len(states) == fatal:
            raise KilledError

    with pytest.raises(KilledError):
        attack_dataset(
            GROUPED, model, data, threat=threat, seed=0, batch_size=16, on_result=on_result
        )
    again = attack_dataset(
        GROUPED, model, data, threat=threat, seed=0, batch_size=16, state=copy.deepcopy(states[-1])
    )
    assert _numbers(again) == _numbers(expected)


@pytest.mark.parametrize("fatal", [1, 3, 6])
def test_interrupted_run_is_continued(model: nn.Module, whole: AttackState, fatal: int) -> None:
    data = make_data(model)
    met: list[tuple[int, int]] = []
    states: list[AttackState] = []

    def on_result(number: int, result: SearchResult, state: AttackState) -> None:
        met.extend((number, row) for row in result.rows.tolist())
        states.append(state)
        if len(states) == fatal:
            raise KilledError

    with pytest.raises(KilledError):
        attack_dataset(SUITE, model, data, threat=THREAT, seed=0, on_result=on_result)
    known = copy.deepcopy(states[-1])
    again = attack_dataset(
        SUITE, model, data, threat=THREAT, seed=0, state=known, on_result=on_result
    )
    assert _numbers(again) == _numbers(whole)
    assert len(met) == len(set(met)), "no image meets a stage twice"
    assert _numbers(known) == _numbers(states[fatal - 1]), "the known state is copied, not changed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ("apgd-ce",)}, "`state` must be of the stages"),
        (
            {"predicted": torch.zeros(5, dtype=torch.int64)},
            r"`state.predicted` must be torch.int64 of shape \(37,\)",
        ),
        ({"margin": torch.zeros(37).double()}, "`state.margin` must be torch.float32"),
        ({"broken_stage": torch.full((37,), 8)}, r"`state.broken_stage` must lie in -1..5"),
        ({"images": torch.zeros(1)}, "`state.images` must be None"),
    ],
)
def test_state_of_another_run_is_an_error(
    model: nn.Module, changes: dict[str, Any], message: str
) -> None:
    state = replace(AttackState.new(NAMES, 37), **changes)
    with pytest.raises(InputError, match=message):
        attack_dataset(SUITE, model, make_data(model), threat=THREAT, seed=0, state=state)


def test_something_else_than_a_state_is_an_error(model: nn.Module) -> None:
    with pytest.raises(InputError, match="`state` must be an AttackState"):
        attack_dataset(SUITE, model, make_data(model), threat=THREAT, seed=0, state="state.pt")  # type: ignore[arg-type]


class LittleMemory(ConvNet):
    """Has no memory for more than `limit` images."""

    limit = 1000

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


@pytest.mark.parametrize("suite", [SUITE, GROUPED])
def test_out_of_memory_halves_the_batch(suite: Suite) -> None:
    model = LittleMemory().eval()
    data = make_data(model)
    whole = attack_dataset(suite, model, data, threat=THREAT, seed=0)
    model.limit = 10
    halved = attack_dataset(suite, model, data, threat=THREAT, seed=0, batch_size=32)
    assert _numbers(halved)[:2] == _numbers(whole)[:2]
    torch.testing.assert_close(
        halved.margin, whole.margin, rtol=1e-5, atol=1e-6
    )  # smaller passes round differently
    model.limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        attack_dataset(SUITE, model, data, threat=THREAT, seed=0)


class LittleMemoryForGradients(BatchSizeDependent):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(x) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_out_of_memory_in_a_stage_makes_fixed_batches_smaller() -> None:
    """32, 16, 8: what was recorded for large batches is not used again."""
    model = LittleMemoryForGradients().eval()
    data = make_data(model)
    model.batch_sizes.clear()
    state = _run_fixed(model, data, slots=32)
    clean, after = (
        model.batch_sizes[1:3],
        model.batch_sizes[3:],
    )  # 8 example images, and the clean ones at 32
    assert clean == [32, 32] and set(after) == {8}
    assert bool((state.next_stage[state.survived] == 6).all()), "every stage was run"


def test_a_margin_ratio_leaves_safe_images_out(model: nn.Module) -> None:
    data = make_data(model)
    attacked: list[int] = []

    def on_result(number: int, result: SearchResult, state: AttackState) -> None:
        if number == 2:
            attacked.extend(result.rows.tolist())

    first = attack_dataset(Apgd("margin", 5), model, data, threat=THREAT, seed=0)
    limit = float(first.margin_ratio[first.survived].median())
    attack_dataset(
        Suite((Apgd("margin", 5), Square(5, margin_ratio_below=limit))),
        model,
        data,
        threat=THREAT,
        seed=0,
        on_result=on_result,
    )
    assert set(attacked) == set(
        (first.survived & (first.margin_ratio < limit)).nonzero().squeeze(1).tolist()
    )
    with torch.no_grad():
        clean = losses.signed_margin(model(pixels(data.images)), data.labels)
    torch.testing.assert_close(first.clean_logit_margin, clean)
    assert bool((first.logit_margin <= clean + 1e-5).all())


class LyingCopy(nn.Module):
    """Every copy of this model predicts the opposite as soon as an image has changed."""

    def __init__(self, base: nn.Module, *, lies: bool = False) -> None:
        super().__init__()
        self.base, self.lies = base, lies

    def __deepcopy__(self, memo: dict[int, Any]) -> LyingCopy:
        return LyingCopy(copy.deepcopy(self.base), lies=True).eval()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.base(x)
        if not self.lies:
            return z
        changed = ((x * 255 - (x * 255).round()).abs() > 1e-4).flatten(1).any(dim=1, keepdim=True)
        return torch.where(changed, -z, z)


def test_a_success_counts_only_if_the_model_confirms_it(model: nn.Module) -> None:
    """The faster copy claims success everywhere; the verdict stays the model's."""
    lying, data = LyingCopy(model).eval(), make_data(model)
    state = attack_dataset(
        Suite((Apgd("margin", 9), Square(20))),
        lying,
        data,
        threat=Threat("linf", 1e-4),
        seed=0,
        keep_images=True,
    )
    assert state.images is not None
    with torch.no_grad():
        assert torch.equal(model(state.images).argmax(dim=1) == data.labels, state.survived)
    assert state.survived.sum() > 20


class CountingDataset(Dataset):
    """Remembers how many images were taken at a time."""

    def take(self, rows: Tensor) -> Dataset:
        taken.append(len(rows))
        return super().take(rows)


taken: list[int] = []


def test_memory_holds_one_batch_whatever_the_number_of_images(model: nn.Module) -> None:
    data = make_data(model)
    taken.clear()
    counting = CountingDataset(
        data.name, data.split, data.images, data.labels, data.index, data.classes
    )
    attack_dataset(SUITE, model, counting, threat=THREAT, seed=0, batch_size=8)
    assert max(taken) == 16, "one pass on the CPU"


def test_progress_counts_decided_images_and_those_that_are_robust(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, dict[str, object]]] = []
    stages: list[int] = []  # the number of the stage at each update but the last
    broken: list[int] = []  # how many images were broken then

    class Stage:
        def advance(self, amount: int, **values: object) -> None:
            shown.append((amount, values))

    @contextmanager
    def stage(name: str, total: int) -> Iterator[Stage]:
        assert total == 37 and name == "attacking"
        yield Stage()

    def on_result(number: int, result: SearchResult, state: AttackState) -> None:
        stages.append(number)
        broken.append(int((~state.survived).sum()))

    monkeypatch.setattr("equipoise.core.progress.stage", stage)
    state = attack_dataset(
        SUITE, model, make_data(model), threat=THREAT, seed=0, on_result=on_result
    )
    done = torch.tensor([amount for amount, _ in shown]).cumsum(0).tolist()
    assert done == sorted(done) and done[-1] == 37 and len(done) == len(stages) + 1
    early = [place for place, number in enumerate(stages) if number < len(NAMES)]
    assert early and all(done[place] == broken[place] for place in early)
    assert shown[-1][1] == {"robust": f"{int(state.survived.sum())}/37"}


def test_equal_stage_names_and_no_images_are_errors(model: nn.Module) -> None:
    data = make_data(model)
    with pytest.raises(InputError, match="different names"):
        attack_dataset(Suite((Apgd(), Apgd())), model, data, threat=THREAT, seed=0)
    with pytest.raises(InputError, match="at least one image"):
        attack_dataset(Apgd("ce", 2), model, data.take(torch.arange(0)), threat=THREAT, seed=0)


def test_results_hold_what_an_observed_part_returned(model: nn.Module) -> None:
    network, seen = nn.Sequential(model, nn.Softplus()), set[int]()

    def check(number: int, result: SearchResult, state: AttackState) -> None:
        if number:
            seen.add(number)
            assert result.observed is not None
            with torch.no_grad():
                torch.testing.assert_close(result.observed, model(result.images))

    attack_dataset(
        SUITE, network, make_data(model), threat=THREAT, seed=0, observe=model, on_result=check
    )
    assert len(seen) == len(NAMES)
