"""Write docs/versions.md from constraints/versions.json; with --check, only compare.

The JSON file says what was tested where. tests/host/test_versions.py compares it with
pyproject.toml, the constraints, the tests' own lists, and the versions in benchmark records.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "constraints" / "versions.json"
DOCUMENT = ROOT / "docs" / "versions.md"

HEADER = """\
# Versions

Generated from `constraints/versions.json` by `python scripts/versions.py`; do not edit.

*Needs* is what the package or an integration asks for; it refuses other versions, or does not
promise to work with them. *CPU* are versions that tests ran with on CPU tensors, *GPU* those that
tests or benchmarks ran with on an H100 or an H200. An empty cell means: not tried. On your machine,
`python -m qla_kernels.info` prints them.

"""


def load() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DATA.read_text())
    return found


def document() -> str:
    lines = ["| | needs | tested on CPU | tested on GPU | |", "|---|---|---|---|---|"]
    for row in load():
        needs = row["needs"].replace(">=", "≥ ").replace(",<", ", < ")
        cells = [row["name"], needs, *(", ".join(row[where]) for where in ("cpu", "gpu"))]
        lines.append(f"| {' | '.join([*cells, row['note']])} |".replace("  ", " "))
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    import generated  # beside this file

    sys.exit(generated.main(__doc__, DOCUMENT, DATA.name, document))
