"""The public function `fit`: targets, folders, references, and what it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_pair import THREAT, Linear, make_data, make_pair

from equipoise import models
from equipoise.core import config, format, stats
from equipoise.core.arrays import FitArrays
from equipoise.core.checks import InputError
from equipoise.core.promises import Target
from equipoise.core.records import read_rows
from equipoise.core.results import read_summary
from equipoise.core.rows import AttackRow
from equipoise.data import Dataset
from equipoise.fitting import Fit, fit
from equipoise.fitting.selection import CandidateEvaluator
from equipoise.mixing import MixedClassifier, load_model, new_gate, save_gate
from equipoise.mixing.provenance import halves
from equipoise.models import TTAClassifier, checkpoint
from equipoise.reporting.run_view import read_run
from equipoise.reporting.verdict import verdict

QUICK: dict[str, Any] = {
    "rounds": 0,
    "rule": "nuts",
    "steps": 3,
    "targets": 2,
    "pool": 1,
    "threat": THREAT,
    "device": "cpu",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two small networks: `accurate.safetensors` and
    `robust.safetensors`."""
    monkeypatch.chdir(tmp_path)
    for side in ("accurate", "robust"):
        checkpoint.save(f"{side}.safetensors", make_network(side == "robust"))
    return tmp_path


def make_network(noisy: bool) -> torch.nn.Module:
    """A network of the zoo with a rescaled last layer, so that all classes occur; with noise,
    another one."""
    model = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=5).eval()
    with torch.no_grad():
        fc = model.fc
        assert isinstance(fc, torch.nn.Linear)
        fc.weight.mul_(20)
        fc.bias.sub_(model(images()).mean(0))
        if noisy:
            generator = torch.Generator().manual_seed(2)
            fc.weight.add_(
                0.3 * fc.weight.std() * torch.randn(fc.weight.shape, generator=generator)
            )
    return model


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randint(0, 256, (120, 3, 8, 8), generator=generator, dtype=torch.uint8).float() / 255
    )


def network_data() -> Dataset:
    with torch.no_grad():
        labels = make_network(False)(images()).argmax(1)
    pixels = (images() * 255).round().to(torch.uint8)
    return Dataset("random", "test", pixels, labels, torch.arange(120), tuple("abcd"))


def fit_files(out: str = "M", robust: str = "robust.safetensors", **settings: Any) -> Fit:
    return fit("accurate.safetensors", robust, network_data(), out=out, **{**QUICK, **settings})


def test_modules_without_a_folder() -> None:
    result = fit(*make_pair(), make_data(), lose_at_most=10.0, **QUICK)
    assert (
        result.helped and result.summary is not None and result.frontier == result.mixture.frontier
    )
    assert (
        str(result)
        .splitlines()[-2]
        .startswith("the mixture loses at most 10 points of robust accuracy")
    )
    n = result.summary.images
    assert n == len(halves(make_data().index, 0)[1])
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in str(result).splitlines()[5:7]}
    clean, attacked, mixed = (
        f"{100 * share:.1f} % {format.bounds(stats.clopper_pearson(round(share * n), n))}"
        for share in (
            result.summary.robust_clean,
            result.summary.robust_attacked,
            result.summary.clean,
        )
    )
    assert str(result).startswith(
        f"Accuracy on the fitting images that did not select its map\nn = {n}, 95 % intervals\n"
    )
    assert "\n\n\n" not in str(result)
    assert rows == {"robust": f"{clean} {attacked}", "mixed": f"{mixed} see below"}
    assert "lose at most" in result.frontier_table() and result.to_dict()["fit"]["helped"] is True


def test_run_folder(folder: Path) -> None:
    result = fit_files(lose_at_most=20.0)
    assert result.helped and result.summary == read_summary("M").fit
    mixture = load_model("mixture:M")
    assert isinstance(mixture, MixedClassifier) and mixture.provenance is not None
    assert mixture.provenance.images == ("0-119",)
    assert len(read_rows("M")) == 5 * 120 and FitArrays.load("M") is not None
    assert [cost.model for cost in read_summary("M").costs] == [
        "accurate",
        "robust",
        "mixed",
        "mixed, gated",
    ]


