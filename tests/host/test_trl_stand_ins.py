"""`shared_prefix_trainer` on a stand-in of TRL's trainer."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import dualkv_grpo
from qla_kernels import Unsupported
from qla_kernels.integrations import trl, trl_async
from tests.compare import assert_close


class Model(nn.Module):
    """The example's model, called as transformers' models are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dualkv_grpo.Qwen3()
        self.config = SimpleNamespace(_attn_implementation="eager", num_experts_per_tok=2)
        self.config.get_text_config = lambda: self.config

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        shared_prefix: Any,
        logits_to_keep: Tensor,
        use_cache: bool,
        output_router_logits: bool = False,
    ) -> Any:
        assert not use_cache
        with torch.autocast("cpu", enabled=False):
            logits = self.inner(input_ids[0], position_ids[0], logits_to_keep, shared_prefix)
        routers = (torch.zeros(input_ids.shape[1], 4),) if output_router_logits else None
        return SimpleNamespace(logits=logits, router_logits=routers)


class Base:
    """GRPOTrainer, as far as the derived class uses it."""

    def __init__(self, model: Model, ref_model: Model | None = None, **given: Any) -> None:
        self.model, self.ref_model = model, ref_model
        self.num_generations = given.pop("num_generations", 1)
        self.args, self.temperature = SimpleNamespace(**given), 1.0
        self.accelerator = SimpleNamespace(
            unwrap_model=lambda model: model, autocast=nullcontext, is_main_process=True
        )

    __module__ = "trl.trainer.grpo_trainer"

    def _generate(self, prompts: Any) -> Any:
        assert self.model.config._attn_implementation == "eager"
        return prompts if prompts else 1 / 0

    def train(self, *batches: Any) -> None:
        for batch in batches:
            self._generate([1])
            self._get_per_token_logps_and_entropies(self.model, *batch)
            assert self.model.config._attn_implementation == "shared_prefix"

    evaluation_loop = train

    def _get_per_token_logps_and_entropies(self, *args: Any) -> Any:
        raise AssertionError("the derived class has its own")


