"""Checks of a call's tensors, shared by all implementations, and the refusals.

    check_*      raise ValueError if the call is malformed, on every device
    refusal      returns the text of an Unsupported if this version cannot run a well-formed call

They look at types, shapes, dtypes, strides, devices and the device's capability. contents.py looks
at the values of tensors.
"""

from typing import NamedTuple

from torch import Tensor

from qla_kernels.gdn import shapes
from qla_kernels.gdn.call import Options
from qla_kernels.gdn.shapes import (
    HEAD_SIZES,  # noqa: F401 (the doctor reads it)
    WIDE,
)
from qla_kernels.gdn.sharded.context import layout_refused
from qla_kernels.runtime import device
from qla_kernels.runtime.derivatives import wants_gradients as wants_gradients  # public here
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.signature import FLOATS, Signature, layouts
from qla_kernels.runtime.sm90 import (
    Reason,
    dtype_name,
    one_of,
    refused_device,
    refused_strides,
)

OP = "chunk_gated_delta_rule"

QKV = "q [B, T, H+, K+]; k [B, T, H, K]; v [B, T, HV+, V+]; g [B, T, HV] float"
TENSORS = f"{QKV}; beta [B, T, HV] float"
HEADS = "reshape k, or repeat or group its heads"
DENSE = layouts(
    f"{TENSORS}; initial_state [B, HV, {{K, V}}] float?",
    k=HEADS,
    initial_state="reshape it, or pass cu_seqlens if q is packed",
)
PACKED = layouts(
    TENSORS.replace("[B,", "[1,")
    + "; cu_seqlens [N + 1] int; initial_state [N, HV, {K, V}] float?",
    q="flatten the batch to [1, B * T, ...], as cu_seqlens counts tokens",
    k=HEADS,
)
ON_HOST = Signature("cu_seqlens_cpu [N + 1] int", "N")
GATE = Signature("v [B, T, HV, V]; A_log [HV] float; dt_bias [HV] float?")
ELSEWHERE = "use fla.ops.gated_delta_rule"


