"""bwd -- the gradients of the causal convolution's input, and sums for those of its parameters.

Per token t and channel, over the tokens of t's own node; z_t as in fwd:
    dz_t = dy_t act'(z_t)          dx_t = sum_j w_j dz_{t+j}     j = 0 .. W-1
and per CTA, over the tokens of its runs:
    sums = sum_t dz_t x[source(t, W-1-j)] for each j, then sum_t dz_t                   [W + 1]
The same formula as for dx_t, at the W - 1 places before a node's first token, gives the parts of
the gradients of its halo's tokens. In a tree, parts go to `parts` in fp32, and so do the dx of
tokens that other nodes read; join_parts adds them. Tokens of no sequence get dx = 0.

Steps (numbers appear again in the code), for a warp, which owns 128 channels of a run of tokens:
    1 grad   find the run's first node
    2 grad   at the start of the run and of each node: the W - 1 rows of x before
    3 grad   load 4 rows of x and of dy
    4 grad   z once more, dz; add to the sums
    5 grad   dx of the token W - 1 places before, rounded once, out; or its part, in fp32
    6 grad   sums over the warps, through shared memory

Bounded by memory: x and dy are read once and dx written once.
Why this shape: as fwd. A warp walks W - 1 tokens past its run, or computes with dz = 0 past a
node's end, so each token's gradient has one writer and no atomics are needed. Reading x again and
computing z again costs less than reading a z that the forward saved. Sums stay in registers until
the warp's run ends.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.kernels.numbers import SOURCE, sigmoid
from qla_kernels.conv.kernels.walk import (
    Nodes,
    bound,
    clear_rows,
    convolved,
    find_node,
    load_rows,
    load_weights,
    load_window,
)
from qla_kernels.conv.shapes import GIVEN, KEPT, PIECE, RUNS, TILE, WIDTHS
from qla_kernels.tile.schedule import Role, Schedule

BWD_ROWS = 4  # rows of x, and of dy, that a thread loads at a time


class Variant(NamedTuple):
    dtype: str  # of x, dy and dx
    W: int


VARIANTS = tuple(Variant(dtype, W) for dtype in ("bfloat16", "float16") for W in WIDTHS)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # written out: once, before the warps' sums are added
    "tl.disable_safe_memory_legalize": True,  # rows and channels are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("grad", warps=RUNS, regs=128, computes="dx, parts, sums"),),
        smem_bytes=RUNS * (variant.W + 1) * TILE * 4,
        ctas_per_sm=2,
    )


@T.macro
def find_parts(rows, node, begin, end, W, in_tree, parts, kept: T.Ref, given: T.Ref, tail: T.Ref):
    """Sets the rows of a node's parts.

    Token t, from `tail` on, has row kept + t - tail; the halo's token i has row given + i. Both
    numbers are at most the number of rows. A node without a halo has given + i < 0.
    """
    tail = end
    given = -W
    kept = 0
    if in_tree != 0:
        if rows[node, KEPT] >= 0:
            kept = T.min(rows[node, KEPT], parts.shape[0])
            tail = T.max(end - (W - 1), begin)
        if rows[node, GIVEN] >= 0:
            given = T.min(rows[node, GIVEN], parts.shape[0]) - (W - 2)


@T.macro
def add_to_sums(r_sum, r_line, r_dz, W, u):
    """Adds the products of one token's dz and its taps, then dz itself, to a thread's sums."""
    for e in T.unroll(PIECE):
        for j in T.unroll(W):
            r_sum[j, e] += r_dz[e] * r_line[u + j, e]
        r_sum[W, e] += r_dz[e]


@T.macro
def grad(
    x, dy, dx, parts, rows, nodes, r_w, r_b, r_sum, W, run, end_run, piece, writes, silu
):  # fmt: skip
    num_tokens = x.shape[0]
    r_row = T.alloc_local((BWD_ROWS, PIECE), x.dtype)
    r_dy = T.alloc_local((BWD_ROWS, PIECE), x.dtype)
    r_line = T.alloc_local((W - 1 + BWD_ROWS, PIECE), "float32")
    r_dline = T.alloc_local((W - 1 + BWD_ROWS, PIECE), "float32")
    r_own = T.alloc_local((PIECE,), "float32")
    r_grad = T.alloc_local((PIECE,), "float32")
    r_dx = T.alloc_local((PIECE,), dx.dtype)
    z, s = T.alloc_var("float32"), T.alloc_var("float32")
    node, begin, end, first, stop, t = (T.alloc_var("int32") for _ in range(6))
    kept, given, tail, place, row = (T.alloc_var("int32") for _ in range(5))
    find_node(nodes, run, num_tokens, node)  # 1
    begin = bound(nodes, node, num_tokens)
    end = begin
    while (node < nodes.num_nodes) & (begin < end_run):
        end = bound(nodes, node + 1, num_tokens)
        first = T.max(begin, run)
        stop = T.min(end, end_run)
        if first < stop:
            load_window(x, nodes, r_line, r_row, node, begin, first, piece, num_tokens)  # 2
            find_parts(rows, node, begin, end, W, nodes.in_tree, parts, kept, given, tail)
            for i in T.unroll(W - 1):
                for e in T.unroll(PIECE):
                    r_dline[i, e] = 0
            t = first
            while t < stop + W - 1:
                load_rows(x, r_row, t, end - 1, piece)  # 3
                load_rows(dy, r_dy, t, end - 1, piece)
                for u in T.unroll(BWD_ROWS):
                    for e in T.unroll(PIECE):  # 4
                        r_line[W - 1 + u, e] = r_row[u, e]
                    for e in T.unroll(PIECE):
                        r_own[e] = r_dy[u, e]
                        if silu != 0:
                            z = convolved(r_line, r_w, r_b, u, e)
                            s = sigmoid(z)
                            r_own[e] *= s * (1 + z * (1 - s))
                        if t >= end:
                            r_own[e] = 0
                        r_dline[W - 1 + u, e] = r_own[e]
                        if t >= stop:
                            r_own[e] = 0
                    add_to_sums(r_sum, r_line, r_own, W, u)
                    for e in T.unroll(PIECE):  # 5
                        r_grad[e] = 0
                        for j in T.unroll(W):
                            r_grad[e] += r_w[e * W + W - 1 - j] * r_dline[u + j, e]
                        r_dx[e] = r_grad[e]
                    place = t - (W - 1)
                    if writes & (place >= first) & (place < T.min(stop, tail)):
                        for e in T.vectorized(PIECE):
                            dx[place, piece, e] = r_dx[e]
                    if nodes.in_tree != 0:
                        row = -1
                        if (place < first) & (first == begin):
                            if nodes.halo[node, t - first] >= 0:
                                row = given + t - first
                        if (place >= tail) & (place >= first) & (place < stop):
                            row = kept + place - tail
                        if writes & (row >= 0) & (row < parts.shape[0]):
                            for e in T.vectorized(PIECE):
                                parts[row, piece, e] = r_grad[e]
                    t += 1
                for i in T.unroll(W - 1):
                    for e in T.unroll(PIECE):
                        r_line[i, e] = r_line[BWD_ROWS + i, e]
                        r_dline[i, e] = r_dline[BWD_ROWS + i, e]
        node += 1
        begin = end
    if writes & (node == nodes.num_nodes):
        clear_rows(dx, T.max(end, run), end_run, piece)


@T.macro
def add_warps(sums, s_sum, r_sum, W, block, piece, writes):
    """Adds r_sum over the warps, in their order, and writes the CTA's sums: step 6."""
    lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
    r_total = T.alloc_local((PIECE,), "float32")
    for j in T.unroll(W + 1):
        for e in T.vectorized(PIECE):
            s_sum[warp, j, lane * PIECE + e] = r_sum[j, e]
    T.sync_threads()
    if warp <= W:  # a warp adds one of the W + 1 sums
        for e in T.unroll(PIECE):
            r_total[e] = 0
        for other in T.unroll(RUNS):
            for e in T.unroll(PIECE):
                r_total[e] += s_sum[other, warp, lane * PIECE + e]
        if writes:
            for e in T.vectorized(PIECE):
                sums[block, warp, piece, e] = r_total[e]


