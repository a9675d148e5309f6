"""Which packed token sees which: the layout of a batch whose sequences share their beginnings.

Tokens lie depth first: of each group the prompt, then its responses; in general a node of a prefix
tree, then its children. A key is seen from itself to the end of its node's subtree, `tout`.
Everything here is arithmetic on lengths, which the host knows: nothing waits for a device.
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

    A dataclass, because wrappers that send a model's arguments to its GPU would send the host's
    `nodes` along with the other tensors of a tuple.
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
        """Of groups (tokens of the prompt, tokens of each response), any of which may be 0.

        Args:
            groups: in packed order. Without responses, a prompt is a sequence by itself.
            pad_to: add tokens up to this many; they see only each other.
            device: where `tout` is to be; the CPU if None.
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
        """Of nodes in depth-first order: the tokens of each, and its parent's index, or -1."""
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
        """Visible (query, key) pairs of a head: key k is seen by the tokens k..tout[k]-1."""
        first, end, tout = self.nodes.long().unbind(1)
        return int(((end - first) * (2 * tout - first - end + 1)).sum()) // 2

    def prepare(self, num_heads: int, kv_heads: int, q_shift: int = 0) -> Tables:
        """The tables that kernels for these heads work off, beside `tout`; built once.

        All layers and the backward share them. Copied without waiting, and nothing is read back: a
        call on another stream lets that stream wait for the copy. Compiled code does not; there, or
        in a capture, the tables have to be built before, on the same stream.
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
        """Copies, and other processes, build tables of their own."""
        return SharedLayout, (self.tout, self.nodes)

    def to(self, device: torch.device | str) -> "SharedLayout":
        return SharedLayout(moved(self.tout, device), self.nodes)


class Prepared(NamedTuple):
    """Tables of a layout, and where and how they were filled."""

    tables: Tables
    kept: Kept[Tables]
    gpu: int  # -1 for the CPU
    by_default: bool  # on the default stream


def _not_prepared(key: tuple[int, int, int], before: str) -> str:
    heads = ", ".join(map(str, key if key[2] else key[:2]))
    fix = f"call layout.prepare({heads}) before {before}"
    return need("SharedLayout", "no tables yet", "them, which are built on the host", fix)


def whole(numbers: Iterable[int]) -> Tensor:
    """int64, on the CPU whatever torch's default device is, as all that the host reads."""
    return torch.tensor(list(numbers), dtype=torch.long, device="cpu")


def run(first: int, end: int) -> Tensor:
    """first .. end - 1, on the CPU."""
    return torch.arange(first, end, device="cpu")


def moved(x: Tensor, device: torch.device | str | None) -> Tensor:
    """x on that device; to a GPU without waiting for it."""
    if device is None:
        return x
    if torch.device(device).type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _padded(
    lengths: Sequence[int], parents: Sequence[int], pad_to: int | None
) -> tuple[list[int], list[int]]:
    """With a last node of padding, if there is any."""
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
