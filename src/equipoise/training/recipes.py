"""Recipes: settings of training runs that are known to work, by name; they stand in
`recipes.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equipoise.core import checks, config

FILE = Path(__file__).with_name("recipes.toml")


def list_recipes() -> tuple[str, ...]:
    """The names of all recipes."""
    tables = config.read(FILE)
    return tuple(name for name in tables if "objective" in _with_base(tables, name))


def read_recipe(name: str) -> dict[str, Any]:
    """A recipe as arguments of :func:`~equipoise.training.train`.

    train(**read_recipe("cifar10_resnet18_adversarial"), out="runs/robust")
    """
    checks.one_of("recipe", name, list_recipes())
    return _with_base(config.read(FILE), name)


def _with_base(tables: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings of a table, and those of its base that it does not have itself."""
    settings = dict(tables[name])
    if "base" in settings:
        base = _with_base(tables, settings.pop("base"))
        settings = {**base, **settings}
    return settings
