"""Defects are built into the package, one at a time, and each is found within a few cases."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from qla_kernels.dualkv import assemble, batch, microbatch
from qla_kernels.gdn.decode import api as recurrent
from qla_kernels.runtime.signature import Signature
from qla_kernels.sparse_ring import balance, index, layouts, select
from qla_kernels.sparse_ring import cpu as sparse_cpu
from reference import conv as conv_reference
from reference import dualkv as dualkv_reference
from reference import gdn as gdn_reference
from reference import gdn_chunked
from tests.fuzz import session, wrong
from tests.fuzz.targets import TARGETS

MOST = 60  # cases until a defect must have been found

Change = Callable[..., Any]  # the original function and its arguments, to the result


def changed(home: Any, name: str, change: Change) -> Any:
    original = getattr(home, name)
    return mock.patch.object(home, name, lambda *args, **flags: change(original, *args, **flags))


def argument(n: int, change: Callable[[Any], Any]) -> Change:
    return lambda original, *args, **flags: original(
        *args[:n], change(args[n]), *args[n + 1 :], **flags
    )


def result(change: Callable[[Any], Any]) -> Change:
    return lambda original, *args, **flags: change(original(*args, **flags))


def field(name: str, change: Callable[[Any], Any]) -> Change:
    return result(lambda done: done._replace(**{name: change(getattr(done, name))}))


def no_decay_of_states(tiles: Any) -> Any:
    G, e, d, last = tiles
    return G, e, d, torch.ones_like(last)


def empty_sequences_end_in_zero(original: Any, *args: Any) -> Any:
    done, bounds = original(*args), args[7]
    if bounds is not None and len(bounds) > 1:
        alive = (bounds.diff() > 0).reshape(-1, 1, 1, 1)
        done = done._replace(final_state=done.final_state * alive)
    return done


def norm_without_projection(original: Any, x: Any, dy: Any) -> Any:
    return (dy / x.square().sum(-1, keepdim=True).add(1e-6).sqrt()).to(x.dtype)


def first_slot_is_touched(original: Any, *args: Any, **flags: Any) -> Any:
    o = original(*args, **flags)
    args[1].states[:1] += 1
    return o


def one_more_sees_it(nodes: Any) -> Any:
    nodes = nodes.clone()
    nodes[:, 2] = torch.where(nodes[:, 2] < nodes[-1:, 1], nodes[:, 2] + 1, nodes[:, 2])
    return nodes


def halves_swapped(original: Any, self: Any, token: Any, T: int) -> Any:
    half = T // self.world // 2
    return (original(self, token, T) + half) % (2 * half)


def orphans(nodes: Any) -> Any:
    """Nodes that begin from nothing."""
    return nodes * torch.tensor([1, 1, 0]) - torch.tensor([0, 0, 1])


def no_gradient_of_halos(original: Any, *args: Any, **flags: Any) -> Any:
    """A tree's tokens get gradients from their own node alone."""
    done = original(*args, **flags)
    return done._replace(dx=original(*args[:6], **flags).dx) if len(args) > 6 else done


def heads_without_projection(original: Any, y: Any, dy: Any, heads: Any) -> Any:
    """The gradient of a norm as if the norm was a constant."""
    count, size = heads
    first = y[:, : count * size].unflatten(-1, (count, size))
    norms = (first.square().sum(-1, keepdim=True) + 1e-6).sqrt().expand(first.shape).flatten(-2)
    return torch.cat([dy[:, : count * size] / norms, dy[:, count * size :]], -1)


