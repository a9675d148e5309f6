"""Calls of the CUDA backward of shared-prompt attention, and what their results must be."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.dualkv.ops import SharedBackward
from reference import dualkv
from tests.compare import assert_close
from tests.dualkv_forward_check import Call, wanted

# relative L2 error: P, dS, o and the gradients are rounded to the dtype
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


class Upstream(NamedTuple):
    """What a backward is given besides the forward's arguments."""

    do: Tensor
    o: Tensor
    lse2: Tensor
    dlse: Tensor | None


def upstream(x: Call, with_dlse: bool = True) -> Upstream:
    """Random gradients, and results as good as the dtype allows."""
    made = wanted(x)
    dlse = torch.randn_like(made.lse).float() if with_dlse else None
    return Upstream(
        torch.randn_like(x.q), made.o.to(x.q.dtype), (made.lse / math.log(2)).float(), dlse
    )


def check(x: Call, given: Upstream, got: SharedBackward) -> None:
    want = exact(x, given)
    for name, a, b in zip(SharedBackward._fields, got, want, strict=True):
        assert a.dtype == x.q.dtype
        assert_close(name, a, b, LIMITS[x.q.dtype])


def exact(x: Call, given: Upstream) -> dualkv.Backward:
    """In fp64, of what the backward is given: o is rounded, which alone can cost more than it."""
    made = wanted(x)
    q, k, v, do, o = (t.double() for t in (x.q, x.k, x.v, given.do, given.o))
    return dualkv.by_nodes_backward(
        do, q, k, v, o, made.lse, given.dlse, x.layout.nodes, x.scale, x.q_shift
    )
