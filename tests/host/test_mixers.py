"""`swap` gives known layers of transformers a forward of ours; others keep theirs."""

import copy
import functools
import inspect
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qla_kernels import Unsupported
from qla_kernels.integrations import mixers
from qla_kernels.integrations import transformers as swapping
from tests.tiny_hybrids import KINDS, VOCABULARY, hybrid, parts

pytest.importorskip("transformers", minversion="5.15")

pytestmark = pytest.mark.libraries

QWEN4 = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Models of a kind share their module's functions."""
    yield
    for kind in KINDS:
        swapping.restore(hybrid(kind))


def step(model: nn.Module, **more: Any) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (2, 70), generator=torch.manual_seed(0))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **more).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_agree(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    largest = max(x.norm() for x in want.values())
    for name, x in want.items():
        assert (got[name] - x).norm() < 1e-4 * x.norm() + 1e-7 * largest, name


def layers(model: nn.Module) -> list[nn.Module]:
    return [x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet")]


@pytest.fixture
def runs(monkeypatch) -> list[dict[str, Any]]:
    """The keywords of calls of gated_delta_net by layers."""
    calls: list[dict[str, Any]] = []
    ours = mixers.gated_delta_net

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(more)
        return ours(*args, **more)

    monkeypatch.setattr(mixers, "gated_delta_net", counted)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_runs_in_one_function(kind, runs):
    model = hybrid(kind)
    want = step(model)
    assert swapping.swap(model) == 3
    assert swapping.whole(model) == {type(layers(model)[0]).__name__: 3}
    for recompute in (False, True):
        swapping.swap(model, recompute=recompute)
        runs.clear()
        assert_agree(step(model), want)
        assert [x["recompute"] for x in runs] == [recompute] * 3
    swapping.swap(model)
    assert layers(model)[0].region_of_qla_kernels.recompute
    swapping.restore(model)
    assert not swapping.whole(model)
    assert all(map(torch.equal, step(model).values(), want.values()))
    assert not any("forward" in x.__dict__ for x in model.modules())


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_the_output_gate_of_qwen4(gate, runs):
    configs, models = parts("qwen4_exp")
    config = next(getattr(configs, x) for x in dir(configs) if x.endswith("TextConfig"))
    kind = models.Qwen4ExpTextGatedDeltaNet
    sizes = {
        "hidden_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        "num_hidden_layers": 1, "layer_types": ["linear_attention"], "output_gate_type": gate,
    }  # fmt: skip
    torch.manual_seed(1)
    layer = kind(config(**sizes), 0)
    assert layer.norm.activation == gate
    x = torch.randn(2, 50, 32, requires_grad=True)
    want = layer(x)
    dy = torch.randn_like(want)
    given = [x, *layer.parameters()]
    grads = torch.autograd.grad(want, given, dy)
    model = nn.ModuleList([layer])
    try:
        assert swapping.swap(model) == 1
        got = layer(x)
        found = torch.autograd.grad(got, given, dy)
        (call,) = runs
        assert call["z_activation"] == gate
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        for a, b in zip(found, grads, strict=True):
            assert (a - b).norm() < 1e-4 * b.norm() + 1e-6
    finally:
        swapping.restore(model)


def lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    given = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**given, task_type="CAUSAL_LM"))


