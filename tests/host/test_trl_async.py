"""The AsyncGRPO subclass on an installed TRL 1.16: its trees, and its loss against each sample."""

import queue
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import SharedLayout, Unsupported
from qla_kernels.integrations import positions
from qla_kernels.integrations import transformers as swapping
from qla_kernels.integrations.trl_async import forest, shared_prefix_async_trainer
from tests.tiny_hybrids import VOCABULARY, assert_gradients, gradients
from tests.trl_trainers import model_of, tokenizer_of

pytestmark = pytest.mark.libraries


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The trainer asks for its name, to look up its speed."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a CPU")


def random_samples(seed: int, vocabulary: int = 3, longest: int = 12) -> list[dict[str, Any]]:
    """Rollouts of several turns: they branch, are equal, or begin another, and few tokens meet."""
    torch.manual_seed(seed)
    found: list[dict[str, Any]] = []

    def number(high: int) -> int:
        return int(torch.randint(1, high + 1, ()))

    def sample(ids: Tensor, prompt: int, group: int) -> dict[str, Any]:
        mask = (torch.arange(len(ids)) >= prompt).int()
        old, advantage = -torch.rand(len(ids)), float(torch.randn(()))
        return {
            "input_ids": ids, "completion_mask": mask, "old_log_probs": old,
            "advantage": advantage, "group_id": group,
        }  # fmt: skip

    for group in range(3):
        trunk = torch.randint(2, vocabulary, (number(longest),))
        for _ in range(number(5)):
            ids = trunk
            for _ in range(number(4)):
                ids = torch.cat([ids, torch.randint(2, vocabulary, (number(longest),))])
                if number(3) == 1:
                    trunk = ids
            found.append(sample(ids, number(len(ids) - 1), group))
        found.append(sample(found[-1]["input_ids"].clone(), 1, group))
    return found


def test_a_tree_by_the_lengths_of_its_segments_and_paths():
    """Two roots; the second child of the first is followed by a grandchild and by a third child."""
    lengths, parents = forest([0, 3, 4, 6, 7, 12, 14], [0, 3, 7, 12, 18, 26, 28])
    assert lengths == [3, 1, 2, 1, 5, 2]
    assert parents == [-1, 0, 0, 2, 0, -1]
    assert forest([0], [0]) == ([], [])
    with pytest.raises(ValueError, match="segment 1 begins at depth 2; need a depth at which"):
        forest([0, 3, 4], [0, 3, 6])


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_those_of_trl(seed):
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    row = packing.TreeRow()
    for sample in random_samples(seed, vocabulary=4 + seed % 5):
        row.add(sample)
    batch = row.pack()
    q, k, index = (batch[f"tree_{x}"] for x in ("cu_seqlens_q", "cu_seqlens_k", "kv_index"))
    layout = SharedLayout.from_forest(*forest(q.tolist(), k.tolist()))
    assert torch.equal(positions.depths(layout), batch["position_ids"])
    T = layout.num_tokens
    theirs = torch.zeros(T, T, dtype=torch.bool)  # causal on the path, aligned at its end
    for (a, b), (first, end) in zip(pairwise(q.tolist()), pairwise(k.tolist()), strict=True):
        for token in range(a, b):
            theirs[token, index[first : end - b + token + 1]] = True
    token = torch.arange(T)
    assert torch.equal(theirs, (token <= token[:, None]) & (token[:, None] < layout.tout))


class Worker:
    """Hands out samples; stands for the server with the policy as well."""

    def __init__(self, samples: list[Any]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in 2 * samples:  # accelerate reads a batch ahead
            self.rollout_buffer.put(sample)

    def check_health(self, _: float) -> None:
        raise RuntimeError("all samples have been taken")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def trainer_of(kind: Any, folder: Any, samples: list[Any], **settings: Any) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    tokenizer = tokenizer_of()
    args = AsyncGRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, report_to=[], save_strategy="no", seed=3,
        max_steps=1, per_device_train_batch_size=len(samples), gradient_accumulation_steps=1,
        token_budget=0, bf16=False, disable_tqdm=True, logging_steps=1, dtype="float32",
        gradient_checkpointing=True, learning_rate=1e-3, temperature=0.8,
        router_aux_loss_coef=0.0, **settings,
    )  # fmt: skip
    from datasets import Dataset

    worker, prompts = Worker(samples), Dataset.from_dict({"prompt": ["w1"]})
    return kind(
        str(folder), args=args, processing_class=tokenizer, rollout_worker=worker,
        reward_funcs=len, weight_transfer=worker, train_dataset=prompts,
    )  # fmt: skip


