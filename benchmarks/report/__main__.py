"""Writes the README's tables, docs/performance.md, docs/records and figures from the records.

python -m benchmarks.report            write all of them
python -m benchmarks.report --check    exit 1 if one is not what the records say
"""

import argparse
import sys
from collections.abc import Sequence

from ..harness import records
from ..harness.records import ROOT
from .pages import texts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    different = False
    for path, text in texts(records.load()).items():
        if path.exists() and path.read_text() == text:
            continue
        name, different = path.relative_to(ROOT), True
        if options.check:
            said = f"{name} is not what the records say: run `python -m benchmarks.report`"
            print(said, file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {name}")
    return 1 if options.check and different else 0


if __name__ == "__main__":
    raise SystemExit(main())
