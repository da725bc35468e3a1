"""The adversaries A to D: who sees what, what the rows tell, and that they resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise import data, models
from equipoise.attacks import Apgd, Square, Suite, pgd
from equipoise.core import records, summary
from equipoise.core.records import Row, Run
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Conditions, Job
from equipoise.evaluation.adaptive import adaptive, white_box, with_extra
from equipoise.evaluation.gate_adversaries import adversaries, joint, leads, witnessed
from equipoise.mixing import GatedClassifier, LogitMap, MixedClassifier, gate_of, mix, new_gate
from equipoise.mixing.gated_surrogate import AlphaPenalty, GatedSurrogate
from equipoise.mixing.oracle_gate import perfect

STAGES = (Apgd("margin", 5), Square(20))


def _gated() -> GatedClassifier:
    g, h = (models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed).eval() for seed in (1, 2))
    model = GatedClassifier(g, h, new_gate(g, h, torch.rand(2, 1, 8, 8), width=4), alpha_min=0.3, alpha_max=0.9)
    return model.eval()


def _images(model: MixedClassifier, count: int = 12) -> Dataset:
    """Digits with the model's own answers as labels, so that there is something to lose."""
    digits = data.load("digits", split="test", count=count)
    with torch.no_grad():
        labels = model(pixels(digits.images)).argmax(dim=1)
    labels[-1] = (labels[-1] + 1) % 10  # and one that is wrong untouched
    return Dataset(digits.name, digits.split, digits.images, labels, digits.index, digits.classes)


def _conditions(batch_size: int = 5) -> Conditions:
    return Conditions(Threat("linf", 0.1), torch.device("cpu"), 0, batch_size)


def _named(model: torch.nn.Module, **more: object) -> dict[str, Job]:
    return {subject.attack: subject for subject in adversaries("m", model, STAGES, steps=3, **more)}  # type: ignore[arg-type]


def test_every_adversary_sees_what_it_should() -> None:
    model = _gated()
    found = _named(model, targets=(0.2, 1.0))
    assert list(found) == ["clean", "A", "B", "C", "D", "std", "rob", "aimed"]
    grey = found["A"].run.keywords["surrogate"]  # type: ignore[attr-defined]
    assert isinstance(grey, GatedSurrogate) and grey.stopped
    assert found["B"].run.keywords["surrogate"] is None  # type: ignore[attr-defined]
    assert found["std"].run.keywords["surrogate"] is model.accurate  # type: ignore[attr-defined]
    assert found["rob"].run.keywords["surrogate"] is model.robust  # type: ignore[attr-defined]
    c, d = found["C"].run, found["D"].run
    assert isinstance(c, Suite) and isinstance(d, Suite)
    assert c.extra is None and isinstance(d.extra, AlphaPenalty) and c.stages == d.stages == STAGES
    assert [s.alpha for s in adversaries("m", model, STAGES, targets=(0.2, 1.0)) if s.attack == "aimed"] == [0.2, 1.0]
    # Without a gate there is nothing that A may not see, and nothing for D to push.
    assert list(_named(MixedClassifier(model.accurate, model.robust, 0.7))) == ["clean", "B", "C", "std", "rob"]
    assert list(_named(model.robust)) == ["clean", "B", "C"]


def test_over_a_map_gradients_come_from_what_stands_in() -> None:
    model = _gated()
    over = model.on(MixedClassifier(model.accurate, model.robust, 0.7, logit_map=LogitMap(2.0, 1.5, 0.1), hard=True))
    found = _named(over)
    for attack in ("C", "D"):
        run = found[attack].run
        assert isinstance(run, Suite) and isinstance(run.surrogate, GatedSurrogate) and run.surrogate.relaxed
        assert [type(stage).__name__ for stage in run.stages] == ["Apgd", "FunctionAttack", "Square"]
    (lowered,) = adaptive(model, Suite(STAGES)).items()
    assert lowered[0] == "adaptive-lowered" and isinstance(lowered[1], Suite) and lowered[1].extra is not None
    assert set(adaptive(over, pgd)) == {"adaptive", "adaptive-lowered"}


