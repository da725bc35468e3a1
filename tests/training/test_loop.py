"""The loop: every image once, exact resume after a kill, several processes, and what goes wrong."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import models
from equipoise.core import records, rng
from equipoise.core.checks import InputError
from equipoise.core.rng import Stream
from equipoise.core.settings import setting
from equipoise.data.dataset import Dataset
from equipoise.training import Objective, ObjectiveOutput, TrainingPlan, train
from equipoise.training.ema import Average, share
from equipoise.training.loader import TrainingLoader, blot, split
from equipoise.training.objective import Memory
from equipoise.training.objectives import Adversarial, Iaat, SmoothMix, Standard

SRC = Path(__file__).parents[2] / "src"


def dataset(count: int = 90) -> Dataset:
    """Bright above or bright below: easy, but not at once."""
    chance = torch.Generator().manual_seed(3)
    labels = torch.arange(count) % 2
    images = torch.randint(0, 160, (count, 1, 6, 5), generator=chance, dtype=torch.uint8)
    images[labels == 0, :, :3] += 90
    images[labels == 1, :, 3:] += 90
    return Dataset("halves", "train", images, labels, torch.arange(count) + 7, ("up", "down"))


def network(seed: int = 0) -> nn.Module:
    return models.build("cnn_small", num_classes=2, image_shape=(1, 6, 5), seed=seed)


PLAN = TrainingPlan(epochs=3, batch_size=16, lr=0.02, held_out=20, pad=1, flip=True, cutout=2, ema=0.9, save_seconds=0)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def test_learns_and_touches_nothing_else() -> None:
    before = torch.get_rng_state()
    model = train(network(), Standard(), dataset(), TrainingPlan(epochs=15, batch_size=16, lr=0.05, held_out=30))
    assert torch.equal(torch.get_rng_state(), before) and not model.training
    data = dataset()
    with torch.no_grad():
        assert float((model(data.images / 255).argmax(dim=1) == data.labels).float().mean()) > 0.95
    assert all(p.grad is None for p in model.parameters())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordsImages(Objective):
    """Remembers how often each image was seen."""

    slope: float = setting(0.1, "Of the loss.")

    def memory(self, count: int) -> Memory:
        return {"times": torch.zeros(count), "place": torch.zeros(count, 2)}

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        logits = model(x)
        SEEN.append(stream.index.clone())
        return ObjectiveOutput(self.slope * logits.square().sum(dim=1), logits.argmax(dim=1) == y,
                       {"times": memory["times"] + 1, "place": memory["place"] + 1})


SEEN: list[Tensor] = []


def test_every_image_once_an_epoch_in_a_new_order(tmp_path: Path) -> None:
    SEEN.clear()
    train(network(), RecordsImages(), dataset(), TrainingPlan(epochs=2, batch_size=16, held_out=20), out=tmp_path / "run",
          facts={"arch": "cnn_small"})
    seen = torch.cat(SEEN)
    kept, held = split(dataset(), TrainingPlan(held_out=20))
    first, second = seen[:70], seen[70:]
    assert len(seen) == 140 and [len(part) for part in SEEN] == [16, 16, 16, 16, 6] * 2
    assert torch.equal(first.sort().values, kept.index) and torch.equal(second.sort().values, kept.index)
    assert not torch.equal(first, second)
    assert set(kept.index.tolist()) | set(held.index.tolist()) == set(range(7, 97))


def test_rows_summary_and_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "run"
    model = train(network(), Standard(), dataset(), PLAN, out=out, facts={"arch": "cnn_small"})
    rows = records.read(out)
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert rows[0].keys() >= {"loss", "accuracy", "lr", "clean", "images_per_second", "seconds"}
    results = records.summary(out)["results"]
    assert [(row["model"], row["n"]) for row in results] == [("best", 20), ("last", 20)]
    assert {row["metric"] for row in results} == {"clean"}
    last = models.load(str(out / "last.safetensors"))
    assert same(weights(last), weights(model))
    assert models.facts(out / "best.safetensors")["objective"] == "standard"
    best = int(models.facts(out / "best.safetensors")["epoch"])
    assert rows[best]["clean"] == max(row["clean"] for row in rows)
    assert not (out / "state.pt").exists()


def test_a_finished_run_is_not_done_again(tmp_path: Path) -> None:
    first = weights(train(network(), Standard(), dataset(), PLAN, out=tmp_path / "run", facts={"arch": "cnn_small"}))
    stamp = (tmp_path / "run" / "last.safetensors").stat().st_mtime_ns
    again = train(network(), Standard(), dataset(), PLAN, out=tmp_path / "run", facts={"arch": "cnn_small"})
    assert same(first, weights(again)) and (tmp_path / "run" / "last.safetensors").stat().st_mtime_ns == stamp


class StopError(Exception):
    pass


@pytest.mark.parametrize("objective", [Standard(), Iaat(steps=2, warmup_epochs=1), SmoothMix(noises=2, steps=1)],
                         ids=lambda objective: type(objective).__name__)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resume_is_exact_after_every_step(objective: Objective, optimizer: str, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after each optimiser step in turn, and finished in the end: the bits of a run in one go."""
    from equipoise.training.learner import Learner

    plan = dataclasses.replace(PLAN, epochs=2, optimizer=optimizer, lr=0.01, batch_size=32)
    whole = weights(train(network(), objective, dataset(), plan))
    learn = Learner.learn
    made = [0]

    def once(self: Learner, *arguments: Any, **more: Any) -> None:
        if made[0]:
            raise StopError
        made[0] += 1
        learn(self, *arguments, **more)

    monkeypatch.setattr(Learner, "learn", once)
    sittings = 0
    while sittings < 100:
        made[0], sittings = 0, sittings + 1
        try:
            model = train(network(), objective, dataset(), plan, out=tmp_path / "run", facts={"arch": "cnn_small"})
            break
        except StopError:
            pass
    assert sittings >= 5 and same(whole, weights(model))
    assert [row["index"] for row in records.read(tmp_path / "run")] == [0, 1]


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
sys.path[:0] = [{src!r}, {here!r}]
from test_loop import PLAN, dataset, network
from equipoise.training import train
from equipoise.training.objectives import Adversarial
import dataclasses
plan = dataclasses.replace(PLAN, epochs=25)
print("begun", flush=True)
model = train(network(), Adversarial(eps=0.05, steps=2), dataset(), plan, out={out!r}, facts={{"arch": "cnn_small"}})
"""


def run(out: Path) -> subprocess.Popen[str]:
    script = SCRIPT.format(src=str(SRC), here=str(Path(__file__).parent), out=str(out))
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_killed_at_any_moment_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    with run(tmp_path / "whole") as whole:
        whole.communicate()
    assert whole.returncode == 0
    chance, kills = random.Random(5), 0
    for _ in range(20):
        with run(tmp_path / "killed") as worker:
            assert worker.stdout is not None and worker.stdout.readline() == "begun\n"
            time.sleep(chance.uniform(0.05, 0.5))
            if worker.poll() is None and kills < 2:
                worker.kill()
                kills += 1
        if worker.returncode == 0:
            break
    assert kills >= 1 and worker.returncode == 0
    for name in ("best.safetensors", "last.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    names = ("index", "loss", "accuracy", "clean", "attacked")
    whole_rows, killed_rows = ([[row[name] for name in names] for row in records.read(tmp_path / folder)]
                               for folder in ("whole", "killed"))
    assert whole_rows == killed_rows and len(whole_rows) == 25


TWO = """
import sys, torch
torch.set_num_threads(1)
sys.path[:0] = [{src!r}, {here!r}]
from test_loop import dataset, network
from equipoise.core import parallel
from equipoise.training import TrainingPlan, train
from equipoise.training.objectives import Iaat
with parallel.started(torch.device("cpu")) as world:
    assert world.size == 2
    plan = TrainingPlan(epochs=3, batch_size=23, lr=0.02, held_out=20, pad=1, ema=0.9, save_seconds=0)
    # 70 images in batches of 23: the last has one image, so that one process has none.
    train(network(), Iaat(eps=0.05, growth=0.02, steps=2, warmup_epochs=1), dataset(), plan, out={out!r},
          facts={{"arch": "cnn_small"}})
