"""Registries that other packages extend through entry points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import metadata
from typing import Generic, TypeVar

from equipoise.core.checks import InputError, one_of

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Named things of one sort: the built-in ones, and those that installed packages add.

    A package adds to it with an entry point of the registry's group, in its `pyproject.toml`:

        [project.entry-points."equipoise.attacks"]
        my-attack = "my_package:MyAttack"

    Entry points are read when the first name that is not built in is looked up, because that takes
    long where many packages are installed; each is loaded when its own name is.

    `noun` is what one entry is called in error messages, such as "attack".
    """

    def __init__(self, group: str, noun: str, builtin: Mapping[str, T]) -> None:
        self.group, self.noun, self.builtin = group, noun, dict(builtin)

    @cached_property
    def external(self) -> dict[str, metadata.EntryPoint]:
        """Entry points of installed packages; one that would replace a built-in name is an
        error."""
        points = {point.name: point for point in metadata.entry_points(group=self.group)}
        for name, point in points.items():
            if name in self.builtin:
                raise InputError(
                    f"the entry point {name!r} of {self.group} must not replace a built-in {self.noun}, "
                    f"got {point.value!r}"
                )
        return points

    def __getitem__(self, name: str) -> T:
        if name in self.builtin:
            return self.builtin[name]
        entry: T = self.external[name].load()
        return entry

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from self.external

    def __len__(self) -> int:
        return len(self.builtin) + len(self.external)

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self.external

    def get_entry(self, name: str) -> T:
        """The entry of that name; an unknown name is an :class:`InputError` that suggests the
        nearest."""
        is_known = isinstance(name, str) and name in self
        return self[name if is_known else one_of(self.noun, name, self)]
