"""A progress bar: which workload, by whom, doing what. Without a terminal, a line for each."""

import sys
import time

from tqdm import tqdm

from .messages import Machine


class Progress:
    def __init__(self) -> None:
        self._bar = tqdm(
            total=0, unit="row", file=sys.stderr, dynamic_ncols=True, leave=False, disable=None
        )
        self._bar.set_description("starting")
        self._begun = self._rows = 0
        self._spent: dict[str, float] = {}  # seconds of the current row, by who did what
        self._doing, self._since = "", time.monotonic()

    def start(self, rows: int, machine: Machine) -> None:
        """Rows are known, and so is the machine: announce what it lacks."""
        self._rows = rows
        self.say(f"running {rows} workloads on {machine.device}")
        for name, reason in machine.missing.items():
            self.say(f"missing: {machine.labels.get(name, name)} ({reason})")
        self._bar.reset(rows)

    def row(self, name: str, words: str = "") -> None:
        """Begins a row; `words` say its lengths."""
        self._account("")
        if self._begun:
            self._bar.update()
        if self._bar.disable and self._spent:  # where a long row went
            longest = sorted(self._spent.items(), key=lambda item: -item[1])[:3]
            parts = ", ".join(f"{what} {seconds:.1f}" for what, seconds in longest)
            self.say(f"    {sum(self._spent.values()):.1f} s: {parts}")
        self._spent = {}
        self._begun += 1
        self._bar.set_description(name)
        if self._bar.disable:
            self.say(f"[{self._begun}/{self._rows}] {name}  {words}".rstrip())

    def step(self, implementation: str, phase: str) -> None:
        self._account(f"{implementation} {phase}".strip())
        self._bar.set_postfix_str(self._doing)

    def _account(self, doing: str) -> None:
        now = time.monotonic()
        if self._doing:
            self._spent[self._doing] = self._spent.get(self._doing, 0) + now - self._since
        self._doing, self._since = doing, now

    def say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