def test_c_and_d_are_counted_together() -> None:
    told = [("m", "C", [True, True, False]), ("m", "D", [True, False, True]), ("n", "C", [True, True, False])]
    rows = [{"index": i, "model": model, "attack": attack, "correct": right} for model, attack, found in told
            for i, right in enumerate(found)]
    found = {row["model"]: row["value"] for row in joint(rows, Threat("linf", 0.1))}
    assert found == {"m": pytest.approx(1 / 3), "n": pytest.approx(2 / 3)}


def test_leads_are_over_the_lines_at_equal_accuracy() -> None:
    def told(model: str, clean: int, c: int, d: int | None = None) -> list[Row]:
        reached = {"clean": clean, "C": c} | ({} if d is None else {"D": d})
        return [{"model": model, "attack": attack, "index": i, "correct": i < many} for attack, many in reached.items()
                for i in range(10)]

    rows = [*told("plain", 8, 6), *told("plain, 0.8", 10, 4), *told("plain tea", 10, 10), *told("other", 9, 3),
            *told("gate", 10, 6, 5), *told("gate on it", 9, 7, 7)]
    (found,) = leads(rows, ["gate", "gate on it", "nobody"], ["plain", "other"])
    assert (found["model"], found["versus"], found["n"]) == ("gate", "plain", 10)  # under C and D together, 5 of 10
    assert found["value"] == pytest.approx(0.1)


@pytest.mark.parametrize("hard", [False, True])
def test_rows_tell_alpha_and_the_bound(hard: bool, tmp_path: Path) -> None:
    model: MixedClassifier = _gated()
    if hard:
        assert isinstance(model, GatedClassifier)
        model = model.on(MixedClassifier(model.accurate, model.robust, 0.7, logit_map=LogitMap(2.0, 1.5, 0.1),
                                         hard=True))
    images = _images(model)
    run = Run(tmp_path / "run", {"verb": "test"}, {})
    subjects = adversaries("m", model, STAGES, steps=3, targets=(0.5,))
    for subject in subjects:
        witnessed(subject, images, run, _conditions(12))
    rows = run.finish()
    assert len(rows) == 12 * 8
    assert all(0.3 <= row["weight"] <= 0.9 for row in rows)
    assert all(row["possible"] for row in rows if row["correct"])
    clean = {row["index"]: row for row in rows if row["attack"] == "clean"}
    with torch.no_grad():
        alphas = model.alphas(pixels(images.images))
    torch.testing.assert_close(torch.tensor([clean[i]["weight"] for i in images.index.tolist()]), alphas, atol=1e-5,
                               rtol=1e-4)
    # No fixed alpha does better on the clean images than the bound.
    with torch.no_grad():
        g, h = model.both(pixels(images.images))
    best = max(int((mix(g, h, gate_of(a)).argmax(1) == images.labels).sum()) for a in (0.0, 0.2, 0.5, 0.8, 1.0))
    assert sum(row["possible"] for row in clean.values()) >= best
    results = summary.results(rows, None)
    assert summary.value(results, "m", "C") <= summary.value(results, "m", "clean") < 1


def test_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    model = _gated()
    images = _images(model)
    subject = _named(model)["D"]
    whole = Run(tmp_path / "whole", {"verb": "test"}, {})
    witnessed(subject, images, whole, _conditions())
    cut = Run(tmp_path / "cut", {"verb": "test"}, {})
    witnessed(subject, images.take(torch.arange(5)), cut, _conditions())
    again = Run(tmp_path / "cut", {"verb": "test"}, {})
    witnessed(subject, images, again, _conditions())
    assert again.finish() == whole.finish()
    assert len(records.read(tmp_path / "cut")) == 12


