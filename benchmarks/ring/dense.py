"""Dense ring attention over a library's kernels: what a sparse ring has to beat.

Zigzag shards, so that every rank has the same work in every step; keys and values go around while a
step is computed, partial results are merged in fp32, and the backward has the log-sum-exp of all
keys. A step meets half of the queries or half of the keys, and never a mask but in the first.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qla_kernels.sparse_ring.groups import RankRing
from reference import sparse_ring as definition

Backward = tuple[Tensor, Tensor, Tensor]
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, o and the log-sum-exp
GRADIENT_TAG = 2  # k and v take two


class Kernel:
    """Attention of [B, T, H, D] queries to [B, S, Hk, D] keys: in plain torch, for CPU tensors.

    `forward` returns o and the natural log-sum-exp, [B, H, T]; `backward` takes these as well, and
    returns the gradients of q, k and v.
    """

    name = "definition"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return definition.attention(q, k, v, self._visible(q, k, causal))

    def backward(self, do: Tensor, saved: Saved, causal: bool) -> Backward:
        q, k, v, o, lse = saved
        visible, delta = self._visible(q, k, causal), definition.delta(o, do)
        return definition.attention_backward(q, k, v, visible, lse, delta, do)

    def _visible(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        seen = torch.ones(q.shape[2], q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        return seen.tril()[None] if causal else seen[None]


class FlashAttention4(Kernel):
    name = "flash-attn-4"

    def __init__(self) -> None:
        self._ops = importlib.import_module("flash_attn.cute.interface")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        o, lse = self._ops.flash_attn_func(q, k, v, causal=causal, return_lse=True)[:2]
        return o, lse

    def backward(self, do: Tensor, saved: Saved, causal: bool) -> Backward:
        q, k, v, o, lse = saved
        scale = q.shape[-1] ** -0.5
        dq, dk, dv = self._ops._flash_attn_bwd(
            q, k, v, o, do, lse.contiguous(), softmax_scale=scale, causal=causal
        )[:3]
        return dq, dk, dv


class Aten(Kernel):
    """One of PyTorch's own: cuDNN's kernels, or flash-attn 2's."""

    def __init__(self, library: str) -> None:
        self.name = {"cudnn": "cuDNN", "flash": "flash-attn 2 (torch)"}[library]
        self._cudnn = library == "cudnn"
        self._seeds: tuple[Tensor, ...] = ()  # of a dropout that there is none of

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        if self._cudnn:
            done = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *heads, None, True, 0.0, causal, False
            )
        else:
            done = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, causal, False)
        self._seeds = done[6:8]
        return done[0].transpose(1, 2), done[1].view(*heads[0].shape[:3])

    def backward(self, do: Tensor, saved: Saved, causal: bool) -> Backward:
        q, k, v, o, lse = saved
        heads = [x.transpose(1, 2) for x in (do, q, k, v, o)]
        lengths = (None, None, q.shape[1], k.shape[1], 0.0, causal)
        if self._cudnn:
            grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *heads, lse.contiguous()[..., None], *self._seeds, None, *lengths
            )
        else:
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                *heads, lse.contiguous(), *lengths, *self._seeds
            )
        dq, dk, dv = (x.transpose(1, 2) for x in grads[:3])
        return dq, dk, dv


KERNELS = ("fa4", "cudnn", "flash", "definition")


def kernel_of(name: str) -> Kernel:
    if name == "definition":
        return Kernel()
    return FlashAttention4() if name == "fa4" else Aten(name)


def _steps(ring: RankRing, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Which of this rank's queries see which of an owner's keys, those, and their values.

    The next owner's come meanwhile. Its keys are before ours, and all queries see the first half of
    them, or behind, and the second half of the queries sees all of them.
    """
    half, everything = k.shape[1] // 2, slice(None)
    here, there = (k, v), (torch.empty_like(k), torch.empty_like(v))
    spare = (torch.empty_like(k), torch.empty_like(v)) if ring.size > 2 else there
    for step in range(ring.size):
        coming = ring.shift(here, there, 0) if step + 1 < ring.size else None
        queries, keys = everything, everything
        if step:
            before = (ring.rank - step) % ring.size < ring.rank
            queries, keys = (everything, slice(half)) if before else (slice(half, None), everything)
        yield queries, keys, here[0][:, keys], here[1][:, keys]
        if coming is not None:
            coming.wait()
            here, there = there, (spare if step == 0 else here)


def forward(
    kernel: Kernel, ring: RankRing, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """o in q's dtype and the LSE of all keys, of this rank's queries."""
    o, lse = q, q  # until the first step
    for step, (queries, _, keys, values) in enumerate(_steps(ring, k, v)):
        part, of_part = kernel.forward(q[:, queries], keys, values, step == 0)
        if step == 0:
            o, lse = part.float(), of_part.clone()
        else:
            _merge(o[:, queries], lse[..., queries], part, of_part)
    return o.to(q.dtype), lse


def _merge(o: Tensor, lse: Tensor, part: Tensor, of_part: Tensor) -> None:
    both = torch.logaddexp(lse, of_part)
    old, new = ((x - both).exp().transpose(1, 2)[..., None] for x in (lse, of_part))
    o.mul_(old).addcmul_(part, new)
    lse.copy_(both)


def backward(kernel: Kernel, ring: RankRing, do: Tensor, saved: Saved) -> Backward:
    """Gradients of keys go around with them, in fp32, and one hop more."""
    q, k, v, o, lse = saved
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dkv = torch.zeros(2, *k.shape, dtype=torch.float32, device=q.device)
    received = torch.empty_like(dkv)
    travelling: Any = None
    for step, (queries, of_owner, keys, values) in enumerate(_steps(ring, k, v)):
        part = q[:, queries], keys, values, o[:, queries], lse[..., queries]
        parts = kernel.backward(do[:, queries], part, step == 0)
        if travelling is not None:
            travelling.wait()
            dkv, received = received, dkv
        dq[:, queries] += parts[0]
        dkv[0, :, of_owner] += parts[1]
        dkv[1, :, of_owner] += parts[2]
        if ring.size > 1:
            travelling = ring.shift([dkv], [received], GRADIENT_TAG)
    if travelling is not None:
        travelling.wait()
        dkv = received
    return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)


class DenseRing(torch.autograd.Function):
    """The dense ring as a differentiable function of this rank's zigzag shards."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, ring: RankRing
    ) -> Tensor:
        o, lse = forward(kernel, ring, q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.ring = kernel, ring
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        kernel, ring = ctx.ring
        dq, dk, dv = backward(kernel, ring, do.contiguous(), ctx.saved_tensors)
        return dq, dk, dv, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, *, kernel: Kernel, ring: RankRing) -> Tensor:
    """Causal attention of q [B, L, H, D] to k and v [B, L, Hk, D], shards of a ZigZagLayout.

    Padding is at the end of the sequence, where no token before it sees it.
    """
    o: Tensor = DenseRing.apply(q, k, v, kernel, ring)  # type: ignore[no-untyped-call]
    return o
