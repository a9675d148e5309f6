"""Whatever tables and indices hold, attention kernels end, and stay inside their tensors.

The launches of a GPU, emulated. The emulator refuses what lies outside a tensor, and what waits for
ever; results are not looked at, since there are none to be right.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from qla_kernels.dualkv import launch as dualkv_launch
from qla_kernels.dualkv import tables as dualkv_tables
from qla_kernels.dualkv.tables import Tables
from qla_kernels.lab.selftest import sparse_ring_backward, sparse_ring_forward
from qla_kernels.lab.selftest.dualkv_forward import SharedCall, call
from qla_kernels.sparse_ring import (
    ContiguousLayout,
    StripedLayout,
    VerticalSlash,
    ZigZagLayout,
    build,
    build_index,
    launch,
    launch_backward,
    launch_index,
    ring,
    shard,
    sparse_attention,
)
from qla_kernels.sparse_ring.select import Candidates
from tests.bad_contents import MOST, bad_indices, bad_tables, numbers

# Building kernels, and then a hundred launches: minutes, where others have the machine as well.
pytestmark = [pytest.mark.usefixtures("seeds", "poison"), pytest.mark.timeout(3600)]

ALONE = StripedLayout(1)
LAYOUTS = (ALONE, StripedLayout(2), StripedLayout(2, 64), ZigZagLayout(2), ContiguousLayout(2))
GROUPS = [(140, [40, 3]), (20, [9])]


@pytest.fixture
def by_kernels(monkeypatch):
    """CPU tensors take the launches of a GPU."""
    for module in (shard, ring):
        monkeypatch.setattr(module, "launches", lambda _: launch)
    monkeypatch.setattr(build, "launches", lambda _: launch_index)


def apart(tables: Tables) -> Tables:
    """Each in memory of its own: what lies beside one of them is not another."""
    return Tables(*(table.clone() for table in tables))


def corrupted(x: SharedCall, *names: str) -> Iterator[Tables]:
    """Some, since all take minutes; a GPU is given all of them.

    A column has three numbers in bad_tables: here one of them, another one for each column.
    """
    found = enumerate(bad_tables(apart(Tables(*x.arguments()[3])), *names))
    if names and x.q.shape[2] == 256:
        return (tables for i, tables in found if i % 11 == 0)
    return (tables for i, tables in found if i % 3 == i // 3 % 3)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 64), (torch.bfloat16, 256)])
@pytest.mark.parametrize("q_shift", [0, 140])
def test_tables_of_a_forward(q_shift, dtype, size, seeds):
    x = call(GROUPS[: 1 if q_shift else 2], (1, 2), size, dtype)
    x = x._replace(q=x.q[q_shift:], q_shift=q_shift)
    names = () if q_shift else ("header", "item", "span", "order")
    for seeds["seed"], tables in enumerate(corrupted(x, *names)):
        dualkv_launch.dualkv_fwd(x.q, x.k, x.v, list(tables), x.scale, q_shift)


FORMS = {
    "one-pass": (False, torch.bfloat16, 128),
    "two-passes": (True, torch.float16, 64),
    "wide": (False, torch.bfloat16, 256),
}


@pytest.mark.parametrize(
    ("form", "q_shift", "names"),
    [
        ("two-passes", 0, ("dq_item", "dq_span")),
        ("two-passes", 0, ("header", "order")),
        *(
            (form, 0, ("header", "kv_item", "split", "kv_order"))
            for form in ("one-pass", "two-passes")
        ),
        ("wide", 0, ("header", "dq_item", "dq_span", "order", "kv_item", "split", "kv_order")),
        *((form, 140, ()) for form in FORMS),
    ],
)
def test_tables_of_a_backward(form, q_shift, names, seeds, monkeypatch):
    deterministic, dtype, size = FORMS[form]
    monkeypatch.setattr(dualkv_tables, "SHORTEST_PART", 1)  # so that there are parts
    x = call(GROUPS[: 1 if q_shift else 2], (1, 2), size, dtype)
    x = x._replace(q=x.q[q_shift:], q_shift=q_shift)
    lse2 = x.q.new_zeros(2, len(x.q), dtype=torch.float32)
    for seeds["seed"], tables in enumerate(corrupted(x, *names)):
        assert len(tables.split), "nothing is split; the test is wrong"
        dualkv_launch.dualkv_bwd(
            x.q, x.q, x.k, x.v, x.q, lse2, None, list(tables), x.scale, q_shift, deterministic
        )


def test_nodes_of_other_tokens(seeds):
    """Nodes of other tokens than there are, which no layout holds."""
    for seeds["seed"], node in enumerate(([0, 900, 900], [0, 128, 2**30], [0, 3, 3])):
        x = call([(128, [])], (1, 2), 64, torch.float16)
        tables = apart(dualkv_tables.build(torch.tensor([node], dtype=torch.int32), 2, 1))
        dualkv_launch.dualkv_fwd(x.q, x.k, x.v, list(tables), x.scale, 0)


@pytest.mark.parametrize("seed", range(2))
def test_an_index(seed, seeds, by_kernels):
    """By the public functions, forward and backward: all indices, and a few once more."""
    seeds["seed"], (B, H, T, D) = seed, (1, 2, 384, 64)
    q, k, v = (torch.randn(B, T, heads, D).half().requires_grad_() for heads in (H, 1, 1))
    for index in bad_indices(B, H, T, 130, few=seed > 0):
        o = sparse_attention(q, k, v, index=index, seqlen=T - 3)
        o.sum().backward()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_index_around_a_ring(layout, monkeypatch, by_kernels):
    """Every rank's launches, in turn."""

    def columns(x: Tensor, v_idx: Tensor, T: int) -> Tensor:
        return x.new_zeros(*v_idx.shape, x.shape[-1])

    monkeypatch.setattr(sparse_ring_backward, "_columns", columns)
    x = sparse_ring_backward.case(layout, 256, dtype=torch.float16)
    for index in bad_indices(1, 2, x.q.shape[1], 130, few=True):
        there = sparse_ring_forward.AttentionCall(x.q, x.k, x.v, index, x.seqlen)
        sparse_ring_forward.forward(there, layout)
        sparse_ring_backward.backward(x._replace(lines=index))


