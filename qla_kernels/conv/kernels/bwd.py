"""bwd -- the gradients of the causal convolution's input, and sums for those of its parameters.

Per token t and channel, over the tokens of t's own node; z_t as in fwd:
    dz_t = dy_t act'(z_t)          dx_t = sum_j w_j dz_{t+j}     j = 0 .. W-1
and per CTA, over the tokens of its runs:
    sums = sum_t dz_t x[source(t, W-1-j)] for each j, then sum_t dz_t                   [W + 1]
In a normalised head, with r = (sum act(z_t)^2 + 1e-6)^-1/2 and sums over the head, dy_t is replaced
by r dy_t - r^3 (sum dy_t act(z_t)) act(z_t). The same formula as for dx_t, at the W - 1 places
before a node's first token, gives the parts of the gradients of its halo's tokens. In a tree, parts
go to `parts` in fp32, and so do the dx of tokens that other nodes read; join_parts adds them.
Tokens of no sequence get dx = 0.

Steps (numbers appear again in the code), for a warp, which owns 128 channels of a run of tokens:
    1 grad   find the run's first node
    2 grad   at the start of the run and of each node: the W - 1 rows of x before
    3 grad   load x and dy of the token 4 places ahead
    4 grad   z once more; in a warp of heads both sums of a row; dz; add to the sums
    5 grad   dx of the token W - 1 places before, rounded once, out; or its part, in fp32
    6 grad   sums over the warps, through shared memory

Bounded by memory: x and dy are read once and dx written once.
Why this shape: as fwd. A warp walks W - 1 tokens past its run, or computes with dz = 0 past a
node's end, so each token's gradient has one writer and no atomics are needed. Reading x again and
computing z again costs less than reading a z that the forward saved. So does computing the norms.
Sums stay in registers until the warp's run ends. dy may lie in three tensors, the gradients of
queries, keys and values, which then need not be put together.
"""

from typing import Any, NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.heads import Heads
from qla_kernels.conv.kernels.heads import (
    HEADS_SOURCE,
    Warp,
    find_place,
    gradients_of_heads,
    pair_barriers,
    uniform,
)
from qla_kernels.conv.kernels.pieces import SOURCE, factor
from qla_kernels.conv.kernels.walk import (
    Nodes,
    Sections,
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
from qla_kernels.conv.shapes import GIVEN, KEPT, LANES, PIECE, RUNS, TILE, WIDTHS
from qla_kernels.tile.loops import rolled
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.schedule import Role, Schedule

BWD_ROWS = 4  # rows of x, and of dy, that a thread has loaded ahead
HEAD_ROWS = 3  # likewise in a warp of heads, whose sums take registers


class Variant(NamedTuple):
    dtype: str  # of x, dy and dx
    W: int


VARIANTS = tuple(Variant(dtype, W) for dtype in ("bfloat16", "float16") for W in WIDTHS)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.ptxas_register_usage_level": 10,  # lower levels spill a few numbers
    # written out: before the warps' sums are added, and where the two warps of a wide head meet
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,  # rows and channels are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("grad", warps=RUNS, regs=128, computes="dx, parts, sums"),),
        named=pair_barriers(RUNS),
        smem_bytes=RUNS * (variant.W + 1) * TILE * 4,  # a wide head's sums lie there, too
        ctas_per_sm=2,
    )


class Registers(NamedTuple):
    """A thread's numbers; rows of `line` and `dline` begin with a window of W - 1 tokens."""

    x: Any  # [rows, PIECE] loaded rows, of the tokens from t on
    dy: Any
    line: Any  # [W - 1 + rows, PIECE] x
    dline: Any  # likewise dz
    w: Any
    b: Any
    sum: Any  # [W + 1, PIECE]


@T.macro
def grad(
    x, dy, dx, parts, rows, nodes, of, r_w, r_b, r_sum, run, end_run, left: "T.Ref", piece, least,
    norms,
):  # fmt: skip
    """Takes a run of tokens, and sets `left` to the first that is of no sequence, or to end_run.

    `norms` says at compile time whether the warp's channels are heads.
    """
    num_tokens, W = x.shape[0], r_sum.shape[0] - 1
    ahead = HEAD_ROWS if norms else BWD_ROWS
    r_x = T.alloc_local((ahead, PIECE), x.dtype)
    r_dy = T.alloc_local((ahead, PIECE), x.dtype)
    r_line = T.alloc_local((W - 1 + ahead, PIECE), "float32")
    r_dline = T.alloc_local((W - 1 + ahead, PIECE), "float32")
    r = Registers(r_x, r_dy, r_line, r_dline, r_w, r_b, r_sum)
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
            load_window(x, nodes, r.line, r.x, node, begin, first, piece, num_tokens)  # 2
            for i in T.unroll(W - 1):
                for e in T.unroll(PIECE):
                    r.dline[i, e] = 0
            load_rows(x, r.x, first, end - 1, piece)
            load_rows(dy, r.dy, first, end - 1, piece)
            take_head(
                x, dy, parts, rows, nodes, of, r, W, first, node, begin, stop, end, piece, least,
                norms,
            )  # fmt: skip
            t = first + W - 1
            while t + ahead <= stop:
                take_rows(x, dy, dx, of, r, W, t, end - 1, piece, least, norms)
                t += ahead
            take_tail(
                x, dy, dx, parts, rows, nodes, of, r, W, t, node, stop, end, piece, least, norms
            )
        node += 1
    left = T.if_then_else(node == nodes.num_nodes, end, end_run)


