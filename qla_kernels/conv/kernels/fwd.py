"""fwd -- the causal convolution of each channel, with bias and activation.

Per token t and channel, over the tokens of t's sequence:
    z_t = b + sum_j w_j x[source(t, j)]     j = 0 .. W-1          y_t = z_t, or z_t / (1 + e^-z_t)
Tokens of no sequence, behind the last node, get y = 0.

Steps (numbers appear again in the code), for a warp, which owns 128 channels of a run of tokens:
    1 conv   find the run's first node
    2 conv   at the start of the run and of each node: the W - 1 rows before
    3 conv   load the row of the token 6 places ahead
    4 conv   z, y rounded once, out

Bounded by memory: x is read once and y written once.
Why this shape: a thread has 4 channels. Their weights, biases and the last W - 1 rows stay in
registers, few enough for 24 warps an SM. A row's registers are loaded again as soon as its numbers
are fp32, so each warp has 6 rows in flight at all times, and an SM 36 KB. Accesses of 16 bytes
would double the registers, and halve the warps. Rows of a run are taken without a branch, in sixes,
and its last ones one by one. A warp reads 256 adjacent bytes of a row, CTAs with neighbouring
numbers the rest of it. Neighbouring runs read W - 1 rows twice; a run is as long as the number of
CTAs allows. One kernel serves trees, packs and dense batches.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.kernels.numbers import SOURCE, factor
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
from qla_kernels.conv.shapes import PIECE, RUNS, TILE, WIDTHS
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

FWD_ROWS = 6  # rows that a thread has loaded ahead


class Variant(NamedTuple):
    dtype: str  # of x and y
    W: int


VARIANTS = tuple(Variant(dtype, W) for dtype in ("bfloat16", "float16") for W in WIDTHS)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.ptxas_register_usage_level": 10,  # lower levels spill a few numbers
    "tl.disable_safe_memory_legalize": True,  # rows and channels are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("conv", warps=RUNS, regs=80, computes="y"),),
        ctas_per_sm=3,  # with 6 rows of 8 bytes in flight a thread
    )


@T.macro
def conv(x, y, nodes, r_w, r_b, W, run, end_run, piece, least):
    num_tokens = x.shape[0]
    r_row = T.alloc_local((FWD_ROWS, PIECE), x.dtype)
    r_line = T.alloc_local((W - 1 + FWD_ROWS, PIECE), "float32")
    node, begin, end, first, stop, t = (T.alloc_var("int32") for _ in range(6))
    first = run
    find_node(nodes, run, num_tokens, node)  # 1
    while (node < nodes.num_nodes) & (first < end_run):
        begin = T.min(bound(nodes, node, num_tokens), first)
        end = bound(nodes, node + 1, num_tokens)
        stop = T.min(end, end_run)
        if first < stop:
            load_window(x, nodes, r_line, r_row, node, begin, first, piece, num_tokens)  # 2
            load_rows(x, r_row, first, stop - 1, piece)
            t = first
            while t + FWD_ROWS <= stop:
                for u in T.unroll(FWD_ROWS):
                    for e in T.unroll(PIECE):
                        r_line[W - 1 + u, e] = r_row[u, e]
                    load_row(x, r_row, u, t + FWD_ROWS + u, stop - 1, piece)  # 3
                    put_activated(y, r_line, r_w, r_b, u, t + u, piece, least)
                move_line(r_line, W - 1, FWD_ROWS)
                t += FWD_ROWS
            for i in rolled(stop - t):
                for e in T.unroll(PIECE):
                    r_line[W - 1, e] = r_row[0, e]
                load_next(x, r_row, t + i + FWD_ROWS, stop - 1, piece)
                put_activated(y, r_line, r_w, r_b, 0, t + i, piece, least)
                move_line(r_line, W - 1, 1)
        first = T.max(first, end)
        node += 1
    if node == nodes.num_nodes:
        clear_rows(y, first, end_run, piece)


@T.macro
def put_activated(y, r_line, r_w, r_b, u, token, piece, least):
    """Writes y of a token, whose row is at place u behind the window of r_line: step 4."""
    r_y = T.alloc_local((PIECE,), y.dtype)
    z = T.alloc_var("float32")
    for e in T.unroll(PIECE):
        z = convolved(r_line, r_w, r_b, u, e)
        r_y[e] = z * factor(z, least)
    put_row(y, r_y, token, piece)


def build(variant: Variant):
    plan = schedule(variant)
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
        weight_dtype: T.int32,
        bias_dtype: T.int32,
        has_bias: T.int32,
        least: T.float32,  # act(z) / z: 0 for silu, 1 for no activation
    ):
        tiles = T.ceildiv(pieces * PIECE, TILE)
        blocks = T.ceildiv(T.ceildiv(num_tokens, run_tokens), RUNS)
        with T.Kernel(blocks * tiles, threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            tx = T.get_thread_binding()
            r_w = T.alloc_local((PIECE * W,), "float32")
            r_b = T.alloc_local((PIECE,), "float32")
            block, piece, run = (T.alloc_var("int32") for _ in range(3))
            block = T.truncdiv(cta, tiles)
            piece = (cta - block * tiles) * (TILE // PIECE) + tx % 32
            run = (block * RUNS + tx // 32) * run_tokens
            if (run < num_tokens) & (piece < pieces):
                load_weights(
                    weight, bias, r_w, r_b, piece * PIECE, weight_dtype, bias_dtype, has_bias
                )
                nodes = Nodes(bounds, halo, length, num_nodes, in_tree)
                end_run = T.min(run + run_tokens, num_tokens)
                conv(x, y, nodes, r_w, r_b, W, run, end_run, piece, least)

    return fwd
