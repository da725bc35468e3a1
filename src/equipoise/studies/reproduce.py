"""The studies of the papers: what each is called, and how one begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from equipoise.core import checks
from equipoise.core.records import Run
from equipoise.core.threat import Threat
from equipoise.evaluation import Conditions, facts
from equipoise.studies import adaptive_smoothing, local_pair, local_smoothing

STUDIES = {"adaptive-smoothing": adaptive_smoothing, "local-smoothing": local_smoothing}


def reproduce(name: str, out: Path, size: str, device: torch.device, *, seed: int = 0, parts: Sequence[str] = (),
              accurate: str | None = None, robust: str | None = None, data: str | None = None,
              data_dir: Path | None = None, norm: str | None = None, eps: float | None = None,
              command: str = "") -> Path:
    """Tell the story into `out` and return the page; a folder of the same study is resumed.

    Args:
        name: of :data:`STUDIES`.
        out: run folder.
        size: smoke trains two small networks on digits; full takes any two classifiers.
        device: where to compute.
        seed: of all chance.
        parts: of the study's `PARTS`; all if none are named.
        accurate, robust: model references, for full.
        data: their data set, for full; CIFAR-10 if not given.
        data_dir: where it lies.
        norm, eps: the threat, for full; ℓ∞ ≤ 8/255 if neither is given.
        command: to be shown on the page.
    """
    study = STUDIES[checks.one_of("name", name, STUDIES)]
    chosen = study.SIZES[checks.one_of("size", size, study.SIZES)]
    full = size == "full"
    local_pair.asked(full, accurate, robust, data=data, norm=norm, eps=eps)
    for part in parts:
        checks.one_of("part", part, study.PARTS)
    checks.require(eps is not None or norm in (None, "linf"), "eps", f"be given for the norm {norm}", eps)
    threat = Threat(norm or "linf", eps if eps is not None else 8 / 255 if full else local_pair.EPS)
    conditions = Conditions(threat, device, seed, chosen.batch_size)
    named = {"accurate": accurate, "robust": robust} if full else {}
    if data not in (None, "cifar10"):
        named["data"] = data
    # Before the folder is begun: a name that does not exist leaves nothing that a second try would stumble over.
    given = local_pair.given(str(accurate), str(robust), data or "cifar10", data_dir) if full else None
    run = Run(out, {"verb": "reproduce", "study": name, "size": size, "seed": seed, **named,
                    "threat": threat.facts()}, {**facts(conditions), "command": command})
    pair = given or local_pair.digits(out / "bases", conditions)
    page: Path = study.Study(run, pair, chosen, conditions).tell(parts or study.PARTS)
    return page
