"""The kernels of an index, emulated: LSE and masses of a window, and the lines they are worth."""

import types

import pytest
import torch

from qla_kernels.lab.selftest.sparse_ring_index import (
    ONE,
    assert_same,
    check_lines,
    check_window,
    window,
)
from qla_kernels.sparse_ring import (
    VerticalSlash,
    build,
    build_index,
    cpu,
    launch_index,
)
from qla_kernels.sparse_ring.select import Candidates

pytestmark = [pytest.mark.usefixtures("seeds"), pytest.mark.usefixtures("poison")]


@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seed, seeds):
    """A CTA has every tile: 10 of two pairs of heads, 9 of a single pair."""
    seeds["seed"] = seed
    check_window(window(1280, (2, 6), B=2))
    check_window(window(1152, (4, 8)))


@pytest.mark.parametrize("rows", [1, 17, 63])
def test_less_than_a_block_is_observed(rows):
    check_window(window(256, (2, 2), rows=rows, blocks=[0, 1, 2, 3]))


def test_blocks_lie_in_any_order():
    check_window(window(512, (1, 2), blocks=[-7, 1, -6, 0, 3, -1, 2, -2]))
    check_window(window(256, (1, 2), blocks=[5, 4, -9, -3]))


def test_scores_that_fp32_has_to_be_careful_with():
    check_window(window(512, (1, 3), size=20.0))


def test_a_rank_that_sees_nothing():
    x = window(256, (1, 2), blocks=[1, 2, 3, 4])
    lse = launch_index.window_lse(x.q, x.k, x.block, x.last, x.scale)
    assert (lse == -torch.inf).all()
    mass = launch_index.window_mass(x.q, x.k, x.block, x.last, lse.zero_(), x.scale)
    assert not mass.any()


def test_strides_are_read_in_place():
    x = window(384, (2, 4))
    wide = torch.randn(1, 384, 6, 64, dtype=x.k.dtype)  # a slice of one projection
    wide[:, :, 3:5] = x.k
    one = x._replace(q=x.q[:, :, :2], k=x.k[:, :, :1])
    for y in (x._replace(k=wide[:, :, 3:5]), one):
        check_window(y)


def test_nothing_is_forced_and_nothing_stands_out():
    pattern = VerticalSlash(0.0, 0.0, sink=0, window=0)
    check_lines(torch.zeros(1, 1, 512, dtype=torch.int32), 512, pattern, ONE)


def test_a_call_chooses_of_its_own_masses(monkeypatch):
    """The launches of a GPU under build_index, against torch with the masses they found."""
    mean = torch.randn(4, 64)
    q = (torch.randn(1, 640, 4, 64) + mean).half()
    k = (torch.randn(1, 640, 2, 64) + mean[::2]).half()
    k[:, ::97] += mean[::2].half()
    pattern, found = VerticalSlash(0.5, 0.7), {}

    def window_mass(*arguments):
        found["mass"] = launch_index.window_mass(*arguments)
        return found["mass"]

    launches = types.SimpleNamespace(**{**vars(launch_index), "window_mass": window_mass})
    monkeypatch.setattr(build, "launches", lambda _: launches)
    got = build_index(q, k, pattern, seqlen=600)
    columns, tile = cpu.cut(found["mass"], torch.arange(10), 640, pattern)
    assert_same(got, cpu.select(Candidates(*columns), tile, 600, 640, pattern))
    assert got.window_recall.min() > 0.69
