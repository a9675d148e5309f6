"""Appends tokens to sequences of a pool, with the operator of the chunked form.

A sequence's tail and its new tokens form one sequence that starts from the anchor. Two packed calls
compute it: one for the whole chunks that go into the anchor, one for the rest. Nothing waits for
the device: packs have room for the largest possible number of tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import ops
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.shapes import NEW_TOKENS, TAIL_PLACES
from qla_kernels.operators import Overwritten
from qla_kernels.tile.constants import CHUNK

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a number


class Slots(NamedTuple):
    """The tensors of a `GdnPool`. Every tensor has one entry per slot; a slot holds one sequence.

    The entries of a tensor may lie any distance apart, for example in the pages of a cache. The
    pool uses one slot for padding and never changes it. k_tail and v_tail have the dtype of q.
    TAIL_PLACES is 128, which is two chunks of CHUNK = 64 tokens.

    The kernels that read anchors have K = 64 and K = 128. For another K, each head of `anchors`
    must be followed in memory by rows of zeros, up to the next larger of these two numbers.
    """

    anchors: Overwritten  # [slots, HV, K, V] fp32, the state after `anchored` tokens
    k_tail: Overwritten  # [slots, TAIL_PLACES, H, K]; token t has place t % TAIL_PLACES
    v_tail: Overwritten  # [slots, TAIL_PLACES, HV, V]
    g_tail: Overwritten  # [slots, TAIL_PLACES, HV] fp32
    beta_tail: Overwritten  # [slots, TAIL_PLACES, HV] fp32
    anchored: Overwritten  # [slots] int32, a multiple of CHUNK
    lengths: Overwritten  # [slots] int32, tokens of the sequence so far


def slot_parts(
    H: int, HV: int, K: int, V: int, dtype: torch.dtype, wide: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns (shape, dtype) of one slot in each tensor of `Slots`.

    Args:
        dtype: the dtype of q, k, v and o.
        wide: the dtype of states and gates.
    """
    gates, count = ((TAIL_PLACES, HV), wide), ((), torch.int32)
    k, v = ((TAIL_PLACES, H, K), dtype), ((TAIL_PLACES, HV, V), dtype)
    return [((HV, K, V), wide), k, v, gates, gates, count, count]


class Extension(NamedTuple):
    """The sequences of a pool to which a call appends tokens."""

    state_indices: Tensor  # [N] slots; null_slot and numbers outside the pool mark padding
    has_initial_state: Tensor | None  # [N] of a prefill: sequences that go on; None if none does
    drafts: bool  # a decode: all sequences go on, and no new token may enter an anchor
    null_slot: int


