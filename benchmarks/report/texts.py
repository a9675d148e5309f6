"""What the generated pages say about how it was measured, and what."""

from .names import BATCHES, span
from .tables import markdown

FAMILIES = {
    "gdn": "Gated delta net",
    "model": "Models in training",
    "dualkv": "Attention over shared prompts",
    "hybrid": "Hybrid models over shared prompts",
    "sparse_ring": "Sparse attention",
    "conv": "Causal convolution",
}

# Rows of a gated delta net beside the front page: what, set (and the end of its rows' names), kind,
# and how many make a record.
SECTIONS = (
    ("sequences and heads that fill the GPU", "filled", "fwd", 12),
    ("one or two sequences, few heads", "segments", "fwd", 16),
    ("one or two sequences, few heads", "segments", "bwd", 12),
    ("many short sequences", "short", "fwd", 4),
    *(
        (f"head sizes {k}/{v}", f"sizes:d{k}x{v}", kind, 2)
        for k, v in ((96, 192), (128, 256), (256, 512))
        for kind in ("fwd", "bwd")
    ),
    ("64 to 256 sequences", "decode", "decode", 18),
)

STALE = """\
Kernels changed since; [docs/records](docs/records/README.md) has each record's commit and the
command that measures today's."""
CURRENT = (
    "The records that this paragraph names ran today's kernels: a record has digests of the "
    "generated code that ran, and they equal this checkout's "
    "([records](docs/records/README.md#all-records)). *With changes*: the checkout that ran had "
    "files that differed from its commit; the digests are of what ran."
)
MORE_LINES = (
    "Of the gated delta net and of models these are the lines of training with 16/32 heads, and "
    "of FLA's default layer. [All lines](docs/performance.md#in-one-table) have other heads, and "
    "forward and backward by themselves."
)
OTHER_GPUS = """\
[docs/performance.md](docs/performance.md#gated-delta-net) has the gated delta net on other GPUs."""
BEFORE_PROGRAMS = """\
The gated delta net's eager times are older than the replay of calls: since then an eager call with
prebuilt kernels takes 0.96 to 1.03 times as long as its graph
([note](docs/notes/native-launch.md), section 7)."""

TWO_GROUPS = """\
Some forwards have shapes of two groups, and the mean is over both: one or two sequences, which are
cut into segments where that is faster; and sequences that fill the GPU without it ({shapes}).
Least to greatest of each group, in CUDA graphs: {spans}."""

TERMS = """\
- **Rival**: another library's result for the same inputs, on the same GPU in the same run, checked
  before it is timed. For a gated delta net it is the fastest of FlashQLA, FlashInfer and FLA at
  each shape, of a forward and backward the fastest that has both. For shared prompts it is
  what you would replace: flash-attn-4 (FA4), and in hybrid models our own kernels, on whole
  sequences, with the prompt in each of them. For sparse attention it is FA4 on all pairs, which is
  another result; a mask with 5 % of the pairs could at best be 20 times as fast.
- **Heads**: key / value heads of a gated delta net, key / query heads of attention. 16/32 are those
  of Qwen3-Next and of Qwen3.5 4B, 9B and 35B, and 4/8 their share on one of four GPUs; 16/48 those
  of 27B; 16/64 those of 122B and 397B, and 2/8 their share on one of eight; 16/16 those of 0.8B and
  2B; 128 columns each. OLMo Hybrid has 30/30 with keys of 96 columns and values of 192, FLA's
  default layer 6/6 with 256 and 512.
- **Faster**: the rival's time divided by ours, as a geometric mean over all **shapes** (sets of
  sequence lengths). **Worst**: the least of these ratios; below 1 (▼) ours is slower. The
  **typical** shape has the median ratio of CUDA graphs, the lower of two in the middle.
- **Graph**: replays of a CUDA graph, the time of the GPU alone. **Eager**: calls of the public
  Python function, where a GPU with little to do waits for Python; ours with prebuilt kernels, as a
  wheel has them. With kernels that were compiled at their first call, calls are not replayed, and
  the host takes several times as long; a wheel or a CUDA graph avoids that. Long calls take the
  same time either way, within a few percent. `–` was not measured; `*` was not captured in a graph,
  so that gaps between launches count, of both.
- Calls have the defaults of each library; of ours, `exact=False`. A forward is one without
  gradients. Keys are normalised and gates activated before; initial states are given. Gates are
  those that FlashQLA publishes its times with; for 96/192 and 256/512, which of these libraries FLA
  alone runs, gates of a model. Models in training are four layers of transformers with
  `swap(model)`, beside transformers with FLA and causal-conv1d."""

