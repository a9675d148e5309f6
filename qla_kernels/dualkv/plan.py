"""`SharedLayout`: which packed token sees which, in a batch of sequences with shared prefixes.

Tokens are packed depth first: each group's prompt, then its responses; in general, each node of a
prefix tree, then its children. A key is visible to the queries from its own token to `tout`, the
end of its node's subtree. Layouts are computed from lengths on the host, so nothing here waits for
a device.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.dualkv import tables
from qla_kernels.dualkv.shapes import HEAD_SIZES, KEY_TILES
from qla_kernels.dualkv.tables import Tables
from qla_kernels.dualkv.tokens import Group, as_list, group_lengths
from qla_kernels.runtime import device
from qla_kernels.runtime.arguments import described, integer
from qla_kernels.runtime.device_tables import Kept
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import alternatives


class SharedLayout:
    """Says which packed tokens see each other: query i sees key j if j <= i < tout[j].

    A packed batch that stores shared prefixes once is a forest of nodes. A node is a run of tokens,
    such as a prompt or a response. A child, such as a response, continues the sequence of its
    parent, its prompt. A node comes before its children. Make a layout by `from_lengths` or
    `from_forest`; tout and nodes do not change afterwards.

    Attributes:
        tout: [T] int32; tout[j] is one past the last packed token that may see token j.
        nodes: [n, 3] int32 on the CPU, a row for each node: its first token, one past its last
            token, and one past the last token of its descendants, which is the tout of its tokens.
            No node is empty.
        prepared: the attention kernels' index tables, by numbers of heads; `prepare` adds them.
        further: index tables of other kernels, by (name, number), such as ("conv", width).
    """

    # SharedLayout is neither a tuple nor a dataclass. Wrappers that move a model's arguments to a
    # GPU would move all tensors of a tuple, and `nodes` must stay on the host. FSDP with mixed
    # precision makes new instances of dataclasses for each layer, which would not share tables.

    tout: Tensor
    nodes: Tensor
    prepared: dict["Key", "Prepared"]
    further: dict[tuple[str, int], Any]

    def __init__(self, tout: Tensor, nodes: Tensor) -> None:
        """Raises ValueError unless nodes are a depth-first forest of the T tokens.

        Also compares `tout` with the nodes, unless it is on a GPU, for which that would wait.
        """
        _check_tensors(tout, nodes)
        check_nodes(nodes, len(tout))
        if tout.is_cpu:
            check_tout(tout, nodes)
        vars(self).update(tout=tout, nodes=nodes, prepared={}, further={})

    def __repr__(self) -> str:
        """Returns a text with the numbers of tokens and nodes; reads no tensor on a GPU."""
        sizes = f"{self.num_tokens} tokens in {len(self.nodes)} nodes"
        return f"SharedLayout({sizes} on {self.tout.device})"

    @classmethod
    def from_lengths(
        cls,
        groups: Iterable[Group],
        *,
        pad_to: int | None = None,
        device: torch.device | str | None = None,
    ) -> "SharedLayout":
        """Returns the layout of groups; a group is a prompt and its responses.

        Args:
            groups: pairs (tokens of the prompt, [tokens of each response]) in packed order; lengths
                may be 0. A group without responses has one sequence, which is the prompt.
            pad_to: the number of tokens after padding. Padding tokens see only each other.
            device: device of `tout`; the CPU if None.

        Raises:
            ValueError: a group has a wrong form, or there are more than pad_to tokens.
        """
        op = "SharedLayout.from_lengths"
        lengths: list[int] = []
        parents: list[int] = []
        for prompt, responses in group_lengths(op, groups):
            parents += [-1, *[len(lengths)] * len(responses)]
            lengths += [prompt, *responses]
        return layout_of_nodes(op, lengths, parents, pad_to, device)

    @classmethod
    def from_forest(
        cls,
        lengths: Sequence[int],
        parents: Sequence[int],
        *,
        pad_to: int | None = None,
        device: torch.device | str | None = None,
    ) -> "SharedLayout":
        """Returns the layout of a forest, whose nodes are listed in depth-first order.

        A node is a run of tokens. The sequences are the paths from a root to a node without
        children.

        Args:
            lengths: number of tokens of each node.
            parents: index of each node's parent, -1 for a root.
            pad_to, device: as in `from_lengths`.

        Raises:
            ValueError: the order is not depth first, a length is negative, or there are more than
                pad_to tokens.
        """
        op = "SharedLayout.from_forest"
        lengths, parents = _integers(op, "lengths", lengths), _integers(op, "parents", parents)
        _check_forest(op, lengths, parents)
        return layout_of_nodes(op, lengths, parents, pad_to, device)

    @property
    def num_tokens(self) -> int:
        """The number of packed tokens, T."""
        return self.tout.shape[0]

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs per head in which the query sees the key.

        The queries k to tout[k] - 1 see key k.
        """
        first, end, tout = self.nodes.long().unbind(1)
        return int(((end - first) * (2 * tout - first - end + 1)).sum()) // 2

    def prepare(
        self, num_heads: int, kv_heads: int, q_shift: int = 0, head_dim: int = 128
    ) -> Tables:
        """Builds the index tables of the attention kernels, or returns those built before.

        The tables list the tiles of queries and keys that see each other. All layers share them,
        and so do the backward and head sizes 64 and 128. Without this call the first attention call
        builds them, which is not possible in compiled code or while a CUDA graph is captured:
        there, missing tables raise ValueError. The copy to the GPU does not block the host; another
        stream that runs attention waits for it, except in compiled code.

        Args:
            num_heads: number of query heads.
            kv_heads: number of key heads.
            q_shift: number of tokens at the start of the batch that have no query.
            head_dim: head size.
        """
        key = num_heads, kv_heads, q_shift, KEY_TILES.get(head_dim)
        ready = self.prepared.get(key)
        if ready is None:
            ready = self.prepared[key] = self._built(key, head_dim)
        if torch.compiler.is_compiling() or ready.gpu < 0:
            return ready.tables
        if ready.by_default and device.stream(ready.gpu) == device.DEFAULT_STREAM:
            return ready.tables  # nearly every call, and host time counts
        with device.of(self.tout):
            return ready.kept.here()

    def _built(self, key: "Key", head_dim: int) -> "Prepared":
        """Builds the tables for key = (num_heads, kv_heads, q_shift, tiles) and copies them."""
        num_heads, kv_heads, q_shift, tiles = key
        _check_heads(num_heads, kv_heads)
        if tiles is None:
            got, fix = f"head_dim={head_dim}", "pass the head size of q"
            raise ValueError(need("SharedLayout.prepare", got, alternatives(HEAD_SIZES), fix))
        numbers = num_heads, kv_heads, q_shift, head_dim
        if torch.compiler.is_compiling():
            raise ValueError(_not_prepared(numbers, "the function that is compiled"))
        with device.of(self.tout):
            if self.tout.is_cuda and device.capturing():
                raise ValueError(_not_prepared(numbers, "the capture of a CUDA graph"))
            on_host = tables.build(self.nodes, num_heads, kv_heads, q_shift, tiles)
            buffer = moved(tables.one_buffer(on_host), self.tout.device)
            views, gpu = tables.views(buffer, on_host), buffer.get_device()
            by_default = gpu >= 0 and device.stream(gpu) == device.DEFAULT_STREAM
            return Prepared(views, Kept(views, buffer), gpu, by_default)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles leave the tables out; they are built again when needed."""
        return _unchecked, (self.tout, self.nodes)

    def to(self, device: torch.device | str) -> "SharedLayout":
        """Returns a copy of the layout on `device`. The copy has no index tables of kernels yet.

        A copy from the CPU to a GPU does not block the host.
        """
        return _unchecked(moved(self.tout, device), self.nodes)


def _unchecked(tout: Tensor, nodes: Tensor) -> SharedLayout:
    """Returns a layout without checking it: a check costs as much as building the tensors."""
    layout = object.__new__(SharedLayout)
    vars(layout).update(tout=tout, nodes=nodes, prepared={}, further={})
    return layout


MAKE = "make layouts by SharedLayout.from_lengths or from_forest"


def _check_tensors(tout: Any, nodes: Any) -> None:
    """Raises ValueError unless tout is int32 [T], and nodes int32 [n, 3] on the CPU."""
    for name, x, columns, needs in (
        ("tout", tout, (), "int32 [T]"),
        ("nodes", nodes, (3,), "int32 [n, 3] on the CPU"),
    ):
        fits = isinstance(x, Tensor) and x.dtype == torch.int32
        fits = fits and x.dim() == 1 + len(columns) and x.shape[1:] == columns
        if not fits or (name == "nodes" and not x.is_cpu):
            raise ValueError(need("SharedLayout", described(name, x), needs, MAKE))


def check_nodes(nodes: Tensor, num_tokens: int) -> None:
    """Raises ValueError unless nodes are a forest of num_tokens tokens, in depth-first order.

    That is, each token is in one node, and each node is followed by its descendants.

    Args:
        nodes: [n, 3] int32 on the CPU. A row is a node, a run of tokens such as a prompt: its first
            token, one past its last token, and one past the last token of its descendants.
        num_tokens: number of tokens of the packed batch.
    """
    end, path = 0, [num_tokens]  # ends of the subtrees that are open
    for first, stop, tout in nodes.tolist():
        while len(path) > 1 and path[-1] <= first:
            path.pop()
        if first != end or not first < stop <= tout <= path[-1]:
            got = f"the node {(first, stop, tout)} after token {end} of {num_tokens}"
            raise ValueError(need("SharedLayout", got, "nodes in depth-first order", MAKE))
        path.append(tout)
        end = stop
    if end != num_tokens:
        got = f"nodes that end at token {end}, and tout for {num_tokens}"
        raise ValueError(need("SharedLayout", got, "every token in one node", MAKE))


def check_tout(tout: Tensor, nodes: Tensor) -> None:
    """Raises ValueError unless a layout's `tout` has the values that its `nodes` imply.

    Waits for the GPU if `tout` is on one.

    Args:
        tout: [T] int32; tout[j] is one past the last token that may see token j.
        nodes: [n, 3] int32 on the CPU. A row is a run of tokens: its first token, one past its last
            token, and the tout of its tokens.
    """
    if not torch.equal(tout.cpu(), per_token(nodes)):
        got = "tout with other values than those of nodes"
        raise ValueError(need("SharedLayout", got, "tout and nodes of one forest", MAKE))


def per_token(nodes: Tensor) -> Tensor:
    """Computes a layout's `tout` from its `nodes`: repeats the last column of nodes for each token.

    Returns [T] on the CPU; entry j is one past the last token that may see token j. A row of nodes
    [n, 3] is a run of tokens, such as a prompt: its first token, one past its last token, and the
    tout that all its tokens have.
    """
    return nodes[:, 2].repeat_interleave(nodes[:, 1] - nodes[:, 0])


Key = tuple[int, int, int, tuple[int, int, int] | None]  # heads, key heads, q_shift, tiles


class Prepared(NamedTuple):
    """A record: index tables of the attention kernels for a `SharedLayout`, and where they lie.

    Attributes:
        tables: the tables.
        kept: the same tables; `kept.here()` makes the current stream wait until they are copied.
        gpu: number of the GPU that holds the tables, -1 for the CPU.
        by_default: True if the default stream copied them; it then need not wait.
    """

    tables: Tables
    kept: Kept[Tables]
    gpu: int
    by_default: bool


def _not_prepared(numbers: tuple[int, int, int, int], before: str) -> str:
    """Returns the text of an error: tables are missing, and cannot be built here."""
    num_heads, kv_heads, q_shift, head_dim = numbers
    heads = f"{num_heads}, {kv_heads}" + (f", {q_shift}" if q_shift else "")
    if KEY_TILES[head_dim] != KEY_TILES[128]:
        heads += f", head_dim={head_dim}"
    got, fix = (
        f"there are no tables for heads {heads}",
        f"call layout.prepare({heads}) before {before}",
    )
    return need("SharedLayout", got, "tables that the host built beforehand", fix)


def _check_heads(num_heads: int, kv_heads: int) -> None:
    """Raises ValueError unless kv_heads is at least 1 and divides num_heads; both are integers."""
    op = "SharedLayout.prepare"
    H, Hk = integer(op, "num_heads", num_heads), integer(op, "kv_heads", kv_heads)
    if H < 1 or Hk < 1 or H % Hk:
        got, needs = f"num_heads={H}, kv_heads={Hk}", "num_heads a multiple of kv_heads, both > 0"
        raise ValueError(need(op, got, needs, "pass the heads of q, then those of k"))


def tensor_of(numbers: Iterable[int]) -> Tensor:
    """Returns the numbers as an int64 CPU tensor, whatever torch's default device is."""
    return torch.tensor(list(numbers), dtype=torch.long, device="cpu")


