"""The backward of shared-prompt attention on a GPU: against fp64, and against torch's own."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qla_kernels import SharedLayout, shared_prefix_attention
from qla_kernels.dualkv import ops
from qla_kernels.dualkv.ops import SharedBackward
from qla_kernels.dualkv.shapes import HEAD_SIZES
from qla_kernels.lab.selftest.dualkv_backward import Upstream, check, exact, upstream
from qla_kernels.lab.selftest.dualkv_forward import FOREST, SharedCall, call, wanted
from tests.compare import assert_close
from tests.dualkv_inputs import grown

pytestmark = pytest.mark.hopper

DTYPES = (torch.bfloat16, torch.float16)
SIZES = pytest.mark.parametrize("size", [128, 256])


def backward(x: SharedCall, given: Upstream, deterministic: bool = True) -> SharedBackward:
    q, k, v, *rest = x.arguments()
    return SharedBackward(
        *ops.dualkv_bwd(given.do, q, k, v, given.o, given.lse2, given.dlse, *rest, deterministic)
    )


def check_both(x: SharedCall, given: Upstream) -> None:
    """One pass over the scores, and two; of heads of 64 and of 256, two twice."""
    for deterministic in (False, True):
        check(x, given, backward(x, given, deterministic))


def on_gpu(layout, heads=(2, 8), **others) -> SharedCall:
    return call(layout, heads, device="cuda", **others)


AROUND = [n + d for n in (16, 64, 128) for d in (-1, 0, 1)]


@SIZES
@pytest.mark.parametrize("prompt", [1, *AROUND])
def test_lengths_around_a_tile(prompt, size):
    x = on_gpu([(prompt, AROUND), (prompt, [1])], size=size)
    given = upstream(x)
    check_both(x, given)


@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_query_heads_of_a_key_head(group, size):
    x = on_gpu([(150, [40, 200, 0, 1])], (2, 2 * group), size=size)
    given = upstream(x, with_dlse=False)
    check_both(x, given)


@SIZES
def test_a_tree(size):
    x = on_gpu(SharedLayout.from_forest(*FOREST), size=size)
    given = upstream(x)
    check_both(x, given)


@SIZES
def test_runs_in_parts(size):
    x = on_gpu([(900, [1200, 30, 700])], (2, 4), size=size)
    assert x.arguments()[3][5].shape[0] > 2, "nothing much is split; the test is wrong"
    given = upstream(x)
    check_both(x, given)


@SIZES
def test_queries_of_the_responses_alone(size):
    whole = on_gpu([(140, [33, 5, 70])], size=size)
    x = whole._replace(q=whole.q[140:], q_shift=140)
    given = upstream(x)
    check_both(x, given)


@SIZES
@pytest.mark.parametrize("changed", [{"spread": 50.0}, {"spread": 0.0}, {"scale": 0.5}], ids=str)
def test_scores_of_any_size(changed, size):
    x = on_gpu([(300, [100, 30])], size=size, **changed)
    given = upstream(x)
    check_both(x, given)


# One pass, and two, each at the head sizes that it is for
FORMS = pytest.mark.parametrize(
    ("size", "deterministic"), [(128, False), (128, True), (256, True)], ids=str
)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_accurate_as_torch(dtype, size, deterministic):
    """Errors against fp64 beside those of torch's attention of every sequence alone.

    The upstream gradient of a token is shared out among its one or two replicas, without rounding.
    """
    groups = [(300, [200, 33]), (64, [1, 500])]
    x = on_gpu(groups, size=size, dtype=dtype)
    given = upstream(x, with_dlse=False)
    paths = grown(groups).paths
    theirs = [torch.zeros(t.shape, dtype=torch.float64) for t in (x.q, x.k, x.v)]
    times = torch.bincount(torch.tensor([t for path in paths for t in path]), minlength=len(x.q))
    for path in paths:
        rows = torch.tensor(path)
        leaves = [t[rows].transpose(0, 1)[None].detach().requires_grad_() for t in (x.q, x.k, x.v)]
        o = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        do = given.do[rows] / times[rows, None, None].to(x.q)
        grads = torch.autograd.grad(o, leaves, do.transpose(0, 1)[None])
        for total, grad in zip(theirs, grads, strict=True):
            total.index_add_(0, rows, grad[0].transpose(0, 1).double().cpu())
    want = exact(x, given._replace(o=wanted(x).o))
    got = backward(x, given, deterministic)
    for name, a, b, c in zip(SharedBackward._fields, got, theirs, want, strict=True):
        ours, their = (t.double().cpu() - c.cpu() for t in (a, b))
        assert ours.norm() <= 1.25 * their.norm(), name
        assert ours.abs().max() <= 2 * their.abs().max(), name


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_repeats_bit_for_bit():
    x = on_gpu([(700, [300] * 12), (50, [400] * 5)], (8, 32))
    given = Upstream(torch.randn_like(x.q), *ops.dualkv_fwd(*x.arguments()), None)
    want = backward(x, given)
    assert all(same(backward(x, given), want) for _ in range(200))
    first = backward(x, given, deterministic=False)
    for _ in range(200):  # dq is the sum of what CTAs add, in their order
        done = backward(x, given, deterministic=False)
        assert same(done[1:], first[1:])
        assert_close("dq", done.dq, first.dq.double(), 1e-3)


def test_wide_heads_repeat_bit_for_bit():
    """Without `deterministic` as well."""
    x = on_gpu([(700, [300] * 12), (50, [400] * 5)], (4, 32), size=256)
    given = Upstream(torch.randn_like(x.q), *ops.dualkv_fwd(*x.arguments()), None)
    want = backward(x, given, deterministic=False)
    assert all(same(backward(x, given), want) for _ in range(200))


@FORMS
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_nan_in_a_response_stays_there(name, size, deterministic):
    """It reaches what the response has a part in: itself and the keys of its prompt."""
    x = on_gpu([(150, [20, 40, 9]), (5, [7])], size=size)
    given = upstream(x)
    clean = backward(x, given, deterministic)
    (given.do if name == "do" else getattr(x, name))[170:210] = torch.nan
    if name != "do":  # as the forward leaves them
        given.o[170:210] = torch.nan
        given.lse2[:, 170:210] = torch.nan
    done = backward(x, given, deterministic)
    others = [*range(150, 170), *range(210, 231)]
    for a, b in zip(done[1:], clean[1:], strict=True):
        assert torch.equal(a[others], b[others])
    rows = [*range(150), *others]
    assert_close("dq", done.dq[rows], clean.dq[rows].double(), 0 if deterministic else 1e-3)
    assert done.dk[:150].isnan().any()
    assert done.dq[209].isnan().any()


def test_through_autograd():
    """Of o and lse: an upstream gradient that is expanded, and inputs of a fused projection."""
    layout = SharedLayout.from_lengths([(40, [33, 50])], device="cuda")
    fused = torch.randn(123, 12, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = fused.split([8, 2, 2], 1)
    o, lse = shared_prefix_attention(q, k, v, layout, return_lse=True)
    (o.sum() + lse.square().sum()).backward()
    x = SharedCall(*(t.detach() for t in (q, k, v)), layout, 128**-0.5)
    made = wanted(x)
    given = Upstream(torch.ones_like(o), o.detach(), lse.detach(), 2 * made.lse)
    check(x, given, SharedBackward(*fused.grad.split([8, 2, 2], 1)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_does_not_synchronise(deterministic):
    x = on_gpu([(140, [33])])
    given = upstream(x)
    want = backward(x, given, deterministic)  # compiled, loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = backward(x, given, deterministic)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(got[1:], want[1:])


@FORMS
def test_in_a_graph(size, deterministic):
    x = on_gpu([(140, [33, 70])], size=size)
    given = upstream(x)
    backward(x, given, deterministic)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        done = backward(x, given, deterministic)
    for _ in range(2):
        given.do.normal_()
        for t in done:
            t.fill_(torch.nan)
        graph.replay()
        check(x, given, done)
