"""Places in a pool of states, as the forward's chain takes them: of sequences or of segments."""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.launch.segments import Segments
from qla_kernels.gdn.launch.tensors import of_part
from qla_kernels.tile.constants import CHUNK


class Checkpoints(NamedTuple):
    """Where states go that are kept on the way: checkpoints."""

    states: Tensor  # [entries, HV, K, V] in fp32 or bf16, any strides
    entries: Tensor  # [items] int32: the entry of each item's first checkpoint
    chunks: Tensor | None  # [items] int32: chunks before it, -1 for none; `every` if None
    every: int  # chunks from one checkpoint to the next


class Places(NamedTuple):
    """Slots of the items that a chain computes. Numbers are a caller's; the kernel checks them."""

    pool: Tensor  # [slots, HV, K, V] in fp32 or bf16, any strides
    starts: Tensor | None  # [items] int32: the slot of the start state; None: h0 has that
    ends: Tensor  # [items] int32: the slot that the final state goes to
    null_slot: int  # no slot, and no lower number, is a state
    kept: Checkpoints | None

    def of_part(self, rows: slice) -> "Places":
        """Returns the places of some rows of a dense batch."""
        pool, starts, ends, null_slot, kept = self
        if kept is not None:
            states, entries, chunks, every = kept
            entries, chunks = of_part(rows, entries, chunks)
            kept = Checkpoints(states, entries, chunks, every)
        starts, ends = of_part(rows, starts, ends)
        return Places(pool, starts, ends, null_slot, kept)

    def start_states(self) -> Tensor:
        """Returns the start states of the sequences, [N, HV, K, V] fp32: gathers them."""
        assert self.starts is not None, "only segments have start states of their own"
        slots = self._known(self.starts)
        states = self.pool.index_select(0, slots.clamp(min=0)).float()
        return states.masked_fill_((slots < 0).view(-1, 1, 1, 1), 0)

    def of_segments(self, cut: Segments, bounds: Tensor) -> "Places":
        """Returns the places of a sequence's segments; each has its start state in h0.

        bounds: [N + 1] of the sequences.
        """
        begins = cut.bounds[:-1]
        segment = torch.arange(len(begins), dtype=torch.int32, device=begins.device)
        owner = torch.searchsorted(cut.first_segment[1:], segment, right=True)
        owner = owner.clamp(max=len(self.ends) - 1)
        last = cut.ends_of[:-1] >= 0
        ends = torch.where(last, self.ends[owner], -1)
        kept = self.kept
        if kept is not None:
            before = (begins - bounds[owner].int()).clamp(min=0) // CHUNK
            first = torch.full_like(before, kept.every)
            if kept.chunks is not None:
                first = kept.chunks[owner]
            # the checkpoints of earlier segments; one at 0 chunks is that of a first segment
            past = (before - first + kept.every) // kept.every
            done = torch.where((before > 0) & (before >= first), past, 0)
            none = (first < 0) | (segment >= cut.first_segment[-1])  # or of no sequence
            chunks = torch.where(none, -1, first + done * kept.every - before)
            entries = kept.entries[owner] + done
            kept = Checkpoints(kept.states, entries.int(), chunks.int(), kept.every)
        return Places(self.pool, None, ends.int(), self.null_slot, kept)

    def in_fp32(self, N: int) -> "Places":
        """Returns places in fp32 of their own, [N, ..], for the final states of N sequences."""
        states = self.pool.new_empty(N, *self.pool.shape[1:], dtype=torch.float32)
        ends = torch.arange(N, dtype=torch.int32, device=states.device)
        return Places(states, None, ends, -1, self.kept)

    def take(self, final: Tensor) -> None:
        """Writes final states [N, HV, K, V] to their slots."""
        slots = self._known(self.ends)
        live = slots >= 0
        some = live.int().argmax(0, keepdim=True)  # what has no slot does what a live one does
        rows = torch.where(live, torch.arange(len(live), device=live.device), some)
        slots, final = slots[rows].long(), final[rows].to(self.pool.dtype)
        none = ~live.any()
        final = torch.where(none, self.pool[:1], final)
        self.pool.index_copy_(0, slots.clamp(min=0), final)

    def _known(self, slots: Tensor) -> Tensor:
        """Returns slots that are in the pool, and -1 for others."""
        known = (slots > self.null_slot) & (slots < len(self.pool))
        return torch.where(known, slots, -1)
