"""share_table -- cuts the chunks of all items into equal shares, one for each CTA of fused_fwd.

An item is a sequence, a value head and a tile of V; x = (n HV + hv) tiles + i is its number. The
chunks of all items lie in one row, in this order: an item of sequence n takes w_n = max(1, c_n)
places, c_n = ceil(length_n / 64); an empty item takes one, because its state has to be passed on.
    before[n] = sum_{m < n} w_m,  and P = before[N] HV tiles places in all
    share c of C begins at place  b_c = c floor(P / C) + min(c, P mod C),  and ends at b_{c+1}
A piece is what a share has of an item: the chunks of item x in share c are row x + c of `pieces`,
    n, hv, key head, tile, first token, tokens, takes, gives
`takes` says that the item begins in an earlier share, `gives` that it goes on in the next one. Both
x and c grow along the row, one of them at each border, so the pieces of a share have consecutive
rows, and no two pieces have the same. Share c has the row of its last piece, the number of its
pieces, and flags, which are cleared (chain/shares.py). CTAs past the C that have shares get none.

Where the device alone knows the lengths, the host says of how many chunks a longest sequence may be
(gdn/bands.py), and there is a CTA for each item. If one is longer, items stay whole: the CTA whose
number is the item's place, longest first, has this item, and the hardware deals CTAs to SMs.
Sequences that begin behind all tokens are of a path that is not taken, and have no pieces.

With wrong bounds, whose sequences overlap, sums are limited to the places of right ones: sequences
for which no place is left have no pieces. All pieces lie inside the tensors and follow one another
in their shares, whatever the bounds hold; so a CTA that waits for a state gets one.

Steps (numbers appear again in the code):
    1  places are summed, 1024 sequences at a time: in each warp, then over the warps
    2  a thread writes the pieces of an item; or, if it stays whole, its row, by counting the
       sequences that come before its own
    3  a thread finds the first and the last item of a share by bisection of `before`
    4  the longest sequence

Bounded by latency: a few microseconds. Why this shape: roles of fused_fwd that searched for their
pieces themselves would need registers that the state has not got.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.shares import (
    BEGIN,
    GIVEN,
    GIVES,
    HV,
    I_TILE,
    KH,
    LAST_PIECE,
    LENGTH,
    NUM_PIECES,
    PIECE_COLUMNS,
    SHARE_COLUMNS,
    TAKES,
    N,
)
from qla_kernels.gdn.kernels.tables import (
    TABLE_THREADS,
    TABLE_WARPS,
    count_on,
    find,
    find_longest,
    inside,
    sequence_span,
)
from qla_kernels.tile.constants import CHUNK
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.tiles import tiles


class Variant(NamedTuple):
    dtype: str  # of cu_seqlens


VARIANTS = (Variant("int32"),)

PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # indices are guarded by N and the rows


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("table", warps=TABLE_WARPS, regs=64, computes="pieces and shares"),),
        tiles={"sum": Tile((TABLE_WARPS,), "int32")},
    )


@T.macro
def share_begin(c, places, num_shares, begin: "T.Ref"):
    """Sets begin to the first place of share c."""
    begin = c * (places // num_shares) + T.min(c, places % num_shares)


@T.macro
def share_at(place, places, num_shares, c: "T.Ref"):
    """Sets c to the share of a place. The first P mod C shares have a place more than others."""
    size, larger = T.alloc_var("int32"), T.alloc_var("int32")
    size = places // num_shares
    larger = places % num_shares
    if place < larger * (size + 1):
        c = place // (size + 1)
    else:  # a place past the larger shares exists only if size > 0
        c = larger + (place - larger * (size + 1)) // T.max(size, 1)


@T.macro
def item_at(place, before, num_sequences, per_sequence, low, item: "T.Ref"):
    """Sets item to that of a place."""
    places = T.alloc_var("int32")
    find(low, before, num_sequences, place // per_sequence)
    places = T.max(1, before[low[0] + 1] - before[low[0]])
    item = low[0] * per_sequence + (place - before[low[0]] * per_sequence) // places


@T.macro
def place_before(n, before, num_sequences, place: "T.Ref"):
    """Sets place to the number of sequences that are longer than n, or as long and before it."""
    weight, other = T.alloc_var("int32"), T.alloc_var("int32")
    weight = before[n + 1] - before[n]
    place = 0
    for m in T.serial(num_sequences):
        other = before[m + 1] - before[m]
        if (other > weight) | ((other == weight) & (m < n)):
            place += 1


@T.macro
def place_pieces(
    cu_seqlens, before, pieces, num_tokens, num_heads, num_value_heads, num_tiles, C, whole
):  # fmt: skip
    thread = T.get_thread_binding()
    n, first, weight, places = (T.alloc_var("int32") for _ in range(4))
    begin, length, start, end = (T.alloc_var("int32") for _ in range(4))
    of_first, of_last = T.alloc_var("int32"), T.alloc_var("int32")
    hv, i_tile, share, row = (T.alloc_var("int32") for _ in range(4))
    num_sequences = cu_seqlens.shape[0] - 1
    per_sequence = num_value_heads * num_tiles
    places = before[num_sequences] * per_sequence
    for base in T.serial(T.ceildiv(num_sequences * per_sequence, TABLE_THREADS)):  # 2
        item = base * TABLE_THREADS + thread
        if item < num_sequences * per_sequence:
            n = item // per_sequence
            hv = item % per_sequence // num_tiles
            i_tile = item % num_tiles
            weight = before[n + 1] - before[n]
            first = before[n] * per_sequence + item % per_sequence * weight
            sequence_span(cu_seqlens, n, num_tokens, begin, length)
            of_first = 0
            of_last = -1
            if whole != 0:
                place_before(n, before, num_sequences, row)
                row = row * per_sequence + item % per_sequence
                of_last = 0
            elif weight > 0:
                share_at(first, places, C, of_first)
                share_at(first + weight - 1, places, C, of_last)
            for c in T.serial(of_last - of_first + 1):
                share = of_first + c
                start = 0
                end = T.ceildiv(length, CHUNK)
                if whole == 0:
                    share_begin(share, places, C, start)
                    share_begin(share + 1, places, C, end)
                    start = T.max(start - first, 0)  # in places of this item
                    end = T.min(end - first, weight)
                    row = item + share
                pieces[row, N] = n
                pieces[row, HV] = hv
                pieces[row, KH] = hv // (num_value_heads // num_heads)
                pieces[row, I_TILE] = i_tile
                pieces[row, BEGIN] = begin + start * CHUNK
                pieces[row, LENGTH] = T.max(0, T.min(length, end * CHUNK) - start * CHUNK)
                pieces[row, TAKES] = T.if_then_else(c > 0, 1, 0)
                pieces[row, GIVES] = T.if_then_else(share < of_last, 1, 0)


@T.macro
def place_shares(cu_seqlens, before, shares, per_sequence, C, whole):
    thread = T.get_thread_binding()
    low = T.alloc_local((1,), "int32")
    places, start, end = (T.alloc_var("int32") for _ in range(3))
    item, last = T.alloc_var("int32"), T.alloc_var("int32")
    num_sequences, num_shares = cu_seqlens.shape[0] - 1, shares.shape[0]
    places = before[num_sequences] * per_sequence
    for base in T.serial(T.ceildiv(num_shares, TABLE_THREADS)):  # 3
        c = base * TABLE_THREADS + thread
        if c < num_shares:
            item = 0
            last = -1
            if whole != 0:
                if c < num_sequences * per_sequence:
                    last = 0  # row c
            elif c < C:
                share_begin(c, places, C, start)
                share_begin(c + 1, places, C, end)
                if start < end:
                    item_at(start, before, num_sequences, per_sequence, low, item)
                    item_at(end - 1, before, num_sequences, per_sequence, low, last)
            shares[c, LAST_PIECE] = last + c
            shares[c, NUM_PIECES] = last - item + 1
            for i in T.serial(SHARE_COLUMNS - GIVEN):
                shares[c, GIVEN + i] = 0


def build(variant: Variant):
    plan = schedule(variant)
    num_bounds, rows, num_shares = T.dynamic("num_bounds, rows, num_shares")

    @T.prim_func
    def share_table(
        cu_seqlens: T.Tensor((num_bounds,), variant.dtype),
        before: T.Tensor((num_bounds,), "int32"),
        pieces: T.Tensor((rows, PIECE_COLUMNS), "int32"),
        shares: T.Tensor((num_shares, SHARE_COLUMNS), "int32"),
        num_tokens: T.int32,
        num_heads: T.int32,
        num_value_heads: T.int32,
        num_tiles: T.int32,
        most: T.int32,
        num_cut: T.int32,
        most_cut: T.int32,
    ):
        with T.Kernel(1, threads=plan.threads) as _:
            s = tiles(plan)
            total, all_before = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
            begin, length = T.alloc_var("int32"), T.alloc_var("int32")
            longest, whole = T.alloc_var("int32"), T.alloc_var("int32")
            thread = T.get_thread_binding()
            num_sequences = num_bounds - 1
            await_previous()
            all_before[0] = 0
            for base in T.serial(T.ceildiv(num_sequences, TABLE_THREADS)):  # 1
                n = base * TABLE_THREADS + thread
                total[0] = 0
                if (n < num_sequences) & (inside(cu_seqlens[0], num_tokens) < num_tokens):
                    sequence_span(cu_seqlens, n, num_tokens, begin, length)
                    total[0] = T.max(1, T.ceildiv(length, CHUNK))
                count_on(total, all_before, s.sum, most)
                if n < num_sequences:
                    before[n + 1] = total[0]
            if thread == 0:
                before[0] = 0
            find_longest(cu_seqlens, num_tokens, s.sum, longest)  # 4
            whole = 0
            if (longest > most_cut) & (num_shares >= num_sequences * num_value_heads * num_tiles):
                whole = 1
            T.sync_threads()
            place_pieces(
                cu_seqlens, before, pieces, num_tokens, num_heads, num_value_heads, num_tiles,
                num_cut, whole,
            )  # fmt: skip
            place_shares(cu_seqlens, before, shares, num_value_heads * num_tiles, num_cut, whole)

    return share_table