class Tokens(NamedTuple):
    """Packed tokens, with activated gates and betas, and with q and k normalised if needed."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV]
    beta: Tensor  # [T, HV]


class TokenPlaces(NamedTuple):
    """Maps each place of a packed tensor to a sequence and to a token of this sequence."""

    bounds: Tensor  # [N + 1] where the sequences of the pack begin and end
    owner: Tensor  # [size] the sequence; any past the end
    token: Tensor  # [size] counted from the sequence's anchor
    used: Tensor  # [size] false past the end


class AnchorRows(NamedTuple):
    """The anchors of a pool on a CPU, and the slots where each sequence starts and ends.

    A negative start means that the sequence starts from a state of 0. A negative end means that its
    final state is not written.
    """

    anchors: Tensor  # as Slots has it
    starts: Tensor  # [N] int32
    ends: Tensor  # [N] int32

    def start_states(self) -> Tensor:
        """Returns the state from which each sequence starts, [N, HV, K, V]."""
        states = self.anchors[self.starts.clamp(min=0)]
        return torch.where((self.starts >= 0)[:, None, None, None], states, 0)

    def take(self, final: Tensor) -> None:
        """Writes final states [N, HV, K, V] to the slots `ends` of `anchors`."""
        live = self.ends >= 0
        self.anchors[self.ends[live]] = final[live]


def extend(call: Call, pool: Slots, extension: Extension, rows: Any = AnchorRows) -> Tensor:
    """Appends the tokens of a call to sequences of a pool; returns o [B, T, HV, V].

    o is 0 for sequences of padding and for tokens past the last sequence.

    Args:
        call: the tensors of the call. Gates and betas are activated.
        pool: the tensors of the pool, which are updated in place.
        extension: the slots of the sequences.
        rows: a class with the interface of AnchorRows.
    """
    if not call.num_sequences:
        return call.v.new_zeros(call.v.shape)
    state_indices, has_initial_state, drafts, null_slot = extension
    live = live_slots(state_indices, len(pool.lengths), null_slot)
    slots = torch.where(live, state_indices, null_slot).long()
    goes_on = live
    if not drafts:
        goes_on = live & (False if has_initial_state is None else has_initial_state != 0)
    if not call.v.numel():
        _empty(pool, slots, live & ~goes_on)
        return call.v.new_zeros(call.v.shape)
    x = Tokens(*(t.flatten(0, 1) for t in call[:5]))
    T, N = x.q.shape[0], call.num_sequences
    if call.cu_seqlens is None:
        bounds = torch.arange(N + 1, device=x.q.device) * call.q.shape[1]
    else:
        bounds = call.cu_seqlens.long()
    base = torch.where(goes_on, pool.anchored[slots], 0).long()
    tail = torch.where(goes_on, pool.lengths[slots], 0).long() - base
    tail = tail.clamp(0, TAIL_PLACES - NEW_TOKENS)  # as append_tokens
    total = torch.where(live, tail + bounds.diff(), 0)
    to_anchor = (tail if drafts else total) // CHUNK * CHUNK

    starts, ends = (torch.where(x, state_indices, -1).int() for x in (goes_on, live))
    anchor_rows = rows(pool.anchors, starts, ends)
    room = T + N * (TAIL_PLACES - 1)
    first = _places(torch.zeros_like(to_anchor), to_anchor, N * CHUNK if drafts else room)
    rest = _places(to_anchor, total, N * (TAIL_PLACES - 1) if drafts else N * CHUNK)
    options = Options(output_final_state=True, auto_cp=False)

    def packed(places: TokenPlaces) -> Tokens:
        of, token = places.owner, places.token
        new = (bounds[of] + token - tail[of]).clamp(0, max(T - 1, 0))
        old = slots[of], (base[of] + token) % TAIL_PLACES
        from_tail = token < tail[of]

        def mixed(incoming: Tensor, stored: Tensor) -> Tensor:
            return torch.where(_beside(from_tail, incoming), stored[old], incoming[new])

        k, v, g, beta = map(mixed, x[1:], pool[1:5])
        return Tokens(x.q[new], k, v, g, beta)

    def run(tokens: Tokens, places: TokenPlaces, h0: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (t[None] for t in tokens)
        packed_call = Call(q, k, v, g, beta, call.scale, h0, places.bounds.int())
        results = ops.gdn_fwd(packed_call, options)
        assert results.final_state is not None, "it was asked for"
        return results.o[0], results.final_state

    o_first, anchors = run(packed(first), first, anchor_rows.start_states())
    tokens = packed(rest)
    o_rest, _ = run(tokens, rest, anchors)

    slot = torch.where(rest.used, slots[rest.owner], null_slot)
    place = slot, (base[rest.owner] + rest.token) % TAIL_PLACES
    for stored, new in zip(pool[1:5], tokens[1:], strict=True):
        # As integers: under deterministic algorithms torch multiplies what it writes by 1, which
        # changes the bits of a NaN in the slot of padding.
        bits, incoming = (x.view(BITS[stored.itemsize]) for x in (stored, new.to(stored.dtype)))
        bits[place] = torch.where(_beside(rest.used, incoming), incoming, bits[place])
    anchor_rows.take(anchors)
    for count, now in ((pool.anchored, base + to_anchor), (pool.lengths, base + total)):
        count[slots] = torch.where(live, now.int(), count[slots])

    at = torch.arange(T, device=bounds.device)
    owner = _owners(bounds, at)
    token = tail[owner] + at - bounds[owner]
    in_first = token < to_anchor[owner]
    o = torch.where(
        in_first[:, None, None],
        _taken(o_first, first.bounds[owner] + token),
        _taken(o_rest, rest.bounds[owner] + token - to_anchor[owner]),
    )
    o = torch.where(((at < bounds[-1]) & live[owner])[:, None, None], o, 0)
    return o.view(call.v.shape)


def _empty(pool: Slots, slots: Tensor, begins: Tensor) -> None:
    """Empties the slots of sequences that begin, in a call without a token."""
    for stored in (pool.anchors, pool.anchored, pool.lengths):
        bits = stored.view(BITS[stored.itemsize])  # as `extend` does
        bits[slots] = torch.where(_beside(begins, bits), 0, bits[slots])


def _places(begin: Tensor, end: Tensor, room: int) -> TokenPlaces:
    """Packs tokens begin[n] .. end[n] of each sequence; `room` is the most there may be of all."""
    bounds = torch.cat([begin.new_zeros(1), (end - begin).cumsum(0)])
    if not bounds.is_cuda:
        room = int(bounds[-1])
    at = torch.arange(max(room, 1), device=bounds.device)
    owner = _owners(bounds, at)
    return TokenPlaces(bounds, owner, at - bounds[owner] + begin[owner], at < bounds[-1])


def live_slots(state_indices: Tensor, num_slots: int, null_slot: int) -> Tensor:
    """Returns bool [N]: True for real sequences, False for sequences of padding."""
    inside = (state_indices >= 0) & (state_indices < num_slots)
    return inside & (state_indices != null_slot)


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    """Returns mask [T] with the dimensions of x [T, ..]."""
    return mask.reshape(-1, *[1] * (x.dim() - 1))


def _owners(bounds: Tensor, at: Tensor) -> Tensor:
    sequences = torch.searchsorted(bounds[1:].contiguous(), at, right=True)
    return sequences.clamp(max=bounds.shape[0] - 2)


def _taken(o: Tensor, at: Tensor) -> Tensor:
    return o[at.clamp(0, o.shape[0] - 1)]