def run(first: int, end: int) -> Tensor:
    """Returns the integers from `first` to `end - 1` as an int64 CPU tensor."""
    return torch.arange(first, end, device="cpu")


def moved(x: Tensor, device: torch.device | str | None) -> Tensor:
    """Returns a copy of x on `device`, or x itself if `device` is None.

    A copy from the CPU to a GPU does not block the host.
    """
    if device is None:
        return x
    if torch.device(device).type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def layout_of_nodes(
    op: str,
    lengths: Sequence[int],
    parents: Sequence[int],
    pad_to: int | None,
    device: torch.device | str | None,
) -> SharedLayout:
    """Builds a `SharedLayout` from the lengths and parents of its nodes, without checking them.

    A node is a run of tokens, such as a prompt or a response; a response's parent is its prompt.
    Raises ValueError if pad_to is not an integer, or is less than the number of tokens.

    Args:
        op: the name of the function, for the error.
        lengths: number of tokens of each node, in depth-first order.
        parents: index of each node's parent, -1 for a root.
        pad_to: number of tokens after padding; None for no padding.
        device: device of the layout's tensor `tout`; None for the CPU.
    """
    lengths, parents = _padded(op, lengths, parents, pad_to)
    ends = tensor_of([0, *lengths]).cumsum(0)
    tout: list[int] = ends[1:].tolist()
    for node in reversed(range(len(lengths))):
        if parents[node] >= 0:  # the last child, seen first, has the latest end
            tout[parents[node]] = max(tout[parents[node]], tout[node])
    spans = torch.stack([ends[:-1], ends[1:], tensor_of(tout)], 1).int()
    spans = spans[spans[:, 0] < spans[:, 1]]
    return _unchecked(moved(per_token(spans), device), spans)


