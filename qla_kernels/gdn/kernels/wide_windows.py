"""wide_windows -- which chunks at a segment's end determine the state that leaves it, at K = 256.

Most heads forget: the map M of some chunks from a state to a state obeys
|M| <= prod_t e^{g_t} max(1, |1 - beta_t |k_t|^2|). If this bound over the last w chunks of a
segment is below e^limit, b of these chunks alone serves as the segment's end state, and the segment
is warm for that head: windows[p, hv] = w, the fewest chunks that do. Otherwise it is cold: 0.

Steps (numbers appear again in the code); a CTA has a segment and a value head:
    1  sum the gates from the segment's end; where they would do, read the norms of keys in the
       chunks so far, which may need more chunks
    2  write w

Bounded by the latency of reading keys. Why this shape: segment_map finds the window in each CTA,
beside its chain. Here a CTA with one warpgroup of a state has no threads to spare, and the CTAs of
V = 512 would read the same keys six times. A sequence's last segment is skipped, and -inf looks at
nothing.
"""

from typing import NamedTuple

import qla_kernels.tile.language as T
from qla_kernels.gdn.kernels.chain.forward import RawGates
from qla_kernels.gdn.kernels.chain.window import SOURCE, warm_chunks
from qla_kernels.gdn.kernels.tables import sequence_span
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.record import Record, Variables
from qla_kernels.tile.schedule import Role, Schedule, Tile
from qla_kernels.tile.strided import strided
from qla_kernels.tile.tiles import tiles

WINDOW_WARPS = 16  # a warp reads a key: 128 tokens in flight


class Variant(NamedTuple):
    dtype: str  # of k
    K: int


VARIANTS = tuple(Variant(dtype, 256) for dtype in ("bfloat16", "float16"))

PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,  # window.cuh synchronises
    "tl.disable_safe_memory_legalize": True,  # every index is guarded by the segment's length
}


def schedule(variant: Variant) -> Schedule:
    return Schedule(
        roles=(Role("look", warps=WINDOW_WARPS, regs=128, computes="a window"),),
        tiles={"sum": Tile((WINDOW_WARPS,), "float32")},
    )


def build(variant: Variant):
    plan = schedule(variant)
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    narrow_tokens, num_bounds, capacity = T.dynamic("narrow_tokens, num_bounds, capacity")

    @T.prim_func
    def wide_windows(
        k: strided("k", "token head", (num_tokens, num_heads, variant.K), variant.dtype),
        g_cum: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta: T.Tensor((num_tokens, num_value_heads), "float32"),
        beta16: T.Tensor((narrow_tokens, num_value_heads), variant.dtype),
        bounds: T.Tensor((num_bounds,), "int32"),
        ends_of: T.Tensor((num_bounds,), "int32"),
        windows: T.Tensor((capacity, num_value_heads), "int32"),
        limit: T.float32,
        beta_is_16: T.int32,
    ):
        with T.Kernel(capacity, num_value_heads, threads=plan.threads) as (p, hv):
            T.import_source(SOURCE)
            s = tiles(plan)
            span, window = Variables("begin length"), T.alloc_var("int32")
            await_previous()
            sequence_span(bounds, p, num_tokens, span.begin, span.length)
            window = 0
            if (ends_of[p] < 0) & (span.length > 0):
                gates = RawGates(g_cum, beta, beta16, beta_is_16, g_cum)
                item = Record(
                    begin=span.begin,
                    length=span.length,
                    kh=hv // (num_value_heads // num_heads),
                    hv=hv,
                )
                window = warm_chunks(  # 1
                    variant.K, k, gates, None, 0, s.sum, item, limit, at_end=True, cumulated=True
                )
            if T.get_thread_binding() == 0:
                windows[p, hv] = window  # 2

    return wide_windows
