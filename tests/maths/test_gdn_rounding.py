"""What 16-bit operands cost: the levels that device results are judged by.

`operand_dtype` rounds where the kernels round, and leaves the rest in fp32. The truth is fp64 on
the same 16-bit inputs. Levels are relative L2 errors of whole tensors for a layer like those of
models: a quarter of the heads never decays, the others by logsigmoid(randn) / 16 a token.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from reference import gdn, gdn_segments
from reference.gdn_chunked import Round
from tests.compare import assert_close, relative_l2

BF16 = {
    "o": 3.5e-3,
    "final_state": 3.1e-3,
    "dq": 3.5e-3,
    "dk": 4.6e-3,
    "dv": 3.7e-3,
    "dbeta": 3.8e-3,
    "dh0": 2.7e-3,
}
DG = 3.0e-3  # a few numbers per chunk and head decide it: 2e-3 to 5.5e-3 from one draw to the next


class Layer(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    do: Tensor

    def double(self) -> "Layer":
        return Layer(*(t.double() for t in self))


def layer(
    dtype: torch.dtype, tokens: int = 1024, H: int = 2, HV: int = 4, rank: int = 128
) -> Layer:
    """Keys and queries span `rank` of the 128 dimensions."""
    basis = torch.eye(128) if rank == 128 else torch.randn(rank, 128)
    q, k = (gdn.l2norm(torch.randn(1, tokens, H, rank) @ basis).to(dtype) for _ in "qk")
    v, do = (torch.randn(1, tokens, HV, 128).to(dtype) for _ in range(2))
    g = logsigmoid(torch.randn(1, tokens, HV)) / 16
    g[:, :, : HV // 4 or HV] = 0
    beta = torch.randn(1, tokens, HV).sigmoid()
    return Layer(q, k, v, g, beta, torch.randn(1, HV, 128, 128), do)


def forward_and_backward(x: Layer, operand_dtype: torch.dtype | None) -> dict[str, Tensor]:
    out = gdn.chunked(*x[:5], initial_state=x.initial_state, operand_dtype=operand_dtype)
    grads = gdn.chunked_backward(
        x.q,
        x.k,
        x.v,
        out.g_cum,
        x.beta,
        out.A,
        x.do,
        initial_state=x.initial_state,
        operand_dtype=operand_dtype,
    )
    return {"o": out.o, "final_state": out.final_state, **grads._asdict()}


def test_bf16_errors_are_at_their_levels():
    x = layer(torch.bfloat16)
    want = forward_and_backward(x.double(), None)
    got = forward_and_backward(x, torch.bfloat16)
    for name, level in BF16.items():
        error = assert_close(name, got[name], want[name], 1.1 * level)
        assert error > 0.9 * level, f"{name}: {error:.2e}, where is the rounding?"
    assert assert_close("dg", got["dg"], want["dg"], 2 * DG, bias=DG) > DG / 2


def test_fp16_errors_are_an_eighth():
    """3 more mantissa bits."""
    x = layer(torch.float16)
    want = forward_and_backward(x.double(), None)
    got = forward_and_backward(x, torch.float16)
    for name, level in BF16.items():
        assert_close(name, got[name], want[name], 1.1 * level / 8)
    assert_close("dg", got["dg"], want["dg"], 2 * DG / 8, bias=DG / 8)


def test_dg_of_strongly_decaying_heads():
    """-21 per token, with a gradient of the final state: most of dg's terms are e^21 times smaller
    than the largest product."""
    x = layer(torch.bfloat16, tokens=192, H=1, HV=2)
    x = x._replace(g=torch.full_like(x.g, -21.0))
    dht = torch.randn_like(x.initial_state)

    def dg(x, dht, operand_dtype):
        out = gdn.chunked(*x[:5], initial_state=x.initial_state, operand_dtype=operand_dtype)
        first = (x.q, x.k, x.v, out.g_cum, x.beta, out.A, x.do, dht, None, x.initial_state)
        return gdn.chunked_backward(*first, operand_dtype=operand_dtype).dg

    want = dg(x.double(), dht.double(), None)
    assert_close("dg", dg(x, dht, torch.bfloat16), want, 5.9e-3)


def test_without_16_bit_operands_fp32_is_fp32():
    x = layer(torch.float32)
    want = forward_and_backward(x.double(), None)
    for name, got in forward_and_backward(x, None).items():
        assert_close(name, got, want[name], 5e-6 if name == "dg" else 1e-6)


@pytest.mark.parametrize("num_segments", [8, 32])
def test_folding_segments_in_two_terms_loses_nothing(num_segments, monkeypatch):
    """Keys in 32 dimensions and no decay: M stays near 1, each fold adds its own rounding."""
    x = layer(torch.bfloat16, tokens=64 * 2 * num_segments, H=1, HV=1, rank=32)
    inputs = (*x[:5], None, x.initial_state)
    want = gdn.chunked(*x.double()[:5], None, x.initial_state.double()).final_state
    whole = gdn.chunked(*inputs, operand_dtype=torch.bfloat16).final_state
    level = relative_l2(whole, want)

    def folded() -> float:
        _, state = gdn.segmented(*inputs, segment_chunks=2, operand_dtype=torch.bfloat16)
        return relative_l2(state, want)

    assert folded() < 1.05 * level

    def one_term(M: Tensor, S: Tensor, rounded: Round) -> Tensor:
        return rounded(M) @ rounded(S)

    monkeypatch.setattr(gdn_segments, "hi_lo_product", one_term)
    assert folded() > 2 * level


@pytest.mark.parametrize("rank", [32, 128])
def test_links_that_chains_make_lose_nothing(rank):
    """At K = 256 a rank's map is what a chain makes of unit vectors: rounded as states are.

    Eight ranks of four chunks, no decay; keys in 32 dimensions, so that M stays near 1, or in all.
    """
    ranks = 8
    x = layer(torch.bfloat16, tokens=64 * 4 * ranks, H=1, HV=1, rank=rank)
    wide, dht = x.double(), torch.randn_like(x.initial_state)

    def ends(x: Layer, dht: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        out = gdn.chunked(*x[:5], None, x.initial_state, operand_dtype=dtype)
        back = (out.g_cum, x.beta, out.A, x.do, dht, None, x.initial_state)
        done = gdn.chunked_backward(*x[:3], *back, operand_dtype=dtype)
        return out.final_state, done.dh0

    want = ends(wide, dht.double(), None)
    level = [relative_l2(a, b) for a, b in zip(ends(x, dht, torch.bfloat16), want, strict=True)]
    tokens = [t.chunk(ranks, 1) for t in (*x[:5], x.do)]
    parts = [Layer(*part[:5], x.initial_state, part[5]) for part in zip(*tokens, strict=True)]
    state, gradient = wide.initial_state, dht.double()
    for here, back in zip(parts, reversed(parts), strict=True):
        b, _ = ends(_from_zeros(here), torch.zeros_like(dht), torch.bfloat16)
        M, _ = ends(_of_units(here), torch.zeros_like(dht), torch.bfloat16)
        state = M.double() @ state + b.double()
        _, b = ends(_from_zeros(back), torch.zeros_like(dht), torch.bfloat16)
        _, M = ends(_of_units(back), _of_units(back).initial_state, torch.bfloat16)
        gradient = M.double() @ gradient + b.double()
    assert relative_l2(state, want[0]) < 1.05 * level[0]
    assert relative_l2(gradient, want[1]) < 1.05 * level[1]


def _from_zeros(x: Layer) -> Layer:
    return x._replace(initial_state=torch.zeros_like(x.initial_state))


def _of_units(x: Layer) -> Layer:
    eye = torch.eye(128).expand_as(x.initial_state)
    return x._replace(v=torch.zeros_like(x.v), do=torch.zeros_like(x.do), initial_state=eye)
