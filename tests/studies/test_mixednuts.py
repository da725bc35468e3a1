"""The study of MixedNUTS on untrained networks: every part runs, resumes and is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_pair import conditions, study_run
from small_pair import without_report as without_report

from equipoise import models
from equipoise.attacks import Apgd, Suite
from equipoise.cli.main import run
from equipoise.core import config
from equipoise.core.checks import InputError
from equipoise.core.results import read_summary
from equipoise.data import load_data
from equipoise.models import checkpoint
from equipoise.reporting import mixednuts as report
from equipoise.reporting.charts import Chart, Line
from equipoise.reporting.section import read_run
from equipoise.studies import STUDIES, reproduce
from equipoise.studies.mixednuts import MIXEDNUTS, PLAIN, SMOKE, MixedNutsStudy
from equipoise.studies.mixednuts_models import RobustModel, RobustModels, model_names
from equipoise.studies.reproduce import results_table

TINY = replace(
    SMOKE,
    attack=Suite((Apgd("ce", 1),), name="tiny"),
    steps=1,
    targets=1,
    betas=(0.9,),
    alphas=(0.7,),
    robust_betas=(0.9,),
    robust_alphas=(0.7,),
    counts=(50, 60),
    batch_size=60,
)


def small_models(folder: Path) -> RobustModels:
    """Networks with rescaled last layers, so that several classes are predicted, and labels that
    they get right."""
    images = load_data("digits", split="train", count=60)
    networks, references = [], list[str]()
    for noise in (0.0, 0.15, 0.3):
        model = models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=1).eval()
        fc = model.fc
        assert isinstance(fc, torch.nn.Linear)
        with torch.no_grad():
            fc.weight.mul_(20)
            fc.bias.sub_(model(images.images.float() / 255).mean(0))
            random = torch.randn(fc.weight.shape, generator=torch.Generator().manual_seed(2))
            fc.weight.add_(noise * fc.weight.std() * random)
        networks.append(model)
        references.append(str(folder / f"{len(references)}.safetensors"))
        checkpoint.save(references[-1], model, {})
    test = load_data("digits", split="test", count=6)
    with torch.no_grad():
        held_out = replace(images, labels=networks[0](images.images.float() / 255).argmax(1))
    return RobustModels(
        networks[0],
        networks[1],
        (references[0], references[1]),
        held_out,
        test,
        lambda: images,
        (RobustModel("TRADES, weight 6", networks[2], references[2]),),
    )


def study(folder: Path) -> MixedNutsStudy:
    return MixedNutsStudy(
        study_run(folder / "run", "mixednuts"), small_models(folder), TINY, conditions(eps=0.002)
    )


@pytest.fixture(autouse=True)
def one_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtures are attacked like their bases."""
    monkeypatch.setattr("equipoise.studies.mixednuts.adaptive_attacks", lambda mixture, attack: {})


@pytest.mark.usefixtures("without_report")
def test_a_few_parts(tmp_path: Path) -> None:
    own, folder = study(tmp_path), tmp_path / "run"
    with pytest.raises(InputError, match="the part fit"):
        own.equal_alpha(None, 1.0)
    own.run(["fit", "temperature"])
    assert {path.name for path in (folder / "fits").iterdir()} == {"mixednuts", "confidence-switch"}
    temperatures = read_summary(folder / "temperature").results
    assert {result.model for result in temperatures} == {
        f"temperature {value:g}" for value in (0.0, 0.5, 1.0)
    }
    view = read_run(folder)
    assert (
        report.fits(view) is not None
        and report.parts(view) is not None
        and report.margins(view) is None
    )
    shown = report.example_maps(view)
    assert shown is not None and len(shown.tables[0].body) == 4
    # The baseline is as accurate as MixedNUTS where it can be, with the largest alpha that is.
    alpha, target = own.equal_alpha(None, 1.0), own._clean_accuracy(own.mixednuts)
    accuracies = {
        value: own._clean_accuracy(own._mixture(value, None, 1.0))
        for value in (alpha, *torch.linspace(0.0, 1.0, 301).tolist())
    }
    reaching = [
        value
        for value, accuracy in accuracies.items()
        if accuracy >= min(target, max(accuracies.values()))
    ]
    assert alpha in reaching and max(reaching) - alpha < 1 / 300


