"""Tile sizes, and the column indices of the tables: shared by the host and the kernels.

The docstring of tables.py explains the columns.
"""

KEY_TILE = 128  # keys of a tile at head sizes up to 128
QUERY_ROWS = 128  # rows of a query tile of the forward and of bwd_dq: tokens times packed heads
KV_QUERY_ROWS = 64  # rows of a query tile of the kernels that compute dk and dv

# Head size -> keys of a tile of the forward, of one of bwd_dq, and of an item that makes dk and dv.
FWD, DQ, KV = range(3)
KEY_TILES = {
    128: (KEY_TILE, KEY_TILE, KEY_TILE),
    64: (KEY_TILE, KEY_TILE, KEY_TILE),
    256: (80, 64, 64),
}
HEAD_SIZES = tuple(sorted(KEY_TILES))  # that the kernels take

ORDERED, ITEM_ROWS, SPAN_ROWS, KV_ORDERED, KV_ITEM_ROWS, SPLIT_ROWS, PARTS = range(7)  # header

ITEM_COLUMNS = 9
TOK0, TOKENS, NODE, OWN_TILES, OWN_KEYS, SPAN0, SPANS, PARTIALS, TILES = range(ITEM_COLUMNS)

SPAN_COLUMNS = 3
SPAN_K0, FULL_TILES, TAIL = range(SPAN_COLUMNS)

KV_ITEM_COLUMNS = 6
KV_K0, KV_KEYS, KV_LAST, KV_TILES, KV_DENSE, KV_PART = range(KV_ITEM_COLUMNS)

SPLIT_COLUMNS = 4
SPLIT_K0, SPLIT_KEYS, SPLIT_PART0, SPLIT_PARTS = range(SPLIT_COLUMNS)
