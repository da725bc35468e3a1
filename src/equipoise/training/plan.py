"""How to train, whatever the objective: time, optimiser, schedule, augmentation, precision, safety."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.core import checks
from equipoise.core.device import PRECISIONS
from equipoise.core.settings import Settings, setting

OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "step", "cosine", "one-cycle")
COMPILED = ("auto", "off", "model", "graph", "both")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Settings):
    """Settings of the loop; the defaults suit a small network on small images."""

    epochs: int = setting(30, "Passes over the training images.", least=1)
    batch_size: int = setting(128, "Images per optimiser step, over all processes.", least=1)
    optimizer: str = setting("sgd", "sgd or adamw.", among=OPTIMIZERS)
    lr: float = setting(0.1, "Highest learning rate.", positive=True)
    momentum: float = setting(0.9, "Momentum of sgd; first beta of adamw.", share=True)
    nesterov: bool = setting(False, "Nesterov's form of momentum.")
    weight_decay: float = setting(5e-4, "Weight decay.", fraction=True)
    schedule: str = setting("cosine", "constant, step, cosine or one-cycle.", among=SCHEDULES)
    warmup: float = setting(0.0, "Epochs over which the rate rises linearly; for one-cycle the rise of the cycle, "
                                 "a third of all epochs if 0.", fraction=True)
    step_epochs: int = setting(30, "Epochs between two drops of the step schedule.", least=1)
    step_factor: float = setting(0.1, "Factor of each drop.", share=True)
    ema: float = setting(0.0, "Decay of the average of weights that is kept and judged; 0 is none.", share=True)
    clip: float = setting(0.0, "Largest norm of the gradient; 0 is none.", fraction=True)
    pad: int = setting(0, "Zeros around each image before a random crop.", least=0)
    flip: bool = setting(False, "Mirror half of the images.")
    cutout: int = setting(0, "Side of the square that is blotted out of each image.", least=0)
    held_out: int | None = setting(None, "Training images kept apart for validation; a tenth, at most 1000, if not "
                                         "given.", least=0)
    validate_every: int = setting(1, "Epochs between two validations.", least=1)
    save_seconds: float = setting(30.0, "Seconds between two saved states, from which a killed run goes on.",
                                  fraction=True)
    precision: str = setting("auto", "auto, fp32 or bf16.", among=PRECISIONS)
    compile: str = setting("auto", "On a GPU: off; model (torch.compile); graph (the whole step as one CUDA graph); "
                                   "both; auto is graph for a small network, model for a large one.",
                           among=COMPILED)
    seed: int = setting(0, "Seed of all chance.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "adamw":
            checks.require(self.momentum < 1, "momentum", "be less than 1 for adamw", self.momentum)
        elif self.nesterov:
            checks.require(self.momentum > 0, "momentum", "be positive for nesterov", self.momentum)

    def identity(self) -> dict[str, object]:
        """What makes two runs the same run: all but what only changes the speed."""
        free = ("save_seconds", "compile")
        return {key: value for key, value in self.facts().items() if key not in free}