class Gate(NamedTuple):
    """A record: the arguments of a call that describe the gate, which computes each token's decay.

    Attributes:
        use_gate_in_kernel: True if the log of the decay is -exp(A_log) * softplus(g + dt_bias),
            where g is an argument of the call; False if it is g.
        A_log: [HV]; required with use_gate_in_kernel.
        dt_bias: [HV]; 0 if None.
    """

    use_gate_in_kernel: bool
    A_log: Tensor | None
    dt_bias: Tensor | None

    def parameters(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns (A_log, dt_bias), or (None, None) if use_gate_in_kernel is False, as in FLA."""
        return (self.A_log, self.dt_bias) if self.use_gate_in_kernel else (None, None)


def refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp_context: object | None = None,
    output_h: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    anchored: bool = False,
    capability: tuple[int, int] | None = None,
    op: str = OP,
) -> str | None:
    """Returns the reason why this version cannot run `chunk_gated_delta_rule`, or None if it can.

    The reason is an error text: what was passed, what is needed instead, and a remedy. It is the
    same with and without gradients, and does not depend on g, beta and states, which may have any
    float dtype and any strides.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        cp_context: for sequences that are split over ranks; layouts other than "contiguous" and
            "zigzag" are refused.
        output_h: True if the call returns the state before each chunk; packed sequences on a GPU
            then need cu_seqlens_cpu.
        cu_seqlens, cu_seqlens_cpu: the bounds of packed sequences, on q's device and on the CPU;
            read only with output_h.
        anchored: True for a call of `GdnPool.prefill` or `GdnPool.decode`.
        capability: None answers for the device of the tensors; (9, 0) as if they were on a GPU of
            this compute capability.
        op: the name of the function, with which the text begins.
    """
    reason = _refused_everywhere(q, k, v, cp_context)
    if reason is None:
        if q.is_cuda or capability is not None:
            capability = capability or device.capability(q.device)
            reason = _refused_on_cuda(q, k, v, capability)
            if reason is None and anchored:
                reason = _refused_wide(q)
            if reason is None and output_h:
                reason = _uncounted_states(cu_seqlens, cu_seqlens_cpu)
        else:
            reason = _refused_on_cpu(q)
    return None if reason is None else need(op, *reason)


def _refused_everywhere(q: Tensor, k: Tensor, v: Tensor, cp_context: object) -> Reason | None:
    if cp_context is not None and (reason := layout_refused(cp_context)) is not None:
        return reason
    if not q.dtype == k.dtype == v.dtype:
        return (
            f"q is {dtype_name(q.dtype)}, k is {dtype_name(k.dtype)}, v is {dtype_name(v.dtype)}",
            "one dtype",
            _one_dtype(q, k, v),
        )
    return None


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> str:
    if q.dtype in FLOATS:
        return f"cast k and v to {dtype_name(q.dtype)}"
    floats = [dtype_name(x.dtype) for x in (v, k) if x.dtype in FLOATS]
    return f"cast q, k and v to {floats[0] if floats else 'bfloat16'}"


def _refused_on_cpu(q: Tensor) -> Reason | None:
    if q.device.type not in ("cpu", "meta"):
        return f"tensors are on {q.device.type}", "cpu or cuda", "move them"
    if q.dtype not in FLOATS:
        return f"q, k and v are {dtype_name(q.dtype)}", one_of(FLOATS), "cast them"
    return None


def _refused_on_cuda(q: Tensor, k: Tensor, v: Tensor, capability: tuple[int, int]) -> Reason | None:
    reason = refused_device(capability, q.dtype, ELSEWHERE)
    reason = reason or _refused_size(q.shape[-1], "K", "q and k", shapes.KEY_SIZES, shapes.KEYS)
    reason = reason or _refused_size(v.shape[-1], "V", "v", shapes.VALUE_SIZES, shapes.VALUES)
    for name, x in (("q", q), ("k", k), ("v", v)):
        reason = reason or refused_strides(name, x, batch_may_repeat=True)
    return reason


def _refused_size(
    size: int, letter: str, padded: str, sizes: tuple[int, ...], needs: str
) -> Reason | None:
    if size in sizes:
        return None
    room = [larger for larger in sizes if larger > size]
    fix = f"pad {padded} to {room[0]}, or {ELSEWHERE}" if room else ELSEWHERE
    return f"head dimension {letter}={size}", f"{needs} on SM90", fix


def _refused_wide(q: Tensor) -> Reason | None:
    """No kernel at K = 256 goes on from an anchor."""
    if q.shape[-1] != WIDE:
        return None
    fix = "use chunk_gated_delta_rule and fused_recurrent_gated_delta_rule"
    return f"head dimension K={WIDE}", f"less than {WIDE} for this function", fix


def _uncounted_states(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Reason | None:
    if cu_seqlens is not None and cu_seqlens_cpu is None:
        needs = "cu_seqlens_cpu too: the number of states depends on the lengths"
        return "output_h=True with cu_seqlens", needs, "pass cu_seqlens_cpu"
    return None


def check_activations(op: str, v: Tensor, gate: Gate, options: Options) -> None:
    """Raises ValueError unless the flags of beta and the parameters of the gate fit together.

    allow_neg_eigval needs use_beta_sigmoid_in_kernel; use_gate_in_kernel needs A_log, and A_log and
    dt_bias must be [HV].

    Args:
        op: the name of the function, for the error.
        v: [B, T, HV, V], which has the number of heads.
        gate: use_gate_in_kernel, A_log and dt_bias of the call.
        options: the other flags of the call.
    """
    if options.allow_neg_eigval and not options.use_beta_sigmoid_in_kernel:
        got = "allow_neg_eigval without use_beta_sigmoid_in_kernel"
        fix = "pass use_beta_sigmoid_in_kernel=True, or beta in [0, 2] and neither flag"
        raise ValueError(need(op, got, "both: it doubles the sigmoid", fix))
    if not gate.use_gate_in_kernel:
        return
    if gate.A_log is None:
        fix = "pass A_log of shape [HV], or activated gates and no flag"
        raise ValueError(need(op, "use_gate_in_kernel without A_log", "A_log", fix))
    GATE.check(op, v, gate.A_log, gate.dt_bias)


def check_tensors(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
) -> None:
    """Raises ValueError unless a call's tensors fit together in types, shapes, devices and dtypes.

    Raises Unsupported if a tensor has a forward-mode tangent. Does not check strides, and not
    whether the dtypes of q, k and v are supported; `refusal` does.

    Args:
        op: the name of the function, for the error.
        q, k, v: [B, T, H, K] twice, and [B, T, HV, V].
        g, beta: [B, T, HV].
        initial_state: [N, HV, K, V], or [N, HV, V, K] if state_v_first; or None.
        cu_seqlens: [N + 1], bounds of packed sequences; None: N is B.
        cu_seqlens_cpu: the same bounds on the CPU, or None.
        state_v_first: the layout of initial_state.
    """
    tensors = q, k, v, g, beta
    if cu_seqlens is None:
        DENSE[state_v_first].check(op, *tensors, initial_state)
        if cu_seqlens_cpu is not None:  # FLA silently runs this as one sequence per batch row
            fix = "pass both"
            raise ValueError(need(op, "cu_seqlens_cpu alone", "cu_seqlens on q's device", fix))
    else:
        PACKED[state_v_first].check(op, *tensors, cu_seqlens, initial_state)
        if cu_seqlens_cpu is not None:
            ON_HOST.check(op, cu_seqlens_cpu, N=cu_seqlens.shape[0] - 1)
            if not cu_seqlens_cpu.is_cpu:
                got = f"cu_seqlens_cpu is on {cu_seqlens_cpu.device}"
                raise ValueError(need(op, got, "cpu", "move it there, or leave it out"))
    H, HV = q.shape[2], v.shape[2]
    if HV % H != 0:
        fix = "give q and k a number of heads that divides HV"
        raise ValueError(need(op, f"HV={HV} and H={H}", "HV to be a multiple of H", fix))