@pytest.fixture
def made(monkeypatch):
    def prepare(model: Any, name: str) -> None:
        model.config._attn_implementation = name

    monkeypatch.setitem(
        sys.modules, "trl.trainer.utils", SimpleNamespace(add_fused_lm_head=lambda: None)
    )
    monkeypatch.setitem(sys.modules, "trl.trainer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__version__="1.16.0"))
    monkeypatch.setattr(trl.transformers_dualkv, "prepare", prepare)
    return trl.shared_prefix_trainer(Base)


@pytest.fixture
def rollouts():
    torch.manual_seed(0)
    model = Model()
    data = dualkv_grpo.sample(model.inner)
    whole = dualkv_grpo.whole_sequences(model.inner, data.prompts, data.responses).detach()
    pairs = [(p, r) for p, rs in zip(data.prompts, data.responses, strict=True) for r in rs]
    order = torch.randperm(len(pairs))
    prompts, answers = zip(*(pairs[i] for i in order.tolist()), strict=True)
    left, right = (max(map(len, x)) for x in (prompts, answers))
    ids = torch.zeros(len(pairs), left + right, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, pair in enumerate(zip(prompts, answers, strict=True)):
        span = slice(left - len(pair[0]), left + len(pair[1]))
        ids[row, span], mask[row, span] = torch.cat(pair), 1
    return model, ids, mask, whole[order]


@pytest.mark.parametrize("size", [None, 3])
def test_log_probabilities_are_those_of_whole_sequences(made, rollouts, size, caplog):
    model, ids, mask, whole = rollouts
    trainer = made(model)
    call = (model, ids, mask, whole.shape[1])
    given = {"batch_size": size, "pixel_values": None, "num_images": None}
    logps, *others = trainer._get_per_token_logps_and_entropies(*call, **given)
    assert_close("log-probabilities", logps.detach(), whole, 1e-6)
    assert others == [None, None]
    assert logps.requires_grad
    assert "forward" not in vars(model.inner.head)
    _, entropies, aux = trainer._get_per_token_logps_and_entropies(
        *call, compute_entropy=True, compute_aux_loss=True, **given
    )
    assert torch.equal(entropies != 0, logps != 0)
    assert float(aux) == pytest.approx(2.0)  # of equal probabilities, top 2
    (said,) = caplog.messages
    assert said.startswith("shared prompts: the first batch has")
    with pytest.raises(Unsupported, match="a batch with pixel_values; need text alone"):
        trainer._get_per_token_logps_and_entropies(*call, pixel_values=ids)


def test_a_batch_with_parts_of_groups_is_reported_once(made, rollouts, caplog):
    """Groups have 4, 1 and 2 rows."""
    model, ids, mask, whole = rollouts
    call = (model, ids, mask, whole.shape[1])
    for num, trains, reports in ((1, True, 0), (2, False, 0), (2, True, 1)):
        trainer = made(model, num_generations=num)
        for _ in range(2):
            with torch.set_grad_enabled(trains):  # evaluation and the old policy have other groups
                trainer._get_per_token_logps_and_entropies(*call)
        said = [message for message in caplog.messages if "parts of groups" in message]
        assert len(said) == reports
    assert "(1 of 2 responses)" in said[0]
    assert "set per_device_train_batch_size to a multiple of num_generations" in said[0]


def test_a_reference_policy_is_prepared(made, rollouts):
    model, ids, mask, whole = rollouts
    trainer = made(Model(), ref_model=model)
    assert model.config._attn_implementation == "shared_prefix"
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(model, ids, mask, whole.shape[1])
    assert_close("log-probabilities", found[0], whole, 1e-6)
    assert found[1] is None


def test_groups_come_in_random_order_and_whole():
    """Tensors, lists and numbers of a generation; random numbers are those of TRL's shuffle."""
    rows = {
        "prompt_ids": torch.tensor([[0, 5], [0, 5], [7, 5], [7, 5], [0, 0], [0, 0]]),
        "prompt_mask": torch.tensor([[0, 1], [0, 1], [1, 1], [1, 1], [0, 1], [0, 1]]),
        "advantages": torch.arange(6.0),
        "texts": list("abcdef"),
        "num_items_in_batch": torch.tensor(3),
        "images": None,
    }

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        order = torch.randperm(6).tolist()
        return {name: trl._in_order(x, order) for name, x in batch.items()}

    seen = set()
    for seed in range(30):
        torch.manual_seed(seed)
        first = shuffle(rows)["texts"]
        torch.manual_seed(seed)
        found = trl.of_groups(shuffle)(rows)
        after = torch.rand(1)
        torch.manual_seed(seed)
        shuffle(rows)
        assert torch.equal(torch.rand(1), after)
        letters = "".join(found["texts"])
        pairs = {letters[i : i + 2] for i in (0, 2, 4)}
        assert {"".join(sorted(pair)) for pair in pairs} == {"ab", "cd", "ef"}
        assert letters[0] == first[0]
        assert found["advantages"].tolist() == ["abcdef".index(x) for x in letters]
        assert (int(found["num_items_in_batch"]), found["images"]) == (3, None)
        seen.add(letters)
    assert len(seen) > 15
    other = {"x": torch.arange(3)}
    assert trl.of_groups(lambda batch: batch)(other) is other


@pytest.mark.parametrize("method", ["train", "evaluation_loop"])
def test_the_model_has_our_attention_in_steps_alone(made, rollouts, method):
    """It refused ordinary calls afterwards; and TRL generates with the model that it trains."""
    trainer, (_, ids, mask, whole) = made(Model()), rollouts
    assert trainer.model.config._attn_implementation == "eager"
    run, batch = getattr(trainer, method), (ids, mask, whole.shape[1])
    run(batch, batch)
    assert trainer.model.config._attn_implementation == "eager"
    with pytest.raises(TypeError):
        run(batch, ())
    assert trainer.model.config._attn_implementation == "eager"
    assert trainer._generate([1, 2]) == [1, 2]


def test_a_method_that_would_not_be_called_is_refused(made):
    class Own(Base):
        def _get_per_token_logps_and_entropies(self, *args: Any) -> Any:
            return super()._get_per_token_logps_and_entropies(*args)

    for base in (Own, type("Derived", (Own,), {}), made):
        with pytest.raises(Unsupported, match=r"_entropies, which would not be called; need TRL's"):
            trl.shared_prefix_trainer(base)

    class Derived(made):
        def _get_per_token_logps_and_entropies(self, *args: Any) -> Any:
            return "called"

    assert Derived(Model())._get_per_token_logps_and_entropies() == "called"
    trl.shared_prefix_trainer(type("Derived", (Base,), {}))


def test_arguments_and_releases_that_are_refused(made, monkeypatch):
    for base, got in ((Model, "Model"), (Model(), "a Model"), (Base(Model()), "a Base")):
        with pytest.raises(TypeError, match=rf"{got}; need trl\.GRPOTrainer, or a class with"):
            trl.shared_prefix_trainer(base)
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", SimpleNamespace())
    with pytest.raises(Unsupported, match=r"TRL cannot be used .* need TRL 1\.16 or later"):
        trl.shared_prefix_trainer(Base)
    monkeypatch.setitem(sys.modules, trl_async.HOME, None)
    with pytest.raises(Unsupported, match=r"TRL that cannot be imported .* need TRL 1\.16, on"):
        trl_async.shared_prefix_async_trainer(Base)