def test_finished_fit_is_read(folder: Path) -> None:
    first = fit_files(lose_at_most=20.0)
    before = {path: path.read_bytes() for path in (folder / "M").iterdir()}
    again = fit_files(lose_at_most=20.0)
    assert str(again) == str(first) and models.identity(again.mixture) == models.identity(
        first.mixture
    )
    assert before == {path: path.read_bytes() for path in (folder / "M").iterdir()}


def test_interrupted_fit_resumes_after_its_attack(folder: Path) -> None:
    """Without the files that are written last, the cached logits are used, not the attack."""
    fit_files(lose_at_most=20.0)
    expected = (folder / "M" / "mixture.toml").read_bytes()
    for name in ("mixture.toml", "summary.json", "rows.jsonl"):
        (folder / "M" / name).unlink()
    logits = (folder / "M" / "logits.npz").stat()
    fit_files(lose_at_most=20.0)
    assert (folder / "M" / "mixture.toml").read_bytes() == expected
    assert (folder / "M" / "logits.npz").stat().st_mtime_ns == logits.st_mtime_ns


def test_loaded_modules_write_the_same_files_as_references(folder: Path) -> None:
    fit_files(lose_at_most=20.0)
    fit(
        models.load("accurate.safetensors"),
        models.load("robust.safetensors"),
        network_data(),
        out="N",
        lose_at_most=20.0,
        **QUICK,
    )
    for name in ("rows.jsonl", "mixture.toml", "arrays.npz", "run.toml"):
        assert (folder / "M" / name).read_bytes() == (folder / "N" / name).read_bytes()


def test_models_of_the_zoo_are_saved_beside_the_mixture(folder: Path) -> None:
    result = fit(
        make_network(False), make_network(True), network_data(), out="M", lose_at_most=20.0, **QUICK
    )
    assert models.identity(load_model("mixture:M")) == models.identity(result.mixture)
    assert (folder / "M" / "robust.safetensors").exists()


def test_other_modules_cannot_be_written(folder: Path) -> None:
    with pytest.raises(
        InputError, match="`accurate` must be a reference, a model loaded by one, or"
    ):
        fit(*make_pair(), make_data(), out="M", **QUICK)
    assert not (folder / "M").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lose_at_most": 10.0}, "has target.share = 0.2, this run has 0.1"),
        ({"lose_at_most": 20.0, "rounds": 2}, "has search.rounds = 0, this run has 2"),
        ({"lose_at_most": 20.0, "steps": 4}, "has attack.steps = 3, this run has 4"),
    ],
)
def test_another_fit_is_refused(folder: Path, changed: dict[str, Any], message: str) -> None:
    fit_files(lose_at_most=20.0)
    with pytest.raises(InputError, match=message):
        fit_files(**changed)


def test_test_time_augmentation_is_part_of_the_identity(folder: Path) -> None:
    """`tta:2:h` and `tta:6:h` have the same weights, but are different models."""
    fit_files(robust="tta:2:robust.safetensors", lose_at_most=20.0)
    with pytest.raises(InputError, match="this run has 6"):
        fit_files(robust="tta:6:robust.safetensors", lose_at_most=20.0)
    assert isinstance(load_model("mixture:M").robust, TTAClassifier)


