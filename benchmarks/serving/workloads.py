"""What an engine calls for its gated delta nets: prefill, decoding, drafts, and a layer's step.

Heads are those of Qwen3.5 on one GPU or on one of two, four or eight, and of Qwen3-Next. They are
sets of `gdn`: `python -m benchmarks.sm90 gdn --set serving`.
"""

from dataclasses import dataclass, replace

from ..gdn.workloads import Sequences
from ..harness.workload import Heads, Lengths
from ..hybrid.step import DecodeStep, Decoding

SHORT = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class PoolPrefill(Sequences):
    """Prompts of equal length, from slots of a pool into others; every third starts from zero.

    That is prefill behind a prefix cache: whose states it starts from stay. It also lets a call be
    repeated, because the slots that it reads do not change.
    """

    heads: Heads
    head_dim: int = 128
    lengths: Lengths = ()
    pool: str = "float32"  # the dtype of its states
    every: int = 0  # tokens between checkpoints; 0: none are kept

    family, kind, direction, served = "gdn", "pool_prefill", "fwd", True

    @property
    def name(self) -> str:
        kept = f"-every{self.every}" if self.every else ""
        layout = self.layout.replace(" ", "")
        return f"gdn-prefill-{self.heads_label}-{layout}-{SHORT[self.pool]}-pool{kept}"

    @property
    def what(self) -> str:
        kept = f", a checkpoint every {self.every} tokens" if self.every else ""
        return f"{SHORT[self.pool]} pool{kept}"

    @property
    def kept(self) -> int:
        """Checkpoints of a sequence."""
        return self.lengths[0] // self.every if self.every else 0

    def reduced(self, factor: int) -> "PoolPrefill":
        """Fewer and shorter sequences, of whole chunks: without a GPU."""
        if factor == 1:
            return self
        length = max(64, self.lengths[0] // factor // 64 * 64)
        lengths = (length,) * min(4, len(self.lengths))
        return replace(self, lengths=lengths, every=64 if self.every else 0)


@dataclass(frozen=True)
class PoolDecode(Decoding):
    """A token of each sequence, or its drafts, in a pool in fp32.

    One sequence in sixteen is padding, as in a batch that a CUDA graph was captured for.
    """

    heads: Heads
    head_dim: int = 128
    sequences: int = 1
    drafts: int = 0  # of each sequence, the token before them included; 0: decoding

    family, what, served = "gdn", "fp32 pool", True

    @property
    def kind(self) -> str:
        return "drafts" if self.drafts else "pool_decode"

    @property
    def name(self) -> str:
        layout = self.layout.replace(" ", "")
        return f"gdn-{self.kind.replace('_', '-')}-{self.heads_label}-{layout}"

    @property
    def width(self) -> int:
        return self.drafts or 1

    @property
    def live(self) -> int:
        return self.sequences - self.sequences // 16

    def reduced(self, factor: int) -> "PoolDecode":
        """Fewer sequences, for machines without a GPU."""
        return replace(self, sequences=max(1, self.sequences // factor))


@dataclass(frozen=True)
class LayerStep(DecodeStep):
    """A layer's step of decoding, beside the engines' launches."""

    family, served = "gdn", True

    @property
    def name(self) -> str:
        return f"gdn-step-{self.heads_label}-{self.sequences}"


Row = PoolPrefill | PoolDecode | LayerStep
PREFILL_HEADS: tuple[Heads, ...] = ((16, 64), (8, 32), (4, 16), (2, 8), (16, 32))
DECODE_HEADS: tuple[Heads, ...] = ((16, 64), (16, 32), (4, 16), (2, 8))
LENGTHS: tuple[Lengths, ...] = ((8192,), (2048,) * 8, (512,) * 64)
EVERY = 256

PREFILL = tuple(
    PoolPrefill(heads, lengths=lengths, pool=pool)
    for pool in ("float32", "bfloat16")
    for heads in PREFILL_HEADS
    for lengths in LENGTHS
)
CHECKPOINTS = tuple(replace(w, every=EVERY) for w in PREFILL if w.pool == "float32")
DECODE = tuple(PoolDecode(h, sequences=n) for h in DECODE_HEADS for n in (1, 16, 64, 256, 512))
DRAFTS = tuple(
    PoolDecode(heads, sequences=count, drafts=drafts)
    for heads in DECODE_HEADS
    for count in (1, 16, 64)
    for drafts in (2, 4, 8)
)
STEP = tuple(LayerStep(heads, count) for heads in DECODE_HEADS for count in (1, 16, 64, 256))

# heads of a layer, and of one of two, four and eight GPUs that share them
PARALLEL: dict[Heads, int] = {
    (heads // count, value_heads // count): count
    for heads, value_heads in ((16, 64), (16, 32))
    for count in (1, 2, 4, 8)
}
PARALLEL_ROWS: tuple[PoolPrefill | PoolDecode, ...] = tuple(
    row
    for heads in PARALLEL
    for row in (
        PoolPrefill(heads, lengths=(2048,) * 8),
        PoolDecode(heads, sequences=64),
        PoolDecode(heads, sequences=64, drafts=4),
    )
)

_QUICK = (
    "gdn-prefill-16x64-2048x8-fp32-pool", "gdn-prefill-2x8-8192x1-fp32-pool",
    "gdn-prefill-4x16-512x64-bf16-pool", "gdn-prefill-16x32-2048x8-fp32-pool-every256",
    "gdn-pool-decode-16x64-64of1", "gdn-pool-decode-16x32-256of1", "gdn-pool-decode-2x8-1of1",
    "gdn-pool-decode-4x16-512of1", "gdn-drafts-16x32-64of4", "gdn-drafts-2x8-16of2",
    "gdn-step-16x32-64", "gdn-step-2x8-1",
)  # fmt: skip
EVERY_ROW: tuple[Row, ...] = (*PREFILL, *CHECKPOINTS, *DECODE, *DRAFTS, *STEP)

# `--quick` takes the rows of NAME-quick instead of those of NAME
SERVING: dict[str, tuple[Row, ...]] = {
    "serving": EVERY_ROW,
    "serving-quick": tuple(w for name in _QUICK for w in EVERY_ROW if w.name == name),
    "serving-prefill": PREFILL,
    "serving-checkpoints": CHECKPOINTS,
    "serving-decode": DECODE,
    "serving-drafts": DRAFTS,
    "serving-step": STEP,
    "serving-parallel": PARALLEL_ROWS,
}
