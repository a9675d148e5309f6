"""flash-linear-attention on a GPU with our backend in it, beside its own kernels.

Both are measured against the definition: ours may be no further off than FLA's, unless by less than
rounding a tensor to 16 bits may cost: sums of products of 16-bit operands differ by that, most
where terms cancel, in the gradients of gates and states. FLA takes half a minute to compile the
backward of a kind of call, by TileLang unless Triton is 3.7.1 or later, so there are few kinds.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import fused_recurrent_gated_delta_rule
from qla_kernels.integrations import fla as integration
from qla_kernels.lab.selftest.gdn_recurrent import decode
from tests.compare import assert_close, no_worse
from tests.gdn_calls import DIFFERENTIABLE, Call, definition, leaves, on_gpu

theirs = pytest.importorskip("fla.ops.gated_delta_rule", exc_type=ImportError)

pytestmark = pytest.mark.hopper

LIMIT = 0.02  # relative L2, of anything in 16 bits
RATIO = 1.1
LAYER_LIMIT, LAYER_RATIO = 0.05, 1.5  # of products in 16 bits through a layer and back


@pytest.fixture
def ran(untuned, monkeypatch) -> list[str]:
    """Who asks FLA is sent to us, never to FlashQLA; grows by an entry with every call we run."""
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    monkeypatch.delenv(integration.SWITCH, raising=False)
    assert integration.register(prefer=True)
    runs, ours = [], integration.chunk_gated_delta_rule

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append("ours")
        return ours(*args, **kwargs)

    monkeypatch.setattr(integration, "chunk_gated_delta_rule", counted)
    return runs


def test_register_warns_of_nothing_here_and_counts(untuned, monkeypatch, caplog):
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    monkeypatch.delenv(integration.SWITCH, raising=False)
    with caplog.at_level(logging.WARNING, "qla_kernels"):
        assert integration.register(prefer=True)
    assert not caplog.messages
    x = on_gpu([64, 100])
    theirs.chunk_gated_delta_rule(**x)
    now = integration.status()
    assert (now.taken, now.declined, now.reason) == (1, 0, None)
    assert integration.unregister()


@contextmanager
def left_to_fla() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(integration.SWITCH, "0")
        yield


def half_ulp(dtype: torch.dtype) -> float:
    """The most by which rounding to it changes a number, relatively."""
    return torch.finfo(dtype).eps / 2


def in_fp64(x: Call) -> Call:
    return {
        n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in x.items()
    }


def outcomes(function: Callable[..., Any], x: Call, do: Tensor, dht: Tensor) -> dict[str, Tensor]:
    """o, the final state, and the gradient of every input."""
    x = leaves(x)
    results = function(**x, output_final_state=True)
    names = [n for n in DIFFERENTIABLE if n in x]
    upstream = [dy.to(y.dtype) for y, dy in zip(results, (do, dht), strict=True)]
    found = torch.autograd.grad(results, [x[n] for n in names], upstream)
    grads = {f"d{n}": dx for n, dx in zip(names, found, strict=True)}
    return {"o": results[0], "ht": results[1]} | grads


def definition_of(output_final_state: bool, **x: Any) -> tuple[Tensor, Tensor]:
    """The definition, called as a library's function is."""
    return definition(x)


