"""Recompute the table of `equipoise compare-rules` from the rows that `--export DIR` wrote:
mixtures_table.py DIR."""

from __future__ import annotations

import sys

from equipoise.studies.comparison_table import markdown, read_export

if __name__ == "__main__":
    print(markdown(read_export(sys.argv[1])))
