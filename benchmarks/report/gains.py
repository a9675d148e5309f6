"""The front page's first table, who gains what, and the sentences that stand behind its numbers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..harness.records import Row, Run
from . import models, tables
from .figures import density_of, gain, steps
from .names import BATCHES, gpu, span
from .select import FLAS, Digests, aside, headline, of_sizes
from .spread import beside, spread

UNKNOWN = "not measured yet"
BEHIND = """\
What stands behind the table at the top; a ratio is the other library's time divided by ours:"""


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
        "{model}",
        "**Models.** {model_measured}",
    ),
    Gain(
        "train gated delta net layers of **flash-linear-attention** (FLA)",
        "`integrations.fla.register()`",
        "{rule}; {layer}",
        "**The gated delta rule.** {rule_measured} {layer_measured}",
    ),
    Gain(
        "train with **GRPO**, many responses to each prompt",
        "TRL: `shared_prefix_trainer(GRPOTrainer)(...)`; veRL: an option",
        "each prompt stored and computed once: {whole}; the update alone, "
        "no trainer's whole run yet",
        "**Shared prompts.** N responses of R tokens to a prompt of P are N (P + R) tokens in "
        "whole sequences and P + N R here: short prompts and long responses gain little. "
        "{whole_measured} Generation takes as long as before.",
    ),
    Gain(
        "train **Qwen2, Qwen3 or Llama on 128K tokens** and more, on one GPU or several",
        "`transformers_sparse_ring.prepare(model)`, "
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
        "`VLLM_PLUGINS=qla_kernels vllm serve ...`; SGLang: `--linear-attn-prefill-backend qla`",
        "prefill **1.4 to 1.7 x** as fast as vLLM's way, **1.3 x** with prefix caching, its "
        "default; decoding **0.97 to 1.00 x**; the kernels alone, states in fp32, which Qwen3-Next "
        "has in vLLM by `--mamba-ssm-cache-dtype float32`; not yet in a running engine",
        "**Serving.** CUDA graphs, H100; prefill at three shapes, with prefix caching at one, "
        "decoding with the heads of one to eight GPUs. Some kernels are faster and "
        "some slower than the engines' and FlashInfer's ([times](docs/performance.md#serving)). "
        "Where decoding or drafts dominate, [leave it off](docs/serving.md#is-it-worth-it).",
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
    }
    said = dict[str, str]()
    for name, of in found.items():
        said[name], said[f"{name}_measured"] = of(runs, digests)
    return said


def _rule(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """Forward, and forward with backward, beside FLA's kernels."""
    run = headline(runs, "gdn", digests)
    kinds = {"forward": "fwd", "forward + backward": "both"}
    said, means, least = list[str](), list[float](), list[float]()
    for title, kind in kinds.items():
        rows = [row for row in run.rows if row.kind == kind] if run else []
        graph, eager = (beside(rows, "fla", way) for way in (False, True))
        if graph and eager:
            ways = f"{graph.mean:.2f} x in CUDA graphs and {eager.mean:.2f} x in eager calls"
            said.append(f"{title} {ways} ({heads_of(rows)} heads)")
            means += [graph.mean]
            least += [graph.worst, eager.worst]
    if run is None or len(said) < len(kinds):
        return f"the rule beside FLA's: {UNKNOWN}", ""
    few = f"the rule, which its layers call, **{_span(means)}** as fast as FLA's in the mean, at "
    few += f"least {min(least):.2f} x, heads of 128"
    if sizes := _of_default_layer(runs):
        few += f"; **{sizes}** with the heads of its default layer"
    whole = f"Beside FLA's kernels, which transformers runs, too, means on one {gpu(run)}, heads "
    whole += f"of 128: {'; '.join(said)}; the least of all is {min(least):.2f} x. Beside the "
    whole += "fastest of FlashQLA, FlashInfer and FLA: the table below."
    return few, whole


def _of_default_layer(runs: Sequence[Run]) -> str:
    """Means of forward and backward with the heads of FLA's default layer."""
    found = [beside(run.rows, "fla") for run in of_sizes(runs, *FLAS).values()]
    return _span([s.mean for s in found if s]) if any(found) else ""


def heads_of(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(row.heads for row in rows))


def _whole(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """Prompts computed once, beside whole sequences: forward and backward together."""
    few, said, longer = [], [], ""
    run = headline(runs, "dualkv", digests)
    rows = [row for row in steps(run) if gain(run, row)] if run else []
    if run and (of_all := spread([gain(run, row) for row in rows])):
        few.append(f"attention **{_span(of_all[2:])}** as fast as on whole sequences")
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
        few.append(f"four layers of Qwen3-Next's sizes **{_span(of_all[2:])}**")
        said.append(
            f"The layers, with MLPs of 6144 in place of experts, forward + backward, {gpu(run)}, "
            "in no graph, beside ours on whole sequences, prompts of 2048 tokens and more."
        )
    return ", ".join(few) + longer if few else UNKNOWN, " ".join(said)


def _short(runs: Sequence[Run], digests: Digests) -> str:
    """Of batches of short prompts."""
    run = aside(runs, "dualkv", "short", digests)
    of_all = spread([gain(run, row) for row in steps(run)]) if run else None
    return f"; batches of shorter prompts gain {_span(of_all[2:])}" if of_all else ""


def _sparse(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    run = headline(runs, "sparse_ring", digests)
    rows = [] if run is None else [row for row in run.rows if density_of(row)]
    of_all = None if run is None else spread([gain(run, row) for row in rows])
    if run is None or of_all is None:
        return UNKNOWN, ""
    density = density_of(rows[0])
    share = f"{100 * density:g} % of the pairs"
    said = f"**{_span(of_all[2:])}** as fast as dense with {share}"
    whole = f"Forward and backward each, {gpu(run)}, CUDA graphs, one GPU, beside flash-attn-4 "
    return said, f"{whole}over all pairs; with {share} {1 / density:g} x would be ideal."


def _span(ratios: Sequence[float]) -> str:
    """`1.3 to 1.7 x`, or `3.9 x` where they round to the same."""
    least, most = (f"{ratio:.1f}" for ratio in (min(ratios), max(ratios)))
    return f"{least} x" if least == most else f"{least} to {most} x"
