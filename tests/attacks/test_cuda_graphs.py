"""Recorded passes: what may not happen while one is recorded."""

from __future__ import annotations

import gc

import pytest

from equipoise.attacks.cuda_graphs import without_collection


def test_nothing_is_collected_while_a_pass_is_recorded() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="cannot be recorded"), without_collection():
        assert not gc.isenabled()
        raise RuntimeError("cannot be recorded")
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
