"""Measures density and recall of vertical-slash masks on q and k of a model, layer by layer.

    python -m qla_kernels.sparse_ring.measure --model PATH --tokens ids.npy --length 131072
    python -m qla_kernels.sparse_ring.measure --dump qk.pt --recall 0.9,0.95 --out lines.json

`--dump` is a file of torch.save: {"q": [T, H, D], "k": [T, Hk, D]} after the rotary embedding, or
a dict from layer to such dicts. `--model` is a causal language model of transformers; it runs with
exact attention. Prints for each layer the means over heads, with the worst head in brackets:

    density    share of the causal pairs that the mask contains
    columns    number of verticals of a head
    diagonals  number of slashes of a head, and the mean length of their runs
    window     recall of the block from which lines were chosen: share of its attention on the lines
    held out   recall of random rows, from which no line was chosen

Held-out recall shows how much attention training would lose; window recall follows the target.
Layers whose mean held-out recall is below `--least` are listed as `dense_layers`, and as the option
of examples/long_context_train.py; none are listed for a target that is not above `--least`, because
nearly all layers would be below. `--out` also writes the numbers of each head.

It measures one sequence: `--length` tokens from `--start` on, even if they are of several
documents. On a GPU the model runs in bf16, on a CPU in fp32.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from qla_kernels.runtime.errors import need
from qla_kernels.sparse_ring.api import build_index
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.mask_options import add_mask_options, mask
from qla_kernels.sparse_ring.measure_inputs import (
    OP,
    beyond,
    measure_dump,
    measure_model,
    read_text,
    read_tokens,
)
from qla_kernels.sparse_ring.patterns import VerticalSlash
from qla_kernels.sparse_ring.shapes import BLOCK

ROWS_AT_ONCE = 64  # rows whose probabilities are held: [64, T] fp32 of one head


@dataclass(frozen=True)
class LayerLines:
    """Density and recall of one layer's lines, over heads and batch rows."""

    layer: str
    density: float  # mean over heads
    densest: float  # the head with the highest density
    columns: float
    diagonals: float
    run_length: float  # mean length of runs of neighbouring diagonals
    window_recall: float  # NaN if lines were given
    worst_window: float
    held_out: float | None = None  # mean over rows and heads; None if not measured
    worst_held_out: float | None = None  # the head with the lowest mean
    heads: dict[str, list[float]] = field(default_factory=dict)  # of each head, by what it is

    def __str__(self) -> str:
        said = (
            f"layer {self.layer:>3}: density {self.density:6.2%} ({self.densest:6.2%})  "
            f"columns {self.columns:6.0f}  diagonals {self.diagonals:6.0f} in runs of "
            f"{self.run_length:4.1f}  window {self.window_recall:.3f} ({self.worst_window:.3f})"
        )
        if self.held_out is not None:
            said += f"  held out {self.held_out:.3f} ({self.worst_held_out:.3f})"
        return said


def lines_of_layer(layer: object, index: VSIndex, held_out: Tensor | None = None) -> LayerLines:
    """Returns the LayerLines of an index; waits for a GPU.

    `held_out` is a result of `held_out_recall`.
    """
    density = index.density()
    window = index.window_recall
    columns, diagonals = index.v_cnt.double(), index.diagonals().sum(-1).double()
    heads = {"density": density, "columns": columns, "diagonals": diagonals, "window": window}
    if held_out is not None:
        heads["held_out"] = held_out.mean(-1)
    return LayerLines(
        str(layer),
        float(density.mean()),
        float(density.max()),
        float(columns.mean()),
        float(diagonals.mean()),
        float(index.runs().mean()),
        float(window.mean()),
        float(window.min()),
        None if held_out is None else float(held_out.mean()),
        None if held_out is None else float(held_out.mean(-1).min()),
        {name: x.flatten().tolist() for name, x in heads.items()},
    )


class LineLog:
    """Keeps the latest index of each layer: an `on_index` for training.

    Storing an index launches nothing and waits for nothing. `lines` computes density and recall,
    and waits for a GPU, so call it once in many steps.
    """

    def __init__(self) -> None:
        self._latest: dict[int | None, VSIndex] = {}

    def __call__(self, layer: int | None, q: Tensor, k: Tensor, index: VSIndex) -> None:
        """Stores the index of a layer in place of the layer's earlier one."""
        self._latest[layer] = index

    def lines(self) -> list[LayerLines]:
        """Returns the LayerLines of the stored indices, in the order of layers."""
        named = sorted(self._latest.items(), key=lambda item: -1 if item[0] is None else item[0])
        return [lines_of_layer(layer, index) for layer, index in named]


def held_out_rows(seqlen: int, rows: int, seed: int = 0) -> Tensor:
    """Returns random tokens, ascending, whose attention is to be compared with the lines.

    They come from the second eighth of the sequence to the end of the block before the observed
    one. Earlier tokens see so little that every mask holds most of it.
    """
    first, end = seqlen // 8, max(seqlen // BLOCK - 1, 0) * BLOCK
    if end <= first:
        got, fix = f"{seqlen} tokens", "measure on a longer sequence"
        raise ValueError(need(OP, got, f"at least {3 * BLOCK} tokens", fix))
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(end - first, generator=draw, device="cpu")[:rows]
    return chosen.sort().values + first


