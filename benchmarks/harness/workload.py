"""What workloads of all families have, and the least time that their counted work takes.

Counted are FLOPs and bytes, against ceilings of the same machine. Recomputation and workspaces do
not count: the floor is the same for all implementations.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["fwd", "bwd", "both"]
Heads = tuple[int, int]  # key heads, value heads; of attention key-value heads, query heads
Lengths = tuple[int, ...]
POOLED = ("pool_prefill", "pool_decode", "drafts", "decoding")  # kinds of what engines call


class Workload:
    heads: Heads
    direction: str
    dtype = "bfloat16"  # on a GPU
    served = False  # from and into a pool of states, as engines call it

    @property
    def kind(self) -> str:
        """What is timed: a direction, if a family has nothing else."""
        return self.direction

    @property
    def heads_label(self) -> str:
        return f"{self.heads[0]}x{self.heads[1]}"


def words(workload: Any) -> str:
    """The lengths in words: what 3000x5 or 16x4096+512 means."""
    groups = getattr(workload, "groups", ())
    if shared := [group for group in groups if group[1]]:
        prompts, responses = zip(*shared, strict=True)
        tokens = _span(n for of_prompt in responses for n in of_prompt)
        each = f"{_span(map(len, responses))} responses of {tokens}"
        return f"{each} to {len(shared)} x a prompt of {_span(prompts)} tokens"
    lengths = getattr(workload, "lengths", ()) or [n for n, _ in groups]
    batch = getattr(workload, "sequences", 1)
    count = len(lengths) or (batch if isinstance(batch, int) else 1)
    one = _span(lengths) if lengths else str(workload.tokens // count)
    return f"{count} sequence{'s' * (count > 1)} of {one} token{'s' * (one != '1')}"


def _span(values: Iterable[int]) -> str:
    low, *_, high = sorted(values) * 2
    return str(low) if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Work:
    flops: float
    bytes: float

    def floor_seconds(self, ceilings: "Ceilings") -> float:
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bandwidth)


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run: one large matrix product, one large copy (bytes read + written)."""

    flops: float  # per second
    bandwidth: float  # bytes per second
    matmul: str = ""  # which product
