"""Reports: turn a run folder into one self-contained HTML file."""

from equipoise.reporting.render import SECTIONS as SECTIONS
from equipoise.reporting.render import open_report as open_report
from equipoise.reporting.render import report as report
