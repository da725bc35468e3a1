"""Training: one loop; objectives are functions of model, images, labels and a random stream."""

from equipoise.training.loop import TrainingResult, fit_model
from equipoise.training.objective import Objective, ObjectiveOutput, TrainingPlan
from equipoise.training.objectives import OBJECTIVES
from equipoise.training.trainer import train, train_gate

__all__ = [
    "OBJECTIVES",
    "Objective",
    "ObjectiveOutput",
    "TrainingPlan",
    "TrainingResult",
    "fit_model",
    "train",
    "train_gate",
]
