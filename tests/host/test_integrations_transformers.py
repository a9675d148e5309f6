"""Models of transformers with our functions in their gated-delta-net layers, on the CPU.

Stand-in layers of both kinds always run: some hold the functions they call, some share them. Models
of an installed transformers, of whichever kind, run as well. They compute in fp32.
"""

import copy
import importlib.util
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qla_kernels import Unsupported
from qla_kernels.integrations import transformers as integration
from qla_kernels.integrations import transformers_dualkv, transformers_sparse_ring
from reference import gdn
from tests.compare import relative_l2
from tests.tiny_models import KINDS, step, tiny

pytestmark = pytest.mark.libraries


def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if use_qk_l2norm_in_kernel:
        query, key = gdn.l2norm(query), gdn.l2norm(key)
    o, state = gdn.recurrent(query, key, value, g, beta, initial_state=initial_state)
    return o, state if output_final_state else None


torch_recurrent_gated_delta_rule = torch_chunk_gated_delta_rule


class GatedDeltaNet(nn.Module):
    """Since transformers 5.15: calls functions of its module, with keywords that not all take."""

    H, HV, K, V = 2, 4, 16, 8

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = (self.H * self.K, self.H * self.K, self.HV * self.V, self.HV, self.HV)
        self.project = nn.Linear(width, sum(self.sizes), bias=False)
        self.A_log = nn.Parameter(torch.rand(self.HV))
        self.dt_bias = nn.Parameter(torch.zeros(self.HV))
        self.out = nn.Linear(self.HV * self.V, width, bias=False)

    def functions(self) -> tuple[Callable[..., Any], ...]:
        return torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v, a, b = self.project(x).split(self.sizes, -1)
        q, k = (F.silu(t).unflatten(-1, (self.H, self.K)) for t in (q, k))
        v = F.silu(v).unflatten(-1, (self.HV, self.V))
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        whole, single = self.functions()
        function = single if state is not None and x.shape[1] == 1 else whole
        o, state = function(
            q, k, v, g=g, beta=b.sigmoid(), initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, **self.others(),
        )  # fmt: skip
        return self.out(o.flatten(-2)), state

    def others(self) -> dict[str, Any]:
        return {"cu_seqlens": None, "position_ids": torch.zeros(1)}


class HoldingGatedDeltaNet(GatedDeltaNet):
    """Until 5.14: calls what it holds."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.chunk_gated_delta_rule = torch_chunk_gated_delta_rule
        self.recurrent_gated_delta_rule = torch_recurrent_gated_delta_rule

    def functions(self) -> tuple[Callable[..., Any], ...]:
        return self.chunk_gated_delta_rule, self.recurrent_gated_delta_rule

    def others(self) -> dict[str, Any]:
        return {}


class Model(nn.Module):
    def __init__(self, layer: type[GatedDeltaNet]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList([layer(32), layer(32)])

    def forward(self, ids: Tensor, states: list[Tensor | None] | None = None) -> Any:
        x, out = self.embed(ids), []
        for layer, state in zip(self.layers, states or [None, None], strict=True):
            y, state = layer(x, state)
            x = x + y
            out.append(state)
        return x @ self.embed.weight.T, out


@pytest.fixture(params=[HoldingGatedDeltaNet, GatedDeltaNet])
def model(request):
    made = Model(request.param)
    yield made
    integration.restore(made)  # this module's functions


def assert_agree(got: Any, want: Any) -> None:
    assert relative_l2(got[0], want[0]) < 1e-5
    assert relative_l2(got[1], want[1]) < 1e-6
    assert got[2].keys() == want[2].keys()
    largest = max(x.norm() for x in want[2].values())
    for name, x in want[2].items():  # one that vanishes is judged next to the others
        assert (got[2][name] - x).norm() < 2e-5 * x.norm() + 1e-7 * largest, name


def test_a_training_step_agrees(model):
    ids = torch.randint(50, (2, 70))
    want = step(model, ids)
    assert integration.swap(model) == 2
    assert_agree(step(model, ids), want)


def test_decoding_agrees(model):
    ids = torch.randint(50, (2, 9))
    with torch.no_grad():
        want, _ = model(ids)
        integration.swap(model)
        parts, states = [], None
        for piece in ids.split([5, 1, 1, 1, 1], 1):
            logits, states = model(piece, states)
            parts.append(logits)
    assert relative_l2(torch.cat(parts, 1), want) < 1e-6


def test_layers_call_our_functions(model):
    """Which refuse what theirs would not."""
    integration.swap(model)
    q, v, gate = torch.zeros(1, 3, 2, 16), torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 4)
    for function in model.layers[0].functions():
        with pytest.raises(Unsupported, match="need one dtype"):
            function(q, q.half(), v, g=gate, beta=gate)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_tensors_that_lie_by_channel_are_copied(monkeypatch, name):
    """Our functions refuse them on a GPU, and a model's convolution leaves no others."""
    given = []

    def ours(*args: Any) -> None:
        given.extend(args)

    x = torch.randn(2, 3, 64, 5).transpose(1, 3)
    wide = torch.randn(2, 5, 9, 64)[:, :, :3]
    monkeypatch.setattr(integration, name, ours)
    (integration.chunk if name.startswith("chunk") else integration.recurrent)(x, wide, x, x)
    q, k, v, g = given
    assert q.is_contiguous()
    assert torch.equal(q, x)
    assert v.is_contiguous()
    assert k is wide
    assert g is x


