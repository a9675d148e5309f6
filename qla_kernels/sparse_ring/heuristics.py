"""Which schedule a call takes, and how many chunks a launch: arithmetic of what all ranks share.

How sparse a mask is decides nothing here: that is known on the device alone.
"""

from typing import Literal

Schedule = Literal["auto", "allgather", "ring", "double_ring"]
SCHEDULES = ("auto", "allgather", "ring", "double_ring")

GATHERED_BYTES = 2 << 30  # of k and v, beside a GPU's shard; a backward holds twice that more
LAUNCH_TOKENS = 131072  # that a launch meets: below it, merging partial results costs over 5 %


def schedule_of(asked: str, world: int, inner_size: int, gathered_bytes: int, striped: bool) -> str:
    """The schedule that "auto" means: gather inside a node where there is room for it.

    Across nodes the double ring moves each chunk over the slow links once a node, not once a rank.
    """
    if asked != "auto":
        return asked
    one_node = inner_size == world
    if one_node and gathered_bytes <= GATHERED_BYTES:
        return "allgather"
    return "double_ring" if striped and 1 < inner_size < world else "ring"


def chunks_per_launch(asked: int | None, chunk_tokens: int) -> int:
    """A launch reads and writes the fp32 result of every query, so that short chunks share one."""
    return asked if asked is not None else -(-LAUNCH_TOKENS // chunk_tokens)
