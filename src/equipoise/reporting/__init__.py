"""Reports: turn a run folder into one self-contained HTML file, compare several runs, and list
those of a folder."""

from equipoise.reporting.opening import open_report as open_report
from equipoise.reporting.render import SECTIONS as SECTIONS
from equipoise.reporting.render import report as report
from equipoise.reporting.run_comparison import COMPARISON as COMPARISON
from equipoise.reporting.run_comparison import compare as compare
from equipoise.reporting.run_index import index as index
