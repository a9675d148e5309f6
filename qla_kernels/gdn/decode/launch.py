"""Launches the kernel of the token-by-token form, usually without any other kernel.

Decoding makes this call for every layer and token. To avoid casts and copies, the kernel reads
gates in fp32 or in q's dtype, activates them, and takes both layouts of a state.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels import device, jit
from qla_kernels.errors import Unsupported, need
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.decode.api import in_whole_pieces
from qla_kernels.gdn.decode.ops import OP, Decoded, Pool
from qla_kernels.gdn.kernels import recurrent as kernel
from qla_kernels.gdn.launch.tensors import (
    WHOLE,
    low_words,
    of_part,
    parts_in_reach,
    pass_state_through,
)
from qla_kernels.gdn.shapes import STATE_PIECE
from qla_kernels.sm90 import dtype_name


@torch.no_grad()
def gdn_recurrent(call: Call, options: Options) -> Decoded:
    """Runs the operator gdn_recurrent on CUDA tensors."""
    v, h0, ht = call.v, call.initial_state, None
    o = v.new_empty(v.shape)
    if options.output_final_state:
        size = options.state_size(call.q.shape[-1], v.shape[-1])
        ht = v.new_empty(call.num_sequences, v.shape[2], *size, dtype=torch.float32)
    if h0 is not None and (h0.dtype != torch.float32 or not in_whole_pieces(h0) or _past(h0)):
        h0 = h0.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if o.numel() and call.num_sequences:
        _launch(call, options, h0, ht, None, o)
    else:  # no token to compute, or none that a sequence owns
        o.zero_()
        pass_state_through(h0, ht)
    return Decoded(o, ht)


@torch.no_grad()
def gdn_recurrent_slots(call: Call, pool: Pool, options: Options) -> Tensor:
    """Runs the operator gdn_recurrent_slots on CUDA tensors."""
    states, state_indices = pool
    if past := _past(states):  # `recurrent_refusal` cannot check it while torch.compile traces
        got = f"the pool of states begins {past} bytes past a multiple of {STATE_PIECE} numbers"
        raise Unsupported(need(OP, got, "an aligned first element", "allocate it by itself"))
    o = call.v.new_empty(call.v.shape)
    if o.numel() and state_indices.numel():
        # The pool is both h0 and ht: a warp reads its whole part before it writes any of it.
        _launch(call, options, states, states, state_indices, o)
    else:
        o.zero_()
    torch.autograd.graph.increment_version(states)  # the dispatcher does so, but may be bypassed
    return o


def _launch(
    call: Call,
    options: Options,
    h0: Tensor | None,
    ht: Tensor | None,
    state_indices: Tensor | None,
    o: Tensor,
) -> None:
    q, k, v, g, beta, *others = call
    with device.of(q):
        for rows in parts_in_reach(q, k, v, g, beta):
            part, states, indices, o_b = call, (h0, ht), state_indices, o
            if rows is not WHOLE:
                part, o_b = Call(*of_part(rows, q, k, v, g, beta), *others), o[rows]
                if indices is None:
                    states = of_part(rows, h0, ht)
                else:  # each index is into the whole pool
                    indices = indices[rows]
            variant, packed = arguments(part, options, *states, indices, o_b)
            jit.compile(kernel, variant)(*packed)


def arguments(
    call: Call,
    options: Options,
    h0: Tensor | None,
    ht: Tensor | None,
    state_indices: Tensor | None,
    o: Tensor,
) -> tuple[kernel.Variant, tuple[Any, ...]]:
    """Returns the kernel's variant and its arguments, for a call with at least one token."""
    q, k, v, g, beta, scale, _, cu_seqlens, _, A_log, dt_bias = call
    K, (HV, V) = q.shape[-1], v.shape[2:]
    has = {
        kernel.V_FIRST: options.state_v_first,
        kernel.L2NORM: options.use_qk_l2norm_in_kernel,
        kernel.GATE: A_log is not None,
        kernel.DENSE: cu_seqlens is None,
        kernel.INDICES: state_indices is not None,
        kernel.H0: h0 is not None,
        kernel.HT: ht is not None,
    }
    no_index = o.view(-1)[:2].view(torch.int32)  # placeholder for absent index tensors
    states = [x.mT if options.state_v_first else x for x in (h0, ht) if x is not None]
    if not states:
        states = [v.new_empty((), dtype=torch.float32).expand(1, HV, K, V)]
    gates = _bytes(g, q.dtype)
    if A_log is None:
        of_head = [gates[0, 0]] * 2
    else:
        biases = torch.zeros_like(A_log) if dt_bias is None else dt_bias
        of_head = [_bytes(A_log, q.dtype), _bytes(biases, q.dtype)]
    if beta.dim() < v.dim():
        beta = beta.unsqueeze(-1).expand(v.shape)
    return kernel.Variant(dtype_name(q.dtype), K, dtype_name(states[0].dtype)), (
        q,
        k,
        v,
        gates,
        _bytes(beta, q.dtype),
        *of_head,
        no_index if cu_seqlens is None else low_words(cu_seqlens),
        no_index if state_indices is None else low_words(state_indices),
        states[0],
        states[-1],
        o,
        call.num_sequences,
        scale,
        options.beta_range,
        sum(bit for bit, given in has.items() if given),
    )


def _bytes(x: Tensor, half: torch.dtype) -> Tensor:
    """Returns x [..] as bytes [.., 4 or 2], cast to fp32 if it is neither fp32 nor `half`."""
    x = x if x.dtype in (torch.float32, half) else x.float()
    return x.unsqueeze(-1).view(torch.uint8)


def _past(state: Tensor) -> int:
    """Returns how many bytes past a multiple of STATE_PIECE numbers a state begins."""
    return state.data_ptr() % (STATE_PIECE * state.element_size())
