"""Training: one loop, objectives as functions of model, images, labels and chance."""

from equipoise.train.loop import train as train
from equipoise.train.objective import Objective as Objective
from equipoise.train.objective import Outcome as Outcome
from equipoise.train.objectives import OBJECTIVES as OBJECTIVES
from equipoise.train.plan import Plan as Plan
