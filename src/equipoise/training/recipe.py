"""Recipes: files of `configs/` that define a training run, from the data set to the schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from equipoise.core import checks, config
from equipoise.core.settings import split
from equipoise.data import Dataset
from equipoise.training.loop import TrainingResult
from equipoise.training.objective import Objective, TrainingPlan
from equipoise.training.objectives import OBJECTIVES
from equipoise.training.trainer import train

_OWN = ("data", "arch", "mean", "std")


@dataclass(frozen=True)
class Recipe:
    """A training run without its images; in a file the objective is the third word of the name, as
    in `a_b_macer_c`."""

    name: str
    data: str
    arch: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    objective: Objective
    plan: TrainingPlan

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recipe; a setting that neither the objective nor the plan has is an error."""
        table, words = config.read(path), path.stem.split("_")
        checks.require(len(words) > 2, "recipe", "be named DATA_ARCH_OBJECTIVE.toml", path.name)
        for name in _OWN:
            checks.require(
                isinstance(table.get(name), str), name, f"be text in {path}", table.get(name)
            )
        data, arch, *normalization = (table.pop(name) for name in _OWN)
        mean, std = (
            tuple(checks.fractions("mean or std", values, most=16)) for values in normalization
        )
        objective, plan = split(table, OBJECTIVES.get_entry(words[2]), TrainingPlan)
        return cls(path.stem, data, arch, mean, std, objective, plan)

    def changed(self, suffix: str = "", **settings: Any) -> Self:
        """The recipe with other settings of its objective or plan, and with a suffix to its
        name."""
        own = {name: value for name, value in settings.items() if name in self.objective.names()}
        plan = {name: value for name, value in settings.items() if name not in own}
        for name in plan:
            checks.one_of("setting", name, [*self.objective.names(), *TrainingPlan.names()])
        return replace(
            self,
            name=self.name + suffix,
            objective=replace(self.objective, **own),
            plan=replace(self.plan, **plan),
        )

    def train(self, images: Dataset, device: torch.device | str, out: Path) -> TrainingResult:
        """Train by the recipe, or resume or read the run in `out`."""
        return train(
            self.objective,
            arch=self.arch,
            data=images,
            mean=self.mean,
            std=self.std,
            out=out,
            device=device,
            **self.plan.to_dict(),
        )