def checkpointed(model: nn.Module, reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


WAYS = {
    "LoRA": lora,
    "checkpointing": functools.partial(checkpointed, reentrant=False),
    "checkpointing, reentrant": functools.partial(checkpointed, reentrant=True),
    "LoRA and checkpointing": lambda model: checkpointed(lora(model), False),
}


@pytest.mark.parametrize("way", WAYS)
def test_recompute_beside_other_libraries(way, runs):
    want = step(WAYS[way](hybrid("Qwen3.5")))
    model = WAYS[way](hybrid("Qwen3.5"))
    assert swapping.swap(model, recompute=True) == 3
    assert_agree(step(model), want)
    assert len(runs) == (6 if "checkpointing" in way else 3)


def test_copies_run_their_own_layers():
    model = hybrid("Qwen3.5")
    swapping.swap(model, recompute=True)
    want = step(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made is not model
        assert swapping.whole(made) == swapping.whole(model)
        assert_agree(step(made), want)
        assert layers(made)[0].forward.args[0] is layers(made)[0]
        swapping.restore(made)


def test_a_replica_of_a_layer_is_refused():
    """DataParallel copies what a layer has, and so the forward of the original."""
    (layer, *_) = layers(model := hybrid("Qwen3.5"))
    swapping.swap(model)
    replica = layer._replicate_for_data_parallel()
    with pytest.raises(Unsupported, match="inputs on meta, weights on cpu; need one process"):
        replica(torch.zeros(1, 9, 32, device="meta"))


def test_a_padded_batch_is_masked_as_by_the_layer(runs):
    model = hybrid("Qwen3.5")
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :30] = 0
    want = step(model, attention_mask=mask)
    swapping.swap(model)
    assert_agree(step(model, attention_mask=mask), want)
    assert len(runs) == 3


def test_calls_with_a_cache_run_the_layers_own_forward(runs):
    model = hybrid("Qwen3.5").eval()
    ids = torch.randint(VOCABULARY, (2, 20))
    with torch.no_grad():
        want = model(ids, use_cache=True)
        following = model(ids[:, :1], past_key_values=want.past_key_values).logits
        swapping.swap(model)
        got = model(ids, use_cache=True)
        assert not runs
        assert (got.logits - want.logits).abs().max() < 1e-4 * want.logits.abs().max()
        after = model(ids[:, :1], past_key_values=got.past_key_values).logits
    assert (after - following).abs().max() < 1e-4 * following.abs().max()


def test_batch_invariant_layers_keep_their_forward(runs, caplog):
    model = hybrid("Qwen3.5")
    swapping.swap(model)
    swapping.swap(model, batch_invariant=True, recompute=True)
    assert "recompute=True changes nothing" in caplog.text
    assert not swapping.whole(model)
    step(model)
    assert not runs
    swapping.swap(model, batch_invariant=False)
    assert len(swapping.whole(model)) == 1


@pytest.mark.parametrize("of", ["conv1d", "norm"])
def test_hooks_of_modules_that_are_not_called_keep_the_layers_forward(of, runs):
    model = hybrid("Qwen3.5")
    swapping.swap(model)
    seen = []
    layer = layers(model)[0]
    layer.get_submodule(of).register_forward_hook(lambda *_: seen.append(1))
    step(model)
    assert len(runs) == 2
    assert len(seen) == (of == "norm")  # the layer uses the convolution's weight alone


@pytest.fixture
def of_a_release(monkeypatch) -> Iterator[Callable[[Any], nn.Module]]:
    """Returns a model whose layers' class has another forward."""

    def made(changed: Any) -> nn.Module:
        model = hybrid("Qwen3.5")
        kind = type(layers(model)[0])
        monkeypatch.setattr(kind, "forward", changed(kind.forward))
        mixers._kind_of.cache_clear()
        return model

    yield made
    mixers._kind_of.cache_clear()


def around(theirs: Any) -> Any:
    """Another library's function around the forward."""

    @functools.wraps(theirs)
    def forward(self, hidden_states, *args, **kwargs):
        return theirs(self, hidden_states.tanh(), *args, **kwargs)

    return forward


def of_other_names(theirs: Any) -> Any:
    """A forward that uses one name more than those that we know."""
    code = inspect.unwrap(theirs).__code__
    found = types.FunctionType(
        code.replace(co_names=(*code.co_names, "another")), inspect.unwrap(theirs).__globals__
    )
    found.__defaults__ = inspect.unwrap(theirs).__defaults__
    return found


@pytest.mark.parametrize("changed", [around, of_other_names])
def test_a_forward_that_is_not_known_stays(changed, of_a_release, runs, caplog):
    model = of_a_release(changed)
    want = step(model)
    assert swapping.swap(model, recompute=True) == 3
    assert not swapping.whole(model)
    assert "no layer's forward is one that we know" in caplog.text
    assert_agree(step(model), want)
    assert not runs


def test_a_forward_of_another_library_stays(runs):
    model = hybrid("Qwen3.5")
    layer = layers(model)[0]
    layer.forward = functools.partial(type(layer).forward, layer)
    assert swapping.swap(model) == 3
    assert swapping.whole(model) == {type(layer).__name__: 2}
    step(model)
    assert len(runs) == 2
    swapping.restore(model)
    assert "forward" in layer.__dict__


@pytest.mark.parametrize("first", ["swap", "accelerate"])
def test_hooks_of_accelerate(first, runs):
    hooks = pytest.importorskip("accelerate").hooks
    model = hybrid("Qwen3.5")
    want, seen = step(model), []

    class Seen(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    def attach():
        for layer in layers(model):
            hooks.add_hook_to_module(layer, Seen())

    for prepare in (swapping.swap, lambda _: attach())[:: 1 if first == "swap" else -1]:
        prepare(model)
    assert_agree(step(model), want)
    assert (len(runs), len(seen)) == (3, 3)
    swapping.restore(model)
    assert_agree(step(model), want)
    assert (len(runs), len(seen)) == (3, 6)
    for layer in layers(model):
        hooks.remove_hook_from_module(layer)
    assert_agree(step(model), want)
    assert (len(runs), len(seen)) == (3, 6)


def test_what_autograd_saves_shrinks():
    """In bytes a token of a layer of many channels, each storage once; y of the norm is one."""
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_hidden_layers": 2}
    sizes["layer_types"] = ["linear_attention", "full_attention"]
    model = hybrid("Qwen3.5", **sizes).bfloat16()
    (layer,) = layers(model)
    x = torch.randn(1, 256, 32).bfloat16().requires_grad_()
    found = {}
    for way in ("functions", "whole", "recompute"):
        swapping.swap(model, recompute=way == "recompute")
        if way == "functions":
            mixers.give_back(layer)
            mixers.give_norm_back(layer)
        found[way] = saved(lambda: layer(x)) / x.shape[1]
    assert found["whole"] < 0.6 * found["functions"], found
    rows, y = 2 * layer.conv_dim, 2 * layer.value_dim
    assert found["whole"] - found["recompute"] == pytest.approx(rows + y, rel=0.02), found


def saved(function) -> int:
    """Bytes that autograd saves, each storage once, without those of parameters."""
    storages = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    kept = []  # so that no memory is used twice
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept.append(function())
    return sum(storages.values())
