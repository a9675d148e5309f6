"""Functions that gated-delta-net layers of Hugging Face transformers call after `swap`.

Batches that store shared prompts once are calls of the model with `shared_prefix=batch.layout`. The
layout says which tokens form which sequence, and convolution and gated delta rule follow it: each
response continues from the end of its prompt. Other calls use our convolution if it can run them.

`swap` of transformers.py makes layers call the functions of this file, in one of two ways:

- Since transformers 5.15, a layer calls functions of its Python module and passes them all keywords
  of the model's call. `swap` replaces the functions of the module.
- Until 5.14, a layer calls functions that are its own attributes, and passes at most two of these
  keywords. `swap` replaces the attributes by a `Held` and a `HeldConvolution`. These get the layout
  from a `PackedCall`, which two hooks of the surrounding decoder layer fill. In these releases
  activation checkpointing recomputes a decoder layer together with its hooks.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.functional import silu

from qla_kernels.conv import causal_conv1d, refusal
from qla_kernels.conv.validate import ACTIVATIONS, by_tokens, flattens
from qla_kernels.dualkv import SharedLayout
from qla_kernels.hybrid import shared_prefix_conv1d, shared_prefix_gated_delta_rule
from qla_kernels.runtime.errors import Unsupported, need

KEY = "shared_prefix"
OP = "shared_prefix in a gated-delta-net layer"
PACK = "a packed batch in a gated-delta-net layer"


def rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: SharedLayout,
) -> tuple[Tensor, None]:
    """Runs a transformers layer's gated delta rule over a batch that stores shared prompts once.

    After `integrations.transformers.swap`, layers call it in place of their own function.

    Args:
        q, k: [1, T, H, K] packed tokens.
        v: [1, T, HV, V].
        g, beta: [1, T, HV], natural log of each token's decay, and step size.
        scale: factor of q; K ** -0.5 if None.
        initial_state, output_final_state, cu_seqlens: must be left at their defaults.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norm first.
        layout: which tokens form which sequence, from a `SharedBatch`.

    Returns:
        (o [1, T, HV, V], None). Layers expect a second result, the final state.

    Raises:
        ValueError: a batch of several rows, a cache (states are passed or asked for), or
            cu_seqlens.
    """
    check_row(q.shape[0], q.shape[1], layout)
    if initial_state is not None or output_final_state:
        raise ValueError(need(OP, "a cache of states", "none", "pass use_cache=False"))
    _check_alone("cu_seq_lens_q", cu_seqlens)
    o, _ = shared_prefix_gated_delta_rule(
        q, k, v, g, beta, layout, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
    return o, None


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    shared_prefix: SharedLayout,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Runs a transformers layer's convolution over a batch that stores shared prompts once.

    Args:
        x: [1, C, T]; the result has the same shape.
        weight, bias, activation: [C, W], [C] or None, and None, "silu" or "swish".
        shared_prefix: which tokens form which sequence: the `layout` of a `SharedBatch`.
        seq_idx: transformers' number of each token's sequence; must be None.

    Raises:
        ValueError: a batch of several rows, another number of tokens than the layout has, or
            seq_idx.
    """
    check_row(x.shape[0], x.shape[2], shared_prefix)
    _check_alone("seq_idx", seq_idx)
    weight = weight.to(x.dtype)  # under autocast weights are fp32, and x is not
    bias = None if bias is None else bias.to(x.dtype)
    return shared_prefix_conv1d(x, weight, bias, shared_prefix, activation)


