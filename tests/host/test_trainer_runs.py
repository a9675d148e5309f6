"""scripts/trainer_runs.py and policy_update.py: runs on two ranks of gloo, and what they print."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]


def module_of(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(script: str, *options: str, folder: Path) -> list[dict[str, Any]]:
    rows = folder / "rows.jsonl"
    launch = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (sys.executable, *launch, f"scripts/{script}.py", *options, "--tiny", "--out", rows)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in rows.read_text().splitlines()]


@pytest.mark.libraries
@pytest.mark.parametrize(
    "options",
    ["trl --fsdp", "trl --fsdp --lora --hybrid", "verl --fsdp", "verl --lora --offload"],
)
def test_steps_on_two_ranks_are_those_of_the_plain_trainer(options, tmp_path):
    """The trainers' own set-up of FSDP2 and PEFT, bf16, checkpointing; veRL's offload."""
    pytest.importorskip(options.split()[0])
    (row,) = run_of("trainer_runs", *options.split(), "--steps", "2", folder=tmp_path)
    assert row["gpus"] == 2
    assert row["steps_run"] == 2
    assert row["lora"] == ("--lora" in options)
    assert max(row["loss_differs"]) < 1e-3
    assert max(row["grad_norm_differs"]) < 3e-3  # of a model of width 64 in bf16
    assert all(norm > 0 for _, norm in row["shared"])


@pytest.mark.libraries
def test_policy_updates_on_two_ranks(tmp_path):
    pytest.importorskip("transformers")
    options = ("--cases", "1", "--ways", "ours,flash", "--steps", "1", "--region-steps", "1")
    ours, whole = run_of("policy_update", *options, folder=tmp_path)
    assert (ours["way"], whole["way"]) == ("ours", "flash")
    assert whole["logprob_differs"] < 1e-3
    assert whole["grad_norm_differs"] < 3e-3
    assert whole["ratio"] == pytest.approx(whole["seconds"] / ours["seconds"])
    update = module_of("policy_update")
    case = update.Case("Qwen3.5-4B", 4, 96, 64, 16, ())
    config = update.model_of(case, tiny=True).config
    # a token has six operations a weight; whole sequences have 2560 tokens, the group 1120
    few, many = (update.operations(case, way, config) for way in ("ours", "flash"))
    assert 1.5 < many / few < 2560 / 1120
    table = update.tables([ours, whole])
    assert "| Qwen3.5-4B | 4 | 16 x (96 + 64) | whole sequences, flash-attention |" in table


def test_curves_are_compared_with_the_spread_of_seeds(tmp_path):
    runs = module_of("trainer_runs")
    rewards = {("plain", 0): 0.5, ("plain", 1): 0.7, ("shared", 0): 0.6, ("shared", 1): 0.7}
    lines = [
        json.dumps({"way": way, "seed": seed, "curves": {"reward": [x] * 20}})
        for (way, seed), x in rewards.items()
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    text = runs.curves([file])
    assert "shared and plain are 0.100 apart at most, seeds of one way 0.200 and 0.100" in text


def test_the_reward_of_generation_in_the_loop_counts_words():
    runs = module_of("trainer_runs")
    assert runs.right("w4 w8", "w2 w3 w4 w6 w8 w10 w12 w14") == 7 / 8
    assert runs.right("w3 w5", "w3 <eos>") == 1 / 8
