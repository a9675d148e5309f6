"""Sequences cut over ranks, emulated: a GPU's launches, with links handed on by the test."""

import math
from types import SimpleNamespace

import pytest
import torch

from qla_kernels.gdn import plan
from qla_kernels.gdn.plan import WARM_LOG_BOUND, Plan
from qla_kernels.gdn.sharded import exchange
from qla_kernels.gdn.sharded import launch as launch_shards
from qla_kernels.gdn.sharded.layouts import ShardPlace
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest.gdn_backward import check as check_gradients
from qla_kernels.lab.selftest.gdn_forward import check as check_output
from tests.gdn_calls import call, records
from tests.gdn_shards_check import run

pytestmark = [pytest.mark.usefixtures("seeds"), pytest.mark.usefixtures("poison")]

GIVEN, SOLVING = ForwardChoice(128, False), ForwardChoice(64, True)


@pytest.mark.parametrize(
    ("world", "lengths", "most", "kernel", "limit"),
    [
        (3, [3 * 150], 2, SOLVING, WARM_LOG_BOUND),  # through the second rank, in two segments
        (3, [3 * 150], 1, GIVEN, -math.inf),
        (2, [40, 220, 0, 60], 2, GIVEN, WARM_LOG_BOUND),
        (2, [130, 1, 129], 3, SOLVING, WARM_LOG_BOUND),  # nothing comes through
    ],
)
def test_ranks_are_one(world, lengths, most, kernel, limit, monkeypatch):
    x = call(lengths, heads=(1, 2), sizes=(128, 128), dtype=torch.bfloat16, gates=torch.float32)
    del x["initial_state"]
    x["g"][..., 0] *= 0.01  # a head that forgets little, beside one that forgets all
    monkeypatch.setattr(plan, "forward", lambda *_, **__: Plan(kernel, most))
    monkeypatch.setattr(plan, "backward", lambda *_, **__: most)
    do = torch.randn_like(x["v"])
    o, grads = run(x, do, world, limit, monkeypatch)
    check_output(x, o)
    check_gradients(x, do, None, grads)


@pytest.mark.parametrize(
    ("world", "lengths", "most", "kernel", "limit"),
    [
        (2, [4 * 150], 2, SOLVING, WARM_LOG_BOUND),  # both stretches of rank 1 in one launch
        (2, [4 * 150], 1, GIVEN, -math.inf),
        (2, [200, 31, 300, 0, 69], 2, GIVEN, WARM_LOG_BOUND),  # several sequences in a stretch
        (2, [150, 300, 150], 3, SOLVING, WARM_LOG_BOUND),  # ends and begins between stretches
        (1, [130, 70], 1, SOLVING, -math.inf),  # a rank that is its own neighbour
    ],
)
def test_ranks_in_zigzag_are_one(world, lengths, most, kernel, limit, monkeypatch):
    x = call(lengths, heads=(1, 2), sizes=(128, 128), dtype=torch.bfloat16, gates=torch.float32)
    del x["initial_state"]
    x["g"][..., 0] *= 0.01  # a head that forgets little, beside one that forgets all
    monkeypatch.setattr(plan, "forward", lambda *_, **__: Plan(kernel, most))
    monkeypatch.setattr(plan, "backward", lambda *_, **__: most)
    do = torch.randn_like(x["v"])
    o, grads = run(x, do, world, limit, monkeypatch, "zigzag")
    check_output(x, o)
    check_gradients(x, do, None, grads)


@pytest.mark.parametrize("each", [1, 2])
def test_a_rank_of_no_tokens_tells_the_others_nothing(each, monkeypatch):
    x = call([0], heads=(1, 2), sizes=(128, 128), dtype=torch.bfloat16, gates=torch.float32)
    told = []
    monkeypatch.setattr(exchange, "group_named", lambda _: SimpleNamespace(rank=lambda: 0))
    monkeypatch.setattr(exchange, "gather", lambda link, _: told.append(link) or link[None])
    done = launch_shards.gdn_shard_fwd(
        *records(x, initial_state=None), ShardPlace("", [0] * each, [0] * each, 0)
    )
    assert done.o.shape == x["v"].shape
    assert told[0].shape == (2, each, 256 + 1, 128)
    assert not told[0][:, :, :-1].any()  # the last row says whose it is
