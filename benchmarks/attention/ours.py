"""Attention over shared prompts, and under vertical-slash masks, by us.

What is timed is the operator under the public function, on tables or lines that a model makes once
for all layers, or for a layer once for forward and backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qla_kernels import dualkv, sparse_ring
from qla_kernels.runtime.errors import Unsupported

from ..harness.adapters import Call, Implementation, Outputs, backward_of
from ..hybrid.layers import packed
from ..hybrid.mixing import Attends
from .problem import AttentionInputs, outputs, recall
from .workloads import WIDE, DecoderLayer, SharedPrompts, VerticalSlash

ATTENTION_ALONE = "it is timed as attention alone"
Unary = Callable[[Tensor], Tensor]


def low_level(
    qkv: Sequence[Tensor], do: Tensor | None, forward: Callable[[], Any],
    backward: Callable[..., Any], public: Callable[..., Tensor],
    once: Unary = lambda x: x, summed: Unary = lambda x: x,
) -> Call:  # fmt: skip
    """By functions of one direction, and as a model calls `public`; a backward has run its forward.

    `once` and `summed` give o, and gradients, the rows that a truth has.
    """
    if do is None:
        return Call(forward, lambda raw: outputs(once(raw[0])), lambda: lambda: public(*qkv))
    saved = forward()
    collect = lambda raw: outputs(*map(summed, raw[:3]))  # noqa: E731
    return Call(lambda: backward(*saved), collect, lambda: backward_of(public, qkv, do))


class OursDualKV(Implementation):
    """`deterministic`: gradients that are the same bits each time."""

    name, label, distribution = "ours", "ours", "qla-kernels"
    module, needs_cuda, deterministic = "qla_kernels.dualkv", False, False

    def inapplicable(self, workload: SharedPrompts) -> str | None:
        wide = workload.head_dim == WIDE and workload.direction == "bwd"
        always = "gradients always are" if wide and self.deterministic else None
        return always or super().inapplicable(workload)

    def prepare(self, workload: SharedPrompts, inputs: Any) -> Call:
        if not isinstance(workload, DecoderLayer):
            _require(dualkv.refusal(*inputs[:3]))
        layout = dualkv.SharedLayout.from_lengths(workload.groups, device=inputs[0].device)
        kv_heads, heads = workload.heads
        tables: Any = (layout.nodes,)
        if inputs[0].is_cuda:
            tables = layout.prepare(heads, kv_heads, head_dim=workload.head_dim)
        attend = partial(dualkv.shared_prefix_attention, layout=layout)
        if isinstance(workload, DecoderLayer):
            return packed(workload, inputs, Attends(attend))
        q, k, v, do = inputs[:4]
        scale = workload.head_dim**-0.5

        def backward(o: Tensor, lse2: Tensor) -> Any:
            call = do, q, k, v, o, lse2, None, tables, scale, 0, self.deterministic
            return dualkv.ops.dualkv_bwd(*call)

        forward = partial(dualkv.ops.dualkv_fwd, q, k, v, tables, scale, 0)
        call = low_level((q, k, v), do, forward, backward, attend)
        return replace(call, eager=None) if self.deterministic else call  # no public function does


class OursSparse(Implementation):
    name, label, distribution = "ours", "ours", "qla-kernels"
    module, needs_cuda = "qla_kernels.sparse_ring", False

    def prepare(self, workload: VerticalSlash, inputs: AttentionInputs) -> Call:
        q, k, _ = qkv = [x[None] for x in inputs[:3]]
        _require(sparse_ring.refusal(*qkv))
        settings, ops = (workload.tokens, workload.head_dim**-0.5), sparse_ring.ops
        if workload.direction == "index":
            budget = sparse_ring.VerticalSlash()
            run = partial(ops.vertical_slash_index, q, k, *settings, *astuple(budget))
            public = partial(sparse_ring.build_index, q, k, budget)
            return Call(run, lambda raw: _recall(inputs, raw), lambda: public)
        diagonals, columns = workload.mask()
        given = sparse_ring.FixedVerticalSlash(columns, diagonals)
        index = sparse_ring.build_index(q, k, sparse_ring.Dense() if workload.dense else given)
        lines, do = (*index[:3], *settings), None if inputs.do is None else inputs.do[None]
        return low_level(
            qkv, do, partial(ops.vertical_slash_fwd, *qkv, *lines),
            lambda *saved: ops.vertical_slash_bwd(*qkv, *lines, *saved, do, None),
            lambda *qkv: torch.as_tensor(sparse_ring.sparse_attention(*qkv, index=index)),
            once=lambda x: x[0], summed=lambda x: x[0],
        )  # fmt: skip


def _recall(inputs: AttentionInputs, raw: Any) -> Outputs:
    """Of the lines as they are, not as the index says of itself."""
    v_idx, _, d_bits, _ = (x[0] for x in raw)
    columns = torch.zeros(len(v_idx), len(inputs.q) + 1, dtype=torch.bool, device=v_idx.device)
    bits = d_bits[..., None] >> torch.arange(32, device=v_idx.device) & 1
    return recall(inputs, columns.scatter(-1, v_idx.long(), True)[:, :-1], bits.flatten(1).bool())


def _require(reason: str | None) -> None:
    if reason is not None:
        raise Unsupported(reason)


def ours(family: str) -> list[Implementation]:
    if family == "sparse_ring":
        return [OursSparse()]
    lacks = {"layer": ATTENTION_ALONE, "fwd": "results always are"}
    repeatable = {"name": "ours_deterministic", "label": "ours, deterministic", "lacks": lacks}
    return [OursDualKV(), OursDualKV(deterministic=True, **repeatable)]
