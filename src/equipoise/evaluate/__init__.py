"""Data × models → rows."""

from equipoise.evaluate.attacked import attacked as attacked
from equipoise.evaluate.evaluation import begin as begin
from equipoise.evaluate.evaluation import evaluate as evaluate
from equipoise.evaluate.evaluation import facts as facts
from equipoise.evaluate.evaluation import judge as judge
from equipoise.evaluate.subject import Attack as Attack
from equipoise.evaluate.subject import Conditions as Conditions
from equipoise.evaluate.subject import Subject as Subject
from equipoise.evaluate.subject import untouched as untouched
