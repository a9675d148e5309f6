"""The chains of a rank at K = 256, which make the links themselves: no kernel maps open ends.

A link [b | M] is what a chain makes of start states. b is the end state of the sequence from a
state of zeros, and M that of unit vectors as columns, with values of zeros. Likewise, b' is the
gradient of the start state if the end state has none, and M^T that of unit vectors, if outputs have
none. So the chain of each direction runs twice over a sequence that goes on elsewhere: for the
link, b and M side by side, and, after the exchange, for the results. Nothing is left out of M,
whatever `warm_log_bound` is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.launch.states import BackwardBatch, ValueStates
from qla_kernels.gdn.launch.steps import FlatBatch, SavedChunks
from qla_kernels.gdn.launch.tensors import chunk_table, spans
from qla_kernels.gdn.launch.wide_chains import room_for_values, wide_dstate, wide_states
from qla_kernels.gdn.launch.wide_forward import solve_score, wide_fwd
from qla_kernels.gdn.sharded.exchange import Neighbours
from qla_kernels.runtime import device


class _Sequences(NamedTuple):
    """Some of a rank's sequences, as the chains take them."""

    first_chunk: Tensor  # [n] int32
    spans: Tensor  # [n, 2] int32


def wide_shard_forward(
    x: FlatBatch, scale: float, o: Tensor, saved: SavedChunks, line: Neighbours
) -> Tensor | None:
    """Runs the forward of a rank with tokens; writes o and saved.

    Returns:
        The states that enter this rank's stretches, of `line.entering`. Collective.
    """
    q, k, v, g, beta, _, bounds = x
    (HV, V), K, its = v.shape[2:], k.shape[-1], line.stretches
    bounds = bounds.int()
    table = chunk_table(v.shape[0] * v.shape[1], bounds)
    P, gates = solve_score(q, k, g, beta, scale, table, saved)

    def chain(of: _Sequences, v: Tensor, h0: Tensor | None, ht: Tensor, o: Tensor) -> None:
        tile_v = _tile_v(of.spans.shape[0], v)
        wide_fwd(q, k, v, saved.A, P, gates, of.first_chunk, h0, of.spans, o, ht, tile_v)

    links = g.new_zeros(len(its), HV, V + K, K)
    leave = _rows([one.after > 0 for one in its])
    through = _rows([one.after > 0 and one.through for one in its])
    units, nothing = _units(g, len(its[through]), K), _zeros(v, K, bool(its[through]))
    of_b, of_M = (
        _sequences([one.end - 1 for one in its[rows]], table.first_chunk, bounds)
        for rows in (leave, through)
    )
    with device.fork(q) as aside:
        if of_M is not None:
            with aside:  # a CTA reads the values of a chunk before it writes its output
                chain(of_M, nothing, units, links[through, :, V:].mT, nothing)
        if of_b is not None:  # o is written again below
            chain(of_b, v, None, links[leave, :, :V].mT, o)
    entered = line.entering(list(links))
    starts = None if entered is None else _rows_at([one.first for one in its], bounds)
    if entered is not None:
        o.zero_()  # with starts_of, wide_fwd does not clear rows of padding
    h0, tile_v = None if entered is None else entered.mT, _tile_v(bounds.shape[0] - 1, v)
    first = table.first_chunk
    wide_fwd(q, k, v, saved.A, P, gates, first, h0, bounds, o, None, tile_v, starts)
    return entered


