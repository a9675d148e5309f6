"""What kkt_solve writes for segments, and its interleavings, emulated."""

import pytest
import torch
from torch import Tensor

from qla_kernels.gdn.kernels import kkt_solve as kernel
from qla_kernels.gdn.launch import chunks
from qla_kernels.lab.selftest import gdn_chunks
from qla_kernels.lab.selftest.gdn_inputs import ChunkInputs, inputs
from qla_kernels.runtime import jit
from qla_kernels.runtime.varlen import chunk_table

pytestmark = pytest.mark.usefixtures("seeds")


def kkt_solve(x: ChunkInputs, growth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launches gate and kkt_solve, into memory full of NaN."""
    table = chunk_table(x.k.shape[1], x.cu_seqlens)
    return chunks.kkt_solve(x.k, x.g, x.beta, x.cu_seqlens, table, gdn_chunks.poisoned(x), growth)


@pytest.mark.parametrize("variant", kernel.VARIANTS, ids=jit.variant_id)
def test_how_much_keys_let_a_state_grow(variant):
    """At the last of every 16 tokens of a chunk; other rows are left alone."""
    x = inputs([0, 65, 0, 1, 130, 0], (2, 4), variant.K, getattr(torch, variant.dtype), key="long")
    growth = torch.full_like(x.g, torch.nan)
    kkt_solve(x, growth)
    squares = x.k.double().square().sum(-1).repeat_interleave(2, -1)
    each, want = (1 - x.beta * squares).abs().clamp(min=1).log(), torch.full_like(x.g, torch.nan)
    for first, rows in chunk_table(x.k.shape[1], x.cu_seqlens).chunks.tolist():
        for a in range(first, first + rows, 16):
            b = min(a + 16, first + rows)
            want[:, b - 1] = each[:, a:b].sum(1)
    assert want.nansum() > 10
    torch.testing.assert_close(growth, want, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("walkers", [1, 3])
def test_kkt_solve_interleavings(seed, walkers, seeds, monkeypatch):
    """One CTA that walks many chunks, and several; odd heads; every schedule of the emulator."""
    x = inputs([70, 200, 5, 64], (1, 3), 64, torch.bfloat16, seed=seed)
    seeds["seed"] = seed
    monkeypatch.setattr(chunks, "walkers", lambda *_: walkers)
    g_cum, A = kkt_solve(x)
    gdn_chunks.check(x, g_cum, A, 1.1)
