"""A progress bar: which workload, by whom, doing what. Without a terminal, a line for each."""

import sys

from tqdm import tqdm

from .messages import Machine


class Progress:
    def __init__(self) -> None:
        self._bar = tqdm(
            total=0, unit="row", file=sys.stderr, dynamic_ncols=True, leave=False, disable=None
        )
        self._bar.set_description("starting")
        self._begun = self._rows = 0

    def start(self, rows: int, machine: Machine) -> None:
        """Rows are known, and so is the machine: announce what it lacks."""
        self._rows = rows
        self.say(f"running {rows} workloads on {machine.device}")
        for name, reason in machine.missing.items():
            self.say(f"missing: {machine.labels.get(name, name)} ({reason})")
        self._bar.reset(rows)

    def row(self, name: str) -> None:
        if self._begun:
            self._bar.update()
        self._begun += 1
        self._bar.set_description(name)
        if self._bar.disable:
            self.say(f"[{self._begun}/{self._rows}] {name}")

    def step(self, implementation: str, phase: str) -> None:
        self._bar.set_postfix_str(f"{implementation} {phase}".strip())

    def say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
