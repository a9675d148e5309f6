"""Attention workloads made concrete: inputs, who sees whom, counted work and truth."""

from typing import NamedTuple

import torch
from torch import Tensor

from .baselines import Outputs
from .floor import Work
from .truth import Truth
from .workloads_attention import SharedPrompts, VerticalSlash

AttentionWorkload = SharedPrompts | VerticalSlash
QUERY_BLOCK = 512  # rows of the score matrix that truth holds at a time


class AttentionInputs(NamedTuple):
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, Hk, D]
    v: Tensor  # [T, Hk, D]
    do: Tensor | None  # [T, H, D], backward only
    visible: "Visible"

    @property
    def num_bytes(self) -> int:
        tensors = (self.q, self.k, self.v, self.do)
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)


class Visible(NamedTuple):
    """Query i sees key j if j <= i < until[j], and if the mask has a line through (i, j)."""

    until: Tensor  # int32 [T], one past the last token that sees the key
    diagonals: Tensor | None  # bool [T / 64], active block distances; None: all
    columns: Tensor | None  # bool [T], keys that every later token sees
    block: int

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < self.until[key])
        if self.diagonals is None or self.columns is None:
            return seen
        # a key above the diagonal has a negative distance, which is not a distance to look up
        distance = (query // self.block - key // self.block).clamp(min=0)
        return seen & (self.diagonals[distance] | self.columns[key])


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
        do=normal(heads) if workload.direction != "fwd" else None,
        visible=visibility(workload, device),
    )


def visibility(workload: AttentionWorkload, device: torch.device) -> Visible:
    if isinstance(workload, VerticalSlash):
        until = torch.full((workload.tokens,), workload.tokens, dtype=torch.int32)
        diagonals, columns = workload.mask()
        active = torch.zeros(workload.tokens // workload.block, dtype=torch.bool)
        active[list(diagonals)] = True
        always = torch.zeros(workload.tokens, dtype=torch.bool)
        always[list(columns)] = True
        return Visible(until.to(device), active.to(device), always.to(device), workload.block)
    until = torch.zeros(workload.tokens, dtype=torch.int32)
    for prompt, response in workload.sequences():
        until[prompt.start : prompt.stop] = response.stop  # of its last response, in the end
        until[response.start : response.stop] = response.stop
    return Visible(until.to(device), None, None, 1)


def attention_work(workload: AttentionWorkload, element_size: int) -> Work:
    """Two products of every visible pair, five in backward; each tensor in or out once."""
    kv_heads, heads = workload.heads
    per_token = workload.head_dim * element_size
    queries, keys = workload.tokens * heads * per_token, workload.tokens * kv_heads * per_token
    lse = workload.tokens * heads * 4
    pairs = 2.0 * workload.pairs * workload.head_dim * heads
    if workload.direction == "fwd":
        return Work(2 * pairs, 2 * queries + 2 * keys)
    return Work(5 * pairs, 4 * queries + 4 * keys + lse)  # q, o, do, dq; k, v, dk, dv


def attention_truth(workload: AttentionWorkload, inputs: AttentionInputs) -> Truth:
    """Softmax attention as defined, a block of queries at a time; fp64 on a CPU, else fp32."""
    dtype = torch.float32 if inputs.q.is_cuda else torch.float64
    kv_heads, heads = workload.heads
    scale = workload.head_dim**-0.5
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))  # [H, T, D]
    do = None if inputs.do is None else inputs.do.to(dtype).transpose(0, 1)
    o, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    token = torch.arange(workload.tokens, device=q.device)
    for head in range(heads):
        keys, values = k[head * kv_heads // heads], v[head * kv_heads // heads]
        for start in range(0, workload.tokens, QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, workload.tokens))
            seen = inputs.visible(token[rows, None], token[None, : rows.stop])
            scores = scale * q[head, rows] @ keys[: rows.stop].T
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            o[head, rows] = p @ values[: rows.stop]
            if do is None:
                continue
            upstream = do[head, rows]
            dp = upstream @ values[: rows.stop].T
            delta = (upstream * o[head, rows]).sum(-1, keepdim=True)
            ds = scale * p * (dp - delta)
            dq[head, rows] = ds @ keys[: rows.stop]
            dk[head * kv_heads // heads, : rows.stop] += ds.T @ q[head, rows]
            dv[head * kv_heads // heads, : rows.stop] += p.T @ upstream
    found = {"o": o} if do is None else {"dq": dq, "dk": dk, "dv": dv}
    want: Outputs = {name: x.transpose(0, 1)[None].float() for name, x in found.items()}
    return Truth(want, tuple(range(kv_heads)), kv_heads)