def test_places_of_blocks(monkeypatch, by_kernels):
    """A layout that says nonsense of what lies where: tables that the host makes of it."""
    B, H, T, D = 1, 2, 384, 64
    q, k, v = (torch.randn(B, T, heads, D).half().requires_grad_() for heads in (H, 1, 1))
    index = next(iter(bad_indices(B, H, T, 130)))
    for name in ("visits_on", "first_blocks_on", "first_blocks_of"):
        for number in (-MOST - 1, -1, 6, 40, MOST):
            with monkeypatch.context() as patched:
                for module in (launch, launch_backward):
                    if (right := getattr(module, name, None)) is not None:
                        wrong = lambda *x, of=right, n=number: torch.full_like(of(*x), n)  # noqa: E731
                        patched.setattr(module, name, wrong)
                sparse_attention(q, k, v, index=index).sum().backward()


@pytest.mark.parametrize("estimator", ["residual", "independent"])
def test_candidates_of_an_index(estimator, seeds):
    """Masses and columns as no window has them, blocks that are anywhere, and some twice."""
    T, pattern = 512, VerticalSlash(0.5, 0.9, 8, 3, sink=2, estimator=estimator, gap_close=1)
    for seeds["seed"] in range(8):
        mass, column = numbers(2, T)[None], numbers(2, 24)[None]
        for block in (numbers(T // 64), torch.zeros(T // 64, dtype=torch.int32)):
            found, tile = launch_index.cut(mass, block, T, pattern)
            for some in (found, Candidates(column, mass[..., :24].contiguous())):
                launch_index.select(some, tile, T, T, pattern)
        same = Candidates(torch.full_like(column, 5), torch.ones_like(column))
        launch_index.select(same, numbers(2, T // 64)[None], T, T, pattern)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_an_index_of_keys_that_are_no_numbers(number, by_kernels):
    q, k = (torch.randn(1, 384, heads, 64).half() for heads in (2, 1))
    k[:, 100:200] = number
    index = build_index(q, k, VerticalSlash(0.5, 0.9))
    sparse_attention(q, k, k, index=index)
