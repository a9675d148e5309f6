"""The front page's first table, who gains what, and the sentences that stand behind its numbers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..harness.records import Row, Run
from . import models, tables
from .figures import density_of, gain, steps
from .names import BATCHES, gpu, span
from .select import Digests, headline
from .spread import Spread, beside, spread

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
        "train or run **Qwen3-Next, Qwen3.5, OLMo Hybrid**, or FLA's gated delta net layers",
        "transformers: `integrations.transformers.swap(model)`; FLA: `integrations.fla.register()`",
        "{model}; {rule}",
        "**Models.** {model_measured} {rule_measured} {layer_measured}",
    ),
    Gain(
        "train with **GRPO**, many responses to each prompt",
        "TRL: `shared_prefix_trainer(GRPOTrainer)(...)`; veRL: an option",
        "each prompt stored and computed once: {whole}; no trainer's whole run yet",
        "**Shared prompts.** {whole_measured} No trainer's whole run has been tried on a GPU yet.",
    ),
    Gain(
        "train on **128K tokens** and more, on one GPU or several",
        "`transformers_sparse_ring.prepare(model)`, "
        "then `sparse_ring=SparseRingConfig(...)` in each call",
        "attention over the blocks and columns that a mask keeps: {sparse}",
        "**Sparse attention.** {sparse_measured} One step of layers was timed: [2.49 x the tokens "
        "a second](docs/long-context.md#what-to-expect) of cuDNN's dense attention, with 4 % of "
        "the pairs, two H200. Which density a model needs is to be measured on it.",
    ),
    Gain(
        "serve Qwen3-Next, Qwen3.5 with **vLLM or SGLang**",
        "`VLLM_PLUGINS=qla_kernels vllm serve ...`; SGLang: `--linear-attn-backend qla`",
        "prefill, decoding and drafts on the engine's pages of states: prefill **1.3 to 1.7 x** as "
        "fast as vLLM's way, decoding **0.97 to 1.00 x**; not yet in a running engine",
        "**Serving.** The kernels alone, in CUDA graphs, with the heads of one or two GPUs; some "
        "are faster and some slower than the engines' and FlashInfer's "
        "([times](docs/performance.md#serving)). In vLLM states are not copied. Not yet tried in a "
        "running engine.",
    ),
)


def table(runs: Sequence[Run], digests: Digests) -> str:
    """Who you are, what you type, what you get."""
    said = _measured(runs, digests)
    body = [[line.who, line.type, line.get.format(**said)] for line in GAINS]
    return tables.markdown(["you", "you type", "you get"], body, left=3)


def behind(runs: Sequence[Run], digests: Digests) -> str:
    said = _measured(runs, digests)
    lines = [" ".join(line.measured.format(**said).split()) for line in GAINS]
    return "\n".join([BEHIND, "", *(f"- {line}" for line in lines)])


def _measured(runs: Sequence[Run], digests: Digests) -> dict[str, str]:
    found: dict[str, Callable[[Sequence[Run], Digests], tuple[str, str]]] = {
        "model": models.gain,
        "rule": _rule,
        "whole": _whole,
        "sparse": _sparse,
    }
    said = {"layer_measured": models.layer(runs, digests)}
    for name, of in found.items():
        said[name], said[f"{name}_measured"] = of(runs, digests)
    return said


def _rule(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """Forward, and forward with backward: beside FLA, and of most models' heads the best rival."""
    run = headline(runs, "gdn", digests)
    if run is None:
        return f"the rule alone: {UNKNOWN}", ""
    kinds = [[row for row in run.rows if row.kind == kind] for kind in ("fwd", "both")]
    most = [[row for row in rows if row.heads == "16/32"] for rows in kinds]
    ways = (False, True)
    fla = [[beside(rows, "fla", eager) for eager in ways] for rows in kinds]
    best = [[spread([gain(run, row, eager) for row in rows]) for eager in ways] for rows in most]
    said = []
    if text := _both_kinds(fla, kinds):
        said.append(f"beside FLA's kernels, which transformers runs, too, {text}")
    if text := _both_kinds(best, most):
        said.append(f"beside the fastest of FlashQLA, FlashInfer and FLA {text}")
    if not said:
        return f"the rule alone: {UNKNOWN}", ""
    way = f"The rule alone ({gpu(run)}, CUDA graphs / eager calls, heads of 128)"
    whole = f"{way}: {'; '.join(said)} ([shape by shape](docs/records/gdn.md))."
    means = [of_kind[0].mean for of_kind in fla if of_kind[0]]
    if not means:
        return "the rule alone beside FLA's: " + UNKNOWN, whole
    return f"the rule alone **{_span(means)}** as fast as FLA's", whole


def _both_kinds(found: Sequence[Sequence[Spread | None]], rows: Sequence[Sequence[Row]]) -> str:
    """Of a forward, and of a forward with its backward; nothing if times of graphs are missing."""
    said, worst = [], list[float]()
    titles = "forward", "forward + backward"
    for title, ways, of_kind in zip(titles, found, rows, strict=True):
        if ways[0] is None:
            return ""
        ratios = " / ".join(f"{s.mean:.2f}" for s in ways if s)
        said.append(f"{title} {ratios} x ({heads_of(of_kind)} heads)")
        worst += [s.worst for s in ways if s]
    return f"{', '.join(said)}, never below {min(worst):.2f} x"


def heads_of(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(row.heads for row in rows))


def _whole(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """Prompts computed once, beside whole sequences: forward and backward together."""
    few, said = [], []
    run = headline(runs, "dualkv", digests)
    rows = [row for row in steps(run) if gain(run, row)] if run else []
    if run and (of_all := spread([gain(run, row) for row in rows])):
        few.append(f"attention **{_span(of_all[2:])}** as fast as on whole sequences")
        which = f"{len(rows)} shapes"
        if prompts := [length for row in rows for length, _ in BATCHES.get(row.layout, ())]:
            which += f", prompts of {span(prompts)} tokens"
        said.append(
            f"Attention, forward + backward, {gpu(run)}, CUDA graphs, beside flash-attn-4 on whole "
            f"sequences: {which}. Long responses gain less, many short ones more."
        )
    run = headline(runs, "hybrid", digests)
    rows = [row for row in run.rows if row.kind == "block"] if run else []
    if run and (of_all := spread([gain(run, row) for row in rows])):
        few.append(f"four layers of Qwen3-Next **{_span(of_all[2:])}**")
        said.append(
            f"The layers, forward + backward, {gpu(run)}, in no graph, beside ours on whole "
            "sequences."
        )
    return ", ".join(few) or UNKNOWN, " ".join(said)


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
