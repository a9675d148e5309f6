"""The operators over a tree on a GPU: the kernels of packed sequences, and a chain for each level.

The nodes are packed sequences of one batch row. All that needs no state runs once, over all nodes:
norms, gates, A, and the gradients of chunks. So does chunk_states, because the states in which
parents end were saved. fused_fwd runs once a level, dstate_chain once a level and block of nodes.
At K = 256 solve_score, wide_fwd, wide_states, wide_dstate and wide_grads do so. No node is cut into
segments.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qla_kernels.gdn import plan as gdn_plan
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.kernels import child_sums as child_sums_kernel
from qla_kernels.gdn.kernels.chain.layout import TILE
from qla_kernels.gdn.launch import activations
from qla_kernels.gdn.launch.backward import flat_readable, gradients_of_chunks
from qla_kernels.gdn.launch.chains import DsInDv, chunk_states, dstate_chain
from qla_kernels.gdn.launch.states import BackwardBatch, ChainStates, ValueStates
from qla_kernels.gdn.launch.steps import Ends, FlatBatch, Outputs, SavedChunks, chain, solve
from qla_kernels.gdn.launch.tensors import fresh_like, key_first
from qla_kernels.gdn.launch.wide_chains import room_for_values, wide_dstate, wide_states
from qla_kernels.gdn.lengths import Lengths, sequence_chunks
from qla_kernels.gdn.ops import GdnBackward
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.shapes import WIDE, key_room, leaves_values
from qla_kernels.gdn.times import both_chains
from qla_kernels.gdn.tree.autograd import TREE_OP
from qla_kernels.gdn.tree.ops import IncomingTree, SavedTree, TreeForward
from qla_kernels.gdn.tree.tables import DeltaTables
from qla_kernels.runtime import device, jit
from qla_kernels.runtime.sm90 import require_aligned
from qla_kernels.runtime.varlen import ChunkTable


def gdn_tree_fwd(call: Call, tables: DeltaTables, options: Options) -> TreeForward:
    """Runs the operator gdn_tree_fwd on CUDA tensors."""
    q, k, v, g, beta, scale, *_ = call
    require_aligned(TREE_OP, q=q, k=k, v=v)
    with device.of(q):
        (HV, V), K = v.shape[2:], q.shape[-1]
        levels, wide = _levels(tables), K == WIDE
        choice = gdn_plan.tree(levels, (HV, K, V, device.sm_count(q.device)))
        as_is = q.dtype if wide or choice.solves else torch.float32  # as gdn_fwd has it
        raw = g, beta, call.A_log, call.dt_bias
        g, beta = activations.activate(*raw, options.beta_range, as_is)
        o, saved = fresh_like(v), None
        size = options.state_size(key_room(K), V)
        states = v.new_empty(tables.num_rows, HV, *size, dtype=torch.float32)
        if options.is_train or wide or not choice.solves:
            saved = SavedChunks.empty(q, g)
        kept = key_first(states, options.state_v_first) if tables.num_rows else None
        x = FlatBatch(q, k, v, g, beta, None, tables.bounds)
        plan, out = Plan(choice, None), Outputs(o, kept, saved)
        solved = solve(x, scale, plan, saved, _chunk_table(tables), None)
        for (a, b), lengths in zip(_pairs(tables.levels), levels, strict=True):
            if wide:
                choice = gdn_plan.wide(b - a, HV, V, device.sm_count(q.device)).kernel
            chain(
                x, scale, choice, solved, out,
                Ends(
                    tables.spans[a:b], kept, kept, tables.level_ends[a:b],
                    tables.level_starts[a:b], tables.level_chunks[a:b],
                ),
                equal_lengths=len(lengths) == 1,
            )  # fmt: skip
    g_cum, A = saved if options.is_train and saved is not None else (None, None)
    return TreeForward(o, states.narrow(_keys(options), 0, K).contiguous(), g_cum, A)


@torch.no_grad()
def gdn_tree_bwd(
    call: Call, tables: DeltaTables, saved: SavedTree, incoming: IncomingTree, options: Options
) -> GdnBackward:
    """Runs the operator gdn_tree_bwd on CUDA tensors."""
    q, k, v, *_ = call
    require_aligned(TREE_OP, q=q, k=k, v=v)
    with device.of(q):
        do = flat_readable(incoming.do.to(v.dtype))
        beta = activations.activate_beta(call.beta, options.beta_range)
        g_cum, A = saved.g_cum.contiguous(), saved.A.contiguous()
        x = BackwardBatch(q, k, v, do, g_cum, beta, A, call.scale, tables.bounds)
        dv, others = v.new_empty(v.shape), (q, k, g_cum, g_cum)
        if not dv.numel():
            dq, dk, dg, dbeta = (t.new_empty(t.shape) for t in others)
        else:
            leaves = leaves_values(q.shape[-1], v.shape[-1])
            around = _value_states_around if leaves else _states_around
            states = around(x, tables, saved.states, incoming.dfinal, dv, options)
            dq, dk, dg, dbeta = (t.new_empty(t.shape) for t in others)
            out = dq, dk, dv, dg, dbeta
            gradients_of_chunks(x, states, out)
            del states
        raw = call.raw_g, call.beta, call.A_log, call.dt_bias
        dg, dbeta, *parameters = activations.backward(*raw, dg, dbeta, options.beta_range, None)
    return GdnBackward(dq, dk, dv, dbeta, dg, None, *parameters)


class _Rows(NamedTuple):
    """States in the rows of the tables, and gradients; the views have K first."""

    h0: Tensor | None  # [rows, HV, K, V] the forward's end states; None if there are no rows
    dht: Tensor | None  # likewise, gradients of these
    dh0: Tensor  # [most siblings, HV, K, V] room for gradients of start states
    ends: Tensor | None  # dht and dh0 as the caller lays states out
    siblings: Tensor


def _rows(tables: DeltaTables, states: Tensor, dfinal: Tensor | None, options: Options) -> _Rows:
    """Returns the rows from which a backward starts, with the gradients of leaves' end states.

    Args:
        states: the forward's end states, in the caller's layout; dfinal likewise, of the leaves.
    """
    K = states.shape[_keys(options)]
    more = key_room(K) - K
    pad = (0, more) if options.state_v_first else (0, 0, 0, more)
    if more:  # as `with_room` says
        states = torch.nn.functional.pad(states, pad)
        dfinal = None if dfinal is None else torch.nn.functional.pad(dfinal, pad)
    ends = torch.zeros_like(states) if tables.num_rows else None
    if ends is not None and dfinal is not None:
        ends[tables.inner.shape[0] :] = dfinal
    most = max((b - a for a, b, *_ in tables.blocks.tolist()), default=0)
    siblings = states.new_empty(most, *states.shape[1:])
    h0, dht, dh0 = (key_first(t, options.state_v_first) for t in (states, ends, siblings))
    assert dh0 is not None
    return _Rows(h0 if tables.num_rows else None, dht, dh0, ends, siblings)


def _run(
    q: Tensor,
    tables: DeltaTables,
    rows: _Rows,
    states: Callable[[], object],
    gradients: Callable[[int, int, int, Tensor | None], object],
) -> None:
    """Runs the two chains of a backward on two streams.

    Args:
        states: launches the chain of states.
        gradients: launches that of gradients over nodes a to b of a level, (a, b, level, dh0).
    """
    blocks, edges = tables.blocks.tolist(), _pairs(tables.levels)
    with device.fork(q) as aside:
        with aside:
            states()
        for level, (begin, end) in reversed([*enumerate(edges)][1:]):
            for a, b, first, last in blocks:  # in ascending order: sums repeat bit for bit
                if begin <= a < end and rows.ends is not None:
                    gradients(a, b, level, rows.dh0[: b - a])
                    child_sums(rows.siblings[: b - a], tables.runs[first:last], rows.ends)
        gradients(*edges[0], 0, None)


def _states_around(
    x: BackwardBatch,
    tables: DeltaTables,
    states: Tensor,
    dfinal: Tensor | None,
    dv: Tensor,
    options: Options,
) -> ChainStates:
    """Computes the state before each chunk and the gradient after it, on two streams.

    Args:
        states, dfinal: as for `_rows`.
        dv: as in launch.states.chains.
    """
    q, k, v, do, g_cum, beta, A, scale, bounds, *_ = x
    (HV, V), K, N = v.shape[2:], k.shape[-1], tables.spans.shape[0]
    lengths, shape = _levels(tables), (HV, K, V, device.sm_count(q.device))
    its = _rows(tables, states, dfinal, options)

    room = tables.chunks.shape[0]
    h = k.new_empty(room, HV, V, K)
    tails = owner = None
    if K == V == 2 * TILE:  # as DsInDv says
        tails, owner = dv.new_empty(N, HV, TILE, K), dv.new_empty(1, dtype=torch.int32)
    dS = k.new_empty(room, HV, V if tails is None else V - TILE, K)

    def gradients(a: int, b: int, level: int, before: Tensor | None) -> None:
        held = None  # an owner is known beforehand; the kernel's is not read
        if tails is not None and owner is not None:
            held = DsInDv(dv, tails[a:b], owner)
        dstate_chain(
            q, k, do, g_cum, beta, A, its.dht, scale, tables.spans[a:b], tables.level_chunks[a:b],
            before, both_chains(lengths[level], shape)[0], held, tables.level_ends[a:b], dS,
        )  # fmt: skip

    def enter() -> None:
        every = tuple(pair for level in lengths for pair in level)
        chunk_states(
            k, v, g_cum, beta, A, its.h0, bounds, tables.first_chunk,
            tile_v=both_chains(every, shape)[0], out=h, starts_of=tables.starts,
        )  # fmt: skip

    _run(q, tables, its, enter, gradients)
    kept = None if tails is None else DsInDv(dv, tails, tables.owner)
    batch, (rows, width) = x.in_parts(), (dS.shape[2], h.shape[3])
    heads, columns = batch.v.shape[2:]
    h = h.view(room, heads, columns, width)
    dS = dS.view(room, heads, rows * HV // heads, width)
    return ChainStates(batch, h, dS, _chunk_table(tables), kept)


def _value_states_around(
    x: BackwardBatch,
    tables: DeltaTables,
    states: Tensor,
    dfinal: Tensor | None,
    dv: Tensor,
    options: Options,
) -> ValueStates:
    """Computes what `_states_around` does, V', Y and dv [B, T, HV, V]."""
    q, k, v, do, g_cum, beta, A, scale, bounds, *_ = x
    its = _rows(tables, states, dfinal, options)
    h, dS = (k.new_empty(tables.chunks.shape[0], *v.shape[2:], k.shape[-1]) for _ in range(2))
    vn, y = room_for_values(h), room_for_values(dS)

    def gradients(a: int, b: int, _: int, before: Tensor | None) -> None:
        wide_dstate(
            q, k, do, g_cum, beta, A, its.dht, scale, tables.spans[a:b], tables.level_chunks[a:b],
            dS, y, dv, before, tables.level_ends[a:b],
        )  # fmt: skip

    def enter() -> None:
        first, starts = tables.first_chunk, tables.starts
        wide_states(k, v, g_cum, beta, A, its.h0, bounds, first, h, vn, starts)

    _run(q, tables, its, enter, gradients)
    return ValueStates(h, vn, dS, y, _chunk_table(tables))


