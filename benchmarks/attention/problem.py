"""Attention workloads made concrete: inputs, who sees whom, counted work and truth.

Truth covers all heads of short workloads, and those of the first and the last key head of long
ones, or of the last alone: 128K tokens without a mask take fp32 a second a head, three backward.
An index is judged by what its lines hold, beside what the definition's lines hold, for the queries
of the first key head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..harness.adapters import Outputs
from ..harness.truth import Truth
from ..harness.workload import Work
from .workloads import SharedPrompts, VerticalSlash

AttentionWorkload = SharedPrompts | VerticalSlash
QUERY_BLOCK = 512  # rows of the score matrix that truth holds at a time
BLOCK = OBSERVED = 64  # tokens of a block, and queries that an index is made of
ALL_HEADS = 1 << 15  # tokens up to which truth has every head
TWO_HEADS = 1 << 16  # of one sequence without a mask, up to which truth has two

# whether query i sees key j, of index tensors that broadcast
Visible = Callable[[Tensor, Tensor], Tensor]


class AttentionInputs(NamedTuple):
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, Hk, D]
    v: Tensor  # [T, Hk, D]
    do: Tensor | None  # [T, H, D], backward only
    visible: Visible


def attention_inputs(
    workload: AttentionWorkload, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> AttentionInputs:
    generator = torch.Generator(device).manual_seed(seed)
    kv_heads, heads = workload.heads

    def normal(num_heads: int) -> Tensor:
        shape = (workload.tokens, num_heads, workload.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return AttentionInputs(
        q=normal(heads),
        k=normal(kv_heads),
        v=normal(kv_heads),
        do=normal(heads) if workload.direction == "bwd" else None,
        visible=visibility(workload, device),
    )


def visibility(workload: AttentionWorkload, device: torch.device) -> Visible:
    """Closures over tensors, which a compiler of masks can read."""
    if isinstance(workload, VerticalSlash):
        return _on_lines(workload, device)
    last = torch.zeros(workload.tokens, dtype=torch.int32)  # one past who sees a key
    for prompt, response in workload.sequences():
        last[prompt.start : prompt.stop] = response.stop  # of its last response, in the end
        last[response.start : response.stop] = response.stop
    until = last.to(device)

    def visible(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < until[key])

    return visible


def _on_lines(workload: VerticalSlash, device: torch.device) -> Visible:
    block = workload.block
    diagonals = torch.zeros(workload.tokens // block, dtype=torch.bool, device=device)
    columns = torch.zeros(workload.tokens, dtype=torch.bool, device=device)
    for lines, active in zip((diagonals, columns), workload.mask(), strict=True):
        lines[torch.tensor(active, dtype=torch.int64, device=device)] = True

    def visible(query: Tensor, key: Tensor) -> Tensor:
        # a key above the diagonal has a negative distance, which is not one to look up
        distance = (query // block - key // block).clamp(min=0)
        return (key <= query) & (diagonals[distance] | columns[key])

    return visible


def attention_work(workload: AttentionWorkload, element_size: int) -> Work:
    """Two products of every visible pair, five in backward; each tensor in or out once."""
    kv_heads, heads = workload.heads
    per_token = workload.head_dim * element_size
    queries, keys = workload.tokens * heads * per_token, workload.tokens * kv_heads * per_token
    lse = workload.tokens * heads * 4
    if workload.direction == "index":
        return Work(2.0 * OBSERVED * workload.tokens * workload.head_dim * heads, keys)
    pairs = 2.0 * workload.pairs * workload.head_dim * heads
    if workload.direction == "fwd":
        return Work(2 * pairs, 2 * queries + 2 * keys)
    return Work(5 * pairs, 4 * queries + 4 * keys + lse)  # q, o, do, dq; k, v, dk, dv


def attention_truth(workload: AttentionWorkload, inputs: AttentionInputs) -> Truth:
    """Softmax attention as defined, a block of queries at a time; fp64 on a CPU, else fp32."""
    if workload.direction == "index":
        return _index_truth(workload, inputs)
    dtype = torch.float32 if inputs.q.is_cuda else torch.float64
    kv_heads, heads = workload.heads
    key_heads = tuple(range(kv_heads))
    if workload.tokens > ALL_HEADS:
        unmasked = isinstance(workload, VerticalSlash) and workload.dense
        first = kv_heads - 1 if unmasked and workload.tokens > TWO_HEADS else 0
        key_heads = tuple(sorted({first, kv_heads - 1}))
    group, scale = heads // kv_heads, workload.head_dim**-0.5

    def wide(x: Tensor, of_each: int) -> Tensor:
        """[heads, T, D] of those key heads, which have so many heads each."""
        chosen = torch.unflatten(x, 1, (kv_heads, of_each))[:, list(key_heads)]
        return chosen.flatten(1, 2).to(dtype).transpose(0, 1)

    q, k, v = wide(inputs.q, group), wide(inputs.k, 1), wide(inputs.v, 1)
    do = None if inputs.do is None else wide(inputs.do, group)
    o, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    token = torch.arange(workload.tokens, device=q.device)
    for start in range(0, workload.tokens, QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, workload.tokens))
        seen = inputs.visible(token[rows, None], token[None, : rows.stop])
        near = seen.any(0).nonzero()[:, 0]  # under a sparse mask few of the keys
        hidden = ~seen[:, near]
        for head in range(len(q)):
            of = head // group
            keys, values = k[of, near], v[of, near]
            scores = scale * q[head, rows] @ keys.T
            p = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            o[head, rows] = p @ values
            if do is None:
                continue
            upstream = do[head, rows]
            delta = (upstream * o[head, rows]).sum(-1, keepdim=True)
            ds = (upstream @ values.T).sub_(delta).mul_(p).mul_(scale)
            dq[head, rows] = ds @ keys
            dk[of, near] += ds.T @ q[head, rows]
            dv[of, near] += p.T @ upstream
    found = (o,) if do is None else (dq, dk, dv)
    want = outputs(*(x.transpose(0, 1).float() for x in found))
    return Truth(want, key_heads, kv_heads)


def outputs(*tensors: Tensor) -> Outputs:
    """o, or dq, dk, dv, [T, H, D] each, as a truth has them."""
    names = ("o",) if len(tensors) == 1 else ("dq", "dk", "dv")
    return {name: x[None] for name, x in zip(names, tensors, strict=True)}


def recall(
    inputs: AttentionInputs, columns: Tensor, diagonals: Tensor, heads: slice = slice(None)
) -> Outputs:
    """Share of the last block's attention that lines hold, [1, 1, heads].

    columns is bool [heads, T], diagonals bool [heads, T / 64].
    """
    held = torch.zeros(len(columns), dtype=torch.float64, device=columns.device)
    group = inputs.q.shape[1] // inputs.k.shape[1]
    key = torch.arange(len(inputs.k), device=columns.device)
    distance = (len(key) - 1) // BLOCK - key // BLOCK
    for n, head in enumerate(range(inputs.q.shape[1])[heads]):
        q, k = inputs.q[-OBSERVED:, head].double(), inputs.k[:, head // group].double()
        scores = q.shape[-1] ** -0.5 * q @ k.T
        p = scores.masked_fill(key > key[-OBSERVED:, None], -torch.inf).softmax(-1).mean(0)
        held[n] = p[columns[n] | diagonals[n][distance]].sum()
    return {"recall": held[None, None]}


def _index_truth(workload: AttentionWorkload, inputs: AttentionInputs) -> Truth:
    from reference import sparse_ring_index

    kv_heads, heads = workload.heads
    group = heads // kv_heads
    masses = sparse_ring_index.masses(inputs.q[None, :, :group], inputs.k[None, :, :1])
    index = sparse_ring_index.select(masses, workload.tokens, sparse_ring_index.Budget())
    want = recall(inputs, index.columns[0], index.diagonals[0], slice(group))
    return Truth(want, (0,), kv_heads)


# --- every sequence in full, for libraries that cannot share prompts


class Replicas(NamedTuple):
    """Sequences end to end: which packed token each of their tokens is."""

    source: Tensor  # int64 [tokens of all sequences]
    position: Tensor  # int64, in its sequence
    first: Tensor  # bool: the packed token's first copy
    cu_seqlens: Tensor  # int32 [S + 1]
    lengths: tuple[int, ...]
    tokens: int  # packed

    def once(self, x: Tensor) -> Tensor:
        """Each packed token's row, from its first copy."""
        packed = x.new_empty(self.tokens, *x.shape[1:])
        packed[self.source[self.first]] = x[self.first]
        return packed

    def summed(self, x: Tensor) -> Tensor:
        """Each packed token's row, summed over its copies."""
        packed = x.new_zeros(self.tokens, *x.shape[1:], dtype=torch.float32)
        return packed.index_add_(0, self.source, x.float()).to(x.dtype)

    def upstream(self, do: Tensor) -> Tensor:
        """Only first copies are outputs, so only they have a gradient."""
        first = self.first.view(-1, *[1] * (do.dim() - 1))
        return torch.where(first, do[self.source], 0)


def replicas(workload: AttentionWorkload, device: torch.device, padded: bool = False) -> Replicas:
    """`padded` gives each sequence the longest's length.

    Under a causal mask no token sees what is behind it, and what is behind has no gradient, so
    that padding may be any token: the first.
    """
    source, first, lengths = list[Tensor](), list[Tensor](), list[int]()
    pairs, before = list(workload.sequences()), range(0)
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    for prompt, response in pairs:
        length = len(prompt) + len(response)
        behind = longest - length if padded else 0
        source += [torch.arange(r.start, r.stop) for r in (prompt, response)]
        first += [torch.full((len(prompt),), prompt != before), torch.ones(len(response)).bool()]
        source.append(torch.zeros(behind, dtype=torch.int64))
        first.append(torch.zeros(behind, dtype=torch.bool))
        lengths.append(length + behind)
        before = prompt
    position = torch.cat([torch.arange(n) for n in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    where = (x.to(device) for x in (torch.cat(source), position, torch.cat(first), bounds))
    return Replicas._make([*where, tuple(lengths), workload.tokens])
