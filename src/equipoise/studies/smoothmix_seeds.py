"""Certificates of the SmoothMix study of several random seeds in one run folder."""

from __future__ import annotations

import re
from pathlib import Path

from equipoise.core import checks, files
from equipoise.core.records import read_description

CERTIFICATES = "certificates"
_JOINED = re.compile(r"_seed\d+$")


def join_certificates(folder: Path, other: Path) -> None:
    """Copy the certificates of the same study with another seed, in `other`, to
    `certificates/NAME_seedN`.

    Those of a classifier must be of the same images and settings as this study's own, where it has
    any.
    """
    checks.require(
        (other / "run.toml").is_file(), "join", "be a run folder of this study", str(other)
    )
    own, joined = (read_description(path / "run.toml").identity for path in (folder, other))
    for key in ("study", "size", "data"):
        checks.require(
            own.get(key) == joined.get(key),
            "join",
            f"be a run with {key} {own.get(key)!r}",
            joined.get(key),
        )
    checks.require(
        own["seed"] != joined["seed"], "join", "have another seed than this study", joined["seed"]
    )
    finished = [
        path
        for path in sorted((other / CERTIFICATES).glob("*/"))
        if (path / "summary.json").is_file() and not _JOINED.search(path.name)
    ]
    checks.require(bool(finished), "join", "hold finished certificates", str(other))
    for source in finished:
        _require_same_certification(folder / CERTIFICATES / source.name, source)
    for source in finished:
        target = folder / CERTIFICATES / f"{source.name}_seed{joined['seed']}"
        target.mkdir(parents=True, exist_ok=True)
        for name in (
            "run.toml",
            "rows.jsonl",
            "summary.json",
        ):  # last the summary, which marks a run as finished
            files.write_atomic(target / name, (source / name).read_bytes())


def joined_folders(folder: Path, name: str) -> list[Path]:
    """The folders of a classifier's certificates, first this study's own, those of other seeds in
    order."""
    own = folder / CERTIFICATES / name
    others = [
        path for path in own.parent.glob(f"{name}_seed*") if _JOINED.sub("", path.name) == name
    ]
    return [path for path in (own, *sorted(others)) if (path / "summary.json").is_file()]


def _require_same_certification(own: Path, joined: Path) -> None:
    """Certificates of two seeds are averaged only if images and settings of sampling agree."""
    if (own / "run.toml").is_file():
        first, second = (read_description(path / "run.toml").identity for path in (own, joined))
        for key in ("data", "plan"):
            checks.require(
                first.get(key) == second.get(key),
                "join",
                f"have the same {key} of {own.name}",
                str(joined),
            )
