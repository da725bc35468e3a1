"""The demo, the comparison of mixing rules, and the studies of papers."""

from equipoise.studies.comparison_settings import ComparisonSettings
from equipoise.studies.comparison_table import Comparison
from equipoise.studies.demo import DemoResult, run_demo
from equipoise.studies.overview import StudyOverview
from equipoise.studies.reproduce import STUDIES, list_studies, reproduce, results_table
from equipoise.studies.rule_comparison import compare_rules
from equipoise.studies.settings import FitImages, StudySettings
from equipoise.studies.study import Study

__all__ = [
    "STUDIES",
    "Comparison",
    "ComparisonSettings",
    "DemoResult",
    "FitImages",
    "Study",
    "StudyOverview",
    "StudySettings",
    "compare_rules",
    "list_studies",
    "reproduce",
    "results_table",
    "run_demo",
]
