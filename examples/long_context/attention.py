"""The two kinds of attention: sparse, on this package's kernels, and a dense ring to compare with.

Each kind has a layout, a name that transformers knows it by, and arguments of the model's call.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qla_kernels.integrations import transformers_sparse_ring as hook
from qla_kernels.sparse_ring import RingGroups, StripedLayout, VerticalSlash, ZigZagLayout
from qla_kernels.sparse_ring.layouts import Layout
from qla_kernels.sparse_ring.measure import LineLog

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Attention:
    """A kind of attention: what a model, its tokens and its calls need of it."""

    name: str  # transformers' attn_implementation
    layout: Layout
    arguments: Callable[[int], dict[str, Any]]  # of the model's call, for a sequence's length
    log: LineLog | None  # of sparse attention: the lines of each layer


def sparse(
    group: RingGroups,
    pattern: VerticalSlash,
    schedule: Any,
    dense_layers: tuple[int, ...],
    recomputed: bool,
) -> Attention:
    """Vertical-slash attention over stripes; `dense_layers` have every diagonal.

    If layers are `recomputed`, the keys and values that a recomputed forward gathers serve the
    backward that follows it.
    """
    hook.register()
    layout, log = StripedLayout(group.world), LineLog()

    def arguments(seqlen: int) -> dict[str, Any]:
        settings = hook.SparseRingConfig(
            group, layout, pattern, schedule, dense_layers, seqlen, recomputed, log
        )
        return {"sparse_ring": settings}

    return Attention(hook.NAME, layout, arguments, log)


def dense(group: RingGroups, kernel: str) -> Attention:
    """Exact attention of a library's kernels over a zigzag ring, which is in benchmarks/ring."""
    sys.path.append(str(CHECKOUT))  # a program's own path begins at its folder, examples/
    try:
        from benchmarks.ring import dense as ring
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("benchmarks"):
            raise
        fix = "run the program of a checkout"
        raise SystemExit(f"--attention dense: no benchmarks/ in {CHECKOUT}; {fix}") from None
    import transformers

    run = ring.kernel_of(kernel)

    def layer(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        return ring.attention(q, k, v, kernel=run, ring=group.whole), None

    transformers.AttentionInterface.register("dense_ring", layer)
    return Attention("dense_ring", ZigZagLayout(group.world), lambda seqlen: {}, None)


def default_kernel(device: torch.device) -> str:
    """Returns the fastest kernel of the dense ring that needs nothing but torch."""
    return "cudnn" if device.type == "cuda" else "definition"
