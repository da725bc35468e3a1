"""Replay commands with a fault at each of their file-system events, then resume and compare all
bytes.

Run as a script with `faults.c` preloaded: `replay.py FOLDER < request.json`. The request names the
faults, how many events to test (all if null) and the commands; one line of JSON per command comes
back. Every command runs in a child that is forked after the imports, so that a replay costs little
more than the work itself.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# fault → (action of faults.c, errno, exit code of the command)
FAULTS = {
    "kill": (1, 0, -signal.SIGKILL),
    "kill halfway": (2, 0, -signal.SIGKILL),
    "EIO": (3, errno.EIO, 2),
    "ENOSPC": (4, errno.ENOSPC, 2),
}
DATA = ["--data", "npz:images.npz", "--device", "cpu"]
PAIR = ["--accurate", "accurate.safetensors", "--robust", "robust.safetensors"]
FIT = [
    "fit",
    *PAIR,
    *DATA,
    "--eps",
    "0.002",
    "--steps",
    "1",
    "--targets",
    "1",
    "--pool",
    "1",
    "--rounds",
    "0",
    "--lose-at-most",
    "20",
]
EVALUATE = [
    "evaluate",
    "mixture:mixture",
    *DATA,
    "--count",
    "4",
    "--eps",
    "0.002",
    "--attack",
    "pgd",
    "--steps",
    "1",
]
COMMANDS = {
    "train": [
        "train",
        "adversarial",
        *DATA,
        "--arch",
        "cnn_small",
        "--count",
        "40",
        "--epochs",
        "2",
        "--steps",
        "1",
        "--batch-size",
        "20",
        "--eps",
        "0.01",
        "--ema",
        "0.9",
        "--held-out",
        "6",
        "--save-seconds",
        "0",
    ],
    "train gate": [
        "train",
        "gate",
        *PAIR,
        *DATA,
        "--count",
        "40",
        "--eps",
        "0.002",
        "--width",
        "2",
        "--epochs",
        "1",
        "--steps",
        "1",
        "--batch-size",
        "20",
        "--save-seconds",
        "0",
    ],
    "evaluate": [
        "evaluate",
        "robust.safetensors",
        *DATA,
        "--count",
        "6",
        "--eps",
        "0.002",
        "--attack",
        "pgd",
        "--steps",
        "1",
        "--batch-size",
        "2",
        "--estimate",
    ],
    "evaluate a mixture": [
        "evaluate",
        "mixture:mixture",
        *DATA,
        "--count",
        "4",
        "--eps",
        "0.002",
        "--attack",
        "apgd",
        "--steps",
        "1",
        "--batch-size",
        "2",
    ],
    "certify": [
        "certify",
        "robust.safetensors",
        *DATA,
        "--count",
        "2",
        "--sigma",
        "0.1",
        "--samples",
        "40",
        "--n0",
        "10",
        "--attack",
        "pgd",
    ],
    "fit": FIT,
    "fit with a gate": [*FIT, "--gate", "gate"],
    "plain mixing": ["fit", *PAIR, "--eps", "0.002", "--alpha", "0.5"],
    "save_mixture": [],
    "report": ["report"],
}
QUICK = ["train", "evaluate", "certify", "plain mixing", "save_mixture"]  # for the fast tier
PREPARED = {"report": "evaluated"}  # commands that work in a folder of another one
TIMES = ("seconds", "images_per_second", "compile_seconds", "costs")


@dataclass
class Outcome:
    """What the replays of one command came to."""

    command: str
    events: (
        str  # one letter for each: open, write, sync, rename, unlink, mkdir, rmdir (d), truncate
    )
    replays: int = 0
    failures: list[str] = field(default_factory=list)


def write_models(folder: Path) -> None:
    """A pair of models with 60 images, and a mixture of it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
    from small_files import write_pair

    from equipoise.cli.main import run

    write_pair(folder, 60)
    assert run([*FIT, "--out", "mixture"]) == 0


def write_inputs(folder: Path) -> int:
    """The models, a gate, and an evaluation of the mixture."""
    from equipoise.cli.main import run

    write_models(folder)
    for out, arguments in (("gate", COMMANDS["train gate"]), ("evaluated", EVALUATE)):
        assert run([*arguments, "--out", out]) == 0
    assert run(["report", "evaluated"]) == 0
    shutil.rmtree("evaluated/figures")
    (folder / "modules").write_text(json.dumps(sorted(sys.modules)))
    return 0


def run_command(name: str, out: Path) -> int:
    """Run a command with `out` as its folder; returns its exit code."""
    from equipoise.attacks import Apgd, Suite
    from equipoise.cli.main import run
    from equipoise.fitting import gated

    # The selection of a range takes half a minute, nearly all of it between two events.
    gated.with_ranges.__defaults__ = ((0.1, 0.5), (0.0,))
    gated.candidate_attack.__defaults__ = (Suite(attacks=(Apgd(steps=1),)), (Apgd(steps=1),))
    gated.full_attack = gated.candidate_attack
    arguments = [*COMMANDS[name], *([str(out)] if name in PREPARED else ["--out", str(out)])]
    if name == "save_mixture":
        from equipoise import models
        from equipoise.mixing import GatedClassifier, load_gate, save_mixture

        accurate, robust = (models.load(f"{side}.safetensors") for side in ("accurate", "robust"))
        gate = load_gate("gate/gate.safetensors", accurate, robust)
        save_mixture(out, GatedClassifier(accurate, robust, gate))
        return 0
    sys.argv = ["equipoise", *arguments]
    return run(arguments)


