"""fwd -- the causal convolution of each channel, with bias, activation, and a norm of heads.

Per token t and channel, over the tokens of t's sequence:
    z_t = b + sum_j w_j x[source(t, j)]     j = 0 .. W-1          y_t = z_t, or z_t / (1 + e^-z_t)
The first channels may be heads to normalise: these get y_t (sum over the head y_t^2 + 1e-6)^-1/2.
Tokens of no sequence, behind the last node, get y = 0.

Steps (numbers appear again in the code), for a warp, which owns 128 channels of a run of tokens:
    1 conv   find the run's first node
    2 conv   at the start of the run and of each node: the W - 1 rows before
    3 conv   load the row of the token 6 places ahead
    4 conv   z, y; in a warp of heads the norms, of four rows at a time; rounded once, out

Bounded by memory: x is read once and y written once.
Why this shape: a thread has 4 channels. Their weights, biases and the last W - 1 rows stay in
registers, few enough for 24 warps an SM. A row's registers are loaded again as soon as its numbers
are fp32, so each warp has 6 rows in flight at all times, and an SM 36 KB. Accesses of 16 bytes
would double the registers, and halve the warps. Rows of a run are taken without a branch, in sixes,
and its last ones one by one. A warp reads 256 adjacent bytes of a row, CTAs with neighbouring
numbers the rest of it. Neighbouring runs read W - 1 rows twice; a run is as long as the number of
CTAs allows. One kernel serves trees, packs and dense batches, with and without heads.
A head has one warp, a part of one, or two, so that its norm needs no memory; see conv/heads.py.
Warps of heads have code of their own. There a row waits for its norm, so they load 4 rows ahead,
and add up all four norms together.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.heads import Heads
from qla_kernels.conv.kernels.heads import (
    HEADS_SOURCE,
    SUMS,
    Warp,
    find_place,
    normalise,
    pair_barriers,
    pair_bytes,
    uniform,
)
from qla_kernels.conv.kernels.pieces import SOURCE, factor
from qla_kernels.conv.kernels.walk import (
    Nodes,
    bound,
    clear_rows,
    convolved,
    find_node,
    load_next,
    load_row,
    load_rows,
    load_weights,
    load_window,
    move_line,
    put_row,
)
from qla_kernels.conv.shapes import LANES, PIECE, RUNS, WIDTHS
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.schedule import Role, Schedule

FWD_ROWS = 6  # rows that a thread has loaded ahead
NORM_ROWS = 4  # likewise in a warp of heads, whose norms are taken together


class Variant(NamedTuple):
    dtype: str  # of x and y
    W: int


VARIANTS = tuple(Variant(dtype, W) for dtype in ("bfloat16", "float16") for W in WIDTHS)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.ptxas_register_usage_level": 10,  # lower levels spill a few numbers
    "tl.disable_thread_storage_sync": True,  # written out: the two warps of a wide head meet
    "tl.disable_safe_memory_legalize": True,  # rows and channels are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("conv", warps=RUNS, regs=80, computes="y"),),
        named=pair_barriers(RUNS),
        smem_bytes=pair_bytes(RUNS),
        ctas_per_sm=3,  # with 6 rows of 8 bytes in flight a thread
    )


@T.macro
def conv(x, y, nodes, of, r_w, r_b, W, run, end_run, left: "T.Ref", piece, least, norms, pool=None):
    """Takes a run of tokens, and sets `left` to the first that is of no sequence, or to end_run.

    `norms` says at compile time whether the warp's channels are heads.
    """
    num_tokens = x.shape[0]
    ahead, rows = (NORM_ROWS, NORM_ROWS) if norms else (FWD_ROWS, 1)
    r_row = T.alloc_local((ahead, PIECE), x.dtype)
    r_line = T.alloc_local((W - 1 + ahead, PIECE), "float32")
    r_y = T.alloc_local((rows, PIECE), "float32")
    r_last = T.alloc_local((1, PIECE), "float32")
    node, begin, end, first, stop, t = (T.alloc_var("int32") for _ in range(6))
    end = run  # of the tokens so far
    find_node(nodes, run, num_tokens, node)  # 1
    node = uniform(node)
    while (node < nodes.num_nodes) & (end < end_run):
        first = end
        begin = uniform(T.min(bound(nodes, node, num_tokens), first))
        end = T.max(first, uniform(bound(nodes, node + 1, num_tokens)))
        stop = T.min(end, end_run)
        if first < stop:
            load_window(x, nodes, r_line, r_row, node, begin, first, piece, num_tokens, pool)  # 2
            load_rows(x, r_row, first, stop - 1, piece)
            t = first
            while t + ahead <= stop:
                for u in T.unroll(0, ahead, rows):
                    for i in T.unroll(rows):
                        for e in T.unroll(PIECE):
                            r_line[W - 1 + u + i, e] = r_row[u + i, e]
                        load_row(x, r_row, u + i, t + ahead + u + i, stop - 1, piece)  # 3
                        activate(r_y, i, r_line, r_w, r_b, u + i, least)  # 4
                    put_rows(y, r_y, t + u, piece, of, norms)
                move_line(r_line, W - 1, ahead)
                t += ahead
            for i in rolled(stop - t):
                for e in T.unroll(PIECE):
                    r_line[W - 1, e] = r_row[0, e]
                load_next(x, r_row, t + i + ahead, stop - 1, piece)
                activate(r_last, 0, r_line, r_w, r_b, 0, least)
                put_rows(y, r_last, t + i, piece, of, norms)
                move_line(r_line, W - 1, 1)
        node += 1
    left = T.if_then_else(node == nodes.num_nodes, end, end_run)


@T.macro
def activate(r_y, i, r_line, r_w, r_b, u, least):
    """Sets row i of r_y to act(z) of the token whose row is at place u behind r_line's window."""
    z = T.alloc_var("float32")
    for e in T.unroll(PIECE):
        z = convolved(r_line, r_w, r_b, u, e)
        r_y[i, e] = z * factor(z, least)


