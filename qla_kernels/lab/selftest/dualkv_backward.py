"""Calls of the CUDA backward of shared-prompt attention, and what their results must be."""

import math
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from qla_kernels.attn.launch import row_stats
from qla_kernels.dualkv import launch, tables
from qla_kernels.dualkv.ops import SharedBackward
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.lab.selftest.dualkv_forward import (
    GROUPS,
    INPUTS,
    LARGE,
    Given,
    SharedCall,
    call,
    wanted,
)
from qla_kernels.runtime.cpu import reference

# relative L2 error: P, dS, o and the gradients are rounded to the dtype
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


class Upstream(NamedTuple):
    """What a backward is given besides the forward's arguments."""

    do: Tensor
    o: Tensor
    lse2: Tensor
    dlse: Tensor | None


def upstream(x: SharedCall, with_dlse: bool = True) -> Upstream:
    """Returns random gradients, and results as good as the dtype allows."""
    made = wanted(x)
    dlse = torch.randn_like(made.lse).float() if with_dlse else None
    return Upstream(
        torch.randn_like(x.q), made.o.to(x.q.dtype), (made.lse / math.log(2)).float(), dlse
    )


def backward(x: SharedCall, given: Upstream, deterministic: bool) -> SharedBackward:
    """Launches the backward: one pass over the scores, or two if `deterministic`."""
    q, k, v, work, scale, shift = x.arguments()
    return launch.dualkv_bwd(
        given.do, q, k, v, given.o, given.lse2, given.dlse, work, scale, shift, deterministic
    )


def check(x: SharedCall, given: Upstream, got: SharedBackward) -> None:
    """Compares the gradients with fp64."""
    want = exact(x, given)
    for name, a, b in zip(SharedBackward._fields, got, want, strict=True):
        assert a.dtype == x.q.dtype
        assert_close(name, a, b, LIMITS[x.q.dtype])


def exact(x: SharedCall, given: Upstream) -> Any:
    """Returns gradients in fp64 for the given o, whose rounding can cost more than the backward."""
    made = wanted(x)
    q, k, v, do, o = (t.double() for t in (x.q, x.k, x.v, given.do, given.o))
    return reference().dualkv.by_nodes_backward(
        do, q, k, v, o, made.lse, given.dlse, x.layout.nodes, x.scale, x.q_shift
    )


def _checked(x: SharedCall, device: str, deterministic: bool, with_dlse: bool = True) -> None:
    given = upstream(x, with_dlse)
    check(x, given, to(backward(to(x, device), to(given, device), deterministic), "cpu"))


def _one_pass(variant: Any, given: Given, device: str) -> None:
    x = call(*given, dtype=dtype_of(variant))
    _checked(x, device, False, with_dlse=given[0] != GROUPS["short"])


def _two_passes(variant: Any, given: Given, device: str) -> None:
    x = call(*given, size=variant.D, dtype=dtype_of(variant))
    _checked(x, device, True, with_dlse=given[0] != GROUPS["short"])


def _in_parts(variant: Any, shortest: str, device: str) -> None:
    """Checks sums of parts: as close to the truth as those of the whole."""
    with mock.patch.object(tables, shortest, 3):
        size = 256 if variant.wide else 128
        x = call([(150, [70, 3]), (20, [9])], (2, 4), size, dtype_of(variant))
        splits = tables.Tables(*x.arguments()[3]).split
        assert splits[:, 3].max() > 1, "nothing is split; the case is wrong"
        _checked(x, device, False)


def _delta(variant: Any, base2: bool, device: str) -> None:
    for size in (256,) if variant.wide else (64, 128):
        _rows_checked(size, dtype_of(variant), base2, device)


def _rows_checked(size: int, dtype: torch.dtype, base2: bool, device: str) -> None:
    """Checks two batches of 13 rows: padding, a row that saw no key, slices of a projection."""
    o = torch.randn(2, 13, 3, size).to(dtype)
    room = torch.randn(2, 3, 13, 3 * size).to(dtype)
    lse, dlse = torch.randn(2, 13, 3), torch.randn(2, 3, 13)
    lse[1, 5, 2] = -torch.inf

    def stats(dlse: Tensor | None) -> Tensor:
        do = room.to(device)[..., size : 2 * size].transpose(1, 2)
        on_device = (o.to(device), do, lse.to(device).transpose(1, 2), dlse)
        return row_stats(*on_device, base2=base2).cpu()

    found, without = stats(dlse.to(device)), stats(None)
    assert found.shape == (2, 3, 2, 16)
    lse = lse.transpose(1, 2)
    lse2 = torch.where(lse.isinf(), torch.inf, lse if base2 else lse / math.log(2))
    torch.testing.assert_close(found[:, :, 0, :13], lse2)
    do = room[..., size : 2 * size].transpose(1, 2)
    delta = (o.double() * do.double()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(found[:, :, 1, :13].double(), delta - dlse, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(without[:, :, 1, :13].double(), delta, atol=2e-5, rtol=1e-5)
    assert (found[:, :, 0, 13:] == torch.inf).all(), "P of padding is not 0"
    assert not found[:, :, 1, 13:].any(), "delta of padding is not 0"


# Building a kernel takes the emulated tier longer than all its calls: each in one variant. The
# static tier assembles the others, the device tier calls them.
CASES = (
    Cases(("attn.delta",), _delta, [True, False], emulated=("bf16", "fp16", "bf16-wide")),
    Cases(("dualkv.bwd", "dualkv.dq_cast"), _one_pass, INPUTS, LARGE, emulated=("bf16",)),
    Cases(("dualkv.bwd_dkv", "dualkv.bwd_dq"), _two_passes, INPUTS, LARGE, emulated=("fp16-d64",)),
    Cases(
        ("dualkv.bwd_dkv_wide", "dualkv.bwd_dq"),
        _two_passes,
        [(GROUPS[name], (1, 4)) for name in ("edges", "short")],  # its tiles have 64 keys
        LARGE,
        emulated=("bf16-d256",),
    ),
    Cases(
        ("dualkv.dkv_combine",),
        _in_parts,
        ["SHORTEST_PART", "SHORTEST_CUT"],
        emulated=("bf16", "bf16-wide"),
    ),
)
