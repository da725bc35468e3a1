"""The demo, the comparison of mixing rules, and the studies of two papers."""

from equipoise.studies.comparison_table import Comparison
from equipoise.studies.demo import DemoResult, run_demo
from equipoise.studies.reproduce import STUDIES, StudySettings, reproduce
from equipoise.studies.rule_comparison import ComparisonSettings, compare_rules
from equipoise.studies.study import Study

__all__ = ["STUDIES", "Comparison", "ComparisonSettings", "DemoResult", "Study", "StudySettings", "compare_rules",
           "reproduce", "run_demo"]
