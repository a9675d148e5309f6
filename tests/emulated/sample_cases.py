"""Inputs for the sample kernels, and what torch says they should compute."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    arguments: list[Any]
    output: Tensor  # one of the arguments
    want: Tensor


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def tf32(x: Tensor) -> Tensor:
    """What a tensor core sees of a float: the low 13 bits of the mantissa are ignored."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def ring_gemm() -> Case:
    a, b = bf16(192, 320), bf16(64, 320)
    c = nan(192, 64, dtype=torch.bfloat16)
    return Case([a, b, c], c, a.float() @ b.float().T)


def twins() -> Case:
    a, b = bf16(128, 192), bf16(192, 192)
    c = nan(128, 192, dtype=torch.bfloat16)
    return Case([a, b, c], c, a.float() @ b.float().T)


def gemm_forms() -> Case:
    a, b, p, c = bf16(64, 64), bf16(2, 128, 64), bf16(64, 64), nan(64, 128)
    b0, b1 = b.float().mT
    return Case([a, b, p, c, 3], c, a.float().T @ (b0 + b1 + b0) + 3 * p.float() @ b1)


def sequence_sums() -> Case:
    lengths = [70, 1, 0, 130, 64]
    x = bf16(sum(lengths), 4, 128)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    sums = nan(len(lengths), 4, 128)
    want = torch.stack([tokens.float().sum(0) for tokens in torch.split(x, lengths)])
    return Case([x, cu_seqlens, sums], sums, want)


def sums_in_turns() -> Case:
    x, sums = bf16(24, 64, 64), nan(2, 64, 64)
    return Case([x, sums], sums, x.float().unflatten(0, (-1, 2)).sum(0))


def blocks_then_columns(num_blocks: int = 5, num_columns: int = 320) -> Case:
    k, q, scores = bf16(640, 3, 128), bf16(64, 3, 128), nan(3, 64, 64)
    blocks = torch.randint(0, 10, (3, num_blocks), dtype=torch.int32)
    columns = torch.randint(0, 640, (3, num_columns), dtype=torch.int32)
    rows = (blocks.long()[..., None] * 64 + torch.arange(64)).flatten(1)
    rows = torch.cat([rows, columns.long()], 1)
    keys = torch.stack([k[rows[h], h].float().view(-1, 64, 128).sum(0) for h in range(3)])
    return Case([k, blocks, columns, q, scores], scores, q.float().transpose(0, 1) @ keys.mT)


def reduce_add() -> Case:
    x, d = torch.randn(4, 128, 128), torch.ones(128, 128)
    return Case([x, d], d, x.sum(0) + 1)


def attention() -> Case:
    q, k, v = bf16(384, 128), bf16(256, 128), bf16(256, 128)
    o = nan(384, 128, dtype=torch.bfloat16)
    want = (q.float() @ k.float().T / math.sqrt(128)).softmax(-1) @ v.float()
    return Case([q, k, v, o], o, want)


def reverse_halves() -> Case:
    x, y = torch.randn(6, 128), nan(6, 128)
    return Case([x, y], y, x.flip(1))
