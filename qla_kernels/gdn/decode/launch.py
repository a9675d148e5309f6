"""Launches the kernels of the token-by-token form, usually one a call.

Decoding makes this call for every layer and token. To avoid casts and copies, the kernel reads
gates in fp32 or in q's dtype, activates them, and takes both layouts of a state.
"""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.decode.ops import OP, VERIFY_OP, Decoded, Drafts, Norm, Pool
from qla_kernels.gdn.decode.validate import in_whole_pieces
from qla_kernels.gdn.kernels import recurrent as kernel
from qla_kernels.gdn.kernels import recurrent_norm as norm_kernel
from qla_kernels.gdn.kernels import verify as verify_kernel
from qla_kernels.gdn.launch.tensors import (
    WHOLE,
    of_part,
    parts_in_reach,
    pass_state_through,
)
from qla_kernels.gdn.shapes import STATE_PIECE, key_room
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.native.recording import overwritten
from qla_kernels.runtime.sm90 import dtype_name, low_words


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
def gdn_recurrent_slots(call: Call, pool: Pool, options: Options) -> None:
    """Runs the operator gdn_recurrent_slots on CUDA tensors."""
    states, state_indices, o, null_slot = pool
    _require_aligned(OP, "the pool of states", states)
    _require_aligned(OP, "out", o)
    if o.numel() and state_indices.numel():
        # The pool is both h0 and ht: a warp reads its whole part before it writes any of it.
        _launch(call, options, states, states, state_indices, o, null_slot)
    else:
        o.zero_()
    overwritten(states, o)  # the dispatcher says so, but may be bypassed


@torch.no_grad()
def gdn_recurrent_norm(call: Call, pool: Pool, norm: Norm, options: Options) -> None:
    """Runs the operator gdn_recurrent_norm on CUDA tensors."""
    states, o = pool.states, pool.o
    _require_aligned(OP, "the pool of states", states)
    _require_aligned(OP, "out", o)
    if o.numel():
        with device.of(o):
            q, k, v, g, beta, *others = call
            for rows in parts_in_reach(q, k, v, g, beta, norm.z):
                part = Call(*of_part(rows, q, k, v, g, beta), *others)
                indices, o_b, z = of_part(rows, pool.state_indices, o, norm.z)
                slots, gated = Pool(states, indices, o_b, pool.null_slot), norm._replace(z=z)
                variant, packed = norm_arguments(part, slots, gated, options)
                jit.compile(norm_kernel, variant)(*packed)
    overwritten(states, o)


@torch.no_grad()
def gdn_verify(call: Call, drafts: Drafts, options: Options) -> None:
    """Runs the operator gdn_verify on CUDA tensors."""
    states, checkpoints, o = drafts.states, drafts.checkpoints, drafts.o
    _require_aligned(VERIFY_OP, "the pool of states", states)
    _require_aligned(VERIFY_OP, "out", o)
    if checkpoints is not None:
        _require_aligned(VERIFY_OP, "checkpoints", checkpoints)
    if o.numel() and call.num_sequences:
        with device.of(call.q):
            q, k, v, g, beta, *others = call
            tables = drafts.state_indices, drafts.num_accepted, drafts.checkpoint_indices
            for rows in parts_in_reach(q, k, v, g, beta):
                part = Call(*of_part(rows, q, k, v, g, beta), *others)
                of_part_tables = of_part(rows, *tables, drafts.parents)
                variant, packed = verify_arguments(part, drafts, of_part_tables, options, o[rows])
                jit.compile(verify_kernel, variant)(*packed)
    else:
        o.zero_()
    overwritten(states if drafts.state_indices.dim() == 2 else None, checkpoints, o)


def _require_aligned(op: str, name: str, x: Tensor) -> None:
    """Raises Unsupported if x does not begin at a piece; torch.compile cannot trace that."""
    if past := _past(x):
        got = f"{name} begins {past} bytes past a multiple of {STATE_PIECE} numbers"
        raise Unsupported(need(op, got, "an aligned first element", "allocate it by itself"))