def wide_shard_states(
    x: BackwardBatch, dv: Tensor, line: Neighbours, entered: Tensor | None
) -> ValueStates:
    """Returns the results of both chains of a backward of a rank with tokens. Collective.

    Args:
        x: the batch, without states.
        dv: [1, T, HV, V], written for tokens of sequences.
        entered: of the forward.
    """
    q, k, v, do, g_cum, beta, A, scale, bounds, *_ = x
    (HV, V), K, its = v.shape[2:], k.shape[-1], line.stretches
    bounds = bounds.int()
    table = chunk_table(v.shape[0] * v.shape[1], bounds)
    first, room = table.first_chunk, table.chunks.shape[0]
    dS = k.new_empty(room, HV, V, K)
    y = room_for_values(dS)
    links = _gradient_links(x._replace(bounds=bounds), first, dS, y, dv, line)
    leaving = line.leaving(links)
    h = k.new_empty(room, HV, V, K)  # allocated only now: temporaries of the links are free
    vn = room_for_values(h)
    starts = None if entered is None else _rows_at([one.first for one in its], bounds)
    ends = None if leaving is None else _rows_at([one.end - 1 for one in its], bounds)
    h0, dht = (None if t is None else t.mT for t in (entered, leaving))
    with device.fork(q) as aside:  # the chain that takes longer is launched first
        wide_dstate(q, k, do, g_cum, beta, A, dht, scale, bounds, first, dS, y, dv, None, ends)
        with aside:
            wide_states(k, v, g_cum, beta, A, h0, bounds, first, h, vn, starts)
    return ValueStates(h, vn, dS, y, table)


def _gradient_links(
    x: BackwardBatch, first_chunk: Tensor, dS: Tensor, y: Tensor, dv: Tensor, line: Neighbours
) -> list[Tensor]:
    """Returns the link of the first sequence of each stretch, [HV, V + K, K]: [b' | M^T].

    dS, y and dv are of the whole batch; wide_dstate writes them here, and again later.
    """
    q, k, v, do, g_cum, beta, A, scale, bounds, *_ = x
    (HV, V), K, its = v.shape[2:], k.shape[-1], line.stretches

    links = g_cum.new_zeros(len(its), HV, V + K, K)
    leave = _rows([one.before > 0 for one in its])
    through = _rows([one.before > 0 and one.through for one in its])
    units, nothing = _units(g_cum, len(its[through]), K), _zeros(do, K, bool(its[through]))
    dS_of_M = dS.new_empty(dS.shape[0] if its[through] else 0, HV, K, K)
    y_of_M = room_for_values(dS_of_M)
    b, M = links[leave, :, :V].mT, links[through, :, V:].mT
    of_b, of_M = (
        _sequences([one.first for one in its[rows]], first_chunk, bounds)
        for rows in (leave, through)
    )
    with device.fork(q) as aside:
        if of_M is not None:
            with aside:  # a CTA reads the gradients of a chunk before it writes dV
                wide_dstate(
                    q, k, nothing, g_cum, beta, A, units, scale, of_M.spans, of_M.first_chunk,
                    dS_of_M, y_of_M, nothing, M,
                )  # fmt: skip
        if of_b is not None:
            wide_dstate(
                q, k, do, g_cum, beta, A, None, scale, of_b.spans, of_b.first_chunk, dS, y, dv, b
            )
    return list(links)


def _rows(wanted: Sequence[bool]) -> slice:
    """Returns the rows that are wanted, which lie side by side, as there are at most two."""
    rows = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    return slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)


def _sequences(numbers: Sequence[int], first_chunk: Tensor, bounds: Tensor) -> _Sequences | None:
    """Returns the sequences of these numbers; None if there is none."""
    if not numbers:
        return None
    of_all = spans(bounds)
    return _Sequences(*(torch.stack([x[n] for n in numbers]) for x in (first_chunk, of_all)))


def _rows_at(sequences: Sequence[int], bounds: Tensor) -> Tensor:
    """Returns [N] int32: i for the sequence number sequences[i], -1 for all others."""
    rows = bounds.new_full((bounds.shape[0] - 1,), -1)
    for i, n in enumerate(sequences):
        rows[n].fill_(i)
    return rows


def _units(like: Tensor, num: int, K: int) -> Tensor:
    """Returns unit vectors as the columns of states, [num, HV, K, K] fp32."""
    eye = torch.eye(K, dtype=like.dtype, device=like.device)
    return eye.expand(num, like.shape[-1], K, K)


def _zeros(like: Tensor, K: int, wanted: bool) -> Tensor:
    """Returns zeros [B, T, HV, K] in like's dtype, or an empty tensor if they are not wanted."""
    B, T, HV, _ = like.shape
    return like.new_zeros(B, T if wanted else 0, HV, K)


def _tile_v(num_sequences: int, v: Tensor) -> int:
    HV, V = v.shape[2:]
    return gdn_plan.wide(num_sequences, HV, V, device.sm_count(v.device)).kernel.tile_v
