"""A pool's steps beside the chunk kernel over whole sequences, both emulated: equal bits."""

import pytest
import torch

from qla_kernels.gdn import GdnPool
from qla_kernels.gdn.anchored import launch
from qla_kernels.gdn.anchored import pool as anchored
from qla_kernels.gdn.anchored.pages import Page
from qla_kernels.gdn.launch.chunks import l2norm_fwd
from qla_kernels.gdn.launch.forward import gdn_fwd
from qla_kernels.lab.selftest.gdn_anchored import STEPS, Step, Tails, run, step
from qla_kernels.lab.selftest.gdn_calls import call, records
from qla_kernels.tile.constants import CHUNK

pytestmark = pytest.mark.usefixtures("seeds", "poison")
steps = pytest.mark.kernels("gdn.anchored_fwd", "gdn.append_tokens", "gdn.fused_fwd")

BF16, FP16 = torch.bfloat16, torch.float16


def check_bits(x: Step, tails: Tails, count: int) -> None:
    """Compares o with a call over each sequence's tokens, anchors with one over its first chunk."""
    o, after = run(x, "cpu")
    whole = {"auto_cp": False, "output_final_state": True}
    want = gdn_fwd(*records(x.x, **whole)).o
    end = 0
    for n, (kept, _) in enumerate(tails):
        first, end = end, end + (kept or 0) + count
        if kept is None:
            continue
        rows = slice(end - count, end)
        assert torch.equal(o[n], want[0, rows]), f"sequence {n}: {(o[n] != want[0, rows]).sum()}"
        if kept >= CHUNK:
            chunk = {
                name: x.x[name][:, first : first + CHUNK] for name in ("q", "k", "v", "g", "beta")
            }
            chunk |= {"initial_state": x.x["initial_state"][n : n + 1]}
            state = gdn_fwd(*records(chunk, **whole)).final_state
            assert torch.equal(after.anchors[x.state_indices[n]], state[0]), f"anchor {n}"


@steps
@pytest.mark.parametrize(("tails", "count"), STEPS[:-1], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_step_has_the_bits_of_the_chunk_kernel(tails, count, dtype):
    check_bits(step(tails, count, dtype, (128, 128), (1, 2)), tails, count)


@steps
@pytest.mark.parametrize(
    ("sizes", "heads"), [((64, 64), (2, 2)), ((64, 128), (1, 3)), ((128, 64), (2, 4))], ids=str
)
def test_other_sizes_and_groups(sizes, heads):
    tails, count = STEPS[2]
    check_bits(step(tails, count, BF16, sizes, heads), tails, count)


@steps
@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seed, seeds):
    """More items than CTAs, of one chunk, of two and of none."""
    seeds["seed"] = seed
    tails, count = [(3, 0), (64, 1), (None, 0), (62, 0), (71, 0), (0, 1)], 4
    check_bits(step(tails, count, BF16, (128, 128), (1, 3)), tails, count)


@pytest.mark.kernels(
    "gdn.anchored_fwd", "gdn.append_tokens", "gdn.reject_tokens", "gdn.activate", "gdn.l2norm"
)
def test_calls_with_raw_gates_and_rejections(monkeypatch):
    """Drafts of which some are taken back, from empty slots, in another order each call."""
    for name in ("gdn_pool_extend", "gdn_pool_reject"):
        monkeypatch.setattr(anchored, name, getattr(launch, name))
    x = call(batch=2, tokens=12, heads=(1, 2), sizes=(64, 64), dtype=BF16, activations=True)
    x |= {"initial_state": None}
    names = ("A_log", "dt_bias", "use_qk_l2norm_in_kernel", "use_gate_in_kernel")
    options = {n: x[n] for n in (*names, "use_beta_sigmoid_in_kernel")}
    norms = {n: l2norm_fwd(x[n]) for n in ("q", "k")}
    want = gdn_fwd(*records(x | norms, auto_cp=False)).o
    pool, at, slots = GdnPool(3, 1, 2, 64, 64, BF16, "cpu"), [0, 0], [2, 0]
    for count, rejected in ((4, (3, 1)), (8, (0, 5)), (3, (1, 3))):
        order = [1, 0] if count == 8 else [0, 1]
        rows = [(n, slice(at[n], at[n] + count)) for n in order]
        given = [torch.stack([x[m][row] for row in rows]) for m in ("q", "k", "v", "g", "beta")]
        given = [torch.cat([t, torch.full_like(t[:1], torch.nan)]) for t in given]
        index = torch.tensor([*(slots[n] for n in order), 3])
        o = pool.decode(*given, index, **options)
        for i, row in enumerate(rows):
            assert torch.equal(o[i], want[row])
        assert not o[2].any()
        back = [rejected[n] for n in order]
        pool.reject(index, torch.tensor([*back, 9]))
        at = [a + count - r for a, r in zip(at, rejected, strict=True)]
        assert pool.lengths[slots].tolist() == at