def test_each_model_is_identified_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the comparison of both and for the run: digests of large weights take long."""
    identified, identity = list[torch.nn.Module](), models.identity

    def record(model: torch.nn.Module) -> dict[str, Any]:
        identified.append(model)
        return identity(model)

    monkeypatch.setattr(models, "identity", record)
    fitted = fit_files(lose_at_most=20.0)
    assert identified == [fitted.mixture.accurate, fitted.mixture.robust]
    recorded = config.read(folder / "M" / "run.toml")["identity"]["models"]
    assert recorded == {"accurate": identity(identified[0]), "robust": identity(identified[1])}


def test_references_and_command_are_recorded(folder: Path) -> None:
    fit_files(lose_at_most=20.0, command="equipoise fit …")
    recorded = config.read(folder / "M" / "run.toml")["settings"]
    assert recorded["references"] == ["accurate.safetensors", "robust.safetensors"]
    assert recorded["command"] == "equipoise fit …"


def test_too_few_images_leave_no_folder(folder: Path) -> None:
    with pytest.raises(InputError, match="at least 50 images"):
        fit(
            "accurate.safetensors",
            "robust.safetensors",
            network_data().slice(0, 30),
            out="M",
            **QUICK,
        )
    assert not (folder / "M").exists()


def test_equal_models() -> None:
    accurate, _ = make_pair()
    with pytest.raises(
        InputError, match="`accurate and robust` must be different models, got 'equal weights'"
    ):
        fit(accurate, Linear(accurate.weight.detach()), make_data(), **QUICK)


def test_unknown_setting() -> None:
    with pytest.raises(InputError, match="did you mean 'steps'"):
        fit(*make_pair(), make_data(), threat=THREAT, stpes=3)


def test_no_mixture_helps(folder: Path) -> None:
    result = fit_files(lose_at_most=0.1)
    assert not result.helped and result.mixture.alpha == 1.0 and result.frontier
    lines = str(result).splitlines()
    assert "no mixture helps: 60 images are too few to promise 0.1 points" in lines[-2]
    assert lines[-1].startswith(
        f"a mixture that may lose {100 * result.frontier[0].lose_at_most:.3g} points helps"
    )


def test_map_of_another_mixture(folder: Path) -> None:
    first = fit_files(lose_at_most=20.0).mixture
    second = fit_files("L", lose_at_most=22.0, like="mixture:M").mixture
    assert first.logit_map is not None and second.logit_map is not None
    assert first.logit_map.settings == second.logit_map.settings and second.q >= first.q
    with pytest.raises(InputError, match="`like` must name a mixture with a map, got 'robust"):
        fit_files("N", like="robust.safetensors")


def test_map_of_a_mixture_of_other_halves(folder: Path) -> None:
    """Images that selected the reused map do not set its threshold, and the promise counts the
    others only."""
    first = fit_files(lose_at_most=20.0).mixture
    second = fit_files("L", lose_at_most=20.0, like="mixture:M", seed=1)
    selected, calibrated = (
        halves(torch.arange(120), seed)[half] for seed, half in ((0, 0), (1, 1))
    )
    left_out = int(torch.isin(calibrated, selected).sum())
    assert left_out > 0 and second.summary is not None
    assert f"on {60 - left_out} images that did not select the map" in second.promise
    assert f"{left_out} of the 60 images for the threshold selected the map that is reused" in str(
        second
    )
    rows = [
        row for row in read_rows("L") if isinstance(row, AttackRow) and row.half == "calibration"
    ]
    assert {row.index for row in rows} == set(calibrated.tolist()) - set(selected.tolist())
    assert first.provenance is not None and first.provenance.seed == 0
    assert second.mixture.provenance is not None and second.mixture.provenance.seed is None


def test_accuracies_of_a_fit_are_those_of_the_half_that_did_not_select_the_map(
    folder: Path,
) -> None:
    fitted = fit_files(lose_at_most=20.0, promise="probability", confidence=0.9)
    summary = read_summary("M")
    assert {result.n for result in summary.results} == {60}
    assert fitted.summary is not None and "with 90 % confidence" in fitted.promise
    assert summary.result("mixed", "clean").value == pytest.approx(fitted.summary.clean)
    assert any(
        "the half that did not select the map" in text for text in verdict(read_run("M")).text
    )
    loaded = load_model("mixture:M")
    assert isinstance(loaded, MixedClassifier) and loaded.provenance == fitted.mixture.provenance
    assert loaded.provenance is not None and loaded.provenance.target == Target(0.2, confidence=0.9)
    with pytest.raises(InputError, match=r"target.confidence = 0.9"):
        fit_files(lose_at_most=20.0)


@pytest.fixture
def gate(folder: Path) -> Path:
    """An untrained gate for the two networks."""
    bases = [models.load(f"{side}.safetensors") for side in ("accurate", "robust")]
    save_gate(
        "gate.safetensors", new_gate(bases[0], bases[1], images()[:2], width=2), bases[0], bases[1]
    )
    return folder / "gate.safetensors"


def test_gate_over_a_reused_map_records_the_images_that_selected_it(
    folder: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates are not attacked here."""
    monkeypatch.setattr(CandidateEvaluator, "_attack", lambda self, _: self.data.images / 255)
    fit_files(lose_at_most=20.0)
    other = replace(network_data(), images=255 - network_data().images, name="other")
    bases = "accurate.safetensors", "robust.safetensors"
    found = fit(
        *bases, other, gate=gate, range_attack="short", like="mixture:M", lose_at_most=20.0, **QUICK
    )
    for mixture in (found.gated, found.mixture):
        assert mixture is not None and mixture.provenance is not None
        assert (
            mixture.provenance.overlap(network_data())
            == mixture.provenance.overlap(other)
            == ("0-119",)
        )


