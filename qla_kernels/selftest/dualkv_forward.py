"""The case of the forward kernel of shared-prompt attention."""

import math
from collections.abc import Callable

import torch

from qla_kernels.cpu import reference
from qla_kernels.dualkv.shapes import HEAD_SIZES
from qla_kernels.selftest.cases import Result, error_of, label

GROUPS = ((70, (33, 5)), (1, (40,)))  # tokens of a prompt and of its responses


def _fwd() -> list[Result]:
    from qla_kernels.dualkv import SharedLayout, ops

    layout = SharedLayout.from_lengths(GROUPS, device="cuda")
    random = torch.Generator().manual_seed(0)
    results = []
    for dtype, limit in ((torch.bfloat16, 5e-3), (torch.float16, 8e-4)):
        for D in HEAD_SIZES:
            q, k, v = (
                torch.randn(layout.num_tokens, heads, D, generator=random).to(dtype)
                for heads in (8, 2, 2)
            )
            exact = (x.double() for x in (q, k, v))
            want = reference().dualkv.by_nodes(*exact, layout.nodes, D**-0.5, 0)
            on_gpu = (x.cuda() for x in (q, k, v))
            o, lse2 = ops.dualkv_fwd(*on_gpu, layout.prepare(8, 2, 0, D), D**-0.5, 0)
            name = label("dualkv.fwd", dtype, f", D={D}")
            results.append(Result(f"{name} o", error_of(o, want.o), limit))
            results.append(Result(f"{name} lse", error_of(lse2 * math.log(2), want.lse), 1e-5))
    return results


KERNELS: dict[str, Callable[[], list[Result]]] = {"dualkv.fwd": _fwd}
