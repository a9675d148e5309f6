"""`SharedLayout`: which packed token sees which, in a batch whose sequences share their beginnings.

Tokens are packed depth first: each group's prompt, then its responses; in general each node of a
prefix tree, then its children. A key is visible to the queries from its own token to `tout`, the
end of its node's subtree. The layout is computed from lengths, which the host knows, so nothing
here waits for a device.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels import device
from qla_kernels.device_tables import Kept
from qla_kernels.dualkv import tables
from qla_kernels.dualkv.tables import Tables
from qla_kernels.errors import need


@dataclass(frozen=True, eq=False)
class SharedLayout:
    """Visibility among the packed tokens 0..T-1: query q sees key k if k <= q < tout[k].

    It is a dataclass and not a tuple: wrappers that move a model's arguments to its GPU move the
    tensors inside tuples, and `nodes` has to stay on the host.
    """

    tout: Tensor  # int32 [T]
    nodes: Tensor  # int32 [n, 3], on the CPU: first token, one past the last, tout; none is empty
    prepared: dict[tuple[int, int, int], "Prepared"] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def from_lengths(
        cls,
        groups: Iterable[tuple[int, Sequence[int]]],
        *,
        pad_to: int | None = None,
        device: torch.device | str | None = None,
    ) -> "SharedLayout":
        """Returns the layout of groups (prompt tokens, tokens of each response); lengths may be 0.

        Args:
            groups: in packed order. A group without responses is a sequence of its prompt alone.
            pad_to: appends padding tokens up to this total; they see only each other.
            device: device of `tout`; the CPU if None.
        """
        lengths: list[int] = []
        parents: list[int] = []
        for prompt, responses in groups:
            parents += [-1, *[len(lengths)] * len(responses)]
            lengths += [prompt, *responses]
        return cls.from_forest(lengths, parents, pad_to=pad_to, device=device)

    @classmethod
    def from_forest(
        cls,
        lengths: Sequence[int],
        parents: Sequence[int],
        *,
        pad_to: int | None = None,
        device: torch.device | str | None = None,
    ) -> "SharedLayout":
        """Returns the layout of a forest of nodes in depth-first order.

        `lengths` are each node's tokens, `parents` each node's parent index, or -1 for a root.
        `pad_to` and `device` are as in `from_lengths`. Raises ValueError if the order is not depth
        first, a length is negative, or pad_to is less than the tokens.
        """
        lengths, parents = _integers("lengths", lengths), _integers("parents", parents)
        _check_forest(lengths, parents)
        lengths, parents = _padded(lengths, parents, pad_to)
        ends = whole([0, *lengths]).cumsum(0)
        tout: list[int] = ends[1:].tolist()
        for node in reversed(range(len(lengths))):
            if parents[node] >= 0:  # the last child, seen first, has the latest end
                tout[parents[node]] = max(tout[parents[node]], tout[node])
        spans = torch.stack([ends[:-1], ends[1:], whole(tout)], 1).int()
        spans = spans[spans[:, 0] < spans[:, 1]]
        per_token = spans[:, 2].repeat_interleave(spans[:, 1] - spans[:, 0])
        return cls(moved(per_token, device), spans)

    @property
    def num_tokens(self) -> int:
        return self.tout.shape[0]

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs per head: tokens k..tout[k]-1 see key k."""
        first, end, tout = self.nodes.long().unbind(1)
        return int(((end - first) * (2 * tout - first - end + 1)).sum()) // 2

    def prepare(self, num_heads: int, kv_heads: int, q_shift: int = 0) -> Tables:
        """Returns the kernels' tables for these head counts; the first call builds and copies them.

        All layers and the backward share the tables. The copy to the GPU does not block the host,
        and nothing is read back. A call on another stream makes that stream wait for the copy;
        compiled code does not. Raises ValueError if the tables would have to be built inside
        compiled code or during the capture of a CUDA graph: call `prepare` before that, on the same
        stream.
        """
        key = num_heads, kv_heads, q_shift
        found = self.prepared.get(key)
        if found is None:
            found = self.prepared[key] = self._built(key)
        if torch.compiler.is_compiling() or found.gpu < 0:
            return found.tables
        if found.by_default and device.stream(found.gpu) == device.DEFAULT_STREAM:
            return found.tables  # nearly every call, and host time counts
        with device.of(self.tout):
            return found.kept.here()

    def _built(self, key: tuple[int, int, int]) -> "Prepared":
        if torch.compiler.is_compiling():
            raise ValueError(_not_prepared(key, "what is compiled"))
        with device.of(self.tout):
            if self.tout.is_cuda and device.capturing():
                raise ValueError(_not_prepared(key, "the capture of a CUDA graph"))
            built = tables.build(self.nodes, *key)
            there = moved(tables.one_buffer(built), self.tout.device)
            found, gpu = tables.views(there, built), there.get_device()
            by_default = gpu >= 0 and device.stream(gpu) == device.DEFAULT_STREAM
            return Prepared(found, Kept(found, there), gpu, by_default)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles leave the tables out; they are built again when needed."""
        return SharedLayout, (self.tout, self.nodes)

    def to(self, device: torch.device | str) -> "SharedLayout":
        return SharedLayout(moved(self.tout, device), self.nodes)


class Prepared(NamedTuple):
    """Tables of a layout, with the stream and GPU on which they were filled."""

    tables: Tables
    kept: Kept[Tables]
    gpu: int  # -1 for the CPU
    by_default: bool  # on the default stream


def _not_prepared(key: tuple[int, int, int], before: str) -> str:
    heads = ", ".join(map(str, key if key[2] else key[:2]))
    fix = f"call layout.prepare({heads}) before {before}"
    return need("SharedLayout", "no tables yet", "them, which are built on the host", fix)


def whole(numbers: Iterable[int]) -> Tensor:
    """Returns an int64 CPU tensor of the numbers, whatever torch's default device is."""
    return torch.tensor(list(numbers), dtype=torch.long, device="cpu")


