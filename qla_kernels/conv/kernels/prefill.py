"""prefill -- fwd on a pool of last tokens: sequences go on from their slots, which are updated.

Per token and channel y is that of fwd, where the W - 1 tokens before a sequence's first are those
of the slot from which it starts, the oldest first; 0 without a slot. Then the last W - 1 tokens go
to the slot where the sequence ends, and those before a token of the caller's choice to another:
    slot = [.., x_{e-3}, x_{e-2}, x_{e-1}]        with tokens of the old slot where e < W - 1

Steps (numbers appear again in the code), for a warp, which owns 128 channels of a run of tokens:
    1 conv   move the ends of the run, so that it has the first W - 1 tokens of a sequence or none
    2 conv   fwd
    3 conv   the slots of sequences that begin in the run

Bounded by memory, as fwd is; slots add W - 1 rows a sequence.
Why this shape: a sequence may end in the slot where it starts, so its old tokens are read by the
warp that overwrites them, and by no other: all tokens whose window reaches into the slot are in one
run. The rest is fwd's.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.heads import Heads
from qla_kernels.conv.kernels import fwd
from qla_kernels.conv.kernels.heads import HEADS_SOURCE, SUMS, Warp, find_place, uniform
from qla_kernels.conv.kernels.pieces import SOURCE
from qla_kernels.conv.kernels.update import UPDATE_SOURCE
from qla_kernels.conv.kernels.walk import (
    Nodes,
    Pool,
    bound,
    clear_rows,
    find_node,
    load_slot,
    load_weights,
    move_channels,
)
from qla_kernels.conv.shapes import LANES, PIECE, RUNS, WIDTHS
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.schedule import Schedule


class Variant(NamedTuple):
    dtype: str  # of x, the pool and y
    W: int


VARIANTS = tuple(Variant(dtype, W) for dtype in ("bfloat16", "float16") for W in WIDTHS)

PASS_CONFIGS = fwd.PASS_CONFIGS


def schedule(variant: Variant) -> Schedule:
    return fwd.schedule(fwd.Variant(*variant))


@T.macro
def move_end(nodes, token: "T.Ref", W, num_tokens):
    """Moves `token` past the first W - 1 tokens of a node, or past the node, unless it begins one.

    Both runs move the end that they share to the same place.
    """
    node, begin, end = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    if (token > 0) & (token < num_tokens):  # 1
        find_node(nodes, token, num_tokens, node)
        begin = bound(nodes, node, num_tokens)
        end = bound(nodes, node + 1, num_tokens)
        if (token > begin) & (token < T.min(end, begin + W - 1)):
            token = T.min(end, begin + W - 1)


@T.macro
def put_slots(x, pool, nodes, run, end_run, piece, num_tokens):
    """Writes the slots of the nodes that begin in a run."""
    node, begin, end, offset = (T.alloc_var("int32") for _ in range(4))
    find_node(nodes, run, num_tokens, node)  # 3
    node = uniform(node)
    begin = run
    while (node < nodes.num_nodes) & (begin < end_run):
        begin = uniform(bound(nodes, node, num_tokens))
        end = uniform(bound(nodes, node + 1, num_tokens))
        if (begin >= run) & (begin < T.min(end, end_run)):
            offset = 0
            if pool.keeps != 0:
                offset = uniform(pool.offsets[node])
            if (offset > 0) & (offset <= end - begin):
                put_slot(x, pool, node, pool.kept[node], begin, begin + offset, piece)
            put_slot(x, pool, node, pool.ends[node], begin, end, piece)
        node += 1


@T.macro
def put_slot(x, pool, node, slot, begin, end, piece):
    """Writes the W - 1 tokens before token `end` of a node that begins at `begin` to a slot."""
    reach = pool.rows.shape[2]
    r_row = T.alloc_local((reach, PIECE), x.dtype)
    if (slot > pool.null_slot) & (slot < pool.rows.shape[0]):
        load_slot(pool, r_row, node, end - begin, piece)
        for i in T.unroll(reach):
            if end - reach + i >= begin:
                for e in T.unroll(PIECE):
                    r_row[i, e] = x[end - reach + i, piece, e]
        T.sync_warp()  # lanes without channels of their own repeat what others do
        for i in T.unroll(reach):
            move_channels(
                "store", pool.rows[slot, piece * PIECE, i], r_row[i, 0], pool.step, pool.adjacent
            )


def build(variant: Variant):
    plan = schedule(variant)
    pair = NamedBarrier(plan, "pair")
    W = variant.W
    num_tokens, pieces, x_token = T.dynamic("num_tokens, pieces, x_token")
    num_bounds, bound_step, num_nodes = T.dynamic("num_bounds, bound_step, num_nodes")
    start, end, offset, keep = T.dynamic("start, end, offset, keep")  # distances in tables
    num_slots, channels = T.dynamic("num_slots, channels")
    row_n, row_c, row_t = T.dynamic("row_n, row_c, row_t")
    weight_bytes, bias_bytes = T.dynamic("weight_bytes, bias_bytes")

    @T.prim_func
    def prefill(
        x: T.StridedTensor((num_tokens, pieces, PIECE), (x_token, PIECE, 1), variant.dtype),
        # as bytes of any float dtype
        weight: T.Tensor((weight_bytes,), "uint8"),
        bias: T.Tensor((bias_bytes,), "uint8"),
        bounds: T.StridedTensor((num_bounds,), (bound_step,), "int32"),
        rows: T.StridedTensor((num_slots, channels, W - 1), (row_n, row_c, row_t), variant.dtype),
        starts: T.StridedTensor((num_nodes,), (start,), "int32"),
        ends: T.StridedTensor((num_nodes,), (end,), "int32"),
        offsets: T.StridedTensor((num_nodes,), (offset,), "int32"),
        kept: T.StridedTensor((num_nodes,), (keep,), "int32"),
        y: T.Tensor((num_tokens, pieces, PIECE), variant.dtype),
        keeps: T.int32,  # 0: offsets and kept are not read
        null_slot: T.int32,  # slots up to this one are none
        adjacent: T.int32,  # channels of a slot can be read 4 at a time
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
            T.import_source(SOURCE + UPDATE_SOURCE + HEADS_SOURCE)
            warp = uniform(T.get_thread_binding() // LANES)
            s_pair = T.alloc_shared((RUNS, 1, SUMS), "float32")
            r_w = T.alloc_local((PIECE * W,), "float32")
            r_b = T.alloc_local((PIECE,), "float32")
            block, tile, first, piece, run = (T.alloc_var("int32") for _ in range(5))
            left, end_run = T.alloc_var("int32"), T.alloc_var("int32")
            heads = Heads(head_pieces, head_tiles, head_lanes, reach, wide)
            find_place(heads, cta, tiles, pieces, block, tile, first, piece)
            run = (T.shift_right(block * RUNS, wide) + T.shift_right(warp, wide)) * run_tokens
            if (run < num_tokens) & (first < pieces):
                load_weights(
                    weight, bias, r_w, r_b, piece * PIECE, weight_dtype, bias_dtype, has_bias
                )
                nodes = Nodes(bounds, bounds, 0, num_bounds - 1, 0)
                pool = Pool(rows, starts, ends, offsets, kept, keeps, null_slot, row_c, adjacent)
                of = Warp(s_pair, pair, head_lanes, reach, wide)
                end_run = T.min(run + run_tokens, num_tokens)
                move_end(nodes, run, W, num_tokens)
                move_end(nodes, end_run, W, num_tokens)
                left = end_run
                if run < end_run:
                    if tile < head_tiles:
                        fwd.conv(
                            x, y, nodes, of, r_w, r_b, W, run, end_run, left, piece, least, True,
                            pool,
                        )  # fmt: skip
                    else:
                        fwd.conv(
                            x, y, nodes, of, r_w, r_b, W, run, end_run, left, piece, least, False,
                            pool,
                        )  # fmt: skip
                    put_slots(x, pool, nodes, run, end_run, piece, num_tokens)
                    if left < end_run:
                        clear_rows(y, left, end_run, piece)

    return prefill