def loss_of_each_alone(model: Any, samples: list[dict[str, Any]], args: Any) -> Tensor:
    """TRL's loss, from its definition."""
    terms = []
    for x in samples:
        logits = model(x["input_ids"][None], use_cache=False).logits[0, :-1] / args.temperature
        logps = logits.log_softmax(-1).gather(1, x["input_ids"][1:, None])[:, 0]
        chosen = x["completion_mask"][1:].bool()
        ratio = (logps[chosen] - x["old_log_probs"][1:][chosen]).exp()
        clipped = ratio.clamp(1 - args.epsilon, 1 + (args.epsilon_high or args.epsilon))
        terms.append(-torch.minimum(ratio * x["advantage"], clipped * x["advantage"]))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Next-MoE", "Qwen3.5"])
def test_a_step_is_that_of_each_sample_alone(name, tmp_path, caplog):
    home = pytest.importorskip("trl.experimental.async_grpo")
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    whole = model_of(name, VOCABULARY, tmp_path)
    config = getattr(whole.config, "layer_types", None)
    samples = random_samples(7, vocabulary=40, longest=30)
    given = [
        RolloutSample(prompt=[], completion=[], model_version=0, metrics={}, **x) for x in samples
    ]
    kind = shared_prefix_async_trainer(home.AsyncGRPOTrainer)
    trainer = trainer_of(kind, tmp_path, given)
    model = trainer.model
    swapping.restore(model)  # and with it functions that `whole` shares
    want = loss_of_each_alone(whole, samples, trainer.args)
    wanted = gradients(whole, want)
    swapping.swap(model) if name != "Qwen3" else None
    assert getattr(model.config, "layer_types", None) == config
    assert model.config._attn_implementation == "shared_prefix"

    found = []

    class Watched(kind):
        def training_step(self, model: Any, *args: Any) -> Any:
            loss = super().training_step(model, *args)
            found.append((loss, {n: p.grad.clone() for n, p in model.named_parameters()}))
            return loss

    trainer.__class__ = Watched
    trainer.train()
    model(torch.tensor([[3, 4]]))  # takes ordinary calls again
    swapping.restore(model)
    ((loss, got),) = found
    assert float(loss) == pytest.approx(float(want.detach()), rel=1e-5)
    assert_gradients(got, wanted, 1e-4)
    (said,) = [m for m in caplog.messages if m.startswith("shared prompts: the first batch has")]
    assert float(said.split()[-3]) > 1.2


def test_models_that_trl_or_we_refuse(tmp_path):
    home = pytest.importorskip("trl.experimental.async_grpo")
    model = model_of("Qwen3.5", VOCABULARY, tmp_path)
    with pytest.raises(ValueError, match=r"has .*linear_attention.* layers"):
        trainer_of(home.AsyncGRPOTrainer, tmp_path, [None])
    kind = shared_prefix_async_trainer(home.AsyncGRPOTrainer)
    model.config.attention_dropout = 0.1
    model.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=r"attention_dropout=0\.1"):
        trainer_of(kind, tmp_path, [None])
    swapping.restore(model)
    with pytest.raises(ValueError, match=r"has .*linear_attention.* layers"):  # as before
        trainer_of(home.AsyncGRPOTrainer, tmp_path, [None])


@pytest.mark.parametrize("release", ["1.15.2", "1.17.0", "11.16.0"])
def test_another_trl_is_refused(release, monkeypatch):
    pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    monkeypatch.setattr("trl.__version__", release)
    with pytest.raises(Unsupported, match=f"TRL {release}; need TRL 1"):
        shared_prefix_async_trainer(object)