def test_restore_brings_the_same_functions_back(model):
    before = [layer.functions() for layer in model.layers]
    assert integration.restore(model) == 0
    integration.swap(model)
    assert integration.swap(model) == 2
    for layer, functions in zip(model.layers, before, strict=True):
        assert not set(layer.functions()) & set(functions)
    assert integration.restore(model) == 2
    assert [layer.functions() for layer in model.layers] == before
    assert integration.restore(model) == 0


def test_what_a_layer_holds_goes_with_it():
    model = Model(HoldingGatedDeltaNet)
    integration.swap(model)
    other = copy.deepcopy(model)
    for layer in other.layers:
        held = (layer.chunk_gated_delta_rule, layer.recurrent_gated_delta_rule)
        assert held == tuple(integration.HELD.values())
    assert integration.restore(other) == 2
    assert integration.restore(model) == 2


def test_a_swapped_model_can_be_pickled(model):
    """It could not: what a layer held bore the name of another function."""
    integration.swap(model)
    other = pickle.loads(pickle.dumps(model))
    torch.save(model, io.BytesIO())
    ids = torch.randint(50, (2, 9))
    assert torch.equal(other(ids)[0], model(ids)[0])
    for a, b in zip(other.layers, model.layers, strict=True):
        assert a.functions() == b.functions()


def test_layers_of_a_derived_class(model):
    """As FSDP2 makes one, in a module of its own; this one's module cannot be found."""
    theirs = set(model.layers[0].functions())
    for layer in model.layers:
        kind = type(layer)
        layer.__class__ = type(f"FSDP{kind.__name__}", (kind,), {"__module__": "nowhere"})
    assert integration.swap(model) == 2
    assert not theirs & set(model.layers[0].functions())
    assert integration.restore(model) == 2


NO_MODULES = {
    "a name": ("Qwen/Qwen3.5-4B", "model is 'Qwen/Qwen3.5-4B' of type str"),
    "a list of layers": ([nn.Linear(1, 1)], "model is of type list"),
    "nothing": (None, "model is None of type NoneType"),
}


@pytest.mark.parametrize("what", NO_MODULES)
@pytest.mark.parametrize("function", ["swap", "restore", "status"])
def test_what_is_no_module_is_refused(function, what):
    """It was an AttributeError."""
    given, text = NO_MODULES[what]
    with pytest.raises(TypeError) as error:
        getattr(integration, function)(given)
    said = f"{function}: {text}; need a torch.nn.Module; load the model first, as by AutoModel"
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("what", NO_MODULES)
@pytest.mark.parametrize("hook", [transformers_dualkv, transformers_sparse_ring])
@pytest.mark.parametrize("function", ["check", "prepare"])
def test_attentions_do_not_accept_what_is_no_model(hook, function, what):
    """`check` found nothing wrong with a name."""
    given, text = NO_MODULES[what]
    with pytest.raises(
        TypeError, match="need a model or its config; load the model first"
    ) as error:
        getattr(hook, function)(given)
    assert text in str(error.value)


def test_status_counts_layers(model):
    name = type(model.layers[0]).__name__
    assert integration.status(model) == ({}, {name: 2})
    assert str(integration.status(model)) == f"qla_kernels runs in 0 of 2 {name}"
    integration.swap(model)
    assert integration.status(model) == ({name: 2}, {})
    model.layers.append(HoldingGatedDeltaNet(32))
    if name == "HoldingGatedDeltaNet":
        assert integration.status(model) == ({name: 2}, {name: 1})
        assert str(integration.status(model)) == f"qla_kernels runs in 2 of 3 {name}"
    else:
        assert integration.status(model) == ({name: 2}, {"HoldingGatedDeltaNet": 1})
        said = "qla_kernels runs in 2 of 2 GatedDeltaNet, 0 of 1 HoldingGatedDeltaNet"
        assert str(integration.status(model)) == said
    integration.restore(model)
    assert not integration.status(model).ours
    nothing = integration.status(nn.Linear(1, 1))
    assert nothing == ({}, {})
    assert str(nothing) == "qla_kernels runs in none: the model has no gated-delta-net layer"


def test_other_layers_are_left_alone(caplog):
    assert integration.swap(nn.Sequential(nn.Linear(3, 3), nn.GELU())) == 0
    assert caplog.messages == [
        "Sequential has no layer to swap: none holds chunk_gated_delta_rule, and none is a "
        "...GatedDeltaNet of a module with torch_chunk_gated_delta_rule"
    ]


def test_a_model_that_is_swapped_warns_of_nothing(model, caplog):
    integration.swap(model)
    assert not caplog.messages


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_an_installed_transformers(kind):
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("its layers take FLA's norm and convolution, which need tensors on a GPU")
    model, ids = tiny(kind), torch.randint(50, (2, 70))
    want = step(model, ids)
    decode = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    decode |= {"return_dict_in_generate": True}
    want_new = model.generate(ids[:, :5], **decode)
    assert integration.swap(model) == 1
    try:
        assert_agree(step(model, ids), want)
        new = model.generate(ids[:, :5], **decode)
        assert torch.equal(new.sequences, want_new.sequences)
        for a, b in zip(new.logits, want_new.logits, strict=True):
            assert relative_l2(a, b) < 1e-5
    finally:
        assert integration.restore(model) == 1
    assert torch.equal(step(model, ids)[0], want[0])
