"""Shared-prompt attention on the CPU: values, gradients, operators, compilation, refusals."""

import functools
import re
import shutil

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from qla_kernels import SharedLayout, Unsupported, dualkv, shared_prefix_attention
from qla_kernels.dualkv import ops, refusal
from qla_kernels.dualkv.heuristics import head_pack
from qla_kernels.dualkv.shapes import HEAD_SIZES
from qla_kernels.runtime.cpu import reference
from reference import dualkv as forms
from tests.compare import assert_close
from tests.dualkv_inputs import GROUPS, gradients, qkv
from tests.host.test_import import fresh

EXACT = 1e-12
PLAIN = {"groups": [(5, [3, 0, 4]), (6, [2])], "tokens": 20}


def layout() -> SharedLayout:
    return SharedLayout.from_lengths(PLAIN["groups"])


def tensors(**kind) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in qkv(PLAIN["tokens"], **kind)]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.usefixtures("poison")
def test_values_and_gradients_are_those_of_the_definition(name):
    shared = SharedLayout.from_lengths(GROUPS[name])
    leaves = [x.requires_grad_() for x in qkv(shared.num_tokens)]
    got = shared_prefix_attention(*leaves, shared, return_lse=True)
    want = forms.attention(*leaves, shared.tout)
    for label, a, b in zip(("o", "lse"), got, want, strict=True):
        assert_close(label, a.detach(), b.detach(), EXACT)
    for label, a, b in zip("qkv", gradients(got, leaves), gradients(want, leaves), strict=True):
        assert_close(f"d{label}", a, b, EXACT)