"""


def test_two_processes_match_one(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO.format(src=str(SRC), here=str(Path(__file__).parent), out=str(tmp_path / "two")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    plan = TrainingPlan(epochs=3, batch_size=23, lr=0.02, held_out=20, pad=1, ema=0.9)
    objective = Iaat(eps=0.05, growth=0.02, steps=2, warmup_epochs=1)
    alone = train(network(), objective, dataset(), plan, out=tmp_path / "one", facts={"arch": "cnn_small"})
    for key, value in weights(models.load(str(tmp_path / "two" / "last.safetensors"))).items():
        torch.testing.assert_close(value, weights(alone)[key], rtol=1e-5, atol=1e-6)
    rows = [records.read(tmp_path / name) for name in ("one", "two")]
    for one, two in zip(*rows, strict=True):
        for key in ("loss", "accuracy", "clean", "attacked"):
            assert one[key] == pytest.approx(two[key], rel=1e-4)


def test_average_of_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    average = Average(model)
    live, kept = model.state_dict(), average.module.state_dict()
    start = kept["0.weight"].clone()
    live["0.weight"].add_(1)
    live["1.num_batches_tracked"].add_(5)
    average.follow(0.25)
    torch.testing.assert_close(kept["0.weight"], start + 0.25)
    assert int(kept["1.num_batches_tracked"]) == 5
    assert share(0.9, 0) == pytest.approx(0.9) and share(0.9, 10_000) == pytest.approx(0.1)


def test_clip_bounds_the_step() -> None:
    """Plain gradient descent with rate 1: the weights move by the norm of the gradient, at most by `clip`."""
    model = network()
    before = weights(model)
    plan = TrainingPlan(epochs=1, batch_size=16, lr=1.0, momentum=0.0, weight_decay=0, schedule="constant", clip=1e-3,
                held_out=74)
    train(model, RecordsImages(slope=100.0), dataset(), plan)
    moved = torch.cat([(value - before[key]).flatten() for key, value in weights(model).items()]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)


def test_augmentation_follows_the_image() -> None:
    plan = dataclasses.replace(PLAN, held_out=0)
    feed = TrainingLoader(dataset(), plan, torch.device("cpu"))
    rows = torch.tensor([5, 80, 3])
    assert torch.equal(feed.look(rows, 1)[1:2], feed.look(rows[1:2], 1))
    assert not torch.equal(feed.look(rows, 1), feed.look(rows, 2))


def test_blot_covers_one_square() -> None:
    x = torch.full((40, 3, 9, 8), 200, dtype=torch.uint8)
    grey = torch.tensor([1, 2, 3], dtype=torch.uint8).view(1, 3, 1, 1)
    covered = blot(x, 4, grey, rng.stream(0, "augment", torch.arange(40))) != 200
    area = covered[:, 0].sum(dim=(1, 2))
    assert covered.all(dim=1).equal(covered.any(dim=1)) and int(area.min()) >= 4 and int(area.max()) == 16
    assert len(area.unique()) > 1


def test_batch_larger_than_the_data() -> None:
    with pytest.raises(InputError, match="`batch_size` must be at most the number of training images, 70, got 71"):
        train(network(), Standard(), dataset(), dataclasses.replace(PLAN, batch_size=71))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a bug of ours")])
def test_out_of_memory_names_the_batch(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.training.learner import Learner

    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Learner, "learn", full)
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    with pytest.raises(InputError if out_of_memory else RuntimeError, match="`batch_size` must fit into the memory of "
                       "this cpu, got 16" if out_of_memory else "a bug of ours"):
        train(network(), Standard(), dataset(), PLAN)


def test_nothing_left_to_train_on() -> None:
    with pytest.raises(InputError, match="`held_out` must be less than the 90 images"):
        train(network(), Standard(), dataset(), dataclasses.replace(PLAN, held_out=90))


@pytest.mark.parametrize("change", ["arch", "data", "plan", "objective"])
def test_a_folder_of_another_run_is_refused(change: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(network(), Standard(), dataset(), PLAN, out=out, facts={"arch": "cnn_small"})
    data = dataset(80) if change == "data" else dataset()
    plan = dataclasses.replace(PLAN, lr=0.03) if change == "plan" else PLAN
    objective = Adversarial() if change == "objective" else Standard()
    with pytest.raises(InputError, match="belong to this run"):
        train(network(), objective, data, plan, out=out, facts={"arch": "cnn" if change == "arch" else "cnn_small"})


class Breaks(Standard):
    """NaN from the eighth step on."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, stream: Stream, memory: Memory) -> ObjectiveOutput:
        found = super().__call__(model, x, y, stream, memory)
        SEEN.append(stream.index)
        return dataclasses.replace(found, losses=found.losses * (float("nan") if len(SEEN) > 7 else 1.0))


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    SEEN.clear()
    out = tmp_path / "run"
    with pytest.raises(InputError, match=r"got NaN or infinity at step 7 \(epoch 1\); the last good checkpoint"):
        train(network(), Breaks(), dataset(), PLAN, out=out, facts={"arch": "cnn_small"})
    kept = models.load(str(out / "last.safetensors"))
    assert all(value.isfinite().all() for value in weights(kept).values())
    assert torch.load(out / "state.pt", weights_only=True)["step"] == 7