@pytest.mark.kernels("gdn.anchored_fwd", "gdn.append_tokens", "gdn.activate")
def test_a_prefill_without_tokens_empties_the_slots_of_sequences_that_begin(monkeypatch):
    monkeypatch.setattr(anchored, "gdn_pool_extend", launch.gdn_pool_extend)
    x = call(batch=2, tokens=70, heads=(1, 2), sizes=(64, 64), dtype=BF16)
    names = "q", "k", "v", "g", "beta"
    pool, slots = GdnPool(3, 1, 2, 64, 64, BF16, "cpu"), torch.tensor([2, 0])
    pool.prefill(*(x[n] for n in names), slots)
    assert pool.lengths.tolist() == [70, 0, 70]
    pool.prefill(*(x[n][:, :0] for n in names), slots, None, torch.tensor([False, True]))
    assert pool.lengths.tolist() == [70, 0, 0]
    o = pool.decode(*(x[n][:, :8] for n in names), slots)
    x = {**x, "initial_state": None} | {n: x[n][:1, :8] for n in names}
    want = gdn_fwd(*records(x, auto_cp=False)).o
    assert torch.equal(o[0], want[0])


@pytest.mark.kernels("gdn.anchored_fwd", "gdn.append_tokens")
@pytest.mark.parametrize(("tails", "count"), STEPS[1:4], ids=str)
def test_slots_in_pages_of_an_engine(tails, count):
    """Page n + 1 is slot n, pages lie apart, and page 0 stands for padding: the same bits."""
    x = step(tails, count, BF16, (128, 128), (2, 4))
    want, after = run(x, "cpu")
    page, num_slots = Page(2, 4, 128, 128, BF16), len(x.pool.lengths)
    room = torch.full((num_slots + 1, sum(page.part_bytes()) // 4 + 44), torch.nan)
    pages = page.slots(room[:, 12:-32])
    for held, given in zip(pages, x.pool, strict=True):
        held[1:] = given
    before = room.view(torch.int32).clone()
    slots = torch.where(x.state_indices < 0, 0, x.state_indices + 1)
    o = launch.decode(pages, x.call, slots, null_slot=0)
    assert torch.equal(o, want)
    for held, given in zip(pages, after, strict=True):
        assert torch.equal(held[1:].contiguous().nan_to_num(), given.nan_to_num())
    same = [n for n in range(num_slots + 1) if n == 0 or n not in slots]
    now = room.view(torch.int32)
    assert torch.equal(now[same], before[same]), "a page was written that no sequence has"
    assert torch.equal(now[:, :12], before[:, :12])
    assert torch.equal(now[:, -32:], before[:, -32:])


@pytest.mark.kernels("gdn.fused_fwd")
def test_a_row_of_a_chunk_does_not_depend_on_the_next_token():
    """The scan of the gates goes by pairs of tokens; the first must not use the second's gate."""
    x = step([(0, 0)], 8, BF16, (64, 64), (1, 2)).x
    whole = gdn_fwd(*records(x, auto_cp=False, is_train=True))
    for length in range(1, 8):
        cut = x | {"cu_seqlens": torch.tensor([0, length])}
        part = gdn_fwd(*records(cut, auto_cp=False, is_train=True))
        assert torch.equal(part.g_cum[:, :length], whole.g_cum[:, :length]), length
