"""Writes README's performance section, docs/performance.md and its figures from the records.

python -m benchmarks.report            write all three
python -m benchmarks.report --check    exit 1 if the texts are not what the records say
"""

import argparse
import sys
from collections.abc import Sequence

from qla_kernels.digests import recorded

from ..harness import records
from ..harness.records import ROOT, Run
from .pages import FIGURES, aside, headline, kinds_of, texts
from .texts import FAMILIES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    runs = records.load()
    if not options.check:
        _draw_figures(runs)
    different = False
    for path, text in texts(runs).items():
        if path.exists() and path.read_text() == text:
            continue
        name, different = path.relative_to(ROOT), True
        if options.check:
            said = f"{name} is not what the records say: run `python -m benchmarks.report`"
            print(said, file=sys.stderr)
        else:
            path.write_text(text)
            print(f"wrote {name}")
    return 1 if options.check and different else 0


def _draw_figures(runs: Sequence[Run]) -> None:
    from .figures import draw, draw_growth

    folder, digests = ROOT / FIGURES, recorded()
    folder.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        run = headline(runs, family, digests)
        if run is not None:
            for kind in kinds_of(run):
                for old in folder.glob(f"{family}-{kind}-*"):
                    old.unlink()
            draw(run, folder, ["svg"])
    growing = aside(runs, "dualkv", "responses", digests)
    if growing is not None:
        draw_growth(growing, folder, ["svg"])


if __name__ == "__main__":
    raise SystemExit(main())
