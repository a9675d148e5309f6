"""gate -- cumulated gates of every chunk, laid out for the kernels that solve and scan.

Per chunk (C = 64 tokens) and value head, with n tokens in the chunk:
    gamma_i = sum_{j <= i} max(g_j, floor), in base 2; level past the chunk's end      [C]
    beta_i; 0 past the chunk's end                                                     [C]
    to_end_i = 2^(gamma_end - gamma_i), end the last token of i's block of 16          [C]
They are written as one row of 3 x 64 numbers, which other kernels fetch by a single bulk copy.
gamma is also written as g_cum [tokens, value heads], in natural log, for the backward; and a beta
of 16 bits once more in fp32, which the kernels that are given A read.

Steps (numbers appear again in the code); a CTA owns one chunk and 32 value heads:
    1  a lane is a value head and a warp 16 tokens: g and beta are read along the heads
    2  sums within the 16 tokens, then over the four warps
    3  the rows are transposed in shared memory, and written along the tokens

Bounded by memory, and small: 8 bytes in and 16 out per token and value head. Why this shape: g is
stored token by token, so a kernel that reads 64 tokens of one head reads a 32-byte sector for each
4 bytes. This kernel uses whole sectors, and transposes on chip. Chunks come from a table that a
kernel of this package made, so they lie inside the tensors: see tables.py. The grid has room for
all chunks that the table has room for; CTAs of no chunk end at once.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.layout import BETA, DECAY_TO_BLOCK_END, GAMMA
from qla_kernels.tile.constants import CHUNK, GATE_FLOOR, LN2, LOG2E
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

GATE_HEADS = 32  # value heads of a CTA
GATE_BLOCK = 16  # tokens of a warp


class Variant(NamedTuple):
    dtype: str  # of beta; g is fp32


VARIANTS = tuple(Variant(dtype) for dtype in ("float32", "bfloat16", "float16"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by `rows` or by num_heads
    "tl.disable_shared_memory_reuse": True,  # sums are read while rows are written
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(
            Role(
                "scan",
                warps=CHUNK // GATE_BLOCK,
                regs=128,
                computes="gamma, beta, decays to blocks' ends, g_cum",
            ),
        ),
        tiles={
            "rows": Tile((GATE_HEADS, 3 * CHUNK + 1), "float32"),  # + 1: no bank twice
            "total": Tile((CHUNK // GATE_BLOCK, GATE_HEADS), "float32"),
        },
        ctas_per_sm=4,
    )


def build(variant: Variant):
    plan = schedule(variant)
    num_tokens, num_heads, capacity = T.dynamic("num_tokens, num_heads, capacity")
    wide_tokens = T.dynamic("wide_tokens")
    widens = variant.dtype != "float32"

    @T.prim_func
    def gate(
        g: strided("g", "token head", (num_tokens, num_heads), "float32"),
        beta: strided("b", "token head", (num_tokens, num_heads), variant.dtype),
        chunks: T.Tensor((capacity, 2), "int32"),
        g_cum: T.Tensor((num_tokens, num_heads), "float32"),
        gates: T.Tensor((capacity, num_heads, 3, CHUNK), "float32"),
        wide_beta: T.Tensor((wide_tokens, num_heads), "float32"),
    ):
        # chunks on x: there may be more than the 65535 that y can count
        grid = (capacity, T.ceildiv(num_heads, GATE_HEADS))
        with T.Kernel(*grid, threads=plan.threads) as (chunk, tile):
            s = tiles(plan)
            gamma = T.alloc_local((GATE_BLOCK,), "float32")
            b = T.alloc_local((GATE_BLOCK,), "float32")
            before = T.alloc_var("float32")
            thread = T.get_thread_binding()
            lane, warp = thread % GATE_HEADS, thread // GATE_HEADS
            head = tile * GATE_HEADS + lane
            await_previous()
            tok0, rows = chunks[chunk, 0], chunks[chunk, 1]
            if rows > 0:  # otherwise there is no such chunk
                for i in T.unroll(GATE_BLOCK):  # 1
                    gamma[i] = 0
                    b[i] = 0
                    if (warp * GATE_BLOCK + i < rows) & (head < num_heads):
                        gamma[i] = T.max(g[tok0 + warp * GATE_BLOCK + i, head] * LOG2E, GATE_FLOOR)
                        b[i] = T.cast(beta[tok0 + warp * GATE_BLOCK + i, head], "float32")
                for i in T.unroll(1, GATE_BLOCK):  # 2
                    gamma[i] += gamma[i - 1]
                s.total[warp, lane] = gamma[GATE_BLOCK - 1]
                T.sync_threads()
                before = 0
                for w in T.unroll(CHUNK // GATE_BLOCK - 1):
                    if w < warp:
                        before += s.total[w, lane]
                for i in T.unroll(GATE_BLOCK):  # 3
                    s.rows[lane, DECAY_TO_BLOCK_END * CHUNK + warp * GATE_BLOCK + i] = T.exp2(
                        gamma[GATE_BLOCK - 1] - gamma[i]
                    )
                    gamma[i] += before
                    s.rows[lane, GAMMA * CHUNK + warp * GATE_BLOCK + i] = gamma[i]
                    s.rows[lane, BETA * CHUNK + warp * GATE_BLOCK + i] = b[i]
                    if (warp * GATE_BLOCK + i < rows) & (head < num_heads):
                        g_cum[tok0 + warp * GATE_BLOCK + i, head] = gamma[i] * LN2
                        if widens:
                            wide_beta[tok0 + warp * GATE_BLOCK + i, head] = b[i]
                T.sync_threads()
                for i in T.serial(
                    T.ceildiv(T.min(GATE_HEADS, num_heads - tile * GATE_HEADS), CHUNK // GATE_BLOCK)
                ):
                    row = i * (CHUNK // GATE_BLOCK) + warp
                    if tile * GATE_HEADS + row < num_heads:
                        for j in T.unroll(3 * CHUNK // 32):
                            gates[chunk, tile * GATE_HEADS + row, j // 2, j % 2 * 32 + lane] = (
                                s.rows[row, j * 32 + lane]
                            )

    return gate
