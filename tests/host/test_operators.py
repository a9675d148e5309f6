"""Operators called directly: only where nobody would have seen them pass."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from qla_kernels import chunk_gated_delta_rule, shared_prefix_attention
from qla_kernels.dualkv import SharedLayout
from qla_kernels.runtime.op import Operator
from tests.dualkv_inputs import qkv
from tests.gdn_calls import call, gradients, leaves

taken = Operator.__new__(Operator)
taken._records, taken._results, taken._operator = False, None, lambda *_: "operator"
taken.on_cuda, taken.on_cpu = lambda *_: "cuda", lambda *_: "cpu"


class Subclass(Tensor):
    pass


heard = []  # by wrappers


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
        heard.append(func)
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_plain_tensors_take_the_short_way():
    assert taken(torch.zeros(1)) == taken(torch.nn.Parameter(torch.zeros(1))) == "cpu"


@pytest.mark.parametrize("x", [torch.zeros(1, device="meta"), Subclass([0.0])])
def test_other_tensors_do_not(x):
    assert taken(x) == "operator"


@pytest.mark.parametrize("x", [Subclass([0.0]), 1j], ids=["tensor", "number"])
def test_others_behind_the_first_do_not(x):
    """A gate that is a DTensor had gone past the dispatcher beside plain queries."""
    plain = torch.zeros(1)
    assert taken(plain, None, 0.5, [plain], plain) == "cpu"
    assert taken(plain, None, x) == "operator"


@pytest.mark.parametrize("name", ["g", "beta", "A_log", "cu_seqlens"])
def test_a_subclass_hears_of_operators_whatever_it_is_passed_as(name):
    heard.clear()
    x = call([30, 40], activations=True)
    want = chunk_gated_delta_rule(**x)[0]
    assert torch.equal(chunk_gated_delta_rule(**{**x, name: Wrapper(x[name])})[0], want)
    assert torch.ops.qla_kernels.gdn_fwd.default in heard


def test_nor_do_calls_that_are_watched():
    ways = []

    def watched(x: Tensor) -> Tensor:
        ways.append(taken(x))
        return x + 1

    torch.vmap(watched)(torch.zeros(2))
    torch.jit.trace(watched, torch.zeros(1), check_trace=False)
    with Watcher():
        watched(torch.zeros(1))
    assert set(ways) == {"operator"}
    assert torch.compile(lambda x: x + len(taken(x)), backend="eager")(torch.zeros(1)) == 8


def test_families_take_it_forward_and_backward():
    x = leaves({**call(), "use_qk_l2norm_in_kernel": True})
    tensors = [t.requires_grad_() for t in qkv(9)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as eager:
        gradients(chunk_gated_delta_rule(**x, output_final_state=True), x)
        layout = SharedLayout.from_lengths([(5, [4])])
        shared_prefix_attention(*tensors, layout).sum().backward()
    assert not [event.name for event in eager.events() if event.name.startswith("qla_kernels::")]
