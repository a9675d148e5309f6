"""torch.compile on the CPU: one graph, forward and backward, equal to eager.

aot_eager traces, functionalises and partitions as Inductor does, but generates no code.
"""

import shutil

import pytest
import torch
import torch._dynamo.testing

from qla_kernels import chunk_gated_delta_rule
from tests.compare import assert_close
from tests.gdn_calls import CALLS, Call, call, gradients, leaves


@pytest.fixture(autouse=True)
def none_compiled_yet():
    """Dynamo compiles a function so many times, and no more."""
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "kind", ["dense", "packed", "activated and packed", "V first", "FLA's keywords"]
)
def test_compiles_to_one_graph(kind):
    x = call(**CALLS[kind])
    eager, traced = leaves(x), leaves(x)
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    want = chunk_gated_delta_rule(**eager, output_final_state=True)
    got = compiled(**traced, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    got_grads, want_grads = gradients(got, traced), gradients(want, eager)
    assert all(torch.equal(got_grads[n], want_grads[n]) for n in want_grads)


def test_a_tensor_may_come_twice():
    """Dynamo hands none to an autograd.Function twice."""
    x = call([30, 40])
    x["cu_seqlens_cpu"] = x["cu_seqlens"]

    def layer(q: torch.Tensor) -> torch.Tensor:
        return chunk_gated_delta_rule(**{**x, "q": q, "k": q})[0]

    eager, traced = (x["q"].clone().requires_grad_() for _ in range(2))
    want, got = layer(eager), torch.compile(layer, fullgraph=True, backend="aot_eager")(traced)
    assert torch.equal(got, want)
    assert torch.equal(
        *(torch.autograd.grad(o.square().sum(), q)[0] for o, q in ((got, traced), (want, eager)))
    )


def test_a_keyword_that_warns_is_no_break_of_a_graph():
    x = call(state_v_first=True)
    want = chunk_gated_delta_rule(**x, output_final_state=True)
    del x["state_v_first"]
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    got = compiled(**x, output_final_state=True, transpose_state_layout=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_compiles_without_gradients():
    x = call(activations=True)
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(**leaves(x))[0], chunk_gated_delta_rule(**x)[0])


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_compiles_with_inductor_among_other_work():
    def layer(x: Call) -> tuple[torch.Tensor, torch.Tensor]:
        x = {**x, "q": x["q"].sin(), "v": 2 * x["v"]}
        o, state = chunk_gated_delta_rule(**x, output_final_state=True)
        return o.tanh(), state

    x = call(dtype=torch.float32, activations=True)
    eager, traced = leaves(x), leaves(x)
    want, got = layer(eager), torch.compile(layer, fullgraph=True)(traced)
    got_grads, want_grads = gradients(got, traced), gradients(want, eager)
    for a, b in zip((*got, *got_grads.values()), (*want, *want_grads.values()), strict=True):
        assert_close("compiled", a.detach(), b.detach(), 1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_serves_every_shape(packed):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, dynamic=True, backend=counter)
    # no size is equal to another one by chance: heads are 2 and 4
    shapes = ([5, 60, 1, 2, 3], [64, 7, 200, 0, 0, 9], [90] * 3) if packed else (70, 128, 201)
    for batch, shape in enumerate(shapes, 3):
        x = call(shape) if packed else call(batch=batch, tokens=shape)
        eager, traced = leaves(x), leaves(x)
        got = compiled(**traced, output_final_state=True)
        want = chunk_gated_delta_rule(**eager, output_final_state=True)
        assert torch.equal(got[0], want[0])
        assert torch.equal(gradients(got, traced)["k"], gradients(want, eager)["k"])
    assert counter.frame_count == 1
