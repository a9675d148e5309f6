"""The GRPO examples: a trainer of an installed TRL, with our class and without; veRL's options."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from qla_kernels.integrations import transformers as swapping
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import grpo_trl
import qwen_setup
import sums

pytestmark = pytest.mark.libraries


def steps(folder, capsys, *options):
    """The numbers of each step's line."""
    assert grpo_trl.main(["--tiny", "--steps", "3", "--output", str(folder), *options]) == 0
    lines = [x.split() for x in capsys.readouterr().out.splitlines() if x.startswith("step ")]
    return [[float(x) for x in line[3::2]] for line in lines]


def ours(caplog):
    return [x.getMessage() for x in caplog.records if x.name == "qla_kernels"]


@pytest.mark.parametrize("options", [[], ["--full", "--accumulate", "2"], ["--hybrid"]], ids=str)
def test_steps_are_those_of_plain_trl(options, tmp_path, capsys, caplog):
    pytest.importorskip("trl")
    if "--full" not in options:
        pytest.importorskip("peft")
    want = steps(tmp_path, capsys, *options, "--plain")
    assert not ours(caplog)
    with caplog.at_level(logging.WARNING, "qla_kernels"):
        got = steps(tmp_path, capsys, *options)
    if "--hybrid" in options:
        swapping.restore(qwen_setup.tiny_model())
    (line,) = ours(caplog)  # nothing about parts of groups
    assert float(line.split()[-3]) > 2.5  # times fewer tokens
    assert len(got) == len(want) == 3
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
        assert a[1] > 0  # the gradient


def test_bad_options_say_what_to_pass(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        grpo_trl.main(["--hybrid"])
    assert "--hybrid without --tiny" in capsys.readouterr().err
    monkeypatch.setattr(qwen_setup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="not installed; need trl, peft; pip install trl peft"):
        grpo_trl.main(["--tiny"])


def test_the_numbers_of_the_docstring():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config).float()
    tokens = 1250 + 16 * 1025
    assert "memory: 75.5 GB" in qwen_setup.estimate(model, tokens, logits=False)
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model.bfloat16(), qwen_setup.adapters(16))
    assert "memory: 15.5 GB" in qwen_setup.estimate(model, tokens, logits=False)
    assert all(number in grpo_trl.__doc__ for number in ("75.5 GB", "15.5 GB"))


def test_rewards():
    assert sums.score("4 and 5 make 9", 9) == 1
    assert sums.score("10", 8) == pytest.approx(1 / 3)
    assert sums.score("nine", 9) == 0
    chats = [[{"role": "assistant", "content": text}] for text in ("= 3", "?")]
    assert sums.reward(chats, answer=[3, 3]) == [1, 0]
    assert sums.compute_score("sums", "so 12", "12", extra_info={"index": 0}) == 1


def test_problems_have_the_answer_that_is_left_out():
    for problem in sums.problems(20, seed=3) + sums.long_problems(2):
        (message,) = problem["prompt"]
        *solved, last = [x for x in message["content"].splitlines() if "+" in x]
        a, plus, b, equals = last.split()
        assert (plus, equals) == ("+", "=")
        assert int(a) + int(b) == problem["answer"]
        for line in solved:
            left, right = line.split(" = ")
            assert sum(map(int, left.split(" + "))) == int(right)


def test_files_for_verl(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert sums.main([str(tmp_path), "--count", "64"]) == 0
    assert "64 problems to train on and 2 to test" in capsys.readouterr().out
    rows = parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert len(rows) == 64
    assert rows[3]["data_source"] == "sums"
    assert rows[3]["prompt"][0]["role"] == "user"
    assert int(rows[3]["reward_model"]["ground_truth"]) > 0
    assert rows != parquet.read_table(tmp_path / "test.parquet").to_pylist()
    with pytest.raises(SystemExit):
        sums.main([str(tmp_path), "--count", "0"])


def script(folder, *arguments, **variables):
    environment = os.environ | {"PYTHON": sys.executable, "DATA": str(folder)} | variables
    command = ["bash", str(ROOT / "examples/grpo_verl.sh"), *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


def test_verl_takes_the_options_of_the_script(tmp_path):
    """Its configuration composes and is valid, and it loads the reward from the file."""
    pytest.importorskip("verl")
    omegaconf = pytest.importorskip("omegaconf")
    done = script(tmp_path, "--tiny", "trainer.total_epochs=2", GPUS="4")
    assert done.returncode == 0, done.stderr
    text = done.stdout[done.stdout.index("\nactor_rollout_ref:") :]
    config = omegaconf.OmegaConf.create(text)
    assert config.trainer.total_epochs == 2
    assert config.trainer.n_gpus_per_node == 4
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 2048 + 16 * 1024
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 2048 + 16 * 1024
    assert config.actor_rollout_ref.model.external_lib == "qla_kernels.integrations.verl_patch"
    assert (tmp_path / "train.parquet").exists()
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.dataset.rl_dataset import RLHFDataset

    validate_config(config, need_reference_policy(config), need_critic(config))
    assert need_reference_policy(config)
    assert not need_critic(config)
    data = omegaconf.OmegaConf.merge(config.data, {"cache_dir": str(tmp_path)})
    rows = RLHFDataset(config.data.train_files, qwen_setup.tiny_tokenizer(), data)
    assert len(rows) == 64
    assert rows[0]["raw_prompt"][0]["content"].endswith("=")
    compute = get_custom_reward_fn(config)
    assert compute("sums", "so 12", "12", extra_info={}) == 1


def test_a_misspelt_option_of_verl_is_refused(tmp_path):
    pytest.importorskip("verl")
    done = script(tmp_path, "--tiny", "actor_rollout_ref.actor.ppo_max_token_len_per_gpus=1")
    assert done.returncode != 0
    assert "ppo_max_token_len_per_gpus" in done.stderr


def test_the_script_says_when_verl_is_missing(tmp_path):
    (tmp_path / "verl.py").write_text("raise ImportError\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = script(tmp_path, "--tiny", PYTHONPATH=path)
    assert done.returncode == 1
    assert "veRL is not installed; need verl 0.9.1" in done.stderr
