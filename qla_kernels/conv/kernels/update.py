"""update -- the causal convolution of one token of each sequence, on a pool of its last tokens.

Per sequence n and channel, with the slot's row of W - 1 numbers, the oldest first:
    line = [row, x_n]        z = b + sum_j weight[j] line[j]        y_n = z, or z / (1 + e^-z)
    row  = line[1 ..]
The first channels may be heads to normalise: these get y_n (sum over the head y_n^2 + 1e-6)^-1/2.
A sequence without a slot gets y = 0, and nothing of it is written.

Steps (numbers appear again in the code), for a thread, which owns 4 channels of a sequence:
    1 conv   load the row and x
    2 conv   z, y, the norm in a warp of heads; rounded once, out
    3 conv   write the row

Bounded by memory: the row is read and written once, x read and y written once.
Why this shape: a step has few tokens, so that threads are many and short, and weights come from the
L2 cache again for each sequence. The 4 channels of a number of the row are one access where they
are adjacent in memory; a pool [slots, C, W - 1] takes them one by one, from lines that the thread
uses up. The kernel that follows may start while this one runs (`await_previous`).
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.conv.heads import Heads
from qla_kernels.conv.kernels.heads import (
    HEADS_SOURCE,
    SUMS,
    Warp,
    find_piece,
    normalise,
    pair_barriers,
    pair_bytes,
)
from qla_kernels.conv.kernels.pieces import SOURCE, factor
from qla_kernels.conv.kernels.walk import convolved, move_channels
from qla_kernels.conv.shapes import LANES, PIECE, WIDTHS
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.named_barriers import NamedBarrier
from qla_kernels.tile.schedule import Role, Schedule

UPDATE_WARPS = 4  # a CTA: 4 tiles of channels of a sequence

UPDATE_SOURCE = """
namespace qla {
// 4 numbers that lie `step` apart in memory; one access if they are `adjacent`.
template <class T>
__device__ __forceinline__ void load_channels(T *to, const T *from, int step, int adjacent) {
  if (adjacent) {
    *reinterpret_cast<uint2 *>(to) = *reinterpret_cast<const uint2 *>(from);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[int64_t(i) * step];
  }
}

template <class T>
__device__ __forceinline__ void store_channels(T *to, const T *from, int step, int adjacent) {
  if (adjacent) {
    *reinterpret_cast<uint2 *>(to) = *reinterpret_cast<const uint2 *>(from);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[int64_t(i) * step] = from[i];
  }
}

// Numbers from number `first` on, as fp32, 8 bytes at a time: first and Count are multiples of 4.
template <class T, int Count>
__device__ __forceinline__ void taps_as(float *to, const unsigned char *from, int first) {
  alignas(8) T raw[Count];
  const uint2 *at = reinterpret_cast<const uint2 *>(from + int64_t(first) * sizeof(T));
#pragma unroll
  for (int i = 0; i < Count * int(sizeof(T)) / 8; ++i)
    reinterpret_cast<uint2 *>(raw)[i] = __ldg(at + i);
#pragma unroll
  for (int i = 0; i < Count; ++i) to[i] = float(raw[i]);
}

template <int Count>
__device__ __forceinline__ void taps(float *to, const unsigned char *from, int first, int dtype) {
  switch (dtype) {
    case FLOAT32: return taps_as<float, Count>(to, from, first);
    case BFLOAT16: return taps_as<bfloat16_t, Count>(to, from, first);
    default: return taps_as<half_t, Count>(to, from, first);
  }
}
}  // namespace qla
"""


class Variant(NamedTuple):
    dtype: str  # of x, the rows and y
    W: int


VARIANTS = tuple(Variant(dtype, W) for dtype in ("bfloat16", "float16") for W in WIDTHS)

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # written out: the two warps of a wide head meet
    "tl.disable_safe_memory_legalize": True,  # channels and slots are guarded
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("conv", warps=UPDATE_WARPS, regs=64, computes="y, and the row"),),
        named=pair_barriers(UPDATE_WARPS),
        smem_bytes=pair_bytes(UPDATE_WARPS),
        ctas_per_sm=8,
    )


def taps(to, from_, first, dtype):
    """Loads to.shape[0] numbers as fp32, 8 bytes at a time; `dtype` as in numbers."""
    size = to.shape[0]
    to, from_ = T.access_ptr(to[0], "w", size), T.access_ptr(from_, "r", 1)
    return T.call_extern("handle", f"qla::taps<{size}>", to, from_, first, dtype)


@T.macro
def conv(x, rows, y, of, norms, r_w, r_b, n, slot, channel, step, adjacent, least):
    """Updates a thread's channels of sequence n."""
    W = r_w.shape[0] // PIECE
    r_row = T.alloc_local((W, PIECE), x.dtype)
    r_line = T.alloc_local((W, PIECE), "float32")
    r_y = T.alloc_local((1, PIECE), "float32")
    r_out = T.alloc_local((PIECE,), y.dtype)
    z = T.alloc_var("float32")
    for j in T.unroll(W - 1):  # 1
        move_channels("load", r_row[j, 0], rows[slot, channel, j], step, adjacent)
    move_channels("load", r_row[W - 1, 0], x[n, channel], 1, 1)
    for j in T.unroll(W):
        for e in T.unroll(PIECE):
            r_line[j, e] = r_row[j, e]
    for e in T.unroll(PIECE):  # 2
        z = convolved(r_line, r_w, r_b, 0, e)
        r_y[0, e] = z * factor(z, least)
    if norms != 0:
        normalise(r_y, of)
    for e in T.unroll(PIECE):
        r_out[e] = r_y[0, e]
    move_channels("store", y[n, channel], r_out[0], 1, 1)
    for j in T.unroll(W - 1):  # 3
        move_channels("store", rows[slot, channel, j], r_row[j + 1, 0], step, adjacent)