def test_columns_are_of_their_own_images_after_a_cut(tmp_path: Path) -> None:
    """Cut inside a batch and inside a line: the batch is attacked again, and its rows are told once."""
    model = _gated()
    images = _images(model).take(torch.arange(12).flip(0))
    shown: dict[int, Tensor] = {}

    def kept(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        x_adv = pgd(model, x, y, threat=threat, stream=stream, steps=3)
        shown.update(zip(stream.index.tolist(), x_adv, strict=True))
        return x_adv

    subject = Job("m", model, "B", kept)
    witnessed(subject, images, Run(tmp_path / "run", {"verb": "test"}, {}), _conditions())
    part = tmp_path / "run" / "parts" / "0.jsonl"
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:7]) + lines[7][:20])
    for i in images.index[5:].tolist():  # the first batch is not met again
        del shown[i]
    again = Run(tmp_path / "run", {"verb": "test"}, {})
    witnessed(subject, images, again, _conditions())
    assert part.read_text() == "".join(lines)
    rows = {row["index"]: row for row in again.finish()}
    assert len({row["weight"] for row in rows.values()}) > 6, "images that can be told apart"
    for i, y in zip(images.index.tolist(), images.labels, strict=True):
        with torch.no_grad():
            g, h = model.both(shown[i][None])
            weight = float(model.alphas(shown[i][None]))
        assert rows[i]["weight"] == pytest.approx(weight, abs=1e-5)
        assert rows[i]["possible"] == bool(perfect(g, h, y[None]))


def test_out_of_memory_halves_the_batch(tmp_path: Path) -> None:
    model = _gated()
    images, sizes = _images(model), []

    def greedy(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        sizes.append(len(x))
        if len(x) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (x + stream.uniform(*x.shape[1:], low=-threat.eps, high=threat.eps)).clamp(0, 1)

    found = []
    for limit in (12, 3):
        run = Run(tmp_path / str(limit), {"verb": "test"}, {})
        witnessed(Job("m", model, "noise", greedy), images, run, _conditions())
        found.append(run.finish())
    assert sizes == [5, 5, 2, 5, 3, 2, 5, 3, 2, 2]
    for whole, halved in zip(*found, strict=True):
        assert halved == {**whole, "margin": pytest.approx(whole["margin"], abs=1e-5),
                          "weight": pytest.approx(whole["weight"], abs=1e-5)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_adversaries_on_cuda_are_as_strong(tmp_path: Path) -> None:
    """Recorded passes, fewer bits and the extra term find about what the CPU finds."""
    found = []
    for place in ("cpu", "cuda"):
        model = _gated()
        images = _images(model)
        run = Run(tmp_path / place, {"verb": "test"}, {})
        conditions = Conditions(Threat("linf", 0.1), torch.device(place), 0, 12)
        for subject in adversaries("m", model.to(place), STAGES, steps=5, transfer=False):
            witnessed(subject, images, run, conditions)
        found.append({row["metric"]: row["value"] for row in summary.results(run.finish(), None)})
    assert found[0]["clean"] == found[1]["clean"]
    assert all(abs(found[0][attack] - found[1][attack]) <= 2 / 12 for attack in "ABCD")


class _Door(GatedClassifier):
    """g says 1, h says 0, and the gate opens for g where an image is dark."""

    def answers(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.flatten(1).mean(dim=1)
        g, h = torch.zeros(len(x), 10), torch.zeros(len(x), 10)
        g[:, 1], h[:, 0] = 5.0, 0.2
        return g, h, self.scale * (mean - 0.5) + self.shift


@pytest.mark.parametrize("lowered", [False, True])
def test_a_steep_gate_hides_nothing_from_its_adversaries(lowered: bool) -> None:
    base = _gated()
    model = _Door(base.accurate, base.robust, base.network, scale=1000.0, shift=0.0).eval()
    x, y = torch.full((2, 1, 8, 8), 0.7), torch.zeros(2, dtype=torch.long)
    threat, chance = Threat("linf", 0.3), stream(0, "steep", torch.arange(2))
    plain = Suite((Apgd("margin", 10),))
    tried = plain(model, x, y, threat=threat, stream=chance)
    assert (model(tried).argmax(dim=1) == 0).all(), "its own gradient is flat: that is the trap"
    attack = with_extra(plain, AlphaPenalty(model)) if lowered else white_box(model, plain, both=[Apgd("ce", 10)])
    assert (model(attack(model, x, y, threat=threat, stream=chance)).argmax(dim=1) == 1).all()
    gentle = model.with_range(0.0, 1.0, scale=2.0)
    assert not gentle.steep and len(white_box(gentle, plain).stages) == 1, "and a gentle one needs no more"  # type: ignore[attr-defined]
