"""What assistive technology and weak eyes need of a page: names, headings, alternatives, contrast,
a visible focus."""

from __future__ import annotations

import json
import os
from pathlib import Path

from browser import Page

OPERABLE = {
    "button",
    "checkbox",
    "combobox",
    "dialog",
    "grid",
    "img",
    "link",
    "searchbox",
    "slider",
    "tab",
    "tabpanel",
    "table",
    "DisclosureTriangle",
}
# axe-core is not part of this repository: `npm pack axe-core`, and the path of its axe.min.js in
# this variable.
AXE = os.environ.get("EQUIPOISE_AXE", "")
CHECKS = Path(__file__).with_suffix(".js")


def defects(page: Page) -> list[str]:
    """What is wrong with the page as it is shown now, in words."""
    unnamed = [
        f"a {node['role']} without a name"
        for node in page.names()
        if node["role"] in OPERABLE and not node["name"].strip()
    ]
    return [*page.js(CHECKS.read_text("utf-8")), *unnamed]


def axe_violations(page: Page) -> list[str]:
    """What axe-core finds; nothing where it is not installed."""
    if not AXE:
        return []
    page.js(f"(() => {{ {Path(AXE).read_text('utf-8')} }})(); undefined")
    found = page.js(
        "axe.run(document, {resultTypes: ['violations']}).then(r => JSON.stringify(r.violations.map(v => "
        "`${v.id}: ${v.nodes.map(n => n.target.join(' ')).slice(0, 3).join(' | ')}`)))"
    )
    violations: list[str] = json.loads(found)
    return violations