def _launch(
    call: Call,
    options: Options,
    h0: Tensor | None,
    ht: Tensor | None,
    state_indices: Tensor | None,
    o: Tensor,
    null_slot: int = -1,
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
            variant, packed = arguments(part, options, *states, indices, o_b, null_slot)
            jit.compile(kernel, variant)(*packed)


def arguments(
    call: Call,
    options: Options,
    h0: Tensor | None,
    ht: Tensor | None,
    state_indices: Tensor | None,
    o: Tensor,
    null_slot: int = -1,
) -> tuple[kernel.Variant, tuple[Any, ...]]:
    """Returns the kernel's variant and its arguments, for a call with at least one token."""
    q, v, cu_seqlens = call.q, call.v, call.cu_seqlens
    K, (HV, V) = q.shape[-1], v.shape[2:]
    has = {
        kernel.INDICES: state_indices is not None,
        kernel.H0: h0 is not None,
        kernel.HT: ht is not None,
        kernel.NULL_ZERO: null_slot == 0,
    }
    no_index = _no_index(o)
    states = [x.mT if options.state_v_first else x for x in (h0, ht) if x is not None]
    if not states:
        states = [v.new_empty((), dtype=torch.float32).expand(1, HV, K, V)]
    return kernel.Variant(dtype_name(q.dtype), key_room(K), dtype_name(states[0].dtype)), (
        *_inputs(call),
        no_index if cu_seqlens is None else low_words(cu_seqlens),
        no_index if state_indices is None else low_words(state_indices),
        states[0],
        states[-1],
        o,
        call.num_sequences,
        call.scale,
        options.beta_range,
        _flags(call, options, has),
    )


def norm_arguments(
    call: Call, pool: Pool, norm: Norm, options: Options
) -> tuple[norm_kernel.Variant, tuple[Any, ...]]:
    """Returns the variant and the arguments of recurrent_norm, for a call with a sequence."""
    q, v, states = call.q, call.v, pool.states
    has = {
        kernel.NULL_ZERO: pool.null_slot == 0,
        norm_kernel.SIGMOID: norm.sigmoid,
        norm_kernel.STATES_AHEAD: norm.ahead,
    }
    dtypes = dtype_name(q.dtype), dtype_name(states.dtype)
    return norm_kernel.Variant(dtypes[0], q.shape[-1], v.shape[-1], dtypes[1]), (
        *_inputs(call),
        norm.z,
        _bytes(norm.norm_weight, q.dtype),
        low_words(pool.state_indices),
        states.mT if options.state_v_first else states,
        pool.o.squeeze(1),
        call.scale,
        options.beta_range,
        norm.eps,
        _flags(call, options, has),
    )


def verify_arguments(
    call: Call,
    drafts: Drafts,
    tables: tuple[Tensor | None, ...],
    options: Options,
    o: Tensor,
) -> tuple[verify_kernel.Variant, tuple[Any, ...]]:
    """Returns the variant and the arguments of verify, for a call with at least one token.

    Args:
        tables: state_indices, num_accepted, checkpoint_indices and parents, of these batch rows.
    """
    indices, accepted, rows, parents = tables
    assert indices is not None, "the call has them"
    has_slots, kept = indices.dim() == 2, drafts.checkpoints
    has = {
        kernel.NULL_ZERO: drafts.null_slot == 0,
        verify_kernel.ACCEPTED: accepted is not None,
        verify_kernel.SLOTS: has_slots,
        verify_kernel.ENTRIES: kept is not None,
        verify_kernel.TREE: parents is not None,
    }
    no_index = _no_index(o)
    no_parents = no_index.view(1, -1)
    slots = low_words(indices)
    steps, to = (slots.shape[1] if has_slots else 1), drafts.states
    if kept is not None:
        steps, to = kept.shape[1], kept.flatten(0, 1)
    states = [x.mT if options.state_v_first else x for x in (drafts.states, to)]
    bounds, K = call.cu_seqlens, call.q.shape[-1]
    variant = verify_kernel.Variant(dtype_name(call.q.dtype), key_room(K), dtype_name(to.dtype))
    return variant, (
        *_inputs(call),
        no_index if bounds is None else low_words(bounds),
        slots if has_slots else slots.unsqueeze(-1),
        no_index if accepted is None else low_words(accepted),
        no_index if rows is None else low_words(rows),
        no_parents if parents is None else low_words(parents),
        *states,
        o,
        call.num_sequences,
        steps,
        call.scale,
        options.beta_range,
        _flags(call, options, has),
    )


def _inputs(call: Call) -> tuple[Tensor, ...]:
    """Returns q, k, v, g, beta, A_log and dt_bias as both kernels take them."""
    q, k, v, g, beta, _, _, _, _, A_log, dt_bias = call
    gates = _bytes(g, q.dtype)
    if A_log is None:
        of_head = [gates[0, 0]] * 2
    else:
        biases = torch.zeros_like(A_log) if dt_bias is None else dt_bias
        of_head = [_bytes(A_log, q.dtype), _bytes(biases, q.dtype)]
    if beta.dim() < v.dim():
        beta = beta.unsqueeze(-1).expand(v.shape)
    return q, k, v, gates, _bytes(beta, q.dtype), *of_head


def _flags(call: Call, options: Options, others: dict[int, bool]) -> int:
    has = {
        kernel.V_FIRST: options.state_v_first,
        kernel.L2NORM: options.use_qk_l2norm_in_kernel,
        kernel.GATE: call.A_log is not None,
        kernel.DENSE: call.cu_seqlens is None,
        **others,
    }
    return sum(bit for bit, given in has.items() if given)


def _no_index(o: Tensor) -> Tensor:
    """Returns a placeholder for absent tables of indices."""
    return o.view(-1)[:2].view(torch.int32)


def _bytes(x: Tensor, half: torch.dtype) -> Tensor:
    """Returns x [..] as bytes [.., 4 or 2], cast to fp32 if it is neither fp32 nor `half`."""
    x = x if x.dtype in (torch.float32, half) else x.float()
    return x.unsqueeze(-1).view(torch.uint8)


def _past(state: Tensor) -> int:
    """Returns how many bytes past a multiple of STATE_PIECE numbers a state begins."""
    return state.data_ptr() % (STATE_PIECE * state.element_size())
