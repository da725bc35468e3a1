"""Summaries of schema 1, in the form of the present schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def upgrade(old: Mapping[str, Any]) -> dict[str, Any]:
    """The values of this schema; schema 1 had other names, and kept the outcome of a fit in several
    keys."""
    new = _rename(old, _SUMMARY_1)
    for key, names in _LISTS_1.items():
        if key in new:
            new[key] = [_rename(item, names) for item in new[key]]
    if "fitted" in old:
        new["fit"] = {
            **old["fitted"],
            **{key: old[key] for key in ("helped", "promise", "rejected", "notes")},
        }
    if "gate" in old:
        new["gate"] = {**_rename(old["gate"], _SELECTION_1), "promise": old["promise"]}
    if "selections" in new:
        new["selections"] = {
            name: _rename(item, _SELECTION_1) for name, item in new["selections"].items()
        }
    return new


def _rename(old: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    """The same values under new names; those whose new name is None are dropped."""
    return {new: value for key, value in old.items() if (new := names.get(key, key)) is not None}


# Old names → new names.
_SUMMARY_1 = {
    "verb": "command",
    "symptoms": "sanity_checks",
    "cost": "costs",
    "epoch": "best_epoch",
    "chosen": "selected_alphas",
    "left-out": "excluded",
    "bounds": "oracle_gate",
    "matched": "selections",
    **dict.fromkeys(("helped", "promise", "fitted", "rejected", "notes")),
}
_RESULT_1 = {"estimate": "is_estimate", "broken": None, "sound": None}
_SELECTION_1 = {"strikes": "candidates_attacked", "robust": "robust_attacked"}
_LISTS_1: dict[str, Mapping[str, str | None]] = {
    "results": _RESULT_1,
    "oracle_gate": _RESULT_1,
    "joint": _RESULT_1,
    "sanity_checks": {"says": "explanation"},
    "costs": {"asked": "accurate_share"},
    "excluded": {"wanted": "target"},
    "selected_alphas": {"wanted": "target", "clean-estimate": "clean_estimate"},
}
