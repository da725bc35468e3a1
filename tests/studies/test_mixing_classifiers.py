"""The study of certified mixtures, as a user types it and piece by piece."""

from __future__ import annotations

import gzip
import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from equipoise.attacks import MinimumNorm
from equipoise.certification.mixture import SmoothedBase
from equipoise.cli.main import run
from equipoise.core import rows, stats
from equipoise.core.records import read_rows
from equipoise.core.results import SelectedAlpha, read_summary
from equipoise.core.rows import (
    SELECT_ALPHA,
    AttackRow,
    CertificateRow,
    Row,
    by_mixture,
    certificates,
)
from equipoise.reporting.certified_mixtures import (
    certified_and_attacked,
    equal_clean,
    mixtures_by_sigma,
    model_names,
)
from equipoise.reporting.section import read_run
from equipoise.studies import reproduce
from equipoise.studies.mixing_classifiers import (
    CertifiedStudySize,
    MixingClassifiersStudy,
    attack_curves,
    equal_clean_alphas,
)
from equipoise.studies.mixing_classifiers_attack import CONFIRMED, ConfirmedAttack
from equipoise.studies.mixing_classifiers_models import SmoothedModel

WEIGHTS = Path(__file__).parents[1] / "fixtures" / "weights"
DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "mixing-classifiers.md"
ALPHAS = (0.7, 1.0)
TINY = CertifiedStudySize(
    alphas=(0.7,),
    selection_samples=100,
    attack_images=4,
    lipschitz_images=2,
    batch_size=4,
    attack=ConfirmedAttack(MinimumNorm(steps=2, targets=1, restarts=1), copies=2, samples=100),
)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a small study of two networks on digits."""
    monkeypatch.setattr(MixingClassifiersStudy, "sizes", {"smoke": TINY, "full": TINY})
    for side, name in (("accurate", "digits-standard"), ("robust", "digits-adversarial")):
        shutil.copy(WEIGHTS / f"{name}.safetensors", tmp_path / f"{side}.safetensors")
    model = str(tmp_path / "robust.safetensors")
    return [
        "--size",
        "full",
        "--accurate",
        str(tmp_path / "accurate.safetensors"),
        "--robust",
        model,
        "--sigma",
        "0.1,0.2",
        "--empirical",
        model,
        "--data",
        "digits",
        "--count",
        "12",
        "--samples",
        "200",
        "--eps",
        "0.1",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    ]


def test_the_study(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["reproduce", "mixing-classifiers", *arguments]) == 0
    folder = tmp_path / "run"
    printed = capsys.readouterr().out
    assert printed.splitlines()[-2] == f"results: {folder / 'summary.json'}"
    for words in (
        "Accuracy on 12 images",
        "Average certified radius by theorem, 12 images",
        "Median radius of confirmed perturbations, an upper bound, 4 images",
        "Local Lipschitz constants",
    ):
        assert words in printed
    names = ["robust (sigma 0.1)", "robust (sigma 0.2)"]
    selected = read_summary(folder / "select").selected_alphas
    assert {item.model for item in selected} <= {names[1]} and {
        item.baseline for item in selected
    } <= {names[0]}
    certified = certificates(read_rows(folder / "certify"))
    alphas = {*ALPHAS, *(item.alpha for item in selected)}
    assert {(row.model, row.alpha) for row in certified} == {
        (name, alpha) for name in names for alpha in alphas
    }
    assert {row.samples for row in certified} == {300} and len(
        {row.index for row in certified}
    ) == 12
    attacked = [row for row in read_rows(folder / "attack") if isinstance(row, AttackRow)]
    own = {names[0]: set(ALPHAS), names[1]: alphas}
    assert {(row.model, row.alpha) for row in attacked} == {
        (name, a) for name in names for a in own[name]
    }
    radii = {(*row.key[:2], row.alpha): row.radius if row.correct else 0.0 for row in certified}
    assert all(
        row.radius is None or row.radius > radii[row.index, row.model, row.alpha]
        for row in attacked
        if radii[row.index, row.model, row.alpha] > 0
    ), "no perturbation inside a certified radius"
    assert {row.model for row in read_rows(folder / "estimate")} == {
        "accurate",
        "robust",
        "empirical",
    }
    check_tables(folder, certified, attacked)
    before = {path: path.read_bytes() for path in folder.rglob("rows.jsonl")}
    monkeypatch.setattr("equipoise.reporting.report", lambda folder: Path(folder) / "report.html")
    assert run(["reproduce", "mixing-classifiers", *arguments]) == 0, "a finished study is resumed"
    assert (
        before == {path: path.read_bytes() for path in folder.rglob("rows.jsonl")}
        and len(before) == 5
    )
    assert run(["reproduce", "mixing-classifiers", *arguments, "--samples", "300"]) == 2
    assert "plan.samples = 200" in capsys.readouterr().err


def check_tables(folder: Path, certified: list[CertificateRow], attacked: list[AttackRow]) -> None:
    """The tables of the report hold the shares that the rows give."""
    view = read_run(folder)
    section = certified_and_attacked(view)
    assert section is not None and "have a confirmed perturbation inside" in section.prose[-1]
    groups = {(row.model, row.alpha) for row in attacked}
    assert len(section.tables) == len(groups)
    for table in section.tables:
        model, alpha = next(
            key
            for key in groups
            if table.caption.startswith(
                f"σ = {key[0].removeprefix('robust (sigma ').removesuffix(')')} (alpha {key[1]:.4g}):"
            )
        )
        own = [row for row in certified if (row.model, row.alpha) == (model, alpha)]
        broken = {
            row.index: row.radius for row in attacked if (row.model, row.alpha) == (model, alpha)
        }
        for cells in table.body:
            at = float(cells[0].text)
            share = np.mean([row.correct and row.radius >= max(at, 1e-9) for row in own])
            above = np.mean([radius is None or radius > at for radius in broken.values()])
            same = np.mean(
                [row.correct and row.radius >= max(at, 1e-9) for row in own if row.index in broken]
            )
            assert (
                cells[4].text == f"{100 * share:.1f} %" and cells[5].text == f"{100 * above:.1f} %"
            )
            assert float(cells[6].text.replace("−", "-")) == pytest.approx(
                100 * (above - same), abs=0.051
            )
    assert [table.caption.split(":")[0] for table in section.tables] == sorted(
        table.caption.split(":")[0] for table in section.tables
    ), "in order of sigma and alpha"
    assert (equal_clean(view) is not None) == bool(read_summary(folder / "select").selected_alphas)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--sigma": None}, "`sigma` must be given for the full size"),
        ({"--sigma": "0.1,0.1"}, "`robust` must be different models or have different sigmas"),
        ({"--sigma": "0.1,-1"}, "`sigma` must be positive"),
        ({"--robust": "again"}, "`sigma` must be one for each of the 2 robust models, got 3"),
        ({"--part": "attack"}, "`part` must come after the part certify"),
        ({"--samples": "99"}, "`samples` must be"),
    ],
)
def test_mistakes(
    change: dict[str, str | None],
    message: str,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in change.items():
        if value is None:
            at = arguments.index(name)
            del arguments[at : at + 2]
        elif value == "again":
            arguments += [
                "--robust",
                arguments[arguments.index("--robust") + 1],
                "--sigma",
                "0.1,0.2,0.3",
            ]
        else:
            arguments += [name, value]
    assert run(["reproduce", "mixing-classifiers", *arguments]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run" / "certify").exists()


def test_one_smoothed_model_has_nothing_to_select(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.reporting.report", lambda folder: Path(folder))
    reproduce(
        "mixing-classifiers",
        size="full",
        accurate=arguments[3],
        robust=[arguments[5]],
        sigma=0.2,
        data="digits",
        count=4,
        samples=100,
        parts=["certify"],
        device="cpu",
        out=tmp_path / "run",
    )
    assert read_summary(tmp_path / "run" / "select").selected_alphas == ()
    assert {row.alpha for row in read_rows(tmp_path / "run" / "certify")} == set(ALPHAS)


def selection_row(model: str, index: int, *, top: int, accurate: int, gap: float) -> CertificateRow:
    return CertificateRow(
        index=index,
        model=model,
        attack=SELECT_ALPHA,
        alpha=1.0,
        label=0,
        predicted=top,
        correct=top == 0,
        radius=0.1,
        lower=0.6,
        samples=10,
        top=top,
        answer=top,
        sigma=0.1,
        accurate=accurate,
        gap=gap,
    )


def test_alphas_of_equal_clean_accuracy() -> None:
    """The noisy model is wrong on three of four images, of which the accurate one rescues those
    with small gaps."""
    selection = [
        selection_row("quiet (sigma 0.1)", i, top=int(i > 1), accurate=0, gap=0.2) for i in range(4)
    ]
    selection += [
        selection_row("noisy (sigma 0.5)", i, top=int(i > 0), accurate=0, gap=gap)
        for i, gap in enumerate((0.0, 0.25, 0.5, 0.9))
    ]
    smoothed = [
        SmoothedModel("quiet", nn.Identity(), 0.1),
        SmoothedModel("noisy", nn.Identity(), 0.5),
    ]
    (item,) = equal_clean_alphas(selection, smoothed)
    assert (item.model, item.baseline, item.target, item.clean_estimate) == (
        "noisy (sigma 0.5)",
        "quiet (sigma 0.1)",
        0.5,
        0.5,
    )
    assert item.alpha == pytest.approx(1 / 1.25) and item.alpha < 1 / 1.25, (
        "just enough for the gap of 1/4"
    )
    perfect = [replace(row, top=0) for row in selection[:4]] + [
        replace(row, accurate=1) for row in selection[4:]
    ]
    assert equal_clean_alphas(perfect, smoothed) == (), "no alpha reaches the accuracy"


def test_the_selected_alpha_of_an_older_folder_has_no_baseline() -> None:
    item = SelectedAlpha(
        model="m", alpha=0.7, sigma=0.5, target=0.8, clean_estimate=0.8, low=0.7, high=0.9, n=100
    )
    assert item.baseline is None


def attack_row(index: int, alpha: float, radius: float) -> AttackRow:
    return AttackRow(
        index=index,
        model="m",
        attack=CONFIRMED,
        alpha=alpha,
        label=0,
        correct=False,
        radius=radius,
        max_radius=2.0,
    )


def test_curves_of_alphas_that_agree_to_four_digits() -> None:
    curves = attack_curves([attack_row(0, 0.81231, 0.5), attack_row(0, 0.81234, 1.5)])
    assert [(curve.model, curve.median) for curve in curves] == [
        ("m (alpha 0.81231)", 0.5),
        ("m (alpha 0.81234)", 1.5),
    ]


def test_names_of_smoothed_models() -> None:
    """By sigma, the same in every table of a run and in its order; by network where that does not
    distinguish them."""
    models = {"runs/a/last (sigma 0.5)": 0.5, "b/last (sigma 0.25)": 0.25, "b/last (sigma 1)": 1.0}
    noisy = [
        replace(
            selection_row(model, 0, top=0, accurate=0, gap=0.0),
            attack="certify",
            alpha=alpha,
            sigma=sigma,
        )
        for alpha in (1.0, 0.7)
        for model, sigma in models.items()
    ]
    assert list(model_names(mixtures_by_sigma(noisy)).values()) == ["σ = 0.25", "σ = 0.5", "σ = 1"]
    assert [alpha for _, alpha in mixtures_by_sigma(noisy)] == 3 * [0.7, 1.0]
    same = [replace(row, sigma=0.5) if row.sigma == 0.25 else row for row in noisy]
    assert set(model_names(mixtures_by_sigma(same)).values()) == {
        "a/last (sigma 0.5)",
        "b/last (sigma 0.25)",
        "σ = 1",
    }


def kept_rows(name: str, part: str) -> list[Row]:
    """Rows that stand beside the results page."""
    packed = DOCUMENT.with_suffix("") / name / part / "rows.jsonl.gz"
    return [
        rows.parse(line, "row")
        for line in gzip.decompress(packed.read_bytes()).decode().splitlines()
    ]


def documented_table(head: str) -> list[list[str]]:
    """The cells of the table whose head ends with this."""
    lines = DOCUMENT.read_text("utf-8").split(f"{head} |\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip().removesuffix(" %") for cell in line.split("|")[1:-1]] for line in lines]


def test_the_documented_digits() -> None:
    certified, attacked = kept_rows("digits", "certify"), kept_rows("digits", "attack")
    bases = {own[0].sigma: SmoothedBase.of_rows(own) for own in by_mixture(certified).values()}
    broken = {
        (row.model, row.alpha, row.index): row.radius
        for row in attacked
        if isinstance(row, AttackRow)
    }
    table = documented_table("gap, points")
    assert len(table) == 10
    for cells in table:
        sigma, alpha, radius, *numbers = map(float, cells)
        base, name = bases[sigma], f"gaussian-{sigma:g} (sigma {sigma:g})"
        own = [
            base.radius(alpha, theorem) >= radius for theorem in ("3.5", "lipschitz", "A.2", "ours")
        ]
        index = [row.index for row in certificates(certified, name) if row.alpha == 1]
        on = [i for i, image in enumerate(index) if (name, alpha, image) in broken]
        left = [(value := broken[name, alpha, index[i]]) is None or value > radius for i in on]
        assert len(index) == 240 and len(on) == 60
        expected = [*map(np.mean, own), np.mean(left), np.mean(left) - own[-1][on].mean()]
        assert numbers == pytest.approx([100 * float(share) for share in expected], abs=0.0501), (
            cells
        )


def documented_bases(name: str) -> dict[float, SmoothedBase]:
    """The kept votes of every smoothed model, by sigma."""
    return {
        own[0].sigma: SmoothedBase.of_rows(own)
        for own in by_mixture(kept_rows(name, "certify")).values()
    }


@pytest.fixture(scope="module")
def full_size() -> dict[float, SmoothedBase]:
    return documented_bases("cifar10")


def check_comparison(table: list[list[str]], bases: dict[float, SmoothedBase]) -> None:
    for theorem, sigma, alpha, radius, official, ours, difference, sharper in table:
        for name, value in ((theorem, ours), ("ours", sharper)):
            share = (bases[float(sigma)].radius(float(alpha), name) >= float(radius)).mean()
            assert float(value) == pytest.approx(100 * share, abs=0.0501), (
                theorem,
                sigma,
                alpha,
                radius,
            )
        assert float(difference.partition(" ")[0].replace("−", "-")) == pytest.approx(
            float(ours) - float(official)
        )


def test_the_documented_comparison_with_the_official_figures(
    full_size: dict[float, SmoothedBase],
) -> None:
    head = "radius | official | ours | difference (standard error) | our radius"
    few, table = documented_bases("cifar10-40-images"), documented_table(f"| theorem | α | {head}")
    assert len(few[0.5].labels) == 40 and len(table) == 13
    check_comparison([[theorem, "0.5", *cells] for theorem, *cells in table], few)
    table = documented_table(f"| theorem | σ | α | {head}")
    assert {len(base.labels) for base in full_size.values()} == {1000} and len(table) == 33
    check_comparison(table, full_size)


def test_the_documented_average_radii(full_size: dict[float, SmoothedBase]) -> None:
    table = documented_table("| σ | α | Theorem 3.5 | 3.5, smallest constant | Theorem A.2 | ours")
    assert len(table) == 12
    for sigma, alpha, *values in table:
        radii = [
            full_size[float(sigma)].radius(float(alpha), name)
            for name in ("3.5", "lipschitz", "A.2", "ours")
        ]
        assert list(map(float, values)) == pytest.approx(
            [own.mean() for own in radii], abs=0.000501
        ), (sigma, alpha)


def test_the_documented_mixtures_of_equal_clean_accuracy(
    full_size: dict[float, SmoothedBase],
) -> None:
    at = (0.25, 0.5, 0.75, 0.85, 1.0, 1.25, 1.5, 1.75)
    table = documented_table(f"| | clean, estimate | {' | '.join(f'{radius:g}' for radius in at)}")
    packed = (DOCUMENT.with_suffix("") / "cifar10" / "certify" / "run.toml.gz").read_bytes()
    alphas = tomllib.loads(gzip.decompress(packed).decode())["identity"]["plan"]["alphas"]
    assert len(table) == 8
    for name, *values in table:
        sigma, _, rest = name.removeprefix("σ = ").replace(" alone", ", α = 1").partition(", α = ")
        short, _, theorem = rest.partition(", ")
        alpha = min(alphas, key=lambda own: abs(own - float(short)))
        base = full_size[float(sigma)]
        radii = base.radius(alpha, theorem.removeprefix("Theorem ") or "ours")
        expected = [base.correct(alpha).mean(), *((radii >= radius).mean() for radius in at)]
        assert list(map(float, values)) == pytest.approx(
            [100 * share for share in expected], abs=0.0501
        ), name


@pytest.mark.parametrize("network", ["standard", "gaussian_sigma050", "pgd_at_linf8"])
def test_the_documented_lipschitz_constants(network: str) -> None:
    kept = DOCUMENT.with_suffix("") / "lipschitz-24-images" / "estimate" / "rows.jsonl.gz"
    values = [
        row["lipschitz"]
        for row in map(json.loads, gzip.decompress(kept.read_bytes()).splitlines())
        if row.get("model") == f"cifar10_resnet18_{network}.safetensors"
    ]
    mean = stats.mean(values)
    assert len(values) == 24
    assert (
        f"| {mean.value:.2f} [{mean.low:.2f}, {mean.high:.2f}], test images 0–23 |"
        in DOCUMENT.read_text()
    )
