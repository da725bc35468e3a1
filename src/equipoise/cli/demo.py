"""`equipoise demo`: the whole story on embedded data."""

from __future__ import annotations

from pathlib import Path

import torch
import typer

from equipoise.cli import options, table
from equipoise.core.device import pick
from equipoise.studies import demo as story


def demo(out: options.Out = Path("runs/demo"), device: options.Device = "auto", seed: options.Seed = 0) -> None:
    """Train, fit a mixture, attack and report on embedded data, in about two minutes."""
    # One thread: the sums, and so the numbers, do not depend on how many cores there are, and in networks this
    # small two threads mostly wait for each other.
    torch.set_num_threads(1)
    told = story.demo(out, pick(device), seed)
    table.show(told.results, told.threat)
    promise = f"the mixture {told.promise}" if told.helped else told.promise
    typer.echo(f"promise, made on images of their own: {promise}\nthe page: {told.page}")
