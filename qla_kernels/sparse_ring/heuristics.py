"""Chooses the schedule of a call, and the number of chunks a launch, from facts all ranks share.

The sparsity of the mask is not used, because only the device knows it.
"""

from typing import Literal

Schedule = Literal["auto", "allgather", "ring", "double_ring"]
SCHEDULES = ("auto", "allgather", "ring", "double_ring")

GATHERED_BYTES = 2 << 30  # limit for all ranks' k and v on one GPU; a backward adds twice as much
LAUNCH_TOKENS = 131072  # tokens of a launch's chunks: with fewer, merging costs over 5 %


def schedule_of(asked: str, world: int, inner_size: int, gathered_bytes: int, striped: bool) -> str:
    """Returns the schedule of a call: `asked`, unless that is "auto".

    For "auto" it is allgather if all ranks are on one node and the gathered k and v fit into
    GATHERED_BYTES. Between nodes with several ranks each and striped layouts it is double_ring,
    which sends each chunk over the slow links once a node and not once a rank. Else it is ring.
    """
    if asked != "auto":
        return asked
    one_node = inner_size == world
    if one_node and gathered_bytes <= GATHERED_BYTES:
        return "allgather"
    return "double_ring" if striped and 1 < inner_size < world else "ring"


def chunks_per_launch(asked: int | None, chunk_tokens: int) -> int:
    """Returns the number of chunks a launch: `asked`, or enough for LAUNCH_TOKENS tokens.

    Each launch reads and writes the fp32 result of every query, so short chunks share a launch.
    """
    return asked if asked is not None else -(-LAUNCH_TOKENS // chunk_tokens)
