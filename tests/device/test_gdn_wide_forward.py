"""The forward at K = 256 on a GPU, as operators launch it: fresh inputs, fp64 truth, repeated."""

from typing import Any

import pytest
import torch

from qla_kernels.lab.selftest.gdn_calls import Call, small
from qla_kernels.lab.selftest.gdn_forward import check, check_saved, forward
from qla_kernels.lab.selftest.gdn_inputs import gates, keys
from qla_kernels.lab.selftest.gdn_wide_forward import whole_forward
from tests.gdn_calls import on_gpu

pytestmark = pytest.mark.hopper

DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128)


def run(x: Call, **changed: Any) -> Any:
    with torch.no_grad():
        return forward({**x, **changed})


# (B, T, H, HV, V): flash-linear-attention's default sizes, more heads, few tokens, V of one tile
SHAPES = ((2, 1000, 6, 6, 512), (1, 2048, 2, 8, 256), (3, 63, 1, 2, 128), (4, 130, 2, 2, 64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(shape, dtype):
    B, T, H, HV, V = shape
    x = on_gpu(batch=B, tokens=T, heads=(H, HV), sizes=(256, V), dtype=dtype)
    done = run(x, is_train=True)
    check(x, done.o, done.final_state)
    check_saved(x, done.g_cum, done.A)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "lengths", [[256, 244, 500], [0, 65, 0, 1, 130, 0], [63, 64, 65] * 30], ids=str
)
@torch.no_grad()
def test_packed(lengths, width):
    x = on_gpu(lengths, heads=(2, 4), sizes=(256, 256))
    done = whole_forward(x, width)
    check(x, done.o, done.final_state)


@pytest.mark.parametrize("gate", ["none", "mild", "strong", "total"])
@pytest.mark.parametrize("key", ["unit", "low rank"])
def test_gates_and_keys_at_the_edge(gate, key):
    x = small([130, 65, 700], heads=(2, 4), sizes=(256, 128))
    x["g"][0, :895] = gates(gate, 895, 4)
    x["k"][0, :895] = keys(key, 895, 2, 256).to(x["k"].dtype)
    x = {name: value.cuda() for name, value in x.items()}
    done = run(x)
    check(x, done.o, done.final_state)


@torch.no_grad()
def test_widths_and_repetitions_compute_the_same_bits():
    x = on_gpu([2000, 64, 777, 3], heads=(2, 4), sizes=(256, 256))
    want = whole_forward(x, WIDTHS[0])
    for width in WIDTHS * 10:
        done = whole_forward(x, width)
        assert torch.equal(done.o, want.o), width
        assert torch.equal(done.final_state, want.final_state), width
