"""Online softmax over tiles of keys, on scores in wgmma accumulators: see softmax.cuh.

A warpgroup has the scores of 64 query rows and n keys, [64, n] fp32, and what it has summed of
exp(scores) V, [64, D] fp32. What belongs to a row, its maximum m, its sum l and the factor a, is a
`T.alloc_local((2,), "float32")`: a thread has a quarter of two rows. Per tile:

    grow_max(r_s, m, a, scale2)         m, and what the sums so far shrink by
    exponentiate(r_s, m, a, l, scale2)  scores to probabilities, unnormalised; their sums
    rescale(r_o, a)                     once the product of the tile before is complete

Before the first tile `begin(m, l)` and `T.clear(r_o)`, after the last `finish`. Scores are
unscaled: scale2 is log2(e) times the softmax scale, positive, and everything is in base 2. A score
of -inf is a key that is not seen; a row may have seen none so far, or to the end.

Inline CUDA: TileLang's reductions sum over the threads of a row in every tile, these at the end,
and take one long chain of maxima. A kernel imports `SOURCE`; arguments are those of its threads,
so a fragment of 128 rows and two warpgroups works as well.
"""

from pathlib import Path
from typing import Any

import tilelang.language as T

SOURCE = Path(__file__).with_suffix(".cuh").read_text()


@T.macro
def begin(m, l):
    """No key seen so far."""
    for h in T.unroll(2):
        m[h] = -T.infinity("float32")
        l[h] = 0


def grow_max(r_s: Any, m: Any, a: Any, scale2: Any) -> Any:
    """m <- max(m, scores of its row); a <- 2^((old m - m) scale2), 1 where m stays, 0 at first."""
    return T.call_extern(
        "handle", f"qla::grow_max<{r_s.shape[1]}>", r_s.data, m.data, a.data, scale2
    )


def exponentiate(r_s: Any, m: Any, a: Any, l: Any, scale2: Any) -> Any:
    """r_s <- 2^((r_s - m) scale2); l <- a l + this thread's part of the row's sum of r_s."""
    return T.call_extern(
        "handle", f"qla::exponentiate<{r_s.shape[1]}>", r_s.data, m.data, a.data, l.data, scale2
    )


def rescale(r_o: Any, a: Any) -> Any:
    """r_o <- a r_o; left out where a is 1 in all of the warp. No wgmma may be writing r_o."""
    return T.call_extern("handle", f"qla::rescale<{r_o.shape[1]}>", r_o.data, a.data)


def finish(r_o: Any, m: Any, l: Any, lse2: Any, scale2: Any) -> Any:
    """r_o <- r_o / row sums; lse2 <- log2 of the row's sum of exponentials, in the whole quad.

    Of a row that saw no key: 0 and -inf.
    """
    return T.call_extern(
        "handle", f"qla::finish<{r_o.shape[1]}>", r_o.data, m.data, l.data, lse2.data, scale2
    )
