"""Defines RingCall, the arguments of a collective call on one rank: checks and compares them.

A rank with bad arguments must not leave the other ranks waiting. Therefore an error is not raised
at once: the ranks first compare their arguments and errors, and then all raise.
"""

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.arguments import flag
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.derivatives import refuse_forward_mode
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.sparse_ring.agreement import tensor_facts
from qla_kernels.sparse_ring.groups import RingGroups
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.patterns import Dense, FixedVerticalSlash, Pattern, VerticalSlash
from qla_kernels.sparse_ring.validate import (
    BUILD_OP,
    check_lines,
    check_ring,
    check_tensors,
    defaults,
    refusal,
)


class RingCall(NamedTuple):
    """The arguments of a collective call on one rank; any of them may be of a wrong type."""

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout | None
    world: int
    pattern: Pattern | None
    lines: VSIndex | None  # the `index` argument
    seqlen: int | None
    scale: float | None
    schedule: str
    chunks_per_launch: int | None
    return_lse: bool = False
    return_index: bool = False
    keep_gathered: bool = False

    def agreed(self, group: RingGroups) -> tuple[int, float]:
        """Checks the call on all ranks, and returns seqlen and scale with defaults filled in.

        Raises on every rank if any rank found an error, or if arguments differ between ranks.
        """
        problem, seqlen, scale = None, self.seqlen, self.scale
        try:
            self._check()
        except Exception as error:
            problem = error
        with suppress(Exception):
            _, seqlen, scale = self._defaults()
        waits = not getattr(self.q, "is_cuda", False)  # the host waits for transfers anyway
        group.agree(self.op, self._facts(seqlen, scale), problem, again=waits or checks_contents())
        assert seqlen is not None, "agree raised, or _defaults returned it"
        assert scale is not None, "agree raised, or _defaults returned it"
        return seqlen, scale

    def _check(self) -> None:
        """Raises if an argument of this rank is wrong, or if the call is refused."""
        check_ring(self.op, self.layout, self.world, self.schedule, self.chunks_per_launch)
        flag(self.op, "return_lse", self.return_lse)
        flag(self.op, "return_index", self.return_index)
        flag(self.op, "keep_gathered", self.keep_gathered)
        check_tensors(self.op, self.q, self.k, self.v)
        if self.op != BUILD_OP:  # an index is a constant
            refuse_forward_mode(self.op, self.q, self.k, self.v)
        T, seqlen, scale = self._defaults()
        check_lines(self.op, self.q, T, seqlen, self.pattern, self.lines)
        if self.lines is not None and checks_contents():
            self.lines.check(self.op)
        reason = refusal(self.q, self.k, self.v, world=self.world, scale=scale, op=self.op)
        if reason is not None:
            raise Unsupported(reason)

    def _defaults(self) -> tuple[int, int, float]:
        return defaults(self.op, self.q, self.world, self.seqlen, self.scale)

    def _facts(self, seqlen: int | None, scale: float | None) -> dict[str, object]:
        """Returns the arguments that have to be the same on every rank, by name.

        They are hashed at every call, so they are left as objects; text is made only on demand.
        """
        tensors = (self.q, self.k, self.v)
        wanted = torch.is_grad_enabled() and any(getattr(x, "requires_grad", 0) for x in tensors)
        return {
            **dict(zip("qkv", map(tensor_facts, tensors), strict=True)),
            "layout": _comparable(self.layout, Layout),
            "pattern": _comparable(self.pattern, VerticalSlash | Dense),
            "seqlen": _comparable(seqlen, int | None),
            "scale": _comparable(scale, float | None),
            "schedule": _comparable(self.schedule, str),
            "chunks_per_launch": _comparable(self.chunks_per_launch, int | None),
            "keep_gathered": _comparable(self.keep_gathered, bool),
            "index": self.lines.described(checks_contents())
            if isinstance(self.lines, VSIndex)
            else None,
            "requires_grad": wanted,
        }


def _comparable(x: object, simple: Any) -> object:
    """Returns x if it is of the type `simple`, which is quick to hash, else a text for it."""
    if isinstance(x, FixedVerticalSlash):
        return x.described
    return x if isinstance(x, simple) else f"{x} of type {type(x).__name__}"
