"""Rows → page: what a run found, as one file that a person can read anywhere."""

from equipoise.reporting.render import write as write