@T.macro
def take_rows(x, dy, dx, of, r, W, t, last, piece, least, norms):
    """Takes as many tokens as are loaded, and writes dx of those W - 1 places before them."""
    r_dx = T.alloc_local((PIECE,), dx.dtype)
    ahead = r.x.shape[0]
    for u in T.unroll(ahead):
        for e in T.unroll(PIECE):
            r.line[W - 1 + u, e] = r.x[u, e]
            r.dline[W - 1 + u, e] = r.dy[u, e]
        load_row(x, r.x, u, t + ahead + u, last, piece)  # 3
        load_row(dy, r.dy, u, t + ahead + u, last, piece)
        if norms:
            differentiate_heads(r, W, u, of, least)  # 4
        for e in T.unroll(PIECE):
            if not norms:
                differentiate(r, W, u, e, least)
            add_to_sums(r, W, u, e, r.dline[W - 1 + u, e])
            r_dx[e] = gathered(r, W, u, e)  # 5
        put_row(dx, r_dx, t + u - (W - 1), piece)
    move_line(r.line, W - 1, ahead)
    move_line(r.dline, W - 1, ahead)


@T.macro
def take_head(
    x, dy, parts, rows, nodes, of, r, W, first, node, begin, stop, end, piece, least, norms
):
    """Takes the first W - 1 tokens; at a node's start it writes parts of its halo's gradients."""
    r_part = T.alloc_local((PIECE,), "float32")
    row = T.alloc_var("int32")
    for i in rolled(W - 1):
        take_token(x, dy, of, r, r_part, W, first + i, stop, end, piece, least, norms)
        if (nodes.in_tree != 0) & (first == begin):
            row = uniform(rows[node, GIVEN])
            if (row >= 0) & (nodes.halo[node, i] >= 0):
                put_part(parts, r_part, row - (W - 2) + i, piece)


@T.macro
def take_tail(x, dy, dx, parts, rows, nodes, of, r, W, t, node, stop, end, piece, least, norms):
    """Takes the run's last tokens and W - 1 more, until dx of its last token is complete.

    dx of a token that other nodes read is a part.
    """
    r_part = T.alloc_local((PIECE,), "float32")
    r_dx = T.alloc_local((PIECE,), dx.dtype)
    tail, row, token = (T.alloc_var("int32") for _ in range(3))
    tail = end
    row = 0
    if nodes.in_tree != 0:
        row = uniform(rows[node, KEPT])
        if row >= 0:
            tail = T.max(end - (W - 1), uniform(bound(nodes, node, x.shape[0])))
    for i in rolled(stop + W - 1 - t):
        take_token(x, dy, of, r, r_part, W, t + i, stop, end, piece, least, norms)
        token = t + i - (W - 1)
        if token < tail:
            for e in T.unroll(PIECE):
                r_dx[e] = r_part[e]
            put_row(dx, r_dx, token, piece)
        else:
            put_part(parts, r_part, row + token - tail, piece)


