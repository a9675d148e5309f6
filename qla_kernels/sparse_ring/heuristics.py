"""Chooses the schedule of a call, and the number of chunks a launch, from facts all ranks share.

The sparsity of the mask is not used, because only the device knows it.
"""

from typing import Literal

Schedule = Literal["auto", "allgather", "ring", "double_ring"]
SCHEDULES = ("auto", "allgather", "ring", "double_ring")

GATHERED_BYTES = 2 << 30  # limit for all ranks' k and v on one GPU; a backward adds twice as much
LAUNCH_TOKENS = 131072  # tokens of a launch's chunks: with fewer, merging costs over 5 %

# Milliseconds and bytes a millisecond, measured on H200 of one host (docs/lessons.md)
GATHER_START, GATHER_RATE = 0.06, 275e6
INDEX = 0.2  # an index of several ranks, behind other work
LAUNCH, MERGE_RATE = 0.1, 3.5e9  # one launch more, and its partial result, written and read
GAIN = 1.5  # times the cost that has to be saved


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


def own_chunk_first(
    world: int, chunk_bytes: int, query_numbers: int, estimates: bool, gathers: bool
) -> bool:
    """Returns whether a forward that gathers attends to its own chunk while the others come.

    This hides the gather, but costs one more launch, which writes and reads o in fp32. The gather
    grows with the number of ranks, the cost does not: it is worth it from about 8 ranks on.

    Args:
        world: ranks of the ring.
        chunk_bytes: bytes of k and v of one rank.
        query_numbers: elements of one rank's q.
        estimates: an index is estimated while chunks are gathered, which hides a part of it.
        gathers: the schedule is allgather.
    """
    waits = GATHER_START + (world - 1) * chunk_bytes / GATHER_RATE - (INDEX if estimates else 0)
    merging = LAUNCH + 2 * 4 * query_numbers / MERGE_RATE
    return gathers and world > 1 and waits > GAIN * merging
