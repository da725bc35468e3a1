"""Data × models → rows."""

from equipoise.evaluation.attacked import attacked as attacked
from equipoise.evaluation.evaluation import begin as begin
from equipoise.evaluation.evaluation import evaluate as evaluate
from equipoise.evaluation.evaluation import facts as facts
from equipoise.evaluation.evaluation import judge as judge
from equipoise.evaluation.job import Attack as Attack
from equipoise.evaluation.job import Conditions as Conditions
from equipoise.evaluation.job import Job as Job
from equipoise.evaluation.job import untouched as untouched