def test_a_loss_that_breaks_between_two_saves_leaves_the_best_epoch(tmp_path: Path) -> None:
    """States are saved every 30 seconds; the epochs since then are not lost with a loss that breaks."""
    SEEN.clear()
    plan = dataclasses.replace(PLAN, save_seconds=1e6)
    with pytest.raises(InputError, match=r"the last good checkpoint in .* was kept"):
        train(network(), Breaks(), dataset(), plan, out=tmp_path / "run", facts={"arch": "cnn_small"})
    assert models.facts(tmp_path / "run" / "best.safetensors")["epoch"] == "0"
    kept = models.load(str(tmp_path / "run" / "best.safetensors"))
    assert all(value.isfinite().all() for value in weights(kept).values())


def test_a_loss_that_breaks_before_any_checkpoint_promises_none(tmp_path: Path) -> None:
    SEEN[:] = [torch.zeros(1)] * 7
    plan = dataclasses.replace(PLAN, save_seconds=1e6)
    with pytest.raises(InputError, match=r"at step 0 \(epoch 0\); no checkpoint had been saved"):
        train(network(), Breaks(), dataset(), plan, out=tmp_path / "run", facts={"arch": "cnn_small"})
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, whole = tmp_path / "run", weights(train(network(), Standard(), dataset(), PLAN))
    real, calls = os.fsync, [0]

    def full(number: int) -> None:
        calls[0] += 1
        if calls[0] > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        train(network(), Standard(), dataset(), PLAN, out=out, facts={"arch": "cnn_small"})
    monkeypatch.setattr(os, "fsync", real)
    kept = torch.load(out / "state.pt", weights_only=True)
    assert 0 < kept["step"] < 15 and not list(out.glob(".*"))
    assert same(whole, weights(train(network(), Standard(), dataset(), PLAN, out=out, facts={"arch": "cnn_small"})))


def test_a_damaged_state_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    SEEN.clear()
    with pytest.raises(InputError):
        train(network(), Breaks(), dataset(), PLAN, out=out, facts={"arch": "cnn_small"})
    (out / "state.pt").write_bytes((out / "state.pt").read_bytes()[:1000])
    SEEN.clear()
    with pytest.raises(InputError, match=r"state.pt` must be the saved state of this run"):
        train(network(), Breaks(), dataset(), PLAN, out=out, facts={"arch": "cnn_small"})