def build(variant: Variant):
    plan = schedule(variant)
    W = variant.W
    num_tokens, pieces, x_token, dy_token = T.dynamic("num_tokens, pieces, x_token, dy_token")
    num_bounds, bound_step, num_nodes_in_tree = T.dynamic("num_bounds, bound_step, num_halos")
    weight_bytes, bias_bytes, num_parts, blocks = T.dynamic(
        "weight_bytes, bias_bytes, num_parts, blocks"
    )

    @T.prim_func
    def bwd(
        dy: T.StridedTensor((num_tokens, pieces, PIECE), (dy_token, PIECE, 1), variant.dtype),
        x: T.StridedTensor((num_tokens, pieces, PIECE), (x_token, PIECE, 1), variant.dtype),
        # as bytes of any float dtype
        weight: T.Tensor((weight_bytes,), "uint8"),
        bias: T.Tensor((bias_bytes,), "uint8"),
        bounds: T.StridedTensor((num_bounds,), (bound_step,), "int32"),
        halo: T.Tensor((num_nodes_in_tree, W - 1), "int32"),
        rows: T.Tensor((num_nodes_in_tree, 2), "int32"),
        dx: T.Tensor((num_tokens, pieces, PIECE), variant.dtype),
        parts: T.Tensor((num_parts, pieces, PIECE), "float32"),
        sums: T.Tensor((blocks, W + 1, pieces, PIECE), "float32"),
        length: T.int32,  # tokens of each node of a dense batch; 0: they follow from bounds
        num_nodes: T.int32,
        in_tree: T.int32,  # 0: halo and rows are not read
        run_tokens: T.int32,  # tokens of a run
        weight_dtype: T.int32,
        bias_dtype: T.int32,
        has_bias: T.int32,
        silu: T.int32,
    ):
        tiles = T.ceildiv(pieces * PIECE, TILE)
        with T.Kernel(blocks * tiles, threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            tx = T.get_thread_binding()
            s_sum = T.alloc_shared((RUNS, W + 1, TILE), "float32")
            r_sum = T.alloc_local((W + 1, PIECE), "float32")
            r_w = T.alloc_local((PIECE * W,), "float32")
            r_b = T.alloc_local((PIECE,), "float32")
            block, piece, run = (T.alloc_var("int32") for _ in range(3))
            block = T.truncdiv(cta, tiles)
            piece = (cta - block * tiles) * (TILE // PIECE) + tx % 32
            writes = piece < pieces
            piece = T.min(piece, pieces - 1)
            run = (block * RUNS + tx // 32) * run_tokens
            T.clear(r_sum)
            if run < num_tokens:
                load_weights(
                    weight, bias, r_w, r_b, piece * PIECE, weight_dtype, bias_dtype, has_bias
                )
                nodes = Nodes(bounds, halo, length, num_nodes, in_tree)
                end_run = T.min(run + run_tokens, num_tokens)
                grad(
                    x, dy, dx, parts, rows, nodes, r_w, r_b, r_sum, W,
                    run, end_run, piece, writes, silu,
                )  # fmt: skip
            add_warps(sums, s_sum, r_sum, W, block, piece, writes)

    return bwd
