"""The public functions on CPU tensors: right, differentiable, traceable, or refused in words."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from qla_kernels import Unsupported
from qla_kernels.sparse_ring import (
    PAPER,
    Dense,
    FixedVerticalSlash,
    RingGroups,
    StripedLayout,
    VerticalSlash,
    VSIndex,
    ZigZagLayout,
    build_index,
    ops,
    refusal,
    sparse_attention,
    sparse_ring_attention,
)
from qla_kernels.sparse_ring.groups import ALONE
from qla_kernels.sparse_ring.heuristics import chunks_per_launch, own_chunk_first, schedule_of
from reference import sparse_ring
from tests.compare import assert_close, relative_l2

EXACT = 1e-12
SOLO = RingGroups(ALONE, ALONE, ALONE, None)


pytestmark = pytest.mark.usefixtures("poison")


def tensors(
    T: int = 256, B: int = 2, heads: tuple[int, int] = (4, 2), D: int = 16, dtype=torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    H, Hk = heads
    mean = torch.randn(H, D, dtype=torch.float64)
    q, k, v = (torch.randn(B, T, h, D, dtype=torch.float64) for h in (H, Hk, Hk))
    leaves = (q + mean, k + mean[:: H // Hk], v)
    return tuple(x.to(dtype).requires_grad_() for x in leaves)


def truth(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, do: Tensor, dlse: Tensor) -> list[Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = sparse_ring.attention(*leaves, mask)
    seen = lse > -torch.inf
    loss = (o * do).sum() + (lse[seen] * dlse[seen]).sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def check(x: tuple[Tensor, Tensor, Tensor], rel: float, seqlen: int, **lines) -> None:
    T = x[0].shape[1]
    o, lse, index = sparse_attention(*x, seqlen=seqlen, return_lse=True, return_index=True, **lines)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    dlse[..., seqlen:] = 0
    mask = index.to_mask() & (torch.arange(T) < seqlen)[:, None]
    want = truth(*x, mask, do, dlse)
    live = slice(None, seqlen)
    assert (lse[..., seqlen:] == -torch.inf).all()
    loss = (o * do).sum() + (lse[..., live] * dlse[..., live]).sum()
    got = [o, lse, *torch.autograd.grad(loss, x)]
    assert [t.dtype for t in got] == [o.dtype, lse.dtype, *(t.dtype for t in x)]
    got[1], want[1] = got[1][..., live], want[1][..., live]
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(name, a, b, rel)


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128, 200, 256])
def test_any_length(seqlen):
    check(tensors(), EXACT, seqlen, pattern=VerticalSlash(0.5, 0.6))


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2)])
@pytest.mark.parametrize(
    "pattern",
    [
        Dense(),
        FixedVerticalSlash([], [0]),
        FixedVerticalSlash([0, 1, 70, 130, 255], [2]),
        FixedVerticalSlash(range(256), []),
        VerticalSlash(0.9, 0.9, max_v=4),
    ],
)
def test_any_lines(heads, pattern):
    check(tensors(heads=heads), EXACT, 250, pattern=pattern)


@pytest.mark.parametrize(
    ("dtype", "rel"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)]
)
def test_a_result_is_rounded_once(dtype, rel):
    """Half a unit of rounding spread evenly is 0.29 units: 2.2e-3 in bf16; q in grads adds some."""
    check(tensors(dtype=dtype), rel, 256, pattern=VerticalSlash(0.5, 0.6))


def test_large_logits_and_shared_strides():
    q, k, v = (x.detach() for x in tensors())
    packed = torch.cat([60 * q, k, v], 2)  # slices of one projection
    views = packed.split([4, 2, 2], 2)
    leaves = [x.detach().clone().requires_grad_() for x in views]
    o = sparse_attention(*views, pattern=VerticalSlash())
    assert o.isfinite().all()
    assert torch.equal(o, sparse_attention(*leaves, pattern=VerticalSlash()))
    o = sparse_attention(*leaves, pattern=VerticalSlash())
    o.sum().backward()  # an expanded gradient
    assert all(x.grad.isfinite().all() for x in leaves)


def test_dense_is_what_torch_has():
    q, k, v = tensors()
    o = sparse_attention(q, k, v, pattern=Dense(), scale=0.3)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True, scale=0.3
    )
    assert relative_l2(o, want.transpose(1, 2)) < EXACT


def test_an_index_serves_many_calls():
    q, k, v = tensors()
    pattern = VerticalSlash(0.4, 0.5)
    index = build_index(q, k, pattern, seqlen=200)
    a, lse = sparse_attention(q, k, v, index=index, seqlen=200, return_lse=True)
    b = sparse_attention(q, k, v, pattern=pattern, seqlen=200)
    assert torch.equal(a, b)
    assert not index.window_recall.requires_grad
    (dq,) = torch.autograd.grad(lse[..., :200].sum(), q)  # the LSE alone
    assert dq.abs().sum() > 0


def test_a_ring_of_one_rank_is_the_same_call():
    q, k, v = tensors()
    pattern = VerticalSlash(0.4, 0.5)
    want = sparse_attention(q, k, v, pattern=pattern)
    o = sparse_ring_attention(q, k, v, group=SOLO, layout=StripedLayout(1), pattern=pattern)
    assert torch.equal(o, want)
    o = sparse_ring_attention(q, k, v, group=SOLO, layout=ZigZagLayout(1), pattern=pattern)
    assert relative_l2(o, want) < EXACT  # two ranges, merged


def test_recomputation_changes_nothing():
    x = tensors()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, pattern=VerticalSlash(0.4, 0.5)).square()

    want = torch.autograd.grad(layer(*x).sum(), x)
    got = torch.autograd.grad(checkpoint(layer, *x, use_reentrant=False).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_autocast_rounds_nothing():
    x = tensors(dtype=torch.float32)
    want = sparse_attention(*x, pattern=VerticalSlash(0.4, 0.5))
    with torch.autocast("cpu", torch.bfloat16):
        got = sparse_attention(*x, pattern=VerticalSlash(0.4, 0.5))
    assert torch.equal(got, want)
    assert all(map(torch.equal, *(torch.autograd.grad(o.sum(), x) for o in (got, want))))


@pytest.mark.parametrize(
    "pattern", [VerticalSlash(0.4, 0.5), FixedVerticalSlash([3], [[], [1], [], [1]]), Dense()]
)
def test_one_graph_without_breaks(pattern):
    x = tensors(T=128, B=1, dtype=torch.float32)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, pattern=pattern).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(loss(*x), x)
    got = torch.autograd.grad(compiled(*x), x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_operators_have_the_shapes_they_promise():
    q, k, v = (x.detach().float() for x in tensors(T=128, B=1))
    budget = (128, 0.25, 0.5, 0.6, 16, None, 4, 2, "residual", 8, 0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.qla_kernels.vertical_slash_index.default, (q, k, *budget), test_utils=checks
    )
    v_idx, v_cnt, d_bits, _ = ops.vertical_slash_index(q, k, *budget)
    call = (q, k, v, v_idx, v_cnt, d_bits, 128, 0.25)
    torch.library.opcheck(torch.ops.qla_kernels.vertical_slash_fwd.default, call, test_utils=checks)
    done = ops.vertical_slash_fwd(*call)
    call = (*call, *done, torch.randn_like(q), None)
    torch.library.opcheck(torch.ops.qla_kernels.vertical_slash_bwd.default, call, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pattern": None}, "neither of pattern and index were passed; need one"),
        ({"seqlen": 0}, "seqlen is 0; need 1 to 256"),
        ({"seqlen": 257}, "seqlen is 257; need 1 to 256"),
        ({"pattern": VerticalSlash}, "pattern is of type type; need VerticalSlash"),
        ({"pattern": FixedVerticalSlash([256], [0])}, "v_idx has the line 256; need lines below"),
        ({"pattern": FixedVerticalSlash([[1], [2]], [0])}, "v_idx has lines of 2 heads; need 1 or"),
        (dict.fromkeys("kv", torch.zeros(2, 256, 3, 16)), "H=4, Hk=3; need H a multiple of Hk"),
        ({"q": torch.zeros(0, 256, 4, 16)}, "need [B, L, H, D] with B at least 1"),
        ({"q": torch.zeros(2, 256, 4, 0)}, "need [B, L, H, D] with D at least 1"),
        ({"v": torch.zeros(2, 256, 2, 8)}, "v has shape (2, 256, 2, 8); need [B, L, Hk, D]"),
        ({"q": torch.zeros(256, 4, 16)}, "q has shape (256, 4, 16); need [B, L, H, D]"),
        ({"q": [1.0]}, "q is of type list; need a tensor; pass q as one"),
        ({"k": None}, "k is of type NoneType; need a tensor"),
        ({"seqlen": "x"}, "seqlen is 'x' of type str; need an integer; pass the"),
        ({"seqlen": 1.5}, "seqlen is 1.5 of type float; need an integer"),
        ({"scale": "0.5"}, "scale is '0.5' of type str; need a number; pass float(scale)"),
        ({"scale": [1]}, "scale is [1] of type list; need a number"),
        (
            {"scale": torch.ones((), requires_grad=True)},
            "scale is a float32 tensor of shape () on cpu that requires a gradient; need a number; "
            "pass float(scale); multiply q by a scale that is learned",
        ),
        ({"pattern": None, "index": (1, 2)}, "index is of type tuple; need a VSIndex; pass build"),
    ],
)
def test_a_malformed_call(change, text):
    q, k, v = tensors(dtype=torch.float32)
    call = {"q": q, "k": k, "v": v, "pattern": Dense(), **change}
    around = {"group": SOLO, "layout": StripedLayout(1)}
    for name, options in (("sparse_attention", {}), ("sparse_ring_attention", around)):
        x = {**call, **options}
        with pytest.raises(ValueError, match=rf"^{name}: ") as error:
            globals()[name](x.pop("q"), x.pop("k"), x.pop("v"), **x)
        assert text in str(error.value)
        assert not isinstance(error.value, Unsupported)


def test_numbers_of_other_libraries():
    x = tensors(T=128, B=1)
    want = sparse_attention(*x, pattern=Dense(), seqlen=100, scale=0.5)
    for seqlen, scale in ((np.int64(100), np.float32(0.5)), (torch.tensor(100), torch.tensor(0.5))):
        got = sparse_attention(*x, pattern=Dense(), seqlen=seqlen, scale=scale)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: VerticalSlash(max_v=8.0), "max_v is 8.0 of type float; need an int; pass int"),
        (lambda: VerticalSlash(max_s=True), "max_s is True of type bool; need an int"),
        (lambda: VerticalSlash(kappa="8"), "kappa is '8' of type str; need an int"),
        (lambda: VerticalSlash(recall_v="all"), "recall_v is 'all' of type str; need a number"),
        (lambda: FixedVerticalSlash([0.5], [0]), "v_idx cannot be read (0.5 is no integer)"),
        (
            lambda: FixedVerticalSlash([0], [[1], [1.25]]),
            "d_idx cannot be read (1.25 is no integer)",
        ),
        (lambda: FixedVerticalSlash(["7"], [0]), "v_idx cannot be read ('7' is no integer); need"),
        (lambda: FixedVerticalSlash(7, [0]), "v_idx cannot be read ('int' object is not iter"),
        (lambda: FixedVerticalSlash([float("nan")], [0]), "v_idx cannot be read (cannot convert"),
    ],
)
def test_a_pattern_that_makes_no_sense(make, text):
    with pytest.raises(ValueError, match="VerticalSlash: ") as error:
        make()
    assert text in str(error.value)


def test_whole_lines_of_any_type():
    want = FixedVerticalSlash([3, 70], [[1], [2]])
    lines = (torch.tensor([70.0, 3.0]), np.array([[1], [2]]))
    assert FixedVerticalSlash(*lines) == want
    assert FixedVerticalSlash(*lines).described == want.described
    assert want.described != FixedVerticalSlash([3, 70], [[1, 2], []]).described


@pytest.mark.parametrize("pattern", [VerticalSlash(0.4, 0.5), FixedVerticalSlash([3], [1])])
def test_any_default_device(pattern):
    """What is made on the host was once made on the default device."""
    x = tensors(dtype=torch.float32)
    around = {"group": SOLO, "layout": ZigZagLayout(1)}
    calls = (
        lambda: sparse_attention(*x, pattern=pattern, return_index=True),
        lambda: sparse_ring_attention(*x, pattern=pattern, return_index=True, **around),
    )
    for call in calls:
        want, index = call()
        grads = torch.autograd.grad(want.sum(), x)
        with torch.device("meta"):
            got, again = call()
            assert torch.equal(got, want)
            assert all(map(torch.equal, torch.autograd.grad(got.sum(), x), grads))
            assert torch.equal(again.to_mask(), index.to_mask())
            assert torch.equal(again.density(), index.density())


def test_derivatives_that_no_kernel_computes():
    """They were once 0: behind a sum the incoming gradient is a constant."""
    x = tensors(T=128, B=1)

    def loss(q: Tensor) -> Tensor:
        return sparse_attention(q, *x[1:], pattern=Dense()).sum()

    (dq,) = torch.autograd.grad(loss(x[0]), x[0], create_graph=True)
    with pytest.raises(Unsupported, match="sparse_attention: a derivative of its gradients is"):
        (loss(x[0]) + dq.square().sum()).backward()
    with pytest.raises(Unsupported, match="sparse_attention"):
        torch.autograd.functional.hessian(loss, x[0].detach())
    (again,) = torch.autograd.grad(loss(x[0]), x[0])
    assert torch.equal(again, dq)


def test_forward_mode_is_refused():
    q, k, v = (x.detach() for x in tensors(T=128, B=1))
    around = {"group": SOLO, "layout": StripedLayout(1)}
    for call, options in ((sparse_attention, {}), (sparse_ring_attention, around)):
        attend = functools.partial(call, pattern=VerticalSlash(), **options)
        with pytest.raises(Unsupported, match="an input has a forward-mode tangent"):
            torch.func.jvp(lambda k, attend=attend: attend(q, k, v), (k,), (k,))
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(Unsupported, match="an input has a forward-mode tangent"),
        ):
            attend(torch.autograd.forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("what", ["T", "T of an index", "seqlen"])
def test_lengths_are_not_compiled_in(what):
    """Each length was once a graph of its own, and the ninth an error."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    pattern = VerticalSlash(0.4, 0.5, max_v=16)

    def loss(q: Tensor, k: Tensor, v: Tensor, index: VSIndex | None, seqlen: int | None) -> Tensor:
        lines = {"pattern": pattern} if index is None else {"index": index}
        return sparse_attention(q, k, v, seqlen=seqlen, **lines).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for n in range(1, 13):
        x = tensors(T=256 if what == "seqlen" else 128 * n, B=1, dtype=torch.float32)
        index = build_index(*x[:2], pattern) if "index" in what else None
        call = (*x, index, 100 + n if what == "seqlen" else None)
        want = torch.autograd.grad(loss(*call), x)
        got = torch.autograd.grad(compiled(*call), x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counter.frame_count <= 4
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("shape", "strides", "world", "text"),
    [
        ((2, 1 << 20, 16, 128), None, 1, "q has shape (2, 1048576, 16, 128) and strides (21474"),
        ((2, 128, 16, 128), (1 << 31, 2048, 128, 1), 1, "need at most 2147483647 elements from"),
        ((1, 1 << 20, 16, 128), None, 2, "pass one sequence a call, copy a view, or split"),
        ((1, 1 << 20, 16, 128), None, 1, None),
        ((1, 128, 16, 128), (1 << 31, 2048, 128, 1), 1, None),
        ((2, 1 << 19, 16, 128), None, 1, None),
    ],
)
def test_strides_past_32_bits(shape, strides, world, text):
    """Kernels take a stride in 32 bits; a larger one was once cut short."""
    few = torch.empty(1, dtype=torch.bfloat16, device="meta")
    packed = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    q = few.as_strided(shape, strides or packed.stride())
    answer = refusal(q, packed, packed, world=world, capability=(9, 0))
    assert answer is None if text is None else text in answer


