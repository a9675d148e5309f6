"""Extends sequences of a pool by any number of tokens, with the chunked form's own operator.

A sequence's tokens since its anchor and its new tokens form one sequence, which starts from the
anchor. It is computed in two packed calls: the whole chunks that are to go into the anchor, and the
rest. Nothing waits for the device: packs have room for the most tokens there may be.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import ops
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.shapes import NEW_TOKENS, TAIL_PLACES
from qla_kernels.tile.constants import CHUNK


class Tokens(NamedTuple):
    """Tokens end to end, with activated gates and betas and normalised q and k where wanted."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV]
    beta: Tensor  # [T, HV]


class Slots(NamedTuple):
    """A pool's tensors. Slots may lie any distance apart, as pages of an engine's cache do.

    One slot stands for sequences of padding, and is never changed.
    """

    # [slots, HV, K, V] fp32, the state after `anchored` tokens; in memory, rows of zeros follow up
    # to the K of the kernels' variant
    anchors: Tensor
    k: Tensor  # [slots, TAIL_PLACES, H, K]; token t of a sequence has place t % TAIL_PLACES
    v: Tensor  # [slots, TAIL_PLACES, HV, V]
    g: Tensor  # [slots, TAIL_PLACES, HV] fp32
    beta: Tensor  # [slots, TAIL_PLACES, HV] fp32
    anchored: Tensor  # [slots] int32, a multiple of CHUNK
    lengths: Tensor  # [slots] int32, tokens of the sequence so far


class TokenPlaces(NamedTuple):
    """Which token each place of a pack holds."""

    bounds: Tensor  # [N + 1] where the sequences of the pack begin and end
    owner: Tensor  # [size] the sequence; any past the end
    token: Tensor  # [size] counted from the sequence's anchor
    used: Tensor  # [size] false past the end


def extend(
    pool: Slots,
    x: Tokens,
    bounds: Tensor,
    state_indices: Tensor,
    scale: float,
    fresh: Tensor | None = None,
    drafts: bool = False,
    null_slot: int | None = None,
) -> Tensor:
    """Appends tokens bounds[n] .. bounds[n + 1] to the sequence in slot state_indices[n].

    Args:
        bounds: [N + 1], as cu_seqlens.
        state_indices: [N]; an index outside the pool marks a sequence of padding.
        fresh: [N] bool, sequences that begin with these tokens; None if all go on.
        drafts: the new tokens may be taken back, so that none of them may enter an anchor.
        null_slot: the slot for padding; None: the last one.

    Returns:
        o [T, HV, V], 0 for sequences of padding and for tokens of none.
    """
    T, N = x.q.shape[0], state_indices.shape[0]
    num_slots = pool.lengths.shape[0]
    null = num_slots - 1 if null_slot is None else null_slot
    bounds = bounds.long()
    live = (state_indices >= 0) & (state_indices < num_slots) & (state_indices != null)
    slots = torch.where(live, state_indices, null).long()
    goes_on = live if fresh is None else live & ~fresh
    base = torch.where(goes_on, pool.anchored[slots], 0).long()
    kept = torch.where(goes_on, pool.lengths[slots], 0).long() - base
    kept = kept.clamp(0, TAIL_PLACES - NEW_TOKENS)  # as append_tokens
    total = torch.where(live, kept + bounds.diff(), 0)
    whole = (kept if drafts else total) // CHUNK * CHUNK

    # The null slot's own state passes through a sequence without tokens, and is written back.
    h0 = torch.where((live & ~goes_on)[:, None, None, None], 0, pool.anchors[slots])
    room = T + N * (TAIL_PLACES - 1)
    first = _places(torch.zeros_like(whole), whole, N * CHUNK if drafts else room)
    rest = _places(whole, total, N * (TAIL_PLACES - 1) if drafts else N * CHUNK)
    options = Options(output_final_state=True, auto_cp=False)

    def packed(places: TokenPlaces) -> Tokens:
        of, token = places.owner, places.token
        new = (bounds[of] + token - kept[of]).clamp(0, max(T - 1, 0))
        old = slots[of], (base[of] + token) % TAIL_PLACES
        from_tail = token < kept[of]

        def mixed(given: Tensor, held: Tensor) -> Tensor:
            return torch.where(_beside(from_tail, given), held[old], given[new])

        k, v, g, beta = map(mixed, x[1:], (pool.k, pool.v, pool.g, pool.beta))
        return Tokens(x.q[new], k, v, g, beta)

    def run(tokens: Tokens, places: TokenPlaces, h0: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (t[None] for t in tokens)
        call = Call(q, k, v, g, beta, scale, h0, places.bounds.int())
        done = ops.gdn_fwd(call, options)
        assert done.final_state is not None, "it was asked for"
        return done.o[0], done.final_state

    o_first, anchors = run(packed(first), first, h0)
    tokens = packed(rest)
    o_rest, _ = run(tokens, rest, anchors)

    slot = torch.where(rest.used, slots[rest.owner], null)
    place = slot, (base[rest.owner] + rest.token) % TAIL_PLACES
    for held, new in zip((pool.k, pool.v, pool.g, pool.beta), tokens[1:], strict=True):
        held[place] = torch.where(_beside(rest.used, new), new.to(held.dtype), held[place])
    pool.anchors[slots] = anchors
    for count, now in ((pool.anchored, base + whole), (pool.lengths, base + total)):
        count[slots] = torch.where(live, now.int(), count[slots])

    at = torch.arange(T, device=bounds.device)
    owner = _owners(bounds, at)
    token = kept[owner] + at - bounds[owner]
    in_first = token < whole[owner]
    o = torch.where(
        in_first[:, None, None],
        _taken(o_first, first.bounds[owner] + token),
        _taken(o_rest, rest.bounds[owner] + token - whole[owner]),
    )
    return torch.where(((at < bounds[-1]) & live[owner])[:, None, None], o, 0)


def _places(begin: Tensor, end: Tensor, room: int) -> TokenPlaces:
    """Packs tokens begin[n] .. end[n] of each sequence; `room` is the most there may be of all."""
    bounds = torch.cat([begin.new_zeros(1), (end - begin).cumsum(0)])
    if not bounds.is_cuda:
        room = int(bounds[-1])
    at = torch.arange(max(room, 1), device=bounds.device)
    owner = _owners(bounds, at)
    return TokenPlaces(bounds, owner, at - bounds[owner] + begin[owner], at < bounds[-1])


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    """Returns mask [T] with the dimensions of x [T, ..]."""
    return mask.reshape(-1, *[1] * (x.dim() - 1))


def _owners(bounds: Tensor, at: Tensor) -> Tensor:
    found = torch.searchsorted(bounds[1:].contiguous(), at, right=True)
    return found.clamp(max=bounds.shape[0] - 2)


def _taken(o: Tensor, at: Tensor) -> Tensor:
    return o[at.clamp(0, o.shape[0] - 1)]
