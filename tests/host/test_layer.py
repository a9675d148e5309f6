"""gated_delta_net on CPU tensors: its three parts in one call, packs, trees, recomputation."""

import functools
import re

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qla_kernels import (
    SharedLayout,
    Unsupported,
    causal_conv1d,
    chunk_gated_delta_rule,
    gated_delta_net,
    gated_rms_norm,
    shared_prefix_conv1d,
    shared_prefix_gated_delta_rule,
)
from qla_kernels.hybrid import prepare_conv1d, prepare_gated_delta_rule

H, K, HV, V = 2, 8, 4, 16
C = 2 * H * K + HV * V
PACK = torch.tensor([0, 30, 31, 66])
LAYOUT = functools.partial(SharedLayout.from_lengths, [(20, [5, 7]), (10, [3, 8, 1])])


def inputs(B: int, T: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    shapes = {
        "mixed_qkv": (B, T, C), "a": (B, T, HV), "b": (B, T, HV), "A_log": (HV,), "dt_bias": (HV,),
        "conv_weight": (C, 4), "conv_bias": (C,), "z": (B, T, HV, V), "norm_weight": (V,),
    }  # fmt: skip
    return {n: torch.randn(s, dtype=dtype).requires_grad_() for n, s in shapes.items()}


def by_parts(
    mixed_qkv, a, b, A_log, dt_bias, conv_weight, conv_bias, z, norm_weight, *,
    norm_eps=1e-6, z_activation="silu", cu_seqlens=None, layout=None, conv_activation="silu",
    use_qk_l2norm_in_kernel=True, **options,
):  # fmt: skip
    x = mixed_qkv.mT
    if layout is None:
        y = causal_conv1d(x, conv_weight, conv_bias, conv_activation, cu_seqlens)
    else:
        y = shared_prefix_conv1d(x, conv_weight, conv_bias, layout, conv_activation)
    q, k, v = y.mT.split([H * K, H * K, HV * V], -1)
    heads = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    options |= {
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_gate_in_kernel": True,
        "A_log": A_log, "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip
    if layout is None:
        o, final = chunk_gated_delta_rule(*heads, a, b, cu_seqlens=cu_seqlens, **options)
    else:
        o, final = shared_prefix_gated_delta_rule(*heads, a, b, layout, **options)
    return gated_rms_norm(o, z, norm_weight, norm_eps, z_activation, cu_seqlens), final


CALLS = {
    "batch": (2, 70, {}),
    "options": (
        1, 20,
        {"z_activation": "sigmoid", "norm_eps": 1e-2, "allow_neg_eigval": True, "scale": 0.3,
         "state_v_first": True, "output_final_state": True, "conv_activation": None},
    ),
    "no norm of q and k": (1, 5, {"use_qk_l2norm_in_kernel": False, "output_final_state": True}),
    "pack": (1, 66, {"cu_seqlens": PACK, "output_final_state": True}),
    "states": (1, 66, {"cu_seqlens": PACK, "output_final_state": True, "initial_state": (3, HV)}),
    "tree": (1, 54, {"layout": LAYOUT, "output_final_state": True}),
}  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_its_parts(call, recompute):
    B, T, options = CALLS[call]
    tensors, options = inputs(B, T), dict(options)
    leaves = list(tensors.values())
    if "initial_state" in options:
        state = torch.randn(*options["initial_state"], K, V, dtype=torch.float64)
        options["initial_state"] = state.requires_grad_()
        leaves.append(state)
    if "layout" in options:
        options["layout"] = options["layout"]()
    want, got = by_parts(**tensors, **options), gated_delta_net(
        **tensors, key_heads=H, recompute=recompute, **options
    )  # fmt: skip
    keep = [x for x in want if x is not None]
    dys = [torch.randn_like(x) for x in keep]
    grads = torch.autograd.grad(keep, leaves, dys)
    results = [x for x in got if x is not None]
    for a, b in zip(results, keep, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    for a, b in zip(torch.autograd.grad(results, leaves, dys), grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recompute", [False, True])
def test_padding_behind_the_last_sequence_is_not_read(recompute):
    tensors = inputs(1, 70)
    with torch.no_grad():
        for name in ("mixed_qkv", "a", "b", "z"):
            tensors[name][:, 66:] = torch.nan
    y, _ = gated_delta_net(**tensors, key_heads=H, cu_seqlens=PACK, recompute=recompute)
    assert not y[:, 66:].any()
    for grad in torch.autograd.grad(y.sum(), list(tensors.values())):
        assert grad.isfinite().all()


def saved(function) -> int:
    """Bytes that autograd saves, each storage once."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return sum(storages.values())


def test_q_k_and_v_are_not_saved_with_recompute():
    tensors = inputs(2, 64)
    call = functools.partial(gated_delta_net, **tensors, key_heads=H)
    rows = tensors["mixed_qkv"].nbytes
    assert saved(call) - saved(functools.partial(call, recompute=True)) == rows


def test_recompute_runs_the_convolution_again(monkeypatch):
    from qla_kernels.conv import ops

    calls, forward = [], ops.conv_fwd.on_cpu
    monkeypatch.setattr(ops.conv_fwd, "on_cpu", lambda *args: (calls.append(1), forward(*args))[1])
    for recompute, expected in ((False, 1), (True, 2)):
        calls.clear()
        y, _ = gated_delta_net(**inputs(1, 20), key_heads=H, recompute=recompute)
        y.sum().backward()
        assert len(calls) == expected


def test_recompute_inside_of_activation_checkpointing():
    tensors = inputs(1, 20)
    leaves = list(tensors.values())

    def step(*given):
        call = dict(zip(tensors, given, strict=True))
        return gated_delta_net(**call, key_heads=H, recompute=True)[0]

    want = torch.autograd.grad(step(*leaves).sum(), leaves)
    for reentrant in (False, True):
        again = [x.detach().requires_grad_() for x in leaves]
        checkpoint(step, *again, use_reentrant=reentrant).sum().backward()
        assert all(map(torch.equal, [x.grad for x in again], want))


def test_without_gradients_nothing_is_recorded():
    tensors = {name: x.detach() for name, x in inputs(1, 20).items()}
    for recompute in (False, True):
        y, _ = gated_delta_net(**tensors, key_heads=H, recompute=recompute)
        assert not y.requires_grad


@pytest.mark.parametrize("call", ["pack", "tree"])
def test_compiles_to_one_graph(call):
    B, T, options = CALLS[call]
    tensors, options = inputs(B, T), dict(options)
    if call == "tree":
        options["layout"] = layout = LAYOUT()
        prepare_conv1d(layout, 4)
        prepare_gated_delta_rule(layout, True)

    def step(recompute, *given):
        named = dict(zip(tensors, given, strict=True))
        return gated_delta_net(**named, key_heads=H, recompute=recompute, **options)[0]

    leaves = list(tensors.values())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    want = step(False, *leaves)
    dy = torch.randn_like(want)
    grads = torch.autograd.grad(want, leaves, dy)
    for recompute in (False, True):
        got = compiled(recompute, *leaves)
        assert torch.equal(got, want)
        assert all(map(torch.equal, torch.autograd.grad(got, leaves, dy), grads))


def test_autocast_changes_nothing():
    tensors = inputs(1, 20, torch.float32)
    want, _ = gated_delta_net(**tensors, key_heads=H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = gated_delta_net(**tensors, key_heads=H)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("mixed_qkv is of type list", {"mixed_qkv": [1]}),
        ("mixed_qkv has shape (20, 96); need [B, T, channels]", {"mixed_qkv": (20, C)}),
        ("z has shape (1, 20, 64)", {"z": (1, 20, HV * V)}),
        ("a has shape (1, 20, 2); need [B, T, HV] = (1, 20, 4)", {"a": (1, 20, 2)}),
        ("b has shape (20, 4)", {"b": (20, HV)}),
        ("A_log has shape (2,)", {"A_log": (2,)}),
        ("norm_weight has shape (8,)", {"norm_weight": (8,)}),
        ("key_heads=3 with 4 value heads", {"key_heads": 3}),
        ("key_heads is 2.5 of type float", {"key_heads": 2.5}),
        ("mixed_qkv has 95 channels, 64 of them values", {"mixed_qkv": (1, 20, C - 1)}),
        ("weight has shape (5, 4)", {"conv_weight": (5, 4)}),
        ("weight has width 5", {"conv_weight": (C, 5)}),
        ("activation='relu'", {"conv_activation": "relu"}),
        ("activation='relu'", {"z_activation": "relu"}),
        ("eps is 1", {"norm_eps": 1}),
        ("cu_seqlens [0, 21]", {"cu_seqlens": torch.tensor([0, 21])}),
        ("cu_seqlens beside layout", {"cu_seqlens": PACK, "layout": LAYOUT()}),
        ("1 row of 54 tokens", {"layout": LAYOUT()}),
        ("recompute is 'yes' of type str", {"recompute": "yes"}),
    ],
)
def test_malformed(text, changed):
    tensors = {name: x.detach().float() for name, x in inputs(1, 20).items()}
    given = {n: torch.zeros(x) if isinstance(x, tuple) else x for n, x in changed.items()}
    with pytest.raises(ValueError, match=f"^gated_delta_net: .*{re.escape(text)}"):
        gated_delta_net(**{**tensors, "key_heads": H, **given})


def test_z_of_another_dtype_is_refused():
    tensors = inputs(1, 20)
    with pytest.raises(ValueError, match="z is float32; need float64, as mixed_qkv"):
        gated_delta_net(**tensors | {"z": tensors["z"].float()}, key_heads=H)


@pytest.mark.parametrize("recompute", [False, True])
def test_second_derivatives_are_refused(recompute):
    tensors = inputs(1, 20)
    y, _ = gated_delta_net(**tensors, key_heads=H, recompute=recompute)
    x = tensors["mixed_qkv"]
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(Unsupported, match="first derivatives alone"):
        dx.sum().backward()
