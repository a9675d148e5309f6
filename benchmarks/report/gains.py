"""The front page's first table, who gains what, and the sentences that stand behind its numbers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..harness.records import Row, Run
from . import models, tables
from .figures import density_of, gain, steps
from .names import BATCHES, gpu, shape_of, span, title_of
from .select import FLAS, Digests, aside, headline, of_sizes
from .spread import Spread, beside, spread

UNKNOWN = "not measured yet"
VLLMS_WAY = "flashinfer_gathers"  # of prefill
WHOLE_LAYERS = ("16/64", "16/32")  # heads that no other GPU shares
BEHIND = """\
What stands behind the table at the top:"""


class Gain(NamedTuple):
    """A line of the table, and what was measured for it, and what was not."""

    who: str
    type: str
    get: str
    measured: str


GAINS: tuple[Gain, ...] = (
    Gain(
        "run **Qwen3-Next, Qwen3.5 or OLMo Hybrid** in transformers, above all to train them",
        "`integrations.transformers.swap(model)`",
        "{model}; a whole step of the Trainer 1.08 x (Qwen3.5-2B's sizes, beside both)",
        "**Models.** {model_measured} A [whole step](docs/notes/whole-steps.md) of the Trainer, "
        "Qwen3.5-2B's sizes, 8192 tokens, takes 0.446 s (five steps, 0.445 to 0.522) in place of "
        "0.480 (0.469 to 0.484) with FLA and causal-conv1d, H100.",
    ),
    Gain(
        "train gated delta net layers of **flash-linear-attention** (FLA)",
        "`integrations.fla.register()`",
        "{rule}; {layer}. Where FlashQLA is installed, FLA runs that: see below",
        "**The gated delta rule.** {rule_measured} {layer_measured}",
    ),
    Gain(
        "train with **GRPO**, many responses to each prompt",
        "TRL: `integrations.trl.shared_prefix_trainer(GRPOTrainer)(...)`; "
        "veRL: [an option](#switch-it-on)",
        "each prompt computed once: {whole}; a step of TRL without generation, 16 responses of "
        "512, beside torch's attention, **2.6 x** with prompts of 2048, **1.4 x** with 512 (with "
        "half of a step in generation 1.45 and 1.17 x of the whole); with prompts far shorter "
        "than responses nothing",
        "**Shared prompts.** N responses of R tokens to a prompt of P are N (P + R) tokens in "
        "whole sequences and P + N R here: short prompts and long responses gain little. "
        "{whole_measured} Steps of TRL's trainer without generation, which takes as long as before "
        "([H100](docs/notes/whole-steps.md), 16 responses of 512): 2.63 x with a prompt of 2048, "
        "1.42 x with one of 512 (Qwen3-1.7B's sizes, beside torch's attention), 2.66 x on a hybrid "
        "model (Qwen3.5-2B's).",
    ),
    Gain(
        "train **Qwen2, Qwen3 or Llama on 128K tokens** and more, on one GPU or several",
        "`integrations.transformers_sparse_ring.prepare(model)`, "
        "then `sparse_ring=SparseRingConfig(...)` in each call",
        "attention over the blocks and columns that a mask keeps: {sparse}; a step of layers "
        "**2.49 x** (4 %, two GPUs)",
        "**Sparse attention.** {sparse_measured} One step of layers was timed: [2.49 x the tokens "
        "a second](docs/long-context.md#what-to-expect) of cuDNN's dense attention, with 4 % of "
        "the pairs, two H200. Masks were made up; which density a model needs is to be measured "
        "on it.",
    ),
    Gain(
        "serve Qwen3-Next, Qwen3.5 with **vLLM or SGLang**",
        "`VLLM_PLUGINS=qla_kernels vllm serve ... --mamba-ssm-cache-dtype float32`; SGLang: "
        "`--linear-attn-prefill-backend qla`",
        "{serving}; kernels alone, not yet in a running engine",
        "**Serving.** {serving_measured} vLLM keeps Qwen3-Next's states in bf16 by default: the "
        "option `--mamba-ssm-cache-dtype float32` makes them those that were timed, and takes "
        "twice the memory for states. Decoding beside an engine's default of bf16 was not timed. "
        "Over the 36 such layers of Qwen3-Next 16K tokens of prompts take 4.8 ms less with all "
        "heads on one GPU, with checkpoints 3.3 ms less; with a quarter of the heads on each of "
        "four, at the same ratio, about 1.5 ms. "
        "Where decoding or [drafts](docs/glossary.md) dominate, "
        "[leave it off](docs/serving.md#is-it-worth-it).",
    ),
)


def gains(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """Returns the table of who you are, what you type and what you get; and what stands behind."""
    said = _measured(runs, digests)
    body = [[line.who, line.type, line.get.format(**said)] for line in GAINS]
    lines = [" ".join(line.measured.format(**said).split()) for line in GAINS]
    behind = "\n".join([BEHIND, "", *(f"- {line}" for line in lines)])
    return tables.markdown(["you", "you type", "you get"], body, left=3), behind


def _measured(runs: Sequence[Run], digests: Digests) -> dict[str, str]:
    found: dict[str, Callable[[Sequence[Run], Digests], tuple[str, str]]] = {
        "model": models.gain,
        "layer": models.layer,
        "rule": _rule,
        "whole": _whole,
        "sparse": _sparse,
        "serving": _serving,
    }
    said = dict[str, str]()
    for name, of in found.items():
        said[name], said[f"{name}_measured"] = of(runs, digests)
    return said


def _rule(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """Beside FLA's kernels. Its training is eager calls, of forward and backward."""
    run = headline(runs, "gdn", digests)
    said, eager = list[str](), None
    for title, kind in {"forward": "fwd", "forward + backward": "both"}.items():
        rows = [row for row in run.rows if row.kind == kind] if run else []
        ways = [beside(rows, "fla", way) for way in (False, True)]
        if ways[0] and ways[1]:
            each = f"{ways[0].said} in CUDA graphs, {ways[1].said} in eager calls"
            said.append(f"{title} {each} ({heads_of(rows)} heads)")
            eager = ways[1]
    if run is None or eager is None or len(said) < 2:
        return f"the rule beside FLA's: {UNKNOWN}", ""
    few = f"the rule, which its layers call, forward + backward **{_ends(eager)}** as fast as "
    few += "FLA's with heads of 128"
    if sizes := _of_default_layer(runs):
        few += f"; {sizes} with heads of its default layer, 256/512"
    whole = "The rule is a layer without projections, convolution and norm. Beside "
    whole += "FLA's kernels, which transformers runs, too: means (least to greatest) on one "
    whole += f"{gpu(run)}, heads of 128: {'; '.join(said)}. FLA's training is eager calls: the "
    whole += "numbers of its row above, with kernels of a wheel."
    return few, f"{whole}{_beside_the_fastest(run)}"


