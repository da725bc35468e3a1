"""How long a reader waits for the explorer of 10,000 images: opening, filtering, sorting, moving
the slider.

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
CLICK = "[...document.querySelectorAll('{}')].find(e => e.textContent.trim() === '{}').click();"
SLIDE = (
    "const e = document.querySelector('#panel-tradeoff input[type=range]');"
    "e.value = (Number(e.value) + 1) % 7; e.dispatchEvent(new Event('input'));"
)
ACTIONS = {
    "filter": CLICK.format(".chip", "mixture fails under attack"),
    "sort": CLICK.format(".head button", "margin"),
    "trade-off": "document.querySelector('#tab-tradeoff').click();",
    "slider": SLIDE,
}


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
        path = report(
            explored_run.make(Path(folder) / "run", n=IMAGES, pictures=500, size=32).folder
        )
        times: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            page.open(path)
            times.setdefault("open", []).append(
                float(page.js("document.querySelector('#explorer').dataset.ready"))
            )
            for name, action in ACTIONS.items():
                times.setdefault(name, []).append(milliseconds(page, action))
    print(f"{IMAGES} images, {REPEATS} repeats, milliseconds (median, largest):")
    for name, values in times.items():
        print(f"{name:10} {median(values):7.0f} {max(values):7.0f}")
    first = [a + b for a, b in zip(times["open"], times["filter"], strict=True)]
    print(f"opening and the first interaction: {median(first):.0f} ms, at most {max(first):.0f} ms")


if __name__ == "__main__":
    main()
