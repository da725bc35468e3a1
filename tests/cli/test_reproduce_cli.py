"""`equipoise reproduce` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise import models
from equipoise.cli.main import run
from equipoise.core import config
from equipoise.core.records import read_rows
from equipoise.models import checkpoint


@pytest.mark.parametrize(("arguments", "message"), [
    (["local-smothing"], "did you mean 'local-smoothing'?"),
    (["local-smoothing", "--size", "ful"], "did you mean 'full'?"),
    (["local-smoothing", "--part", "trusts"], "did you mean 'trust'?"),
    (["local-smoothing", "--size", "full"], "`accurate` must be given"),
    (["adaptive-smoothing", "--part", "trusts"], "`part` must be one of ablation, adversaries, aimed, alphas, choose"),
    (["adaptive-smoothing", "--size", "full"], "`accurate` must be given"),
])
def test_mistakes_are_one_sentence(arguments: list[str], message: str, tmp_path: Path,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", *arguments, "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_part_on_two_given_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("accurate", "robust")]
    for seed, path in enumerate(paths):
        checkpoint.save(Path(path), models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed), {})
    arguments = ["--size", "full", "--part", "gradients", "--data", "digits", "--norm", "l2", "--eps", "1/2",
                 "--device", "cpu", "--out", str(tmp_path / "run")]
    assert run(["reproduce", "local-smoothing", *arguments, "--accurate", paths[0], "--robust", paths[1]]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    content = config.read(tmp_path / "run" / "run.toml")
    assert content["identity"]["threat"] == {"norm": "l2", "eps": 0.5}
    assert content["identity"]["data"]["name"] == "digits" and content["settings"]["references"] == paths
    assert {row.attack for row in read_rows(tmp_path / "run")} == {"clean", "pgd-20", "pgd-100"}
    assert run(["reproduce", "local-smoothing", *arguments, "--accurate", paths[1], "--robust", paths[1]]) == 2
    assert "models" in capsys.readouterr().err, "another model is another run"