def of_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Runs the causal convolution of a transformers layer by `causal_conv1d`, or returns None.

    None means that the layer must run its own convolution: `causal_conv1d` refuses the call, or
    sequences are packed and only seq_idx says how, from which finding bounds would wait for the
    GPU.

    Args:
        x: [B, C, T]; each row is a sequence, unless cu_seq_lens_q is passed. The result has the
            same shape, and its channels are adjacent in memory.
        weight, bias, activation: [C, W], [C] or None, and None, "silu" or "swish".
        seq_idx: number of each token's sequence, or None.
        cu_seq_lens_q: [N + 1], bounds of N sequences that are packed in one row, or None.
    """
    is_packed = seq_idx is not None or cu_seq_lens_q is not None
    if activation not in ACTIVATIONS or (is_packed and (cu_seq_lens_q is None or x.shape[0] != 1)):
        return None
    rows = by_tokens(x)
    if rows.stride(2) != 1 or not flattens(rows):
        x = rows.contiguous().mT
    if refusal(x, weight, bias) is not None:
        return None
    return causal_conv1d(x, weight, bias, activation, cu_seq_lens_q)


def check_apart(
    x: Tensor,
    weight: Tensor,
    activation: str | None,
    seq_idx: Tensor | None,
    bounds: Tensor | None,
    follows: bool,
) -> None:
    """Raises Unsupported if a transformers layer's own convolution would mix packed sequences.

    Called before a layer runs its own convolution, because `of_rows` has returned None.

    Args:
        x, weight, activation: the arguments of the convolution.
        seq_idx: the number of each token's sequence, or None.
        bounds: the bounds of the sequences, or None. If both are None, nothing is packed.
        follows: True if the layer's own convolution uses seq_idx to keep sequences apart.
    """
    if (seq_idx is None and bounds is None) or (follows and seq_idx is not None):
        return
    if bounds is None:
        _refuse_pack("no cu_seq_lens_q beside seq_idx")
    if x.shape[0] != 1:
        _refuse_pack(f"{x.shape[0]} rows")
    if activation not in ACTIVATIONS:
        _refuse_pack(f"activation {activation}")
    _refuse_pack(refusal(x, weight) or "a convolution that ours refuses")


def _refuse_pack(got: str) -> NoReturn:
    needs = "one row with its bounds in cu_seq_lens_q, silu or no activation, a width of 2 to 4"
    fix = "pass these, or install causal-conv1d and pass seq_idx as well"
    raise Unsupported(need(PACK, got, needs, fix))


def refuse_replica(layer: nn.Module) -> None:
    """Raises Unsupported if torch's DataParallel made this layer as a replica of another.

    DataParallel runs replicas in threads of one process, and they would overwrite each other's
    record of the current call (`PackedCall`).
    """
    if getattr(layer, "_is_replica", False):
        refuse_replicas("a swapped layer in a DataParallel")


def refuse_replicas(got: str) -> NoReturn:
    """Raises Unsupported: torch's DataParallel is not supported, DistributedDataParallel is.

    `got` is what the error says was found, such as "a swapped layer in a DataParallel".
    """
    fix = "use DistributedDataParallel, started by torchrun"
    raise Unsupported(need("a gated-delta-net layer", got, "one process for each GPU", fix))


def check_row(rows: int, tokens: int, layout: SharedLayout) -> None:
    """Raises ValueError unless a layer's input is a single row with the tokens of a layout.

    Args:
        rows, tokens: the sizes of the input [rows, tokens, ..].
        layout: the layout of a `SharedBatch`, whose packed tokens are one row.
    """
    if rows != 1:
        fix = "pack them, and pass batch.input_ids[None]"
        raise ValueError(need(OP, f"a batch of {rows} rows", "one packed row", fix))
    if tokens != layout.num_tokens:
        got, needs = f"{tokens} tokens", f"the {layout.num_tokens} of the layout"
        raise ValueError(need(OP, got, needs, "pass batch.input_ids[None] and use_cache=False"))


def _check_alone(name: str, tensor: Tensor | None) -> None:
    if tensor is not None:
        fix = "leave it out: the layout says where sequences begin"
        raise ValueError(need(OP, f"{name} beside {KEY}", "one of the two", fix))


class PackedCall:
    """Holds which sequences the current call of a gated-delta-net layer has.

    Two forward hooks on the decoder layer around it, installed by `watch`, keep this up to date:
    one stores the keywords of each call, and one removes them afterwards, also after an error. The
    functions that replace the layer's convolution and gated delta rule read them here, because
    until transformers 5.14 a layer does not hand them on. The second hook raises Unsupported if the
    layout was not read twice, once by each function: something may have replaced the layer's
    forward by one that calls other functions.

    Attributes:
        mixes: True if the layer's convolution cannot keep packed sequences apart; calls with bounds
            or seq_idx then raise Unsupported.
        layout: the layout of a batch with shared prompts, or None.
        bounds: the bounds of packed sequences, or None.
        seq_idx: the number of each token's sequence, or None.
        asked: how often the layout was read in the current call.
        hooks: handles of the two hooks.
    """

    def __init__(self, mixes: bool) -> None:
        self.mixes = mixes
        self.layout: SharedLayout | None = None
        self.bounds: Tensor | None = None
        self.seq_idx: Tensor | None = None
        self.asked = 0
        self.hooks: tuple[Any, ...] = ()

    def watch(self, decoder_layer: nn.Module) -> None:
        """Installs the hooks on a decoder layer that store and remove the sequences of a call."""
        begin = decoder_layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        end = decoder_layer.register_forward_hook(self._end, always_call=True)
        self.hooks = begin, end

    def forget(self) -> None:
        """Removes the hooks that `watch` installed."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = ()

    def ask(self) -> SharedLayout | None:
        """Returns the layout of the current call, or None; counts how often it was read."""
        self.asked += 1
        return self.layout

    def _begin(self, layer: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        refuse_replica(layer)
        self.layout, self.asked = kwargs.get(KEY), 0
        self.bounds, self.seq_idx = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
        if self.mixes and (self.bounds is not None or self.seq_idx is not None):
            _refuse_pack("a layer whose convolution is not told where sequences begin")

    def _end(self, _: nn.Module, __: Any, result: Any) -> None:
        ignored = self.layout is not None and result is not None and self.asked < 2
        self.layout = self.bounds = self.seq_idx = None
        if ignored:
            got = "a layer that calls other functions than those which swap() replaced"
            raise Unsupported(need(OP, got, "transformers' own forward", "do not exchange it"))


class Held:
    """A callable that replaces the gated delta rule of a layer of transformers until 5.14.

    Such a layer does not tell its functions which sequences a call has. So this callable runs
    `function` with the layer's arguments, and adds the layout of shared prompts as shared_prefix,
    and the bounds of packed sequences as cu_seqlens.

    Args:
        function: the gated delta rule of this package that is to run.
        call: holds the sequences of the current call of the decoder layer.
        packs: True if `function` takes cu_seqlens.
    """

    def __init__(self, function: Callable[..., Any], call: PackedCall, packs: bool) -> None:
        self.function, self.call, self.packs = function, call, packs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.packs and kwargs.get("cu_seqlens") is None:
            kwargs["cu_seqlens"] = self.call.bounds
        return self.function(*args, shared_prefix=self.call.ask(), **kwargs)


class HeldConvolution:
    """A callable that replaces the convolution of a layer of transformers until 5.14.

    Such a layer does not tell its functions which sequences a call has; this callable takes them
    from `call`. It runs this package's kernel, or the layer's own convolution if the kernel refuses
    the call.

    Args:
        theirs: the layer's own convolution function; None if it has only conv1d.
        conv1d: the layer's nn.Conv1d, which runs refused calls if theirs is None.
        call: holds the sequences of the current call of the decoder layer.
    """

    def __init__(
        self, theirs: Callable[..., Any] | None, conv1d: nn.Module, call: PackedCall
    ) -> None:
        self.theirs, self.conv1d, self.call = theirs, conv1d, call

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        seq_idx, bounds = self.call.seq_idx if seq_idx is None else seq_idx, self.call.bounds
        others |= {"bias": bias, "activation": activation, "seq_idx": seq_idx}
        if (layout := self.call.ask()) is not None:
            return convolution(x, weight, shared_prefix=layout, **others)
        if (ours := of_rows(x, weight, cu_seq_lens_q=bounds, **others)) is not None:
            return ours
        check_apart(x, weight, activation, seq_idx, bounds, follows=self.theirs is not None)
        if self.theirs is not None:
            theirs: Tensor = self.theirs(x=x, weight=weight, **others)
            return theirs
        y: Tensor = self.conv1d(x)[:, :, : x.shape[-1]]
        return silu(y)  # as layers without such a function do