def _padded(
    op: str, lengths: Sequence[int], parents: Sequence[int], pad_to: int | None
) -> tuple[list[int], list[int]]:
    """Returns lengths and parents with a padding node appended if pad_to exceeds the tokens.

    Raises ValueError if pad_to is no integer, or less than the tokens.
    """
    tokens = sum(lengths)
    total = tokens if pad_to is None else integer(op, "pad_to", pad_to)
    if total < tokens:
        got, fix = f"{tokens} tokens and pad_to={total}", "raise pad_to, or pack fewer tokens"
        raise ValueError(need(op, got, "room for all tokens", fix))
    if total == tokens:
        return list(lengths), list(parents)
    return [*lengths, total - tokens], [*parents, -1]


def _integers(op: str, name: str, values: Sequence[int]) -> list[int]:
    """Returns the values as a list of ints; ValueError if they are no list of integers."""
    items = as_list(op, name, values, "a list of integers", "pass one number for each node")
    return [integer(op, f"{name}[{i}]", x, "pass whole numbers") for i, x in enumerate(items)]


def _check_forest(op: str, lengths: Sequence[int], parents: Sequence[int]) -> None:
    """Raises ValueError unless each node has a length from 0 on, and nodes are depth first."""
    if len(lengths) != len(parents):
        got = f"there are {len(lengths)} lengths and {len(parents)} parents"
        fix = "pass a parent for each node, -1 for a root"
        raise ValueError(need(op, got, "one length and one parent for each node", fix))
    if any(length < 0 for length in lengths):
        got = f"a node has {min(lengths)} tokens"
        raise ValueError(need(op, got, "0 or more tokens in each node", "check the lengths"))
    path: list[int] = []
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            got = f"node {node} lies outside the subtree of its parent {parent}"
            fix = "list each node, then all nodes of its subtree, then the next node"
            raise ValueError(need(op, got, "nodes in depth-first order", fix))
        path.append(node)
