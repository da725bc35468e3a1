"""The explorer of a report: images, trade-off, classes and margins of an evaluation, in the
reader's own browser.

:mod:`~equipoise.reporting.explorer.data` selects what is shown,
:mod:`~equipoise.reporting.explorer.columns` packs it. The scripts beside them, and `explorer.css`,
are inlined into the report: `elements`, `downloads`, `charts` and `figures` serve every report, the
others the explorer. Nothing is loaded from elsewhere.
"""
