"""The gated delta net's kernels, emulated: numbers and protocol, on lengths of every kind."""

import pytest
import torch
from torch import Tensor

from qla_kernels import jit
from qla_kernels.gdn.kernels import chunk_table as chunk_table_kernel
from qla_kernels.gdn.kernels import gate, kkt_solve
from qla_kernels.sm90 import dtype_name
from qla_kernels.tile.constants import GATE_FLOOR, LN2
from qla_kernels.varlen import ChunkTable, chunk_table
from tests import kkt_solve_check
from tests.compare import assert_close
from tests.emulator import EmulatedKernel
from tests.gdn_inputs import Inputs, inputs


def run_gate(
    x: Inputs, table: ChunkTable, g_cum: Tensor, seed: int, wide_beta: Tensor | None = None
) -> Tensor:
    """As launch.gate launches it."""
    HV = x.g.shape[2]
    gates = torch.full((table.chunks.shape[0], HV, 3, 64), torch.nan)
    kernel = EmulatedKernel(gate.build(gate.Variant(dtype_name(x.beta.dtype))), gate.PASS_CONFIGS)
    wide = g_cum if wide_beta is None else wide_beta
    kernel(x.g[0], x.beta[0], table.chunks, g_cum[0], gates, wide[0], seed=seed)
    return gates


def run_kkt_solve(
    variant, x: Inputs, walkers: int, seed: int, growth: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As launch.kkt_solve launches it."""
    H, HV = x.k.shape[2], x.g.shape[2]
    g_cum, A = kkt_solve_check.poisoned(x)
    table = chunk_table(x.k.shape[1], x.cu_seqlens)
    gates = run_gate(x, table, g_cum, seed)
    kernel = EmulatedKernel(kkt_solve.build(variant), kkt_solve.PASS_CONFIGS)
    kernel(
        x.k[0],
        gates.view(-1, H, HV // H, 3, 64),
        table.chunks,
        table.num_chunks,
        A.view(-1, H, HV // H, 64),
        g_cum.view(-1, H, HV // H) if growth is None else growth.view(-1, H, HV // H),
        walkers,
        int(growth is not None),
        seed=seed,
    )
    return g_cum, A


@pytest.mark.parametrize("variant", chunk_table_kernel.VARIANTS, ids=jit.variant_id)
@pytest.mark.parametrize(
    "lengths", [[64], [0, 65, 0, 1, 130, 0], [0, 0], [5000], [1] * 1500, list(range(200))], ids=len
)
@pytest.mark.kernels("gdn.chunk_table")
def test_chunk_table(variant, lengths):
    """One launch, or tensor operations: the same table, for any number of sequences."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(getattr(torch, variant.dtype))
    num_tokens = sum(lengths) + 7
    want = chunk_table(num_tokens, cu_seqlens)
    got = [torch.full_like(x, -1) for x in want]
    kernel = EmulatedKernel(chunk_table_kernel.build(variant), chunk_table_kernel.PASS_CONFIGS)
    kernel(cu_seqlens, *got, num_tokens, seed=len(lengths))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("heads", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("kind", ["model", "total"])
@pytest.mark.kernels("gdn.gate")
def test_gate(heads, kind):
    """Any number of heads; strided inputs; rows past a chunk's end level and without weight."""
    x = inputs([70, 0, 64, 1], (1, heads), 64, torch.bfloat16, kind)
    both = torch.stack([x.g, x.beta], -1)
    x = x._replace(g=both[..., 0], beta=both[..., 1])
    table = chunk_table(x.g.shape[1], x.cu_seqlens)
    g_cum, _ = kkt_solve_check.poisoned(x)
    gates = run_gate(x, table, g_cum, seed=heads)
    assert g_cum[:, x.tokens :].isnan().all()
    for chunk, (tok0, rows) in enumerate(table.chunks[: table.num_chunks].tolist()):
        g = (x.g[0, tok0 : tok0 + rows].double() / LN2).clamp(min=GATE_FLOOR)
        gamma = torch.cat([g.cumsum(0), g.sum(0).expand(64 - rows, -1)])
        end = gamma[15::16].repeat_interleave(16, 0)
        beta = torch.zeros(64, heads)
        beta[:rows] = x.beta[0, tok0 : tok0 + rows]
        assert_close("gamma", gates[chunk, :, 0], gamma.T, rel=1e-6)
        assert torch.equal(gates[chunk, :, 1], beta.T)
        assert_close("fall", gates[chunk, :, 2], (end - gamma).exp2().T, rel=1e-5)
        assert_close("g_cum", g_cum[0, tok0 : tok0 + rows], gamma[:rows] * LN2, rel=1e-6)


@pytest.mark.parametrize("variant", gate.VARIANTS[1:], ids=jit.variant_id)
@pytest.mark.kernels("gdn.gate")
def test_a_beta_of_16_bits_is_read_and_widened(variant):
    """With the results of the same beta in fp32; tokens of no chunk are left alone."""
    x = inputs([70, 0, 64, 1], (1, 33), 64, torch.bfloat16)
    x = x._replace(beta=x.beta.to(getattr(torch, variant.dtype)))
    table = chunk_table(x.g.shape[1], x.cu_seqlens)
    (g_cum, _), (want_cum, _) = kkt_solve_check.poisoned(x), kkt_solve_check.poisoned(x)
    wide = torch.full_like(g_cum, torch.nan)
    gates = run_gate(x, table, g_cum, 1, wide)
    want = run_gate(x._replace(beta=x.beta.float()), table, want_cum, 1)
    live = table.num_chunks
    assert torch.equal(gates[:live], want[:live])
    torch.testing.assert_close(g_cum, want_cum, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(wide[:, : x.tokens], x.beta[:, : x.tokens].float())
    assert wide[:, x.tokens :].isnan().all()


@pytest.mark.parametrize("variant", kkt_solve.VARIANTS, ids=jit.variant_id)
@pytest.mark.parametrize(("key", "gate", "ratio"), kkt_solve_check.CASES)
@pytest.mark.kernels("gdn.kkt_solve")
def test_kkt_solve(variant, key, gate, ratio):
    dtype = getattr(torch, variant.dtype)
    for seed, lengths in enumerate(kkt_solve_check.LENGTHS):
        x = inputs(lengths, (2, 4), variant.K, dtype, gate, key, seed=seed)
        g_cum, A = run_kkt_solve(variant, x, walkers=2, seed=seed)
        kkt_solve_check.check(x, g_cum, A, ratio[dtype])


@pytest.mark.parametrize("variant", kkt_solve.VARIANTS, ids=jit.variant_id)
def test_how_much_keys_let_a_state_grow(variant):
    """At the last of every 16 tokens of a chunk; other rows are left alone."""
    x = inputs([0, 65, 0, 1, 130, 0], (2, 4), variant.K, getattr(torch, variant.dtype), key="long")
    growth = torch.full_like(x.g, torch.nan)
    run_kkt_solve(variant, x, walkers=2, seed=0, growth=growth)
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
def test_kkt_solve_interleavings(seed, walkers):
    """One CTA that walks many chunks, and several; odd heads; every schedule of the emulator."""
    x = inputs([70, 200, 5, 64], (1, 3), 64, torch.bfloat16, seed=seed)
    g_cum, A = run_kkt_solve(kkt_solve.VARIANTS[1], x, walkers, seed)
    kkt_solve_check.check(x, g_cum, A, 1.1)