def test_an_index_of_another_call():
    q, k, v = tensors()
    index = build_index(q, k, Dense())
    wanted = r"int32 \(2, 4, 0\) on cpu; need 256 tokens, and int32 \(1, 4, 0\) on cpu"
    with pytest.raises(ValueError, match=f"index has 256 tokens, and its v_idx is {wanted}"):
        sparse_attention(q[:1], k[:1], v[:1], index=index)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("v_idx", lambda x: x.long()),
        ("v_idx", lambda x: x[:, :1]),
        ("d_bits", lambda x: x[..., :1]),
        ("d_bits", lambda x: x.long()),
        ("v_cnt", lambda x: x.float()),
    ],
)
def test_an_index_of_another_form(name, changed):
    """Kernels take shapes and dtypes at their word."""
    q, k, v = tensors(T=2176)
    index = build_index(q, k, FixedVerticalSlash([3, 70], [0, 1]))
    wrong = index._replace(**{name: changed(getattr(index, name))})
    with pytest.raises(ValueError, match=f"index has 2176 tokens, and its {name} is "):
        sparse_attention(q, k, v, index=wrong)


@pytest.mark.parametrize(
    ("T", "change", "text"),
    [
        (200, {}, "200 tokens a rank; need a positive multiple of 128; pad the"),
        (256, {"k": torch.float32}, "q is float64, k is float32, v is float64; need one float"),
    ],
)
def test_a_refused_call(T, change, text):
    call = dict(zip("qkv", tensors(T), strict=True))
    call = {n: x.to(change.get(n, x.dtype)) for n, x in call.items()}
    with pytest.raises(Unsupported) as error:
        sparse_attention(**call, pattern=Dense())
    assert str(error.value) == refusal(**call)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"capability": (8, 0)}, "device capability 8.0; need 9.0"),
        ({"dtype": torch.float32}, "q, k and v are float32; need bfloat16 or float16"),
        ({"D": 96}, "head dimension D=96; need 64 or 128 on SM90; pad q, k and v to 128"),
        ({"D": 256}, "head dimension D=256; need 64 or 128 on SM90; use CPU tensors"),
        ({"stride": 2}, "a last stride of 1 and the rest positive multiples of 16 bytes; pass k."),
        ({"shared": True}, "k has strides (16384, 64, 0, 1) and offset 0; need a last stride of 1"),
        ({"scale": -1.0}, "scale=-1.0; need a positive number"),
        ({}, None),
    ],
)
def test_what_a_gpu_would_answer(change, text):
    call = {"capability": (9, 0), **change}
    stride, D, shared = call.pop("stride", 1), call.pop("D", 64), call.pop("shared", False)
    q, k, v = (x.detach() for x in tensors(dtype=call.pop("dtype", torch.bfloat16), D=D))
    k = k.repeat_interleave(stride, -1)[..., ::stride]
    if shared:  # one head of keys, taken for all: a stride of 0
        k = k[:, :, :1].contiguous().expand_as(k)
    answer = refusal(q, k, v, **call)
    assert answer is None if text is None else text in answer