def _of_default_layer(runs: Sequence[Run]) -> str:
    """Eager forward and backward with the heads of FLA's default layer."""
    said = []
    for kind, run in of_sizes(runs, *FLAS).items():
        if of_all := beside(run.rows, "fla", True):
            said.append(f"{title_of(kind).lower()} **{_ends(of_all)}**")
    return ", ".join(said)


def _beside_the_fastest(run: Run) -> str:
    """Least and most of 16/32 heads, whose table has a line for training alone."""
    said = []
    for title, kind in {"forward": "fwd", "forward + backward": "both"}.items():
        rows = [row for row in run.rows if (row.kind, row.heads) == (kind, "16/32")]
        if of_all := spread([gain(run, row) for row in rows]):
            said.append(f"{title} {of_all.worst:.2f} to {of_all.best:.2f} x")
    rivals = "Beside the fastest of FlashQLA, FlashInfer and FLA, CUDA graphs, 16/32 heads:"
    return f" {rivals} {', '.join(said)}." if said else ""


def _serving(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """CUDA graphs beside what vLLM runs, on states in fp32."""
    prompts, kept, shared = (
        aside(runs, "gdn", f"serving-{part}", digests)
        for part in ("prefill", "checkpoints", "parallel")
    )
    rows = list(prompts.rows if prompts else ())
    rows += [row for row in (shared.rows if shared else ()) if row.heads in WHOLE_LAYERS]
    rows = [row for row in rows if row.kind == "pool_prefill" and "fp32" in row.what]
    steps = [row for row in (shared.rows if shared else ()) if row.kind == "pool_decode"]
    prefill, decoding = beside(rows, VLLMS_WAY), beside(steps, "vllm")
    cached = beside(kept.rows, VLLMS_WAY) if kept else None
    if shared is None or prefill is None or decoding is None:
        return f"serving: {UNKNOWN}", ""
    few = f"prefill **{_ends(prefill)}** as fast as vLLM's way"
    if cached:
        heads = heads_of(kept.rows if kept else ())
        few += f", **{_ends(cached)}** with prefix caching, its default (one shape, {heads} heads)"
    few += f"; decoding **{decoding.worst:.2f} to {decoding.best:.2f} x** of vLLM with the same "
    few += "option, and probably slower than vLLM with states in bf16, its default for Qwen3-Next"
    each = dict.fromkeys(f"{shape_of(row)} of {row.heads} heads" for row in rows)
    whole = f"{gpu(shared)}, CUDA graphs. Prefill: {', '.join(each)}; vLLM's way is FlashInfer "
    whole += "with gathers and scatters around it. Prefix caching asks prefill for "
    whole += "[checkpoints](docs/glossary.md), which were timed at one shape. Decoding: a token of "
    whole += "each of 64 sequences, heads of one to eight GPUs, beside vLLM's Triton. Some kernels "
    whole += "are faster and some slower than the engines' and FlashInfer's "
    return few, f"{whole}([times](docs/performance.md#serving))."


def heads_of(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(row.heads for row in rows))


def _whole(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """Prompts computed once, beside whole sequences: forward and backward together."""
    few, said, longer = [], [], ""
    run = headline(runs, "dualkv", digests)
    rows = [row for row in steps(run) if gain(run, row)] if run else []
    if run and (of_all := spread([gain(run, row) for row in rows])):
        few.append(f"attention **{_ends(of_all)}** as fast as on whole sequences")
        which = f"{len(rows)} shapes"
        if groups := [group for row in rows for group in BATCHES.get(row.layout, ())]:
            which += f", prompts of {span([prompt for prompt, _ in groups])} tokens"
            times = min(prompt / max(responses) for prompt, responses in groups)
            longer = f", with prompts at least {times:g} times as long as a response"
        said.append(
            f"Attention, forward + backward, {gpu(run)}, CUDA graphs, beside flash-attn-4 on whole "
            f"sequences, 8/32 heads of 128: {which}{_short(runs, digests)}."
        )
    run = headline(runs, "hybrid", digests)
    rows = [row for row in run.rows if row.kind == "block"] if run else []
    if run and (of_all := spread([gain(run, row) for row in rows])):
        few.append(f"four layers of Qwen3-Next's sizes **{_ends(of_all)}**")
        said.append(
            f"The layers, with MLPs of 6144 in place of experts, forward + backward, {gpu(run)}, "
            "in no graph, beside ours on whole sequences, prompts of 2048 tokens and more."
        )
    return ", ".join(few) + longer if few else UNKNOWN, " ".join(said)


def _short(runs: Sequence[Run], digests: Digests) -> str:
    """Of S1 to S8, by whether prompts are longer than responses in the mean."""
    run = aside(runs, "dualkv", "short", digests)
    if run is None:
        return ""
    ratios: dict[bool, list[float | None]] = {False: [], True: []}
    for row in steps(run):
        groups = BATCHES[row.layout]
        prompts = sum(prompt * len(responses) for prompt, responses in groups)
        ratios[prompts > sum(sum(responses) for _, responses in groups)].append(gain(run, row))
    few, many = (spread(ratios[longer]) for longer in (False, True))
    if not few or not many:
        return ""
    return (
        f"; of S1 to S8, those with prompts no longer than responses gain {_ends(few)}, those "
        f"with longer ones {_ends(many)}"
    )


def _sparse(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    run = headline(runs, "sparse_ring", digests)
    rows = [] if run is None else [row for row in run.rows if density_of(row)]
    of_all = None if run is None else spread([gain(run, row) for row in rows])
    if run is None or of_all is None:
        return UNKNOWN, ""
    density = density_of(rows[0])
    share = f"{100 * density:g} % of the pairs"
    said = f"**{_ends(of_all)}** as fast as dense with {share}"
    whole = f"Forward and backward each, {gpu(run)}, CUDA graphs, one GPU, beside flash-attn-4 "
    return said, f"{whole}over all pairs; with {share} {1 / density:g} x would be ideal."


def _ends(of_all: Spread) -> str:
    """`1.3 to 1.7 x`, or `3.9 x` where they round to the same."""
    least, most = f"{of_all.worst:.1f}", f"{of_all.best:.1f}"
    return f"{least} x" if least == most else f"{least} to {most} x"
