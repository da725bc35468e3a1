"""The study of SmoothMix: its classifiers, their selection, and a small run of all its parts."""

from __future__ import annotations

import gzip
import runpy
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_pair import conditions, study_run
from small_pair import without_report as without_report

from equipoise.cli.main import run
from equipoise.core import config, format
from equipoise.core.records import read_rows
from equipoise.core.results import read_summary
from equipoise.core.rows import CertificateRow, ConfidenceRow
from equipoise.data import Dataset, load_data, mnist
from equipoise.reporting import smoothmix
from equipoise.reporting.section import read_run
from equipoise.studies import results_table
from equipoise.studies.smoothmix import SMOKE, ModelSelection, SmoothMixStudy
from equipoise.studies.smoothmix_models import (
    ABLATIONS,
    DEEP,
    FAST,
    INTERPOLATION,
    METHODS,
    RESNET110,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    StudyModel,
    full_models,
    smoke_models,
)

CONFIGS, BENCHMARKS = (Path(__file__).parents[2] / name for name in ("configs", "benchmarks"))
TINY = replace(
    SMOKE,
    samples=60,
    n0=10,
    every={"digits": 60},
    training_images=64,
    diagnosed=4,
    radii=replace(SMOKE.radii, at=(0.0, 1.0), steps=2, samples=20),
    line=replace(SMOKE.line, steps=2, samples=20),
)


def digits(name: str, split: str) -> Dataset:
    return load_data(name, split)


def tiny_models() -> list[StudyModel]:
    """The smoke classifiers, trained for one epoch."""
    models = smoke_models(digits("digits", "train"), 0)
    return [replace(model, recipe=model.recipe.changed(epochs=1)) for model in models]


def run_study(
    folder: Path, parts: Sequence[str], models: Sequence[StudyModel] | None = None, **selection: Any
) -> Path:
    study = SmoothMixStudy(
        study_run(folder, "smoothmix"),
        tiny_models() if models is None else models,
        TINY,
        conditions(),
        digits,
        ModelSelection(**selection),
    )
    return study.run(parts)


def folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.mark.usefixtures("without_report")
def test_a_part_can_be_run_bit_by_bit(tmp_path: Path) -> None:
    run_study(tmp_path / "run", [TABLE_2], methods=("gaussian",))
    assert (
        folders(tmp_path / "run" / "certificates")
        == folders(tmp_path / "run" / "training")
        == {"digits_gaussian"}
    )
    first = read_summary(tmp_path / "run")
    assert [result.model for result in first.results] == ["digits_gaussian"]
    assert "digits_macer" in first.notes[0] and "digits_gaussian," not in first.notes[0]
    written = (
        (tmp_path / "run" / "training" / "digits_gaussian" / "summary.json").stat().st_mtime_ns
    )
    run_study(tmp_path / "run", [TABLE_2], methods=("gaussian", "smoothmix"))
    assert folders(tmp_path / "run" / "certificates") == {"digits_gaussian", "digits_smoothmix"}
    assert (
        tmp_path / "run" / "training" / "digits_gaussian" / "summary.json"
    ).stat().st_mtime_ns == written
    rows = read_rows(tmp_path / "run" / "certificates" / "digits_smoothmix")
    assert len(rows) == 6 and all(isinstance(row, CertificateRow) for row in rows)


