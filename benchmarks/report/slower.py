"""Where ours is slower: beside every rival, in every record that pages show."""

from collections.abc import Sequence
from typing import NamedTuple

from ..harness.records import Row, Run
from . import tables
from .figures import label_of
from .names import shape_of, title_of
from .select import Digests, aside, headline, newest
from .spread import spread
from .texts import ASIDE, BY_HAND, FAMILIES, SECTIONS, SLOWER_ONCE


class Section(NamedTuple):
    """Rows of one kind that a line is about."""

    what: str
    kind: str
    run: Run
    rows: list[Row]


def beside_the_headline(runs: Sequence[Run]) -> list[Section]:
    """Of the sets that are not on the front page, each from the newest record with many rows."""
    found = []
    for what, of_set, kind, most in SECTIONS:
        run = newest(runs, "gdn", of_set, kind, most)
        if run is not None:
            found.append(Section(what, kind, run, list(run.rows)))
    return found


def sections(runs: Sequence[Run], digests: Digests) -> list[Section]:
    """All rows that pages show, each once: of the headlines, and of the sets beside them."""
    shown: list[tuple[str, Run | None]] = [("", headline(runs, x, digests)) for x in FAMILIES]
    for family, sets in ASIDE.items():
        for of_set, title in sets.items():
            words = f", {title[0].lower()}{title[1:]}"
            shown.append((words, aside(runs, family, of_set, digests)))
    found = [x._replace(what=f", {x.what}") for x in beside_the_headline(runs)]
    for what, run in shown:
        for kind in dict.fromkeys(row.kind for row in run.rows) if run else ():
            assert run is not None
            rows = [row for row in run.rows if row.kind == kind]
            if not any(rows == other.rows for other in found):
                found.append(Section(what, kind, run, rows))
    return found


def slower(runs: Sequence[Run], digests: Digests) -> str:
    """What a reader may find slower than the table says: beside every rival, both ways."""
    said, old = list[str](), list[str]()
    for section in sections(runs, digests):
        today = not section.what or "our_kernels" in section.run.environment
        (said if today else old).extend(_slower(section))
    parts = [["Ours is slower in these cases:", "", *said]] if said else []
    parts += [[SLOWER_ONCE, "", *old]] if old else []
    return "\n\n".join("\n".join(part) for part in parts)


def _slower(section: Section) -> list[str]:
    """A line if ours is slower than the best rival at some shape, by graphs or eager calls."""
    what, kind, run, rows = section
    said, worst, ours = [], list[tuple[float, str]](), tables.our_names(run)
    for way, eager in (("CUDA graphs", False), ("eager calls", True)):
        found = []
        for row in rows:
            rival, ratio = tables.best_rival(row, ours, eager), tables.ratio(row, ours, eager)
            if rival and ratio:
                beside = BY_HAND.get(rival[0]) or label_of(run, rival[0])
                found.append((ratio, f"{shape_of(row)}, beside {beside}"))
        if slow := sum(ratio < 1 for ratio, _ in found):
            of_all = spread([ratio for ratio, _ in found])
            assert of_all is not None
            of_several = f" of {len(found)} shapes (mean {of_all.mean:.2f} x, worst"
            said.append(
                f"{way} {of_all.worst:.2f} x" if len(found) == 1
                else f"{way} at {slow}{of_several} {of_all.worst:.2f} x)"
            )  # fmt: skip
            worst.append(min(found))
    # the title of a set for serving says the kind itself
    of_kind = "" if what.startswith(", serving") else f", {title_of(kind).lower()}"
    subject = f"{FAMILIES[run.family]}{of_kind}{what}"
    return [f"- {subject}: {'; '.join(said)}; worst at {min(worst)[1]}."] if said else []
