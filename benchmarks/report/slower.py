"""Where ours is slower: beside every rival, in every record that pages show."""

from collections.abc import Sequence
from typing import NamedTuple

from ..harness.records import Run
from . import ranks, tables
from .figures import label_of
from .names import gpu, shape_of, title_of
from .select import Digests, Section, aside, headline, newest
from .spread import spread
from .texts import ASIDE, BY_HAND, FAMILIES, OLDER_HERE, SECTIONS, SLOWER_HERE, SLOWER_ONCE


def beside_the_headline(runs: Sequence[Run]) -> list[Section]:
    """Of the sets that are not on the front page, each from the newest record with many rows."""
    found = []
    for what, of_set, kind, most in SECTIONS:
        run = newest(runs, "gdn", of_set, kind, most, rivals=True)
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
            if not all(any(row in other.rows for other in found) for row in rows):
                found.append(Section(what, kind, run, rows))
    return found + ranks.sections(runs)


class Case(NamedTuple):
    """A kind of rows of which ours is slower at some."""

    subject: str
    both_ways: str  # how often and how much, of graphs and of eager calls
    ratio: float  # the worst, of either
    shape: str
    rival: str
    where: str  # "", if the page says where for all of the family
    date: str
    old: bool
    least: dict[str, tuple[float, str, str]]  # by way: ratio, shape, rival

    @property
    def line(self) -> str:
        at = f"worst at {self.shape}, beside {self.rival}"
        return f"- {self.subject}: {self.both_ways}; {at}{self.where}."

    @property
    def short(self) -> str:
        worst = f"{self.ratio:.2f} x at {self.shape}"
        return f"- {self.subject}: {worst}, beside {self.rival}{self.where}"


def slower(runs: Sequence[Run], digests: Digests) -> str:
    """What a reader may find slower than the table says: beside every rival, both ways."""
    cases = _cases(runs, digests)
    said, old = ([case.line for case in cases if case.old == old] for old in (False, True))
    parts = [["Ours is slower in these cases:", "", *said]] if said else []
    parts += [[SLOWER_ONCE, "", *old]] if old else []
    return "\n\n".join("\n".join(part) for part in parts)


def in_short(runs: Sequence[Run], digests: Digests) -> str:
    """The worst of each case; the page of performance has the rest."""
    cases = _cases(runs, digests)
    if not cases:
        return ""
    lines = _by_family([case for case in cases if not case.old])
    if old := [case for case in cases if case.old]:
        lines.append(_older(old))
    return "\n".join([SLOWER_HERE, "", *lines])


def _by_family(cases: Sequence[Case]) -> list[str]:
    """A line each: the worst of it, and how many kinds of rows there are."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.subject.partition(",")[0], []).append(case)
    lines = []
    for of_family in found.values():
        others = len(of_family) - 1
        more = f" ({others} more kind{'s' * (others > 1)} of rows)" if others else ""
        lines.append(min(of_family, key=lambda case: case.ratio).short + more)
    return lines


def _older(cases: Sequence[Case]) -> str:
    """How many there are, of which days, and the least ratios, of graphs and of eager calls."""
    kinds = f"{len(cases)} more kind{'s' * (len(cases) > 1)} of rows"
    days = " and ".join(sorted({case.date for case in cases}))
    least = []
    for way in ("eager calls", "CUDA graphs"):
        if found := [(case.least[way], case.subject) for case in cases if way in case.least]:
            (ratio, shape, rival), subject = min(found)
            least.append(f"{way} {ratio:.2f} x ({subject}; {shape}) beside {rival}")
    return f"- {kinds} in records of {days}, {OLDER_HERE}: at worst {'; '.join(least)}."


def _cases(runs: Sequence[Run], digests: Digests) -> list[Case]:
    found = (_case(section, digests) for section in sections(runs, digests))
    return [case for case in found if case is not None]


def _case(section: Section, digests: Digests) -> Case | None:
    """None if ours is not slower than the best rival anywhere, by graphs or eager calls."""
    what, kind, run, rows = section
    said, worst, ours = [], dict[str, tuple[float, str, str]](), tables.our_names(run)
    for way, eager in (("CUDA graphs", False), ("eager calls", True)):
        found = []
        for row in rows:
            rival, ratio = tables.best_rival(row, ours, eager), tables.ratio(row, ours, eager)
            if rival and ratio:
                beside = BY_HAND.get(rival[0]) or label_of(run, rival[0])
                found.append((ratio, shape_of(row), beside))
        if slow := sum(tables.is_slower(ratio) for ratio, *_ in found):
            of_all = spread([ratio for ratio, *_ in found])
            assert of_all is not None
            of_several = f" of {len(found)} shapes (mean {of_all.mean:.2f} x, worst"
            said.append(
                f"{way} {of_all.worst:.2f} x" if len(found) == 1
                else f"{way} at {slow}{of_several} {of_all.worst:.2f} x)"
            )  # fmt: skip
            worst[way] = min(found)
    if not said:
        return None
    # the title of a set of one kind says it itself
    of_kind = "" if what.startswith(", serving:") else f", {title_of(kind).lower()}"
    stale = "" if run.current(digests) else ", kernels changed since"
    where = f" ({gpu(run)}, {run.date[:10]}{stale})" if what else ""
    old = bool(what) and "our_kernels" not in run.environment
    subject = f"{FAMILIES[run.family]}{of_kind}{what}"
    where = "" if old else where
    least = min(worst.values())
    return Case(subject, "; ".join(said), *least, where, run.date[:10], old, worst)
