"""Attacked images of an evaluation: saved tensors, rounding to bytes, tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from small_models import SmallNet, linear_model, random_images
from torch import Tensor, nn

from equipoise import reporting
from equipoise.attacks import Apgd, Square, Suite
from equipoise.core.arrays import AttackedArrays
from equipoise.core.checks import InputError
from equipoise.core.records import Run, read_rows
from equipoise.core.results import read_summary
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat
from equipoise.data import Dataset, pixels
from equipoise.evaluation import Evaluation, evaluate

THREAT = Threat("linf", 0.02)
SUITE = Suite((Apgd(steps=3), Square(queries=5)), name="short")


def run(out: Path | None, attack: Any = (SUITE, "pgd"), **settings: Any) -> Evaluation:
    data = random_images(labels_of=SmallNet())
    return evaluate(
        {"m": SmallNet().eval(), "n": linear_model().eval()},
        data,
        threat=THREAT,
        attack=attack,
        out=out,
        device="cpu",
        batch_size=4,
        **{"steps": 3, **settings} if "pgd" in attack else settings,
    )


def attack_rows(result: Evaluation, model: str, attack: str) -> list[AttackRow]:
    return [
        row
        for row in result.rows
        if isinstance(row, AttackRow) and (row.model, row.attack) == (model, attack)
    ]


def test_saved_images_are_those_of_the_rows(tmp_path: Path) -> None:
    result, data = run(tmp_path / "run", save_adversarial=True), random_images(labels_of=SmallNet())
    saved = safetensors.torch.load_file(tmp_path / "run" / "adversarial.safetensors")
    assert torch.equal(saved["index"], data.index) and torch.equal(saved["labels"], data.labels)
    clean, networks = pixels(data.images), {"m": SmallNet().eval(), "n": linear_model().eval()}
    for model, network in networks.items():
        worst = torch.load(tmp_path / "run" / f"adversarial-{model}.pt", weights_only=True)
        assert worst.shape == clean.shape and worst.dtype == torch.float32
        for attack in ("short", "pgd"):
            images, rows = saved[f"{model}/{attack}/images"], attack_rows(result, model, attack)
            assert images.dtype == torch.float32
            assert (
                float((images - clean).abs().max()) <= THREAT.eps + 1e-6
                and 0 <= images.min() <= images.max() <= 1
            )
            predicted = network(images).argmax(dim=1).tolist()
            assert (
                predicted
                == saved[f"{model}/{attack}/predicted"].tolist()
                == [row.predicted for row in rows]
            )
        correct = (network(worst).argmax(dim=1) == data.labels).sum()
        assert int(correct) == result.result(model, "worst").count
    assert not (tmp_path / "run" / "adversarial").exists()
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    run(tmp_path / "run", save_adversarial=True)
    assert {
        path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()
    } == before


@pytest.mark.usefixtures("figures_once")
def test_what_only_an_audit_broke_is_saved_as_the_worst_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracies recomputed from the files are those of the table."""
    monkeypatch.setattr("equipoise.evaluation.plan.standard", lambda norm: Suite((Apgd(steps=10),)))
    monkeypatch.setattr(
        "equipoise.evaluation.plan.make_attack", lambda name, **_: Suite((Square(queries=2),))
    )
    data, network = random_images(labels_of=SmallNet()), SmallNet().eval()
    result = evaluate(
        {"m": network},
        data,
        threat=Threat("linf", 0.04),
        out=tmp_path / "run",
        device="cpu",
        audit=1000,
        save_adversarial=True,
    )
    saved = safetensors.torch.load_file(tmp_path / "run" / "adversarial.safetensors")
    worst = torch.load(tmp_path / "run" / "adversarial-m.pt", weights_only=True)
    for metric, images in (("fast", saved["m/fast/images"]), ("worst", worst)):
        assert (
            int((network(images).argmax(dim=1) == data.labels).sum())
            == result.result("m", metric).count
        )
    assert torch.equal(network(saved["m/fast/images"]).argmax(dim=1), saved["m/fast/predicted"])
    assert result.result("m", "fast").count > result.result("m", "worst").count
    page = reporting.report(tmp_path / "run").read_text("utf-8")
    assert "audited by standard" in page and "What it broke counts in robust accuracy" in page


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("attack", [SUITE, "pgd", pytest.param("fast", marks=pytest.mark.slow)])
@pytest.mark.parametrize("after", [1, 3])
def test_a_stopped_run_has_the_same_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Any, after: int
) -> None:
    settings: dict[str, Any] = {"audit": 2} if attack == "fast" else {}
    data = random_images(labels_of=SmallNet())

    def start(name: str) -> None:
        evaluate(
            {"m": SmallNet().eval()},
            data,
            threat=THREAT,
            attack=attack,
            out=tmp_path / name,
            device="cpu",
            batch_size=4,
            save_adversarial=True,
            **settings,
        )

    start("complete")
    append, calls = Run.append, 0

    def stop(self: Run, new: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == after + 2:
            raise StoppedError
        append(self, new)

    monkeypatch.setattr(Run, "append", stop)
    with pytest.raises(StoppedError):
        start("stopped")
    monkeypatch.setattr(Run, "append", append)
    start("stopped")
    for name in ("adversarial.safetensors", "adversarial-m.pt", "rows.jsonl"):
        complete, stopped = (
            (tmp_path / folder / name).read_bytes() for folder in ("complete", "stopped")
        )
        assert complete == stopped, name


def test_images_cannot_be_asked_for_later(tmp_path: Path) -> None:
    run(tmp_path / "run")
    with pytest.raises(
        InputError, match="`save_adversarial` must be given at the first start of a run"
    ):
        run(tmp_path / "run", save_adversarial=True)
    with pytest.raises(InputError, match="`save_adversarial` must come with `out`"):
        run(None, save_adversarial=True)


class Steps(nn.Module):
    """Class 1 above a threshold of the first pixel, which lies between two bytes."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        excess = 1000 * (x[:, 0, 0, 0] - self.threshold / 255)
        return torch.stack([-excess, excess], dim=1)


@pytest.mark.parametrize(("threshold", "survives"), [(100.3, False), (100.7, True)])
@pytest.mark.parametrize("attack", ["pgd", "apgd"])
def test_rounding_to_bytes_can_undo_an_attack(
    threshold: float, survives: bool, attack: str, tmp_path: Path
) -> None:
    """From 100 the attack reaches at most 100.9: rounded that is 101; from 99.4 on it does not
    cross 100.3 by much."""
    start = 100 if survives else 99
    images = torch.full((3, 1, 2, 2), start, dtype=torch.uint8)
    data = Dataset(
        "bytes", "test", images, torch.zeros(3, dtype=torch.int64), torch.arange(3), ("a", "b")
    )
    threat = Threat("linf", (0.9 if survives else 1.4) / 255)
    result = evaluate(
        {"m": Steps(threshold)},
        data,
        threat=threat,
        attack=attack,
        out=tmp_path / "run",
        device="cpu",
        steps=20,
    )
    rows = attack_rows(result, "m", attack)
    assert [row.correct for row in rows] == [False] * 3 and [
        row.broken_as_bytes for row in rows
    ] == [survives] * 3
    assert [(r.model, r.metric, r.count, r.n) for r in result.summary.as_bytes] == [
        ("m", attack, 3 * survives, 3)
    ]
    said = f"m: 0 of 3 images that {attack} broke are still misclassified after rounding" in str(
        result
    )
    assert said != survives, "said only where images are lost"
    assert read_summary(tmp_path / "run").as_bytes == result.summary.as_bytes
    assert [row for row in read_rows(tmp_path / "run") if row.attack == attack] == rows


@pytest.mark.usefixtures("figures_once")
def test_tables_by_class_and_by_stage(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    for model in ("m", "n"):
        own = [item for item in result.by_class if item.model == model]
        assert sum(item.n for item in own) == 11
        assert sum(item.clean for item in own) == result.result(model, "clean").count
        assert sum(item.attacked for item in own) == result.result(model, "worst").count
    clean = {row.index for row in attack_rows(result, "m", "clean") if row.correct}
    for attack in ("short", "pgd"):
        broken = [
            row
            for row in attack_rows(result, "m", attack)
            if not row.correct and row.index in clean
        ]
        counted = [item for item in result.broken_by if (item.model, item.attack) == ("m", attack)]
        assert sum(item.count for item in counted) == len(broken) > 0
        assert all(item.n == len(broken) for item in counted)
    page = reporting.report(tmp_path / "run").read_text(encoding="utf-8")
    assert all(
        words in page
        for words in (
            "Accuracy by class",
            "short/apgd",
            "after rounding to bytes",
            "attacked",
        )
    )
    pictures = AttackedArrays.load(tmp_path / "run")
    assert pictures is not None and 0 < len(pictures.clean) <= 6
    assert float(abs(pictures.attacked - pictures.clean).max()) <= THREAT.eps + 2e-3
    assert (pictures.predicted != pictures.label).any() and not (
        tmp_path / "run" / "adversarial.safetensors"
    ).exists()