def in_child(work: Callable[[], int], log: Path) -> int:
    """Run in a forked child whose output goes to a file; returns its exit code, or minus the
    signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            code = work()
            sys.stdout.flush()
        except OSError as error:  # only `save_mixture`, which is no command, raises
            code = 2
            print(f"equipoise: {error}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, Any]:
    """Every file and folder below `folder` with its bytes, except for times."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        data: Any = path.read_bytes() if path.is_file() else None
        if data is not None and path.suffix in (".json", ".jsonl"):
            lines = data.decode().splitlines() if path.suffix == ".jsonl" else [data]
            data = [without_times(json.loads(line)) for line in lines]
        found[str(path.relative_to(folder))] = data
    return found


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


class Replay:
    """Replays of one command, always in the same folder, because commands record it."""

    def __init__(self, name: str, folder: Path, *, again: bool) -> None:
        self.name, self.out, self.log, self.start = (
            name,
            folder / "out",
            folder / "log",
            folder / "start",
        )
        self.shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self.shim.faults_kinds.restype = ctypes.c_char_p
        shutil.rmtree(self.start, ignore_errors=True)
        if name in PREPARED:
            (folder / PREPARED[name] / "report.html").unlink(missing_ok=True)
            shutil.copytree(folder / PREPARED[name], self.start)
        self.reset()
        events = folder / "events"
        self.run(lambda: events.write_bytes(self.shim.faults_kinds()))
        self.expected, self.again = contents(self.out), again
        if again:  # on the finished folder
            shutil.rmtree(self.start, ignore_errors=True)
            shutil.copytree(self.out, self.start)
            self.run(lambda: events.write_bytes(self.shim.faults_kinds()))
        self.events = events.read_text()

    def reset(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        if self.start.exists():
            shutil.copytree(self.start, self.out)

    def run(self, then: Callable[[], object] = lambda: None) -> None:
        """Run without a fault."""

        def work() -> int:
            self.shim.faults_start(str(self.out).encode(), -1, 0, 0)
            code = run_command(self.name, self.out)
            then()
            return code

        code = in_child(work, self.log)
        assert code == 0, f"exit code {code} without a fault: {self.log.read_text()[-1500:]}"

    def with_fault(self, fault: str, event: int) -> str | None:
        """A fault at an event, then the command again; returns what went wrong."""
        action, number, expected_code = FAULTS[fault]
        self.reset()

        def work() -> int:
            self.shim.faults_start(str(self.out).encode(), ctypes.c_long(event), action, number)
            return run_command(self.name, self.out)

        code = in_child(work, self.log)
        output = self.log.read_text()
        if code != expected_code:
            return f"exit code {code}: {output[-1500:]}"
        if expected_code == 2:
            sentences = [line for line in output.splitlines() if line.startswith("equipoise: ")]
            if len(sentences) != 1 or "Traceback" in output:
                return f"not one sentence: {output[-1500:]}"
            if left := list(self.out.rglob("*.tmp")):
                return f"left {left}"
        if self.again and (change := self.difference()):
            return f"the finished folder was changed: {change}"
        try:
            self.run()
        except AssertionError as error:
            return f"not resumed: {error}"
        return self.difference()

    def difference(self) -> str | None:
        found = {
            name: data
            for name, data in contents(self.out).items()
            if not (self.again and re.fullmatch(r"(.*/)?\.equipoise-\w+\.tmp", name))
        }
        wrong = [
            name
            for name in sorted({*found, *self.expected}, key=str)
            if name not in found or name not in self.expected or found[name] != self.expected[name]
        ]
        return f"{', '.join(wrong)} differ from the uninterrupted run" if wrong else None


def sample(events: str, fault: str, most: int | None, shift: int) -> list[int]:
    """All events, or `most` of them, spread evenly from a start that differs between commands and
    faults."""
    # A full disk is noticed by what needs space.
    possible = [event for event, kind in enumerate(events) if fault != "ENOSPC" or kind in "owms"]
    count = len(possible)
    if most is None or most >= count:
        return possible
    start = shift * 7 + list(FAULTS).index(fault) * 5
    return [possible[(start + position * count // most) % count] for position in range(most)]


def main() -> None:
    folder, request = Path(sys.argv[1]), json.load(sys.stdin)
    import altair  # noqa: F401
    import torch

    from equipoise.cli.main import COMMANDS, load_command

    for name in COMMANDS:
        load_command(name)
    torch.set_num_threads(1)
    os.chdir(folder)
    if not (folder / "evaluated").exists():
        assert in_child(lambda: write_inputs(folder), folder / "log") == 0, (
            folder / "log"
        ).read_text()
    for module in json.loads(
        (folder / "modules").read_text()
    ):  # what commands import late, once for all children
        with suppress(ImportError):
            importlib.import_module(module)
    for shift, name in enumerate(request["commands"]):
        replay = Replay(name, folder, again=request["again"])
        outcome = Outcome(name, replay.events)
        for fault in request["faults"]:
            for event in sample(replay.events, fault, request["most"], shift):
                outcome.replays += 1
                if failure := replay.with_fault(fault, event):
                    outcome.failures.append(
                        f"{name}, {fault} at event {event} of {len(replay.events)} "
                        f"({replay.events[event]}): {failure}"
                    )
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
