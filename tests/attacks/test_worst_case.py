"""A list of attacks over a data set: the same answer in any company."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from equipoise import attacks
from equipoise.attacks import Apgd, AttackState, Fab, FunctionAttack, SearchResult, Square, Stage, Targeted, worst_case
from equipoise.attacks.apgd import Ascent
from equipoise.attacks.batch_invariance import indifferent
from equipoise.attacks.cuda_graphs import CudaGraphFunction
from equipoise.attacks.fused import agree, swift
from equipoise.attacks.gradients import GradientSource
from equipoise.attacks.outcome import fresh
from equipoise.attacks.targeted import CANDIDATES, nearest_first, ranked
from equipoise.core import losses
from equipoise.core.checks import InputError
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels

THREAT = Threat("linf", 0.01)
STAGES: list[Stage] = [Apgd("margin", 9), Targeted(1, 12), Targeted(2, 12, within=0.5), Fab(1, 10), Square(60)]
NAMES = [stage.name for stage in STAGES]


class Net(nn.Module):
    """Two convolutions with batch norms, one of them across a skip."""

    def __init__(self, reuse: bool = False) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.head, self.reuse = nn.Linear(280, 6), reuse  # so long a sum depends on the shape of the batch
        for norm in (self.norm1, self.norm2):
            norm.register_buffer("running_mean", torch.rand(8) - 0.5)
            norm.register_buffer("running_var", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        raw = self.first(x)
        out = torch.relu(self.norm1(raw))
        out = out + torch.relu(self.norm2(self.second(out))) + (raw if self.reuse else 0)
        logits: Tensor = self.head(out.flatten(1))
        return logits


def _data(model: nn.Module, count: int = 37) -> Dataset:
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 5, 7), generator=chance, dtype=torch.uint8)
    with torch.no_grad():
        labels = model(pixels(images)).argmax(dim=1)
    labels[::5] = (labels[::5] + 1) % 6  # some are wrong untouched
    return Dataset("made", "test", images, labels, torch.arange(count) + 50, tuple("abcdef"))


@pytest.fixture
def model() -> nn.Module:
    return Net().eval()


def _numbers(outcome: AttackState) -> tuple[list[int], list[int], list[float]]:
    return outcome.broken.tolist(), outcome.predicted.tolist(), outcome.margin.tolist()


@pytest.fixture
def whole(model: nn.Module) -> AttackState:
    return worst_case(STAGES, model, _data(model), threat=THREAT, seed=0)


def test_outcome_is_what_the_model_says(model: nn.Module, whole: AttackState) -> None:
    data = _data(model)
    kept = worst_case(STAGES, model, data, threat=THREAT, seed=0, keep_images=True)
    assert _numbers(kept) == _numbers(whole)
    assert kept.images is not None
    with torch.no_grad():
        z = model(kept.images)
    assert torch.equal(z.argmax(dim=1) != data.labels, ~kept.standing)
    assert torch.equal(z.argmax(dim=1), kept.predicted)
    torch.testing.assert_close(losses.probability_margin(z, data.labels), kept.margin, rtol=0, atol=1e-5)
    assert float((kept.images - pixels(data.images)).abs().max()) <= THREAT.eps
    names = {kept.broken_by(row) for row in range(len(data))}
    assert {None, "clean", "apgd-margin@9"} <= names, "some stand, some fall"
    assert (kept.broken == 0).sum() == 8


@pytest.mark.parametrize("size", [1, 5, 8, 16, 24, 1000])
def test_batch_size_does_not_matter(model: nn.Module, whole: AttackState, size: int) -> None:
    assert _numbers(worst_case(STAGES, model, _data(model), threat=THREAT, seed=0, batch_size=size)) == _numbers(whole)


@pytest.mark.parametrize("world", [2, 3])
def test_shards_do_not_matter(model: nn.Module, whole: AttackState, world: int) -> None:
    data = _data(model)
    for rank in range(world):
        part = worst_case(STAGES, model, data.take(torch.arange(rank, len(data), world)), threat=THREAT, seed=0)
        assert _numbers(part) == tuple(column[rank::world] for column in _numbers(whole))


class Sociable(Net):
    """Answers a little differently in other company, as convolutions on CUDA do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(len(x))
        return super().forward(x) + 0.3 * torch.sin(torch.arange(6.0) * len(x))