def build(variant: Variant):
    plan = schedule(variant)
    pair = NamedBarrier(plan, "pair")
    W = variant.W
    num, channels, x_row, y_row = T.dynamic("num, channels, x_row, y_row")
    num_slots, row_n, row_c, row_t = T.dynamic("num_slots, row_n, row_c, row_t")
    num_indices, index = T.dynamic("num_indices, index")
    weight_bytes, bias_bytes = T.dynamic("weight_bytes, bias_bytes")

    @T.prim_func
    def update(
        x: T.StridedTensor((num, channels), (x_row, 1), variant.dtype),
        # as bytes of any float dtype
        weight: T.Tensor((weight_bytes,), "uint8"),
        bias: T.Tensor((bias_bytes,), "uint8"),
        rows: T.StridedTensor((num_slots, channels, W - 1), (row_n, row_c, row_t), variant.dtype),
        indices: T.StridedTensor((num_indices,), (index,), "int32"),
        y: T.StridedTensor((num, channels), (y_row, 1), variant.dtype),
        has_indices: T.int32,  # 0: sequence n has slot n
        null_slot: T.int32,  # sequences with at most this slot are padding
        adjacent: T.int32,  # channels of a row can be read 4 at a time
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
        pieces = T.ceildiv(channels, PIECE)
        others = T.ceildiv(pieces - head_pieces, LANES)  # tiles
        tiles = T.ceildiv(head_tiles + others, UPDATE_WARPS)  # CTAs of a sequence
        with T.Kernel(num * tiles, threads=plan.threads) as cta:
            T.annotate_min_blocks_per_sm(plan.ctas_per_sm)
            T.import_source(SOURCE + UPDATE_SOURCE + HEADS_SOURCE)
            warp = T.get_thread_binding() // LANES
            s_pair = T.alloc_shared((UPDATE_WARPS, 1, SUMS), "float32")
            r_w = T.alloc_local((PIECE * W,), "float32")
            r_b = T.alloc_local((PIECE,), "float32")
            r_out = T.alloc_local((PIECE,), variant.dtype)
            n, tile, start, piece, channel, slot = (T.alloc_var("int32") for _ in range(6))
            heads = Heads(head_pieces, head_tiles, head_lanes, reach, wide)
            n = T.truncdiv(cta, tiles)
            tile = (cta - n * tiles) * UPDATE_WARPS + warp
            find_piece(heads, tile, start, piece)
            channel = piece * PIECE
            slot = n
            await_previous()
            if has_indices != 0:
                slot = indices[n]
            if channel < channels:
                of = Warp(s_pair, pair, head_lanes, reach, wide)
                norms = T.if_then_else(tile < head_tiles, 1, 0)
                if (slot > null_slot) & (slot < num_slots):
                    taps(r_w, weight[0], channel * W, weight_dtype)
                    T.clear(r_b)
                    if has_bias != 0:
                        taps(r_b, bias[0], channel, bias_dtype)
                    conv(x, rows, y, of, norms, r_w, r_b, n, slot, channel, row_c, adjacent, least)
                else:
                    T.clear(r_out)
                    move_channels("store", y[n, channel], r_out[0], 1, 1)

    return update
