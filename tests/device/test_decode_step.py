"""A step of decoding on a GPU: two launches of which the second begins while the first one runs."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import causal_conv1d_update, decode_gated_delta_net, packed_decode_gated_delta_rule
from qla_kernels.lab.selftest import gdn_step
from qla_kernels.lab.selftest.gdn_recurrent import STATE
from tests.compare import assert_close

pytestmark = pytest.mark.hopper

GPU = "cuda"
NORM = ("z", "norm_weight")
MODELS = [(1, 1), (2, 8), (4, 16), (16, 32), (16, 64)]


def moved(x: Any) -> Any:
    """The call on the GPU; its tensors keep their strides."""

    def there(t: Tensor) -> Tensor:
        room = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=GPU)
        return room.copy_(t)

    return {n: there(t) if torch.is_tensor(t) else t for n, t in x.items()}


def step(count: int, heads: tuple[int, int], padding: int = 0, **others: Any) -> Any:
    num_slots = count + padding + 3
    slots = torch.randperm(num_slots)[: count + padding]
    slots[torch.randperm(count + padding)[:padding]] = -1
    return gdn_step.step(slots.tolist(), heads=heads, num_slots=num_slots, **others)


def in_two_calls(x: Any) -> Tensor:
    convolution = [x[n] for n in gdn_step.CONVOLUTION]
    rows = causal_conv1d_update(x["mixed_qkv"], *convolution, conv_state_indices=x["state_indices"])
    rule = {n: t for n, t in x.items() if n not in gdn_step.CONVOLUTION}
    return packed_decode_gated_delta_rule(**{**rule, "mixed_qkv": rows})


def copied(x: Any) -> Any:
    return {**x, **{n: x[n].clone() for n in ("initial_state", "conv_state")}}


@pytest.mark.parametrize("heads", MODELS)
@pytest.mark.parametrize("count", [1, 5, 64])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_steps(heads, count, state):
    for width, by_channels, v_first in ((4, False, True), (4, True, False), (2, False, True)):
        x = step(count, heads, padding=2, state=state, state_v_first=v_first)
        gdn_step.run(gdn_step.convolved(x, width, by_channels), GPU)
    gdn_step.run(step(count, heads, state=state, z_activation="sigmoid"), GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_of_64_and_gates_in_fp32(dtype):
    for gates in (torch.float32, dtype, torch.float64):
        x = step(7, (2, 6), padding=1, dtype=dtype, sizes=(64, 64), gates=gates)
        gdn_step.run(gdn_step.convolved(x), GPU)


@pytest.mark.parametrize("poisoned", [False, True])  # with a fill between the two launches
@pytest.mark.parametrize("count", [1, 3, 40, 300])
@pytest.mark.parametrize("heads", [(2, 8), (16, 32)])
def test_many_steps_in_a_row_are_those_of_two_calls(count, heads, poisoned):
    """Nothing lies between the steps: states that are loaded early are those of the step before."""
    torch.use_deterministic_algorithms(poisoned)
    x = moved(gdn_step.convolved(step(count, heads, padding=2)))
    y, z = copied(x), copied(x)
    tokens = torch.randn(40, *x["mixed_qkv"].shape, device=GPU).bfloat16()
    found, want = [], []
    for token in tokens:
        found.append(decode_gated_delta_net(**{**y, "mixed_qkv": token}))
    for token in tokens:
        want.append(in_two_calls({**z, "mixed_qkv": token}))
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert torch.equal(y["initial_state"], z["initial_state"])
    assert torch.equal(y["conv_state"], z["conv_state"])


def test_layers_in_a_row_and_graphs():
    """Several layers a step, on pools of their own; a graph of them, with slots that change."""
    torch.use_deterministic_algorithms(False)  # no poison, which is a fill between launches
    layers = [moved(gdn_step.convolved(step(6, (2, 8), padding=1))) for _ in range(4)]
    slots = layers[0]["state_indices"]
    layers = [{**x, "state_indices": slots} for x in layers]
    token = torch.randn_like(layers[0]["mixed_qkv"])

    def run(pools: Any, function: Any) -> list[Tensor]:
        return [function(**{**x, "mixed_qkv": token}) for x in pools]

    ours, theirs = [copied(x) for x in layers], [copied(x) for x in layers]
    run(ours, decode_gated_delta_net)
    run(theirs, lambda **x: in_two_calls(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(ours, decode_gated_delta_net)
    for seed in range(20):
        torch.manual_seed(seed)
        token.copy_(torch.randn_like(token))
        slots.copy_(torch.randperm(len(layers[0]["initial_state"]), device=GPU)[: len(slots)])
        slots[seed % len(slots)] = -1
        graph.replay()
        want = run(theirs, lambda **x: in_two_calls(x))
        assert all(torch.equal(a, b) for a, b in zip(results, want, strict=True))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a["initial_state"], b["initial_state"])
            assert torch.equal(a["conv_state"], b["conv_state"])


def test_the_norm_is_that_of_the_rule_alone():
    """The rule's arithmetic is that of recurrent, but for what the compiler fuses in each."""
    x = moved(step(9, (4, 16)))
    y = {**x, "initial_state": x["initial_state"].clone()}
    plain = {n: t for n, t in y.items() if n not in NORM}
    o = packed_decode_gated_delta_rule(**plain).double()[:, 0]
    found = packed_decode_gated_delta_rule(**x)
    assert_close("states", x["initial_state"], y["initial_state"], STATE)
    z, weight = x["z"].double(), x["norm_weight"].double()
    want = o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight * z * z.sigmoid()
    assert_close("y", found[:, 0], want, 6e-3)  # o was rounded


