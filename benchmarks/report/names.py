"""What rows, kinds and batches are called on pages and in figures."""

import re
from collections.abc import Iterable

from ..attention.workloads import LONG_PROMPTS, SHORT_BATCHES, Group
from ..harness.records import Row, Run

TITLES = {
    "fwd": "Forward", "bwd": "Backward", "both": "Forward and backward", "decode": "Decoding",
    "decoding": "Step of decoding", "pool_prefill": "Prefill in a pool",
    "pool_decode": "Decoding in a pool", "drafts": "Verification of drafts",
    "index": "Index", "layer": "Decoder layer",
    "block": "Block of four layers",
    "step": "Forward and backward", "mixers": "Mixers of four layers",
    "layers": "Four layers, forward and backward",
    "fla_layer": "FLA's layer, forward and backward",
    "ranks_fwd": "Forward over ranks", "ranks_both": "Forward and backward over ranks",
    "linear": "Linear layer", "full": "Attention layer", "mlp": "MLP",
}  # fmt: skip


def title_of(kind: str) -> str:
    return TITLES.get(kind, f"{kind} alone")


def gpu(run: Run) -> str:
    """`H100` of `NVIDIA H100 80GB HBM3`."""
    found = re.match(r"NVIDIA (\w+)", run.device)
    return found[1] if found else run.device


def shape_of(row: Row) -> str:
    """The row's lengths in words, or a workload's."""
    layout, _, factor = row.layout.partition("/")
    return f"{_words(layout)}, {factor} times shorter" if factor else _words(layout)


def _words(layout: str) -> str:
    if layout in BATCHES:
        return f"{layout}: {batch(BATCHES[layout])}"
    for pattern, words in SHAPES:
        if found := re.fullmatch(pattern, layout):
            return words.format(*found.groups())
    return layout


BATCHES: dict[str, tuple[Group, ...]] = {**LONG_PROMPTS, **SHORT_BATCHES}
SHAPES = (
    (r"(\d+)x1 over (\d+), (\w+)", "1 sequence of {} tokens over {} GPUs, {}"),
    (r"(\d+)x1", "1 sequence of {} tokens"),
    (r"(\d+)\+(\d+)", "sequences of {} and {} tokens"),
    (r"1x(\d+)", "{} sequences of 1 token"),
    (r"1x(\d+)\+(\d+)", "1 response of {1} to a prompt of {0}"),
    (r"(\d+)x(\d+)\+(\d+)", "{0} responses of {2} to a prompt of {1}"),
    (r"(\d+)of(\d+)x(\d+)\+(\d+)", "{1} responses of {3} to each of {0} prompts of {2}"),
    (r"(\d+)x(\d+)", "{1} sequences of {0} tokens"),
    (r"(\d+) in (\d+)", "{1} ragged sequences, {0} tokens"),
    (r"1 of 1", "1 sequence of 1 token"),
    (r"(\d+) of 1", "{} sequences of 1 token"),
    (r"(\d+) of (\d+)", "{} sequences of {} tokens"),
    (r"([\d.]+)k-([\d.]+)%-run1", "{}K tokens, {} %, single diagonals"),
    (r"([\d.]+)k-([\d.]+)%-run(\d+)", "{}K tokens, {} %, diagonals in runs of {}"),
    (r"([\d.]+)k-dense", "{}K tokens, no mask"),
    (r"([\d.]+)k", "{}K tokens"),
)


def batch(groups: tuple[Group, ...]) -> str:
    """A batch of groups in words; a range where they differ."""
    prompts, responses = zip(*groups, strict=True)
    count = span(map(len, responses))
    lengths = span(n for of_group in responses for n in of_group)
    if len(groups) == 1:
        return f"{count} responses of {lengths} to a prompt of {prompts[0]}"
    return f"{len(groups)} prompts of {span(prompts)}, {count} responses of {lengths} to each"


def span(values: Iterable[int]) -> str:
    low, *_, high = sorted(values) * 2
    return str(low) if low == high else f"{low} to {high}"
