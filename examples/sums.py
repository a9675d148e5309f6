"""Sums for examples of GRPO: prompts, a reward that checks the answer, and files for veRL.

    python examples/sums.py data    writes data/train.parquet and data/test.parquet

veRL calls `compute_score` of this file, and TRL's trainer `reward`. Replace both by yours. A prompt
has some solved sums and one to solve, so that prompts are longer than responses.
"""

import argparse
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def problems(
    count: int, solved: int = 6, most: int = 9, seed: int = 0, question: str = ""
) -> list[dict[str, Any]]:
    """Returns chats: a `prompt` of `solved` sums and one without its `answer`."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        pairs = [(draw.randint(0, most), draw.randint(0, most)) for _ in range(solved + 1)]
        *solutions, last = [f"{a} + {b} = {a + b}" for a, b in pairs]
        text = "\n".join([*solutions, question + last.rpartition(" ")[0]])
        made.append({"prompt": [{"role": "user", "content": text}], "answer": sum(pairs[-1])})
    return made


def long_problems(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns problems for a model that can chat, whose prompts have about 1200 tokens."""
    question = "Solve the last sum. Think in short steps, and end with the result.\n"
    return problems(count, solved=64, most=9999, seed=seed, question=question)


def score(response: str, answer: int) -> float:
    """Returns 1 if the response's last number is the answer, less the farther it is, 0 without."""
    numbers = re.findall(r"\d+", response)
    return 1 / (1 + abs(int(numbers[-1]) - answer)) if numbers else 0.0


def reward(completions: list[list[dict[str, str]]], answer: list[int], **_: Any) -> list[float]:
    """The reward for trainers of TRL: of chats, whose last message is the response."""
    pairs = zip(completions, answer, strict=True)
    return [score(messages[-1]["content"], right) for messages, right in pairs]


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """The reward for veRL."""
    return score(solution_str, int(ground_truth))


def rows(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns problems in the columns that veRL reads."""
    return [
        {
            "data_source": "sums", "prompt": x["prompt"],
            "reward_model": {"style": "rule", "ground_truth": str(x["answer"])},
            "extra_info": {"index": i},
        }
        for i, x in enumerate(made)
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=8192, help="problems to train on")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count {options.count}; need 1 or more; leave it out for 8192")
    import pyarrow
    import pyarrow.parquet

    options.folder.mkdir(parents=True, exist_ok=True)
    tests = max(1, options.count // 32)
    for name, count, seed in (("train", options.count, 0), ("test", tests, 1)):
        table = pyarrow.Table.from_pylist(rows(long_problems(count, seed)))
        pyarrow.parquet.write_table(table, options.folder / f"{name}.parquet")
    print(f"{options.count} problems to train on and {tests} to test in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