def child_sums(x: Tensor, runs: Tensor, into: Tensor) -> None:
    """Adds the gradients of start states to those of their parents' end states, in order.

    Args:
        x: [children, HV, K, V] fp32, contiguous; into: [rows, HV, K, V] likewise, overwritten.
        runs: [runs, 3] int32, of DeltaTables.
    """
    pieces = -1, child_sums_kernel.CHILD_PIECE
    jit.compile(child_sums_kernel, child_sums_kernel.Variant("float32"))(
        x.view(len(x), *pieces), runs, into.view(len(into), *pieces)
    )


def _keys(options: Options) -> int:
    """Returns which dimension of the caller's states is K."""
    return 3 if options.state_v_first else 2


def _chunk_table(tables: DeltaTables) -> ChunkTable:
    return ChunkTable(tables.chunks, tables.num_chunks, tables.first_chunk)


def _pairs(edges: Tensor) -> list[tuple[int, int]]:
    numbers = edges.tolist()
    return [*itertools.pairwise(numbers)]


def _levels(tables: DeltaTables) -> tuple[Lengths, ...]:
    """Returns the numbers of chunks of each level's nodes, for a plan; reads CPU tensors alone."""
    return _chunks_of(tables.nodes.numpy().tobytes(), tables.levels.numpy().tobytes())


@functools.lru_cache(maxsize=64)
def _chunks_of(nodes: bytes, levels: bytes) -> tuple[Lengths, ...]:
    """Cached: every layer has the same tree."""
    table = np.frombuffer(nodes, np.int32).reshape(-1, 4)
    depth = np.zeros(len(table), dtype=np.int64)
    for node, parent in enumerate(table[:, 2].tolist()):
        depth[node] = 0 if parent < 0 else depth[parent] + 1
    lengths = table[:, 1] - table[:, 0]
    count = len(np.frombuffer(levels, np.int32)) - 1
    return tuple(sequence_chunks(0, 0, lengths[depth == level].tolist()) for level in range(count))
