"""The explorer of a report: images, trade-off, classes and margins of an evaluation, in the reader's own browser.

:mod:`~equipoise.reporting.explorer.data` selects what is shown, :mod:`~equipoise.reporting.explorer.columns` packs it,
`explorer.js` and `explorer.css` are inlined into the report. Nothing is loaded from elsewhere.
"""