# Sections of their own beside the headline's: a set each, from the record with most of its rows.
ASIDE = {
    "gdn": {
        "filled": "Sequences that fill the GPU", "segments": "Few heads, cut into segments",
        "short": "Rollouts of many short sequences", "sizes": "Other head sizes",
        "decode": "Decoding",
        "serving-prefill": "Serving: prefill in a pool",
        "serving-checkpoints": "Serving: prefill with checkpoints",
        "serving-decode": "Serving: decoding in a pool", "serving-drafts": "Serving: drafts",
        "serving-step": "Serving: a layer's step",
        "serving-parallel": "Serving under tensor parallelism",
        "kernels": "Kernels alone",
    },
    "model": {"fla": "FLA's layer"},
    "conv": {},
    "dualkv": {
        "short": "Short batches", "largest": "The largest", "layer": "A decoder layer",
        "responses": "More and more responses to one prompt",
        "wide": "Heads of size 256", "dense": "Sequences that share nothing",
        "published": "Shapes that others published",
    },
    "hybrid": {"step": "A step of decoding"},
    "sparse_ring": {
        "grid": "Lengths and densities", "dense": "Without a mask", "index": "The choice of lines",
    },
}  # fmt: skip

RECORDED = """\
The newest record of each set has its tables here: {pages}. Of any other in the
[list](#all-records), `python -m benchmarks.report --record ID` prints them; `ID` may be the four
letters at its end, which other pages name beside a date."""

RECORDS = """\
The newest record with the rows of each section, row by row; [README.md](README.md#columns)
defines the columns, and says how rows are measured and what a set contains. Cells with two numbers
are CUDA graph / eager."""

FINDINGS = """\
What the kernels gain, and where they do not, made from the records in `benchmarks/results`, whose
tables are in [docs/records](docs/records/README.md). Other numbers name their note."""

MORE_TERMS = """\
- **Shape**: of a gated delta net, a set of sequence lengths, with 16-bit inputs; of shared prompts,
  a batch; of sparse attention, a length, a density, and how many diagonals come in a row.
- **Density**: the share of causal (query, key) pairs that a mask keeps. The ideal gain is 1 /
  density, because a kernel has at least the kept pairs to compute.
- **Three calls a group**: attention over shared prompts put together by hand, from three calls of
  flash-attn-4 and a merge, for comparison. No library offers it.
- **The rule**: a gated delta net's layer without projections, convolution and norm. Pool, drafts,
  pack, segment and other words: [glossary](docs/glossary.md#words-of-users)."""

HYBRID_NOTE = """\
- A step of four layers of Qwen3-Next's size, three of them gated delta nets, takes 4.1 to 6.0 times
  less over packed groups than over whole sequences by the same kernels, with about a fifth of the
  memory ([note](docs/notes/hybrid-trees.md), section 3)."""

BY_HAND = {"fa4_shared": "three flash-attn-4 calls a group, put together by hand"}
SLOWER_HERE = """\
Where ours is slower, at worst
([how many shapes, and both ways](docs/performance.md#in-one-table)):"""
OLDER_HERE = "of older kernels, whose eager calls took the host longer"
SLOWER_ONCE = """\
And in these of 2026-11-22, measured with an older version and not yet again; eager calls take less
time since ([note](docs/notes/native-launch.md), section 7):"""

STALE_ROWS = """\
*Stale*: kernels changed since. Eager times of 2026-11-22 are also older than the replay of calls
([note](docs/notes/native-launch.md), section 7)."""

NO_MODELS = "no training step of a model was measured."
MODELS_NOTE = """\
Three gated delta nets and an attention layer, with their MLPs, random weights in bf16, eager calls;
no embedding, head or optimizer; more than 8192 tokens were not timed. *Ours*: after `swap(model)`,
with a peak of memory within 3 % of FLA's; *our rule alone*, *FLA* and *PyTorch alone*: with
PyTorch's convolution, as transformers has where causal-conv1d is not installed. Whole steps of the
Trainer and of TRL are in [a note](docs/notes/whole-steps.md)."""