def test_a_gated_fit_has_rows_of_the_accurate_model_too(
    folder: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all fitting images, as those of the other models; resumed, the same rows. Candidates are
    not attacked here."""
    monkeypatch.setattr(CandidateEvaluator, "_attack", lambda self, _: self.data.images / 255)
    fit_files(gate=gate, lose_at_most=20.0)
    rows = [row for row in read_rows("M") if isinstance(row, AttackRow)]
    clean = {
        model: [row.index for row in rows if (row.model, row.attack) == (model, "clean")]
        for model in ("accurate", "robust", "mixed")
    }
    assert all(indices == list(range(120)) for indices in clean.values())
    accurate = [result for result in read_summary("M").results if result.model == "accurate"]
    with torch.no_grad():
        predicted = models.load("accurate.safetensors")(network_data().images / 255).argmax(1)
    assert [result.metric for result in accurate] == ["clean"] and accurate[0].n == 120
    assert accurate[0].value == float((predicted == network_data().labels).float().mean())
    (folder / "M" / "summary.json").unlink()
    fit_files(gate=gate, lose_at_most=20.0)
    assert [row for row in read_rows("M") if isinstance(row, AttackRow)] == rows
    monkeypatch.setattr("equipoise.fitting.fitter.ADAPTIVE_VERSION", 0)
    with pytest.raises(
        InputError, match="adaptive_attacks"
    ):  # candidates are not compared under two lists of attacks
        fit_files(gate=gate, lose_at_most=20.0)


def test_gate_of_other_models(folder: Path, gate: Path) -> None:
    with pytest.raises(InputError, match="`accurate` must be the base that"):
        fit(
            "robust.safetensors",
            "accurate.safetensors",
            network_data(),
            gate=gate,
            out="M",
            **QUICK,
        )
    assert not (folder / "M").exists()


def test_plain_mixing_needs_no_images(folder: Path) -> None:
    for _ in range(2):
        result = fit(
            "accurate.safetensors", "robust.safetensors", None, threat=THREAT, alpha=0.8, out="P"
        )
        assert (
            str(result) == "plain mixing with alpha 0.8; nothing was fitted" and not result.helped
        )
    mixture = load_model("mixture:P")
    assert isinstance(mixture, MixedClassifier) and mixture.differentiable and mixture.alpha == 0.8


def test_plain_mixing_replaces_nothing(folder: Path) -> None:
    fit_files(lose_at_most=20.0)
    for out, rule in (
        ("M", "a new folder or hold the same mixture"),
        ("accurate.safetensors", "a folder"),
    ):
        with pytest.raises(InputError, match=f"`out` must be {rule}"):
            fit(
                "accurate.safetensors",
                "robust.safetensors",
                None,
                threat=THREAT,
                alpha=0.8,
                out=out,
            )


def test_plain_mixing_resumes_after_a_kill_between_its_files(tmp_path: Path) -> None:
    """The bases of models without a reference are saved before `mixture.toml`; those of other
    models are kept."""

    def mix(alpha: float = 0.8) -> None:
        fit(
            make_network(False),
            make_network(True),
            None,
            threat=THREAT,
            alpha=alpha,
            out=tmp_path / "mixed",
        )

    mix()
    (tmp_path / "mixed" / "mixture.toml").unlink()
    (tmp_path / "mixed" / "robust.safetensors").unlink()
    mix()
    assert isinstance(load_model(f"mixture:{tmp_path / 'mixed'}"), MixedClassifier)
    (tmp_path / "mixed" / "mixture.toml").unlink()
    checkpoint.save(tmp_path / "mixed" / "robust.safetensors", make_network(False))
    before = (tmp_path / "mixed" / "robust.safetensors").read_bytes()
    with pytest.raises(InputError, match="`out` must be a new folder or hold the same mixture"):
        mix()
    assert (tmp_path / "mixed" / "robust.safetensors").read_bytes() == before
