"""The demo, and the studies of two papers."""

from equipoise.studies.demo import DemoResult, run_demo
from equipoise.studies.reproduce import STUDIES, StudySettings, reproduce
from equipoise.studies.study import Study

__all__ = ["STUDIES", "DemoResult", "Study", "StudySettings", "reproduce", "run_demo"]