def test_two_launches_and_no_wait_for_the_gpu():
    x = moved(gdn_step.convolved(step(3, (2, 8))))
    torch.use_deterministic_algorithms(False)  # no poison
    run = functools.partial(decode_gated_delta_net, **x)
    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    assert len(names) == 2, names


def test_replayed_steps_are_the_same():
    """Prebuilt kernels: the third call of a kind is replayed by one native call."""
    x = moved(gdn_step.convolved(step(4, (2, 8), padding=1)))
    results = []
    for given in (None, True, None, None, True, True):
        y = copied(x)
        out = torch.full_like(y["z"].unsqueeze(1), torch.nan) if given else None
        out = None if out is None else out.contiguous()
        o = decode_gated_delta_net(**y, out=out)
        results.append((o, y["initial_state"], y["conv_state"]))
    for found, first in zip(results, itertools.repeat(results[0])):
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


def test_rows_that_are_slices_and_pools_in_pages():
    """A page of an engine: the convolution's tokens, then the states, of one slot."""
    heads, size, slots = (2, 4), 128 * 128, 6
    x = gdn_step.convolved(step(3, heads, padding=1, state=torch.bfloat16))
    channels = x["mixed_qkv"].shape[1]
    page = torch.randn(slots, 3 * channels + 4 * size + 64, device=GPU).bfloat16()
    y = moved(x)
    y["conv_state"] = page[:, : 3 * channels].unflatten(1, (3, channels)).mT
    states = page[:, 3 * channels : 3 * channels + 4 * size]
    y["initial_state"] = states.unflatten(1, (4, 128, 128))
    slots_used = torch.tensor([5, 0, 2, 0], dtype=torch.int32, device=GPU)
    y |= {"state_indices": slots_used, "null_slot": 0}
    z = {n: t.contiguous() if n in ("conv_state", "initial_state") else t for n, t in y.items()}
    first = page.clone()
    assert torch.equal(decode_gated_delta_net(**y), decode_gated_delta_net(**z))
    assert torch.equal(y["initial_state"], z["initial_state"])
    assert torch.equal(y["conv_state"], z["conv_state"])
    assert torch.equal(page[[0, 1, 3, 4]], first[[0, 1, 3, 4]])
    assert torch.equal(page[:, -64:], first[:, -64:])
