"""Ways to damage a folder: its files, the values in them, its rows, arrays and tensors."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from equipoise.core import config

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [
    True,
    False,
    "no",
    "",
    "x" * 10_000,
    "../../..",
    "\x1b[31m",
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    10**30,
    0.5,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    [],
    {},
    [[]],
    [1, "a"],
    {"a": 1},
    DEEP,
]
ARRAYS = [
    np.zeros(0),
    np.zeros((2, 3, 4)),
    np.array(1.5),
    np.array("text"),
    np.array(["a", "b"]),
    np.array([None]),
    np.arange(5),
    np.full(7, np.nan),
    np.array([1 + 2j]),
    np.zeros((0, 3)),
    np.array([2**63], dtype=np.uint64),
]
TENSORS = [
    torch.zeros(0),
    torch.zeros(2, 3),
    torch.tensor(True),
    torch.full((3,), float("nan")),
    torch.arange(4),
]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _one_of(chance: random.Random, folder: Path, *suffixes: str) -> Path | None:
    files = [path for path in _files(folder) if not suffixes or path.suffix in suffixes]
    return chance.choice(files) if files else None


def damage_file(chance: random.Random, folder: Path) -> str:
    """Delete, truncate, empty, overwrite, extend or replace a file, or flip some of its bytes."""
    path = _one_of(chance, folder)
    if path is None:
        return "nothing"
    data, how = (
        bytearray(path.read_bytes()),
        chance.choice(
            (
                "delete",
                "truncate",
                "empty",
                "flip",
                "zeros",
                "noise",
                "append",
                "folder",
                "swap",
                "link",
            )
        ),
    )
    if how in ("delete", "folder", "link"):
        path.unlink()
        if how == "folder":
            path.mkdir()
        if how == "link":
            path.symlink_to(folder / "nowhere")
    elif how == "swap":
        other = chance.choice(_files(folder))
        content = other.read_bytes()
        other.write_bytes(bytes(data))
        path.write_bytes(content)
    elif how == "flip":
        for _ in range(chance.choice((1, 4, 30))):
            if data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(data))
    else:
        new = {
            "truncate": bytes(data[: chance.randrange(len(data) + 1)]),
            "empty": b"",
            "zeros": bytes(len(data)),
            "noise": chance.randbytes(200),
            "append": bytes(data) + chance.randbytes(50),
        }[how]
        path.write_bytes(new)
    return f"{how} {path.relative_to(folder)}"


def _edit(chance: random.Random, value: Any) -> tuple[Any, str]:
    """Replace, drop, rename or copy one value somewhere inside."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, how = chance.choice(keys), chance.random()
        if how < 0.1:
            del value[key]
            return value, f"without {key!r}"
        if how < 0.15 and isinstance(value, dict):
            value[f"{key}x"] = value.pop(key)
            return value, f"renamed {key!r}"
        if how < 0.2 and isinstance(value, list):
            value.append(value[key])
            return value, f"repeated {key!r}"
        if how < 0.25:
            value[key] = value[chance.choice(keys)]
            return value, f"another value at {key!r}"
        value[key], text = _edit(chance, value[key])
        return value, f"{key!r} → {text}"
    new = chance.choice(VALUES)
    return new, repr(new)[:60]


def edit_value(chance: random.Random, folder: Path) -> str:
    """Another value, type or key in a TOML or JSON file."""
    path = _one_of(chance, folder, ".toml", ".json")
    if path is None:
        return "nothing"
    text = path.read_text(encoding="utf-8")
    table, change = _edit(
        chance, tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    )
    if path.suffix == ".toml" and not isinstance(table, dict):
        table = {"value": table}
    path.write_text(
        config.dumps(table) if path.suffix == ".toml" else json.dumps(table), encoding="utf-8"
    )
    return f"{path.relative_to(folder)}: {change}"


def edit_rows(chance: random.Random, folder: Path) -> str:
    """Another value in a row, a row twice, a row less, rows in another order, or one line that is
    none."""
    path = _one_of(chance, folder, ".jsonl")
    lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    if path is None or not lines:
        return "nothing"
    number = chance.randrange(len(lines))
    how = chance.choice(("edit", "edit", "edit", "twice", "less", "order", "line"))
    if how in ("edit", "twice"):
        try:
            row, change = _edit(chance, json.loads(lines[number]))
        except ValueError:
            return "nothing"
        lines.insert(number, json.dumps(row))
        if how == "edit":
            del lines[number + 1]
    elif how == "less":
        change = lines.pop(number)
    elif how == "order":
        chance.shuffle(lines)
        change = "shuffled"
    else:
        change = lines[number] = chance.choice(
            ("", "null", "[]", '{"kind": []}', '{"kind": {}}', "1", "{" * 5000)
        )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return f"{path.relative_to(folder)}, line {number + 1}, {how}: {change[:200]}"


def edit_arrays(chance: random.Random, folder: Path) -> str:
    """Another array in an `.npz` file, one less, or one under another name."""
    path = _one_of(chance, folder, ".npz")
    if path is None:
        return "nothing"
    with np.load(path) as stored:
        content: dict[str, Any] = dict(stored)
    name, how = (
        chance.choice(list(content)),
        chance.choice(("replace", "less", "rename", "swap", "cut")),
    )
    value = content.pop(name)
    if how == "replace":
        content[name] = chance.choice(ARRAYS)
    if how == "rename":
        content[f"{name}x"] = value
    if how == "swap" and content:
        other = chance.choice(list(content))
        content[name], content[other] = content[other], value
    if how == "cut":
        content[name] = value[1:] if value.ndim else value
    np.savez(path, **content)
    return f"{path.relative_to(folder)}: {how} {name}"


def edit_tensors(chance: random.Random, folder: Path) -> str:
    """Other metadata or another tensor in a safetensors file."""
    path = _one_of(chance, folder, ".safetensors")
    if path is None:
        return "nothing"
    with safe_open(path, framework="pt") as file:
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata() or {})
    if metadata and chance.random() < 0.6:
        name = chance.choice(list(metadata))
        metadata[name] = chance.choice(
            (
                "",
                "-1",
                "0",
                "x",
                "1,2",
                "1,1,1",
                "9" * 30,
                "3,99999,99999",
                ";",
                "a,b;c,d",
                "resnet8",
                "1;2;3",
                metadata[chance.choice(list(metadata))],
            )
        )
        change = f"{name} = {metadata[name][:60]!r}"
        if chance.random() < 0.2:
            del metadata[name]
    else:
        name = chance.choice(list(state))
        state[name] = chance.choice(
            (*TENSORS, state[chance.choice(list(state))].clone(), state[name].half())
        )
        change = f"another tensor {name}"
    save_file({key: value.contiguous() for key, value in state.items()}, path, metadata)
    return f"{path.relative_to(folder)}: {change}"


def add_files(chance: random.Random, folder: Path) -> str:
    """Files of desktops and editors."""
    name = chance.choice(
        (".DS_Store", "Thumbs.db", "desktop.ini", "notes.txt~", ".run.toml.swp", "parts/x.jsonl")
    )
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(chance.randbytes(20))
    return f"added {name}"


MUTATIONS: tuple[Callable[[random.Random, Path], str], ...] = (
    damage_file,
    edit_value,
    edit_value,
    edit_rows,
    edit_arrays,
    edit_tensors,
    add_files,
)


def mutate(chance: random.Random, folder: Path) -> str:
    """One of the mutations; a file that an earlier one has damaged may be left as it is."""
    mutation = chance.choice(MUTATIONS)
    try:
        return mutation(chance, folder)
    except Exception as error:
        return f"nothing ({type(error).__name__})"
