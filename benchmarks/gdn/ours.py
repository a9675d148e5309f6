"""The gated delta rule by us, and by us with a choice undone; and one direction as one call."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import qla_kernels
from qla_kernels.gdn import GdnPool
from qla_kernels.runtime import varlen

from ..harness.adapters import Call, Implementation, Outputs
from .problem import GdnInputs, gradients
from .workloads import KERNELS, Gdn, Sequences

Public = Callable[[], Callable[[], Any]]  # makes a call of the public function


def through_autograd(
    function: Callable[..., Any], workload: Gdn, inputs: GdnInputs, training: bool = False,
    **options: Any,
) -> Callable[[], Any]:  # fmt: skip
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
    workload: Gdn, forward: Callable[[bool], Any], backward: Callable[[Any], Any],
    outputs: Callable[[Any], Outputs], public: Public, training: bool = False,
) -> Call:  # fmt: skip
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
    ops: Any, workload: Gdn, inputs: GdnInputs, public: Public, options: dict[str, Any],
    training: bool = False, keeps: bool | None = False,
) -> Call:  # fmt: skip
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

    def outputs(raw: Any) -> Outputs:
        return {"o": raw[2], "ht": raw[4]}

    return low_level(workload, forward, backward, outputs, public, training)


def _batch(inputs: GdnInputs, count: int) -> list[Tensor]:
    """q, k, v, g and beta of `count` equally long sequences, as a server has them."""
    return [torch.unflatten(x[0], 0, (count, -1)) for x in inputs[:5]]


def decoding(module: str, workload: Gdn, inputs: GdnInputs) -> Call:
    """`module`'s token-by-token function; FLA's signature."""
    function, packed = importlib.import_module(module), inputs.v.shape
    q, k, v, g, beta = _batch(inputs, len(workload.lengths))
    run = partial(
        function.fused_recurrent_gated_delta_rule, q, k, v, g, beta=beta,
        scale=workload.head_dim**-0.5, initial_state=inputs.initial_state, output_final_state=True,
    )  # fmt: skip
    return Call.public(run, lambda raw: {"o": raw[0].view(packed), "ht": raw[1]})


def pool_decoding(workload: Gdn, inputs: GdnInputs) -> Call:
    """A step of a GdnPool on the same batch; `initial_state` is what the tails leave.

    Sequence n has a tail of n % 64 tokens that change no state, and each call takes its tokens
    back, so that every call does the same work: that of the mean tail, without the chunk in 64 that
    goes into an anchor.
    """
    batch, packed, h0 = len(workload.lengths), inputs.v.shape, inputs.initial_state
    q, k, v, g, beta = _batch(inputs, batch)
    sizes = q.shape[2], v.shape[2], q.shape[3], v.shape[3]
    pool, slots = GdnPool(batch, *sizes, q.dtype, q.device), torch.arange(batch, device=q.device)
    if h0 is not None:
        pool.tensors.anchors[:batch] = h0
    pool.lengths.copy_(slots % 64)
    tokens = torch.full_like(slots, q.shape[1])

    def run() -> Any:
        o = pool.decode(q, k, v, g, beta, slots, scale=workload.head_dim**-0.5)
        pool.reject(slots, tokens)
        return o

    return Call.public(run, lambda o: {"o": o.view(packed)})


def on_host(packed: GdnInputs | Sequences) -> Tensor:
    """cu_seqlens, as a caller knows them who packed the sequences."""
    return torch.tensor([0, *packed.lengths]).cumsum(0)


class Ours(Implementation):
    """The low-level calls on CUDA tensors, the public functions on CPU tensors."""

    name, label, module, distribution = "ours", "ours", "qla_kernels", "qla-kernels"
    needs_cuda = training = False
    keeps: bool | None = None  # segments, from a forward for its backward; None: as by default
    choices: dict[str, Any] | None = None  # of the low-level functions
    keywords: dict[str, Any] | None = None  # the same, of the public function

    def prepare(self, workload: Gdn, inputs: GdnInputs) -> Call:
        if workload.kernel:
            return self._kernel(workload, inputs)
        if workload.decode:
            return decoding(self.module, workload, inputs)
        if inputs.q.is_cuda:
            return self._low_level(workload, inputs)
        return Call(self._public(workload, inputs), from_autograd(workload))

    def _public(self, workload: Gdn, inputs: GdnInputs) -> Callable[[], Any]:
        options: dict[str, Any] = {"cu_seqlens_cpu": on_host(inputs), **(self.keywords or {})}
        if self.keeps is not None:
            options["enable_fwd_cp_cache"] = self.keeps
        return through_autograd(
            qla_kernels.chunk_gated_delta_rule, workload, inputs, self.training,
            cu_seqlens=inputs.cu_seqlens, **options,
        )  # fmt: skip

    def _low_level(self, workload: Gdn, inputs: GdnInputs) -> Call:
        public = partial(self._public, workload, inputs)
        options = {"cu_seqlens_cpu": on_host(inputs), **(self.choices or {})}
        call = qla_kernels, workload, inputs, public, options, self.training, self.keeps
        return two_functions(*call)

    def _kernel(self, workload: Gdn, inputs: GdnInputs) -> Call:
        launch = importlib.import_module("qla_kernels.gdn.launch.forward")  # needs TileLang
        cu, beta = inputs.cu_seqlens, inputs.beta.float()
        table = varlen.chunk_table(workload.tokens, cu, batch=1, device=cu.device)
        run = partial(getattr(launch, workload.kernel), inputs.k, inputs.g, beta, cu, table)
        return Call(run, lambda raw: {"g_cum": raw[0], "A": raw[1]})


def only(why: str, *kinds: str) -> dict[str, str]:
    """The `lacks` of what has a call for these kinds of rows alone."""
    every = (*KERNELS, "fwd", "bwd", "both", "decode")
    return {kind: why for kind in every if kind not in kinds}


def ours() -> list[Implementation]:
    """Ours, as it trains (peers always write gamma and A), and with a choice undone."""

    def undone(name: str, label: str, lacks: dict[str, str], **choice: Any) -> Implementation:
        more = {"needs_cuda": True, "on_request": True, "lacks": lacks, **choice}
        return Ours(name=f"ours_{name}", label=f"ours, {label}", **more)

    train = undone("train", "training", only("the same as ours", "fwd"), training=True)
    train.on_request = False
    uncut = only("nothing would be cut", "fwd", "bwd")
    exact, kept = {"exact": True}, only("a forward has none to take", "bwd")
    whole = {"choices": {"auto_cp": False}, "keywords": {"batch_invariant": True}}
    return [
        Ours(), train,
        undone("whole", "uncut", uncut, **whole),
        undone("exact", "exact", uncut, choices=exact, keywords=exact),
        undone("kept", "segments kept", kept, keeps=True),
        undone("alone", "nothing kept", kept, keeps=False),
        # with the chunked form's bits; a pool returns no states
        undone("pool", "pool", only("only decodes", "decode"), needs_cuda=False,
               leaves_out=("ht",), prepare=pool_decoding),
    ]  # fmt: skip
