"""Sequences cut over ranks at K = 256, emulated: links are made by the chains themselves."""

import pytest
import torch

from qla_kernels.gdn.plan import WARM_LOG_BOUND
from qla_kernels.lab.selftest.gdn_backward import check as check_gradients
from qla_kernels.lab.selftest.gdn_forward import check as check_output
from qla_kernels.lab.selftest.gdn_inputs import keys
from tests.gdn_calls import call
from tests.gdn_shards_check import run

pytestmark = [
    pytest.mark.usefixtures("seeds", "poison"),
    pytest.mark.kernels("gdn.wide_fwd", "gdn.wide_states", "gdn.wide_dstate", "gdn.wide_grads"),
]


BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("layout", "world", "lengths", "V", "dtype"),
    [
        ("contiguous", 3, [3 * 70], 128, FP16),  # through the second rank
        ("contiguous", 2, [20, 110, 0, 30], 64, BF16),
        ("zigzag", 2, [4 * 66], 64, BF16),  # through both stretches of rank 1
        ("zigzag", 2, [40, 11, 90, 0, 19], 128, BF16),  # several sequences in a stretch
        ("zigzag", 2, [90, 170], 64, BF16),  # through the second stretch of rank 1 alone
        ("zigzag", 1, [130], 64, BF16),  # a rank that is its own neighbour
    ],
)
def test_ranks_are_one(layout, world, lengths, V, dtype, monkeypatch):
    x = call(lengths, heads=(1, 2), sizes=(256, V), dtype=dtype, gates=torch.float32)
    del x["initial_state"]
    x["g"][..., 0] *= 0.01  # a head that forgets little, beside one that forgets all
    do = torch.randn_like(x["v"])
    o, grads = run(x, do, world, WARM_LOG_BOUND, monkeypatch, layout)
    check_output(x, o)
    check_gradients(x, do, None, grads)


@pytest.mark.parametrize("seed", range(1, 4))
def test_interleavings(seed, seeds, monkeypatch):
    """Keys of norm 1 in a few dimensions, and no decay: what comes from afar is all there is."""
    seeds["seed"] = seed
    x = call([210], heads=(1, 1), sizes=(256, 64), dtype=BF16, gates=torch.float32)
    del x["initial_state"]
    x["g"].zero_()
    x["k"] = keys("low rank", 210, 1, 256)[None].to(BF16)
    do = torch.randn_like(x["v"])
    o, grads = run(x, do, 3, WARM_LOG_BOUND, monkeypatch)
    check_output(x, o)
    check_gradients(x, do, None, grads)
