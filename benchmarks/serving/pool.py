"""A pool of states as an engine has it: pages with room for other layers' data, in any order."""

import torch
from torch import Tensor

PAGE = 4096  # numbers of a page that belong to something else
BESIDE = 5  # slots of other sequences, for each sixteen that are in use


def pool_of(states: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """A pool [num_slots, HV, V, K] with states [n, HV, V, K] in `slots`, and NaN in all others.

    A page is longer than a state. Slot 0 is no state.
    """
    size = states[0].numel()
    pages = states.new_full((num_slots, size + PAGE), torch.nan)
    pool = torch.unflatten(pages[:, :size], 1, states.shape[1:])
    pool[slots.long()] = states
    return pool


def shuffled(count: int, seed: int, device: torch.device) -> tuple[Tensor, int]:
    """So many slots in random order, int32, and the size of a pool that has them among others."""
    others = 1 + BESIDE * count // 16
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count + others, generator=generator)[:count] + 1
    return order.to(device, torch.int32), 1 + count + others


def from_minus_one(slots: Tensor) -> Tensor:
    """Slots of an interface in which -1 is padding, and slot 0 is a state."""
    return torch.where(slots == 0, -1, slots)
