"""Cases of each backward kernel of shared-prompt attention, and of attn.delta."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qla_kernels.cpu import reference
from qla_kernels.dualkv.heuristics import one_pass
from qla_kernels.dualkv.shapes import HEAD_SIZES
from qla_kernels.selftest.cases import Result, error_of, label

GROUPS = ((70, (33, 5)), (1, (40,)))  # tokens of a prompt and of its responses
LONG = ((130, (400,)),)  # a prompt whose queries are cut into parts
WIDE = (256,)  # head sizes of bwd_dkv_wide
NARROW = tuple(D for D in HEAD_SIZES if D not in WIDE)
ONE_PASS = tuple(D for D in HEAD_SIZES if one_pass(deterministic=False, head_dim=D))
LIMITS = ((torch.bfloat16, 4e-3), (torch.float16, 6e-4))


@functools.cache
def _gradients(
    groups: Any, dtype: torch.dtype, D: int, deterministic: bool
) -> tuple[dict[str, Tensor], Any]:
    """Returns the GPU's dq, dk, dv for random tensors, by name, and the reference's in fp64."""
    from qla_kernels.dualkv import SharedLayout, ops

    layout = SharedLayout.from_lengths(groups, device="cuda")
    random = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(layout.num_tokens, heads, D, generator=random).to(dtype)
        for heads in (8, 2, 2, 8)
    )
    exact = [x.double() for x in (q, k, v)]
    made = reference().dualkv.by_nodes(*exact, layout.nodes, D**-0.5, 0)
    o, lse2 = made.o.to(dtype), (made.lse / math.log(2)).float()
    want = reference().dualkv.by_nodes_backward(
        do.double(), *exact, o.double(), made.lse, None, layout.nodes, D**-0.5, 0
    )
    on_gpu = (x.cuda() for x in (do, q, k, v, o, lse2))
    tables = layout.prepare(8, 2, 0, D)
    got = ops.dualkv_bwd(*on_gpu, None, tables, D**-0.5, 0, deterministic)
    return dict(zip(("dq", "dk", "dv"), got, strict=True)), want


def _check(
    kernel: str, groups: Any, *names: str, sizes: Sequence[int] = HEAD_SIZES, in_one: bool = False
) -> list[Result]:
    results = []
    for dtype, limit in LIMITS:
        for D in sizes:
            got, want = _gradients(groups, dtype, D, not in_one)
            for name in names:
                error = error_of(got[name], getattr(want, name))
                results.append(Result(label(kernel, dtype, f", D={D} {name}"), error, limit))
    return results


def _delta() -> list[Result]:
    from qla_kernels.attn.kernels.delta import DELTA, LSE2
    from qla_kernels.attn.launch import row_stats

    random = torch.Generator().manual_seed(0)
    lse = torch.randn(2, 3, 13, generator=random)
    results = []
    for dtype, D in itertools.product((torch.bfloat16, torch.float16), (128, 256)):
        o, do = (torch.randn(2, 13, 3, D, generator=random).to(dtype) for _ in range(2))
        stats = row_stats(o.cuda(), do.cuda(), lse.cuda(), lse.cuda(), base2=False)[..., :13]
        want = (o.double() * do.double()).sum(-1).transpose(1, 2) - lse
        name = label("attn.delta", dtype, f", D={D}")
        results.append(Result(f"{name} delta", error_of(stats[:, :, DELTA], want), 1e-6))
        lse2 = lse.double() / math.log(2)
        results.append(Result(f"{name} lse2", error_of(stats[:, :, LSE2], lse2), 1e-6))
    return results


KERNELS: dict[str, Callable[[], list[Result]]] = {
    "attn.delta": _delta,
    "dualkv.bwd_dq": lambda: _check("dualkv.bwd_dq", GROUPS, "dq"),
    "dualkv.bwd_dkv": lambda: _check("dualkv.bwd_dkv", GROUPS, "dk", "dv", sizes=NARROW),
    "dualkv.bwd_dkv_wide": lambda: _check("dualkv.bwd_dkv_wide", GROUPS, "dk", "dv", sizes=WIDE),
    "dualkv.bwd": lambda: _check("dualkv.bwd", GROUPS, "dk", "dv", sizes=ONE_PASS, in_one=True),
    "dualkv.dq_cast": lambda: _check("dualkv.dq_cast", GROUPS, "dq", sizes=ONE_PASS, in_one=True),
    "dualkv.dkv_combine": lambda: _check("dualkv.dkv_combine", LONG, "dk", "dv"),
}
