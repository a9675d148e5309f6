"""gated_delta_net on a GPU: beside fp64 and its parts; recomputation, graphs, torch.compile."""

import pytest
import torch
from torch import Tensor

from qla_kernels import (
    SharedLayout,
    causal_conv1d,
    chunk_gated_delta_rule,
    gated_delta_net,
    gated_rms_norm,
    shared_prefix_conv1d,
    shared_prefix_gated_delta_rule,
)
from qla_kernels.hybrid import prepare_conv1d, prepare_gated_delta_rule
from tests.compare import no_worse

pytestmark = pytest.mark.hopper

GPU = "cuda"
# q and k are rounded once where the parts round them twice
RATIO, LIMIT = 1.3, 0.02
OF_TERMS = 1e-3  # of the sum of the terms' sizes, which was 7 to 53 times that of the sum
Sizes = tuple[int, int, int, int]  # H, K, HV, V


def inputs(sizes: Sizes, B: int, T: int) -> dict[str, Tensor]:
    """On the CPU, in bf16, but for what models keep in fp32."""
    H, K, HV, V = sizes
    C = 2 * H * K + HV * V
    half = {"mixed_qkv": (B, T, C), "a": (B, T, HV), "b": (B, T, HV), "z": (B, T, HV, V)}
    found = {name: torch.randn(shape).bfloat16() for name, shape in half.items()}
    found |= {"A_log": torch.rand(HV) * 3 - 3, "dt_bias": torch.rand(HV)}
    found |= {"conv_weight": torch.randn(C, 4).bfloat16(), "norm_weight": torch.randn(V)}
    return found


def by_parts(sizes: Sizes, t: dict[str, Tensor], cu_seqlens=None, layout=None) -> Tensor:
    H, K, HV, V = sizes
    x, weight = t["mixed_qkv"].mT, t["conv_weight"]
    if layout is None:
        y = causal_conv1d(x, weight, None, "silu", cu_seqlens)
    else:
        y = shared_prefix_conv1d(x, weight, None, layout, "silu")
    q, k, v = y.mT.split([H * K, H * K, HV * V], -1)
    heads = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    options = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": t["A_log"],
        "dt_bias": t["dt_bias"], "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip
    if layout is None:
        o, _ = chunk_gated_delta_rule(*heads, t["a"], t["b"], cu_seqlens=cu_seqlens, **options)
    else:
        o, _ = shared_prefix_gated_delta_rule(*heads, t["a"], t["b"], layout, **options)
    return gated_rms_norm(o, t["z"], t["norm_weight"], 1e-6, "silu", cu_seqlens)


def whole(sizes: Sizes, t: dict[str, Tensor], **options) -> Tensor:
    y: Tensor = gated_delta_net(**t, key_heads=sizes[0], **options)[0]
    return y


def gradients(run, t: dict[str, Tensor], dy: Tensor, **options) -> dict[str, Tensor]:
    leaves = {name: x.detach().to(dy.device).requires_grad_() for name, x in t.items()}
    y = run(leaves, **options)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    found = {"y": y.detach()}
    found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: x.cpu() for name, x in found.items()}


HEADS = [(2, 128, 4, 128), (2, 64, 2, 64), (3, 96, 3, 192), (1, 256, 2, 512)]
PACK = torch.tensor([0, 300, 301, 700])
TREE = [(200, [50, 70]), (100, [30, 80, 10])]


@pytest.mark.parametrize("kind", ["rows", "pack", "tree"])
@pytest.mark.parametrize("sizes", HEADS)
def test_it_is_its_parts(sizes, kind):
    batch, tokens = (2, 333) if kind == "rows" else (1, 700 if kind == "pack" else 540)
    t = inputs(sizes, batch, tokens)
    dy = torch.randn(batch, tokens, *sizes[2:]).bfloat16()
    options = {"cu_seqlens": PACK} if kind == "pack" else {}
    if kind == "tree":
        options = {"layout": SharedLayout.from_lengths(TREE)}
    exact = {name: x.double() for name, x in t.items()}
    truth = gradients(lambda t, **o: whole(sizes, t, **o), exact, dy.double(), **options)
    options = {name: x.to(GPU) for name, x in options.items()}
    ours = gradients(lambda t, **o: whole(sizes, t, **o), t, dy.to(GPU), **options)
    parts = gradients(lambda t, **o: by_parts(sizes, t, **o), t, dy.to(GPU), **options)
    for name in ("dA_log", "ddt_bias"):  # sums over tokens, whose terms nearly cancel
        want, terms = truth.pop(name), truth["da"].abs().sum((0, 1)).norm()
        scale = want.norm() * terms / truth["da"].sum((0, 1)).norm()
        for found in (ours, parts):
            assert (found[name] - want).norm() <= OF_TERMS * scale, name
    no_worse(ours, parts, truth, ratio=RATIO, limit=LIMIT)
    again = gradients(lambda t, **o: whole(sizes, t, recompute=True, **o), t, dy.to(GPU), **options)
    assert all(torch.equal(again[name], x) for name, x in ours.items())


def step(sizes: Sizes, t: dict[str, Tensor], dy: Tensor, **options) -> list[Tensor]:
    y = whole(sizes, t, **options)
    return [y.detach(), *torch.autograd.grad(y, list(t.values()), dy)]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_graph_replays_a_step(recompute):
    sizes = HEADS[0]
    t = {name: x.to(GPU).requires_grad_() for name, x in inputs(sizes, 1, 700).items()}
    dy = torch.randn(1, 700, *sizes[2:], device=GPU).bfloat16()
    options = {"cu_seqlens": PACK.to(GPU), "recompute": recompute}
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step(sizes, t, dy, **options)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(sizes, t, dy, **options)
    with torch.no_grad():
        for name, x in inputs(sizes, 1, 700).items():
            t[name].copy_(x)
    graph.replay()
    assert all(map(torch.equal, got, step(sizes, t, dy, **options)))


@pytest.mark.parametrize("kind", ["pack", "tree"])
def test_compiles_to_one_graph(kind):
    sizes, tokens = HEADS[0], 700 if kind == "pack" else 540
    t = {name: x.to(GPU).requires_grad_() for name, x in inputs(sizes, 1, tokens).items()}
    dy = torch.randn(1, tokens, *sizes[2:], device=GPU).bfloat16()
    options = {"cu_seqlens": PACK.to(GPU)}
    if kind == "tree":
        layout = SharedLayout.from_lengths(TREE, device=GPU)
        prepare_conv1d(layout, 4)
        prepare_gated_delta_rule(layout)
        options = {"layout": layout}
    compiled = torch.compile(lambda t: whole(sizes, t, **options), fullgraph=True)
    y = compiled(t)
    got = [y.detach(), *torch.autograd.grad(y, list(t.values()), dy)]
    assert all(map(torch.equal, got, step(sizes, t, dy, **options)))


def test_fp32_weights_under_autocast():
    """As swapped layers of a model with fp32 weights call it."""
    sizes = HEADS[0]
    t = inputs(sizes, 1, 300)
    t["conv_weight"] = t["conv_weight"].float()
    dy = torch.randn(1, 300, *sizes[2:], device=GPU).bfloat16()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = gradients(lambda t: whole(sizes, t), t, dy)
    want = gradients(lambda t: whole(sizes, t), t, dy)
    assert all(torch.equal(got[name], x) for name, x in want.items())
    assert got["dconv_weight"].dtype == torch.float32
