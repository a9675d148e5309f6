"""Online softmax over tiles of keys, on scores in wgmma accumulators: see softmax.cuh.

A warpgroup has the scores of 64 query rows and n keys, [64, n] fp32, and the sum of exp(scores) V
so far, [64, D] fp32. The numbers of a row (its maximum m, its sum l, the factor a) are a
`T.alloc_local((2,), "float32")`, because a thread has a quarter of two rows. Per tile:

    grow_max(r_s, m, a, scale2)         updates m; a is the factor by which sums so far shrink
    exponentiate(r_s, m, a, l, scale2)  turns scores into unnormalised probabilities; updates l
    rescale(r_o, a)                     after the product of the previous tile is complete

Call `begin(m, l)` and `T.clear(r_o)` before the first tile, and `finish` after the last one. Scores
are unscaled: scale2 is log2(e) times the softmax scale, positive, and all exponents are in base 2.
A score of -inf is a key that the row does not see. A row may see no key at all.

The functions are inline CUDA, for two reasons: TileLang's reductions sum over the threads of a row
in every tile, these only at the end; and TileLang's take one long chain of maxima. The kernel has
to import `SOURCE`. Arguments are the data of one thread, so a fragment of 128 rows and two
warpgroups works as well.
"""

from pathlib import Path
from typing import Any

import qla_kernels.tile.language as T

SOURCE = Path(__file__).with_suffix(".cuh").read_text()


@T.macro
def begin(m, l):
    """Initialises m and l for rows that have seen no key."""
    for h in T.unroll(2):
        m[h] = -T.infinity("float32")
        l[h] = 0


def grow_max(r_s: Any, m: Any, a: Any, scale2: Any) -> Any:
    """Sets m <- max(m, scores of its row), and a <- 2^((old m - m) scale2).

    So a is 1 where m stays, and 0 in the first tile.
    """
    return T.call_extern(
        "handle", f"qla::grow_max<{r_s.shape[1]}>", r_s.data, m.data, a.data, scale2
    )


def exponentiate(r_s: Any, m: Any, a: Any, l: Any, scale2: Any) -> Any:
    """Sets r_s <- 2^((r_s - m) scale2); l <- a l + this thread's part of the row's sum of r_s."""
    return T.call_extern(
        "handle", f"qla::exponentiate<{r_s.shape[1]}>", r_s.data, m.data, a.data, l.data, scale2
    )


def rescale(r_o: Any, a: Any) -> Any:
    """Sets r_o <- a r_o, skipped if a is 1 in the whole warp. No wgmma may be writing r_o."""
    return T.call_extern("handle", f"qla::rescale<{r_o.shape[1]}>", r_o.data, a.data)


def finish(r_o: Any, m: Any, l: Any, lse2: Any, scale2: Any) -> Any:
    """Sets r_o <- r_o / row sums, and lse2 <- log2 of the row's sum of exponentials.

    All four threads of a row get lse2. A row that saw no key gets r_o = 0 and lse2 = -inf.
    """
    return T.call_extern(
        "handle", f"qla::finish<{r_o.shape[1]}>", r_o.data, m.data, l.data, lse2.data, scale2
    )
