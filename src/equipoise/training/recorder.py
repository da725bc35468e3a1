"""The run folder of a training: rows, checkpoints and state, in an order that no kill can upset."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import __version__, models
from equipoise.core import checks, stats
from equipoise.core.records import Row, Run, key_of
from equipoise.data.dataset import Dataset
from equipoise.models import checkpoint
from equipoise.models.normalize import Normalized
from equipoise.training import state
from equipoise.training.learner import Learner
from equipoise.training.objective import Objective
from equipoise.training.plan import TrainingPlan

BEST, LAST = "best.safetensors", "last.safetensors"


class RunRecorder:
    """What is written down. Without a folder nothing is."""

    def __init__(self, out: Path | str | None, model: nn.Module, objective: Objective, data: Dataset, plan: TrainingPlan,
                 device: torch.device, facts: Mapping[str, Any]) -> None:
        self.folder = None if out is None else Path(out)
        self.run: Run | None = None
        self.begun = self.saved = time.monotonic()
        self.past = 0.0
        self.told = {"objective": _name(objective), **objective.reads(model), **facts}
        self.settings = {key: str(value) for key, value in
                         {**_unsaid(model, data), **objective.facts(), **plan.identity(), "data": str(data),
                          **self.told}.items()}
        if self.folder is not None:
            identity = {"verb": "train", **self.told, _name(objective): objective.facts(), "plan": plan.identity(),
                        "weights": models.weights_digest(model),
                        "data": data.facts()}
            self.run = Run(self.folder, identity, {"device": str(device), "compile": plan.compile,
                                                   "equipoise": __version__, "torch": torch.__version__,
                                                   "python": platform.python_version()})

    @property
    def finished(self) -> bool:
        """Whether this very run has been done before."""
        return self.folder is not None and (self.folder / "summary.json").exists()

    @property
    def seconds(self) -> float:
        """Time spent on this run, earlier sittings included."""
        return self.past + time.monotonic() - self.begun

    def resume(self, learner: Learner) -> tuple[int, dict[str, Any]]:
        """Steps done and what else was kept; (0, {}) for a new run."""
        if self.folder is None or not (self.folder / state.NAME).exists():
            return 0, {}
        step, more = state.load(self.folder, learner)
        self.past = more["seconds"]
        return step, more

    def due(self, every: float) -> bool:
        """Whether it is time to save."""
        return self.run is not None and self.run.world.leads and time.monotonic() - self.saved >= every

    def save(self, learner: Learner, step: int, best: Mapping[str, Any], weights: Mapping[str, Tensor] | None) -> None:
        """Checkpoints first, the state last: a kill in between leaves files of a later step, which are made again."""
        if self.folder is None or self.run is None or not self.run.world.leads:
            return
        if not learner.is_finite():
            raise checks.InputError(f"the weights must stay finite, got NaN or infinity after step {step}{self.left()}")
        self.keep_best(learner, best, weights)
        self._checkpoint(LAST, learner, {**self.settings, "step": str(step)}, None)
        state.save(self.folder, learner, step, {**best, "seconds": self.seconds})
        self.saved = time.monotonic()

    def keep_best(self, learner: Learner, best: Mapping[str, Any], weights: Mapping[str, Tensor] | None) -> None:
        """Write the weights of the best epoch, unless they are on disk already or not finite."""
        if weights is None or self.run is None or not self.run.world.leads:
            return
        # Buffers may be infinite by right, such as the log-odds of 0.
        if all(bool(weights[name].isfinite().all()) for name, _ in learner.judged.named_parameters()):
            self._checkpoint(BEST, learner, {**self.settings, "epoch": str(best["epoch"])}, weights)

    def left(self) -> str:
        """What a run that broke leaves behind, and what to do, as the end of a sentence."""
        if self.folder is None:
            return " (try a lower lr, or clip)"
        kept = any((self.folder / name).exists() for name in (LAST, BEST))
        there = f"the last good checkpoint in {self.folder} was kept" if kept else "no checkpoint had been saved"
        return f"; {there} (try a lower lr, or clip, and another folder)"

    def _checkpoint(self, name: str, learner: Learner, facts: dict[str, str], weights: Mapping[str, Tensor] | None,
                    ) -> None:
        module = learner.judged
        if weights is None:
            checkpoint.save(self.folder / name, module, facts)  # type: ignore[operator]
            return
        now = {key: value.clone() for key, value in module.state_dict().items()}
        module.load_state_dict(weights)
        try:
            checkpoint.save(self.folder / name, module, facts)  # type: ignore[operator]
        finally:
            module.load_state_dict(now)

    def row(self, row: Row) -> None:
        """Append the row of an epoch, unless an earlier sitting has."""
        if self.run is not None and self.run.world.leads and key_of(row) not in self.run.done:
            self.run.append([row])

    def close(self, held: int, best: Mapping[str, Any], last: Mapping[str, int], rehearsed: float) -> None:
        """Merge the rows and write the summary; the state is not needed any more."""
        if self.folder is None or self.run is None:
            return
        self.run.finish()
        results = [_result(which, metric, right, held) for which, found in (("best", best["right"]), ("last", last))
                   for metric, right in found.items()]
        self.run.summarise("train", self.seconds, results, compile_seconds=round(rehearsed, 1), epoch=best["epoch"])
        if self.run.world.leads:
            (self.folder / state.NAME).unlink(missing_ok=True)


def _unsaid(model: nn.Module, data: Dataset) -> dict[str, str]:
    """What a checkpoint has to say and a module from elsewhere (a gate with its bases, say) does not say itself."""
    if isinstance(model, Normalized):
        return {}
    return {"arch": type(model).__name__, "num_classes": str(data.num_classes),
            "image_shape": ",".join(map(str, data.image_shape))}


def _name(objective: Objective) -> str:
    return type(objective).__name__.lower()


def _result(which: str, metric: str, right: int, held: int) -> Row:
    estimate = stats.clopper_pearson(right, held)
    return {"model": which, "metric": metric, "value": estimate.value, "low": estimate.low, "high": estimate.high,
            "n": estimate.n}
