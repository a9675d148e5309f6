"""activate_bwd -- gradients of raw g and beta, and per-block sums for those of A_log and dt_bias.

Per token and value head, with x = g + dt_bias, from dg and dbeta of what `activate` wrote:
    dg    = -e^A_log sigmoid(x) dg
    dbeta = c sigmoid(beta) (1 - sigmoid(beta)) dbeta, or dbeta as it is
and per block of tokens and value head:
    sums  = sum of -e^A_log softplus(x) dg, for A_log; sum of the new dg, for dt_bias      [2]

Steps (numbers appear again in the role); a CTA owns a block of tokens of up to 256 value heads:
    1 raw    4 tokens of one value head into every thread: g, beta, dg, dbeta
    2 raw    write dg and dbeta in any float dtype; 0 for tokens of no sequence, which may hold NaN
    3 raw    sums over a thread's tokens, then over the threads of a head, half of them each time

Bounded by memory, and small. Why this shape: as activate. The results may overwrite the dg and
dbeta of the input, which each thread has read before it writes. No sum depends on the order in
which CTAs run: gate_sums adds the blocks. `end` needs no clamp, because it can only reduce the
number of a thread's tokens.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.activate import (
    ACTIVATE_THREADS,
    BATCH,
    BESIDE,
    COUNT,
    HAS_A_LOG,
    HEAD,
    ROW,
    TOKEN,
    TOKENS,
    Raw,
    RawInputs,
    fetch_parameters,
    find,
    has,
    raw_type,
    step,
    tokens_before,
)
from qla_kernels.gdn.kernels.raw_gates import (
    SOURCE,
    decode,
    put,
    rate,
    sigmoid,
    sigmoid_slope,
    softplus,
)
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.tiles import tiles

HALVINGS = 8  # log2(ACTIVATE_THREADS)


class Variant(NamedTuple):
    dtype: str  # of the gradients that come


VARIANTS = (Variant("float32"),)

PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # tokens and heads are counted
    "tl.disable_thread_storage_sync": True,  # written out: once before each halving
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("raw", warps=ACTIVATE_THREADS // 32, regs=64, computes="dg, dbeta, sums"),),
        tiles={"sums": Tile((2, ACTIVATE_THREADS), "float32")},
        ctas_per_sm=4,
    )


@T.macro
def raw(x, dg, dbeta, dg_out, dbeta_out, beta_range, r_sums, place, num_live, flags):
    batch, token, head, count = place[BATCH], place[TOKEN], place[HEAD], place[COUNT]
    r_g = T.alloc_local((TOKENS,), "float32")
    r_beta = T.alloc_local((TOKENS,), "float32")
    r_dg = T.alloc_local((TOKENS,), "float32")
    r_dbeta = T.alloc_local((TOKENS,), "float32")
    r_A = T.alloc_local((1,), "float32")
    r_bias = T.alloc_local((1,), "float32")
    live = T.min(count, tokens_before(num_live, place))
    if has(flags, HAS_A_LOG):  # 1
        x.g.fetch(r_g, place, batch, token, live)
        fetch_parameters(x, r_A, r_bias, place, flags)
    if beta_range > 0:
        x.beta.fetch(r_beta, place, batch, token, live)
    for i in T.unroll(TOKENS):
        r_dg[i] = 0
        r_dbeta[i] = 0
        if i < live:
            r_dg[i] = dg[batch, token + i * place[BESIDE], head]
            r_dbeta[i] = dbeta[batch, token + i * place[BESIDE], head]
    for i in T.unroll(TOKENS):  # 2, 3
        r_g[i] = decode(r_g[i], x.g.dtype)
        r_beta[i] = decode(r_beta[i], x.beta.dtype)
    if has(flags, HAS_A_LOG):
        r_A[0] = rate(decode(r_A[0], x.A_log.dtype))
        r_bias[0] = decode(r_bias[0], x.dt_bias.dtype)
        for i in T.unroll(TOKENS):
            r_g[i] += r_bias[0]
            r_dg[i] *= r_A[0]
            r_sums[0] += softplus(r_g[i]) * r_dg[i]
            r_dg[i] *= sigmoid(r_g[i])
            r_sums[1] += r_dg[i]
        put(dg_out[batch, token, 0], r_dg, head, step(place, dg_out.shape[2]), count, x.g.dtype)
    if beta_range > 0:
        for i in T.unroll(TOKENS):
            r_dbeta[i] *= beta_range * sigmoid_slope(r_beta[i])
    put(
        dbeta_out[batch, token, 0],
        r_dbeta,
        head,
        step(place, dbeta_out.shape[2]),
        count,
        x.beta.dtype,
    )


@T.macro
def add_up(sums, r_sums, s_sums, place, block, num_heads):
    """Adds r_sums over the threads of each head, and writes the block's sums to `sums`.

    `reach` is the number of partial sums that are left; each step halves it.
    """
    thread, width = T.get_thread_binding(), T.min(num_heads, ACTIVATE_THREADS)
    reach = T.alloc_var("int32")
    reach = place[BESIDE]
    for _ in rolled(HALVINGS):
        if reach > 1:
            for j in T.unroll(2):
                s_sums[j, thread] = r_sums[j]
            T.sync_threads()
            if place[ROW] + T.truncdiv(reach + 1, 2) < reach:
                for j in T.unroll(2):
                    r_sums[j] += s_sums[j, thread + T.truncdiv(reach + 1, 2) * width]
            T.sync_threads()
            reach = T.truncdiv(reach + 1, 2)
    if (place[ROW] == 0) & (place[HEAD] < num_heads):
        for j in T.unroll(2):
            sums[block, j, place[HEAD]] = r_sums[j]


def build(variant: Variant):
    plan = schedule(variant)
    batch, num_tokens, num_heads, num_blocks = T.dynamic("batch, num_tokens, num_heads, num_blocks")
    g_row, beta_row, A_row, bias_row = T.dynamic("g_row, beta_row, A_row, bias_row")
    dg_token, dbeta_token = T.dynamic("dg_token, dbeta_token")

    @T.prim_func
    def activate_bwd(
        # gradients have the dtypes of what they are of
        g: raw_type("g", batch, num_tokens, g_row),
        beta: raw_type("beta", batch, num_tokens, beta_row),
        A_log: raw_type("A", A_row),
        dt_bias: raw_type("bias", bias_row),
        dg: T.Tensor((batch, num_tokens, num_heads), variant.dtype),
        dbeta: T.Tensor((batch, num_tokens, num_heads), variant.dtype),
        dg_out: T.Tensor((batch, num_tokens, dg_token), "uint8"),
        dbeta_out: T.Tensor((batch, num_tokens, dbeta_token), "uint8"),
        sums: T.Tensor((num_blocks, 2, num_heads), "float32"),
        end: T.Tensor((1,), "int32"),  # tokens that belong to a sequence, if `packed`
        # bytes from a head to the next
        g_head: T.int32,
        beta_head: T.int32,
        A_head: T.int32,
        bias_head: T.int32,
        g_dtype: T.int32,
        beta_dtype: T.int32,
        A_dtype: T.int32,
        bias_dtype: T.int32,
        beta_range: T.float32,  # 1 or 2 where beta went through a sigmoid, else 0
        packed: T.int32,
        flags: T.int32,
        beside: T.int32,
        blocks: T.int32,
    ):
        grid = (batch * blocks, T.ceildiv(num_heads, ACTIVATE_THREADS))
        with T.Kernel(*grid, threads=plan.threads) as (block, tile):
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            place = T.alloc_local((6,), "int32")
            r_sums = T.alloc_local((2,), "float32")
            s = tiles(plan)
            num_live = T.alloc_var("int32")
            find(place, block, tile, beside, blocks, num_tokens, num_heads)
            T.clear(r_sums)
            num_live = num_tokens
            await_previous()
            if packed != 0:
                num_live = end[0]
            x = RawInputs(
                Raw(g, g_head, g_dtype),
                Raw(beta, beta_head, beta_dtype),
                Raw(A_log, A_head, A_dtype),
                Raw(dt_bias, bias_head, bias_dtype),
            )
            raw(x, dg, dbeta, dg_out, dbeta_out, beta_range, r_sums, place, num_live, flags)
            if has(flags, HAS_A_LOG):
                add_up(sums, r_sums, s.sums, place, block, num_heads)

    return activate_bwd
