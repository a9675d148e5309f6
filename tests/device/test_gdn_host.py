"""What the host does around launches on a GPU: far rows, strides, subclasses, streams, captures."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from qla_kernels import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
)
from qla_kernels.gdn import ops
from qla_kernels.gdn.launch.tensors import BOUNDS, sequence_bounds
from qla_kernels.gdn.sharded.gathered import folded, lines, signatures, signed
from qla_kernels.gdn.sharded.layouts import Stretch
from reference import gdn
from tests.compare import assert_close
from tests.gdn_calls import Call, leaves, on_gpu

pytestmark = pytest.mark.hopper

NAMES = ("q", "k", "v", "g", "beta")
FAR = 1 << 31  # elements


def far_apart(x: Call) -> Call:
    """The same values in bf16, the two rows of each tensor 2^31 elements apart: 4 GiB for all."""
    parts = [x[n].bfloat16() for n in NAMES]
    size = sum(t[0].numel() for t in parts)
    room = torch.empty(FAR + size, dtype=torch.bfloat16, device="cuda")
    moved, begin = {}, 0
    for n, t in zip(NAMES, parts, strict=True):
        moved[n] = room.as_strided(t.shape, (FAR, *t.stride()[1:]), begin).copy_(t)
        begin += t[0].numel()
    return {**x, **moved}


def both(x: Call) -> tuple[Call, Call]:
    return {**x, **{n: x[n].bfloat16() for n in NAMES}}, far_apart(x)


def results(x: Call) -> list[Tensor]:
    x = {n: t.detach().requires_grad_() if n in (*NAMES, "A_log") else t for n, t in x.items()}
    o, state = chunk_gated_delta_rule(**x, output_final_state=True)
    torch.manual_seed(1)
    incoming = torch.randn_like(o), torch.randn_like(state)
    return [o, state, *torch.autograd.grad((o, state), [x[n] for n in (*NAMES, "A_log")], incoming)]


def test_rows_that_are_too_far_apart_for_one_launch():
    """As int32, a step of 2^31 elements is a negative one: an illegal access."""
    near, far = both(on_gpu(batch=2, tokens=200, heads=(2, 4), activations=True))
    for got, want in zip(results(far), results(near), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", [1, 5])
def test_far_rows_token_by_token(tokens):
    near, far = both(on_gpu(batch=2, tokens=tokens, heads=(2, 4), activations=True))
    for run in (fused_recurrent_gated_delta_rule, chunk_gated_delta_rule):
        want, got = (run(**x, output_final_state=True) for x in (near, far))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_queries_of_long_rows_as_a_slice_of_a_projection():
    """Qwen3-Next's at its context: 2 x 262144 tokens of an 8192-wide convolution, 8 GiB."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB")
    room = torch.zeros(2, 262144, 8192, dtype=torch.bfloat16, device="cuda")
    x = room[..., :2048].unflatten(-1, (16, 128))
    assert x.stride(0) == FAR
    ends = [(b, slice(t, t + 64)) for b in (0, 1) for t in (0, 131072, 262144 - 64)]
    for b, tokens in ends:
        x[b, tokens] = torch.randn(64, 16, 128, device="cuda")
    y = ops.l2norm_fwd(x)
    dx = ops.l2norm_bwd(x, y, None)
    for b, tokens in ends:
        rows = x[b, tokens].double()
        assert_close("y", y[b, tokens], gdn.l2norm(rows), 3e-3)
        assert dx[b, tokens].abs().max() < 0.05  # along the norm there is no gradient
    assert not y[1, 64:128].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_of_any_strides(dtype):
    x = on_gpu([70, 0, 130], heads=(1, 2), activations=True)
    bounds = x["cu_seqlens"].to(dtype)
    column = torch.stack([bounds, bounds], 1).contiguous()[:, 0]
    want, got = (results({**x, "cu_seqlens": b}) for b in (bounds, column))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_saved_tensors_of_any_strides():
    x = {n: t for n, t in on_gpu(heads=(1, 2)).items() if n != "initial_state"}
    g_cum, A, o, *_ = chunk_gated_delta_rule_fwd(**x)
    do = torch.randn_like(o)
    wide = [torch.stack([t, t], -1)[..., 0] for t in (g_cum, A)]

    def run(g: Tensor, A: Tensor) -> Any:
        return chunk_gated_delta_rule_bwd(x["q"], x["k"], x["v"], g, x["beta"], A, do)

    for a, b in zip(run(*wide), run(g_cum, A), strict=True):
        assert a is b is None or torch.equal(a, b)


