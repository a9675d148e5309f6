"""The backward's chains over segments, emulated: what whole sequences leave, from both ends."""

import math

import pytest
import torch
from torch import Tensor

from qla_kernels import jit
from qla_kernels.gdn import heuristics, plan
from qla_kernels.gdn.call import Incoming, SavedForward
from qla_kernels.gdn.kernels import segment_map_bwd, segment_scan
from qla_kernels.gdn.launch import backward, chains, segments
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.plan import WARM_LOG_BOUND
from qla_kernels.varlen import chunk_table
from tests.compare import assert_close, relative_l2
from tests.emulated.test_gdn_chains import Case, Chains, case, expected, prepared
from tests.gdn_backward_check import check as check_gradients
from tests.gdn_calls import call, records
from tests.gdn_segments_check import GIVEN, SOLVING

pytestmark = [pytest.mark.usefixtures("seeds"), pytest.mark.usefixtures("poison")]

# Errors are counted in units of what rounding the operands of every product costs by itself.
RATIO = 1.2
FP32 = 1e-5  # what sums and decays in fp32 cost, and what a warm head leaves out
SMALLEST = torch.finfo(torch.float16).tiny  # strong decay leaves less: as an operand in fp16, 0
NEVER = -math.inf


def end_gradients(x: Case, cut: segments.Segments, limit: float) -> tuple[Tensor, Tensor]:
    """The states that enter the segments, and the gradients of those that leave them."""
    g_cum, A = prepared(x)
    found = segments.maps(x.k, x.v, g_cum, x.beta, A, x.h0, cut, limit)
    starts = segments.start_states(found, x.h0, cut)
    ends = segments.end_gradients(
        x.q, x.k, x.do, g_cum, x.beta, A, x.dht, x.scale, found, cut, limit
    )
    return starts, ends


def run(x: Case, most: int, limit: float) -> Chains:
    """Both chains over segments: chunks are those of the sequences, in the same order."""
    cut = segments.cut(x.g, x.cu_seqlens, most)
    starts, ends = end_gradients(x, cut, limit)
    g_cum, A = prepared(x)
    first_chunk = chunk_table(x.k.shape[1], cut.bounds).first_chunk
    ht, dh0 = torch.empty_like(starts), torch.empty_like(ends)
    h = chains.chunk_states(x.k, x.v, g_cum, x.beta, A, starts, cut.bounds, first_chunk, 1, ht)
    dS = chains.dstate_chain(
        x.q, x.k, x.do, g_cum, x.beta, A, ends, x.scale, cut.bounds, first_chunk, dh0
    )
    first = cut.first_segment.long()
    return Chains(h[: x.chunks()], ht[first[1:] - 1], dS[: x.chunks()], dh0[first[:-1]])


def check(x: Case, got: Chains) -> None:
    want, rounded = expected(x), expected(x, x.k.dtype)
    for name in Chains._fields:
        for head in range(x.v.shape[2]):
            a, b, c = (getattr(y, name)[:, head] for y in (got, want, rounded))
            limit = RATIO * relative_l2(c, b, SMALLEST) + FP32
            assert_close(f"{name} of head {head}", a, b, limit, at_least=SMALLEST)


@pytest.mark.parametrize("variant", segment_map_bwd.VARIANTS, ids=jit.variant_id)
@pytest.mark.parametrize("limit", [WARM_LOG_BOUND, NEVER])
@pytest.mark.kernels("gdn.segment_map_bwd", "gdn.segment_scan")
def test_every_variant(variant, limit, seeds, monkeypatch):
    """And segment_scan's, by turns."""
    scans = [x for x in segment_scan.VARIANTS if x.K == variant.K and x.reverse]
    for seed, (lengths, most) in enumerate((([321], 2), ([64, 0, 200], 1))):
        columns = scans[seed % len(scans)].columns
        monkeypatch.setattr(heuristics, "scan_columns", lambda *_, columns=columns: columns)
        seeds["seed"] = seed
        sizes = variant.K, 64 if seed else 128
        x = case(lengths, getattr(torch, variant.dtype), sizes=sizes, states=seed == 0)
        check(x, run(x, most, limit))


@pytest.mark.parametrize("gate", ["none", "mild", "strong", "total"])
@pytest.mark.parametrize("key", ["unit", "low rank"])
def test_gates_and_keys_at_the_edge(gate, key):
    x = case([250, 70], gate=gate, key=key)
    check(x, run(x, 1, WARM_LOG_BOUND))


@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seed, seeds):
    """Heads of which some fold, of three sequences: more CTAs than SMs."""
    seeds["seed"] = seed
    x = case([250, 1, 190], heads=(1, 3))
    x.g[..., 2] = 0
    check(x, run(x, 2, WARM_LOG_BOUND))


def test_warm_and_cold_heads_and_segments_side_by_side():
    """Head 0 forgets everywhere, head 1 nowhere, head 2 in the middle and at the end."""
    x = case([10 * 64], heads=(1, 3), gate="none")
    x.g[..., 0] = -0.2
    x.g[:, 4 * 64 : 6 * 64, 2] = -0.2
    x.g[:, 8 * 64 :, 2] = -0.2
    check(x, run(x, 2, WARM_LOG_BOUND))


def test_a_head_may_forget_only_when_looked_at_from_one_end():
    """e^-12.8 over the last chunk, but e^-11.5 over all three: too much, from the beginning on."""
    x = case([9 * 64], heads=(1, 1), gate="none")
    x.g[:, 3 * 64 : 5 * 64] = 0.01
    x.g[:, 5 * 64 : 6 * 64] = -0.2
    check(x, run(x, 3, WARM_LOG_BOUND))


def test_a_warm_head_reads_its_window_alone():
    """64 tokens leave e^-12.8: what comes behind them may be anything, unless all is asked for."""
    x = case([8 * 64])
    x.g[..., 0] = -0.2
    x.g[..., 1] = 0
    cut = segments.cut(x.g, x.cu_seqlens, 4)
    want = end_gradients(x, cut, WARM_LOG_BOUND)[1][0]
    x.do[:, 5 * 64 :] = torch.nan
    x.dht[:] = torch.nan
    got = end_gradients(x, cut, WARM_LOG_BOUND)[1][0]
    assert torch.equal(got[0], want[0])
    assert got[1].isnan().all()
    for limit in (-13.0, NEVER):
        assert end_gradients(x, cut, limit)[1][0, 0].isnan().all()


@pytest.mark.parametrize("kernel", [GIVEN, SOLVING])
def test_a_backward_that_is_given_the_forwards_segments_looks_for_none(kernel, monkeypatch):
    x = call([300, 70], heads=(1, 2), sizes=(128, 128), dtype=torch.bfloat16, gates=torch.float32)
    x["g"][..., 0] *= 0.01  # a head that is folded, beside one that is not
    cut = plan.Plan(kernel, 2, WARM_LOG_BOUND)
    monkeypatch.setattr(plan, "forward", lambda *_: cut)
    given, options = records(x, is_train=True, enable_fwd_cp_cache=True)
    done = launch.gdn_fwd(given, options)
    monkeypatch.setattr(segments, "cut", None)
    monkeypatch.setattr(segments, "maps", None)
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    saved = SavedForward(done.g_cum, done.A, done.cp_cache)
    got = backward.gdn_bwd(given, saved, Incoming(do, dht), options)
    check_gradients(x, do, dht, got)
