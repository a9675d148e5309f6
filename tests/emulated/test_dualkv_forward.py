"""The CUDA forward of shared-prompt attention, emulated: launch.dualkv_fwd on CPU tensors."""

import pytest
import torch

from qla_kernels import SharedLayout
from qla_kernels.dualkv import launch
from qla_kernels.selftest.dualkv_forward import FOREST, SharedCall, call, check

pytestmark = pytest.mark.usefixtures("seeds", "poison")


def forward(x: SharedCall):
    return launch.dualkv_fwd(*x.arguments())


@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seeds, seed):
    """Two key heads, so that four CTAs draw an item more than once."""
    seeds["seed"] = seed
    x = call(SharedLayout.from_forest(*FOREST), heads=(2, 8))
    check(x, forward(x))


@pytest.mark.parametrize("group", [1, 2, 3, 6, 8, 16])
def test_query_heads_of_a_key_head(seeds, group):
    seeds["seed"] = group
    x = call([(130, [20, 7])], heads=(1 + (group == 1), group * (1 + (group == 1))))
    check(x, forward(x))


def test_queries_of_the_responses_alone():
    whole = call([(140, [33, 5, 70])], heads=(1, 2))
    x = whole._replace(q=whole.q[140:], q_shift=140)
    check(x, forward(x))


@pytest.mark.parametrize("changed", [{"spread": 30.0}, {"spread": 0.0}, {"scale": 0.5}], ids=str)
def test_scores_of_any_size(changed):
    """Far apart, so that a row is one key; all equal; with a scale of the caller's."""
    x = call([(150, [30])], **changed)
    check(x, forward(x))


def test_strides_are_taken_as_they_are():
    """Slices of one projection, as a model makes them; and head after head."""
    x = call([(40, [33])])
    fused = torch.cat([x.q, x.k, x.v], 1)
    sliced = x._replace(**dict(zip("qkv", fused.split([4, 1, 1], 1), strict=True)))
    head_major = x._replace(q=x.q.transpose(0, 1).contiguous().transpose(0, 1))
    want = forward(x)
    for other in (sliced, head_major):
        assert all(torch.equal(a, b) for a, b in zip(forward(other), want, strict=True))


def test_nan_in_a_response_stays_there():
    """And behind a prompt, where tiles reach into the first response: P is 0 there, V is NaN."""
    groups = [(150, [20, 40, 9])]
    x = call(groups)
    clean = forward(x)
    for name in "qkv":
        getattr(x, name)[170:210] = torch.nan
    done = forward(x)
    kept = [*range(170), *range(210, 219)]
    assert torch.equal(done.o[kept], clean.o[kept])
    assert torch.equal(done.lse2[:, kept], clean.lse2[:, kept])
    assert done.o[170:210].isnan().all()


def test_nothing_to_do():
    for groups in ([], [(0, [0])]):
        done = forward(call(groups))
        assert (done.o.shape, done.lse2.shape) == ((0, 4, 128), (4, 0))
