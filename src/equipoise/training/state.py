"""Everything a killed run needs to go on as if nothing had happened, in one file that is whole or not there."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from equipoise.core import checks, records
from equipoise.training.learner import Learner

NAME = "state.pt"
SCHEMA = 1


def save(folder: Path, learner: Learner, step: int, more: dict[str, Any]) -> None:
    """Write weights, average, optimiser, memory, tally and time; through a file beside it, synced and renamed."""
    content = {
        "schema": SCHEMA, "step": step, "more": more, "model": learner.model.state_dict(),
        "average": None if learner.average is None else learner.average.module.state_dict(),
        "optimizer": learner.optimizer.state_dict(), "memory": learner.memory, "tally": learner.tally,
    }
    held = io.BytesIO()
    torch.save(content, held)
    records.write(folder / NAME, held.getvalue())


def load(folder: Path, learner: Learner) -> tuple[int, dict[str, Any]]:
    """Put a saved state into the learner; returns the number of steps done and what else was kept."""
    path = folder / NAME
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        checks.require(content.get("schema") == SCHEMA, "schema", f"be {SCHEMA} in {path}", content.get("schema"))
        learner.model.load_state_dict(content["model"])
        if learner.average is not None:
            learner.average.module.load_state_dict(content["average"])
        learner.optimizer.load_state_dict(content["optimizer"])
        for name, value in content["memory"].items():
            learner.memory[name].copy_(value)
        learner.tally.copy_(content["tally"])
    except checks.InputError:
        raise
    except Exception as error:  # what a damaged or foreign file raises is any kind of error
        raise checks.InputError(f"`{path}` must be the saved state of this run, got one that cannot be used "
                                f"({type(error).__name__})") from None
    # Loading replaces the rate by its saved value; the loop's own tensor must stay in place.
    if learner.rate is not None:
        for group in learner.optimizer.param_groups:
            group["lr"] = learner.rate
    return content["step"], content["more"]