@T.macro
def take_token(x, dy, of, r, r_part, W, t, stop, end, piece, least, norms):
    """Takes one token, which may be past the run's last, and then does not add to the sums.

    r_part is the gradient of the token W - 1 places before. Past the node's last token dz is 0.
    """
    own = T.alloc_var("float32")
    for e in T.unroll(PIECE):
        r.line[W - 1, e] = r.x[0, e]
        r.dline[W - 1, e] = r.dy[0, e]
    load_next(x, r.x, t + r.x.shape[0], end - 1, piece)  # 3
    load_next(dy, r.dy, t + r.dy.shape[0], end - 1, piece)
    if norms:
        differentiate_heads(r, W, 0, of, least)  # 4
    for e in T.unroll(PIECE):
        if not norms:
            differentiate(r, W, 0, e, least)
        if t >= end:
            r.dline[W - 1, e] = 0
        own = r.dline[W - 1, e]
        if t >= stop:
            own = 0
        add_to_sums(r, W, 0, e, own)
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
def differentiate_heads(r, W, u, of, least):
    """Does what `differentiate` does to all channels of a row of normalised heads."""
    r_y = T.alloc_local((PIECE,), "float32")
    r_slope = T.alloc_local((PIECE,), "float32")
    z, s = T.alloc_var("float32"), T.alloc_var("float32")
    for e in T.unroll(PIECE):
        z = convolved(r.line, r.w, r.b, u, e)
        s = factor(z, least)
        r_y[e] = z * s
        r_slope[e] = s + s * (z - r_y[e])
    gradients_of_heads(r_y, r_slope, r.dline, W - 1 + u, of)


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
def put_sums(sums, s_sum, W, wide, block, piece):
    """Adds the sums of a tile's warps, in their order, and writes the CTA's: step 6."""
    lane, warp = T.get_thread_binding() % LANES, T.get_thread_binding() // LANES
    r_total = T.alloc_local((PIECE,), "float32")
    which = T.alloc_var("int32")
    for step in rolled(1 + wide):  # a warp adds one of the W + 1 sums of its tile, or two
        which = T.shift_right(warp, wide) + step * (RUNS // 2)
        if which <= W:
            for e in T.unroll(PIECE):
                r_total[e] = 0
            for other in T.unroll(RUNS):
                if T.bitwise_and(other ^ warp, wide) == 0:
                    for e in T.unroll(PIECE):
                        r_total[e] += s_sum[other, which, lane * PIECE + e]
            for e in T.vectorized(PIECE):
                sums[block, which, piece, e] = r_total[e]


def build(variant: Variant):
    plan = schedule(variant)
    pair = NamedBarrier(plan, "pair")
    W = variant.W
    num_tokens, pieces, x_token, num_parts, blocks = T.dynamic(
        "num_tokens, pieces, x_token, num_parts, blocks"
    )
    pieces1, pieces2, pieces3 = T.dynamic("pieces1, pieces2, pieces3")
    step1, step2, step3 = T.dynamic("step1, step2, step3")
    num_bounds, bound_step, num_halos = T.dynamic("num_bounds, bound_step, num_halos")
    weight_bytes, bias_bytes = T.dynamic("weight_bytes, bias_bytes")

    @T.prim_func
    def bwd(
        dy1: T.StridedTensor((num_tokens, pieces1, PIECE), (step1, PIECE, 1), variant.dtype),
        dy2: T.StridedTensor((num_tokens, pieces2, PIECE), (step2, PIECE, 1), variant.dtype),
        dy3: T.StridedTensor((num_tokens, pieces3, PIECE), (step3, PIECE, 1), variant.dtype),
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
        second: T.int32,  # piece at which the channels of dy2 begin; `pieces` if there are none
        third: T.int32,
        length: T.int32,  # tokens of each node of a dense batch; 0: they follow from bounds
        num_nodes: T.int32,
        in_tree: T.int32,  # 0: halo and rows are not read
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
        with T.Kernel(blocks * tiles, threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE + HEADS_SOURCE)
            warp = uniform(T.get_thread_binding() // LANES)
            s_sum = T.alloc_shared((RUNS, W + 1, TILE), "float32")
            r_w = T.alloc_local((PIECE * W,), "float32")
            r_b = T.alloc_local((PIECE,), "float32")
            r_sum = T.alloc_local((W + 1, PIECE), "float32")
            block, tile, start, piece, run = (T.alloc_var("int32") for _ in range(5))
            left, end_run = T.alloc_var("int32"), T.alloc_var("int32")
            which, inner = T.alloc_var("int32"), T.alloc_var("int32")
            heads = Heads(head_pieces, head_tiles, head_lanes, reach, wide)
            find_place(heads, cta, tiles, pieces, block, tile, start, piece)
            run = (T.shift_right(block * RUNS, wide) + T.shift_right(warp, wide)) * run_tokens
            T.clear(r_sum)
            left = 0
            end_run = 0
            if (run < num_tokens) & (start < pieces):
                load_weights(
                    weight, bias, r_w, r_b, piece * PIECE, weight_dtype, bias_dtype, has_bias
                )
                which = T.if_then_else(piece < second, 0, T.if_then_else(piece < third, 1, 2))
                inner = piece - T.if_then_else(
                    piece < second, 0, T.if_then_else(piece < third, second, third)
                )
                dy = Sections((dy1, dy2, dy3), which, inner)
                nodes = Nodes(bounds, halo, length, num_nodes, in_tree)
                of = Warp(s_sum, pair, head_lanes, reach, wide)
                end_run = uniform(T.min(run + run_tokens, num_tokens))
                if tile < head_tiles:
                    grad(
                        x, dy, dx, parts, rows, nodes, of, r_w, r_b, r_sum, run, end_run, left,
                        piece, least, True,
                    )  # fmt: skip
                else:
                    grad(
                        x, dy, dx, parts, rows, nodes, of, r_w, r_b, r_sum, run, end_run, left,
                        piece, least, False,
                    )  # fmt: skip
            for j in T.unroll(W + 1):
                for e in T.vectorized(PIECE):
                    s_sum[warp, j, T.get_thread_binding() % LANES * PIECE + e] = r_sum[j, e]
            T.sync_threads()
            # once more, so that these numbers take no registers in between
            find_place(heads, uniform(cta), tiles, pieces, block, tile, start, piece)
            if start < pieces:
                clear_rows(dx, left, end_run, piece)
                put_sums(sums, s_sum, W, wide, block, piece)

    return bwd