@T.macro
def put_rows(y, r_y, token, piece, of, norms):
    """Writes rows of r_y to y, from a token on."""
    r_out = T.alloc_local((PIECE,), y.dtype)
    if norms:
        normalise(r_y, of)
    for i in T.unroll(r_y.shape[0]):
        for e in T.unroll(PIECE):
            r_out[e] = r_y[i, e]
        put_row(y, r_out, token + i, piece)


def build(variant: Variant):
    plan = schedule(variant)
    pair = NamedBarrier(plan, "pair")
    W = variant.W
    num_tokens, pieces, x_token = T.dynamic("num_tokens, pieces, x_token")
    num_bounds, bound_step, num_halos = T.dynamic("num_bounds, bound_step, num_halos")
    weight_bytes, bias_bytes = T.dynamic("weight_bytes, bias_bytes")

    @T.prim_func
    def fwd(
        x: T.StridedTensor((num_tokens, pieces, PIECE), (x_token, PIECE, 1), variant.dtype),
        # as bytes of any float dtype
        weight: T.Tensor((weight_bytes,), "uint8"),
        bias: T.Tensor((bias_bytes,), "uint8"),
        bounds: T.StridedTensor((num_bounds,), (bound_step,), "int32"),
        halo: T.Tensor((num_halos, W - 1), "int32"),
        y: T.Tensor((num_tokens, pieces, PIECE), variant.dtype),
        length: T.int32,  # tokens of each node of a dense batch; 0: they follow from bounds
        num_nodes: T.int32,
        in_tree: T.int32,  # 0: halo is not read
        run_tokens: T.int32,  # tokens of a run
        tiles: T.int32,  # CTAs that share a run's channels
        head_pieces: T.int32,  # the fields of Heads
        head_tiles: T.int32,
        head_lanes: T.int32,
        reach: T.int32,
        wide: T.int32,
        weight_dtype: T.int32,
        bias_dtype: T.int32,
        has_bias: T.int32,
        least: T.float32,  # act(z) / z: 0 for silu, 1 for no activation
    ):
        blocks = T.ceildiv(T.ceildiv(num_tokens, run_tokens), T.shift_right(RUNS, wide))
        with T.Kernel(blocks * tiles, threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE + HEADS_SOURCE)
            warp = uniform(T.get_thread_binding() // LANES)
            s_pair = T.alloc_shared((RUNS, 1, SUMS), "float32")
            r_w = T.alloc_local((PIECE * W,), "float32")
            r_b = T.alloc_local((PIECE,), "float32")
            block, tile, start, piece, run = (T.alloc_var("int32") for _ in range(5))
            left, end_run = T.alloc_var("int32"), T.alloc_var("int32")
            heads = Heads(head_pieces, head_tiles, head_lanes, reach, wide)
            find_place(heads, cta, tiles, pieces, block, tile, start, piece)
            run = (T.shift_right(block * RUNS, wide) + T.shift_right(warp, wide)) * run_tokens
            if (run < num_tokens) & (start < pieces):
                load_weights(
                    weight, bias, r_w, r_b, piece * PIECE, weight_dtype, bias_dtype, has_bias
                )
                nodes = Nodes(bounds, halo, length, num_nodes, in_tree)
                of = Warp(s_pair, pair, head_lanes, reach, wide)
                end_run = T.min(run + run_tokens, num_tokens)
                left = end_run
                if tile < head_tiles:
                    conv(x, y, nodes, of, r_w, r_b, W, run, end_run, left, piece, least, True)
                else:
                    conv(x, y, nodes, of, r_w, r_b, W, run, end_run, left, piece, least, False)
                if left < end_run:
                    # once more, so that it takes no registers in between
                    find_place(heads, uniform(cta), tiles, pieces, block, tile, start, piece)
                    clear_rows(y, left, end_run, piece)

    return fwd
