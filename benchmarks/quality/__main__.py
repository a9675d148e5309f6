"""Trains a small model on long sequences, with exact attention and under sparse masks.

    python -m benchmarks.quality --folder runs --minutes 4.5        again: goes on where it stopped
    python -m benchmarks.quality --folder out/tiny --device cpu --tiny

1. A model trains on short sequences with exact attention, as models do: first on very short ones,
   where it learns to look keys up, and then on ones of twice the length, until `--short`.
2. Copies of it go on, on long sequences: one with exact attention, and one for each target of the
   mask. All see the same sequences, in turns of `--turn` steps. Compare runs at the same step: when
   the time is over, some may be a turn ahead.
3. After each turn, the loss and the accuracy of each task (`tasks.py`) on sequences of their own:
   with the attention that the copy trains with, and with exact attention. Step 0 is the short model
   under the mask. Recall is reported in the last block, from whose queries the lines are chosen,
   and elsewhere. Density and held-out recall of the lines are means over layers.

`quality.json` has it all, and is written after each turn.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qla_kernels.sparse_ring import VerticalSlash
from qla_kernels.sparse_ring.measure import Measured
from qla_kernels.sparse_ring.shapes import BLOCK

from .model import Attention, Model, Sizes
from .tasks import TASKS, VOCABULARY, rows

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
    """Runs the command line."""
    options = parse(arguments)
    Experiment(options).train()
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="results and checkpoints")
    add("--minutes", type=float, default=60.0, help="stop then; the next call goes on")
    add("--short-minutes", type=float, default=1e9, help="go on to long sequences then")
    add("--targets", type=_numbers, default=[0.5, 0.8, 0.95], help="of the masks")
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
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
