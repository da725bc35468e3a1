from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import reporting
from equipoise.attacks import Apgd, Suite, pgd
from equipoise.core import records, summary
from equipoise.core.checks import InputError
from equipoise.core.records import Run
from equipoise.core.rng import Stream
from equipoise.core.threat import Threat
from equipoise.data import Dataset
from equipoise.evaluation import Attack, Conditions, Job, attacked, begin, evaluate, judge, untouched

CONDITIONS = Conditions(Threat("linf", 0.05), torch.device("cpu"), batch_size=4)
ATTACKS: dict[str, Attack] = {"pgd": partial(pgd, steps=3)}


def _data(count: int = 11) -> Dataset:
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 5, 7), generator=chance, dtype=torch.uint8)
    return Dataset("made", "test", images, torch.randint(6, (count,), generator=chance), torch.arange(count) + 50,
                   tuple("abcdef"))


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(105, 6))


def _run(out: Path, conditions: Conditions = CONDITIONS, attacks: dict[str, Attack] = ATTACKS) -> list[records.Row]:
    return evaluate({"m": _model()}, _data(), attacks=attacks, conditions=conditions, out=out)


def test_results_count_what_the_rows_say(tmp_path: Path) -> None:
    data, model = _data(), _model()
    results = _run(tmp_path / "run")
    clean = float((model(data.images.float() / 255).argmax(1) == data.labels).float().mean())
    assert summary.value(results, "m", "clean") == pytest.approx(clean)
    assert summary.value(results, "m", "worst") == summary.value(results, "m", "pgd") <= clean
    rows = records.read(tmp_path / "run")
    assert [row["index"] for row in rows if row["attack"] == "clean"] == list(range(50, 61))
    assert all(row["correct"] == (row["predicted"] == row["label"]) for row in rows)
    assert all((row["margin"] > 0) == row["correct"] for row in rows)
    assert records.summary(tmp_path / "run")["results"] == json.loads(json.dumps(results))
    assert _run(tmp_path / "run") == results, "a finished run is read, not repeated"


