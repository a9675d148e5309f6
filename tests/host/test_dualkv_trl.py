"""docs/dualkv.md's recipe for TRL in a trainer of an installed TRL: the steps of plain TRL."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare import assert_close
from tests.readme import names_in

trl = pytest.importorskip("trl")

WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(["<pad>", "<eos>", *WORDS])}
    fast = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


def model_of(vocabulary: int, folder: Path) -> Any:
    """From a folder, where TRL finds the weights of its reference policy."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(folder)


def trainer_of(kind: Any, model: Any, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    """Two steps over two prompts each, whose rewards tell responses apart."""
    from datasets import Dataset

    prompts = [" ".join(WORDS[i : i + n]) for i, n in ((0, 9), (11, 4), (20, 6), (30, 2))]
    chosen = trl.GRPOConfig(
        output_dir=str(folder), use_cpu=True, report_to=[], save_strategy="no", max_steps=2,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=10,
        learning_rate=1e-2, logging_steps=1, bf16=False, disable_tqdm=True, seed=3,
        **{"gradient_checkpointing": False, **settings},
    )  # fmt: skip

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    return kind(
        model, reward_funcs=reward, args=chosen, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{}, {"beta": 0.1, "gradient_checkpointing": True}, {"num_iterations": 2, "temperature": 0.7}],
    ids=str,
)
def test_a_training_run_is_that_of_plain_trl(tokenizer, tmp_path, settings):
    code = names_in("docs/dualkv.md")
    packed = code["shared_prefix_trainer"](trl.GRPOTrainer)
    found = []
    for kind in (trl.GRPOTrainer, packed):
        model = model_of(len(tokenizer), tmp_path / "model")
        if kind is packed:
            code["prepare"](model)
        trainer = trainer_of(kind, model, tokenizer, tmp_path, **settings)
        if kind is packed and trainer.ref_model is not None:
            code["prepare"](trainer.ref_model)
        trainer.train()
        log = [x for x in trainer.state.log_history if "loss" in x]
        found.append((log, torch.cat([p.detach().flatten() for p in model.parameters()])))
    (want_log, want), (got_log, got) = found
    assert len(got_log) == len(want_log) == 2
    for name in ("loss", "grad_norm", "entropy", "kl", "reward"):
        for a, b in zip(got_log, want_log, strict=True):
            assert (name in a) == (name in b)
            assert a.get(name, 0.0) == pytest.approx(b.get(name, 0.0), rel=1e-3, abs=1e-5), name
    assert_close("weights", got, want, 1e-4)
