"""What the kernels must produce over a prefix tree: shared by the emulated and the device tier."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.tree.ops import TreeForward
from qla_kernels.gdn.tree.tables import ON_HOST, DeltaTables, tree_tables
from qla_kernels.hybrid.layouts import parents
from qla_kernels.lab.selftest.gdn_backward import DG_UNITS
from qla_kernels.lab.selftest.gdn_inputs import gates, keys
from reference import gdn
from tests.compare import assert_close, relative_l2
from tests.gdn_trees import Forest

# Errors are counted in units of what rounding the operands of every product costs by itself.
FORWARD_RATIO, BACKWARD_RATIO = 1.5, 1.4
FEW_RATIO = 2.5  # of dg and dbeta, a number a token and head
FP32 = 1e-5


class TreeCase(NamedTuple):
    """A call over a tree, and the gradients from which its backward starts."""

    call: Call
    tables: DeltaTables
    options: Options
    do: Tensor
    dfinal: Tensor | None


# Levels of one and of many nodes; nodes of 1 and 3 tokens, of whole chunks, and with tails.
KERNEL_FORESTS = {
    "a group": Forest((65, 130, 1, 64, 0, 70), (-1, 0, 0, 0, 0, 0)),
    "turns": Forest((3, 66, 2, 64, 1), (-1, 0, 1, 2, 3)),
    "two groups": Forest((64, 3, 70, 30, 1, 2, 5), (-1, 0, 0, -1, 3, 3, 5)),
    "equal leaves": Forest((65, *[3] * 5), (-1, *[0] * 5)),  # a CTA walks several items
    "no tree": Forest((70, 3, 0, 128), (-1, -1, -1, -1)),
}


def tree_case(
    forest: Forest,
    dtype: torch.dtype,
    heads: tuple[int, int] = (1, 2),
    sizes: tuple[int, int] = (128, 128),
    final: bool = True,
    gate: str = "model",
    device: str = "cpu",
    seed: int = 0,
    **options: Any,
) -> TreeCase:
    torch.manual_seed(seed)
    (H, HV), (K, V), T = heads, sizes, forest.num_tokens
    layout = forest.layout
    bounds = [*layout.nodes[:, 0].tolist(), layout.num_tokens]
    tables = tree_tables(bounds, parents(layout.nodes), final)
    q, k = (keys("unit", T, H, K).to(device, dtype)[None] for _ in "qk")
    v, do = (torch.randn(1, T, HV, V).to(device, dtype) for _ in range(2))
    g, beta = gates(gate, T, HV).to(device)[None], torch.rand(1, T, HV).to(device)
    flags = Options(is_train=True, output_final_state=final, **options)
    dfinal = None
    if final:
        dfinal = torch.randn(len(tables.leaves), HV, *flags.state_size(K, V)).to(device)
    there = DeltaTables(*tables[:ON_HOST], *(x.to(device) for x in tables[ON_HOST:]))
    return TreeCase(Call(q, k, v, g, beta, 0.7 * K**-0.5), there, flags, do, dfinal)


def exact(x: TreeCase, operand_dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Results and gradients in fp64, from what the kernels are given, by the reference's levels.

    With an operand_dtype they are rounded as in kernels, node by node.
    """
    q, k, v, g, beta = (t.cpu().double() for t in x.call[:5])
    nodes, do = x.tables.nodes.long().cpu(), x.do.cpu().double()
    v_first, scale, n = x.options.state_v_first, x.call.scale, len(nodes)
    states = q.new_zeros(n, *v.shape[2:3], q.shape[-1], v.shape[-1])
    fwd, ends = [], torch.zeros_like(states)
    for node, (a, b, parent, _) in enumerate(nodes.tolist()):
        start = None if parent < 0 else states[parent][None]
        at = slice(None), slice(a, b)
        fwd.append(gdn.chunked(
            q[at], k[at], v[at], g[at], beta[at], scale, start, operand_dtype=operand_dtype
        ))  # fmt: skip
        states[node] = fwd[node].final_state[0]
    if x.dfinal is not None:
        dfinal = x.dfinal.cpu().double()
        ends[x.tables.leaves.long().cpu()] = dfinal.mT if v_first else dfinal
    back: list[Any] = [None] * n
    for node in reversed(range(n)):
        a, b, parent, _ = nodes[node].tolist()
        at = slice(None), slice(a, b)
        start = torch.zeros_like(states[:1]) if parent < 0 else states[parent][None]
        back[node] = gdn.chunked_backward(
            q[at], k[at], v[at], fwd[node].g_cum, beta[at], fwd[node].A, do[at], ends[node][None],
            scale, start, operand_dtype=operand_dtype,
        )  # fmt: skip
        if parent >= 0:
            ends[parent] += back[node].dh0[0]

    def joined(parts: list[Any], name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], 1)

    rows = nodes[:, 3]
    kept = states[[int((rows == row).nonzero()) for row in range(int(rows.max()) + 1)]]
    forward = joined(fwd, "o"), kept.mT if v_first else kept, joined(fwd, "g_cum")
    names = ("dq", "dk", "dv", "dbeta", "dg")
    return forward, {name: joined(back, name) for name in names}


def check(x: TreeCase, done: TreeForward, grads: GdnBackward) -> None:
    """Every result and every gradient."""
    (want, want_grads), dtype = exact(x), x.call.q.dtype
    rounded, rounded_grads = exact(x, dtype)
    names = "o", "states", "g_cum"
    got = done.o, done.states, done.g_cum
    for name, a, b, c in zip(names, got, want, rounded, strict=True):
        limit = FORWARD_RATIO * relative_l2(c.to(a.dtype), b) + FP32
        assert_close(name, a.cpu(), b, limit)
    for name, b in want_grads.items():
        a, c = getattr(grads, name), rounded_grads[name]
        few = name in ("dg", "dbeta")
        limit = (FEW_RATIO if few else BACKWARD_RATIO) * relative_l2(c.to(a.dtype), b) + FP32
        if name == "dg":
            limit = max(limit, DG_UNITS * torch.finfo(dtype).eps)
        assert_close(name, a.cpu(), b, limit, limit if few else None)
