"""Print requirements.lock: the packages of an environment with the SHA-256 of what pip would
download for each.

pip list --format=freeze > pins.txt    (without equipoise, torch and pip)
pip install --dry-run --ignore-installed --no-deps --report report.json -r pins.txt
python .ci/lock.py report.json > requirements.lock
"""

import json
import sys
from pathlib import Path

HEADER = """\
# What the tests run with, for CPython 3.11 on Linux x86-64; `make lock` writes it, `make` and CI install from it there.
# Without torch: its CPU wheels come from another index than its CUDA wheels, with other hashes, so that no one hash
# fits. constraints.txt bounds it.
"""


def main(report: Path) -> None:
    """Print one line per package, in order of the names."""
    entries = json.loads(report.read_text(encoding="utf-8"))["install"]
    lines = [
        f"{entry['metadata']['name'].lower()}=={entry['metadata']['version']} "
        f"--hash=sha256:{entry['download_info']['archive_info']['hashes']['sha256']}"
        for entry in entries
    ]
    print(HEADER + "\n".join(sorted(lines)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