def test_what_is_sent_has_to_be_contiguous():
    q, k, v = tensors()
    text = refusal(q, k.transpose(0, 1).contiguous().transpose(0, 1), v, world=2)
    assert "need a contiguous tensor, which can be sent; pass k.contiguous()" in text
    assert refusal(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, world=2) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layout": StripedLayout(2)}, "layout is for 2 ranks, and the group has 1; need as"),
        ({"layout": "striped"}, "layout is of type str; need a layout; pass StripedLayout(1)"),
        ({"group": "cp"}, "group is of type str; need RingGroups; make one by"),
        ({"schedule": "all"}, "schedule is 'all'; need one of auto, allgather, ring, double_ring"),
        (
            {"schedule": "double_ring", "layout": ZigZagLayout(1)},
            "'double_ring' and layout a ZigZagLayout",
        ),
        ({"chunks_per_launch": 0}, "chunks_per_launch is 0; need at least 1"),
    ],
)
def test_a_ring_that_makes_no_sense(change, text):
    options = {"group": SOLO, "layout": StripedLayout(1), "pattern": Dense(), **change}
    with pytest.raises(ValueError, match=r"^sparse_ring_attention: ") as error:
        sparse_ring_attention(*tensors(), **options)
    assert text in str(error.value)


@pytest.mark.parametrize("half", [{"layout": StripedLayout(2)}, {"group": SOLO}])
def test_an_index_of_a_ring_of_which_half_is_missing(half):
    """It was once that of this rank's shard."""
    q, k, _ = tensors()
    with pytest.raises(ValueError, match=r"^build_index: (group|layout) is of type NoneType; need"):
        build_index(q, k, Dense(), **half)


