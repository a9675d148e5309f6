"""Sequences cut over ranks on GPUs: ranks in turn on one, and as processes over NCCL on two."""

import pytest
import torch

from qla_kernels.gdn.plan import WARM_LOG_BOUND
from qla_kernels.lab.selftest.gdn_backward import check as check_gradients
from qla_kernels.lab.selftest.gdn_forward import check as check_output
from tests import gdn_shard_gpu_batches as batches
from tests.gdn_calls import on_gpu
from tests.gdn_shard_gpus import LIMIT, WORLD
from tests.gdn_shards_check import run
from tests.ranks import launched

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize(
    ("world", "lengths"), [(2, [4000]), (4, [6000]), (4, [100, 4500, 300, 0, 1100]), (2, [65, 67])]
)
@pytest.mark.parametrize("limit", [WARM_LOG_BOUND, -torch.inf])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_ranks_in_turn_are_one(world, lengths, limit, layout, monkeypatch):
    x = on_gpu(lengths, heads=(2, 4), padding=0)
    del x["initial_state"]
    x["g"] *= torch.tensor([0.0, 0.002, 0.02, 1.0], device="cuda")  # what heads remember
    do = torch.randn_like(x["v"])
    o, grads = run(x, do, world, limit, monkeypatch, layout)
    host = {n: t.cpu() if torch.is_tensor(t) else t for n, t in x.items()}
    check_output(host, o.cpu())
    on_host = (None if t is None else t.cpu() for t in grads)
    check_gradients(host, do.cpu(), None, type(grads)(*on_host))


# Of [65, 67] tokens dbeta has 1.28 times the error of its reference, over the limit of 1.25, as a
# whole sequence has in some draws of few tokens: docs/lessons.md.
@pytest.mark.parametrize(
    ("world", "lengths"), [(2, [4000]), (4, [6000]), (4, [100, 4500, 300, 0, 1100]), (2, [90, 170])]
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_ranks_in_turn_are_one_with_wide_heads(world, lengths, layout, monkeypatch):
    """K = 256, V = 512: the chains make the links."""
    x = on_gpu(lengths, heads=(2, 4), sizes=(256, 512), padding=0)
    del x["initial_state"]
    x["g"] *= torch.tensor([0.0, 0.002, 0.02, 1.0], device="cuda")  # what heads remember
    do = torch.randn_like(x["v"])
    o, grads = run(x, do, world, WARM_LOG_BOUND, monkeypatch, layout)
    again, grads_again = run(x, do, world, WARM_LOG_BOUND, monkeypatch, layout)
    assert torch.equal(again, o), "the second time there are other bits"
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))
    host = {n: t.cpu() if torch.is_tensor(t) else t for n, t in x.items()}
    check_output(host, o.cpu())
    on_host = (None if t is None else t.cpu() for t in grads)
    check_gradients(host, do.cpu(), None, type(grads)(*on_host))


@pytest.mark.multi_gpu
def test_two_gpus_are_one(tmp_path):
    """Against one GPU, whose rounding errors are as large and not the same."""
    said, _ = launched("tests.gdn_shard_gpus", tmp_path, WORLD, LIMIT)
    for rank in said:
        assert "no end" not in rank, rank["no end"]
        repeated = {n: rank.pop(n) for n in list(rank) if n.endswith("again")}
        assert all(repeated.values()), f"the second time there are other bits: {repeated}"
        assert {n: e for n, e in rank.items() if e > 1e-2} == {}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [3, 4])
def test_batches_may_differ(tmp_path, world):
    """On three GPUs and more, a rank that knew its line had gone on while others compared."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    said, codes = launched("tests.gdn_shard_gpu_batches", tmp_path, world, batches.LIMIT)
    assert codes == [0] * world, said
    for rank in said:
        assert rank.pop("exchanges") == 2, "ranks compare what is the same on all of them, once"
        assert len(rank) == 3 * len(batches.BATCHES)
        assert {n: e for n, e in rank.items() if e > 1e-2} == {}