SHARED_NOTE = """\
[Where our backward's time goes](docs/notes/dualkv-backward.md) at long prompts, in a note."""

SPARSE_GRID = """\
[Other lengths and densities](docs/records/sparse_ring.md#lengths-and-densities): 32K to 256K
tokens, 1 to 20 %, diagonals alone and in runs."""

SPARSE_NOTE = """\
Without a mask, as in `dense_layers`, ours is slower than flash-attn-4. How much attention a mask
holds [is to be measured](docs/long-context.md); speed does not show that a model trains as well."""

SEVERAL_GPUS = (
    "**Several GPUs** that share a sequence, beside FLA's context parallelism. Eager calls, "
    "medians, the slowest GPU. A cell has two numbers, of the two "
    "[layouts](docs/gdn.md#sequences-over-several-gpus), contiguous / zigzag; `– / –`: FLA was "
    "not timed. *Python alone*: the host is busy so long, in ms; a time that is no longer is the "
    "host's. On two GPUs FLA is no faster than it would be on one."
)
EXACT = (
    "- `exact=True` still cuts sequences; a segment's start then leaves out only what has decayed "
    "below e^-104, which is 0 in fp32, in place of e^-12. Of these times 16/32 heads have none: "
    "one sequence of 8192 tokens is [cut in the forward and whole in the "
    "backward](docs/gdn.md#long-sequences-few-heads), so `exact` changes nothing in that "
    "backward; what it costs that forward was not timed."
)

RING_NOTE = """\
On several GPUs, 2/16 heads, 5 % density, forward + backward of 128K tokens: four H100 take 2.16 +
5.86 ms, 14.9 times as fast as a dense ring of cuDNN's attention there, and 14 % longer than a
quarter of one GPU's time; four H200 8.08 ms, 12 times as fast as a dense ring of flash-attn-4;
eight take 16.1 + 48.0 ms for 512K tokens ([note](docs/notes/sparse-ring.md), 12 and 13)."""

CONVOLUTION = """\
With its activation, over packed sequences and trees, it is bounded by memory. CUDA graphs:"""

SERVING_NOTE = (
    "Calls of an inference engine, on a pool of states in pages: in fp32, but for one row of "
    "prefill in bf16 (4/16 heads). *Checkpoints* are states on the way through a prompt, which an "
    "engine's [prefix caching](serving.md#is-it-worth-it) asks for. The three shapes of "
    "prefill are {prefill}. A rival's time has all that an engine has to do for it: where a "
    "library takes no slots, gathers, zeros, casts and scatters. The engines' Triton kernels ran "
    "without the engine; the norm behind them in a layer's step is ours. FlashInfer failed where "
    "it is not listed; vLLM prefills by *gather and scatter*. Ours was told the lengths on the "
    "host, normalised keys and activated gates, which plug-ins do not all have: lengths that only "
    "the GPU knows took 1.04 times as long in the mean, at worst 1.23 "
    "([note](notes/gdn-segments.md#23-lengths-that-the-device-alone-knows), no pool)."
)

SERVING_PARALLEL = (
    "Under tensor parallelism a GPU has its share of a layer's heads. Prefill of 8 prompts of "
    "2048 tokens without checkpoints, a token of each of 64 sequences, and 4 drafts of each, all "
    "on states in fp32, in CUDA graphs. Ratios are a rival's time / ours: *vLLM's way* of prefill "
    "is FlashInfer with gathers and scatters, *FlashInfer* its call on the pool itself, *vLLM*, "
    "*SGLang* their Triton. **Count on the gain of one GPU**: of prefill with 2/8, 4/8 and 2/4 "
    "heads, the largest ratios, FlashInfer takes longer than with twice as many; why was not "
    "looked into. What layers save: [a table](serving.md#is-it-worth-it). Three shapes "
    "make the front page's prefill: the two lines of one GPU here, and one sequence of 8192 "
    "tokens with 2/8 heads, of the table above. {source}."
)

NO_SERVING = """\
No record yet: `python -m benchmarks.sm90 gdn --set serving --save` on a Hopper GPU makes one. Times
beside the functions of vLLM and SGLang are in [a note](docs/notes/gdn-decoding.md)."""


