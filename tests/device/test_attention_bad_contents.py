"""Whatever tables and indices hold, calls end, and write nothing but their results.

What launches allocate, and what they are given, lies between bands that must stay as they are.
Reads outside are found by the emulated tier.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import SharedLayout, shared_prefix_attention
from qla_kernels.dualkv.shapes import HEAD_SIZES
from qla_kernels.sparse_ring import VerticalSlash, VSIndex, build_index, sparse_attention
from tests.bad_contents import bad_indices, bad_tables

pytestmark = pytest.mark.hopper

BAND = 4096  # elements on either side
BYTE = 0x5A


class Bands:
    def __init__(self, empty: Callable[..., Tensor]) -> None:
        self._empty, self._whole = empty, list[Tensor]()
        self.inputs = 0  # the first ones, which every check looks at

    def around(self, x: Tensor) -> Tensor:
        """x between two bands, if it lies on the GPU as torch makes it."""
        if not (x.is_cuda and x.is_contiguous()):
            return x
        whole = self._empty(x.numel() + 2 * BAND, dtype=x.dtype, device=x.device)
        whole.view(torch.uint8).fill_(BYTE)
        self._whole.append(whole)
        return whole[BAND : BAND + x.numel()].view(x.shape).copy_(x)

    def check(self) -> None:
        torch.cuda.synchronize()
        for whole in self._whole:
            for band in (whole[:BAND], whole[-BAND:]):
                assert bool((band.view(torch.uint8) == BYTE).all()), "written outside a tensor"
        del self._whole[self.inputs :]


@pytest.fixture
def bands(monkeypatch) -> Bands:
    found = Bands(torch.empty)

    def banded(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given, **options: found.around(make(*given, **options))

    for owner, names in (
        (torch, ("empty", "empty_like")),
        (torch.Tensor, ("new_empty", "new_full", "new_zeros")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, banded(getattr(owner, name)))
    return found


def given(bands: Bands, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    made = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    found = [bands.around(x).requires_grad_() for x in made]
    bands.inputs = len(found)
    return found


def run(attention: Callable[..., Tensor], *given: Any, **options: Any) -> list[Tensor]:
    """o, and the gradients."""
    o = attention(*given, **options)
    leaves = [x for x in given if isinstance(x, Tensor)]
    return [o, *torch.autograd.grad(o, leaves, torch.ones_like(o))]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("deterministic", [False, True], ids=["one-pass", "two-passes"])
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_tables_of_a_layout(size, deterministic, bands):
    """Overwritten in place, as a stale buffer of a CUDA graph may be."""
    layout = SharedLayout.from_lengths([(900, [200, 3, 77]), (20, [9, 500])], device="cuda")
    q, k, v = given(bands, torch.bfloat16, *((layout.num_tokens, h, size) for h in (8, 2, 2)))
    call = {"deterministic": deterministic}
    want = run(shared_prefix_attention, q, k, v, layout, **call)
    tables = layout.prepare(8, 2, head_dim=size)
    right = type(tables)(*(table.cpu() for table in tables))
    for wrong in bad_tables(right, *right._fields):
        for table, numbers in zip(tables, wrong, strict=True):
            table.copy_(numbers)
        run(shared_prefix_attention, q, k, v, layout, **call)
        bands.check()
    for table, numbers in zip(tables, right, strict=True):
        table.copy_(numbers)
    got = run(shared_prefix_attention, q, k, v, layout, **call)
    assert torch.equal(got[0], want[0])
    assert same(got, want) or not deterministic


@pytest.mark.parametrize("size", [64, 128])
def test_an_index(size, bands):
    B, H, T = 2, 8, 2048
    q, k, v = given(bands, torch.bfloat16, *((B, T, h, size) for h in (H, 2, 2)))
    pattern = VerticalSlash(0.5, 0.7)
    want = run(sparse_attention, q, k, v, pattern=pattern)
    for index in bad_indices(B, H, T, 700):
        there = VSIndex(*(bands.around(x.cuda()) for x in index[:4]), T)
        run(sparse_attention, q, k, v, index=there, seqlen=T - 3)
        bands.check()
    assert same(run(sparse_attention, q, k, v, pattern=pattern), want)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_an_index_of_keys_that_are_no_numbers(number, bands):
    q, k = (torch.randn(1, 2048, heads, 128, device="cuda").bfloat16() for heads in (4, 2))
    k[:, 100:200] = number
    index = build_index(bands.around(q), bands.around(k), VerticalSlash(0.5, 0.9))
    sparse_attention(q, k, k, index=index)
    bands.check()
    columns = index.v_idx.cpu()
    assert ((columns >= 0) & (columns <= 2048)).all()
