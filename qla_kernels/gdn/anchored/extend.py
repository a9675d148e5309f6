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
from qla_kernels.runtime.op import Overwritten
from qla_kernels.tile.constants import CHUNK

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a number


class Slots(NamedTuple):
    """A record: the tensors of a `GdnPool`, a state cache with one slot per sequence.

    A slot holds the recurrent state after a number of whole chunks of 64 tokens (the anchor), and
    k, v, g and beta of the tokens since (the tail): token t of the sequence is entry t % 128 of the
    tail. There are H key heads of size K, and HV value heads of size V. One slot is for padding,
    and never changes. Slots may lie any distance apart, for example in the pages of an engine's
    cache.

    Attributes:
        anchors: [slots, HV, K, V] fp32, the state after `anchored` tokens.
        k_tail: [slots, 128, H, K] in the dtype of q.
        v_tail: [slots, 128, HV, V] in the dtype of q.
        g_tail: [slots, 128, HV] fp32, natural log of each token's decay.
        beta_tail: [slots, 128, HV] fp32.
        anchored: [slots] int32, number of tokens before the tail, a multiple of 64.
        lengths: [slots] int32, number of tokens of the sequence so far.
    """

    # The kernels that read anchors have K = 64 and K = 128. For another K, each head of `anchors`
    # must be followed in memory by rows of zeros, up to the next larger of these two numbers.

    anchors: Overwritten
    k_tail: Overwritten
    v_tail: Overwritten
    g_tail: Overwritten
    beta_tail: Overwritten
    anchored: Overwritten
    lengths: Overwritten


def slot_parts(
    H: int, HV: int, K: int, V: int, dtype: torch.dtype, wide: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns (shape, dtype) of one slot of each tensor of `Slots`, in the order of its fields.

    `Slots` are the seven tensors of a state cache: anchors, k, v, g, beta, and two counts.

    Args:
        H, HV: number of key heads and of value heads.
        K, V: sizes of a key and of a value.
        dtype: the dtype of q, k, v and o.
        wide: the dtype of states, g and beta, such as fp32.
    """
    gates, count = ((TAIL_PLACES, HV), wide), ((), torch.int32)
    k, v = ((TAIL_PLACES, H, K), dtype), ((TAIL_PLACES, HV, V), dtype)
    return [((HV, K, V), wide), k, v, gates, gates, count, count]


class Extension(NamedTuple):
    """A record: the slots of a state cache (a `GdnPool`) to which a call appends tokens, and how.

    Attributes:
        state_indices: [N], the slot of each sequence. `null_slot`, and numbers outside the cache,
            mark padding: the tokens are ignored.
        has_initial_state: [N] bool, True for sequences that continue from their slot, False for new
            ones. None: all are new. Not read if `drafts` is True.
        drafts: True for `decode`: all sequences continue, and the new tokens stay in the tails of
            their slots, from which `reject` can remove them. False for `prefill`.
        null_slot: the slot that marks padding.
    """

    state_indices: Tensor
    has_initial_state: Tensor | None
    drafts: bool
    null_slot: int


class Tokens(NamedTuple):
    """A record: the tensors of T packed tokens, as the gated delta rule uses them.

    There are H key heads of size K, and HV value heads of size V.

    Attributes:
        q, k: [T, H, K], already divided by their L2 norm if the layer does that.
        v: [T, HV, V].
        g: [T, HV], natural log of each token's decay.
        beta: [T, HV], after its sigmoid, if it has one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class TokenPlaces(NamedTuple):
    """A record: which token of which sequence each row of a packed tensor holds.

    The tensor has tokens of N sequences of a state cache, one sequence after another, and unused
    rows at the end, because its size must not depend on lengths that only the GPU knows.

    Attributes:
        bounds: [N + 1]; sequence n has the rows bounds[n] to bounds[n + 1].
        owner: [rows], the number of the row's sequence; any number in unused rows.
        token: [rows], the number of the row's token in its sequence, where 0 is the first token
            after the state that the cache has for the sequence.
        used: [rows] bool, False in unused rows.
    """

    bounds: Tensor
    owner: Tensor
    token: Tensor
    used: Tensor


class AnchorRows(NamedTuple):
    """Reads and writes states of a state cache (a `GdnPool`) for N sequences, on a CPU.

    Attributes:
        anchors: [slots, HV, K, V], the states of all slots.
        starts: [N] int32, the slot from whose state a sequence starts; negative: from a state of 0.
        ends: [N] int32, the slot to which its final state is written; negative: to none.
    """

    anchors: Tensor
    starts: Tensor
    ends: Tensor

    def start_states(self) -> Tensor:
        """Returns [N, HV, K, V], the state from which each sequence starts: a slot's, or 0."""
        states = self.anchors[self.starts.clamp(min=0)]
        return torch.where((self.starts >= 0)[:, None, None, None], states, 0)

    def take(self, final: Tensor) -> None:
        """Writes the final state of each sequence, final [N, HV, K, V], to its slot of the pool.

        Sequences whose field `ends` is negative have no slot, and are skipped.
        """
        live = self.ends >= 0
        self.anchors[self.ends[live]] = final[live]


def extend(call: Call, pool: Slots, extension: Extension, rows: Any = AnchorRows) -> Tensor:
    """Appends tokens to sequences of a state cache, and computes their gated delta rule.

    Returns o [B, T, HV, V] of the new tokens; 0 for padding and for tokens past the last sequence.

    Args:
        call: the new tokens: q, k (already normalised), v, g (log of the decay) and beta.
        pool: the tensors of the cache, which are updated in place.
        extension: the slots of the sequences, and which of them are new.
        rows: the class that reads and writes states: AnchorRows, or one with the same constructor
            and methods for a GPU.
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
    """Returns bool [N]: True for sequences whose index is a slot of the pool, False for padding.

    Args:
        state_indices: [N], the slot of each sequence.
        num_slots: number of slots; numbers outside 0 .. num_slots - 1 mark padding.
        null_slot: a slot that marks padding too.
    """
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
