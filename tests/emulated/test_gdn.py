"""The gated delta net's kernels, emulated: numbers and protocol, on lengths of every kind."""

import pytest
import torch

from qla_kernels.gdn.kernels import kkt_solve
from qla_kernels.varlen import chunk_table
from tests import kkt_solve_check
from tests.emulator import EmulatedKernel
from tests.gdn_inputs import Inputs, inputs


def run_kkt_solve(variant, x: Inputs, walkers: int, seed: int):
    """As launch.kkt_solve launches it."""
    H, HV = x.k.shape[2], x.g.shape[2]
    g_cum, A = kkt_solve_check.poisoned(x)
    table = chunk_table(x.k.shape[1], x.cu_seqlens)
    kernel = EmulatedKernel(kkt_solve.build(variant), kkt_solve.PASS_CONFIGS)
    heads = (-1, H, HV // H)
    kernel(
        x.k[0],
        x.g.view(heads),
        x.beta.view(heads),
        table.chunks,
        table.num_chunks,
        g_cum.view(heads),
        A.view(*heads, 64),
        walkers,
        seed=seed,
    )
    return g_cum, A


@pytest.mark.parametrize("variant", kkt_solve.VARIANTS, ids=str)
@pytest.mark.parametrize(("key", "gate", "ratio"), kkt_solve_check.CASES)
def test_kkt_solve(variant, key, gate, ratio):
    dtype = getattr(torch, variant.dtype)
    for seed, lengths in enumerate(kkt_solve_check.LENGTHS):
        x = inputs(lengths, (2, 4), variant.K, dtype, gate, key, seed=seed)
        g_cum, A = run_kkt_solve(variant, x, walkers=2, seed=seed)
        kkt_solve_check.check(x, g_cum, A, ratio[dtype])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("walkers", [1, 3])
def test_kkt_solve_interleavings(seed, walkers):
    """One CTA that walks many chunks, and several; odd heads; every schedule of the emulator."""
    x = inputs([70, 200, 5, 64], (1, 3), 64, torch.bfloat16, seed=seed)
    g_cum, A = run_kkt_solve(kkt_solve.VARIANTS[1], x, walkers, seed)
    kkt_solve_check.check(x, g_cum, A, 1.1)
