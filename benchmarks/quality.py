"""Trains a small model on long sequences, with exact attention and under sparse masks.

    python -m benchmarks.quality --folder runs --minutes 4.5        again: goes on where it stopped
    python -m benchmarks.quality --folder out/tiny --device cpu --tiny

1. A model trains on short sequences with exact attention, as models do: first on very short ones,
   where it learns to look keys up, and then on ones of twice the length, until `--short`.
2. Copies of it go on, on long sequences: one with exact attention, and one for each target of the
   mask. All see the same sequences, in turns of `--turn` steps. Compare runs at the same step: when
   the time is over, some may be a turn ahead.
3. After each turn, the loss and the accuracy of each task on sequences of their own: with the
   attention that the copy trains with, and with exact attention. Step 0 is the short model under
   the mask. Recall is reported in the last block, from whose queries the lines are chosen, and
   elsewhere. Density and held-out recall of the lines are means over layers.

Answers of the tasks are far back:

    recall   keys and their values, then questions among noise: a key, and its value to predict
    copy     random tokens, noise, and the same tokens again: all at one distance
    bytes    bytes of files that are installed with Python packages, those of a package in a row

`quality.json` has it all, and is written after each turn.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qla_kernels.sparse_ring import VerticalSlash, sparse_attention
from qla_kernels.sparse_ring.measure import Measured
from qla_kernels.sparse_ring.shapes import BLOCK

IGNORED = -100  # labels of tokens that cannot be known
# Tokens are bytes and noise; values; keys, which are also the tokens to copy; and two marks.
BYTES, VALUES, KEYS = 256, 64, 1024
FIRST_VALUE, FIRST_KEY = BYTES, BYTES + VALUES
QUESTION, AGAIN = FIRST_KEY + KEYS, FIRST_KEY + KEYS + 1
VOCABULARY = AGAIN + 1
TASKS = ("recall", "copy", "bytes")

APART = 16  # tokens of a sequence for each key, and for each question
CORPUS_BYTES = 48 << 20
SUFFIXES = (".md", ".rst", ".txt", ".py", ".pyi", ".h")
HELD_OUT = 16  # of so many packages one is for evaluation


def rows(task: str, num: int, T: int, seed: int, evaluation: bool = False) -> tuple[Tensor, Tensor]:
    """Returns tokens and labels, int64 [num, T]; seeds of evaluations give other sequences."""
    draw = torch.Generator().manual_seed(2 * seed + evaluation)
    one = {"recall": _recall, "copy": _copy, "bytes": _bytes}[task]
    made = [one(T + 1, draw, evaluation) for _ in range(num)]
    tokens, known = (torch.stack(x) for x in zip(*made, strict=True))
    return tokens[:, :-1], torch.where(known[:, 1:], tokens[:, 1:], IGNORED)


Sequences = tuple[Tensor, Tensor]  # tokens, and which of them can be predicted


def _recall(num: int, draw: torch.Generator, _: bool) -> Sequences:
    pairs = min(num // APART, KEYS)
    keys = torch.randperm(KEYS, generator=draw)[:pairs] + FIRST_KEY
    values = torch.randint(VALUES, (pairs,), generator=draw) + FIRST_VALUE
    tokens = torch.randint(BYTES, (num,), generator=draw)
    tokens[: 2 * pairs] = torch.stack([keys, values], 1).flatten()
    known = torch.zeros(num, dtype=torch.bool)
    starts = torch.arange(2 * pairs, num - 3, APART)
    starts = starts + torch.randint(APART - 3, starts.shape, generator=draw)
    starts = starts[starts + 2 < num]
    asked = torch.randint(pairs, starts.shape, generator=draw)
    for offset, said in ((0, QUESTION), (1, keys[asked]), (2, values[asked])):
        tokens[starts + offset] = said
    known[starts + 2] = True
    return tokens, known


def _copy(num: int, draw: torch.Generator, _: bool) -> Sequences:
    length = int(torch.randint(num // 4, num // 2 - 1, (), generator=draw))
    tokens = torch.randint(BYTES, (num,), generator=draw)
    text = torch.randint(KEYS, (length,), generator=draw) + FIRST_KEY
    tokens[:length], tokens[num - length :] = text, text
    tokens[num - length - 1] = AGAIN
    known = torch.zeros(num, dtype=torch.bool)
    known[num - length + 1 :] = True  # from the second on: the first one's place is not marked
    return tokens, known


def _bytes(num: int, draw: torch.Generator, evaluation: bool) -> Sequences:
    texts = [text for text in corpus(evaluation) if len(text) > num]
    if not texts:
        raise ValueError(f"no package has {num} bytes of text: pass a smaller --length")
    sizes = torch.tensor([float(len(text)) for text in texts])
    text = texts[int(torch.multinomial(sizes, 1, generator=draw))]
    start = int(torch.randint(len(text) - num, (), generator=draw))
    return text[start : start + num].long(), torch.ones(num, dtype=torch.bool)


@cache
def corpus(evaluation: bool) -> list[Tensor]:
    """Returns the bytes of each installed package's text, uint8: for evaluation, or the others."""
    found: list[Tensor] = []
    room = CORPUS_BYTES // (HELD_OUT if evaluation else 1)
    packages = sorted(x for x in Path(sysconfig.get_paths()["purelib"]).iterdir() if x.is_dir())
    for number, package in enumerate(packages):
        if (number % HELD_OUT == 0) != evaluation or room <= 0:
            continue
        files = sorted(f for f in package.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        text = bytearray()
        for file in files:
            text += file.read_bytes()
            if len(text) > min(room, CORPUS_BYTES // HELD_OUT):  # no package is all of the corpus
                break
        if text:
            found.append(torch.frombuffer(text, dtype=torch.uint8))
            room -= len(text)
    return found


BASE = 5e5  # of the rotation


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64


@dataclass(frozen=True)
class Attention:
    """Exact if there is no pattern; `on_index` is called with (layer, q, k, index)."""

    pattern: VerticalSlash | None = None
    on_index: Callable[..., None] | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns o [B, T, H, D]; q, k and v have their tokens in dimension 1, too."""
        if self.pattern is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return o.transpose(1, 2)
        o, index = sparse_attention(q, k, v, pattern=self.pattern, return_index=True)
        if self.on_index is not None:
            self.on_index(layer, q.detach(), k.detach(), index)
        return o  # type: ignore[no-any-return]


def rotated(x: Tensor) -> Tensor:
    """Returns x [B, T, H, D] with rotary embedding, in its dtype; computed in fp32."""
    T, half = x.shape[1], x.shape[-1] // 2
    frequency = BASE ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(T, device=x.device)[:, None, None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def with_token_before(x: Tensor) -> Tensor:
    """Returns x [B, T, C] with the second half of its channels from the token before."""
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half], before[..., half:]], -1)


class Layer(nn.Module):
    """Half of the channels in front of attention are those of the token before.

    So a key can say which token came before it, and one layer can look up what followed a token.
    """

    def __init__(self, size: Sizes, number: int) -> None:
        super().__init__()
        self.size, self.number = size, number
        rows = (size.heads + 2 * size.kv_heads) * size.head_dim
        self.before_attention, self.before_mlp = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, rows, bias=False)
        self.out = nn.Linear(size.heads * size.head_dim, size.width, bias=False)
        self.up = nn.Linear(size.width, 6 * size.width, bias=False)  # and its gate
        self.down = nn.Linear(3 * size.width, size.width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        size = self.size
        heads = self.qkv(with_token_before(self.before_attention(x)))
        heads = heads.unflatten(-1, (-1, size.head_dim))
        q, k, v = heads.split([size.heads, size.kv_heads, size.kv_heads], 2)
        q, k = rotated(q), rotated(k)
        x = x + self.out(attention(self.number, q, k, v.contiguous()).flatten(2))
        gate, up = self.up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, size: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(size, n) for n in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, attention: Attention) -> tuple[Any, ...]:
        """Returns the row, the loss and the correctness of each label, [labels] each."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, attention)
        row, column = (labels >= 0).nonzero(as_tuple=True)
        logits = self.head(self.norm(x[row, column])).float()
        want = labels[row, column]
        loss = F.cross_entropy(logits, want, reduction="none")
        return (row, column), loss, logits.detach().argmax(-1) == want


SHORT, EXACT = "short", "exact"
FIRST_LENGTH = 64  # tokens of a sequence at the first steps
MORE_ROWS = 8  # of very short sequences a step has so many times as many, at most


def length_at(step: int, steps: int, T: int) -> int:
    """Returns the tokens of the short sequences of a step, of which there are `steps`.

    The first 40 % of steps have FIRST_LENGTH, the last 30 % have T, and the others what is between.
    """
    at = step / steps
    if at < 0.4:
        return min(FIRST_LENGTH, T)
    doublings = max(0, (T - 1) // FIRST_LENGTH).bit_length()  # from FIRST_LENGTH to T
    return min(T, FIRST_LENGTH << max(1, int((at - 0.4) / 0.3 * doublings)))


@dataclass
class Run:
    """A model in training: its name, attention, and results so far."""

    name: str
    pattern: VerticalSlash | None
    model: Model
    optimizer: torch.optim.Optimizer
    step: int = 0


class Experiment:
    """The runs of a folder; `quality.json` there has their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.file = options.folder / "quality.json"
        names = ("short", "short_rows", "length", "long_rows", "targets", "seed", "tiny", "lr")
        settings = {name: getattr(options, name) for name in names}
        self.results: dict[str, Any] = {"settings": settings, "runs": {}}
        if self.file.exists():
            self.results = json.loads(self.file.read_text())
            if self.results["settings"] != settings:
                raise SystemExit(f"{self.file} has other settings: pass another --folder")
        self._end = time.monotonic() + 60 * options.minutes
        self._short_end = time.monotonic() + 60 * options.short_minutes

    def train(self) -> None:
        """Runs until all steps are made or the time is over."""
        options = self.options
        options.folder.mkdir(parents=True, exist_ok=True)
        base = self._run(SHORT, None, None)
        begun = any(name != SHORT for name in self.results["runs"])  # an earlier call got so far
        while base.step < options.short_steps and not begun:
            if time.monotonic() >= self._end:
                return
            self._turn(base, options.short, options.short_rows, options.short_steps)
            begun = time.monotonic() > self._short_end
        patterns: dict[str, VerticalSlash | None] = {EXACT: None}
        for target in options.targets:
            patterns[f"recall {target}"] = VerticalSlash(target, target, max_v=options.max_v)
        runs = [self._run(name, pattern, base) for name, pattern in patterns.items()]
        for run in runs:
            if run.step == 0 and run.name not in self.results["runs"]:
                self._note(run, [], options.length)
        while time.monotonic() < self._end:
            late = min(runs, key=lambda run: run.step)
            if late.step >= options.long_steps:
                return
            self._turn(late, options.length, options.long_rows, options.long_steps)

    def _run(self, name: str, pattern: VerticalSlash | None, start: Run | None) -> Run:
        """Returns a run from its checkpoint, from the weights of `start`, or from random ones."""
        torch.manual_seed(self.options.seed)
        tiny = {"width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32}
        model = Model(Sizes(VOCABULARY, **(tiny if self.options.tiny else {}))).to(self.device)
        fused = self.device.type == "cuda" or None
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.options.lr, betas=(0.9, 0.95), fused=fused
        )
        run, file = Run(name, pattern, model, optimizer), self._checkpoint(name)
        if file.exists():
            saved = torch.load(file, map_location=self.device, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            run.step = saved["step"]
        elif start is not None:
            model.load_state_dict(start.model.state_dict())
        return run

    def _checkpoint(self, name: str) -> Path:
        folder: Path = self.options.folder
        return folder / f"{name.replace(' ', '-')}.pt"

    def _turn(self, run: Run, T: int, num: int, steps: int) -> None:
        """Trains a run for a turn of the `steps` that it has in all, evaluates and saves it."""
        began, losses = time.monotonic(), []
        short, end = run.name == SHORT, min(run.step + self.options.turn, steps)
        peak = self.options.lr if short else self.options.lr / 4
        for step in range(run.step, end):
            n = length_at(step, steps, T) if short else T
            for group in run.optimizer.param_groups:
                group["lr"] = peak * min(1.0, (step + 1) / 50) * max(0.1, 1 - step / steps)
            losses.append(self._step(run, step, n, num * min(T // n, MORE_ROWS)))
        run.step = end
        numbers = [[float(x) for x in of_step] for of_step in losses]  # waits for the GPU
        ms = 1e3 * (time.monotonic() - began) / max(len(losses), 1)
        self._note(run, numbers, T, ms)
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        torch.save({**state, "step": end}, self._checkpoint(run.name))

    def _step(self, run: Run, step: int, T: int, num: int) -> list[Tensor]:
        """Makes a step over `num` rows of each task; returns the loss of each task."""
        batch = [rows(task, num, T, step) for task in TASKS]
        (row, _), loss, _ = self._forward(run, Attention(run.pattern), *batch)
        by_task = [loss[row // num == n].mean() for n in range(len(TASKS))]
        run.optimizer.zero_grad()
        torch.stack(by_task).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        return [x.detach() for x in by_task]

    def _forward(
        self, run: Run, attention: Attention, *batch: tuple[Tensor, Tensor]
    ) -> tuple[Any, Tensor, Tensor]:
        """What the model returns of tokens and labels."""
        tokens, labels = (torch.cat(x).to(self.device) for x in zip(*batch, strict=True))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            where, loss, right = run.model(tokens, labels, attention)
        return where, loss, right

    @torch.no_grad()
    def _note(self, run: Run, losses: list[list[float]], T: int, ms: float = 0.0) -> None:
        """Evaluates a run, and writes its results."""
        own = self._evaluated(run, Attention(run.pattern), T)
        found: dict[str, Any] = {"step": run.step, "ms": ms, "own": own}
        if run.pattern is not None:
            found["exact"] = self._evaluated(run, Attention(), T)
            found |= self._lines(run, run.pattern, T)
        elif run.name != SHORT:
            found["density"] = found["held_out"] = 1.0
        kept = self.results["runs"].setdefault(run.name, {"losses": [], "evaluations": []})
        kept["losses"] += losses
        kept["evaluations"].append(found)
        self.file.write_text(json.dumps(self.results, indent=1) + "\n")
        print(described(run.name, found), flush=True)

    def _evaluated(self, run: Run, attention: Attention, T: int) -> dict[str, dict[str, float]]:
        """Returns loss and accuracy of each task."""
        found = {}
        for task in TASKS:
            batch = rows(task, self.options.evaluated, T, 0, evaluation=True)
            (_, column), loss, right = self._forward(run, attention, batch)
            found[task] = {"loss": float(loss.mean()), "accuracy": float(right.float().mean())}
            if task == "recall":
                last = column >= T - BLOCK
                for name, of in (("last_block", last), ("elsewhere", ~last)):
                    found[task][name] = float(right[of].float().mean())
        return found

    def _lines(self, run: Run, pattern: VerticalSlash, T: int) -> dict[str, float]:
        """Returns density and held-out recall of the lines, means over layers, of all tasks."""
        measured = Measured([pattern], 64, T)
        for task in TASKS:
            batch = rows(task, 1, T, 0, evaluation=True)
            self._forward(run, Attention(pattern, measured), batch)
        (lines,) = measured.lines
        return {
            "density": sum(x.density for x in lines) / len(lines),
            "held_out": sum(x.held_out or 0.0 for x in lines) / len(lines),
        }


def described(name: str, found: dict[str, Any]) -> str:
    """Returns a line about an evaluation."""
    own = found["own"]
    text = f"{name:12} step {found['step']:5}  {found['ms']:7.1f} ms a step"
    if "density" in found:
        text += f"  density {found['density']:6.2%}  held out {found['held_out']:.3f}"
    for task in TASKS:
        text += f"  {task} {own[task]['loss']:.3f} ({own[task]['accuracy']:.1%})"
    recall = own["recall"]
    return f"{text}  recall in the last block {recall['last_block']:.1%}, else " + (
        f"{recall['elsewhere']:.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    plain, program = argparse.RawDescriptionHelpFormatter, "python -m benchmarks.quality"
    parser = argparse.ArgumentParser(program, None, __doc__, formatter_class=plain)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="results and checkpoints")
    add("--minutes", type=float, default=60.0, help="stop then; the next call goes on")
    add("--short-minutes", type=float, default=1e9, help="go on to long sequences then")
    add(
        "--targets",
        type=lambda x: [float(n) for n in x.split(",")],
        default=[0.5, 0.8, 0.95],
        help="of the masks",
    )
    add("--max-v", type=int, default=4096)
    add("--short", type=int, default=4096, help="tokens of a short sequence, in the end")
    add("--short-rows", type=int, default=4, help="such sequences of each task in a step")
    add("--short-steps", type=int, default=1500)
    add("--length", type=int, default=16384, help="tokens of a long sequence")
    add("--long-rows", type=int, default=1)
    add("--long-steps", type=int, default=200)
    add("--turn", type=int, default=50, help="steps between evaluations")
    add("--evaluated", type=int, default=4, help="sequences of each task in an evaluation")
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--tiny", action="store_true", help="a model for a CPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    Experiment(parser.parse_args(arguments)).train()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