DEFECTS: dict[str, tuple[str, Any, str, Change]] = {
    "scale": ("gdn.chunk", gdn_reference, "chunked", argument(5, lambda scale: 1.001 * scale)),
    "head mapping": ("gdn.chunk", gdn_reference, "chunked", argument(1, lambda k: k.roll(1, 2))),
    "no decay between chunks": (
        "gdn.forward",
        gdn_chunked,
        "decay_tiles",
        result(no_decay_of_states),
    ),
    "empty sequences": ("gdn.forward", gdn_reference, "chunked", empty_sequences_end_in_zero),
    "a term of the norm's gradient": (
        "gdn.chunk",
        gdn_reference,
        "l2norm_backward",
        norm_without_projection,
    ),
    "gradient of the final state": (
        "gdn.backward",
        gdn_reference,
        "chunked_backward",
        argument(7, lambda dht: None),
    ),
    "another parent": ("gdn.tree", gdn_reference, "tree_chunked", argument(5, orphans)),
    "states before chunks": ("gdn.forward", gdn_reference, "chunked", field("h", lambda h: h / 2)),
    "another slot": ("gdn.recurrent", recurrent, "gdn_recurrent_slots", first_slot_is_touched),
    "the weights' order": ("conv.causal", conv_reference, "_taps", result(lambda w: w.flip(0))),
    "an ancestor's token": (
        "conv.shared",
        conv_reference,
        "sources",
        argument(2, lambda halo: halo if halo is None else halo.flip(1)),
    ),
    "a term of heads' gradient": (
        "conv.causal",
        conv_reference,
        "_before_norm",
        heads_without_projection,
    ),
    "gradients of halos": ("conv.shared", conv_reference, "backward", no_gradient_of_halos),
    "one token more": (
        "dualkv.attention",
        dualkv_reference,
        "by_nodes",
        argument(3, one_more_sees_it),
    ),
    "key heads": (
        "dualkv.attention",
        dualkv_reference,
        "by_nodes",
        argument(1, lambda k: k.flip(1)),
    ),
    "gradient of lse": (
        "dualkv.attention",
        dualkv_reference,
        "by_nodes_backward",
        argument(6, lambda dlse: None),
    ),
    "queries of responses": (
        "dualkv.varlen",
        dualkv_reference,
        "by_nodes",
        argument(4, lambda scale: 1.001 * scale),
    ),
    "positions": ("dualkv.pack_prefix_tree", assemble, "_positions", result(lambda p: p % 2)),
    "groups": ("dualkv.pack_padded", assemble, "_multiplicity", result(lambda m: m.clamp(max=1))),
    "temperature": (
        "dualkv.gather_logprobs",
        batch,
        "target_logprobs",
        argument(3, lambda temperature: 1.0),
    ),
    "room": (
        "dualkv.plan_microbatches",
        microbatch,
        "_first_fit",
        argument(1, lambda room: room + 1),
    ),
    "one column more": (
        "sparse_ring.sparse_attention",
        sparse_cpu,
        "_columns_seen_by",
        field("seen", lambda seen: seen | seen.roll(1, -1)),
    ),
    "gradient of columns": (
        "sparse_ring.sparse_attention",
        sparse_cpu,
        "scatter",
        lambda original, *args: None,
    ),
    "one line more": ("sparse_ring.build_index", select, "_fewest", result(lambda n: n + 1)),
    "lines given": (
        "sparse_ring.build_index",
        index,
        "_each",
        lambda original, lines, H: original(lines[:1], H),
    ),
    "halves of a shard": ("sparse_ring.shard", layouts.ZigZagLayout, "local", halves_swapped),
    "transfers": (
        "sparse_ring.balance_report",
        balance,
        "_timeline",
        argument(3, lambda x_outer: 0.0),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_found(defect):
    name, home, function, change = DEFECTS[defect]
    with changed(home, function, change):
        tallies = session.run(
            {name: TARGETS[name]},
            lambda _: iter(range(MOST)),
            lambda tallies: not tallies[name].failures,
        )
    (failure,) = tallies[name].failures
    assert failure.error.startswith("AssertionError"), failure.error  # a wrong result, not a crash


def test_an_unclear_error_is_found():
    with changed(Signature, "check", lambda original, signature, op, *tensors, **sizes: None):
        found = wrong.problems("gdn.chunk", TARGETS["gdn.chunk"], range(1))
    assert "AttributeError" in found["gdn.chunk(q=None)"]


def test_an_argument_that_is_dropped_is_found():
    run = TARGETS["dualkv.to_padded"].run
    target = TARGETS["dualkv.to_padded"]._replace(run=lambda **x: run(**{**x, "width": None}))
    found = wrong.problems("dualkv.to_padded", target, range(6))
    assert any(case.startswith("dualkv.to_padded(width=") for case in found)


def test_a_failure_is_made_simpler():
    """What does not matter to it is at its first option."""
    name, home, function, change = DEFECTS["scale"]
    target = TARGETS[name]
    with changed(home, function, change):
        seed = next(n for n in range(MOST) if session.attack(name, target, n) is not None)
        failure = session.attack(name, target, seed)
        simple = session.smaller(name, target, failure)
    assert "dtype=torch.float64" in simple
    assert "strides of q=contiguous" in simple