CHECKED = """\
Every result is checked before it is timed. A gated delta net: against the chunked algorithm in
fp64 over all heads on a GPU, against the token loop in fp64 without one. Attention: against its
definition in fp32 on a GPU, of the first and the last key head where there are more than 32768
tokens, of the last alone in one sequence of more than 65536 without a mask. A layer: against every
sequence alone, in fp32. An index: by the share of attention that its lines hold, beside what the
definition's lines hold.

Times are medians over replays of CUDA graphs, in bursts of 20 ms that alternate between
implementations with the device idle in between, because a GPU under sustained load lowers its
clock. A sample of an eager call is one of up to ten in a row. Input sets rotate, so that no call
finds its inputs in the L2 cache; one is enough where it is 16 times as large. The *floor* is the
larger of counted FLOPs over the rate of a large matrix product and of bytes (inputs once, outputs
once) over the rate of a large copy, both measured in the same run. A record is *stale* if the code
of a kernel that ran in it has changed since (`qla_kernels/digests.json`), else *current*; *Kernels*
counts those.

A backward alone takes what its forward keeps for it by default. Until noon (UTC) of 2026-11-23
FlashQLA's did not, in CUDA graphs, and computed its segments again: rows of a backward from before
have no graph times of rivals here."""

COLUMNS = """\
- **heads**: key / value heads of a gated delta net, key-value / query heads of attention; of a
  convolution its channels.
- **lengths**: `4096x2` is two sequences of 4096 tokens, `32768x1` one of 32768 (`1x32768` in notes
  and files of before), `64 of 2` 64 sequences of two, `3749 in 5` five ragged ones of 3749 tokens
  together; `28x4096+2048` 28 responses of 2048 tokens to a prompt of 4096; `A` and `S1` are batches
  of the last table. `/4` (of dualkv and hybrid): without a GPU, 4 times
  shorter; other rows have the lengths that ran.
- **inputs**: gates and initial state, dtype, or the share of pairs that a mask keeps.
- **A library's name**: medians in ms, CUDA graph / eager. **Bold** is the least of its row. `–` was
  not measured; `*` was not captured, so that gaps between launches count; a word says why there is
  no time.
- **ours, two calls**: a step of decoding by two functions. **ours, torch's norm**: with PyTorch's
  norm behind them. **ours, a decode step**: other work, for comparison, beside drafts.
- **ours, training**: the forward that also keeps what its backward needs, as rivals always do.
  **ours, uncut**: `auto_cp=False`. **ours, exact**: `exact=True`. **ours, deterministic**:
  `deterministic=True`, whose gradients repeat bit for bit.
- **token loop**: the definition of a gated delta net, in torch. It is timed without a GPU alone,
  where it counts as a rival.
- **flash-attn-4, 3 calls, not merged**: the parts of a result, which nobody can use as they are. It
  does not count as a rival.
- **rival / ours**: the time of the row's fastest rival over that of `ours`; ▼: ours is slower.
  **dense rival / ours**: the same of the fastest rival without a mask.
- **of floor**: the floor, above, over our time.
- **first call s**: ours, and that of the rival of the ratio; it includes compilation where no cache
  had it.
- **workload**: kind, heads, lengths, gates; `h0`: with an initial state; `d64`: the head size.
  **implementation**: ours or a library.
- **p20, p50, p80**: quantiles of times in ms, of graphs, then of eager calls.
- **host, additions**: how long the host is busy with an eager call, in multiples of an addition of
  eight floats (`x + 1`) beside it in the same process.
- **useful TFLOP/s**: operations that the problem has, each counted once, over the median of graphs;
  whatever an implementation computes beside them is not counted.
- **TFLOP/s, GB/s**: counted work, as of the floor, over the median of graphs. **peak MiB**: memory
  beyond the inputs. **worst error**: the largest of all results' relative L2 errors."""


def batches() -> str:
    """What A to D and S1 to S8 are; a range where groups differ."""
    lines = []
    for label, groups in BATCHES.items():
        prompts, responses = zip(*groups, strict=True)
        lengths = span(n for of_group in responses for n in of_group)
        lines.append([label, str(len(groups)), span(prompts), span(map(len, responses)), lengths])
    header = ["batch", "prompts", "tokens of a prompt", "its responses", "tokens of a response"]
    return markdown(header, lines)
