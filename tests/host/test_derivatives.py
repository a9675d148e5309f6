"""Refusals of forward mode and of second derivatives, on a function that is its own operator."""

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jvp, vmap
from torch.utils.checkpoint import checkpoint

from qla_kernels.runtime.derivatives import refuse_forward_mode, refuse_second_derivative
from qla_kernels.runtime.errors import Unsupported

X = torch.tensor([0.5, -1.0, 2.0])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @refuse_second_derivative("cube")
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dy


def cube(x: torch.Tensor) -> torch.Tensor:
    return Cube.apply(x)


def looked_at(x: torch.Tensor) -> torch.Tensor:
    refuse_forward_mode("op", 3, None, x)
    return x**2


def leaf() -> torch.Tensor:
    return X.clone().requires_grad_()


def test_first_derivatives_are_the_formulas():
    x = leaf()
    for create_graph in (False, True):
        (dx,) = torch.autograd.grad(cube(x).sum(), x, create_graph=create_graph)
        assert torch.equal(dx, 3 * X**2)
        assert dx.requires_grad == create_graph


@pytest.mark.parametrize("incoming", ["constant", "needs a gradient"])
def test_second_derivatives_raise(incoming: str):
    x = leaf()
    y = cube(x).sum() if incoming == "constant" else cube(x).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(Unsupported, match="cube: a derivative of its gradients"):
        (y + dx.square().sum()).backward()


def test_hessian_raises():
    with pytest.raises(Unsupported, match="cube"):
        torch.autograd.functional.hessian(lambda x: cube(x).sum(), X)


def test_gradients_of_other_layers_stay_differentiable():
    """A penalty that passes by: the function is differentiated once, however often the rest is."""
    x, w = leaf(), leaf()
    y = cube(x) * w**2
    (dw,) = torch.autograd.grad(y.sum(), w, create_graph=True)  # 2 w x^3
    dw.sum().backward()
    assert torch.allclose(x.grad, 6 * X * X**2)
    assert torch.allclose(w.grad, 2 * X**3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool):
    x = leaf()
    checkpoint(cube, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, 3 * X**2)


def test_checkpointing_with_a_graph_of_gradients():
    """Saved tensors are handed out once."""
    x = leaf()
    y = checkpoint(cube, x, use_reentrant=False).sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(Unsupported, match="cube"):
        dx.sum().backward()


def test_compiled():
    x = leaf()
    y = torch.compile(cube, backend="aot_eager", fullgraph=True)(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(dx, 3 * X**2)
    with pytest.raises(RuntimeError, match="double backward"):
        dx.sum().backward()


def test_a_backward_again_over_a_kept_graph():
    x = leaf()
    y = cube(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert torch.equal(x.grad, 6 * X**2)


def dual(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return looked_at(forward_ad.make_dual(x, x))


def with_a_tangent_from_outside(x: torch.Tensor) -> torch.Tensor:
    return jvp(lambda y: looked_at(x) * y, (X,), (X,))[1]


TANGENTS = {
    "forward_ad": dual,
    "jvp": lambda x: jvp(looked_at, (x,), (x,)),
    "vmap of jvp": vmap(lambda x: jvp(looked_at, (x,), (x,))),
    "jvp of vmap": lambda x: jvp(vmap(looked_at), (x,), (x,)),
    "jacfwd": jacfwd(looked_at),
    "hessian": hessian(lambda x: looked_at(x).sum()),
    "jvp around a jvp": lambda x: jvp(with_a_tangent_from_outside, (x,), (x,)),
}


@pytest.mark.parametrize("name", TANGENTS)
def test_a_tangent_raises(name: str):
    with pytest.raises(Unsupported, match="op: an input has a forward-mode tangent"):
        TANGENTS[name](X)


def constant_under_jvp(x: torch.Tensor) -> torch.Tensor:
    return jvp(lambda y: looked_at(x) * y, (X,), (X,))[0]


def constant_in_a_level(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return looked_at(x) * X


@pytest.mark.parametrize("run", [constant_under_jvp, constant_in_a_level])
def test_a_constant_beside_tangents_passes(run: Any):
    assert torch.equal(run(X), X**3)


@pytest.mark.parametrize("transform", [vmap, functionalize, lambda f: grad(lambda x: f(x).sum())])
def test_transforms_without_tangents_pass(transform: Any):
    transform(looked_at)(X)
