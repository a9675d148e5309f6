"""The CUDA forward, emulated: the launches of every rank of a ring, in turn."""

import inspect

import pytest
import torch

from qla_kernels.lab.selftest.sparse_ring_forward import ALONE, LAYOUTS, check, forward, problem
from qla_kernels.sparse_ring import cpu, launch, shard
from qla_kernels.sparse_ring.index import known_index
from qla_kernels.sparse_ring.layouts import StripedLayout
from qla_kernels.sparse_ring.patterns import FixedVerticalSlash

pytestmark = pytest.mark.usefixtures("seeds", "poison", "by_kernels")


@pytest.mark.parametrize("module", [cpu, launch], ids=["cpu", "gpu"])
def test_a_device_has_every_launch(module):
    names = {name for name in vars(shard.Launches) if not name.startswith("_")}
    assert names == set(launch.__all__)
    for name in names:
        _, *wanted = inspect.signature(getattr(shard.Launches, name)).parameters
        assert list(inspect.signature(getattr(module, name)).parameters) == wanted


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_ring(layout, seeds):
    for seed, per_launch in enumerate((1, 4)):
        seeds["seed"] = seed
        x = problem(layout.pad_len(600), seqlen=580)
        check(x, *forward(x, layout, per_launch))


@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seed, seeds):
    """Of rank 7, one half of the tile sees 8 times 64 columns that the other does not."""
    seeds["seed"] = seed
    layout = StripedLayout(8, 64)
    pattern = FixedVerticalSlash((tuple(range(1024)),), ((0,),))
    x = problem(1024, pattern, heads=(1, 1), D=128)
    check(x, *forward(x, layout, 8))


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128])
def test_short_sequences(seqlen):
    x = problem(128, seqlen=seqlen)
    check(x, *forward(x, ALONE))


@pytest.mark.parametrize(
    ("columns", "diagonals"),
    [
        ((), (0,)),
        (range(384), (0,)),
        ((), range(6)),
        (range(384), range(6)),
        ((0, 63, 64, 383), (0, 5)),
    ],
    ids=["own block", "every column", "every diagonal", "everything", "edges"],
)
def test_lines_at_the_edge(columns, diagonals):
    x = problem(384, FixedVerticalSlash((tuple(columns),), (tuple(diagonals),)))
    check(x, *forward(x, ALONE))


def test_large_scores():
    """Probabilities of 1 and of 0: of scores up to 100 in size."""
    x = problem(256, gain=20, dtype=torch.float16)
    o, lse = forward(x, ALONE)
    assert lse.max() > 60
    check(x, o, lse, lse_limit=1e-4)


def test_what_no_line_reaches_is_not_read():
    """NaN in the values of a block that is not seen, and in columns past the last one."""
    x = problem(384, FixedVerticalSlash(((3,),), ((0, 1),)))
    want = forward(x, ALONE)
    index = known_index(FixedVerticalSlash(((3,),), ((0, 1),)), 1, 2, 384, "cpu")
    padded = index._replace(v_idx=torch.nn.functional.pad(index.v_idx, (0, 200), value=384))
    got = forward(x._replace(lines=padded), ALONE)
    assert torch.equal(got[0], want[0])
    x.v[:, 4:64] = torch.nan  # seen by blocks 0 and 1 alone
    got = forward(x, ALONE)
    assert torch.equal(got[0][:, 128:], want[0][:, 128:])
