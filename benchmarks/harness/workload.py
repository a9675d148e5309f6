"""What workloads of all families have; each family adds what its shapes are."""

from typing import Literal

Direction = Literal["fwd", "bwd", "both"]
Heads = tuple[int, int]  # key heads, value heads; of attention key-value heads, query heads
Lengths = tuple[int, ...]


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