def run(first: int, end: int) -> Tensor:
    """Returns first .. end - 1 as an int64 CPU tensor."""
    return torch.arange(first, end, device="cpu")


def moved(x: Tensor, device: torch.device | str | None) -> Tensor:
    """Returns x on `device` (x itself if None); a copy to a GPU does not wait for the GPU."""
    if device is None:
        return x
    if torch.device(device).type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _padded(
    lengths: Sequence[int], parents: Sequence[int], pad_to: int | None
) -> tuple[list[int], list[int]]:
    """Returns lengths and parents with a padding node appended if pad_to exceeds the tokens.

    Raises ValueError if pad_to is less than the tokens.
    """
    padding = 0 if pad_to is None else pad_to - sum(lengths)
    if padding < 0:
        got = f"{sum(lengths)} tokens and pad_to={pad_to}"
        raise ValueError(need("SharedLayout", got, "room for all", "raise pad_to, or pack less"))
    return ([*lengths, padding], [*parents, -1]) if padding else (list(lengths), list(parents))


def _integers(name: str, given: Sequence[int]) -> list[int]:
    try:
        return [operator.index(n) for n in given]
    except TypeError as error:
        got, fix = f"{name} {given}", "pass whole numbers of tokens"
        raise ValueError(need("SharedLayout", got, "integers", fix)) from error


def _check_forest(lengths: Sequence[int], parents: Sequence[int]) -> None:
    if len(lengths) != len(parents):
        got = f"{len(lengths)} lengths and {len(parents)} parents"
        raise ValueError(need("SharedLayout", got, "one of each for a node", "see from_forest"))
    if any(length < 0 for length in lengths):
        got = f"a node of {min(lengths)} tokens"
        raise ValueError(need("SharedLayout", got, "0 or more", "check the lengths"))
    path: list[int] = []
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            got = f"node {node} lies outside the subtree of its parent {parent}"
            fix = "list a node, then all that descends from it, then the next"
            raise ValueError(need("SharedLayout", got, "depth-first order", fix))
        path.append(node)