class Rounding(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base(x)
        return logits.round()


def test_symptoms_of_any_attack_stand_in_the_summary(tmp_path: Path) -> None:
    """Plain attacks too; gradients are looked at where the attack takes them."""
    dead = Rounding(_model())
    attacks: dict[str, Attack] = {"pgd": partial(pgd, steps=3), "helped": partial(pgd, steps=3, surrogate=_model())}
    evaluate({"m": dead}, _data(), attacks=attacks, conditions=CONDITIONS, out=tmp_path / "run")
    told = {(row["attack"], row["name"]): row for row in records.summary(tmp_path / "run")["symptoms"]}
    names = {"train mode", "randomness", "batch-size dependence", "probabilities for logits", "infinite logits",
             "vanishing gradients", "accuracy rises with budget"}
    assert set(told) == {(attack, name) for attack in attacks for name in names}
    assert told["pgd", "vanishing gradients"]["alarm"] and not told["helped", "vanishing gradients"]["alarm"]
    page = reporting.write(tmp_path / "run").read_text(encoding="utf-8")
    assert "Symptoms" in page and "vanishing gradients (m, pgd)" in page


def test_symptoms_are_measured_on_as_many_images_as_fit(tmp_path: Path) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = _model()

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            logits: Tensor = self.base(x)
            return logits

    evaluate({"m": Small()}, _data(), attacks=ATTACKS, conditions=CONDITIONS, out=tmp_path / "run")
    assert len(records.summary(tmp_path / "run")["symptoms"]) == 7


class KilledError(Exception):
    pass


@pytest.mark.parametrize("fatal", [1, 2, 3])
def test_killed_and_repeated_gives_the_same_rows(tmp_path: Path, fatal: int) -> None:
    whole = _run(tmp_path / "whole")
    calls = []

    def dying(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        calls.append(len(x))
        if len(calls) == fatal:
            raise KilledError
        return pgd(model, x, y, threat=threat, stream=stream, steps=3)

    with pytest.raises(KilledError):
        _run(tmp_path / "run", attacks={"pgd": dying})
    before = len(calls)
    assert _run(tmp_path / "run", attacks={"pgd": dying}) == whole
    assert len(calls) - before == 3 - (fatal - 1), "what was done is not done again"
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == (tmp_path / "whole" / "rows.jsonl").read_bytes()


@pytest.mark.parametrize("size", [1, 3, 50])
def test_batch_size_does_not_matter(tmp_path: Path, size: int) -> None:
    whole = _run(tmp_path / "whole")
    other = _run(tmp_path / "run", Conditions(CONDITIONS.threat, CONDITIONS.device, batch_size=size))
    assert other == whole


def test_another_model_or_threat_is_another_run(tmp_path: Path) -> None:
    _run(tmp_path / "run")
    with pytest.raises(InputError, match=r"threat\.eps"):
        _run(tmp_path / "run", Conditions(Threat("linf", 0.1), CONDITIONS.device))
    with pytest.raises(InputError, match=r"models\.m"):
        evaluate({"m": _model(1)}, _data(), attacks=ATTACKS, conditions=CONDITIONS, out=tmp_path / "run")
    settings: list[dict[str, Any]] = [{"steps": 4}, {"steps": 3, "step_size": 0.1},
                                      {"steps": 3, "surrogate": _model(1)}]
    for other in (partial(pgd, **setting) for setting in settings):
        with pytest.raises(InputError, match=r"attacks\.m, pgd"):
            _run(tmp_path / "run", attacks={"pgd": other})
    assert _run(tmp_path / "run", attacks={"pgd": partial(pgd, steps=3, restarts=1)}), "a default may be said"


def test_out_of_memory_halves_the_batch(tmp_path: Path) -> None:
    sizes = []

    def greedy(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
        sizes.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return pgd(model, x, y, threat=threat, stream=stream, steps=3)

    assert _run(tmp_path / "run", attacks={"pgd": greedy}) == _run(tmp_path / "whole")
    assert max(sizes) == 4 and sum(size for size in sizes if size <= 2) == 11


@pytest.mark.parametrize("attack", [partial(pgd, steps=3), Suite((Apgd("margin", 3),))])
def test_a_witness_is_shown_what_is_judged(tmp_path: Path, attack: Attack) -> None:
    def witness(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, list[int]]:
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"said": model(x).argmax(dim=1).tolist(), "asked": y.tolist()}

    run = Run(tmp_path / "run", {"verb": "test"}, {})
    attacked(Job("m", _model(), "mine", attack, 0.5), _data(), run, CONDITIONS, witness)
    rows = run.finish()
    assert [row["index"] for row in rows] == list(range(50, 61))
    assert all((row["said"], row["asked"]) == (row["predicted"], row["label"]) for row in rows)
    assert list(rows[0])[-4:] == ["margin", "said", "asked", "alpha"], "and nothing of the stages of a list"


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = evaluate({"m": _model()}, _data(), attacks=ATTACKS, conditions=CONDITIONS)
    assert len(results) == 3 and list(tmp_path.iterdir()) == []


def test_subjects_with_alpha_have_rows_of_their_own(tmp_path: Path) -> None:
    subjects = [Job("mixed", _model(seed), "clean", untouched, alpha) for seed, alpha in ((0, 0.1), (1, 0.2))]
    run = begin(tmp_path / "run", subjects, _data(), CONDITIONS)
    results = judge(subjects, _data(), CONDITIONS, run)
    assert [row["alpha"] for row in results] == [0.1, 0.2]
    assert {row["n"] for row in results} == {11}


class Tuple(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x.flatten(1)[:, :6], 3


def _cheat(model: nn.Module, x: Tensor, y: Tensor, *, threat: Threat, stream: Stream) -> Tensor:
    return 1 - x


@pytest.mark.parametrize(
    ("named", "attacks", "message"),
    [
        ({}, {}, "at least one model"),
        ({"m": nn.Conv2d(3, 6, 1)}, {}, "`logits of m` must have shape"),
        ({"m": Tuple()}, {}, "`m` must answer with one tensor, got 'tuple'"),
        ({"m": nn.Linear(9, 6)}, {}, r"`m` must take images of shape \(3, 5, 7\), but raised RuntimeError"),
        ({"m": nn.Sequential(nn.Flatten(), nn.Linear(105, 3))}, {}, "`m` must have as many classes as made, 6, got 3"),
        ({"m": _model()}, {"clean": untouched}, "not use the name clean"),
        ({"m": _model()}, {"worst": untouched}, "not use the name worst"),
        ({"m": _model()}, {"cheat": _cheat}, "`cheat` must stay within"),
    ],
)
def test_bad_models_and_attacks(named: dict[str, nn.Module], attacks: dict[str, Attack], message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(named, _data(), attacks=attacks, conditions=CONDITIONS)


def test_images_that_stand_twice() -> None:
    with pytest.raises(InputError, match="`images` must have an index each"):
        evaluate({"m": _model()}, _data().take(torch.tensor([0, 1, 1])), attacks={}, conditions=CONDITIONS)
