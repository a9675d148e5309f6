"""SGLang's gated delta nets on our kernels: an entry point of sglang.srt.plugins.

    python -m sglang.launch_server --linear-attn-decode-backend qla \\
        --linear-attn-prefill-backend qla ...

`register` adds the choice `qla` to --linear-attn-backend and to its variants for prefill and
decode. GDNKernelDispatcher then uses our kernel where it was chosen. Verification of drafts uses
our kernel if decoding does, because the choices of --linear-attn-verify-backend are fixed before
plug-ins load. With --linear-attn-backend qla SGLang disables extra_buffer, a strategy of its prefix
cache.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn import (
    fused_recurrent_gated_delta_rule,
    packed_decode_gated_delta_rule,
    prefill_gated_delta_rule,
    verify_gated_delta_rule,
)
from qla_kernels.integrations.engines import log, refused_layer, say_ran, unknown_version
from qla_kernels.runtime.arguments import switched_on
from qla_kernels.runtime.errors import Unsupported, need

CHOICE = "qla"
LINEAR = "sglang.srt.layers.attention.linear"
DISPATCHER = f"{LINEAR}.gdn_backend.GDNKernelDispatcher.__init__"
BACKEND = f"{LINEAR}.gdn_backend.GDNAttnBackend.__init__"
# docs/lessons.md says why
NOT_THE_BITS = (
    "SGLang: under QLA_BATCH_INVARIANT=1 our prefill does not depend on the rest of a batch, but "
    "decoding and drafts sum in another order, and prefill's gates are SGLang's: rollouts do not "
    "have the bits of training; our layer for vLLM has them"
)
RAW: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}


def register() -> None:
    """Adds the choice "qla" to SGLang's options for backends of linear attention.

    SGLang calls this function when it loads plug-ins. A server with --linear-attn-prefill-backend
    qla and --linear-attn-decode-backend qla then runs gated delta nets on this package's kernels.
    If SGLang is not installed, or has a version that was not tested, logs a warning and adds
    nothing.
    """
    if reason := unknown_version("sglang"):
        log.warning("%s; --linear-attn-backend %s is not available", reason, CHOICE)
        return
    from sglang.srt.arg_groups.choices import (
        LINEAR_ATTN_KERNEL_BACKEND_CHOICES,
        add_linear_attn_kernel_backend_choices,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if CHOICE not in LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        add_linear_attn_kernel_backend_choices([CHOICE])
        HookRegistry.register(DISPATCHER, take_over, HookType.AROUND)
        HookRegistry.register(BACKEND, start, HookType.AROUND)


def take_over(
    construct: Callable[..., None],
    dispatcher: Any,
    decode_backend: Any,
    prefill_backend: Any,
    verify_backend: Any = None,
) -> None:
    """Constructs SGLang's GDNKernelDispatcher, with this package's kernels if flags say "qla".

    SGLang calls this hook in place of the dispatcher's constructor. A dispatcher has one kernel
    each for decoding, prefill and verification of drafts. A kernel is replaced if its flag, such as
    --linear-attn-decode-backend, is "qla"; that of verification also if its flag is not set and the
    kernel of decoding is replaced.

    Args:
        construct: the original constructor.
        dispatcher: the object to construct.
        decode_backend, prefill_backend, verify_backend: the backends that SGLang chose for the
            three kernels. They say only whether a backend is SGLang's own, so flags are read as
            well.
    """
    from sglang.srt.runtime_context import get_exec

    flags = get_exec().mamba
    every = flags.linear_attn_backend
    decode = (flags.linear_attn_decode_backend or every) == CHOICE
    prefill = prefill_backend.is_custom() and (
        (flags.linear_attn_prefill_backend or every) == CHOICE
    )
    verify = (flags.linear_attn_verify_backend or (CHOICE if decode else "")) == CHOICE
    triton = type(decode_backend)("triton")
    construct(
        dispatcher,
        triton if decode else decode_backend,
        triton if prefill else prefill_backend,
        triton if verify else verify_backend,
    )
    if not (decode or prefill or verify):
        return
    kernel = kernel_class()()
    if decode:
        dispatcher.decode_kernel, dispatcher.supports_packed_decode = kernel, True
    if prefill:
        dispatcher.extend_kernel = kernel
    if verify:
        dispatcher.verify_kernel = dispatcher.tree_verify_kernel = kernel
        dispatcher.verify_kernel_is_flashinfer = False
    parts = {"decode": decode, "prefill": prefill, "verification of drafts": verify}
    ours = ", ".join(name for name, is_ours in parts.items() if is_ours)
    log.info("SGLang: the gated delta rule runs on qla_kernels: %s", ours)
    if switched_on("QLA_BATCH_INVARIANT"):
        log.warning("%s", NOT_THE_BITS)


def start(construct: Callable[..., None], backend: Any, model_runner: Any) -> None:
    """Constructs SGLang's GDNAttnBackend, and checks that this package's kernels can run it.

    SGLang calls this hook in place of the backend's constructor, when a server starts.

    Args:
        construct: the original constructor.
        backend: the object to construct.
        model_runner: SGLang's object that has the model's dtype and the pool of states.

    Raises:
        Unsupported: this package's kernels were chosen for prefill or decoding, but cannot run the
            layers' head sizes or dtypes.
    """
    construct(backend, model_runner)
    ours, kernels = kernel_class(), backend.kernel_dispatcher
    prefill = isinstance(kernels.extend_kernel, ours)
    if prefill or isinstance(kernels.decode_kernel, ours):
        states = model_runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
        sizes = states.shape[-1], states.shape[-2]
        if reason := refused_layer(*sizes, model_runner.dtype, states.dtype, prefill=prefill):
            raise Unsupported(reason)


@functools.cache
def kernel_class() -> type:
    """Returns our subclass of SGLang's LinearAttnKernelBase; imports SGLang."""
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

    return kernel_on(LinearAttnKernelBase)


