"""How long a reader waits for the report of 10,000 images: opening, filtering and sorting.

In headless Chromium on this machine; run it on an idle one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "reporting"))

import explored_run
from browser import CHROMIUM, Page

from equipoise.reporting import report

IMAGES, REPEATS = 10_000, 5
DRAWN = "await new Promise(done => requestAnimationFrame(() => setTimeout(done)));"
CHOOSE = (
    "const box = document.querySelectorAll('.filters select')[{}];"
    "box.value = 2; box.dispatchEvent(new Event('change'));"
)
ACTIONS = {"filter": CHOOSE.format(0), "sort": CHOOSE.format(3)}


def milliseconds(page: Page, action: str) -> float:
    return float(
        page.js(
            f"(async () => {{ const start = performance.now(); {action} {DRAWN}"
            "return performance.now() - start; })()"
        )
    )


def main() -> None:
    if not CHROMIUM:
        print("Chromium is not installed; nothing was measured")
        return
    with tempfile.TemporaryDirectory() as folder, Page() as page:
        run = explored_run.make(Path(folder) / "run", n=IMAGES, pictures=500, size=32)
        path = report(run.folder)
        times: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            page.open(path)
            ready = float(page.js("document.documentElement.dataset.ready"))
            times.setdefault("open", []).append(ready)
            for name, action in ACTIONS.items():
                times.setdefault(name, []).append(milliseconds(page, action))
    print(f"{IMAGES} images, {REPEATS} repeats, milliseconds (median, largest):")
    for name, values in times.items():
        print(f"{name:10} {median(values):7.0f} {max(values):7.0f}")


if __name__ == "__main__":
    main()
