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
from qla_kernels.gdn.kernels.chain.window import SOURCE, warm_chunks
from qla_kernels.gdn.kernels.tables import sequence_span
from qla_kernels.tile.dependent import await_previous
from qla_kernels.tile.schedule import Role, Schedule

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
        smem_bytes=WINDOW_WARPS * 4,
    )


def build(variant: Variant):
    plan = schedule(variant)
    num_tokens, num_heads, num_value_heads = T.dynamic("num_tokens, num_heads, num_value_heads")
    narrow_tokens, num_bounds, capacity = T.dynamic("narrow_tokens, num_bounds, capacity")
    k_token, k_head = T.dynamic("k_token, k_head")

    @T.prim_func
    def wide_windows(
        k: T.StridedTensor((num_tokens, num_heads, variant.K), (k_token, k_head, 1), variant.dtype),
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
            s_sum = T.alloc_shared((WINDOW_WARPS,), "float32")
            begin, length, window = (T.alloc_var("int32") for _ in range(3))
            await_previous()
            sequence_span(bounds, p, num_tokens, begin, length)
            window = 0
            if (ends_of[p] < 0) & (length > 0):
                window = warm_chunks(  # 1
                    variant.K, k, g_cum, None, 0, beta, beta16, beta_is_16, s_sum, begin, length,
                    hv // (num_value_heads // num_heads), hv, limit, at_end=True, cumulated=True,
                )  # fmt: skip
            if T.get_thread_binding() == 0:
                windows[p, hv] = window  # 2

    return wide_windows
