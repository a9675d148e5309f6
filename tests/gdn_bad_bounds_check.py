"""Wrong bounds and slots for every kernel of gdn: contents, and the launches that meet them.

Emulated and device tiers; what comes out is not looked at.
"""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from qla_kernels.gdn import GdnPool, bands, plan
from qla_kernels.gdn.anchored import launch as launch_anchored
from qla_kernels.gdn.anchored.extend import Slots
from qla_kernels.gdn.anchored.ops import Rejection
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.decode import launch as launch_recurrent
from qla_kernels.gdn.decode.ops import Drafts, Norm, Pool
from qla_kernels.gdn.launch import backward as launch_backward
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.plan import Band, Plan
from qla_kernels.gdn.prefill import launch as launch_prefill
from qla_kernels.gdn.prefill.ops import Prefill
from qla_kernels.gdn.sharded import exchange
from qla_kernels.gdn.sharded import launch as launch_shards
from qla_kernels.gdn.sharded.layouts import ShardPlace
from qla_kernels.gdn.sharded.ops import Arriving
from qla_kernels.gdn.times import ForwardChoice

# Of three sequences, in so many tokens: gates of two heads end at whole 16 bytes, as then does what
# qla_kernels/lab/emulator/process.py guards.
TOKENS = 136
LEAST, MOST = -(2**31), 2**31 - 1

RIGHT = [0, 60, 130, 136]
BOUNDS = {
    "first above 0": [5, 60, 130, 136],
    "first negative": [-3, 60, 130, 136],
    "negative": [0, -64, 70, 136],
    "all negative": [-9, -9, -5, -1],
    "falling": [0, 100, 30, 136],
    "last falls": [0, 60, 136, 30],
    "only falling": [136, 130, 60, 0],
    "past the end": [0, 60, 130, 200],
    "one before past the end": [0, 60, 300, 136],
    "all past the end": [137, 200, 300, 10**6],
    # three chunks, none and three: more than such bounds' tables have room for
    "over one another": [0, TOKENS, 0, TOKENS],
    "extremes": [LEAST, MOST, LEAST, MOST],
    "extremes, turned": [MOST, LEAST, MOST, LEAST],
    "a difference past int32": [LEAST, MOST, 0, 5],
    "beyond int32": [-(2**40) - 7, 2**40 + 60, 2**33 + 130, -(2**35)],
}

NUM_SLOTS = 4
SLOTS = {
    "past the pool": [0, NUM_SLOTS, 2],
    "far past the pool": [MOST, 10**6, 7],
    "negative": [-1, LEAST, -2],
    "the same": [2, 2, 2],
    "beyond int32": [2**40 + 9, -(2**40), 2**33 + 1],
}

N, H, HV, SIZE = 3, 1, 2, 128
SCALE = SIZE**-0.5
GIVEN = ForwardChoice(128, False)
SOLVING, SOLVING_TWO_TILES = ForwardChoice(64, True), ForwardChoice(128, True)


