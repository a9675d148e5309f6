"""The CUDA forward of shared-prompt attention, emulated: launch.dualkv_fwd on CPU tensors."""

import pytest
import torch

from qla_kernels import SharedLayout
from qla_kernels.dualkv import launch
from qla_kernels.dualkv.shapes import NODE, OWN_TILES, TOK0
from qla_kernels.dualkv.tables import Tables
from qla_kernels.lab.selftest.dualkv_forward import FOREST, SharedCall, call, check

pytestmark = pytest.mark.usefixtures("seeds", "poison")

SIZES = pytest.mark.parametrize("size", [128, 256])


def forward(x: SharedCall):
    return launch.dualkv_fwd(*x.arguments())


@pytest.mark.parametrize(("size", "seed"), [*((128, seed) for seed in range(6)), (256, 0)])
def test_interleavings(seeds, size, seed):
    """Two key heads, so that four CTAs draw an item more than once."""
    seeds["seed"] = seed
    x = call(SharedLayout.from_forest(*FOREST), (2, 8), size)
    check(x, forward(x))


@pytest.mark.parametrize(
    ("size", "group"), [*((128, group) for group in (1, 2, 3, 6, 8, 16)), (256, 8)]
)
def test_query_heads_of_a_key_head(seeds, size, group):
    seeds["seed"] = group
    x = call([(130, [20, 7])], (1 + (group == 1), group * (1 + (group == 1))), size)
    check(x, forward(x))


def test_rows_that_the_first_tile_hides():
    """At head size 256 a query tile of 128 tokens lies in up to three own key tiles."""
    x = call([(290, [200])], (1, 1), 256)
    tables = Tables(*x.arguments()[3])
    item = tables.item
    causal = item[:, OWN_TILES] - (item[:, TOK0] - item[:, NODE]) // 80
    assert causal.max() == 3
    check(x, forward(x))


@SIZES
def test_queries_of_the_responses_alone(size):
    whole = call([(140, [33, 5, 70])], (1, 2), size)
    x = whole._replace(q=whole.q[140:], q_shift=140)
    check(x, forward(x))


@SIZES
@pytest.mark.parametrize("changed", [{"spread": 30.0}, {"spread": 0.0}, {"scale": 0.5}], ids=str)
def test_scores_of_any_size(changed, size):
    """Far apart, so that a row is one key; all equal; with a scale of the caller's."""
    x = call([(150, [30])], size=size, **changed)
    check(x, forward(x))


@SIZES
def test_strides_are_taken_as_they_are(size):
    """Slices of one projection, as a model makes them; and head after head."""
    x = call([(40, [33])], size=size)
    fused = torch.cat([x.q, x.k, x.v], 1)
    sliced = x._replace(**dict(zip("qkv", fused.split([4, 1, 1], 1), strict=True)))
    head_major = x._replace(q=x.q.transpose(0, 1).contiguous().transpose(0, 1))
    want = forward(x)
    for other in (sliced, head_major):
        assert all(torch.equal(a, b) for a, b in zip(forward(other), want, strict=True))


@SIZES
def test_nan_in_a_response_stays_there(size):
    """And behind a prompt, where tiles reach into the first response: P is 0 there, V is NaN."""
    groups = [(150, [20, 40, 9])]
    x = call(groups, size=size)
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