def kernel_on(base: Any) -> type:
    """Returns a subclass of SGLang's LinearAttnKernelBase that calls this package's kernels.

    `base` is that class. The subclass has methods for decoding, prefill and verification of drafts.
    """

    class QlaGDNKernel(base):  # type: ignore[misc]
        """Runs decoding, prefill and verification of drafts on our kernels.

        States are in a pool [slots, HV, V, K], which calls update in place; index -1 is padding.
        """

        supports_packed_decode = True
        supports_strided_target_verify_qkv = True
        supports_track_state_snapshot = True

        def packed_decode(
            self,
            mixed_qkv: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            A_log: Tensor,
            dt_bias: Tensor,
            scale: float,
            ssm_states: Tensor,
            cache_indices: Tensor,
            num_v_heads: int,
            head_v_dim: int,
            **kwargs: Any,
        ) -> Tensor:
            _refuse_replay(kwargs)
            tensors = mixed_qkv, a, b, A_log, dt_bias, ssm_states, cache_indices
            o = packed_decode_gated_delta_rule(*tensors, scale=scale)
            say_ran("SGLang", "decode", o.device)
            return o.transpose(0, 1)

        def decode(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            A_log: Tensor,
            dt_bias: Tensor,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            **kwargs: Any,
        ) -> Tensor:
            o, _ = fused_recurrent_gated_delta_rule(
                q,
                k,
                v,
                _row(a),
                beta=_row(b),
                initial_state=ssm_states,
                A_log=A_log,
                dt_bias=dt_bias,
                cu_seqlens=query_start_loc,
                state_indices=cache_indices,
                **RAW,
            )
            say_ran("SGLang", "decode", o.device)
            return o

        def extend(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor,
            *,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            output: Tensor | None = None,
            track_state: Tensor | None = None,
            track_chunk_idx: Tensor | None = None,
            inplace_update: bool = True,
            **kwargs: Any,
        ) -> tuple[Tensor, None, None]:
            if not inplace_update:
                _refuse("scoring of several items", "--linear-attn-prefill-backend triton")
            o = prefill_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                ssm_states,
                cache_indices,
                cu_seqlens=query_start_loc,
                checkpoints=track_state,
                first_checkpoints=track_chunk_idx,
                use_qk_l2norm_in_kernel=True,
                state_v_first=True,
                out=output,
            )
            say_ran("SGLang", "prefill", o.device)
            return o, None, None

        def target_verify(
            self,
            A_log: Tensor,
            dt_bias: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            a: Tensor,
            b: Tensor,
            *,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            intermediate_states_buffer: Tensor,
            intermediate_state_indices: Tensor,
            cache_steps: int,
            retrieve_parent_token: Tensor | None,
            **kwargs: Any,
        ) -> Tensor:
            count = query_start_loc.shape[0] - 1
            parents = retrieve_parent_token
            o = verify_gated_delta_rule(
                q,
                k,
                v,
                _row(a),
                _row(b),
                ssm_states,
                cache_indices[:count],
                checkpoints=intermediate_states_buffer,
                checkpoint_indices=intermediate_state_indices[:count],
                parents=None if parents is None else parents[:count],
                A_log=A_log,
                dt_bias=dt_bias,
                cu_seqlens=query_start_loc,
                **RAW,
            )
            say_ran("SGLang", "verification of drafts", o.device)
            return o

    return QlaGDNKernel


def _row(x: Tensor) -> Tensor:
    """Returns gates [T, HV], or [1, T, HV], as [1, T, HV]."""
    return x if x.dim() == 3 else torch.unsqueeze(x, 0)


def _refuse_replay(kwargs: dict[str, Any]) -> None:
    """Raises Unsupported if the keywords of a call belong to --enable-linear-replayssm."""
    if any(x is not None for name, x in kwargs.items() if name.startswith("replayssm_")):
        _refuse("--enable-linear-replayssm", "--linear-attn-decode-backend triton")


def _refuse(what: str, fix: str) -> None:
    """Raises Unsupported: SGLang asked for `what`, and the option `fix` avoids that."""
    raise Unsupported(need("qla_kernels", what, "states in the pool alone", f"pass {fix}"))
