"""One sequence over several GPUs: what its rows and their record say.

`scripts/gdn_ranks.py` times them. Their kinds are their own, so that no page takes them for rows of
one GPU.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..harness.floor import Ceilings
from ..harness.records import Result, Row
from ..harness.workload import Direction, Workload
from .work import gdn_work
from .workloads import Gdn

DIRECTIONS: tuple[Direction, ...] = ("fwd", "both")
KINDS = {"fwd": "ranks_fwd", "both": "ranks_both"}  # by direction


@dataclass(frozen=True)
class OverRanks(Workload):
    """A call on one sequence that ranks share in a layout."""

    rule: Gdn  # of the whole sequence, forward or both directions
    world: int
    split: str  # contiguous or zigzag

    family = "gdn"

    @property
    def name(self) -> str:
        name = self.rule.name.replace("gdn-", "gdn-ranks-", 1)
        return f"{name}-over{self.world}-{self.split}"

    @property
    def kind(self) -> str:
        return KINDS[self.rule.direction]

    @property
    def layout(self) -> str:
        return f"{self.rule.layout} over {self.world}, {self.split}"

    @property
    def what(self) -> str:
        sizes = self.rule.head_dim, self.rule.V
        said = "" if sizes == (128, 128) else ", K {}, V {}".format(*sizes)
        return f"{self.rule.gate} gates{said}"

    def row(self, ceilings: Ceilings, results: Iterable[Result]) -> Row:
        """The floor is a share of the one of a GPU: what is sent does not count."""
        work = gdn_work(self.rule)
        return Row(
            name=self.name, family=self.family, kind=self.kind,
            heads="/".join(map(str, self.rule.heads)), layout=self.layout, tokens=self.rule.tokens,
            what=self.what, flops=work.flops, bytes=work.bytes,
            floor_ms=1e3 * work.floor_seconds(ceilings) / self.world, results=tuple(results),
        )  # fmt: skip


def over_ranks(rule: Gdn, world: int, splits: Iterable[str]) -> list[OverRanks]:
    """Each direction in each layout."""
    return [
        OverRanks(replace(rule, direction=direction), world, split)
        for direction in DIRECTIONS
        for split in splits
    ]
