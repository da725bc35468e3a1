"""Results in a notebook: escaped, without scripts, with the numbers of the results."""

from __future__ import annotations

import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.core import format
from equipoise.core.notebook import NotebookResult
from equipoise.fitting import Fit
from equipoise.reporting import notebook

THREAT = eq.Threat("linf", 0.02)
HOSTILE = "<script>alert(1)</script>"
VOID = {"img", "meta", "br"}


class Parsed(HTMLParser):
    """Tags, attributes, text, and the cells of all tables; the tags must be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [tag] * (tag not in VOID)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th", "small") and "tr" in self.open:
            self.rows[-1][-1] += f" {data.strip()}" if self.open[-1] == "small" else data.strip()


class Brightness(nn.Module):
    """Two classes by the mean brightness, with a steepness."""

    def __init__(self, steepness: float, threshold: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[-steepness], [steepness]]))
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        return (x.mean(dim=(1, 2, 3)) - self.threshold).unsqueeze(1) @ self.weight.T


def images(count: int = 120) -> eq.Dataset:
    pixels = torch.linspace(0.2, 0.8, count).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return eq.Dataset(
        "brightness",
        "test",
        pixels[shuffled],
        (pixels.mean(dim=(1, 2, 3)) > 0.5).long()[shuffled],
        torch.arange(count),
        (HOSTILE, "bright"),
    )


def parse(result: NotebookResult) -> Parsed:
    parsed = Parsed(result._repr_html_())
    assert "script" not in parsed.tags and "iframe" not in parsed.tags and "link" not in parsed.tags
    assert parsed.sources == [], "self-contained"
    assert {"html", "body", "head"}.isdisjoint(parsed.tags), "a fragment"
    return parsed


def cells(result: Any, model: str, *metrics: str) -> list[str]:
    own = [result.result(model, metric) for metric in metrics]
    return [f"{format.value(item)} {format.bounds(item)}" for item in own]


@pytest.mark.parametrize("kept", [False, True])
def test_an_evaluation(tmp_path: Path, kept: bool) -> None:
    models = {HOSTILE: Brightness(20.0, 0.5), "other": Brightness(5.0, 0.45)}
    result = eq.evaluate(
        models,
        images(24),
        threat=THREAT,
        attack="pgd",
        steps=2,
        out=tmp_path / "run" if kept else None,
        device="cpu",
    )
    parsed = parse(result)
    rows = {row[0]: row[1:] for row in reversed(parsed.rows)}
    assert parsed.rows[0] == ["model", "clean accuracy", "robust accuracy", "n"]
    for model in models:
        assert rows[model] == [*cells(result, model, "clean", "worst"), "24"]
    assert HOSTILE in parsed.text and "svg" in parsed.tags and ("not kept" in parsed.text) != kept
    if kept:
        shutil.rmtree(tmp_path / "run")
        assert {row[0]: row[1:] for row in reversed(parse(result).rows)}["other"] == rows[
            "other"
        ], "without its folder"


def test_certificates() -> None:
    result = eq.certify(
        {HOSTILE: Brightness(20.0, 0.5)}, images(8), sigma=0.1, samples=50, n0=10, device="cpu"
    )
    parsed = parse(result)
    rows = {row[0]: row[1:] for row in parsed.rows}
    assert rows["average radius"] == cells(result, HOSTILE, "acr") and rows[
        "certified accuracy at 0.00"
    ] == cells(result, HOSTILE, "certified@0.00")
    assert (
        HOSTILE.rpartition("/")[2] in parsed.text and "svg" in parsed.tags
    )  # shown as the end of a path


def test_fits(tmp_path: Path) -> None:
    data, bases = images(), (Brightness(50.0, 0.5), Brightness(5.0, 0.45))
    result = eq.fit(
        *bases, data, threat=THREAT, lose_at_most=20.0, steps=2, targets=1, pool=1, device="cpu"
    )
    assert isinstance(result, Fit) and result.summary is not None
    parsed = parse(result)
    assert result.promise in parsed.text
    assert format.percent(result.summary.robust_clean) in parsed.text
    assert "This run has no accuracies" not in parsed.text
    plain = parse(eq.fit(*bases, None, threat=THREAT, alpha=0.8))
    assert "plain mixing with alpha 0.8; nothing was fitted" in plain.text


def test_training() -> None:
    result = eq.train(
        "standard", arch="cnn_small", data=images(), epochs=1, batch_size=20, device="cpu"
    )
    rows = {row[0]: row[1:] for row in parse(result).rows}
    best = next(item for item in result.results if item.model == "best")
    assert rows["best"][:1] == [f"{format.value(best)} {format.bounds(best)}"]


def test_every_result_of_a_public_function_is_one() -> None:
    """Of the functions that return results rather than models, data or paths."""
    from equipoise.evaluation import Certification, Evaluation
    from equipoise.training.loop import TrainingResult

    for cls in (Evaluation, Certification, Fit, TrainingResult):
        assert (
            issubclass(cls, NotebookResult)
            and cls.notebook_content is not NotebookResult.notebook_content
        )


def test_without_the_packages_of_figures_the_text_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "missing_packages", lambda: ["altair"])
    result = eq.evaluate(
        {HOSTILE: Brightness(20.0, 0.5)}, images(8), threat=THREAT, attack="pgd", device="cpu"
    )
    parsed = parse(result)
    assert parsed.tags == ["pre"] and HOSTILE in parsed.text
