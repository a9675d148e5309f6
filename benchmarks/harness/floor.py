"""Counted work and the time it takes at best: FLOPs and bytes against ceilings of the same machine.

Recomputation and workspaces do not count: the floor is the same for all implementations.
"""

from dataclasses import dataclass


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
