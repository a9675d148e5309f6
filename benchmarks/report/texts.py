"""What the generated pages say about how it was measured, and what."""

from collections.abc import Iterable

from ..attention.workloads import LONG_PROMPTS, SHORT_BATCHES
from .tables import markdown

FAMILIES = {
    "gdn": "Gated delta net",
    "dualkv": "Attention over shared prompts",
    "sparse_ring": "Vertical-slash attention",
}

# Sections of their own beside the headline's: a set each, from the record with most of its rows.
ASIDE = {
    "gdn": {
        "filled": "Sequences that fill the GPU", "segments": "Few heads, cut into segments",
        "short": "Rollouts of many short sequences", "decode": "Decoding",
        "kernels": "Kernels alone",
    },
    "conv": {},
    "dualkv": {
        "short": "Short batches", "largest": "The largest", "layer": "A decoder layer",
        "responses": "More and more responses to one prompt",
        "wide": "Heads of size 256", "dense": "Sequences that share nothing",
        "published": "Shapes that others published",
    },
    "hybrid": {},
    "sparse_ring": {
        "grid": "Lengths and densities", "dense": "Without a mask", "index": "The choice of lines",
    },
}  # fmt: skip

GRAPHS = """\
Times are those of CUDA graph replays, and of calls without a graph (eager) through the public
Python function. Eager calls mostly take longer, ours and the rivals': the GPU waits for Python
between launches, and where calls are short this decides which is faster. `–` was not measured.

A rival is another implementation with right results on the same GPU. `best rival / ours` is the
fastest one's time over ours, a geometric mean over rows: above 1 ours is faster. Rows are shapes,
and those below 1 are slower (▼). Heads are key / value heads of a gated delta net, key-value /
query heads of attention. `rival dense` is the best rival without a mask, beside ours under one."""

METHOD = """\
Every result is checked before it is timed. A gated delta net: against the chunked algorithm in
fp64 over all heads on a GPU, against the token loop in fp64 without one. Attention: against its
definition in fp32 on a GPU, of the first and the last key head where there are more than 32768
tokens, of the last alone in one sequence of more than 65536 without a mask. A layer: against every
sequence alone, in fp32. An index: by the share of attention that its lines hold, beside what the
definition's lines hold. Times are medians over replays of CUDA
graphs, in bursts of 20 ms that alternate between implementations with the device idle in between,
because a GPU under sustained load lowers its clock. Input sets rotate so that no call finds its
inputs in the L2 cache; one is enough where it is 16 times as large. Layouts and gates that a
library wants otherwise are converted outside the timed region. The floor is the larger of counted
FLOPs over the rate of a large matrix product and of bytes (inputs once, outputs once) over the rate
of a large copy, both measured in the same run. Tables have two numbers in a cell: graph / eager.
An eager call is one of the public Python function without a graph, Python and launches included:
where calls are short it is another comparison than that of the replays. Eager calls are timed in
bursts of 20 ms that alternate likewise; a sample is a call among up to ten in a row, after which
the device is waited for. `host, additions` is how long the host is busy with such a call, in
multiples of an addition of eight floats (`x + 1`) beside it in the same process. `first call`
includes compilation where no cache had it: ours, and that of the rival whose replays are
fastest. `–` was not measured."""

WORKLOADS = """\
`python -m benchmarks.sm90 gdn --set NAME,...` runs the sets below, `--list` prints their
workloads, `--quick` means `anchors`. `--warm 8` only compiles, in eight processes, so that the
run after it finds everything cached; `--cold` fills the L2 cache with other data before each
call. Gates are `model` (-exp(A_log) softplus(a + dt_bias), from hardly any to nearly total decay)
or `published` (as FlashQLA publishes with: logsigmoid(x) / 16, and 0 for a quarter of the heads).
Heads are key heads / value heads, of size 128. `8192x4` is four sequences of 8192 tokens, and
`64 of 2` is 64 sequences of two.

`forward` is every head configuration at every length, `backward` training's, `short` rollouts of
many short sequences. `filled` has the rows whose sequences and heads fill the GPU without cutting
any, `segments` single sequences of few heads, which are cut; `--impl ours,ours_whole` times them
uncut, too. `decode` is `fused_recurrent_gated_delta_rule` on batches of a few tokens, with fp32
states given and returned, nearly all of its bytes. `kernels` times single kernels.

Attention has 32 query and 8 key heads of size 128. `dualkv` rows are groups of responses, each with
one prompt: `long` prompts of 4096 to 32768 tokens (A to D), `short` batches (S1 to S8; the last
table has both), `responses` 1 to 64 of 512 tokens on 4096, `dense` sequences that share nothing,
and shapes that others published; `wide` has 16 query heads of size 256, and 2 or 4 key heads, as
Qwen3-Next and Qwen3.5 have. Rivals that cannot share prompts get every sequence in full, cuDNN
with padding.
`layer` is forward and backward of a whole layer of Qwen3-8B: hidden size 4096, an MLP of 12288.
Useful TFLOP/s count what is visible once, whatever is repeated. `sparse_ring` rows are one sequence
under a mask of diagonals of 64-token blocks and of single columns, which are 15 % of it; `run4` has
diagonals that come in fours. `dense` has no mask, and `index` is the choice of lines.
`torchrun --nproc-per-node N -m benchmarks.ring` times rings of N GPUs, sparse and dense;
`python -m benchmarks.ring_ranks` takes the ranks of larger rings in turn on one, without
transfers."""


def batches() -> str:
    """What A to D and S1 to S8 are; a range where groups differ."""

    def span(values: Iterable[int]) -> str:
        low, *_, high = sorted(values) * 2
        return str(low) if low == high else f"{low} to {high}"

    lines = []
    for label, groups in {**LONG_PROMPTS, **SHORT_BATCHES}.items():
        prompts, responses = zip(*groups, strict=True)
        lengths = span(n for of_group in responses for n in of_group)
        lines.append([label, str(len(groups)), span(prompts), span(map(len, responses)), lengths])
    header = ["batch", "prompts", "tokens of a prompt", "its responses", "tokens of a response"]
    return markdown(header, lines)