def test_confidences_and_the_report(tmp_path: Path) -> None:
    shown = ("Gaussian", "SmoothMix (η = 1)", "SmoothMix (η = 5)", "η = 4")
    models = [
        replace(model, published=(0.511, 0.5222)) for model in tiny_models() if model.label in shown
    ]
    report = run_study(tmp_path / "run", [TABLE_1, INTERPOLATION, TABLE_2, "figure-6"], models)
    text = report.read_text()
    for words in (
        "Table 1",
        "Figures 2 and 3",
        "Figures 6 and 7",
        "Table 2, Figure 4",
        "0.511",
        "0.5222",
        *shown,
    ):
        assert words in text
    rows = read_rows(tmp_path / "run" / INTERPOLATION / "digits_smoothmix")
    along = {row.attack for row in rows if isinstance(row, ConfidenceRow)}
    assert {"confidence-along@0.00", "confidence-along@0.50", "confidence-along@1.00"} <= along
    metrics = {
        result.metric
        for result in read_summary(tmp_path / "run" / TABLE_1 / "digits_gaussian").results
    }
    assert {"true@0.00", "true@1.00", "off@1.00", "ratio"} - {"ratio"} <= metrics
    assert not read_summary(tmp_path / "run").notes
    printed = " ".join(results_table(tmp_path / "run").split())
    acr = {result.model: result for result in read_summary(tmp_path / "run").results}[
        "digits_smoothmix"
    ]
    assert (
        f"SmoothMix (η = 5) 0.25 6 0.511 0.522 {acr.value:.3f} [{acr.low:.3f}, {acr.high:.3f}]"
        in printed
    )
    true, off = (
        {
            result.metric: format.value(result)
            for result in read_summary(tmp_path / "run" / TABLE_1 / "digits_gaussian").results
        }[f"{name}@1.00"]
        for name in ("true", "off")
    )
    assert (
        f" 1.00 {true} [" in printed
        and f" {off} [" in printed
        and "mixing ratio (Figure 3)" in printed
    )


