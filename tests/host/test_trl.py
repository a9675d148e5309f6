"""`shared_prefix_trainer` on the trainer of an installed TRL: the steps of plain TRL."""

import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from qla_kernels import Unsupported
from qla_kernels.integrations import transformers as swapping
from qla_kernels.integrations.trl import SHUFFLE, of_groups, shared_prefix_trainer
from tests.agent_traces import traces, whole_rows
from tests.compare import assert_close
from tests.tiny_hybrids import KINDS
from tests.trl_trainers import WORDS, model_of, tokenizer_of

trl = pytest.importorskip("trl")

pytestmark = pytest.mark.libraries


@pytest.fixture
def tokenizer() -> Any:
    return tokenizer_of()


def trainer_of(kind: Any, model: Any, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    """Two steps over two prompts each, whose rewards tell responses apart."""
    from datasets import Dataset

    config = settings.pop("config", trl.GRPOConfig)
    prompts = [" ".join(WORDS[i : i + n]) for i, n in ((0, 9), (11, 4), (20, 6), (30, 2))]
    chosen = config(
        output_dir=str(folder), use_cpu=True, report_to=[], save_strategy="no", max_steps=2,
        num_generations=4, max_completion_length=10, logging_steps=1, disable_tqdm=True, seed=3,
        **{"gradient_checkpointing": False, "bf16": False, "learning_rate": 1e-2,
           "per_device_train_batch_size": 8, **settings},
    )  # fmt: skip

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    return kind(
        model, reward_funcs=reward, args=chosen, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip


MEASURES = ("loss", "grad_norm", "entropy", "kl", "reward", "aux_loss", "clip_ratio/region_mean")
SETTINGS = [
    {},
    {"beta": 0.1, "gradient_checkpointing": True},
    {"num_iterations": 2, "temperature": 0.7},
    # a step of 1e-2 makes routers choose experts by differences of one rounding
    {"steps_per_generation": 2, "entropy_coef": 0.01, "learning_rate": 1e-3},
]
# options of docs/shared-prompts.md that need nothing
OPTIONS = [
    {"cast_lm_head_to_fp32": True},
    {"top_entropy_quantile": 0.5, "mask_truncated_completions": True, "pad_to_multiple_of": 8},
    {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
]


def run_of(kind: Any, model: Any, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    trainer = trainer_of(kind, model, tokenizer, folder, **settings)
    trainer.train()
    log = [x for x in trainer.state.log_history if "loss" in x]
    return log, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def of_whole_groups(monkeypatch):
    """Plain TRL shuffles groups as well, so that batches have the same rows."""
    home = importlib.import_module("trl.trainer.grpo_trainer")
    monkeypatch.setattr(home, SHUFFLE, of_groups(getattr(home, SHUFFLE)))


@pytest.mark.usefixtures("of_whole_groups")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["Qwen3", "Qwen3.5", "Qwen3Next-MoE"])
def test_a_training_run_is_that_of_plain_trl(tokenizer, tmp_path, name, settings, caplog):
    found = []
    for kind in (trl.GRPOTrainer, shared_prefix_trainer(trl.GRPOTrainer)):
        model = model_of(name, len(tokenizer), tmp_path / "model")
        found.append(run_of(kind, model, tokenizer, tmp_path, **settings))
        swapping.restore(model) if name in KINDS else None
    (want_log, want), (got_log, got) = found
    assert len(got_log) == len(want_log) == 2
    assert any("loss" in x and x["grad_norm"] > 0 for x in want_log)
    for measure in MEASURES:
        for a, b in zip(got_log, want_log, strict=True):
            assert (measure in a) == (measure in b)
            assert a.get(measure, 0.0) == pytest.approx(b.get(measure, 0.0), rel=1e-3, abs=1e-5), (
                measure
            )
    assert_close("weights", got, want, 1e-4)
    said = [m for m in caplog.messages if m.startswith("shared prompts: the first batch has")]
    assert len(said) == 1
    assert "times fewer" in said[0]


@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_a_run_with_an_option_is_that_of_plain_trl(tokenizer, tmp_path, settings):
    assert_same_logs(tokenizer, tmp_path, "Qwen3", **settings)


class OfVllm:
    """TRL's class around vLLM, as far as its constructor keeps things; no vLLM behind it."""

    sent: ClassVar[list[list[str]]] = []

    def __init__(self, model: Any, accelerator: Any, processing_class: Any, **_: Any) -> None:
        home = importlib.import_module("trl.generation.vllm_generation")
        self.walk = object.__new__(home.VLLMGeneration)  # TRL's own walk over the weights
        self.walk.model, self.walk.accelerator = model, accelerator
        self.walk._dist = home.DistributedBackend(accelerator)
        self.draw = torch.Generator().manual_seed(1)

    def sync_weights(self) -> None:
        self.sent.append([name for name, _ in self.walk._iter_named_params()])

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any) -> Any:
        made = [torch.randint(2, 40, (9,), generator=self.draw).tolist() for _ in prompts]
        return None, made, [[[-3.5]] * len(tokens) for tokens in made], None


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3.5"])
def test_rollouts_of_vllm_are_corrected_as_in_plain_trl(tokenizer, tmp_path, name, monkeypatch):
    """`use_vllm`: names of the weights that vLLM gets, and the correction for its rollouts."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", OfVllm)
    monkeypatch.setattr(OfVllm, "sent", [])
    (log, *_), _ = assert_same_logs(tokenizer, tmp_path, name, use_vllm=True)
    assert any(key.startswith("sampling/importance_sampling_ratio") for key in log)
    plain, ours = OfVllm.sent[: len(OfVllm.sent) // 2], OfVllm.sent[len(OfVllm.sent) // 2 :]
    assert plain == ours
    assert len(plain) == 2  # once a step
    assert len(plain[0]) > 10


def assert_same_logs(tokenizer: Any, folder: Path, name: str, **settings: Any) -> Any:
    """Returns the logs of both runs, whose measures and numbers are the same."""
    found = []
    for kind in (trl.GRPOTrainer, shared_prefix_trainer(trl.GRPOTrainer)):
        model = model_of(name, len(tokenizer), folder / "model")
        found.append(run_of(kind, model, tokenizer, folder, **settings)[0])
        swapping.restore(model) if name in KINDS else None
    assert any(x["grad_norm"] > 0 for x in found[0])
    timed = ("runtime", "time", "per_second")
    for want, got in zip(*found, strict=True):
        assert want.keys() == got.keys()
        for key in want:
            if not any(word in key for word in timed):
                assert got[key] == pytest.approx(want[key], rel=1e-3, abs=1e-5, nan_ok=True), key
    return found


def test_a_run_of_rloo_is_that_of_plain_trl(tokenizer, tmp_path):
    """RLOO has a reference policy by default, and its rewards have no part in the first loss."""
    found = []
    for kind in (trl.RLOOTrainer, shared_prefix_trainer(trl.RLOOTrainer)):
        model = model_of("Qwen3", len(tokenizer), tmp_path / "model")
        found.append(run_of(kind, model, tokenizer, tmp_path, config=trl.RLOOConfig))
    (want_log, want), (got_log, got) = found
    for a, b in zip(got_log, want_log, strict=True):
        for measure in ("loss", "grad_norm", "entropy", "kl", "reward"):
            assert a[measure] == pytest.approx(b[measure], rel=1e-3, abs=1e-5), measure
    assert want_log[0]["grad_norm"] > 0
    assert want_log[1]["kl"] > 0
    assert_close("weights", got, want, 1e-4)


def test_parts_of_groups_are_said_before_the_gain(tokenizer, tmp_path, caplog):
    """The gain was that of rows for the old policy, which are whole groups, and came first."""
    model = model_of("Qwen3", len(tokenizer), tmp_path / "model")
    kind = shared_prefix_trainer(trl.GRPOTrainer)
    size = {"per_device_train_batch_size": 6, "steps_per_generation": 2}
    run_of(kind, model, tokenizer, tmp_path, **size)
    first, second = (text for text in caplog.messages if text.startswith("shared prompts: "))
    assert first.startswith("shared prompts: a batch holds parts of groups (2 of 4 responses)")
    assert second.startswith("shared prompts: the first batch has")


@pytest.mark.parametrize("size", [4, 8])
def test_accumulated_batches_hold_whole_groups(tokenizer, tmp_path, size, caplog):
    """TRL's own settings: a generation is as many batches as are accumulated. Its rows were mixed.

    A step is that of plain TRL, whose batches have other rows, because it adds up all of them.
    """
    settings = {"gradient_accumulation_steps": 8 // size * 2, "per_device_train_batch_size": size}
    found = []
    for kind in (trl.GRPOTrainer, shared_prefix_trainer(trl.GRPOTrainer)):
        model = model_of("Qwen3", len(tokenizer), tmp_path / "model")
        found.append(run_of(kind, model, tokenizer, tmp_path, **settings))
    (want_log, want), (got_log, got) = found
    for a, b in zip(got_log, want_log, strict=True):
        for measure in ("loss", "grad_norm", "reward"):
            assert a[measure] == pytest.approx(b[measure], rel=1e-3, abs=1e-5), measure
    assert want_log[0]["grad_norm"] > 0
    assert_close("weights", got, want, 1e-4)
    assert not [text for text in caplog.messages if "parts of groups" in text]


def test_layers_of_liger_stay_where_they_are(tokenizer, tmp_path, monkeypatch):
    """`use_liger_kernel`, which was refused: TRL leaves its head out, so layers alone change."""
    applied: list[dict[str, Any]] = []

    def apply(model: Any, config: Any) -> None:
        applied.append(config)
        for layer in model.model.layers:  # as Liger does: functions of instances
            norm = layer.input_layernorm
            norm.forward = type(norm).forward.__get__(norm)

    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", apply)
    assert_same_logs(tokenizer, tmp_path, "Qwen3", use_liger_kernel=True)
    assert applied == [{"fused_linear_cross_entropy": False}] * 2


def test_the_trained_model_generates(tokenizer, tmp_path):
    """It refused every call that is not packed, until another attention was selected."""
    from transformers import AutoModelForCausalLM

    model = model_of("Qwen3.5", len(tokenizer), tmp_path / "model")
    run_of(shared_prefix_trainer(trl.GRPOTrainer), model, tokenizer, tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    model.save_pretrained(tmp_path / "saved")
    settings = {"max_new_tokens": 4, "do_sample": False}
    made = model.generate(ids, **settings)
    swapping.restore(model)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(saved.generate(ids, **settings), made)


def test_under_autocast_a_run_is_that_of_plain_trl(tokenizer, tmp_path):
    found = []
    for kind in (trl.GRPOTrainer, shared_prefix_trainer(trl.GRPOTrainer)):
        model = model_of("Qwen3", len(tokenizer), tmp_path / "model")
        found.append(run_of(kind, model, tokenizer, tmp_path, bf16=True, learning_rate=1e-4))
    for a, b in zip(*(log for log, _ in found), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=0.02)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.1)


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3.5"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_run_with_adapters_is_that_of_plain_trl(tokenizer, tmp_path, name, beta):
    """`peft_config`: with beta the reference policy is the model without its adapters."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "down_proj"]
    adapters = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    found = []
    for kind in (trl.GRPOTrainer, shared_prefix_trainer(trl.GRPOTrainer)):
        model = model_of(name, len(tokenizer), tmp_path / "model")
        torch.manual_seed(5)  # of the adapters
        made = partial(kind, peft_config=adapters)
        found.append(run_of(made, model, tokenizer, tmp_path, beta=beta))
        swapping.restore(model) if name in KINDS else None
    for a, b in zip(*(log for log, _ in found), strict=True):
        for measure in ("loss", "grad_norm", "entropy", "kl"):
            assert a.get(measure, 0) == pytest.approx(b.get(measure, 0), rel=1e-3), measure
    assert found[0][0][0]["grad_norm"] > 0


def test_generation_uses_the_attention_that_the_model_had(tokenizer, tmp_path):
    model = model_of("Qwen3", len(tokenizer), tmp_path / "model")
    model.set_attn_implementation("eager")
    chosen = []

    class Base(trl.GRPOTrainer):
        def _generate(self, *args: Any) -> Any:
            chosen.append(self.model.config._attn_implementation)
            return super()._generate(*args) if len(chosen) < 2 else 1 / 0

    trainer = trainer_of(shared_prefix_trainer(Base), model, tokenizer, tmp_path)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert chosen == ["eager", "eager"]
    assert model.config._attn_implementation == "eager"


def test_models_and_batches_that_are_refused(tokenizer, tmp_path):
    made = shared_prefix_trainer(trl.GRPOTrainer)
    model = model_of("Qwen3", len(tokenizer), tmp_path / "model")
    trainer = trainer_of(made, model, tokenizer, tmp_path)
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(Unsupported, match="a batch with pixel_values; need text alone"):
        trainer._get_per_token_logps_and_entropies(model, ids, ids, 2, pixel_values=ids)
    model.config.attention_dropout = 0.1
    with pytest.raises(Unsupported, match=r"attention_dropout=0\.1"):
        trainer_of(made, model, tokenizer, tmp_path)


@pytest.mark.usefixtures("of_whole_groups")
@pytest.mark.parametrize("name", ["Qwen3", "Qwen3.5"])
def test_an_agent_s_branches_share_their_turns(tokenizer, tmp_path, name, monkeypatch, caplog):
    """`rollout_func` with tools: steps are those of plain TRL, and turns are computed once."""
    home = importlib.import_module("qla_kernels.integrations.trl")
    monkeypatch.setattr(home, "FEWEST_SAVED", 4)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    seeds = iter(range(100))

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = traces(len(tokenizer), tasks=len(prompts) // 4, seed=next(seeds))
        rows = whole_rows(found)
        assert len(rows) == len(prompts)
        lists = [[x.tolist() for x in column] for column in zip(*rows, strict=True)]
        names = ("prompt_ids", "completion_ids", "env_mask")
        return dict(zip(names, lists, strict=True)) | {"logprobs": None}

    found = []
    settings = {"gradient_checkpointing": True}
    for kind in (trl.GRPOTrainer, shared_prefix_trainer(trl.GRPOTrainer)):
        seeds = iter(range(100))
        model = model_of(name, len(tokenizer), tmp_path / "model")
        found.append(
            run_of(partial(kind, rollout_func=rollouts), model, tokenizer, tmp_path, **settings)
        )
        swapping.restore(model) if name in KINDS else None
    (want_log, want), (got_log, got) = found
    for a, b in zip(got_log, want_log, strict=True):
        for measure in ("loss", "grad_norm", "entropy", "reward"):
            assert a[measure] == pytest.approx(b[measure], rel=1e-3, abs=1e-5), measure
    assert want_log[0]["grad_norm"] > 0
    assert_close("weights", got, want, 1e-4)
    (said,) = [m for m in caplog.messages if m.startswith("shared prompts: the first batch has")]
    packed, whole = (int(x) for x in re.findall(r"(\d+) tokens in place of (\d+)", said)[0])
    rows = whole_rows(traces(len(tokenizer), tasks=2, seed=0))
    prompts = {tuple(row.prompt.tolist()) for row in rows}
    alone = sum(map(len, prompts)) + sum(len(row.response) for row in rows)
    assert packed < alone < whole  # shares more than prompts
