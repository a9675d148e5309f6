"""What kkt_solve must produce: shared by the emulated and the device tier."""

import torch
from torch import Tensor

from reference import gdn
from tests.compare import assert_close
from tests.gdn_inputs import Inputs

# Lengths 0, 1 and around multiples of 16 and 64; empty sequences first, middle, last.
LENGTHS = ([64], [0, 65, 0, 1, 130, 0], [15, 16, 17, 63, 128], [1])

# (keys, gates, what the error of A may be, in units of rounding the exact A). The solve rounds the
# operands of its products to 10 mantissa bits, 3 more than bf16 has and as many as fp16: next to
# a bf16 rounding that is nothing, unless dependent keys without decay make products cancel; next to
# an fp16 rounding it is several times as much. They are fp16 operands: entries below the smallest
# normal number lose bits: half a step of 2^-24 each is granted, next to a diagonal of 1.
CASES = (
    ("unit", "model", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("unit", "none", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("unit", "strong", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("unit", "total", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("long", "strong", {torch.bfloat16: 1.1, torch.float16: 2.5}),
    ("low rank", "none", {torch.bfloat16: 1.2, torch.float16: 5.0}),
)


def poisoned(x: Inputs) -> tuple[Tensor, Tensor]:
    """g_cum and A, full of NaN."""
    B, T, HV = x.g.shape
    return torch.full_like(x.g, torch.nan), x.k.new_full((B, T, HV, 64), torch.nan)


def check(x: Inputs, g_cum: Tensor, A: Tensor, ratio: float) -> None:
    """Against the fp64 definition, on the same 16-bit keys; rows of no sequence untouched."""
    assert g_cum[:, x.tokens :].isnan().all(), "gates of padding tokens were written"
    assert A[:, x.tokens :].isnan().all(), "A of padding tokens was written"
    k, g, beta = (t[:, : x.tokens].double() for t in (x.k, x.g, x.beta))
    v = torch.zeros_like(g)[..., None]
    want = gdn.chunked(k, k, v, g, beta, cu_seqlens=x.cu_seqlens)
    assert_close("g_cum", g_cum[:, : x.tokens], want.g_cum, rel=1e-6)
    got, exact = A[:, : x.tokens].double(), want.A
    place = _row_in_chunk(x)
    assert (
        got[place[None, :, None, None].expand_as(got) < torch.arange(64, device=A.device)] == 0
    ).all(), "A is not lower triangular"
    diagonal = got.gather(-1, place[None, :, None, None].expand(1, -1, got.shape[2], 1))
    assert (diagonal == 1).all(), "the diagonal of A is not 1"
    unit = torch.nn.functional.one_hot(place, 64)[None, :, None]
    rounding = (exact.to(A.dtype).double() - exact).norm()
    error = (got - exact).norm()
    floor = 2.0**-25 * (exact - unit).count_nonzero().sqrt()
    assert error <= ratio * rounding + floor, (
        f"A: {error / rounding:.2f} roundings, allowed {ratio}"
    )


def _row_in_chunk(x: Inputs) -> Tensor:
    lengths = x.cu_seqlens.diff().tolist()
    return torch.cat([torch.arange(n) % 64 for n in lengths]).to(x.k.device)
