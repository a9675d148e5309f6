"""Writes the README's tables, docs/performance.md, docs/records and figures from the records.

python -m benchmarks.report            write all of them
python -m benchmarks.report --check    exit 1 if one is not what the records say
python -m benchmarks.report --record ID      print the tables of a record, by the end of its id, too
python -m benchmarks.report --record PATH    print those of a file of --out, such as out/gdn.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..harness import records
from ..harness.records import ROOT
from .pages import measured, texts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    said = "print the tables of a record, or of a FAMILY.json of --out; write nothing"
    parser.add_argument("--record", metavar="ID|PATH", help=said)
    options = parser.parse_args(arguments)
    if options.record:
        return _print(options.record)
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


def _print(id: str) -> int:
    if id.endswith(".json") or "/" in id:
        return _print_file(Path(id))
    found = [run for run in records.load() if run.id.endswith(id)]
    if len(found) != 1:
        said = f"--record {id}: {len(found)} records end so; need one of those that"
        said += " docs/records/README.md lists, or the path of a FAMILY.json of --out"
        print(said, file=sys.stderr)
        return 2
    print(measured(found[0]))
    return 0


def _print_file(path: Path) -> int:
    try:
        run = records.read(path)
    except (OSError, ValueError) as error:
        said = f"--record {path}: {error}; need the FAMILY.json of --out, or a gdn_ranks.json"
        print(said, file=sys.stderr)
        return 2
    print(measured(run))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
