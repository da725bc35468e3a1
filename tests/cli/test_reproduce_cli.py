"""`equipoise reproduce` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from equipoise import models
from equipoise.cli.main import run
from equipoise.core import config
from equipoise.core.records import read_rows
from equipoise.models import checkpoint
from equipoise.studies import STUDIES, list_studies


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local-smothing"], "did you mean 'local-smoothing'?"),
        (["local-smoothing", "--size", "ful"], "did you mean 'full'?"),
        (["local-smoothing", "--part", "trusts"], "did you mean 'trust'?"),
        (["local-smoothing", "--size", "full"], "`accurate` must be given"),
        (
            ["adaptive-smoothing", "--part", "trusts"],
            "`part` must be one of ablation, adversaries, aimed, alphas, choose",
        ),
        (["adaptive-smoothing", "--size", "full"], "`accurate` must be given"),
        (
            [
                "local-smoothing",
                "--size",
                "full",
                "--accurate",
                "a",
                "--robust",
                "b",
                "--sigma",
                "0.5",
            ],
            "`sigma` must be left out for the study local-smoothing",
        ),
        (
            [
                "local-smoothing",
                "--size",
                "full",
                "--accurate",
                "a",
                "--robust",
                "b",
                "--robust",
                "c",
            ],
            "`robust` must be one model for the study local-smoothing",
        ),
        (["local-smoothing", "--count", "8"], "`count` must be left out for the smoke size"),
        (["smoothmix", "--data", "digits", "--part", "table-5"], "did you mean 'table-3'?"),
        (["smoothmix", "--data", "digits", "--method", "smoothmx"], "did you mean 'smoothmix'?"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reproduce", *arguments, "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_list_needs_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip("\n") == "\n\n".join(map(str, list_studies()))
    for name, study in STUDIES.items():
        assert f"\n{name}: " in f"\n{printed}" and all(
            f"\n    {part} " in printed for part in study.parts
        )


def test_one_part_on_two_given_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EQUIPOISE_NO_REPORT", raising=False)
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("accurate", "robust")]
    for seed, path in enumerate(paths):
        checkpoint.save(
            Path(path),
            models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed),
            {},
        )
    arguments = [
        "--size",
        "full",
        "--part",
        "gradients",
        "--data",
        "digits",
        "--norm",
        "l2",
        "--eps",
        "1/2",
        "--count",
        "9",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    assert (
        run(
            [
                "reproduce",
                "local-smoothing",
                *arguments,
                "--accurate",
                paths[0],
                "--robust",
                paths[1],
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert printed.startswith("Accuracy on 9 images, 95 % intervals, ℓ2 ≤ 0.5\n")
    assert printed.splitlines()[-2:] == [
        f"report: {tmp_path / 'run' / 'report.html'}",
        f"next: equipoise open {tmp_path / 'run'}",
    ]
    content = config.read(tmp_path / "run" / "run.toml")
    assert content["identity"]["threat"] == {"norm": "l2", "eps": 0.5}
    assert len({row.index for row in read_rows(tmp_path / "run")}) == 9
    assert (
        content["identity"]["data"]["name"] == "digits"
        and content["settings"]["references"] == paths
    )
    assert {row.attack for row in read_rows(tmp_path / "run")} == {"clean", "pgd-20", "pgd-100"}
    (tmp_path / "run" / "report.html").unlink()
    assert (
        run(
            [
                "reproduce",
                "local-smoothing",
                *arguments,
                "--accurate",
                paths[0],
                "--robust",
                paths[1],
                "--no-report",
            ]
        )
        == 0
    )
    assert (
        capsys.readouterr().out.splitlines()[-2] == f"results: {tmp_path / 'run' / 'summary.json'}"
    )
    assert not (tmp_path / "run" / "report.html").exists()
    assert (
        run(
            [
                "reproduce",
                "local-smoothing",
                *arguments,
                "--accurate",
                paths[1],
                "--robust",
                paths[1],
            ]
        )
        == 2
    )
    assert "models" in capsys.readouterr().err, "another model is another run"
