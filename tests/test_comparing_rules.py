"""The commands of docs/comparing-rules.md, with small networks and few images of the digits."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from equipoise import models
from equipoise.cli.main import run
from equipoise.models import checkpoint

PAGE = Path(__file__).parents[1] / "docs" / "comparing-rules.md"
SMALL: dict[str, list[str]] = {
    "fit": ["--steps", "2", "--targets", "1", "--device", "cpu", "--no-report"],
    "evaluate": ["--attack", "pgd", "--steps", "2", "--device", "cpu", "--no-report"],
    "report": [],
}


def commands() -> list[list[str]]:
    """The arguments of the block's commands, with its variables in their places."""
    block = re.search(r"```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    variables: dict[str, str] = {}
    found = []
    for line in block[1].replace("\\\n", "").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        if line.startswith("equipoise "):
            found.append(shlex.split(line)[1:])
        else:
            name, _, value = line.partition("=")
            variables[name] = value.strip('"')
    return found


def test_the_commands_compare_all_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("G", "H")):
        network = models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed)
        checkpoint.save(tmp_path / f"{name}.safetensors", network)
    replaced = {"G": "G.safetensors", "H": "H.safetensors"}
    replaced |= {"cifar10": "digits", "9000": "200", "1000": "120"}
    for arguments in commands():
        small = [replaced.get(word, word) for word in arguments]
        shorter = [] if "--alpha" in small else SMALL[small[0]]  # else nothing is fitted
        assert run([*small, *shorter]) == 0, arguments
    summary = json.loads((tmp_path / "runs" / "rules" / "summary.json").read_text("utf-8"))
    mixtures = {f"mixture:runs/{name}" for name in ("switch", "nuts", "paper", "plain")}
    assert {result["model"] for result in summary["results"]} == {"accurate", "robust", *mixtures}
    assert {(item["model"], item["versus"]) for item in summary["differences"]} >= {
        (name, "robust") for name in mixtures
    }
    assert (tmp_path / "runs" / "rules" / "report.html").is_file()