@pytest.mark.parametrize("heads", [(1, 1), (2, 6), (1, 8), (2, 32), (3, 15)])
def test_any_number_of_query_heads_to_a_key_head(heads):
    leaves = tensors(heads=heads, size=4)
    got = shared_prefix_attention(*leaves, layout(), scale=0.3, return_lse=True)
    want = forms.attention(*leaves, layout().tout, 0.3)
    assert_close("lse", got[1].detach(), want.lse.detach(), EXACT)
    for a, b in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        assert_close("gradient", a, b, EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_result_has_the_dtype_of_what_it_belongs_to(dtype):
    leaves = tensors(dtype=dtype)
    o, lse = shared_prefix_attention(*leaves, layout(), return_lse=True)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = forms.attention(*exact, layout().tout)
    loose = torch.finfo(dtype).eps
    assert_close("o", o.detach(), want.o.detach(), loose)
    for a, b in zip(gradients((o, lse), leaves), gradients(want, exact), strict=True):
        assert a.dtype == dtype
        assert_close("gradient", a, b, 4 * loose)


@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_result_has_no_gradient(used):
    leaves = tensors()
    got = shared_prefix_attention(*leaves, layout(), return_lse=True)[used]
    want = forms.attention(*leaves, layout().tout)[used]
    grads = torch.autograd.grad(got.sum(), leaves)
    wanted = torch.autograd.grad(want.sum(), leaves, allow_unused=True)
    for a, b in zip(grads, wanted, strict=True):
        assert_close("gradient", a, torch.zeros_like(a) if b is None else b, EXACT, at_least=1e-3)


def test_strides_are_taken_as_they_are():
    """Slices of one projection, and head-major memory as transformers passes it."""
    fused = torch.randn(20, 8, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = fused.split([4, 2, 2], 1)
    o = shared_prefix_attention(q, k, v, layout())
    head_major = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(o, shared_prefix_attention(*head_major, layout()))
    o.sum().backward()  # a gradient of stride 0
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(shared_prefix_attention(*leaves, layout()).sum(), leaves)
    assert torch.equal(fused.grad, torch.cat(want, 1))


def test_autocast_changes_nothing():
    leaves = tensors(dtype=torch.float32)
    want = shared_prefix_attention(*leaves, layout(), return_lse=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = shared_prefix_attention(*leaves, layout(), return_lse=True)
        got_grads = gradients(got, leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for a, b in zip(got_grads, gradients(want, leaves), strict=True):
        assert torch.equal(a, b)


def test_deterministic_is_asked_of_torch(monkeypatch):
    asked, backward = [], ops.dualkv_bwd.on_cpu
    watched = lambda *args: asked.append(args[-1]) or backward(*args)  # noqa: E731
    monkeypatch.setattr(ops.dualkv_bwd, "on_cpu", watched)
    leaves = tensors()
    for given in (None, True, False):
        shared_prefix_attention(*leaves, layout(), deterministic=given).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        shared_prefix_attention(*leaves, layout()).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, False, True]


# The operators.


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("heads", "q_shift"), [((2, 8), 0), ((1, 3), 5)])
def test_opcheck(dtype, heads, q_shift):
    q, k, v = qkv(20, heads=heads, dtype=dtype)
    args = (q[q_shift:], k, v, [layout().nodes], 0.25, q_shift)
    torch.library.opcheck(torch.ops.qla_kernels.dualkv_fwd.default, args)
    o, lse2 = ops.dualkv_fwd(*args)
    do, dlse = torch.randn_like(o), torch.randn_like(lse2)
    for absent in (None, dlse):
        rest = (o, lse2, absent, *args[3:], True)
        arguments = (do, q[q_shift:], k, v, *rest)
        torch.library.opcheck(torch.ops.qla_kernels.dualkv_bwd.default, arguments)


@pytest.mark.parametrize(
    ("group", "pack"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (16, 8)]
)
def test_heads_that_share_a_tile(group, pack):
    assert head_pack(2 * group, 2) == pack


def test_meta_tensors_give_shapes():
    q, k, v = (x.to("meta") for x in qkv(20))
    o, lse = shared_prefix_attention(q, k, v, layout().to("meta"), return_lse=True)
    assert o.is_meta
    assert lse.shape == (4, 20)


def test_compiles_to_one_graph():
    leaves = tensors()
    call = functools.partial(shared_prefix_attention, return_lse=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want, got = call(*leaves, layout()), compiled(*leaves, layout())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for a, b in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        assert torch.equal(a, b)


def test_one_graph_serves_every_batch():
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second to import

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(shared_prefix_attention, fullgraph=True, dynamic=True, backend=counter)
    for groups in ([(5, [3, 4, 1, 2])], [(7, [2]), (4, [6, 1])], [(3, [1] * 9)]):
        shared = SharedLayout.from_lengths(groups)
        leaves = [x.requires_grad_() for x in qkv(shared.num_tokens)]
        got, want = compiled(*leaves, shared), shared_prefix_attention(*leaves, shared)
        assert torch.equal(got, want)
        assert torch.equal(gradients([got], leaves)[1], gradients([want], leaves)[1])
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_compiles_with_inductor_among_other_work():
    def layer(q, k, v, shared):
        return shared_prefix_attention(q.sin(), k, 2 * v, shared).tanh()

    leaves = tensors(dtype=torch.float32)
    want = layer(*leaves, layout())
    got = torch.compile(layer, fullgraph=True)(*leaves, layout())
    for a, b in zip(gradients([got], leaves), gradients([want], leaves), strict=True):
        assert_close("gradient", a, b, 1e-6)


@pytest.mark.parametrize(("selective", "runs"), [(True, 1), (False, 2)])
def test_checkpointing_by_operator_name_runs_the_forward_once(monkeypatch, selective, runs):
    count = []
    by_nodes = reference().dualkv.by_nodes
    monkeypatch.setattr(
        reference().dualkv, "by_nodes", lambda *args: count.append(1) or by_nodes(*args)
    )

    def keep(ctx, op, *args, **kwargs):
        ours = op is torch.ops.qla_kernels.dualkv_fwd.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q, k, v, shared):
        return shared_prefix_attention(q.sin(), k, v, shared).tanh()

    context = functools.partial(create_selective_checkpoint_contexts, keep)
    kept = {"context_fn": context} if selective else {}
    leaves = tensors()
    got = gradients([checkpoint(layer, *leaves, layout(), use_reentrant=False, **kept)], leaves)
    assert len(count) == runs
    want = gradients([layer(*leaves, layout())], leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# Refusals.


def on(device: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.empty(20, h, 8, dtype=dtype, device=device) for h in (4, 2, 2)]


def test_refusals():
    q, k, v = on("cpu")
    assert refusal(q, k, v) is None
    assert refusal(q, k.half(), v) == (
        "shared_prefix_attention: q is bfloat16, k is float16, v is bfloat16; need one dtype; "
        "cast k and v to bfloat16"
    )
    assert refusal(*(x.int() for x in (q, k, v))) == (
        "shared_prefix_attention: q, k and v are int32; need bfloat16, float16, float32 or float64;"
        " cast them to one of these, such as bfloat16"
    )
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        assert f"scale={scale}; need a positive number" in refusal(q, k, v, scale=scale)
    with pytest.raises(Unsupported, match="k is float16"):
        shared_prefix_attention(q, k.half(), v, layout())
    with pytest.raises(Unsupported, match=r"scale=-1\.0"):
        shared_prefix_attention(q, k, v, layout(), scale=-1.0)


def cuda(**changed) -> list[torch.Tensor]:
    """What a Hopper GPU takes, with changes; no GPU is needed to be told."""
    return [
        changed.get(name, torch.empty(20, h, 128, dtype=torch.bfloat16, device="meta"))
        for name, h in (("q", 4), ("k", 2), ("v", 2))
    ]


def of_size(size: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.empty(20, h, size, dtype=dtype, device="meta") for h in (4, 2, 2)]


def strided(*stride: int, offset: int = 0) -> torch.Tensor:
    room = torch.empty(1 << 16, dtype=torch.bfloat16, device="meta")
    return room.as_strided((20, 2, 128), stride, offset)


ELSEWHERE = "use torch's flex_attention with the mask k <= q < layout.tout[k]"
STRIDES = (
    "need a last stride of 1 and the rest positive multiples of 16 bytes; pass {0}.contiguous()"
)
ON_CUDA = {
    "fp32": (
        of_size(128, torch.float32),
        "q, k and v are float32; need bfloat16 or float16 on SM90; "
        "cast them, as with x.to(torch.bfloat16), in a model by torch.autocast, "
        f"or {ELSEWHERE}",
    ),
    "small D": (
        of_size(96),
        "head dimension D=96; need 64, 128 or 256 on SM90; pad q, k and v to 128, or " + ELSEWHERE,
    ),
    "large D": (of_size(512), f"head dimension D=512; need 64, 128 or 256 on SM90; {ELSEWHERE}"),
    "last stride": (
        cuda(k=strided(512, 256, 2)),
        "k has strides (512, 256, 2) and offset 0; " + STRIDES.format("k"),
    ),
    "stride": (
        cuda(v=strided(260, 128, 1)),
        "v has strides (260, 128, 1) and offset 0; " + STRIDES.format("v"),
    ),
    "expanded": (
        cuda(k=strided(128, 0, 1)),
        "k has strides (128, 0, 1) and offset 0; " + STRIDES.format("k"),
    ),
    "offset": (
        cuda(v=strided(256, 128, 1, offset=4)),
        "v has strides (256, 128, 1) and offset 4; " + STRIDES.format("v"),
    ),
}


@pytest.mark.parametrize("what", ON_CUDA)
def test_what_a_hopper_gpu_refuses(what):
    tensors, text = ON_CUDA[what]
    assert refusal(*tensors, capability=(9, 0)) == f"shared_prefix_attention: {text}"


def test_what_a_hopper_gpu_takes():
    assert refusal(*cuda(), capability=(9, 0)) is None
    for size in HEAD_SIZES:
        assert refusal(*of_size(size, torch.float16), capability=(9, 0)) is None
    assert refusal(*cuda(k=strided(128, 20 * 128, 1)), capability=(9, 0)) is None
    assert refusal(*cuda(), capability=(10, 0)) == (
        "shared_prefix_attention: device capability 10.0; need 9.0 (Hopper); "
        f"run on an H100 or H200, or {ELSEWHERE}"
    )


MALFORMED = {
    "a batch for its layout": (
        lambda q, k, v: (q, k, v, "layout"), "layout is of type str; need a SharedLayout; pass"
    ),
    "a list": (
        lambda q, k, v: (q, [k], v, layout()), "k is of type list; need a tensor; pass k as one"
    ),
    "a batch dimension": (
        lambda q, k, v: (q[None], k, v, layout()), "q has shape (1, 20, 4, 8); need [Tq, H, D]"
    ),
    "heads": (
        lambda q, k, v: (q[:, :3], k, v, layout()), "H=3, Hk=2; need H a multiple of Hk"
    ),
    "tokens": (
        lambda q, k, v: (q[1:], k, v, layout()), "q has shape (19, 4, 8); need [Tq, H, D] = (20"
    ),
    "head sizes": (
        lambda q, k, v: (q, k, v[..., 1:], layout()), "v has shape (20, 2, 7); need [T, Hk, D] ="
    ),
    "devices": (
        lambda q, k, v: (q, k.to("meta"), v, layout()), "k is on meta; need cpu, as q; pass k.to(q"
    ),
    "the layout's device": (
        lambda q, k, v: (q, k, v, layout().to("meta")), "layout is on meta; need cpu, as q; pass"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed(what):
    change, text = MALFORMED[what]
    with pytest.raises(ValueError, match=f"^shared_prefix_attention: {re.escape(text)}"):
        shared_prefix_attention(*change(*on("cpu")))


@pytest.mark.parametrize("broken", ["tout", "nodes"])
def test_qla_check_reads_the_layout(monkeypatch, broken):
    """Of one whose tensors were changed after it was made, or lie on a GPU."""
    q, k, v = on("cpu")
    monkeypatch.setenv("QLA_CHECK", "1")
    shared_prefix_attention(q, k, v, changed := layout())
    getattr(changed, broken)[3] += 1
    with pytest.raises(ValueError, match="make layouts by"):
        shared_prefix_attention(q, k, v, changed)


def test_second_derivatives_are_refused():
    """They were 0, in silence, where the gradient that came in was a constant."""
    q, k, v = tensors()
    (first,) = torch.autograd.grad(
        shared_prefix_attention(q, k, v, layout()).sum(), q, create_graph=True
    )
    with pytest.raises(Unsupported, match="shared_prefix_attention: a derivative of its gradients"):
        first.square().sum().backward()
    with pytest.raises(Unsupported, match="a derivative of its gradients is asked for"):
        torch.autograd.functional.hessian(
            lambda k: shared_prefix_attention(q, k, v, layout(), return_lse=True)[1].sum(), k
        )


def test_forward_mode_is_refused():
    """Tangents were 0, in silence."""
    leaf = tensors()[0]
    q, k, v = (x.detach() for x in tensors())
    calls = [
        (q, lambda q: shared_prefix_attention(q, k, v, layout())),
        (v, lambda v: shared_prefix_attention(leaf, k, v, layout())),
    ]
    for x, call in calls:
        with pytest.raises(Unsupported, match="shared_prefix_attention: an input has a forward-"):
            torch.func.jvp(call, (x,), (torch.ones_like(x),))


def test_a_scale_that_is_learned():
    """It once got no gradient, and nobody said so."""
    q, k, v = tensors()
    for scale, text in (
        (torch.ones((), requires_grad=True), "scale is a tensor that requires a gradient"),
        (torch.ones(2), r"scale is a tensor of shape \(2,\); need a positive number"),
        ("1", "scale is of type str; need a positive number; scale q instead"),
    ):
        with pytest.raises(Unsupported, match=text):
            shared_prefix_attention(q, k, v, layout(), scale=scale)
    want = shared_prefix_attention(q, k, v, layout(), scale=0.5)
    assert torch.equal(shared_prefix_attention(q, k, v, layout(), scale=torch.tensor(0.5)), want)


def test_cpu_tensors_whatever_the_default_device():
    leaves = tensors()
    weight = torch.ones_like(leaves[0])
    want = torch.autograd.grad(shared_prefix_attention(*leaves, layout()), leaves, weight)
    with torch.device("meta"):
        got = torch.autograd.grad(shared_prefix_attention(*leaves, layout()), leaves, weight)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_cpu_call_needs_no_tilelang():
    fresh("""
import sys, torch
sys.modules.update(tilelang=None, tvm=None)
import qla_kernels
layout = qla_kernels.SharedLayout.from_lengths([(3, [2])])
q = torch.randn(5, 2, 8, requires_grad=True)
qla_kernels.shared_prefix_attention(q, q, q, layout).sum().backward()
assert q.grad.isfinite().all()
assert not {"torch._dynamo", "transformers"} & set(sys.modules)
""")


def test_dualkv_is_reachable_by_family_name():
    assert dualkv.shared_prefix_attention is shared_prefix_attention