def held_out_recall(
    q: Tensor, k: Tensor, index: VSIndex, rows: Tensor, scale: float | None = None
) -> Tensor:
    """Returns the share of the attention of some rows that the lines hold, fp32 [B, H, rows].

    Args:
        q: [B, T, H, D], whole.
        k: [B, T, Hk, D], whole.
        index: the lines, for these T tokens.
        rows: int64 tokens whose queries are looked at.
        scale: factor of the scores; D ** -0.5 if None.
    """
    B, T, H, D = q.shape
    scale = D**-0.5 if scale is None else scale
    token, rows = torch.arange(T, device=q.device), rows.to(q.device)
    columns = torch.zeros(B, H, T + 1, dtype=torch.bool, device=q.device)
    columns.scatter_(-1, index.v_idx.long(), True)
    diagonals, group = index.diagonals(), H // k.shape[2]
    held = q.new_empty(B, H, len(rows), dtype=torch.float32)
    for b in range(B):
        for h in range(H):
            keys = k[b, :, h // group].float()
            for n, some in enumerate(torch.split(rows, ROWS_AT_ONCE)):
                S = q[b, some, h].float() @ keys.T * scale  # [rows, T]
                P = S.masked_fill_(token > some[:, None], -torch.inf).softmax(-1)
                distance = (some[:, None] // BLOCK - token // BLOCK).clamp(min=0)
                seen = diagonals[b, h][distance] | columns[b, h, :T]
                at = n * ROWS_AT_ONCE
                held[b, h, at : at + len(some)] = (P * seen).sum(-1)
    return held


class Measured:
    """Measures patterns on the q and k of each layer: an `on_index` for a model with `Dense()`.

    `lines` has a list of LayerLines for each pattern, in the order of the calls.
    """

    def __init__(self, patterns: Sequence[VerticalSlash], rows: int, seqlen: int | None = None):
        self.patterns, self._rows, self._seqlen = patterns, rows, seqlen
        self.lines: list[list[LayerLines]] = [[] for _ in patterns]

    def __call__(self, layer: object, q: Tensor, k: Tensor, index: VSIndex | None = None) -> None:
        """Measures one layer; `index`, the lines it ran with, is not used."""
        seqlen = q.shape[1] if self._seqlen is None else self._seqlen
        rows = held_out_rows(seqlen, self._rows)
        for pattern, found in zip(self.patterns, self.lines, strict=True):
            chosen = build_index(q, k, pattern, seqlen=seqlen)
            found.append(lines_of_layer(layer, chosen, held_out_recall(q, k, chosen, rows)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, or ends with a sentence about its files."""
    options = _parse(arguments)
    try:
        measured = Measured([mask(options, r) for r in options.recall], options.rows)
        if options.dump is not None:
            measure_dump(options.dump, measured, options.device)
        else:
            _measure_model(options, measured)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    sys.stdout.writelines(line + "\n" for line in _report(measured, options.least))
    if options.out is not None:
        told = [
            {"pattern": asdict(pattern), "layers": [asdict(x) for x in lines]}
            for pattern, lines in zip(measured.patterns, measured.lines, strict=True)
        ]
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def _measure_model(options: argparse.Namespace, measured: Measured) -> None:
    if options.text is not None:
        tokens, file = read_text(options.text, options.model, options.length), options.text
    else:
        tokens = read_tokens(options.tokens, options.start, options.length)
        file = f"{options.tokens}, from token {options.start} on"
    less = "" if len(tokens) == options.length else f"; --length is {options.length or 'left out'}"
    print(f"one sequence of {len(tokens)} tokens of {file}{less}", flush=True)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    if (warning := beyond(model.config, len(tokens))) is not None:
        print(warning, file=sys.stderr, flush=True)
    measure_model(model, tokens, measured, options.device)


def _report(measured: Measured, least: float) -> Iterator[str]:
    for pattern, lines in zip(measured.patterns, measured.lines, strict=True):
        yield f"recall_v = {pattern.recall_v}, recall_s = {pattern.recall_s}"
        yield from map(str, lines)
        yield f"all layers: density {_mean(x.density for x in lines):.2%}, " + ", ".join(
            f"{name} {_mean(values):.3f}"
            for name, values in (
                ("window", (x.window_recall for x in lines)),
                ("held out", (x.held_out or 0.0 for x in lines)),
            )
        )
        if pattern.recall_s <= least:
            target = f"the target {pattern.recall_s}"
            yield f"no layers are listed for {target}: it is not above --least {least}"
            continue
        low = [x.layer for x in lines if (x.held_out or 0.0) < least]
        listed = f"dense_layers=({', '.join(low)}{',' * (len(low) == 1)})"
        either = f"--dense-layers {' '.join(low)}, or {listed}" if low else "no layer"
        yield f"held-out recall below {least}: {either}"


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return sum(given) / max(len(given), 1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m qla_kernels.sparse_ring.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dump", type=Path, help="q and k, saved by torch.save")
    source.add_argument("--model", help="folder of a causal language model of transformers")
    add("--tokens", type=Path, help="with --model: tokens, one dimension, saved by numpy.save")
    add("--text", type=Path, help="with --model: a text, instead of --tokens")
    add("--start", type=int, default=0, help="with --tokens: the first token that is used")
    add("--length", type=int, help="with --model: most tokens that are used")
    add("--recall", type=_shares, default="0.9,0.95", help="targets; default: %(default)s")
    add_mask_options(parser)
    out = "default: %(default)s"
    add("--rows", type=int, default=256, help=f"held-out rows; {out}")
    least = "layers with less held-out recall, as a mean over heads, are listed"
    add("--least", type=float, default=0.9, help=f"{least}; {out}")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args(arguments)
    if options.model is not None and (options.tokens is None) == (options.text is None):
        parser.error("--model needs one of --tokens and --text")
    return options


def _shares(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
