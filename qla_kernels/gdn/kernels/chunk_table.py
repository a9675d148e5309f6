"""chunk_table -- the table of the chunks of packed sequences, made by one CTA.

Sequence n has c_n = ceil(length_n / 64) chunks:
    first_chunk[n] = sum_{m < n} c_m, and first_chunk[N] = num_chunks
    chunks[c]      = (first token, tokens) of chunk c; (0, 0) from num_chunks on
With wrong bounds, whose sequences overlap, chunks for which the table has no room are dropped: all
sums are limited to its capacity.

Steps (numbers appear again in tables.py):
    1  counts are summed, 1024 sequences at a time: in each warp, then over the warps
    2  a thread finds the sequence of its chunk by bisection of first_chunk

Bounded by latency: a few microseconds for any lengths. Why this shape: made by tensor operations,
the table costs ten launches, which take as long as a whole short forward. `varlen.chunk_table`
makes the same table on any device.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.tables import TABLE_WARPS, place_chunks
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of cu_seqlens


VARIANTS = (Variant("int32"), Variant("int64"))

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by N and capacity


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("table", warps=TABLE_WARPS, regs=64, computes="first_chunk, chunks"),),
        tiles={"sum": Tile((TABLE_WARPS,), "int32")},
    )


def build(variant: Variant):
    plan = schedule(variant)
    num_bounds, capacity = T.dynamic("num_bounds, capacity")

    @T.prim_func
    def chunk_table(
        cu_seqlens: T.Tensor((num_bounds,), variant.dtype),
        chunks: T.Tensor((capacity, 2), "int32"),
        num_chunks: T.Tensor((1,), "int32"),
        first_chunk: T.Tensor((num_bounds,), "int32"),
        num_tokens: T.int32,
    ):
        with T.Kernel(1, threads=plan.threads) as _:
            s = tiles(plan)
            await_previous()
            place_chunks(cu_seqlens, chunks, num_chunks, first_chunk, num_tokens, s.sum)

    return chunk_table