def test_rows_of_a_single_part_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study without certificates keeps its confidences, and the settings of the training."""
    models = [model for model in tiny_models() if model.label == "Gaussian"]
    run_study(tmp_path / "run", [TABLE_1], models)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(
        sys, "argv", ["smoothmix_rows.py", str(tmp_path / "run"), str(tmp_path / "kept")]
    )
    runpy.run_path(str(BENCHMARKS / "smoothmix_rows.py"), run_name="__main__")
    assert folders(tmp_path / "kept") == {"confidences.csv.gz", "digits_gaussian.training.toml"}
    settings = tmp_path / "run" / "training" / "digits_gaussian" / "run.toml"
    assert (tmp_path / "kept" / "digits_gaussian.training.toml").read_text() == settings.read_text()
    lines = gzip.decompress((tmp_path / "kept" / "confidences.csv.gz").read_bytes()).splitlines()
    assert len(lines) == 1 + len(read_rows(tmp_path / "run" / TABLE_1 / "digits_gaussian"))


def test_the_report_says_whose_figures_it_shows(tmp_path: Path) -> None:
    """Those of another network and of released checkpoints; nothing about logs where there are
    none."""
    models = [
        replace(model, parts=(TABLE_3,), published=(0.684, None))
        for model in tiny_models()
        if model.label == "SmoothAdv"
    ]
    text = run_study(tmp_path / "run", [], models).read_text()
    assert (
        "paper, ResNet-110" in text and "checkpoints that the authors" in text and "0.684" in text
    )
    assert "released logs" not in text and "at sigma 0.25 (SmoothAdv)" in text
    printed = " ".join(results_table(tmp_path / "run").split())
    assert "* of a ResNet-110" in printed and " 0.684* " in printed


@pytest.mark.usefixtures("without_report")
def test_one_classifier_of_the_full_size_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SmoothMixStudy, "sizes", {"smoke": TINY, "full": TINY})
    monkeypatch.setattr(
        "equipoise.studies.smoothmix.full_models", lambda configs, seed: tiny_models()
    )
    arguments = [
        "reproduce",
        "smoothmix",
        "--size",
        "full",
        "--part",
        "table-2",
        "--method",
        "stability",
        "--sigma",
        "1/4",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    assert run([*arguments, "--tolerance", "0.1"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-2] == f"results: {tmp_path / 'run' / 'summary.json'}"
    )
    assert folders(tmp_path / "run" / "certificates") == {"digits_stability"}
    assert (
        config.read(tmp_path / "run" / "certificates" / "digits_stability" / "run.toml")[
            "identity"
        ]["plan"]["tolerance"]
        == 0.1
    )
    assert run([*arguments, "--tolerance", "0.2"]) == 2
    assert "tolerance" in capsys.readouterr().err, "another tolerance is another certification"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--size", "smoke", "--data", "digits", "--sigma", "0.5"],
            "`sigma` must be among those of this size, 0.25, got",
        ),
        (
            ["--size", "smoke", "--data", "digits", "--configs", str(CONFIGS)],
            "`configs` must be left out",
        ),
        (["--size", "full", "--configs", "none"], "clone the repository or pass --configs"),
    ],
)
def test_refused_as_typed(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["reproduce", "smoothmix", *options, "--device", "cpu", "--out", str(tmp_path / "run")])
        == 2
    )
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and message in printed[0] and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_all_parts_of_the_smoke_size_are_reported(tmp_path: Path) -> None:
    text = run_study(tmp_path / "run", []).read_text()
    assert "Figures 6 and 7" in text and "one-step adversary" in text
    assert len(folders(tmp_path / "run" / "certificates")) == 14
    print(len(text), "characters in the report")


def tiny_seed(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, *options: str) -> int:
    """`reproduce smoothmix` of two methods with a seed, as typed."""

    def trained(images: Dataset, seed: int) -> list[StudyModel]:
        return [
            replace(model, recipe=model.recipe.changed(epochs=1))
            for model in smoke_models(images, seed)
        ]

    monkeypatch.setattr(SmoothMixStudy, "sizes", {"smoke": TINY, "full": TINY})
    monkeypatch.setattr("equipoise.studies.smoothmix.smoke_models", trained)
    return run(
        [
            "reproduce",
            "smoothmix",
            "--data",
            "digits",
            "--seed",
            str(seed),
            "--device",
            "cpu",
            "--out",
            str(folder),
            *options,
        ]
    )


def test_seeds_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table shows mean and standard deviation of two training runs; joining twice changes
    nothing."""
    first, second = tmp_path / "first", tmp_path / "second"
    methods = ["--part", "table-2", "--method"]
    assert tiny_seed(monkeypatch, first, 0, *methods, "gaussian,consistency-smoothadv") == 0
    assert tiny_seed(monkeypatch, second, 1, *methods, "gaussian,smoothadv-ddn") == 0
    for _ in range(2):
        assert tiny_seed(monkeypatch, first, 0, "--join", str(second)) == 0
    assert folders(first / "certificates") == {
        "digits_gaussian",
        "digits_consistency-smoothadv",
        "digits_gaussian_seed1",
        "digits_smoothadv-ddn_seed1",
    }
    assert folders(first / "training") == {"digits_gaussian", "digits_consistency-smoothadv"}, (
        "nothing was trained"
    )
    acrs = {result.model: result.value for result in read_summary(first).results}
    assert acrs["digits_gaussian"] != acrs["digits_gaussian_seed1"]
    assert acrs["digits_gaussian_seed1"] == read_summary(second).results[0].value
    view = read_run(first)
    section = smoothmix.methods(view)
    assert section is not None
    rows = {row[0].text: row for row in section.tables[0].body}
    assert list(rows) == ["Gaussian", "SmoothAdv with DDN", "Consistency + SmoothAdv"]
    both = [acrs["digits_gaussian"], acrs["digits_gaussian_seed1"]]
    assert rows["Gaussian"][4].text == f"{statistics.fmean(both):.3f}"
    assert rows["Gaussian"][4].note == f"± {statistics.stdev(both):.4f}, 2 seeds"
    assert "seeds" not in rows["SmoothAdv with DDN"][4].note
    assert [row[0].text for row in section.tables[1].body][:2] == [
        "Gaussian, seed 0",
        "Gaussian, seed 1",
    ]
    capsys.readouterr()
    for folder, message in (
        (first, "another seed"),
        (tmp_path / "none", "a run folder of this study"),
        (first / "certificates" / "digits_gaussian", "be a run with study 'smoothmix'"),
    ):
        assert tiny_seed(monkeypatch, first, 0, "--join", str(folder)) == 2
        assert message in capsys.readouterr().err
    assert (
        tiny_seed(monkeypatch, tmp_path / "third", 2, *methods, "gaussian", "--tolerance", "0.1")
        == 0
    )
    assert tiny_seed(monkeypatch, first, 0, "--join", str(tmp_path / "third")) == 2
    assert "the same plan of digits_gaussian" in capsys.readouterr().err
    assert "digits_gaussian_seed2" not in folders(first / "certificates")


