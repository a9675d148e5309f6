"""Calls whose lengths the host knows, told apart by their plans and not by their lengths.

A program of `programs.py` repeats a call whose host tensors have the same numbers. Training has new
lengths in every step, but few different plans. So `cu_seqlens_cpu`, which nothing but plans reads,
is replaced by that of an earlier call with the same plans, and the program of that call is found.
plans.c plans the batch: in Python that takes longer than all launches of the call.

Plans decide how fast a call is, and never what it computes.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qla_kernels.gdn import choices, plan, times
from qla_kernels.gdn.keywords import EXACT_BY_DEFAULT, INVARIANT_BY_DEFAULT
from qla_kernels.gdn.lengths import WAVES
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND
from qla_kernels.gdn.shapes import KEY_ROOMS, SHARED_KEYS, WIDE
from qla_kernels.runtime import device
from qla_kernels.tile.constants import CHUNK

MOST = 1024  # batches that stand for others; the oldest is dropped for another

_OTHER_PLANS = frozenset(("warm_log_bound", "enable_fwd_cp_cache"))  # of calls that name them
_NUM_PLANS = 8  # int64 numbers at the end of what plans.c returns
_alike: dict[bytes, Tensor] = {}
_sms: dict[int, int] = {}  # of GPUs
_BOUNDS = WARM_LOG_BOUND, EXACT_LOG_BOUND
_ROOMS = [room for room in KEY_ROOMS if room != WIDE]
_taught: Any = None  # the launcher that has the constants


def representative(
    native: Any, q: Any, v: Any, cu_seqlens: Any, known: Any, options: Mapping[str, Any]
) -> Any:
    """Returns the bounds of an earlier batch that is planned like that of `known`, or `known`.

    Bounds that are not valid, and calls that no program can repeat, are left as they are.

    Args:
        native: the launcher, or None where there are no programs.
        known: `cu_seqlens_cpu` of the call.
        options: the call's other keywords.
    """
    if native is None or type(q) is not Tensor or not _OTHER_PLANS.isdisjoint(options):
        return known
    if native is not _taught:
        _teach(native)
    gpu = q.get_device()
    if gpu not in _sms:
        _sms[gpu] = device.sm_count(q.device)
    exact, invariant = EXACT_BY_DEFAULT, INVARIANT_BY_DEFAULT
    if options:
        exact, invariant = options.get("exact", exact), options.get("batch_invariant", invariant)
    key = native.plans(q, v, cu_seqlens, known, _sms[gpu], bool(exact), torch.is_grad_enabled())
    if key is None:
        return known
    if invariant:  # has one plan for every batch
        key = key[: -8 * _NUM_PLANS]
    found = _alike.get(key)
    if found is None:
        while len(_alike) >= MOST:
            del _alike[next(iter(_alike))]
        found = _alike[key] = copy_of(known)
    return found


def copy_of(known: Tensor) -> Tensor:
    """Returns bounds of our own: the caller may write to theirs."""
    return known.clone()


def forget() -> None:
    """Forgets which batches stand for others, and the constants of the model of times."""
    global _taught
    _alike.clear()
    _taught = None


def _teach(native: Any) -> None:
    global _taught
    native.plan_with(tuple(map(float, constants())))
    _taught = native


def constants() -> Iterator[float]:
    """Yields the numbers of the model of times in the order in which plans.c has them."""
    t, p = times, plan
    yield from (t.LAUNCH, t.START, t.SOLVE_START, t.SOLVE_STEP, t.CUT[False], t.CUT[True])
    yield from (t.GROWTH, p.GAIN, p.GRADIENT_GAIN, p.KEPT_GAIN, p.SHARES_GAIN, p.LEAST_GAIN)
    yield from (*t.UNCUT, t.QUIET, t.BUSY, p.LONG_LOG_BOUND)
    yield from (t.MAP_START[False], t.MAP_START[True], t.GRADIENT_MAP_WAVE, t.LOOK, t.LOOK_STEP)
    yield from (t.SHORT, t.AROUND_BACKWARD, t.MAP_CTAS[False], t.MAP_CTAS[True])
    yield from (*t.MAP_STEP[False], *t.MAP_STEP[True], t.MAP_TILE, t.SCAN_STEP, t.GRADIENT_FOLD)
    yield from (t.COLD_SHARE, t.FORGOTTEN)
    yield from (time for width in t.CHAIN_STEP for time in t.PAIR_STEP[width])
    yield from (t.NEXT_WAVE, t.LATER_WAVES, t.CHUNK_GRADS, t.SHARES, t.NEXT_ITEM, t.FEW_ITEMS)
    yield from (t.SHARE_STEP, t.APART_STEP, t.FAR, t.HANDED, t.MOST_SHARED, p.DEALT_GAIN)
    yield from (choices.KEEPING_GAIN, choices.KEEPING_SHARE, SHARED_KEYS, *_ROOMS, CHUNK)
    yield from (*_BOUNDS, *map(p.gradient_bound, _BOUNDS))
    yield from (len(WAVES), *WAVES, *(math.nan,) * (16 - len(WAVES)))
    yield from (kernel.tile_v for kernel in t.STEP)
    yield from (kernel.solves for kernel in t.STEP)
    yield from (kernel in p.CUT_KERNELS for kernel in t.STEP)
    yield from (*t.STEP.values(), *t.CHAIN_STEP, *t.CHAIN_STEP.values())
