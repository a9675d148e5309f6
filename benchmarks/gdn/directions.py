"""Forward, backward or both of the gated delta rule as one call, whatever the interface."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..harness.adapters import Call, Outputs
from .inputs import GdnInputs
from .workloads import Gdn


def gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, dbeta: Tensor, dh0: Tensor | None = None
) -> Outputs:
    found = {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta, "dh0": dh0}
    return {name: x for name, x in found.items() if x is not None}


def through_autograd(
    function: Callable[..., Any],
    workload: Gdn,
    inputs: GdnInputs,
    training: bool = False,
    **options: Any,
) -> Callable[[], Any]:
    """A public `chunk_gated_delta_rule` as a model calls it; a backward alone has run forward.

    A forward is one in inference, unless it is one of `training`.
    """
    given = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state)
    leaves = [x.detach().requires_grad_() for x in given if x is not None]
    upstream = (inputs.do, inputs.dht)

    def forward() -> Any:
        q, k, v, g, beta, *h0 = leaves
        options["initial_state"] = h0[0] if h0 else None
        return function(q, k, v, g, beta, output_final_state=True, **options)

    if workload.direction == "fwd":
        return forward if training else torch.no_grad()(forward)
    if workload.direction == "both":
        return lambda: torch.autograd.grad(forward(), leaves, upstream)
    outputs = forward()
    return lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)


def from_autograd(workload: Gdn) -> Callable[[Any], Outputs]:
    if workload.direction == "fwd":
        return lambda raw: {"o": raw[0], "ht": raw[1]}
    return lambda raw: gradients(*raw)


def low_level(
    workload: Gdn,
    forward: Callable[[bool], Any],
    backward: Callable[[Any], Any],
    outputs: Callable[[Any], Outputs],
    public: Callable[[], Callable[[], Any]],
    training: bool = False,
) -> Call:
    """`forward(save)` or `backward(saved)` as one call; a backward alone has run forward.

    Both together are a training step through autograd, with whatever a library passes on from one
    to the other there.
    """
    if workload.direction == "both":
        return Call(public(), from_autograd(workload), public)
    if workload.direction == "fwd":
        return Call(lambda: forward(training), outputs, public)

    def collect(raw: Any) -> Outputs:
        dq, dk, dv, dbeta, dg, dh0 = raw[:6]
        return gradients(dq, dk, dv, dg, dbeta, dh0)

    saved = forward(True)
    return Call(lambda: backward(saved), collect, public)


def two_functions(
    ops: Any,
    workload: Gdn,
    inputs: GdnInputs,
    public: Callable[[], Callable[[], Any]],
    options: dict[str, Any],
    training: bool = False,
    keeps: bool | None = False,
) -> Call:
    """By FlashQLA's functions of one direction, or by ours, which take and return what those do.

    `keeps`: a forward that saves keeps its segments, and the backward takes them; None leaves it to
    the library.
    """
    q, k, v, g, beta, h0, cu, *_ = inputs
    scale = workload.head_dim**-0.5

    def forward(save: bool) -> Any:
        keep = {"enable_fwd_cp_cache": keeps} if save and keeps is not False else {}
        return ops.chunk_gated_delta_rule_fwd(
            q, k, v, g, beta, scale, h0, cu, is_train=save, **keep, **options
        )

    def backward(saved: Any) -> Any:
        g_cum, A, _, _, _, cache = saved
        kept = {"cp_cache": cache} if keeps is not False else {}
        return ops.chunk_gated_delta_rule_bwd(
            q, k, v, g_cum, beta, A, inputs.do, inputs.dht, scale, h0, cu, **kept, **options
        )

    return low_level(
        workload, forward, backward, lambda raw: {"o": raw[2], "ht": raw[4]}, public, training
    )


def decoding(module: str, workload: Gdn, inputs: GdnInputs) -> Call:
    """`module`'s token-by-token function on a batch as a server has it; FLA's signature."""
    function = importlib.import_module(module).fused_recurrent_gated_delta_rule
    batch, packed = len(workload.lengths), inputs.v.shape
    q, k, v, g, beta = (torch.unflatten(x[0], 0, (batch, -1)) for x in inputs[:5])

    def run() -> Any:
        return function(
            q, k, v, g, beta=beta, scale=workload.head_dim**-0.5,
            initial_state=inputs.initial_state, output_final_state=True,
        )  # fmt: skip

    return Call(run, lambda raw: {"o": raw[0].view(packed), "ht": raw[1]}, lambda: run)


def pool_decoding(module: str, workload: Gdn, inputs: GdnInputs) -> Call:
    """A step of `module`'s GdnPool on the same batch; `initial_state` is what the tails leave.

    Sequence n has a tail of n % 64 tokens that change no state, and each call takes its tokens
    back, so that every call does the same work: that of the mean tail, without the chunk in 64 that
    goes into an anchor.
    """
    pools = importlib.import_module(f"{module}.gdn").GdnPool
    batch, packed, h0 = len(workload.lengths), inputs.v.shape, inputs.initial_state
    q, k, v, g, beta = (torch.unflatten(x[0], 0, (batch, -1)) for x in inputs[:5])
    sizes = q.shape[2], v.shape[2], q.shape[3], v.shape[3]
    pool, slots = pools(batch, *sizes, q.dtype, q.device), torch.arange(batch, device=q.device)
    if h0 is not None:
        pool.tensors.anchors[:batch] = h0
    pool.lengths.copy_(slots % 64)
    tokens = torch.full_like(slots, q.shape[1])

    def run() -> Any:
        o = pool.decode(q, k, v, g, beta, slots, scale=workload.head_dim**-0.5)
        pool.reject(slots, tokens)
        return o

    return Call(run, lambda o: {"o": o.view(packed)}, lambda: run)
