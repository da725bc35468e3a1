"""Training: one loop; objectives are functions of model, images, labels and a random stream."""

from equipoise.training.loop import TrainingResult, fit_model
from equipoise.training.objective import Objective, ObjectiveOutput, TrainingPlan
from equipoise.training.objectives import OBJECTIVES
from equipoise.training.recipes import list_recipes, read_recipe
from equipoise.training.trainer import train, train_gate

__all__ = [
    "OBJECTIVES",
    "Objective",
    "ObjectiveOutput",
    "TrainingPlan",
    "TrainingResult",
    "fit_model",
    "list_recipes",
    "read_recipe",
    "train",
    "train_gate",
]
