"""The operators: schemas that hold, fakes that tell the truth, results that torch can keep."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from qla_kernels import chunk_gated_delta_rule, gdn
from qla_kernels.gdn import ops
from qla_kernels.gdn.call import Incoming, SavedForward
from qla_kernels.runtime.cpu import reference
from tests.gdn_calls import Call, call, gradients, leaves, records

OPERATORS: Any = torch.ops.qla_kernels
TRAIN = {"output_final_state": True, "is_train": True}


def forward_arguments(x: Call, **options: bool) -> tuple[Any, ...]:
    """Records of gdn_fwd, for a call."""
    return records(x, scale=0.25, **{**TRAIN, **options})


def backward_arguments(x: Call, **options: bool) -> tuple[Any, ...]:
    """Records of gdn_bwd, for a call."""
    given, flags = forward_arguments(x, **options)
    done = ops.gdn_fwd(given, flags)
    incoming = Incoming(torch.randn_like(done.o), torch.randn_like(done.final_state))
    return given, SavedForward(done.g_cum, done.A, done.cp_cache), incoming, flags


def fields(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(itertools.chain(*given))


CALLS = {
    "dense": {},
    "bf16, packed, activated": {
        "lengths": [65, 0, 3],
        "dtype": torch.bfloat16,
        "gates": torch.float32,
        "activations": True,
        "allow_neg_eigval": True,
    },
    "fp32, V first, bf16 gates": {
        "dtype": torch.float32,
        "gates": torch.bfloat16,
        "state_v_first": True,
    },
    "no tokens": {"tokens": 0},
}


@pytest.mark.parametrize("kind", CALLS)
def test_opcheck_gdn(kind):
    """Schema, shapes and strides of the fakes, and tracing with symbolic shapes."""
    x = call(**CALLS[kind])
    torch.library.opcheck(OPERATORS.gdn_fwd.default, fields(forward_arguments(x)))
    torch.library.opcheck(OPERATORS.gdn_bwd.default, fields(backward_arguments(x)))


def test_opcheck_gdn_with_absent_results():
    x = call(dtype=torch.float16)
    del x["initial_state"]
    only_o = {"output_final_state": False, "is_train": False}
    torch.library.opcheck(OPERATORS.gdn_fwd.default, fields(forward_arguments(x, **only_o)))
    torch.library.opcheck(OPERATORS.gdn_bwd.default, fields(backward_arguments(x)))


@pytest.mark.parametrize("lengths", [None, [65, 3]])
def test_opcheck_gdn_with_chunk_states(lengths):
    """How many chunks a packed batch has is known only when the operator runs."""
    torch.library.opcheck(
        OPERATORS.gdn_fwd.default, fields(forward_arguments(call(lengths), output_h=True))
    )


def test_opcheck_gdn_with_a_cache():
    """What is kept of segments, and whether there are any, is known only when it runs."""
    x = call(dtype=torch.bfloat16)
    torch.library.opcheck(
        OPERATORS.gdn_fwd.default, fields(forward_arguments(x, enable_fwd_cp_cache=True))
    )
    torch.library.opcheck(
        OPERATORS.gdn_bwd.default, fields(backward_arguments(x, enable_fwd_cp_cache=True))
    )


def test_opcheck_l2norm():
    fused = torch.randn(2, 70, 6, 16, dtype=torch.bfloat16)
    x = fused[:, :, 2:4]
    torch.library.opcheck(OPERATORS.l2norm_fwd.default, (x,))
    torch.library.opcheck(OPERATORS.l2norm_bwd.default, (x, torch.randn_like(x), None))
    packed = (x[:1], torch.randn_like(x[:1]), torch.tensor([0, 3, 60]))
    torch.library.opcheck(OPERATORS.l2norm_bwd.default, packed)


def test_absent_results_are_none():
    done = ops.gdn_fwd(*forward_arguments(call(), output_final_state=False, is_train=False))
    assert [name for name, x in done._asdict().items() if isinstance(x, Tensor)] == ["o"]


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_no_result_shares_memory_with_an_argument(tokens, state_v_first):
    x = call(tokens=tokens, state_v_first=state_v_first)
    for op, given in (
        (ops.gdn_fwd, forward_arguments(x, output_h=True)),
        (ops.gdn_bwd, backward_arguments(x)),
    ):
        taken = {
            a.untyped_storage().data_ptr()
            for a in fields(given)
            if isinstance(a, Tensor) and a.numel()
        }
        for result in op(*given):
            if isinstance(result, Tensor) and result.numel():
                assert result.untyped_storage().data_ptr() not in taken
                assert result.is_contiguous()


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_whoever_looks_at_operators_sees_them():
    """Eager calls do without the dispatcher; a mode, a tracer and vmap meet the operator."""
    x = call(activations=True)
    x = {**x, "use_qk_l2norm_in_kernel": True}
    want = chunk_gated_delta_rule(**x)[0]
    with Seen() as seen:
        assert torch.equal(chunk_gated_delta_rule(**x)[0], want)
    assert OPERATORS.gdn_fwd.default in seen.ops
    assert seen.ops.count(OPERATORS.l2norm_fwd.default) == 2
    traced = make_fx(lambda q: chunk_gated_delta_rule(**{**x, "q": q})[0])(x["q"])
    assert OPERATORS.gdn_fwd.default in {node.target for node in traced.graph.nodes}
    both = torch.stack([x["q"], -x["q"]])  # vmap falls back to one call each
    assert torch.equal(torch.vmap(ops.l2norm_fwd)(both), torch.stack([*map(ops.l2norm_fwd, both)]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as eager:
        assert torch.equal(chunk_gated_delta_rule(**x)[0], want)
    assert "qla_kernels::gdn_fwd" not in {event.name for event in eager.events()}


def test_meta_tensors_give_shapes():
    x = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in call().items()}
    o, state = chunk_gated_delta_rule(**x, output_final_state=True)
    assert o.is_meta
    assert state.shape == x["initial_state"].shape


# Activation checkpointing.


class Count:
    """How often the forward ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self.chunked = reference().gdn.chunked
        monkeypatch.setattr(reference().gdn, "chunked", self)

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        return self.chunked(*args)


def layer(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
    """A block with work around the operator, so that there is something to recompute."""
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    flags = dict.fromkeys(
        ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True
    )
    x = dict(zip(names, tensors, strict=True), q=tensors[0].sin())
    o, state = chunk_gated_delta_rule(**x, **flags, output_final_state=True)
    return o.tanh(), state


def keep_operator(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op is torch.ops.qla_kernels.gdn_fwd.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("selective", "runs"), [(True, 1), (False, 2)])
def test_checkpointing_by_operator_name_runs_the_forward_once(monkeypatch, selective, runs):
    x = leaves(call(activations=True))
    tensors = [x[n] for n in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")]
    want = gradients(layer(*tensors), x)
    count = Count(monkeypatch)
    context = functools.partial(create_selective_checkpoint_contexts, keep_operator)
    kept = {"context_fn": context} if selective else {}
    got = gradients(checkpoint(layer, *tensors, use_reentrant=False, **kept), x)
    assert count.runs == runs
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_gdn_is_reachable_by_family_name():
    assert gdn.chunk_gated_delta_rule is chunk_gated_delta_rule
