"""The SmoothMix experiment: its settings, its kept rows, and a run at smoke size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from equipoise.core import config
from equipoise.core.results import find, read_summary
from equipoise.core.settings import split
from equipoise.training import OBJECTIVES, TrainingPlan
from experiments.smoothmix import __main__ as smoothmix

CLASSIFIERS = {
    classifier.name: classifier
    for part in smoothmix.PARTS
    for classifier in smoothmix.classifiers_of(part)
}
ROWS = smoothmix.HERE / "rows"


def settings_of(name: str) -> tuple[dict[str, object], dict[str, object]]:
    """Of a classifier the settings of its objective and of its plan."""
    training = dict(CLASSIFIERS[name].training)
    objective = OBJECTIVES[training.pop("objective")]
    own = {key: training.pop(key) for key in ("data", "arch", "mean", "std")}
    assert all(isinstance(value, str) for value in own.values())
    loss, plan = split(training, objective, TrainingPlan)
    return loss.describe(), plan.identity()


def test_the_page_shows_the_kept_rows() -> None:
    assert smoothmix.table(ROWS) in (smoothmix.HERE / "README.md").read_text(encoding="utf-8")


def test_the_figure_is_drawn_from_the_kept_rows(tmp_path: Path) -> None:
    smoothmix.draw(ROWS, tmp_path / "certified.svg")
    assert (tmp_path / "certified.svg").read_text(encoding="utf-8").count('id="axes_') == 2
    at, certified = smoothmix.curve(np.array([0.0, 0.5, 1.0, 2.0]))
    values = dict(zip(at.round(2).tolist(), certified, strict=True))
    assert (values[0.0], values[0.4], values[0.6], values[2.0]) == (75.0, 75.0, 50.0, 0.0)


def test_the_kept_rows_were_made_by_these_settings() -> None:
    paths = sorted(ROWS.glob("*.training.toml"))
    assert len(paths) == len(smoothmix.read(ROWS)) == 3
    for path in paths:
        name, _, seed = path.name.removesuffix(".training.toml").rpartition("_seed")
        objective, plan = settings_of(name)
        trained = config.read(path)["identity"]
        assert trained["objective"] == objective
        assert trained["plan"] == {**plan, "seed": int(seed)}
        certified = config.read(path.with_name(path.name.replace("training", "certificates")))
        assert certified["identity"]["plan"]["sigma"] == CLASSIFIERS[name].sigma
        full = smoothmix.TABLES["full"]
        assert {key: certified["identity"]["plan"][key] for key in full} == full


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_settings_are_those_of_the_objective_and_of_the_plan(name: str) -> None:
    objective, _ = settings_of(name)
    assert objective["sigma"] == CLASSIFIERS[name].sigma


def test_some_classifiers_have_the_settings_of_the_paper() -> None:
    def training(name: str, *keys: str) -> tuple[object, ...]:
        return tuple(CLASSIFIERS[name].training[key] for key in keys)

    attack = ("steps", "step_size", "eta", "one_step", "noises", "batch_size")
    assert len(CLASSIFIERS) == 80
    onestep = "table-2_smoothmix-eta1-onestep_sigma025"
    assert training(onestep, *attack) == (3, 1.0, 1.0, True, 4, 64)
    assert training("resnet110_smoothmix_sigma100", *attack) == (4, 2.0, 5.0, False, 2, 128)
    assert training("figure-6_eta16", *attack) == (8, 1.0, 16.0, False, 4, 64)
    assert training("figure-7_steps2", *attack) == (2, 4.0, 1.0, False, 4, 64)
    assert training("figure-7_noises8", *attack) == (8, 1.0, 1.0, False, 8, 32)
    assert training("table-2_macer_sigma100", "weight", "defer", "epochs") == (6.0, 31, 90)
    assert training("table-2_consistency-smoothadv_sigma050", "weight", "eta") == (1.0, 0.5)


@pytest.mark.parametrize("part", ["table-2", "resnet110"])
def test_settings_of_the_released_code_have_all_images_and_its_late_drops(part: str) -> None:
    for classifier in smoothmix.by_method(part):
        _, plan = settings_of(classifier.name)
        assert plan["held_out"] == 0
        assert plan["step_delay"] == (1 if plan["schedule"] == "step" else 0)


def test_smoke_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Variants of SmoothMix, and a classifier of another part with its confidence under attack."""
    parts = ["--part", "figure-6", "--part", "table-1", "--device", "cpu"]
    smoothmix.run([*parts, "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    trained = {folder.name for folder in (tmp_path / "training").iterdir()}
    etas = {f"figure-6_eta{eta}" for eta in (2, 4, 8, 16)}
    assert trained == {*etas, "table-3_gaussian_sigma050"}
    for eta in (2, 16):
        run = config.read(tmp_path / "training" / f"figure-6_eta{eta}" / "run.toml")
        assert run["identity"]["objective"]["eta"] == eta
        assert run["identity"]["objective"]["steps"] == 2  # of 8

    kept = {own.name: own for own in smoothmix.read(tmp_path / "rows")}
    assert kept.keys() == trained
    for name, own in kept.items():
        results = read_summary(tmp_path / "certificates" / name).results
        assert own.ours.mean() == pytest.approx(find(results, name, "acr").value, abs=1e-6)
        assert any(line.startswith(f"| {name}, seed 0 | 6 |") for line in lines)
    diagnosed = read_summary(tmp_path / "certificates" / "table-3_gaussian_sigma050").results
    true = [result.value for result in diagnosed if result.metric.startswith("true@")]
    assert len(true) == 2 and true[0] > true[1]  # at radius 0 and under attack


def test_released_radii_are_read_by_the_settings_of_a_classifier(tmp_path: Path) -> None:
    text = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n0\t7\t7\t1.91\t1\t0:01\n1\t2\t3\t0.5\t0\t0:01\n"
    folder = tmp_path / "mnist" / "macer_deferred30/num_16/lbd_6.0/gamma_8.0/beta_16.0"
    folder.mkdir(parents=True)
    for name in ("noise_1.00_12", "noise_1.00_7", "noise_0.50_3"):
        (folder / name).write_text(text)
    macer = CLASSIFIERS["table-2_macer_sigma100"]
    assert smoothmix.released(tmp_path, macer) == [[1.91, 0.0], [1.91, 0.0]]
    assert smoothmix.released(tmp_path, CLASSIFIERS["table-3_gaussian_sigma050"]) == []
    assert smoothmix.as_logged(np.array([1.905728, 0.0, 0.50186])).tolist() == [1.91, 0.0, 0.502]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logs", "nowhere"], "`--logs` must be left out for the smoke size"),
        (["--size", "full", "--logs", "nowhere"], "must be data/certify of a clone"),
        (["--part", "table-3", "--method", "macer"], "must leave a classifier"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        smoothmix.run([*arguments, "--out", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_everything_at_smoke_size(tmp_path: Path) -> None:
    smoothmix.run(["--out", str(tmp_path), "--device", "cpu"])
    assert {own.name for own in smoothmix.read(tmp_path / "rows")} == CLASSIFIERS.keys()
