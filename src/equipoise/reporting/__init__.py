"""Reports: turn a finished run folder into one self-contained HTML file."""

from equipoise.reporting.render import SECTIONS as SECTIONS
from equipoise.reporting.render import report as report
