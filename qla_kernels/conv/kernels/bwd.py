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
    3 grad   load x and dy of the token 4 places ahead
    4 grad   z once more, dz; add to the sums
    5 grad   dx of the token W - 1 places before, rounded once, out; or its part, in fp32
    6 grad   sums over the warps, through shared memory

Bounded by memory: x and dy are read once and dx written once.
Why this shape: as fwd. A warp walks W - 1 tokens past its run, or computes with dz = 0 past a
node's end, so each token's gradient has one writer and no atomics are needed. Reading x again and
computing z again costs less than reading a z that the forward saved. Sums stay in registers until
the warp's run ends.
"""

from typing import Any, NamedTuple

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
from qla_kernels.conv.shapes import GIVEN, KEPT, PIECE, RUNS, TILE, WIDTHS
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.schedule import Role, Schedule

BWD_ROWS = 4  # rows of x, and of dy, that a thread has loaded ahead


class Variant(NamedTuple):
    dtype: str  # of x, dy and dx
    W: int


VARIANTS = tuple(Variant(dtype, W) for dtype in ("bfloat16", "float16") for W in WIDTHS)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.ptxas_register_usage_level": 10,  # lower levels spill a few numbers
    "tl.disable_thread_storage_sync": True,  # written out: once, before the warps' sums are added
    "tl.disable_safe_memory_legalize": True,  # rows and channels are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("grad", warps=RUNS, regs=128, computes="dx, parts, sums"),),
        smem_bytes=RUNS * (variant.W + 1) * TILE * 4,
        ctas_per_sm=2,
    )


class Registers(NamedTuple):
    """A thread's numbers; rows of `line` and `dline` begin with a window of W - 1 tokens."""

    x: Any  # [BWD_ROWS, PIECE] loaded rows, of the tokens from t on
    dy: Any
    line: Any  # [W - 1 + BWD_ROWS, PIECE] x
    dline: Any  # likewise dz
    w: Any
    b: Any
    sum: Any  # [W + 1, PIECE]


@T.macro
def grad(x, dy, dx, parts, rows, nodes, r, W, run, end_run, piece, least):
    num_tokens = x.shape[0]
    node, begin, end, first, stop, t = (T.alloc_var("int32") for _ in range(6))
    first = run
    find_node(nodes, run, num_tokens, node)  # 1
    while (node < nodes.num_nodes) & (first < end_run):
        begin = T.min(bound(nodes, node, num_tokens), first)
        end = bound(nodes, node + 1, num_tokens)
        stop = T.min(end, end_run)
        if first < stop:
            load_window(x, nodes, r.line, r.x, node, begin, first, piece, num_tokens)  # 2
            for i in T.unroll(W - 1):
                for e in T.unroll(PIECE):
                    r.dline[i, e] = 0
            load_rows(x, r.x, first, end - 1, piece)
            load_rows(dy, r.dy, first, end - 1, piece)
            take_head(x, dy, parts, rows, nodes, r, W, first, node, begin, stop, end, piece, least)
            t = first + W - 1
            while t + BWD_ROWS <= stop:
                take_rows(x, dy, dx, r, W, t, end - 1, piece, least)
                t += BWD_ROWS
            take_tail(x, dy, dx, parts, rows, nodes, r, W, t, node, stop, end, piece, least)
        first = T.max(first, end)
        node += 1
    if node == nodes.num_nodes:
        clear_rows(dx, first, end_run, piece)


@T.macro
def take_rows(x, dy, dx, r, W, t, last, piece, least):
    """Takes BWD_ROWS tokens of the run, and writes dx of those W - 1 places before them."""
    r_dx = T.alloc_local((PIECE,), dx.dtype)
    for u in T.unroll(BWD_ROWS):
        for e in T.unroll(PIECE):
            r.line[W - 1 + u, e] = r.x[u, e]
            r.dline[W - 1 + u, e] = r.dy[u, e]
        load_row(x, r.x, u, t + BWD_ROWS + u, last, piece)  # 3
        load_row(dy, r.dy, u, t + BWD_ROWS + u, last, piece)
        for e in T.unroll(PIECE):
            differentiate(r, W, u, e, least)  # 4
            add_to_sums(r, W, u, e, r.dline[W - 1 + u, e])
            r_dx[e] = gathered(r, W, u, e)  # 5
        put_row(dx, r_dx, t + u - (W - 1), piece)
    move_line(r.line, W - 1, BWD_ROWS)
    move_line(r.dline, W - 1, BWD_ROWS)


@T.macro
def take_head(x, dy, parts, rows, nodes, r, W, first, node, begin, stop, end, piece, least):
    """Takes the first W - 1 tokens; at a node's start it writes parts of its halo's gradients."""
    r_part = T.alloc_local((PIECE,), "float32")
    row = T.alloc_var("int32")
    for i in rolled(W - 1):
        take_token(x, dy, r, r_part, W, first + i, stop, end, piece, least)
        if (nodes.in_tree != 0) & (first == begin):
            row = rows[node, GIVEN]
            if (row >= 0) & (nodes.halo[node, i] >= 0):
                put_part(parts, r_part, row - (W - 2) + i, piece)


