"""Data × models → rows."""

from equipoise.evaluate.attacked import Attack as Attack
from equipoise.evaluate.attacked import Conditions as Conditions
from equipoise.evaluate.attacked import Subject as Subject
from equipoise.evaluate.attacked import attacked as attacked
from equipoise.evaluate.attacked import untouched as untouched
from equipoise.evaluate.evaluation import begin as begin
from equipoise.evaluate.evaluation import evaluate as evaluate
from equipoise.evaluate.evaluation import facts as facts
from equipoise.evaluate.evaluation import judge as judge
