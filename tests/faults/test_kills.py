"""Every command, killed at its file-system events, resumes to the bytes of an uninterrupted run."""

from __future__ import annotations

import pytest
from fault_runs import COMMANDS, QUICK, check_faults


def test_a_command_resumes_to_the_same_bytes_after_a_kill_or_a_disk_fault(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Both together, because the imports and the runs without a fault take longer than those with
    one."""
    check_faults(tmp_path_factory, "kill", "kill halfway", "EIO", "ENOSPC", commands=QUICK, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", ["kill", "kill halfway"])
def test_every_kill_resumes_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, fault: str, command: str
) -> None:
    check_faults(tmp_path_factory, fault, commands=[command])


@pytest.mark.slow
def test_a_killed_repetition_leaves_a_finished_folder_unchanged(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    check_faults(tmp_path_factory, "kill", again=True)
