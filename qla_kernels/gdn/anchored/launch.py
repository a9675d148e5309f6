"""Launches a step of a pool on a GPU: append_tokens, then anchored_fwd."""

from torch import Tensor

from qla_kernels import device, jit
from qla_kernels.gdn.anchored.extend import Slots
from qla_kernels.gdn.call import Call
from qla_kernels.gdn.kernels import anchored_fwd as anchored_kernel
from qla_kernels.gdn.kernels import append_tokens as append_kernel
from qla_kernels.gdn.launch.tensors import low_words
from qla_kernels.gdn.shapes import STEP_COLUMNS, key_room
from qla_kernels.sm90 import dtype_name, require_aligned


def decode(pool: Slots, call: Call, state_indices: Tensor, null_slot: int | None = None) -> Tensor:
    """Appends call's tokens [B, T, ..] to the sequences in their slots; returns o [B, T, HV, V].

    The call's q and k are normalised and its gates activated, in fp32 and contiguous. `null_slot`
    is the slot for padding, None for the last one.
    """
    q, k, v, g, beta, scale, *_ = call
    require_aligned("GdnPool", q=q, k=k, v=v)
    with device.of(q):
        if null_slot is None:
            null_slot = len(pool.lengths) - 1
        steps = append(pool, k, v, g, beta, low_words(state_indices), null_slot)
        o = v.new_empty(v.shape)
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
        k,
        v,
        g,
        beta,
        state_indices,
        *pool[1:],
        steps,
        null_slot,
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