@T.macro
def take_tail(x, dy, dx, parts, rows, nodes, r, W, t, node, stop, end, piece, least):
    """Takes the run's last tokens and W - 1 more, until dx of its last token is complete.

    dx of a token that other nodes read is a part.
    """
    r_part = T.alloc_local((PIECE,), "float32")
    r_dx = T.alloc_local((PIECE,), dx.dtype)
    tail, row, token = (T.alloc_var("int32") for _ in range(3))
    tail = end
    row = 0
    if nodes.in_tree != 0:
        row = rows[node, KEPT]
        if row >= 0:
            tail = T.max(end - (W - 1), bound(nodes, node, x.shape[0]))
    for i in rolled(stop + W - 1 - t):
        take_token(x, dy, r, r_part, W, t + i, stop, end, piece, least)
        token = t + i - (W - 1)
        if token < tail:
            for e in T.unroll(PIECE):
                r_dx[e] = r_part[e]
            put_row(dx, r_dx, token, piece)
        else:
            put_part(parts, r_part, row + token - tail, piece)


@T.macro
def take_token(x, dy, r, r_part, W, t, stop, end, piece, least):
    """Takes one token, which may be past the run's last, and then does not add to the sums.

    r_part is the gradient of the token W - 1 places before. Past the node's last token dz is 0.
    """
    r_own = T.alloc_local((PIECE,), "float32")
    for e in T.unroll(PIECE):
        r.line[W - 1, e] = r.x[0, e]
        r.dline[W - 1, e] = r.dy[0, e]
    load_next(x, r.x, t + BWD_ROWS, end - 1, piece)  # 3
    load_next(dy, r.dy, t + BWD_ROWS, end - 1, piece)
    for e in T.unroll(PIECE):
        differentiate(r, W, 0, e, least)  # 4
        if t >= end:
            r.dline[W - 1, e] = 0
        r_own[e] = r.dline[W - 1, e]
        if t >= stop:
            r_own[e] = 0
        add_to_sums(r, W, 0, e, r_own[e])
        r_part[e] = gathered(r, W, 0, e)  # 5
    move_line(r.line, W - 1, 1)
    move_line(r.dline, W - 1, 1)


@T.macro
def put_part(parts, r_part, row, piece):
    if (row >= 0) & (row < parts.shape[0]):
        put_row(parts, r_part, row, piece)


@T.macro
def differentiate(r, W, u, e, least):
    """Makes a dz of the dy at place u behind the window of r.dline, for channel e."""
    z, s = T.alloc_var("float32"), T.alloc_var("float32")
    z = convolved(r.line, r.w, r.b, u, e)
    s = factor(z, least)
    r.dline[W - 1 + u, e] *= s + s * (z - z * s)


@T.macro
def add_to_sums(r, W, u, e, dz):
    for j in T.unroll(W):
        r.sum[j, e] += dz * r.line[u + j, e]
    r.sum[W, e] += dz


def gathered(r, W, u, e):
    """Returns dx of the token W - 1 before place u: its readers' dz, times their weights."""
    total = r.w[e * W + W - 1] * r.dline[u, e]
    for j in range(1, W):
        total = total + r.w[e * W + W - 1 - j] * r.dline[u + j, e]
    return total


@T.macro
def add_warps(sums, s_sum, r_sum, W, block, piece):
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
        if piece < sums.shape[2]:
            for e in T.vectorized(PIECE):
                sums[block, warp, piece, e] = r_total[e]


def build(variant: Variant):
    plan = schedule(variant)
    W = variant.W
    num_tokens, pieces, x_token, dy_token = T.dynamic("num_tokens, pieces, x_token, dy_token")
    num_bounds, bound_step, num_halos = T.dynamic("num_bounds, bound_step, num_halos")
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
        halo: T.Tensor((num_halos, W - 1), "int32"),
        rows: T.Tensor((num_halos, 2), "int32"),
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
        least: T.float32,  # act(z) / z: 0 for silu, 1 for no activation
    ):
        tiles = T.ceildiv(pieces * PIECE, TILE)
        with T.Kernel(blocks * tiles, threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE)
            tx = T.get_thread_binding()
            s_sum = T.alloc_shared((RUNS, W + 1, TILE), "float32")
            r_x = T.alloc_local((BWD_ROWS, PIECE), variant.dtype)
            r_dy = T.alloc_local((BWD_ROWS, PIECE), variant.dtype)
            r_line = T.alloc_local((W - 1 + BWD_ROWS, PIECE), "float32")
            r_dline = T.alloc_local((W - 1 + BWD_ROWS, PIECE), "float32")
            r_w = T.alloc_local((PIECE * W,), "float32")
            r_b = T.alloc_local((PIECE,), "float32")
            r_sum = T.alloc_local((W + 1, PIECE), "float32")
            r = Registers(r_x, r_dy, r_line, r_dline, r_w, r_b, r_sum)
            block, piece, run = (T.alloc_var("int32") for _ in range(3))
            block = T.truncdiv(cta, tiles)
            piece = (cta - block * tiles) * (TILE // PIECE) + tx % 32
            run = (block * RUNS + tx // 32) * run_tokens
            T.clear(r_sum)
            if (run < num_tokens) & (piece < pieces):
                load_weights(
                    weight, bias, r_w, r_b, piece * PIECE, weight_dtype, bias_dtype, has_bias
                )
                nodes = Nodes(bounds, halo, length, num_nodes, in_tree)
                end_run = T.min(run + run_tokens, num_tokens)
                grad(x, dy, dx, parts, rows, nodes, r, W, run, end_run, piece, least)
            add_warps(sums, s_sum, r_sum, W, block, piece)

    return bwd