@pytest.mark.usefixtures("without_report")
def test_temperature_0_is_mixednuts_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, measured = study(tmp_path), dict[str, Any]()
    own.fit_main()
    monkeypatch.setattr(own, "_measure_first", lambda part, models: measured.update(models))
    own.compare_temperatures()
    assert measured["temperature 0"].describe() == own.mixednuts.describe()
    assert [measured[f"temperature {value}"].accurate_temperature for value in (0.5, 1)] == [
        0.5,
        1.0,
    ]


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("helped", [False, True])
def test_a_mixture_that_does_not_help_is_named_below_the_table(
    helped: bool, tmp_path: Path
) -> None:
    own, folder = study(tmp_path), tmp_path / "run" / "fits" / "mixednuts"
    own.fit_main()
    summary = json.loads((folder / "summary.json").read_text())
    summary["fit"] |= {"helped": helped, "clean": 0.799, "robust_clean": 0.832}
    (folder / "summary.json").write_text(json.dumps(summary))
    own.run(["fit"])
    note = (
        f"note: MixedNUTS at this target does not help: on its fitting images 79.9 %, the robust model 83.2 %; "
        f"equipoise open {folder} shows why"
    )
    assert (note in results_table(tmp_path / "run").splitlines()) is not helped


def test_all_rules_have_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[dict[str, Any]] = []
    monkeypatch.setattr("equipoise.fitting.fit", lambda *models, **settings: fits.append(settings))
    own = MixedNutsStudy(
        study_run(tmp_path / "run", "mixednuts"),
        small_models(tmp_path),
        replace(TINY, beta=None),
        conditions(eps=0.002),
    )
    own.fit_main()
    own.fit("other", beta=0.9)
    assert [(fit["rule"], fit["beta"]) for fit in fits] == [
        ("paper", 0.985),
        ("switch", 0.985),
        ("paper", 0.9),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("without_report")
def test_every_part_runs_once_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study(tmp_path).run()
    folder = tmp_path / "run"
    fitted = {path.name for path in (folder / "fits").iterdir()}
    assert {
        "mixednuts",
        "confidence-switch",
        "beta-0.9",
        "beta-0.9-with-robust",
        "beta-0.9-with-trades-weight-6",
        "clamp-linear",
        "clamp-relu",
        "clamp-gelu",
        "count-50",
        "count-60",
        "random-search",
        "map-of-trades-weight-6",
        "transferred-from-trades-weight-6",
        "objective-conditional",
    } == fitted
    main = read_summary(folder)
    assert {result.model for result in main.results} >= {"accurate", "robust", PLAIN, MIXEDNUTS}
    assert [cost.model for cost in main.costs] == ["accurate", "robust", "mixed", "mixed, gated"]
    for part in (
        "margins",
        "curves",
        "robust-models",
        "counts",
        "seen",
        "temperature",
        "black-box",
        "objective",
    ):
        assert {result.metric for result in read_summary(folder / part).results} >= {
            "clean",
            "adaptive",
        }
    view = read_run(folder)
    for section in (
        report.fits,
        report.parts,
        report.margins,
        report.example_maps,
        report.map_margins,
        report.landscape,
    ):
        shown = section(view)
        assert shown is not None and (shown.tables or shown.pictures), section
    fits = report.fits(view)
    assert fits is not None and len(fits.tables[0].body) == len(fitted)

    def refuse(*arguments: Any, **more: Any) -> None:
        raise AssertionError("a finished fit is read, not attacked again")

    monkeypatch.setattr("equipoise.fitting.margin_attack.MarginAttack._attack", refuse)
    study(tmp_path).run(["counts"])


def test_it_is_registered_with_all_parts() -> None:
    assert STUDIES["mixednuts"] is MixedNutsStudy
    assert list(MixedNutsStudy.parts) == [
        "fit",
        "margins",
        "curves",
        "robust-models",
        "clamps",
        "counts",
        "temperature",
        "black-box",
        "objective",
    ]


@pytest.mark.usefixtures("without_report")
def test_several_robust_models_on_one_plot(tmp_path: Path) -> None:
    study(tmp_path).run(["robust-models"])
    measured = {result.model for result in read_summary(tmp_path / "run" / "robust-models").results}
    assert measured == {
        "accurate",
        *(
            f"{prefix}{name}{setting}"
            for name in ("robust", "TRADES, weight 6")
            for prefix, setting in (
                ("", ""),
                ("MixedNUTS with ", ", beta 0.9"),
                ("plain mixing with ", ", alpha 0.7"),
            )
        ),
    }
    fitted = tmp_path / "run" / "fits" / "beta-0.9-with-trades-weight-6"
    assert "2.safetensors" in (fitted / "run.toml").read_text(), "the mixture is with that model"
    shown = report.parts(read_run(tmp_path / "run"))
    assert shown is not None
    chart = shown.pictures[0]
    assert isinstance(chart, Chart)
    (panel,) = chart.panels
    colors = {line.label: line.color for line in panel.marks if isinstance(line, Line)}
    assert (
        colors["TRADES, weight 6"]
        == colors["MixedNUTS with TRADES, weight 6"]
        != colors["MixedNUTS with robust"]
    )
    assert colors["plain mixing with robust"] == colors["robust"]


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        (["--norm", "l2", "--eps", "0.2"], "digits", ""),
        (["--eps", "0.02"], "npz", ""),
        (["--robust", "R"], "digits", "`robust` must be different models"),
    ],
)
@pytest.mark.usefixtures("without_report")
def test_full_size_as_typed(
    options: list[str],
    data: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Several robust models, other data sets and other threats."""
    monkeypatch.setattr(MixedNutsStudy, "sizes", {"smoke": TINY, "full": replace(TINY, beta=None)})
    references = small_models(tmp_path).all_references
    if data == "npz":
        images = load_data("digits", split="test", count=110)
        np.savez(tmp_path / "own.npz", images=images.images.numpy(), labels=images.labels.numpy())
        data = f"npz:{tmp_path / 'own.npz'}"
    typed = [
        "reproduce",
        "mixednuts",
        "--size",
        "full",
        "--accurate",
        references[0],
        "--robust",
        references[1],
        "--robust",
        references[2],
        "--data",
        data,
        "--count",
        "55",
        "--part",
        "margins",
        "--part",
        "robust-models",
        *(references[1] if word == "R" else word for word in options),
    ]
    assert run([*typed, "--device", "cpu", "--out", str(tmp_path / "run")]) == (2 if message else 0)
    assert message in capsys.readouterr().err
    if message:
        assert not (tmp_path / "run").exists()
        return
    described = config.read(tmp_path / "run" / "run.toml")
    assert list(described["identity"]["models"]) == ["accurate", "robust", "2"]
    assert described["identity"]["threat"]["norm"] == ("l2" if "l2" in options else "linf")
    results = read_summary(tmp_path / "run" / "robust-models").results
    assert {"robust", "2", "MixedNUTS with 2, beta 0.9", "plain mixing with 2, alpha 0.7"} <= {
        result.model for result in results
    }
    assert {result.n for result in results} == {55}


@pytest.mark.usefixtures("without_report")
def test_the_attack_of_the_full_size_is_recorded_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accurate, robust, _ = small_models(tmp_path).all_references
    typed = [
        "reproduce",
        "mixednuts",
        "--size",
        "full",
        "--accurate",
        accurate,
        "--robust",
        robust,
        "--data",
        "digits",
        "--count",
        "3",
        "--eps",
        "0.3",
        "--part",
        "margins",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    assert run([*typed, "--attack", "fast", "--part-count", "2"]) == 0
    assert "adaptive-" in capsys.readouterr().out, "the table names the attack"
    assert config.read(tmp_path / "run" / "run.toml")["identity"]["attack"] == "fast"
    for part, n in ((".", 3), ("margins", 2)):
        results = read_summary(tmp_path / "run" / part).results
        assert {(result.metric, result.n) for result in results} == {
            (name, n) for name in ("clean", "adaptive-fast", "worst")
        }
    margins = report.margins(read_run(tmp_path / "run"))
    assert margins is not None and "adaptive-fast" in margins.prose[0]
    for given in ([], ["--attack", "standard"]):
        assert run([*typed, *given]) == 2
        message = capsys.readouterr().err
        assert "attack" in message and "fast" in message and "standard" in message
    monkeypatch.setattr("equipoise.studies.mixednuts.ADAPTIVE_VERSION", 0)
    assert run([*typed, "--attack", "fast"]) == 2
    assert "adaptive_attacks" in capsys.readouterr().err, "rows of two lists are not mixed"


@pytest.mark.parametrize(
    ("study_name", "size", "reason"),
    [
        ("mixednuts", "smoke", "smoke size"),
        ("adaptive-smoothing", "full", "study adaptive-smoothing"),
    ],
)
@pytest.mark.parametrize("option", ["attack", "part_count"])
def test_only_the_full_size_of_this_study_has_these_settings(
    study_name: str, size: str, reason: str, option: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {option: {"attack": "fast", "part_count": 5}[option]}
    with pytest.raises(InputError, match=f"`{option}` must be left out for the {reason}"):
        reproduce(study_name, out=tmp_path / "run", size=size, **settings)
    assert not (tmp_path / "run").exists()


def test_names_of_checkpoints_of_one_folder() -> None:
    names = model_names(["a/AT/best.safetensors", "a/AT/last.safetensors"])
    assert list(names.values()) == ["best", "last"]