BF16, FP16 = torch.bfloat16, torch.float16
CASES: dict[str, Call] = {
    "dense": {"tokens": 300},
    "activated, V first": {"tokens": 300, "activations": True, "state_v_first": True},
    "activated, packed": {
        "lengths": [100, 1, 17, 250], "activations": True, "allow_neg_eigval": True,
    },
    "one head per group, packed, fp16": {
        "lengths": [1, 63, 130, 200], "heads": (3, 3), "dtype": FP16,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(ran, case):
    x = on_gpu(padding=0, **CASES[case])
    if not x.get("use_gate_in_kernel"):
        x["g"] = x["g"] / 16  # gates that leave some of the state after a chunk
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    ours = outcomes(theirs.chunk_gated_delta_rule, x, do, dht)
    assert ran == ["ours"]
    with left_to_fla():
        fla = outcomes(theirs.chunk_gated_delta_rule, x, do, dht)
    assert ran == ["ours"]
    truth = outcomes(definition_of, in_fp64(x), do, dht)
    no_worse(ours, fla, truth, RATIO, LIMIT, half_ulp(x["q"].dtype))


@pytest.mark.parametrize("changed", [{"size": 32}, {"dtype": torch.float32}], ids=str)
def test_what_we_decline_is_computed_by_fla(ran, changed):
    x = on_gpu(tokens=100, **changed)
    assert integration.declined(**x)
    got = theirs.chunk_gated_delta_rule(**x, output_final_state=True)
    with left_to_fla():
        want = theirs.chunk_gated_delta_rule(**x, output_final_state=True)
    assert ran == []
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("lengths", [None, [1, 4, 0, 2, 1]], ids=str)
def test_decoding(untuned, lengths):
    """FLA has no dispatch for it: ours is imported in its place, and takes the same arguments."""
    x = decode(lengths, heads=(4, 8), batch=64, activations=True)
    x = {n: t.to("cuda") if torch.is_tensor(t) else t for n, t in x.items()}
    live = slice(None if lengths is None else sum(lengths))  # FLA leaves the rest unwritten

    def results(function: Callable[..., Any], x: Call) -> dict[str, Tensor]:
        o, state = function(**x, output_final_state=True)
        return {"o": o[:, live], "ht": state}

    with torch.no_grad():
        ours = results(fused_recurrent_gated_delta_rule, x)
        fla = results(theirs.fused_recurrent_gated_delta_rule, x)
        truth = results(definition_of, in_fp64(x))
    no_worse(ours, fla, truth, RATIO, LIMIT)


def step(layer: torch.nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The loss, the output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = layer(x)[0]
    loss = (out.float() - target.float()).square().mean()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"loss": loss.detach(), "out": out.detach(), "x": x.grad} | grads


LAYERS = {
    "128": {"expand_v": 1, "head_dim": 128, "num_heads": 2, "num_v_heads": 4},
    "FLA's sizes": {"num_heads": 2},  # heads of 256 and 512
}


@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
def test_a_training_step_of_its_layer(sizes, ran, monkeypatch):
    """In fp32, with the definition in the place of FLA's function, it is the measure of both."""
    layers = pytest.importorskip("fla.layers.gated_deltanet", exc_type=ImportError)
    layer = layers.GatedDeltaNet(256, **sizes).to("cuda", BF16)
    x, target = (torch.randn(2, 200, 256, device="cuda", dtype=BF16) for _ in range(2))
    ours = step(layer, x, target)
    assert ran == ["ours"]
    with left_to_fla():
        fla = step(layer, x, target)
    assert ran == ["ours"]
    monkeypatch.setattr(layers, "chunk_gated_delta_rule", definition_of)
    truth = step(copy.deepcopy(layer).float(), x.float(), target)
    no_worse(ours, fla, truth, LAYER_RATIO, LAYER_LIMIT, half_ulp(BF16))


def test_a_layer_under_autocast(ran, monkeypatch):
    """Weights stay in fp32; activations that reach us are in 16 bits."""
    layers = pytest.importorskip("fla.layers.gated_deltanet", exc_type=ImportError)
    layer = layers.GatedDeltaNet(256, **LAYERS["128"]).to("cuda")
    x, target = (torch.randn(2, 200, 256, device="cuda") for _ in range(2))
    with torch.autocast("cuda", BF16):
        ours = step(layer, x, target)
        assert ran == ["ours"]
        with left_to_fla():
            fla = step(layer, x, target)
    monkeypatch.setattr(layers, "chunk_gated_delta_rule", definition_of)
    truth = step(layer, x, target)
    no_worse(ours, fla, truth, LAYER_RATIO, LAYER_LIMIT, half_ulp(BF16))


def test_a_layer_under_fsdp2(ran, tmp_path):
    """On one rank, whose step is that of the layer as it was, but for the order of sums."""
    layers = pytest.importorskip("fla.layers.gated_deltanet", exc_type=ImportError)
    from torch.distributed.fsdp import fully_shard

    layer = layers.GatedDeltaNet(256, **LAYERS["128"]).to("cuda", BF16)
    x, target = (torch.randn(2, 200, 256, device="cuda", dtype=BF16) for _ in range(2))
    want = step(layer, x, target)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("nccl", store, rank=0, world_size=1)
    try:
        fully_shard(layer)
        got = step(layer, x, target)
        got = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in got.items()}
    finally:
        torch.distributed.destroy_process_group()
    assert ran == ["ours", "ours"]
    for name in want:
        assert_close(name, got[name], want[name], 4 * half_ulp(BF16))