def test_methods_with_an_attack(all_models: list[StudyModel]) -> None:
    """Consistency + SmoothAdv has recipes of its own; SmoothAdv with DDN differs from SmoothAdv in
    the attack."""
    by_name = {model.recipe.name: model for model in all_models}
    for sigma in ("025", "050", "100"):
        joined = by_name[f"mnist_lenet_consistency_sigma{sigma}_smoothadv"]
        assert (
            joined.recipe.objective.to_dict()["eps"] is not None
            and joined.method == "consistency-smoothadv"
        )
        plain, ddn = (
            by_name[f"mnist_lenet_smoothadv_sigma{sigma}{suffix}"] for suffix in ("", "_ddn")
        )
        assert differences(plain.recipe.objective.to_dict(), ddn.recipe.objective.to_dict()) == {
            "attack"
        }
        assert ddn.recipe.plan == plain.recipe.plan


@pytest.fixture(scope="module")
def all_models() -> list[StudyModel]:
    return full_models(CONFIGS, seed=3)


def test_full_size_has_every_row_of_the_paper(all_models: list[StudyModel]) -> None:
    by_part = {
        part: [model for model in all_models if model.is_in(part)]
        for part in (TABLE_1, INTERPOLATION, TABLE_2, TABLE_3, RESNET110, "figure-7", *ABLATIONS)
    }
    counts = {part: len(models) for part, models in by_part.items()}
    assert counts == {
        TABLE_1: 1,
        INTERPOLATION: 2,
        TABLE_2: 33,
        TABLE_3: 15,
        RESNET110: 21,
        "figure-6": 6,
        "figure-7a": 5,
        "figure-7b": 6,
        "figure-7c": 5,
        "figure-7": 12,
    }
    names = [model.recipe.name for model in all_models]
    assert len(set(names)) == len(names) == 33 + 15 + 21 + 4 + 3 + 4 + 3
    assert {model.method for model in by_part[TABLE_2]} == set(METHODS)
    assert {model.method for model in by_part[TABLE_3]} == set(FAST)
    assert {model.method for model in by_part[RESNET110]} == set(DEEP)
    assert all(
        model.recipe.plan.seed == 3 and model.recipe.objective.to_dict()["sigma"] == model.sigma
        for model in all_models
    )
    assert [model.recipe.name for model in by_part[TABLE_1]] == [
        "cifar10_resnet18_gaussian_sigma050"
    ]


def test_variants_change_one_setting_of_smoothmix(all_models: list[StudyModel]) -> None:
    base = next(
        model for model in all_models if model.recipe.name == "mnist_lenet_smoothmix_sigma100_eta1"
    )
    for model in all_models:
        if model.is_in("figure-7") and model.method == "smoothmix-eta1" and model is not base:
            changed = differences(base.recipe.objective.to_dict(), model.recipe.objective.to_dict())
            assert changed in ({"steps", "step_size"}, {"max_norm"}, {"noises"})
            steps, length, m = (
                model.recipe.objective.to_dict()[name] for name in ("steps", "step_size", "noises")
            )
            assert steps * length == 8 and model.recipe.plan.batch_size * m == 256


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    return {name for name in {*first, *second} if first.get(name) != second.get(name)}


@pytest.mark.parametrize(
    ("methods", "sigmas", "count"),
    [
        (None, None, 30),
        ("smoothmix", None, 3),
        ("smoothmix,macer", "0.5", 2),
        (None, "0.25,1", 20),
        ("consistency-smoothadv", None, 3),
        ("smoothadv-ddn", "1", 1),
    ],
)
def test_selection(
    methods: str | None, sigmas: str | None, count: int, all_models: list[StudyModel]
) -> None:
    selection = ModelSelection.parse(methods, sigmas)
    assert sum(selection.has(model) for model in all_models if TABLE_2 in model.parts) == count


def test_mnist_is_present_only_with_all_files(tmp_path: Path) -> None:
    assert not mnist.is_present(tmp_path)
    (tmp_path / "mnist").mkdir()
    names = [name for files in mnist.FILES.values() for name in files]
    for name in names:
        assert not mnist.is_present(tmp_path)
        (tmp_path / "mnist" / f"{name}.gz").touch()
    assert mnist.is_present(tmp_path)
