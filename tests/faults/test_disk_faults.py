"""A disk that fails or is full: one sentence, exit code 2, nothing damaged, and the command can be
repeated.

In the fast tier, `test_kills.py` tries some of these faults too.
"""

from __future__ import annotations

import pytest
from fault_runs import COMMANDS, check_faults

DISK_FAULTS = pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@DISK_FAULTS
def test_every_disk_fault_is_one_sentence_and_the_command_resumes(
    tmp_path_factory: pytest.TempPathFactory, fault: str, command: str
) -> None:
    check_faults(tmp_path_factory, fault, commands=[command])


@pytest.mark.slow
@DISK_FAULTS
def test_a_disk_fault_of_a_repetition_leaves_a_finished_folder_unchanged(
    tmp_path_factory: pytest.TempPathFactory, fault: str
) -> None:
    check_faults(tmp_path_factory, fault, again=True)
