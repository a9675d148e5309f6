"""The operators of a pool on a GPU. A step launches append_tokens, then anchored_fwd."""

import torch
from torch import Tensor

from qla_kernels.gdn.anchored.extend import Extension, Slots, extend
from qla_kernels.gdn.anchored.ops import POOL_OP, Rejection
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.kernels import anchored_fwd as anchored_kernel
from qla_kernels.gdn.kernels import append_tokens as append_kernel
from qla_kernels.gdn.kernels import reject_tokens as reject_kernel
from qla_kernels.gdn.launch.activations import activate
from qla_kernels.gdn.launch.chunks import l2norm_fwd
from qla_kernels.gdn.launch.pools import Places
from qla_kernels.gdn.shapes import STEP_COLUMNS, key_room
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.native.recording import overwritten
from qla_kernels.runtime.sm90 import dtype_name, low_words, require_aligned


@torch.no_grad()
def gdn_pool_extend(call: Call, pool: Slots, extension: Extension, options: Options) -> Tensor:
    """Runs the operator gdn_pool_extend on CUDA tensors."""
    with device.of(call.q):
        call = _activated(call, options)
        if extension.drafts:
            o = decode(pool, call, extension.state_indices, extension.null_slot)
        else:
            o = extend(call, pool, extension, _rows)
    overwritten(*pool)  # the dispatcher says so, but may be bypassed
    return o


@torch.no_grad()
def gdn_pool_reject(rejection: Rejection) -> None:
    """Runs the operator gdn_pool_reject on CUDA tensors."""
    lengths, _, state_indices, num_tokens, null_slot = rejection
    if num_tokens.dtype not in (torch.int32, torch.int64):
        num_tokens = num_tokens.int()
    if state_indices.numel():
        with device.of(lengths):
            jit.compile(reject_kernel, reject_kernel.VARIANTS[0])(
                low_words(state_indices), low_words(num_tokens), lengths, null_slot
            )
    overwritten(lengths)


def _rows(anchors: Tensor, starts: Tensor, ends: Tensor) -> Places:
    return Places(anchors, starts, ends, null_slot=-1, kept=None)


def _activated(call: Call, options: Options) -> Call:
    """Returns the call with normalised q and k and activated g and beta, as chunks read them."""
    q, k, raw = call.q, call.k, (call.g, call.beta, call.A_log, call.dt_bias)
    if options.use_qk_l2norm_in_kernel:
        q, k = l2norm_fwd(q), l2norm_fwd(k)
    g, beta = activate(*raw, options.beta_range)
    return call._replace(q=q, k=k, g=g, beta=beta)


def decode(pool: Slots, call: Call, state_indices: Tensor, null_slot: int) -> Tensor:
    """Appends call's tokens [B, T, ..] to the sequences in their slots; returns o [B, T, HV, V].

    The call's q and k are normalised and its gates activated, in fp32 and contiguous.
    """
    q, k, v, g, beta, scale, *_ = call
    require_aligned(POOL_OP, q=q, k=k, v=v)
    o = v.new_empty(v.shape)
    if o.numel():
        steps = append(pool, k, v, g, beta, low_words(state_indices), null_slot)
        anchored_fwd(pool, q.contiguous(), steps, o, scale)
    return o


def append(
    pool: Slots,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_indices: Tensor,
    null_slot: int,
) -> Tensor:
    """Writes tokens to the tails and counts them; returns the table for anchored_fwd.

    Args:
        k, v: [B, T, heads, size], strides of multiples of 16 bytes.
        g, beta: [B, T, HV] fp32, contiguous.
        state_indices: [B] int32.
    """
    steps = state_indices.new_empty(k.shape[0], STEP_COLUMNS)
    jit.compile(append_kernel, append_kernel.Variant(dtype_name(k.dtype)))(
        k, v, g, beta, state_indices, *pool[1:], steps, null_slot
    )
    return steps


def anchored_fwd(pool: Slots, q: Tensor, steps: Tensor, o: Tensor, scale: float) -> None:
    """Writes o [B, T, HV, V] of each sequence's last T tokens, and anchors of whole chunks.

    Args:
        q: [B, T, H, K], contiguous.
        steps: [B, 4] int32, made by `append`.
    """
    B, T, H, K = q.shape
    HV, V = o.shape[2:]
    room, anchors = key_room(K), pool.anchors
    tile_v = 128 if room == 128 and V % 128 == 0 else 64
    variant = anchored_kernel.Variant(dtype_name(q.dtype), room, tile_v)
    items = B * HV * (V // tile_v)
    jit.compile(anchored_kernel, variant)(
        q.view(B * T, H, K),
        *pool[1:5],
        steps,
        anchors.as_strided((*anchors.shape[:2], room, V), anchors.stride()),
        o.view(B * T, HV, V),
        T,
        scale,
        min(items, device.sm_count(q.device)),
    )
