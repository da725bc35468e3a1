"""Training: one loop, objectives as functions of model, images, labels and chance."""

from equipoise.training.loop import train as train
from equipoise.training.objective import Objective as Objective
from equipoise.training.objective import ObjectiveOutput as ObjectiveOutput
from equipoise.training.objectives import OBJECTIVES as OBJECTIVES
from equipoise.training.plan import TrainingPlan as TrainingPlan