def test_shares_of_a_rigid_batch_meet_the_shapes_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA every pass has one shape; a share or a rest with fewer images must not have another."""
    room = sys.modules["equipoise.attacks.worst_case"]._Room
    monkeypatch.setattr(room, "rigid", True)
    model = Sociable().eval()
    monkeypatch.setattr("equipoise.attacks.gradients.swift", lambda model, x: model)
    monkeypatch.setattr("equipoise.attacks.gradients.frozen", lambda model, x: model)
    data = _data(model)
    examples: list[Tensor] = []
    real = GradientSource.__post_init__

    def spied(self: GradientSource) -> None:
        examples.append(self.example)
        real(self)

    monkeypatch.setattr(GradientSource, "__post_init__", spied)

    def run(rows: Tensor) -> AttackState:
        model.seen.clear()
        found = worst_case(STAGES, model, data.take(rows), threat=THREAT, seed=0, batch_size=16, whole=data)
        assert model.seen == {8, 16}, "8 at first, to try the copies"
        return found

    expected = _numbers(run(torch.arange(37)))
    for rows in (torch.arange(0, 37, 2), torch.arange(3, 9), torch.tensor([36])):
        assert _numbers(run(rows)) == tuple([column[row] for row in rows] for column in expected)
    assert all(torch.equal(example, examples[0]) for example in examples), "the precision is tried on the same images"


class KilledError(Exception):
    pass


@pytest.mark.parametrize("fatal", [1, 3, 6])
def test_taken_up_after_a_stop(model: nn.Module, whole: AttackState, fatal: int) -> None:
    data = _data(model)
    known = attacks.worst_case([], model, data.slice(0, 1), threat=THREAT, seed=0)  # any list folds, even none
    assert known.stages == ()
    known = fresh(NAMES, len(data))
    seen: list[tuple[int, int]] = []

    def note(number: int, found: SearchResult) -> None:
        seen.extend((number, job) for job in found.jobs.tolist())
        calls.append(number)
        if len(calls) == fatal:
            raise KilledError

    calls: list[int] = []
    with pytest.raises(KilledError):
        worst_case(STAGES, model, data, threat=THREAT, seed=0, known=known, note=note)
    again = worst_case(STAGES, model, data, threat=THREAT, seed=0, known=known, note=note)
    assert _numbers(again) == _numbers(whole)
    assert len(seen) == len(set(seen)), "no image meets a stage twice"


class Greedy(Net):
    """Has no room for more than `room` images."""

    room = 1000

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_out_of_memory_halves_the_batch() -> None:
    model = Greedy().eval()
    data = _data(model)
    whole = worst_case(STAGES, model, data, threat=THREAT, seed=0)
    model.room = 10
    assert _numbers(worst_case(STAGES, model, data, threat=THREAT, seed=0, batch_size=32)) == _numbers(whole)
    model.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        worst_case(STAGES, model, data, threat=THREAT, seed=0)


def test_out_of_memory_lets_recorded_passes_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for graphs on CUDA: what was recorded for large batches is gone when smaller ones come."""
    held: list[tuple[int, list[int]]] = []
    pools: list[list[int]] = []

    def recording(self: CudaGraphFunction, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        assert inputs[0] is not None
        size = len(inputs[0])
        held.append((size, [kept for kept in self.recorded if isinstance(kept, int)]))
        self.recorded[size] = None
        self.pool.append(size)
        pools.append(self.pool)
        return self.function(*inputs)

    monkeypatch.setattr(CudaGraphFunction, "__call__", recording)
    monkeypatch.setattr(sys.modules["equipoise.attacks.worst_case"]._Room, "rigid", True)

    class GreedyForGradients(Greedy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if torch.is_grad_enabled() else Net.forward(self, x)

    model = GreedyForGradients().eval()
    data = _data(model)
    model.room = 10
    worst_case(STAGES, model, data, threat=THREAT, seed=0, batch_size=32)
    large = [at for at, (size, _) in enumerate(held) if size > 10]
    assert large, "a large batch was tried and failed"
    assert all(max(kept, default=0) <= 10 for _, kept in held[large[-1] + 1 :])
    assert max(pools[-1], default=0) <= 10


def test_what_is_taken_up_must_fit(model: nn.Module) -> None:
    data = _data(model)
    good = fresh(NAMES, len(data))
    for wrong, sentence in (
        (fresh(NAMES[:2], len(data)), "`known` must be of the stages"),
        (fresh(NAMES, 5), r"`known.predicted` must be torch.int64 of shape \(37,\)"),
        (replace(good, margin=good.margin.double()), "`known.margin` must be torch.float32"),
        (replace(good, broken=good.broken + 9), r"`known.broken` must lie in -1..5"),
        (replace(good, images=torch.zeros(1)), "`known.images` must be None"),
        ("outcome.pt", "`known` must be an Outcome"),
    ):
        with pytest.raises(InputError, match=sentence):
            worst_case(STAGES, model, data, threat=THREAT, seed=0, known=wrong)  # type: ignore[arg-type]


def test_stages_that_differ_have_different_names() -> None:
    listed: list[Stage] = [
        Targeted(1, 20), Targeted(1, 20, "distance"), Targeted(2, 20), Targeted(1, 30), Square(50),
        Square(50, share=0.3), Square(50, restart=1), Fab(1), Fab(2), Fab(1, 50), Apgd("ce"), Apgd("dlr"),
        Apgd("ce", restart=1), Apgd("ce", 50)]
    assert len({stage.name for stage in listed}) == len(listed)


def test_order_of_targets_takes_few_bytes_an_image() -> None:
    """A thousand classes must not cost a thousand numbers an image."""
    chance = torch.Generator().manual_seed(0)
    layer = nn.Linear(105, 1000).requires_grad_(False)
    net = nn.Sequential(nn.Flatten(), layer)
    x = torch.rand(6, 3, 5, 7, generator=chance)
    y = torch.arange(6)
    adversary = GradientSource(net, None, None, "model", "fp32", x)
    order = nearest_first(adversary, x, y, stream(0, "s", torch.arange(6)), "l2")
    assert sum(map(len, adversary.memory.values())) <= 6 * 100
    assert torch.equal(order, nearest_first(adversary, x, y, stream(0, "s", torch.arange(6)), "l2"))
    with torch.no_grad():
        z, weight = net(x), layer.weight
    gap = (z.gather(1, y.view(-1, 1)) - z) / (weight[y].unsqueeze(1) - weight).norm(dim=2)  # linear: exact
    candidates = ranked(z, y)[:, :CANDIDATES]
    expected = candidates.gather(1, gap.gather(1, candidates).argsort(dim=1))
    assert torch.equal(order, expected)
    far = Targeted(CANDIDATES + 2, 3, "distance").search(adversary, THREAT)
    assert isinstance(far, Ascent)
    assert torch.equal(far.start(x, y, stream(0, "s", torch.arange(6)))["aim"], ranked(z, y)[:, CANDIDATES + 1])


class Rounded(nn.Module):
    """A network whose answers in bfloat16 are nonsense."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :6] * (1 if not torch.is_autocast_enabled("cpu") else -1)


def test_reduced_precision_must_suit_the_surrogate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.core.device.has_bf16", lambda kind: True)
    x = torch.rand(8, 3, 5, 7, generator=torch.Generator().manual_seed(0))

    class Steady(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :6]

    assert GradientSource(Steady(), Steady(), None, "model", "bf16", x).reduced
    assert not GradientSource(Steady(), Rounded(), None, "model", "bf16", x).reduced
    assert not GradientSource(Rounded(), Steady(), None, "model", "bf16", x).reduced


def test_any_attack_can_be_a_stage(model: nn.Module) -> None:
    met: list[int] = []

    def idle(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream, surrogate: nn.Module | None,
             extra: object) -> Tensor:
        met.extend(stream.index.tolist())
        return x

    data = _data(model)
    outcome = worst_case([FunctionAttack("pgd", partial(attacks.pgd, steps=5)), FunctionAttack("idle", idle)], model, data,
                         threat=THREAT, seed=0)
    standing = data.index[outcome.standing].tolist()
    assert set(met) == set(standing) and not (outcome.broken == 2).any()
    assert (outcome.broken == 1).any()
    with pytest.raises(InputError, match="different names"):
        worst_case([Apgd(), Apgd()], model, data, threat=THREAT, seed=0)


def test_within_leaves_safe_images_out(model: nn.Module) -> None:
    data = _data(model)
    met: list[int] = []

    def note(number: int, found: SearchResult) -> None:
        if number == 2:
            met.extend(found.jobs.tolist())

    first = worst_case([Apgd("margin", 5)], model, data, threat=THREAT, seed=0)
    limit = float(first.margin[first.standing].median())
    worst_case([Apgd("margin", 5), Square(5, within=limit)], model, data, threat=THREAT, seed=0, note=note)
    assert set(met) == set((first.standing & (first.margin < limit)).nonzero().squeeze(1).tolist())


def test_copies_are_compared_where_logits_are_infinite() -> None:
    truth = torch.tensor([[0.0, -torch.inf, 2.0], [1.0, -torch.inf, 0.0]])
    assert agree(truth, truth) and agree(truth + 1e-4, truth)
    assert not agree(truth + 0.1, truth)
    assert not agree(truth.nan_to_num(), truth), "a finite logit is not an infinite one"
    assert not agree(truth, truth.nan_to_num())
    assert not agree(truth * torch.nan, truth)


def test_a_list_as_one_attack_has_batches_of_one_size() -> None:
    """Otherwise an image would round differently when a neighbour is broken."""
    model = Sociable().eval()
    data = _data(model).slice(0, 8)
    model.seen.clear()
    x_adv = attacks.Suite(tuple(STAGES))(model, pixels(data.images), data.labels, threat=THREAT,
                                        stream=stream(0, "a", data.index))
    assert model.seen == {8}
    with torch.no_grad():
        assert 0 < int((model(x_adv).argmax(dim=1) != data.labels).sum()) < 8, "some leave early"


def test_a_list_on_a_large_batch_goes_in_blocks_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is broken, passes have one shape; and none are made for blocks without an image that stands."""
    monkeypatch.setattr(sys.modules["equipoise.attacks.worst_case"], "BLOCK", 3)
    monkeypatch.setattr("equipoise.attacks.gradients.swift", lambda model, x: model)
    model, counts = Sociable().eval(), []
    data = _data(model).slice(0, 8)
    x, chance = pixels(data.images), stream(0, "a", data.index)
    model.seen.clear()
    model.register_forward_hook(lambda module, inputs, output: counts.append(len(inputs[0])))
    x_adv = attacks.Suite(tuple(STAGES))(model, x, data.labels, threat=THREAT, stream=chance)
    assert model.seen == {3, 8}, "the untouched images are looked at together"
    blocks, counts[:] = counts.count(3), []
    labels = data.labels.clone()
    labels[:6] = (labels[:6] + 1) % 6  # broken from the beginning
    fewer = attacks.Suite(tuple(STAGES))(model, x, labels, threat=THREAT, stream=chance)
    assert torch.equal(fewer[6:], x_adv[6:]) and torch.equal(fewer[:6], x[:6])
    assert counts.count(3) < 0.6 * blocks


def test_swift_copy_is_equal_and_leaves_the_model_alone(model: nn.Module) -> None:
    x = pixels(_data(model).images)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    copy = swift(model, x)
    assert copy is not model
    assert not any(isinstance(sub, nn.BatchNorm2d) for sub in copy.modules()), "both are folded"
    torch.testing.assert_close(copy(x), model(x), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_swift_notices_what_must_not_be_folded() -> None:
    model = Net(reuse=True).eval()
    x = pixels(_data(model).images)
    copy = swift(model, x)
    torch.testing.assert_close(copy(x), model(x), rtol=1e-4, atol=1e-4)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(105, 6))
    assert swift(flat, x) is flat


def test_a_claim_counts_only_if_the_model_confirms_it(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that lies claims success everywhere; the verdict stays the model's."""
    class Liar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.honest = model

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = -self.honest(x)
            return out

    monkeypatch.setattr("equipoise.attacks.gradients.swift", lambda model, x: Liar())
    data = _data(model)
    outcome = worst_case([Apgd("margin", 9), Square(20)], model, data, threat=Threat("linf", 1e-4), seed=0,
                         keep_images=True)
    assert outcome.images is not None
    with torch.no_grad():
        assert torch.equal(model(outcome.images).argmax(dim=1) == data.labels, outcome.standing)
    assert outcome.standing.sum() > 20


def test_company_is_noticed_where_it_matters() -> None:
    class Social(nn.Module):
        """Answers by the size of the batch."""

        limit: int

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :6] + (len(x) > self.limit)

    x = pixels(_data(Net().eval()).images)[:8]
    y = torch.zeros(8, dtype=torch.int64)
    for limit, expected in ((8, False), (30, False), (1000, True)):
        model = Social()
        model.limit = limit
        adversary = GradientSource(model, None, None, "model", "fp32", x)
        assert indifferent(adversary, x, y, 64) is expected


def test_memory_holds_one_batch_whatever_the_number_of_images(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def counted(images: Tensor) -> Tensor:
        seen.append(len(images))
        return pixels(images)

    data = _data(model)
    monkeypatch.setattr(sys.modules["equipoise.attacks.worst_case"], "pixels", counted)
    worst_case(STAGES, model, data, threat=THREAT, seed=0, batch_size=8)
    assert max(seen) == 8


def test_progress_tells_images_and_those_standing(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, dict[str, object]]] = []

    class Task:
        def advance(self, amount: int, **facts: object) -> None:
            told.append((amount, facts))

    @contextmanager
    def task(name: str, total: int) -> Iterator[Task]:
        assert total == 37 and name == "attacking"
        yield Task()

    monkeypatch.setattr("equipoise.core.progress.task", task)
    outcome = worst_case(STAGES, model, _data(model), threat=THREAT, seed=0)
    assert sum(amount for amount, _ in told) == 37 and all(amount >= 0 for amount, _ in told)
    assert told[-1][1] == {"standing": f"{int(outcome.standing.sum())}/37"}


class Stepped(nn.Module):
    """Class 1 once the mean pixel reaches 0.55; a tie, which goes to class 0, from 0.53 to there."""

    def forward(self, x: Tensor) -> Tensor:
        bright = torch.floor((x.mean(dim=(1, 2, 3)) - 0.53) / 0.02).clamp(-1, 1)
        return torch.stack([torch.zeros_like(bright), bright], dim=1)


def test_random_search_goes_on_from_a_tie() -> None:
    images = torch.full((3, 1, 6, 7), 128, dtype=torch.uint8)
    data = Dataset("grey", "test", images, torch.zeros(3, dtype=torch.int64), torch.arange(3), ("dark", "bright"))
    outcome = worst_case([Square(500)], Stepped(), data, threat=Threat("linf", 0.1), seed=0)
    assert not bool(outcome.standing.any())


def test_no_images_are_one_sentence(model: nn.Module) -> None:
    none = _data(model).take(torch.arange(0))
    with pytest.raises(InputError, match="at least one image"):
        worst_case([Apgd("ce", 2)], model, none, threat=Threat("linf", 0.1), seed=0)
