"""Places in a pool of states, as the forward's chain takes them: of sequences or of segments."""

from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn.kernels import pool_states as pool_states_kernel
from qla_kernels.gdn.kernels import segment_places as segment_places_kernel
from qla_kernels.gdn.launch.segments import Segments
from qla_kernels.gdn.launch.tensors import of_part
from qla_kernels.runtime import jit
from qla_kernels.runtime.device_tables import kept as kept_tables
from qla_kernels.runtime.sm90 import dtype_name, low_words


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
        N, (_, HV, K, V) = self.starts.shape[0], self.pool.shape
        if self.pool.stride(3) == 1:
            states = self.pool.new_empty(N, HV, K, V, dtype=torch.float32)
        else:
            states = self.pool.new_empty(N, HV, V, K, dtype=torch.float32).mT
        self._move(states, self.starts, gathers=True)
        return states

    def of_segments(self, cut: Segments, bounds: Tensor, num_tokens: int) -> "Places":
        """Returns the places of a sequence's segments; each has its start state in h0.

        bounds: [N + 1] of the sequences.
        """
        ends, chunks, entries = (self.ends.new_empty(cut.capacity) for _ in range(3))
        kept = self.kept or Checkpoints(self.pool, self.ends, None, 1)
        jit.compile(segment_places_kernel, segment_places_kernel.VARIANTS[0])(
            low_words(bounds),
            cut.bounds,
            cut.first_segment,
            cut.ends_of,
            self.ends,
            kept.entries,
            self.ends if kept.chunks is None else kept.chunks,
            ends,
            chunks,
            entries,
            kept.every,
            int(kept.chunks is not None),
            num_tokens,
        )
        if self.kept is not None:
            kept = Checkpoints(kept.states, entries, chunks, kept.every)
        return Places(self.pool, None, ends, self.null_slot, self.kept and kept)

    def in_fp32(self, N: int) -> "Places":
        """Returns places in fp32 of their own, [N, ..], for the final states of N sequences."""
        states = self.pool.new_empty(N, *self.pool.shape[1:], dtype=torch.float32)
        return Places(states, None, numbered(states.device, N), -1, self.kept)

    def take(self, final: Tensor) -> None:
        """Writes final states [N, HV, K, V] fp32 to their slots."""
        self._move(final, self.ends, gathers=False)

    def _move(self, rows: Tensor, slot_of: Tensor, gathers: bool) -> None:
        """Moves states between slots and rows, with the pool's inner axis last."""
        pool = self.pool
        if pool.stride(3) != 1:
            pool, rows = pool.mT, rows.mT
        variant = pool_states_kernel.Variant(dtype_name(pool.dtype))
        jit.compile(pool_states_kernel, variant)(pool, rows, slot_of, self.null_slot, int(gathers))


@kept_tables(64)
def numbered(on: torch.device, N: int) -> Tensor:
    """Returns 0 .. N - 1."""
    return torch.arange(N, dtype=torch.int32, device=on)
