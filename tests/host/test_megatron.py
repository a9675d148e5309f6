"""Layers of Megatron-Core: `swap`, and FLA's function with our backend."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu

from qla_kernels import conv, gdn, norm
from qla_kernels.integrations import fla, megatron
from qla_kernels.runtime import device
from tests.ranks import WORLD, start

pytestmark = pytest.mark.libraries


@pytest.fixture
def layers(monkeypatch) -> Iterator[Any]:
    """Megatron on the CPU, in a world of one rank."""
    pytest.importorskip("fla")
    pytest.importorskip("megatron.core")
    from tests import megatron_layers

    megatron_layers.stand_in(monkeypatch.setattr)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.compiler.set_stance("force_eager")  # Megatron compiles methods
    yield megatron_layers
    torch.compiler.set_stance("default")
    dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch) -> list[tuple[Any, ...]]:
    """The arguments of calls of gated_delta_net."""
    made: list[tuple[Any, ...]] = []
    ours = megatron.gated_delta_net

    def counted(*args: Any, **more: Any) -> Any:
        made.append((*args, more))
        return ours(*args, **more)

    monkeypatch.setattr(megatron, "gated_delta_net", counted)
    return made


LAYERS: dict[str, dict[str, Any]] = {
    "as Qwen3.5": {},
    "zero-centred, bias": {"layernorm_zero_centered_gamma": True, "conv_bias": True},
    "other eps, no l2norm": {"layernorm_epsilon": 0.1, "use_qk_l2norm": False},
    "as many keys, width 3": {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
    "deterministic": {"deterministic_mode": True},
}
CALLS: dict[str, dict[str, Any]] = {
    "row": {}, "rows": {"batch": 3}, "pack": {"lengths": (30, 1, 49)},
    "padded pack": {"lengths": (30, 2, 48), "padded": True},
}  # fmt: skip


def params(layers: Any, call: dict[str, Any]) -> dict[str, Any]:
    call = {**call}
    if (lengths := call.pop("lengths", None)) is None:
        return call
    return {"params": layers.pack(*lengths, padded=call.pop("padded", False))}


def test_the_release_is_known(layers):
    digest = megatron.names_of(layers.GatedDeltaNet)
    assert digest in megatron.RELEASES, digest


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_swapped_layer_agrees_with_its_own_forward(layers, calls, options, call):
    layer, call = layers.layer(**options), params(layers, call)
    twin = layers.layer(**{**options, "deterministic_mode": False})  # whose forward takes packs
    assert all(map(torch.equal, layer.parameters(), twin.parameters()))
    want, state = layers.step(twin, **call), [*layer.state_dict()]
    for recompute in (False, True):
        assert megatron.swap(layer, recompute=recompute) == 1
        calls.clear()
        assert layers.distance(layers.step(layer, **call), want) < 2e-5
        assert [arguments[-1]["recompute"] for arguments in calls] == [recompute]
    assert [*layer.state_dict()] == state
    assert megatron.restore(layer) == 1
    assert megatron.restore(layer) == 0
    assert "forward" not in layer.__dict__
    calls.clear()
    again = layers.step(twin, **call)
    assert all(map(torch.equal, again.values(), want.values()))
    assert not calls


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("heads", [(4, 8), (1, 1), (2, 6)])
def test_a_hopper_gpu_runs_what_a_layer_passes(layers, calls, heads, call):
    """Also rows of a projection that are no multiples of 16 bytes."""
    (H, HV), size = heads, 64
    layer = layers.layer(
        linear_num_key_heads=H, linear_num_value_heads=HV, linear_key_head_dim=size,
        linear_value_head_dim=size, layernorm_zero_centered_gamma=True,
    ).to(torch.bfloat16)  # fmt: skip
    megatron.swap(layer)
    hidden = torch.randn(80, call.get("batch", 1), layers.HIDDEN, dtype=torch.bfloat16)
    layer(hidden, None, packed_seq_params=params(layers, call).get("params"))
    ((mixed_qkv, a, b, _, _, weight, bias, _, more),) = calls
    z, hopper = more["z"], {"capability": (9, 0)}
    assert conv.refusal(mixed_qkv.mT, weight, bias, (2 * H, size), **hopper) is None
    assert norm.refusal(z, z, more["norm_weight"], **hopper) is None
    y = torch.empty_like(mixed_qkv, memory_format=torch.contiguous_format)
    sections = y.split([H * size, H * size, HV * size], -1)
    assert gdn.refusal(*(x.unflatten(-1, (-1, size)) for x in sections), **hopper) is None
    assert a.shape == b.shape == (*y.shape[:2], HV)


def test_bf16_parameters(layers):
    """As near to fp32 as Megatron's own forward, which rounds exp(A_log), beta and the norm."""
    layer = layers.layer().to(torch.bfloat16)
    exact = layers.layer()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(80, 2, layers.HIDDEN, dtype=torch.bfloat16)
    want = exact(x.float(), None)[0]
    theirs = layer(x, None)[0]
    megatron.swap(layer)
    ours = layer(x, None)[0]
    assert ours.dtype == torch.bfloat16
    assert (ours - want).norm() < 1.1 * (theirs - want).norm()
    assert (ours - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize("call", [CALLS["rows"], CALLS["pack"]], ids=["rows", "pack"])
def test_our_backend_of_fla_takes_the_calls_of_a_layer(layers, monkeypatch, call):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    passed: list[torch.Tensor] = []

    def rule(*args: Any, **more: Any) -> Any:
        passed[:] = args
        return chunk_gated_delta_rule(*args, **more)

    monkeypatch.delenv(fla.SWITCH, raising=False)
    monkeypatch.setattr(device, "capabilities", lambda: [(9, 0)])
    call = params(layers, call)
    layer = layers.layer(linear_key_head_dim=64, linear_value_head_dim=64)
    want = layers.step(layer, **call)
    layer.gated_delta_rule = rule
    try:
        assert fla.register()
        assert layers.distance(layers.step(layer, **call), want) < 2e-5
        status = fla.status()
        assert (status.taken, status.declined) == (1, 0)
    finally:
        fla.unregister()
    q, k, v = (x.to(torch.bfloat16) for x in passed)
    assert q.shape == k.shape == v.shape  # key heads are repeated
    assert gdn.refusal(q, k, v, capability=(9, 0)) is None


def test_inside_of_a_transformer_layer(layers, calls):
    """The layer is called with the keywords of Megatron's own block."""
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    inner = layers.layer()
    spec = ModuleSpec(module=layers.GatedDeltaNet, submodules=layers.submodules(layers.Norm))
    block = TransformerLayer(
        inner.config,
        TransformerLayerSubmodules(self_attention=spec),
        pg_collection=inner.pg_collection,
    )
    block.self_attention.load_state_dict(inner.state_dict())
    x, pack = torch.randn(80, 1, layers.HIDDEN), layers.pack(30, 50)
    want = block(x, packed_seq_params=pack)[0]
    assert megatron.swap([block]) == 1
    got = block(x, packed_seq_params=pack)[0]
    assert len(calls) == 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert megatron.restore([block]) == 1
    assert torch.equal(block(x, packed_seq_params=pack)[0], want)


class Biased(nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


def refusing(layers: Any, caplog: Any, layer: Any, text: str) -> None:
    """Swaps a layer, which is left alone."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "qla_kernels"):
        assert megatron.swap(layer) == 0
    assert text in caplog.text
    assert megatron.restore(layer) == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"normalization": "LayerNorm"}, "an RMSNorm"),
        ({"out_norm": Biased}, "output norm is Biased; need an RMSNorm"),
        ({"out_norm": nn.Identity}, "output norm is Identity; need a norm with a weight"),
        ({"activation_func": gelu}, "activation is gelu; need silu"),
        ({"linear_conv_kernel_dim": 5}, "has width 5; need a width from 2 to 4"),
        (
            {
                "recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"],
                "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 1,
            },
            "gdn_norm_out; need none",
        ),
    ],
)  # fmt: skip
def test_layers_that_stay(layers, caplog, options, text):
    layer = layers.layer(**options)
    refusing(layers, caplog, nn.ModuleList([layer]), text)


def test_forwards_of_others_stay(layers, caplog):
    class Other(layers.GatedDeltaNet):
        def forward(self, hidden_states: Any, *args: Any, **more: Any) -> Any:
            return super().forward(hidden_states, *args, **more)

    class Gates(layers.GatedDeltaNet):
        def _compute_g_and_beta(self, A_log: Any, dt_bias: Any, alpha: Any, beta: Any) -> Any:
            return -A_log.exp() * alpha.sigmoid(), beta.sigmoid()

    class Same(layers.GatedDeltaNet):
        """Has another name, and no other code."""

    refusing(layers, caplog, layers.layer(kind=Other), "another release; need that of Megatron-Co")
    refusing(layers, caplog, layers.layer(kind=Gates), "another release; need that of Megatron-Co")
    layer = layers.layer(kind=Same)
    layer.forward = lambda *args, **more: None
    refusing(layers, caplog, layer, "another library replaced their forward")
    assert megatron.swap(layers.layer(kind=Same)) == 1
    refusing(layers, caplog, nn.Linear(2, 2), "no layer is a GatedDeltaNet")


def test_hooks_of_a_norm(layers, calls):
    """Megatron's wait for the weight; with those of others the layer runs its own forward."""
    from megatron.core.distributed import DistributedDataParallel

    layer, waited = layers.layer(), []
    weight = layer.out_norm.weight
    bucket = SimpleNamespace(finish_param_sync=lambda **more: waited.append(more))
    wrapper = SimpleNamespace(
        use_forward_hook=True, param_to_bucket_group={weight: bucket},
        overlap_param_gather_with_optimizer_step=False,
        ddp_config=SimpleNamespace(align_param_gather=False),
    )  # fmt: skip
    hook = DistributedDataParallel._make_forward_pre_hook(wrapper)
    layer.out_norm.register_forward_pre_hook(hook)
    want = layers.step(layer)
    assert len(waited) == 1
    megatron.swap(layer)
    assert layers.distance(layers.step(layer), want) < 2e-5
    assert (len(waited), len(calls)) == (2, 1)
    seen: list[Any] = []
    for install in (
        lambda note: layer.out_norm.register_forward_pre_hook(note),
        lambda note: layer.out_norm.register_forward_pre_hook(note, with_kwargs=True),
        lambda note: layer.out_norm.register_forward_hook(note),
        lambda note: layer.out_norm.register_full_backward_hook(note),
    ):
        seen.clear()
        handle = install(lambda *args: seen.append(args))
        assert all(map(torch.equal, layers.step(layer).values(), want.values()))
        handle.remove()
        assert (len(seen), len(calls)) == (1, 1)


def test_calls_that_infer_run_the_layers_own_forward(layers):
    layer = layers.layer()
    megatron.swap(layer)
    context = SimpleNamespace(is_static_batching=lambda: True)
    for more in ({"inference_context": context}, {"inference_params": context}):
        with pytest.raises(NotImplementedError, match="inference"):
            layer(torch.randn(8, 1, layers.HIDDEN), None, **more)


def test_bounds_that_do_not_cover_the_tokens(layers):
    layer = layers.layer()
    megatron.swap(layer)
    with pytest.raises(
        ValueError, match=r"is \[0, 30, 60\]; need to start at 0, .*, and end at 80"
    ):
        layers.step(layer, params=layers.pack(30, 30))
    pack = layers.pack(30, 50)
    pack.cu_seqlens_kv = layers.pack(40, 40).cu_seqlens_q
    with pytest.raises(ValueError, match="need the same bounds; pass one tensor for both"):
        layers.step(layer, params=pack)
    with pytest.raises(ValueError, match="a batch of 1"):
        layers.step(layer, batch=2, params=layers.pack(30, 50))
    with pytest.raises(ValueError, match="multiples of 4 on 2 ranks; pad each sequence"):
        megatron._bounds(layers.pack(8, 6), 14, 2)
    with pytest.raises(ValueError, match=r"sequences of \[6\] tokens"):
        megatron._bounds(None, 6, 2)


def test_ranks(layers, tmp_path):
    ranks = start("tests.megatron_layers", tmp_path)
    for name, (tp, cp, _, _) in layers.CASES.items():
        for rank in range(WORLD):
            assert (name in ranks[rank]) == (rank < tp * cp), ranks[rank].get("no end")
            if rank < tp * cp:
                number, distance = ranks[rank][name]
                assert number == 1
                assert distance < 2e-5, (name, rank)


@pytest.mark.parametrize("model", [None, "model", [nn.Linear(2, 2), 3]])
@pytest.mark.parametrize("function", [megatron.swap, megatron.restore])
def test_what_is_no_model(function, model):
    with pytest.raises(TypeError, match=r"need a torch.nn.Module, or a list of them; pass the"):
        function(model)
