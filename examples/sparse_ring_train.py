"""Trains a tiny model on a sequence split over processes; compares its losses with one process.

    python examples/sparse_ring_train.py
    python examples/sparse_ring_train.py --world 4 --steps 8 --schedule ring
    python examples/sparse_ring_train.py --device cuda      a GPU for each process

The model is a small random Qwen2.5: grouped heads, rotary positions, RMS norms, gated MLPs. It uses
the layout from the embedding to the loss, so tensors are not rearranged between layers, and only
attention communicates. Compared with a single process, each rank also needs

    its tokens from the layout, and labels that were shifted before the layout distributed them;
    the positions of its tokens in the whole sequence, for the rotary embedding;
    the sum of all ranks' gradients, where each rank's loss is divided by the tokens of all ranks.

Processes communicate over gloo on the CPU, and over NCCL on GPUs, where products are in bf16.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn

from qla_kernels.sparse_ring import (
    RingGroups,
    StripedLayout,
    VerticalSlash,
    sparse_attention,
    sparse_ring_attention,
)

PATTERN = VerticalSlash(recall_v=0.3, recall_s=0.5, max_v=64)


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 64
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    layers: int = 2


@dataclass(frozen=True)
class Shard:
    """A rank's settings for attention: layout, group, schedule, and tokens before the padding."""

    layout: StripedLayout
    group: RingGroups | None  # None: this process has the whole sequence
    schedule: str
    seqlen: int

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {"pattern": PATTERN, "seqlen": self.seqlen}
        if self.group is None:
            return sparse_attention(q, k, v, **options)
        options |= {"group": self.group, "layout": self.layout, "schedule": self.schedule}
        return sparse_ring_attention(q, k, v, **options)


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """Returns x [B, L, H, D] with rotary embedding; `position` [L] counts in the whole sequence."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = (position[:, None] * frequency).to(x.dtype)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Layer(nn.Module):
    def __init__(self, size: Sizes) -> None:
        super().__init__()
        self.size = size
        qkv = (size.heads + 2 * size.kv_heads) * size.head_dim
        self.before_attention, self.before_mlp = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, qkv)
        self.out = nn.Linear(size.heads * size.head_dim, size.width, bias=False)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, position: Tensor, shard: Shard) -> Tensor:
        size = self.size
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, size.head_dim))
        q, k, v = heads.split([size.heads, size.kv_heads, size.kv_heads], 2)
        q, k = rotated(q, position), rotated(k, position)
        x = x + self.out(shard.attention(q, k, v.contiguous()).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, size: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=size.width**-0.5)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)

    def forward(self, tokens: Tensor, position: Tensor, shard: Shard) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, position, shard)
        return self.norm(x) @ self.embedding.weight.T


def sequence(seqlen: int, T: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Returns noisy repeating tokens, padded, and labels: next tokens, -100 in the padding."""
    generator = torch.Generator().manual_seed(0)
    motif = torch.randint(vocabulary, (37,), generator=generator)
    tokens = torch.zeros(T, dtype=torch.long)
    tokens[:seqlen] = motif.repeat(-(-seqlen // 37))[:seqlen]
    noise = torch.rand(seqlen, generator=generator) < 0.1
    tokens[:seqlen][noise] = torch.randint(vocabulary, (int(noise.sum()),), generator=generator)
    labels = torch.full_like(tokens, -100)
    labels[: seqlen - 1] = tokens[1:seqlen]
    return tokens[None], labels[None]


def train(
    shard: Shard, T: int, steps: int, dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Returns the loss of every step, averaged over the tokens of all ranks."""
    torch.manual_seed(0)  # the same weights on every rank
    on_gpu = device.type == "cuda"
    size = Sizes(head_dim=128) if on_gpu else Sizes()  # kernels need 64 or 128
    model = Model(size).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, labels = sequence(shard.seqlen, T, size.vocabulary)
    count = int((labels != -100).sum())
    tokens, labels = (shard.layout.shard(x, 1, shard.rank).to(device) for x in (tokens, labels))
    position = shard.layout.positions(T, shard.rank).to(device)
    losses = []
    for _ in range(steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            logits = model(tokens, position, shard)
        loss = F.cross_entropy(logits[0].to(dtype), labels[0], reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if shard.group is not None:
            for x in (loss, *(p.grad for p in model.parameters())):
                dist.all_reduce(x)
        optimizer.step()
        losses.append(float(loss))
    return losses


def run_rank(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    store, backend = dist.TCPStore("127.0.0.1", port, is_master=False), "gloo"
    device = torch.device(options.device)
    if device.type == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=options.world)
    layout = StripedLayout(options.world)
    shard = Shard(layout, RingGroups.create(), options.schedule, options.tokens)
    losses = train(shard, padded(options), options.steps, getattr(torch, options.dtype), device)
    if rank == 0:
        results.put(losses)
    dist.destroy_process_group()


def padded(options: argparse.Namespace) -> int:
    """Returns the padded length, which both runs use: whole tiles on every rank."""
    return StripedLayout(options.world).pad_len(options.tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, default=2, help="number of processes")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--schedule", default="auto", help="auto, allgather, ring or double_ring")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, options, results)
    ranks = multiprocessing.spawn(run_rank, arguments, nprocs=options.world, join=False)
    alone = Shard(StripedLayout(1), None, options.schedule, options.tokens)
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    want = train(alone, padded(options), options.steps, dtype, device)
    while not ranks.join():
        pass
    got = results.get()

    print(f"step  one process  {options.world} processes")
    for step, (a, b) in enumerate(zip(want, got, strict=True)):
        print(f"{step:4}  {a:11.6f}  {b:11.6f}")
    difference = max(abs(a - b) for a, b in zip(want, got, strict=True))
    rounding = 2e-2 if options.device == "cuda" else 1e-4 if options.dtype == "float32" else 1e-10
    equal = difference < rounding
    print(f"largest difference {difference:.1e}: {'equal' if equal else 'NOT equal'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