def test_schedules_are_chosen_from_what_all_ranks_know():
    choices = itertools.product((4, 32), (4, 8, 32), (1 << 20, 1 << 34), (True, False))
    found = {c: schedule_of("auto", *c) for c in choices if c[0] % c[1] == 0}
    assert found[4, 4, 1 << 20, True] == found[32, 32, 1 << 20, False] == "allgather"
    assert found[4, 4, 1 << 34, True] == "ring"
    assert found[32, 8, 1 << 20, True] == found[32, 8, 1 << 34, True] == "double_ring"
    assert found[32, 8, 1 << 20, False] == "ring"
    assert schedule_of("ring", 4, 4, 1, True) == "ring"
    assert [chunks_per_launch(None, n) for n in (16384, 65536, 131072, 1 << 20)] == [8, 2, 1, 1]
    assert chunks_per_launch(1, 128) == 1


def test_the_own_chunk_is_first_where_a_gather_takes_longer_than_a_merge():
    """16/2 heads of 128 in bf16, lines estimated: docs/lessons.md."""

    def first(world: int, tokens: int, estimates: bool = True, gathers: bool = True) -> bool:
        rows = tokens // world
        return own_chunk_first(world, rows * 2 * 2 * 128 * 2, rows * 16 * 128, estimates, gathers)

    k = 1024
    chosen = {(w, t) for w in (1, 2, 4, 8) for t in (128 * k, 512 * k, 2048 * k) if first(w, t)}
    assert chosen == {(8, 128 * k), (8, 512 * k), (8, 2048 * k), (4, 512 * k), (4, 2048 * k)}
    assert first(4, 128 * k, estimates=False)
    assert not first(8, 512 * k, gathers=False)
    assert StripedLayout(2, PAPER["stripe"]).gap == 2