class Setting(NamedTuple):
    place: Callable[[Tensor], Tensor]  # to where kernels find it
    patch: pytest.MonkeyPatch

    def rows(self, heads: int, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.place(torch.randn(1, TOKENS, heads, *size).div(8).to(dtype))

    def gates(self) -> tuple[Tensor, Tensor]:
        g, beta = torch.randn(2, 1, TOKENS, HV)
        return self.place(-g.exp()), self.place(beta.sigmoid())

    def states(self, num: int = N) -> Tensor:
        return self.place(torch.randn(num, HV, SIZE, SIZE))


def forward(how: Plan, s: Setting, bounds: Tensor, on_cpu: Tensor | None = None) -> None:
    """With the state of each chunk if the CPU knows the bounds."""
    s.patch.setattr(launch, "planned", lambda *_: (how, False))
    rows = s.rows(H, SIZE), s.rows(H, SIZE), s.rows(HV, SIZE), *s.gates()
    options = Options(output_final_state=True, output_h=on_cpu is not None, is_train=True)
    launch.gdn_fwd(Call(*rows, SCALE, s.states(), bounds, on_cpu), options)


def wide_forward(limit: float | None, s: Setting, bounds: Tensor) -> None:
    """At K = 256, which has kernels of its own; with a limit of windows, in segments."""
    how = Plan(ForwardChoice(64, False), None if limit is None else 1, limit or 0.0)
    s.patch.setattr(launch, "planned", lambda *_: (how, False))
    rows = s.rows(H, 2 * SIZE), s.rows(H, 2 * SIZE), s.rows(HV, SIZE), *s.gates()
    h0 = s.place(torch.randn(N, HV, 2 * SIZE, SIZE))
    options = Options(output_final_state=True, is_train=True)
    launch.gdn_fwd(Call(*rows, SCALE, h0, bounds), options)


def states_out(s: Setting, bounds: Tensor) -> None:
    """Room for the states of right bounds, which the CPU is told of."""
    forward(Plan(SOLVING, None), s, bounds, torch.tensor(RIGHT))


def backward(rows: tuple[Band, ...], s: Setting, bounds: Tensor) -> None:
    """Of raw gates, and of q before its norm."""
    chains = Plan(ForwardChoice(128, False), bands=rows)
    s.patch.setattr(bands, "backward", lambda *_: chains)
    (g_cum, beta), x, A = s.gates(), s.rows(H, SIZE), s.rows(HV, 64)
    parameters = (s.place(torch.zeros(HV)) for _ in range(2))
    rows = launch.l2norm_fwd(x), s.rows(H, SIZE), s.rows(HV, SIZE), g_cum, beta
    done = launch_backward.gdn_bwd(
        Call(*rows, SCALE, s.states(), bounds, None, *parameters),
        SavedForward(g_cum, A, []),
        Incoming(s.rows(HV, SIZE), s.states()),
        Options(use_beta_sigmoid_in_kernel=True),
    )
    launch_backward.l2norm_bwd(x, done.dq, bounds)


def wide_backward(s: Setting, bounds: Tensor) -> None:
    """At K = 256, which has kernels of its own."""
    q, k = (s.rows(H, 2 * SIZE) for _ in range(2))
    v, do = (s.rows(HV, SIZE) for _ in range(2))
    (g_cum, beta), A = s.gates(), s.rows(HV, 64)
    h0, dht = (s.place(torch.randn(N, HV, 2 * SIZE, SIZE)) for _ in range(2))
    call = Call(q, k, v, g_cum, beta, SCALE, h0, bounds)
    launch_backward.gdn_bwd(call, SavedForward(g_cum, A, []), Incoming(do, dht), Options())


def shards(
    kernel: ForwardChoice, stretches: int, s: Setting, bounds: Tensor, K: int = SIZE
) -> None:
    """Sequences that come from another rank and go on at another, at both ends of stretches."""
    s.patch.setattr(plan, "forward", lambda *_, **__: Plan(kernel, 1))
    s.patch.setattr(plan, "backward", lambda *_, **__: 1)
    s.patch.setattr(exchange, "group_named", lambda _: SimpleNamespace(rank=lambda: 1))
    s.patch.setattr(exchange, "gather", lambda links, _: torch.stack([links] * 3))
    s.patch.setattr(exchange, "folded", lambda links, _, V, *__: links[0, :, :, :V].transpose(0, 1))
    sizes = (H, K), (H, K), (HV, SIZE), (HV, SIZE)
    q, k, v, do = (s.rows(*size) for size in sizes)
    (g, beta), A = s.gates(), s.rows(HV, 64)
    entered = s.place(torch.randn(stretches, HV, SIZE, K))
    call, options = Call(q, k, v, g, beta, SCALE, None, bounds), Options(is_train=True)
    place = ShardPlace("", [1] * stretches, [1] * stretches, front=1)
    launch_shards.gdn_shard_fwd(call, options, place)
    launch_shards.gdn_shard_bwd(call, SavedForward(g, A, []), Arriving(do, entered), options, place)


def decode(s: Setting, bounds: Tensor | None, slots: Tensor | None = None) -> None:
    """Without bounds, a token for each of the sequences."""
    q, k, v = (s.rows(heads, SIZE) for heads in (H, H, HV))
    g, beta = s.gates()
    if bounds is None:
        q, k, v, g, beta = (s.place(x[:, :N].transpose(0, 1).clone()) for x in (q, k, v, g, beta))
    call, options = Call(q, k, v, g, beta, SCALE, None, bounds), Options(output_final_state=True)
    if slots is None:
        launch_recurrent.gdn_recurrent(call._replace(initial_state=s.states()), options)
        return
    pool = s.states(NUM_SLOTS)
    before, named = pool.clone(), slots.int().tolist()  # of an int64 the low word counts
    o = torch.empty_like(v)
    launch_recurrent.gdn_recurrent_slots(call, Pool(pool, slots, o), options)
    for slot in range(NUM_SLOTS):
        assert slot in named or torch.equal(pool[slot], before[slot])
    if bounds is None:
        assert not any(o[n].any() for n in range(N) if not 0 <= named[n] < NUM_SLOTS)


def decode_slots(s: Setting, bounds: Tensor) -> None:
    decode(s, bounds, s.place(torch.tensor([1, -1, 2])))


def decode_with_norm(s: Setting, slots: Tensor) -> None:
    q, k, v = (s.place(s.rows(n, SIZE)[:, :N].transpose(0, 1).clone()) for n in (H, H, HV))
    g, beta = (s.place(x[:, :N].transpose(0, 1).clone()) for x in s.gates())
    pool, o = s.states(NUM_SLOTS), s.place(torch.full_like(v, torch.nan))
    norm = Norm(s.place(torch.randn_like(v[:, 0])), s.place(torch.ones(SIZE)), 1e-6, sigmoid=False)
    before, named = pool.clone(), slots.int().tolist()
    call = Call(q, k, v, g, beta, SCALE)
    launch_recurrent.gdn_recurrent_norm(call, Pool(pool, slots, o), norm, Options())
    for slot in range(NUM_SLOTS):
        assert slot in named or torch.equal(pool[slot], before[slot])
    assert not any(o[n].any() for n in range(N) if not 0 <= named[n] < NUM_SLOTS)


WRONG = [MOST, -5, 0]  # numbers of accepted tokens, and parents


def verify(s: Setting, bounds: Tensor, slots: Tensor, tree: bool) -> None:
    """A tree keeps states in a row of entries a sequence; drafts one after another, in slots."""
    q, k, v = (s.rows(heads, SIZE) for heads in (H, H, HV))
    call, options = Call(q, k, v, *s.gates(), SCALE, None, bounds), Options()
    accepted = kept = rows = parents = None
    if tree:
        kept, rows = s.states(4 * N).view(N, 4, HV, SIZE, SIZE), slots.flip(0)
        parents = s.place(torch.tensor([[0, *WRONG], [-1, 0, 0, 1], [0, 0, LEAST, 2]]))
    else:
        slots = torch.stack([slots, slots - 1], 1)
        accepted = s.place(torch.tensor(WRONG))
    pool = s.states(NUM_SLOTS)
    drafts = Drafts(pool, slots, accepted, kept, rows, parents, torch.empty_like(v))
    before, named = pool.clone(), slots.int().tolist()
    launch_recurrent.gdn_verify(call, drafts, options)
    for slot in range(NUM_SLOTS):
        written = not tree and any(slot in of_sequence for of_sequence in named)
        assert written or torch.equal(pool[slot], before[slot])


def verify_slots(s: Setting, bounds: Tensor) -> None:
    verify(s, bounds, s.place(torch.tensor([1, -1, 3])), tree=False)


def verify_tree(s: Setting, bounds: Tensor) -> None:
    verify(s, bounds, s.place(torch.tensor([1, -1, 2])), tree=True)


def extend_pool(s: Setting, slots: Tensor) -> None:
    """Slots whose counts of tokens are wrong too, as after too many were taken back."""
    pool = GdnPool(NUM_SLOTS - 1, H, HV, SIZE, SIZE, device="cpu").tensors
    pool.lengths.copy_(torch.tensor([-7, 10**6, 64, 5]))
    pool.anchored.copy_(torch.tensor([0, 64, 128, 0]))
    pool = Slots(*map(s.place, pool))
    x = [t[:, : 4 * N].reshape(N, 4, *t.shape[2:]) for t in (s.rows(1, SIZE), s.rows(2, SIZE))]
    g, beta = (s.place(t[:, : 4 * N].reshape(N, 4, HV)) for t in s.gates())
    k, v = map(s.place, x)
    before, named = pool.anchors.clone(), slots.int().tolist()
    null = NUM_SLOTS - 1
    launch_anchored.decode(pool, Call(k, k, v, g, beta, SCALE), slots, null)
    launch_anchored.gdn_pool_reject(Rejection(pool.lengths, pool.anchored, slots, slots, null))
    for slot in range(NUM_SLOTS):
        assert slot in named or torch.equal(pool.anchors[slot], before[slot])


def prefill(s: Setting, bounds: Tensor, slots: Tensor) -> None:
    """In a pool in bf16, with checkpoints; each chunk is a segment."""
    s.patch.setattr(launch_prefill, "planned", lambda *_, **__: (Plan(SOLVING, 1), False))
    rows = s.rows(H, SIZE), s.rows(H, SIZE), s.rows(HV, SIZE), *s.gates()
    pool, kept = (s.place(s.states(NUM_SLOTS).bfloat16()) for _ in range(2))
    places = pool, slots, slots, kept, slots, None, s.rows(HV, SIZE), 64, -1
    launch_prefill.gdn_prefill(Call(*rows, SCALE, None, bounds), Prefill(*places), Options())


CHAINS = {"chunk_table", "chunk_states", "dstate_chain", "chunk_grads"}
WIDE_FORWARD = {"chunk_table", "gate", "solve_score", "wide_fwd"}
WIDE_CUT = {"segment_plan", "wide_windows", "wide_map", "wide_scan"}
WIDE = {"chunk_table", "wide_states", "wide_dstate", "wide_grads"}
RAW = {"l2norm", "l2norm_bwd", "activate", "activate_bwd", "gate_sums"}
SOLVE = {"gate", "kkt_solve"}
CUT = {"segment_plan", "segment_map", "segment_scan"}
RANKS = {"link_start", "link_rows", "link_fold", "segment_map_bwd", "fused_fwd"} | CUT | CHAINS
POOL = {"pool_states", "segment_places", "fused_fwd"} | CUT
# child_sums reads tables that are made on the host, from lengths; the others know no sequences
NO_BOUNDS = {"child_sums", "repeat_gates", "part_sums"}
Part = tuple[Callable[[Setting, Tensor], None], set[str]]
PARTS: dict[str, Part] = {  # and the kernels that each launches
    "forward, A given": (
        functools.partial(forward, Plan(GIVEN, None)), {"chunk_table", "fused_fwd"} | SOLVE,
    ),
    "forward": (functools.partial(forward, Plan(SOLVING, None)), {"fused_fwd"}),
    "forward of two tiles": (
        functools.partial(forward, Plan(SOLVING_TWO_TILES, None)), {"fused_fwd"},
    ),
    "forward of equal shares": (
        functools.partial(forward, Plan(SOLVING_TWO_TILES, None, shares=True)),
        {"share_table", "fused_fwd"},
    ),
    "forward of equal shares or whole items": (
        functools.partial(forward, Plan(SOLVING_TWO_TILES, None, shares=True, most_cut=1)),
        {"share_table", "fused_fwd"},
    ),
    "segments or equal shares": (
        functools.partial(
            forward,
            bands.banded({0: (SOLVING_TWO_TILES, 0), 3: (SOLVING, 8)}, SOLVING, -12.0, most_cut=1),
        ),
        {"share_table", "fused_fwd"} | CUT,
    ),
    "segments, A given": (
        functools.partial(forward, bands.banded({0: (GIVEN, 8)}, GIVEN, -30.0)),
        {"fused_fwd"} | SOLVE | CUT,
    ),
    "segments": (
        functools.partial(forward, bands.banded({0: (SOLVING, 8)}, SOLVING, -12.0)),
        {"fused_fwd"} | CUT,
    ),
    "segments or whole": (
        functools.partial(
            forward, bands.banded({0: (SOLVING_TWO_TILES, 0), 2: (SOLVING, 8)}, SOLVING, -12.0)
        ),
        {"fused_fwd"} | CUT,
    ),
    "forward of wide keys": (functools.partial(wide_forward, None), WIDE_FORWARD),
    "forward of wide keys in segments": (
        functools.partial(wide_forward, -12.0), WIDE_FORWARD | WIDE_CUT,
    ),
    "forward of wide keys in folded segments": (
        functools.partial(wide_forward, -math.inf), WIDE_FORWARD | WIDE_CUT,
    ),
    "states": (states_out, {"fused_fwd", "chunk_table", "chunk_states"}),
    "backward": (functools.partial(backward, ()), CHAINS | RAW),
    "backward of wide keys": (wide_backward, WIDE),
    "backward in segments": (
        functools.partial(backward, (Band(0, 0, 8),)),
        {"segment_map_bwd"} | CUT | CHAINS | RAW,
    ),
    "shards, A given": (functools.partial(shards, GIVEN, 1), RANKS | SOLVE),
    "shards": (functools.partial(shards, SOLVING, 1), RANKS),
    "shards in zigzag": (functools.partial(shards, SOLVING, 2), RANKS),
    "prefill in segments": (
        lambda s, x: prefill(s, x, s.place(torch.tensor([2, 0, 1]))), POOL,
    ),
    "shards of wide keys": (
        functools.partial(shards, GIVEN, 2, K=2 * SIZE),
        {"gate", "solve_score", "wide_fwd"} | WIDE,
    ),
    "decoding": (decode, {"recurrent"}),
    "decoding in slots": (decode_slots, {"recurrent"}),
    "verifying": (verify_slots, {"verify"}),
    "verifying a tree": (verify_tree, {"verify"}),
}  # fmt: skip

OF_SLOTS: dict[str, Part] = {  # those with wrong slots, and right bounds or none
    "decoding": (lambda s, x: decode(s, None, x), {"recurrent"}),
    "decoding a pack": (
        lambda s, x: decode(s, s.place(torch.tensor(RIGHT)), x), {"recurrent"},
    ),
    "decoding with a norm": (decode_with_norm, {"recurrent_norm"}),
    "verifying": (
        lambda s, x: verify(s, s.place(torch.tensor(RIGHT)), x, tree=False), {"verify"},
    ),
    "verifying a tree": (
        lambda s, x: verify(s, s.place(torch.tensor(RIGHT)), x, tree=True), {"verify"},
    ),
    "prefill in segments": (lambda s, x: prefill(s, s.place(torch.tensor(RIGHT)), x), POOL),
    "a pool's step": (extend_pool, {"append_tokens", "anchored_fwd", "reject_tokens"}),
}  # fmt: skip
