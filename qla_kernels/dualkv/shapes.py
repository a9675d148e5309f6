"""Tile sizes, and the column indices of the tables: shared by the host and the kernels.

The docstring of tables.py explains the columns.
"""

KEY_TILE = 128  # keys
QUERY_ROWS = 128  # of a tile of the forward and of dq: tokens times packed heads
KV_QUERY_ROWS = 64  # of a tile of the kernels that make dk and dv

ORDERED, ITEM_ROWS, SPAN_ROWS, KV_ORDERED, KV_ITEM_ROWS, SPLIT_ROWS, PARTS = range(7)  # header

ITEM_COLUMNS = 9
TOK0, TOKENS, NODE, OWN_TILES, OWN_KEYS, SPAN0, SPANS, PARTIALS, TILES = range(ITEM_COLUMNS)

SPAN_COLUMNS = 3
SPAN_K0, FULL_TILES, TAIL = range(SPAN_COLUMNS)

KV_ITEM_COLUMNS = 6
KV_K0, KV_KEYS, KV_LAST, KV_TILES, KV_DENSE, KV_PART = range(KV_ITEM_COLUMNS)

SPLIT_COLUMNS = 4
SPLIT_K0, SPLIT_KEYS, SPLIT_PART0, SPLIT_PARTS = range(SPLIT_COLUMNS)
