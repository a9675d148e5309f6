"""Compares collective calls between the hosts of all ranks, before tensors are exchanged.

The facts of a call are its arguments: shapes, dtypes, settings. When facts occur for the first
time, the ranks compare a digest of 56 bits, and the facts' text if digests differ. Later calls with
the same facts are not compared at once, because a host that runs ahead of its GPU must not wait for
other hosts. This leaves a gap: facts A and B are both known, one rank calls with A and another rank
with B. Three remedies were considered:

    a digest in tensors that travel   Rejected: not every call sends small tensors. To make one,
                                      compare it on the device and poison the result would take four
                                      launches a call.
    an exchange of hosts each call    Rejected: every host would wait for the slowest host at each
                                      layer.
    a running hash of all calls       Taken. It costs one multiplication a call. Ranks compare it
                                      along with every digest and, by a message of its own, every
                                      LOOK_BACK calls. They wait for that message LOOK_BACK calls
                                      later, when it has long arrived.

Thus a mix of A and B raises RingError on every rank when facts next are new, or after 2 LOOK_BACK
calls at the latest. Results in between are wrong. Every call is compared before it runs if hosts
wait for each transfer anyway, as with CPU tensors over gloo, and on GPUs under QLA_CHECK=1.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels.runtime.errors import need
from qla_kernels.runtime.ranks import RankError, expect_equal, lost_ranks_explained

GROUPS = "RingGroups"
KNOWN = 1024  # facts whose digests are kept: the oldest are compared again, on every rank alike
LOOK_BACK = 64  # calls

P = ParamSpec("P")
R = TypeVar("R")


RingError = RankError


def as_ring_error(what: str) -> AbstractContextManager[None]:
    """Turns torch's error of a transfer inside into a RingError, which begins with `what`."""
    return lost_ranks_explained(GROUPS, what)


class Agreement:
    """Compares calls between the ranks of a ring, and remembers the facts they agreed on.

    The process group `side` carries comparisons of facts, and `behind` those of past calls.
    """

    def __init__(self, side: dist.ProcessGroup, behind: dist.ProcessGroup) -> None:
        self._side, self._behind = side, behind
        self._forget()

    def _forget(self) -> None:
        self._known: dict[object, int] = {}
        self._history, self._unseen = 0, 0
        self._posted: tuple[dist.Work, Tensor] | None = None

    def check(self, facts: Mapping[str, object], again: bool) -> None:
        """Compares facts with the other ranks if they are new or if `again`, else later.

        Facts are hashable and compared by equality; the first one is the call's name. Raises
        ValueError if facts differ between ranks, and RingError if earlier calls differed or a rank
        is lost.
        """
        values = tuple(facts.values())
        digest = self._known.get(values)
        if digest is None:
            digest = _digest(facts)
            self._compare(facts, digest)
            if len(self._known) >= KNOWN:
                del self._known[next(iter(self._known))]
            self._known[values] = digest
        elif again:
            self._compare(facts, digest)
        else:
            self._unseen += 1
        self._history = (self._history * 1000003 + digest) & (2**63 - 1)
        if self._unseen == LOOK_BACK:
            self._look_back(values[0])

    def _compare(self, facts: Mapping[str, object], digest: int) -> None:
        with as_ring_error("ranks could not compare their arguments"):
            work, everyones = _gathered(self._side, self._history, digest)
            work.wait()
        if (everyones[:, 1] != digest).any():
            self._forget()  # on every rank, so that the group is as good as before
            self._explain(facts)
        self._require_one_past(facts, everyones)

    def _explain(self, facts: Mapping[str, object]) -> None:
        everyone: list[Any] = [None] * self._side.size()
        with as_ring_error("ranks could not compare their arguments"):
            dist.all_gather_object(everyone, _text(facts), group=self._side)
        expect_equal(everyone[0][0][1], [dict(theirs) for theirs in everyone])

    def _look_back(self, op: object) -> None:
        if self._posted is not None:
            work, everyones = self._posted
            with as_ring_error("ranks could not compare their past calls"):
                work.wait()
            self._require_one_past({"the call": op}, everyones)
        self._posted = _gathered(self._behind, self._history, 0)
        self._unseen = 0

    def _require_one_past(self, facts: Mapping[str, object], everyones: Tensor) -> None:
        histories = everyones[:, 0].tolist()
        odd = [rank for rank, history in enumerate(histories) if history != histories[0]]
        if odd:
            self._forget()
            got = f"rank {odd[0]} and rank 0 made different calls before this one"
            fix = "discard the results since the last comparison; QLA_CHECK=1 compares every call"
            raise RankError(need(str(facts["the call"]), got, "the same calls on every rank", fix))


def _gathered(group: dist.ProcessGroup, *mine: int) -> tuple[dist.Work, Tensor]:
    everyones = torch.empty(group.size(), len(mine), dtype=torch.int64, device="cpu")
    sent = torch.tensor(mine, dtype=torch.int64, device="cpu")
    return group.allgather_into_tensor_coalesced([everyones.view(-1)], [sent]), everyones


def _text(facts: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(name, str(fact)) for name, fact in facts.items()]


def _digest(facts: Mapping[str, object]) -> int:
    return int.from_bytes(hashlib.sha256(repr(_text(facts)).encode()).digest()[:7], "big")


class TensorFacts(NamedTuple):
    """The dtype, shape and device type of a tensor, as a fact to compare."""

    dtype: object
    shape: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.shape)} on {self.device}"


def tensor_facts(x: object) -> TensorFacts | str:
    """Returns the TensorFacts of a tensor, or for any other object a text with its type."""
    if isinstance(x, Tensor):
        return TensorFacts(x.dtype, x.shape, x.device.type)
    return f"of type {type(x).__name__}"


def ends_a_graph(collective: Callable[P, R]) -> Callable[P, R]:
    """Decorates a collective function so that torch.compile calls it outside of its graphs.

    torch.compile cannot trace the comparison between hosts, nor the transfers.
    """
    outside: list[Callable[P, R]] = []

    @functools.wraps(collective)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return collective(*args, **options)
        if not outside:  # not before: it imports the compiler
            why = f"{collective.__name__} is collective"
            disabled = torch.compiler.disable(collective, reason=why)  # type: ignore[no-untyped-call]
            outside.append(disabled)
        return outside[0](*args, **options)

    return call
