"""The operator gdn_prefill: the forward on a pool of states, without results.

It writes o and checkpoints to tensors of the caller. CUDA tensors go to prefill/launch.py, which is
imported at the first call with one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.call import Call, Options
from qla_kernels.runtime import contents
from qla_kernels.runtime.contents import check_words
from qla_kernels.runtime.cpu import reference
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.op import Overwritten, op
from qla_kernels.tile.constants import CHUNK

PREFILL_OP = "prefill_gated_delta_rule"


class Prefill(NamedTuple):
    """Where sequences start and end, and which states are kept on the way."""

    states: Overwritten  # the pool: [slots, HV, K, V], or [slots, HV, V, K] if state_v_first
    state_indices: Tensor  # [N]: the slot that a final state goes to
    start_indices: Tensor | None  # [N]: the slot to start from; state_indices if None
    checkpoints: Overwritten | None  # [entries, HV, K, V], or [.., V, K]; fp32 or bf16
    checkpoint_starts: Tensor | None  # [N] or [N + 1]: the first entry of a sequence
    first_checkpoints: Tensor | None  # [N]: chunks of 64 tokens before it; negative for none
    o: Overwritten  # [B, T, HV, V] in q's dtype
    every: int  # tokens between checkpoints, a multiple of 64; 0 for one a sequence at most
    null_slot: int = -1

    def first_entries(self, num_sequences: int) -> Tensor:
        """Returns the entry of each sequence's first checkpoint, [N]."""
        if self.checkpoint_starts is None:
            return torch.arange(num_sequences, device=self.states.device)
        return self.checkpoint_starts[:num_sequences]


def _stops(prefill: Prefill, n: int, length: int) -> list[int]:
    """Returns after how many tokens of sequence n its state is kept."""
    if prefill.checkpoints is None:
        return []
    first = prefill.every
    if prefill.first_checkpoints is not None:
        first = int(prefill.first_checkpoints[n]) * CHUNK
        if first < 0:
            return []
    return list(range(first, length + 1, prefill.every or length + 1))


def check_places(call: Call, prefill: Prefill, *_: Any) -> None:
    """Raises ValueError if bounds, slots or entries are wrong.

    A slot may be the start of several sequences, but the end of one, and only its own start.
    """
    contents.check_bounds(PREFILL_OP, call.q.shape[1], call.cu_seqlens, call.cu_seqlens_cpu)
    slots, null = len(prefill.states), prefill.null_slot
    ends = prefill.state_indices.tolist()
    starts = ends
    contents.check_places(PREFILL_OP, "state_indices", prefill.state_indices, slots, null)
    if (given := prefill.start_indices) is not None:
        contents.check_places(PREFILL_OP, "start_indices", given, slots, null, apart=False)
        starts = given.tolist()
    for n, start in enumerate(starts):
        if start > null and start in ends and ends[n] != start:
            got = f"sequence {n} starts from slot {start}, to which another one's final state goes"
            needs = "a start that nobody overwrites"
            raise ValueError(need(PREFILL_OP, got, needs, "copy the state, or run them in turn"))
    if prefill.checkpoints is None:
        return
    if prefill.first_checkpoints is not None:
        check_words(PREFILL_OP, "first_checkpoints", prefill.first_checkpoints)
    bounds, N = call.cu_seqlens, call.num_sequences
    lengths = [call.q.shape[1]] * N if bounds is None else bounds.diff().tolist()
    first = prefill.first_entries(N).tolist()
    places = [first[n] + i for n in range(N) for i in range(len(_stops(prefill, n, lengths[n])))]
    room = len(prefill.checkpoints)
    if len(set(places)) < len(places) or not all(0 <= place < room for place in places):
        got = f"checkpoints at entries {places}"
        fix = "count each sequence's, and give it as many entries"
        raise ValueError(need(PREFILL_OP, got, f"different ones below {room}", fix))


@op("qla_kernels.gdn.prefill.launch", check=check_places)
def gdn_prefill(call: Call, prefill: Prefill, options: Options) -> None:
    check_places(call, prefill)
    gdn, null, bounds = reference().gdn, prefill.null_slot, call.cu_seqlens
    q, k, v, g, beta, scale, *_ = call
    if call.A_log is not None:
        g = gdn.gate(g, call.A_log, call.dt_bias)
    if options.use_beta_sigmoid_in_kernel:
        beta = gdn.beta_sigmoid(beta, options.allow_neg_eigval)
    T, N = q.shape[1], call.num_sequences
    pool, kept = (
        x.mT if options.state_v_first and x is not None else x
        for x in (prefill.states, prefill.checkpoints)
    )
    assert pool is not None, "the call has one"
    from_ = prefill.state_indices if prefill.start_indices is None else prefill.start_indices
    starts = [pool[slot].clone() if slot > null else None for slot in from_.tolist()]
    entries = prefill.first_entries(N).tolist()
    prefill.o.zero_()
    for n, (slot, state) in enumerate(zip(prefill.state_indices.tolist(), starts, strict=True)):
        row, first, end = n, 0, T
        if bounds is not None:
            row, first, end = 0, int(bounds[n]), int(bounds[n + 1])
        h = None if state is None else state[None]
        begin, keep = first, _stops(prefill, n, end - first)
        for entry, stop in enumerate([*keep, None], entries[n]):
            until = end if stop is None else first + stop
            at = slice(row, row + 1), slice(begin, until)
            done = gdn.chunked(q[at], k[at], v[at], g[at], beta[at], scale, h, None, CHUNK)
            prefill.o[at], h, begin = done.o, done.final_state, until
            if stop is not None:
                assert kept is not None, "_stops has none without them"
                kept[entry] = h[0].to(kept.dtype)
        if slot > null and h is not None:
            pool[slot] = h[0].to(pool.dtype)
