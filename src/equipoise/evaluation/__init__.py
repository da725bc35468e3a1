"""Evaluation: models under attacks or certificates over a data set, as rows and results."""

from equipoise.evaluation.attacker import AttackedImages as AttackedImages
from equipoise.evaluation.attacker import attack as attack
from equipoise.evaluation.certifier import Certification as Certification
from equipoise.evaluation.certifier import CertificationSettings as CertificationSettings
from equipoise.evaluation.certifier import certify as certify
from equipoise.evaluation.evaluator import Evaluation as Evaluation
from equipoise.evaluation.evaluator import EvaluationSettings as EvaluationSettings
from equipoise.evaluation.evaluator import evaluate as evaluate
from equipoise.evaluation.evaluator import run_jobs as run_jobs
from equipoise.evaluation.job import AuditPlan as AuditPlan
from equipoise.evaluation.job import Conditions as Conditions
from equipoise.evaluation.job import Job as Job
from equipoise.evaluation.job import open_run as open_run
from equipoise.evaluation.measure import measure as measure
