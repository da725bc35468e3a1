"""Every command, killed at its file-system events, resumes to the bytes of an uninterrupted run."""

from __future__ import annotations

import pytest
from fault_runs import COMMANDS, QUICK, check_faults


def test_a_killed_command_resumes_to_the_same_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    check_faults(tmp_path_factory, "kill", "kill halfway", commands=QUICK, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", ["kill", "kill halfway"])
def test_every_kill_resumes_to_the_same_bytes(tmp_path_factory: pytest.TempPathFactory, fault: str,
                                              command: str) -> None:
    check_faults(tmp_path_factory, fault, commands=[command])


@pytest.mark.slow
def test_a_killed_repetition_leaves_a_finished_folder_unchanged(tmp_path_factory: pytest.TempPathFactory) -> None:
    check_faults(tmp_path_factory, "kill", again=True)