class Wrapper(Tensor):
    """Without memory of its own, as a DTensor."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Tensor:
        wrapper = Tensor._make_wrapper_subclass(
            cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        wrapper.inner = x
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", ["g", "beta", "A_log", "initial_state"])
@pytest.mark.parametrize("run", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_a_subclass_beside_plain_queries(run, name):
    """It has no address to launch with."""
    x = on_gpu(tokens=9, activations=True)
    want, got = run(**x)[0], run(**{**x, name: Wrapper(x[name])})[0]
    assert torch.equal(got, want)


def test_a_row_of_bounds_is_waited_for_by_other_streams():
    """They are written by the first call of a shape, which may be far behind in another queue."""
    x = {n: t for n, t in on_gpu(batch=3, tokens=517, heads=(2, 4)).items() if n != "initial_state"}
    for tokens in (400, 401, 402):
        part = {n: t[:, :tokens].contiguous() for n, t in x.items()}
        outputs = []
        for stream in [torch.cuda.Stream() for _ in range(3)]:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs.append(chunk_gated_delta_rule(**part)[0])
        torch.cuda.synchronize()
        want = chunk_gated_delta_rule(**part)[0]
        assert all(torch.equal(o, want) for o in outputs)


def test_a_graph_reads_bounds_that_stay():
    x = {n: t for n, t in on_gpu(batch=2, tokens=333, heads=(2, 4)).items() if n != "initial_state"}
    for _ in range(2):
        want = chunk_gated_delta_rule(**x)[0]
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = chunk_gated_delta_rule(**x)[0]
    for block in range(1, 700):  # more tables than are kept
        sequence_bounds(x["q"][:, :1].expand(2, block * BOUNDS, 2, -1), None)
    o.zero_()
    graph.replay()
    assert torch.equal(o, want)


def test_what_is_kept_belongs_to_no_compiled_graph():
    """What a warm-up of reduce-overhead allocates and does not return is an error."""
    x = {n: t for n, t in on_gpu(batch=2, tokens=222, heads=(2, 4)).items() if n != "initial_state"}

    @torch.compile(mode="reduce-overhead")
    def layer(**x: Tensor) -> Tensor:
        return chunk_gated_delta_rule(**x)[0] * 2

    with torch.no_grad():
        outputs = [layer(**x).clone() for _ in range(4)]
    want = 2 * chunk_gated_delta_rule(**x)[0]
    assert all(torch.equal(o, want) for o in outputs)


def test_a_backward_beside_a_capture():
    """A capture holds the stream that its backward forked to, until it ends."""
    x, y = (on_gpu(tokens=300, heads=(1, 2)) for _ in range(2))

    def step(x: Call) -> tuple[Tensor, ...]:
        x = leaves(x)
        o, _ = chunk_gated_delta_rule(**x)
        return torch.autograd.grad(o.square().sum(), [x[n] for n in NAMES])

    captured, other = torch.cuda.Stream(), torch.cuda.Stream()
    wanted = []
    for stream, call in ((captured, x), (other, y)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(call)
            wanted.append(step(call))
    torch.cuda.synchronize()
    beside: list[Any] = []

    def run() -> None:
        with torch.cuda.stream(other):
            try:
                beside.extend(step(y))
            except RuntimeError as error:
                beside.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=captured, capture_error_mode="thread_local"):
        inside = step(x)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    for got, want in ((inside, wanted[0]), (beside, wanted[1])):
        assert not isinstance(got[0], RuntimeError), got[0]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_link_of_another_call_is_nan_and_nobody_waits():
    """At K = 256, where torch folds; link_fold's own case is in the self-test."""
    facts, HV, V, K = ("forward", 0.3), 2, 128, 64
    link, its = torch.randn(HV, V + K, K, device="cuda"), [Stretch(0, 1, 0, 1)]
    mine, *others = (
        signed([link], signatures(of_call, [stretch], reverse=False))
        for of_call, stretch in (
            (facts, its[0]), (("forward", 0.5), its[0]), (facts, Stretch(0, 1, 0, 2)),
        )
    )  # fmt: skip
    line = lines(facts, [Stretch(0, 1, 1, 0)], 1, 2, reverse=False)
    torch.cuda.set_sync_debug_mode("error")
    fits = folded(torch.stack([mine, mine]), line, V)[0]
    foreign = [folded(torch.stack([x, mine]), line, V)[0] for x in others]
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(fits, link[:, :V])
    assert all(x.isnan().all() for x in foreign)
