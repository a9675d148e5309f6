"""What programs do with public calls: the launch code of families, on the stand-in driver.

Each function without an underscore is a test. `python -m tests.native.families` runs all of them;
it has to be started by `standin.run`. CPU tensors go to the host code of GPUs, and each launch to a
kernel made up from the arguments of that launch. It takes up to POINTERS addresses and NUMBERS
integers, so that the driver writes down which tensors each launch was given.
"""

import functools
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels import (
    causal_conv1d,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    decode_gated_delta_net,
    gated_rms_norm,
    packed_decode_gated_delta_rule,
)
from qla_kernels.conv import launch as conv_launch
from qla_kernels.conv import ops as conv_ops
from qla_kernels.conv import prefill as conv_prefill
from qla_kernels.conv import update as conv_update
from qla_kernels.conv.prefill import prefill_causal_conv1d
from qla_kernels.dualkv import SharedLayout
from qla_kernels.gdn import GdnPool, api, known
from qla_kernels.gdn import autograd as gdn
from qla_kernels.gdn import ops as gdn_ops
from qla_kernels.gdn.anchored import launch as pool_launch
from qla_kernels.gdn.anchored import pool as gdn_pool
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.decode import launch as decode_launch
from qla_kernels.gdn.decode import packed
from qla_kernels.gdn.launch import backward as gdn_backward
from qla_kernels.gdn.launch import forward as gdn_forward
from qla_kernels.gdn.shapes import VALUE_KERNELS, leaves_values
from qla_kernels.gdn.sharded import exchange
from qla_kernels.gdn.sharded import launch as shard_launch
from qla_kernels.gdn.sharded import ops as shard_ops
from qla_kernels.gdn.sharded.layouts import ShardPlace
from qla_kernels.gdn.tree import autograd as tree
from qla_kernels.gdn.tree import launch as tree_launch
from qla_kernels.gdn.tree import ops as tree_ops
from qla_kernels.gdn.tree.tables import ON_HOST
from qla_kernels.hybrid import delta_tables, shared_prefix_conv1d, shared_prefix_gated_delta_rule
from qla_kernels.hybrid import step as hybrid_step
from qla_kernels.norm import launch as norm_launch
from qla_kernels.norm import ops as norm_ops
from qla_kernels.runtime import device, jit, programs
from qla_kernels.runtime.native.pack import pack, texts
from qla_kernels.runtime.native.trace import Trace
from qla_kernels.runtime.programs import Programs
from qla_kernels.sparse_ring import FixedVerticalSlash, build_index, ring, shard, sparse_attention
from qla_kernels.sparse_ring import gradients as sparse_gradients
from qla_kernels.sparse_ring import launch as sparse_launch
from qla_kernels.sparse_ring import ops as sparse_ops
from tests.native import programs as by_hand
from tests.native import standin
from tests.native.behaviour import CUBIN

POINTERS, NUMBERS = 24, 16
# Numbers that a GPU would have are not compared: segments that a forward keeps are not written here
NATIVE, DRIVER = standin.replaying(passing=True), by_hand.DRIVER

_kernels: dict[tuple[str, tuple[Any, ...]], Any] = {}
_launched: list[Any] = []  # launchers, in the order of their launches
_on_host: set[int] = set()  # addresses of tables that launch code reads
_phases: list[int] = []  # sizes of the record when a backward began, or a rank's gather
_forwards: list[tuple[int, int]] = []  # the phase of a forward's results, and their number


class Launch(NamedTuple):
    """What the driver was given."""

    name: str
    numbers: tuple[int, ...]
    phase: int  # in which a usual call may not have had the same memory for two tensors
    addresses: tuple[int, ...]


def _made_up(module: Any, variant: Any) -> Callable[..., None]:
    label = jit.label(module, variant)

    def launch(*given: Any) -> None:
        key = label, tuple(map(standin.like, given))
        if key not in _kernels:
            entry = standin.entry(jit.function_name(module, variant), given, POINTERS, NUMBERS)
            assert len(entry["arguments"]) == POINTERS + NUMBERS
            _kernels[key] = NATIVE.launcher(
                label, entry["function"], CUBIN, pack(entry), *texts(entry)
            )
        _launched.append(_kernels[key])
        _kernels[key](*given)

    return launch


jit.compile = _made_up
Trace.is_of_host = staticmethod(  # type: ignore[method-assign]
    lambda x: x.data_ptr() in _on_host or DRIVER.is_on_host(x.data_ptr())
)
device.of, device.sm_count = nullcontext, lambda _: 132  # type: ignore[assignment, misc]
gdn_ops.gdn_fwd, gdn_ops.gdn_bwd = gdn_forward.gdn_fwd, gdn_backward.gdn_bwd
gdn_ops.l2norm_fwd, gdn_ops.l2norm_bwd = gdn_forward.l2norm_fwd, gdn_forward.l2norm_bwd
tree_ops.gdn_tree_fwd, tree_ops.gdn_tree_bwd = tree_launch.gdn_tree_fwd, tree_launch.gdn_tree_bwd
shard_ops.gdn_shard_fwd = shard_launch.gdn_shard_fwd
shard_ops.gdn_shard_bwd = shard_launch.gdn_shard_bwd
exchange.group_named = lambda _: SimpleNamespace(rank=lambda: 1)  # type: ignore[assignment, return-value]
for _operators, _launches, _names in (
    (conv_ops, conv_launch, ("conv_fwd", "conv_bwd", "conv_update", "conv_prefill")),
    (norm_ops, norm_launch, ("gated_norm_fwd", "gated_norm_into", "gated_norm_bwd")),
):
    for _name in _names:
        getattr(_operators, _name).on_cpu = getattr(_launches, _name)
packed.gdn_recurrent_slots = decode_launch.gdn_recurrent_slots
packed.gdn_recurrent_norm = decode_launch.gdn_recurrent_norm
gdn_pool.gdn_pool_extend = pool_launch.gdn_pool_extend
gdn_pool.gdn_pool_reject = pool_launch.gdn_pool_reject


def _copy_of(bounds: Tensor) -> Tensor:
    copy = bounds.clone()
    _on_host.add(copy.data_ptr())
    return copy


known.copy_of = _copy_of
INDEX = build_index(
    *torch.zeros(2, 1, 512, 2, 64, dtype=torch.bfloat16), FixedVerticalSlash([0, 5, 300], [0, 2])
)
for _module in (ring, shard, sparse_gradients):
    _module.launches = lambda _: sparse_launch  # type: ignore[attr-defined]


def _gathered(links: Tensor, _: Any) -> Tensor:
    """Returns the links of two ranks; what follows is another program, with other rooms."""
    _phases.append(len(DRIVER.record()))
    return torch.stack([links] * 2)


exchange.gather = _gathered


def _launches(run: Callable[[], Any]) -> tuple[list[Launch], Any]:
    """Returns the launches of kernels of a call, and its results."""
    DRIVER.expect("p" * POINTERS + "i" * NUMBERS)
    _phases.clear()
    _forwards.clear()
    results = run()
    record, found = DRIVER.record(), []
    whole = len(record)
    size = 7 * 4 + 8 + 4  # numbers, stream, dependent
    room = struct.Struct(f"={POINTERS}Q{NUMBERS}i")
    while record:
        name, record = record.split(b"\0", 1)
        if name in (b"fill", b"copy"):  # by torch, if the call is not replayed
            record = record[2 * 8 :]  # address, stream
            continue
        numbers = room.unpack_from(record, size)
        phase = sum(whole - len(record) > begin for begin in _phases)
        found.append(Launch(name.decode(), numbers[POINTERS:], phase, numbers[:POINTERS]))
        record = record[size + room.size :]
    return found, results


def _same(first: list[Launch], then: list[Launch]) -> dict[tuple[int, int], int]:
    """Compares launches; returns what each address of `then`, in a phase, was in `first`.

    Memory that a usual call frees may be its next room, so that several addresses become one. In a
    replay all rooms of a phase exist at a time; a forward's may be a backward's results.
    """
    assert [x[:3] for x in first] == [x[:3] for x in then]
    meaning: dict[tuple[int, int], int] = {}
    for a, b in zip(first, then, strict=True):
        for was, now in zip(a.addresses, b.addresses, strict=True):
            if was:  # a tensor without elements has no address
                assert meaning.setdefault((a.phase, now), was) == was, "a tensor became another"
    return meaning


def _is_replayed(run: Callable[[], tuple[Tensor, ...]], *tables: Programs) -> list[str]:
    """Checks that the third call is replayed, with the launches of the first; returns their names.

    `run` returns results of the call, which are new tensors.
    """
    programs.forget()
    first, results = _launches(run)
    assert first
    recorded, _ = _launches(run)
    before, launched = [table.replays() for table in tables], len(_launched)
    replayed, again = _launches(run)
    for table, count in zip(tables, before, strict=True):
        assert table.replays() == count + 1, f"{table.name} has no program"
    assert len(_launched) == launched, _launched[launched:]
    _same(first, recorded)
    moved = _same(first, replayed)
    phase, of_forward = (_forwards or [(len(_phases), len(results))])[0]
    for i, (x, y) in enumerate(zip(results, again, strict=True)):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        if x.data_ptr() != y.data_ptr():
            where = phase if i < of_forward else len(_phases)
            was = moved.get((where, y.data_ptr()), x.data_ptr())
            assert was == x.data_ptr()
    os.environ["QLA_CHECK_PROGRAMS"] = "1"
    run()
    del os.environ["QLA_CHECK_PROGRAMS"]
    return [x.name for x in replayed]


def _step(run: Callable[..., Any], *given: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a function that runs forward and backward, and returns results and gradients."""
    upstream: list[Tensor] = []

    def step() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in given]
        done = run(*leaves)
        done = done if isinstance(done, tuple) else (done,)
        if not upstream:
            upstream.extend(map(torch.ones_like, done))
        _forwards.append((len(_phases), len(done)))
        _phases.append(len(DRIVER.record()))
        grads = torch.autograd.grad(done, leaves, upstream, allow_unused=True)  # not copies of them
        return *(x.detach() for x in done), *(x for x in grads if x is not None)

    return step


def _gdn(tokens: int, K: int = 128, V: int = 128, H: int = 2, HV: int = 4) -> Iterator[Tensor]:
    for heads, size in ((H, K), (H, K), (HV, V)):  # q, k, v
        yield torch.zeros(1, tokens, heads, size, dtype=torch.bfloat16)
    yield torch.zeros(1, tokens, HV)
    yield torch.zeros(1, tokens, HV, dtype=torch.bfloat16)


def _with_states(
    x: list[Tensor], sequences: int, v_first: bool, bounds: Tensor | None = None
) -> list[str]:
    """Trains with start states that want gradients; returns the names of launches."""
    (*_, HV, V), K = x[2].shape, x[0].shape[3]
    start = torch.zeros(sequences, HV, *((V, K) if v_first else (K, V)))
    options = {"output_final_state": True, "state_v_first": v_first, "cu_seqlens": bounds}

    def run(*given: Tensor) -> Any:
        *x, start = given
        return chunk_gated_delta_rule(*x, initial_state=start, **options)

    names = _is_replayed(_step(run, *x, start), gdn.FORWARDS, gdn.BACKWARDS)

    def infer() -> Any:
        with torch.no_grad():
            return run(*x, start)

    _is_replayed(infer, api.CALLS)
    return names


def gated_delta_rule() -> None:
    names = _is_replayed(
        _step(lambda *x: chunk_gated_delta_rule(*x)[0], *_gdn(512)), gdn.FORWARDS, gdn.BACKWARDS
    )
    assert any("chunk_grads" in name for name in names)


def lengths_that_the_device_alone_knows() -> None:
    """Equal shares: one launch code, and so one graph, whatever the lengths."""

    def call(x: list[Tensor], bounds: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return chunk_gated_delta_rule(*x, cu_seqlens=bounds, output_final_state=True)

    for heads, count, kernels in ((64, 3, 2), (48, 4, 4)):  # the latter with another path
        x, launched = [*_gdn(count * 8192, H=16, HV=heads)], []
        for cuts in ((8192, 16384, 24576), (0, 5, 5), (20_000, 24_000, 24_576)):
            bounds = torch.tensor([0, *cuts[: count - 1], count * 8192], dtype=torch.int32)
            run = functools.partial(call, x, bounds)
            names = _is_replayed(run, api.CALLS)
            assert len(names) == kernels
            assert sum("share_table" in name for name in names) == 1
            launched.append([each[:3] for each in _launches(run)[0]])
        assert launched[1:] == launched[:-1]


def gated_delta_rule_of_three_parts() -> None:
    """K that is no variant's, and value heads of three tiles: as three heads, or as one."""
    for K, kernels in ((48, ("repeat_gates", "part_sums")), (96, VALUE_KERNELS)):
        step = _step(lambda *x: chunk_gated_delta_rule(*x)[0], *_gdn(512, K, 192))
        names = _is_replayed(step, gdn.FORWARDS, gdn.BACKWARDS)
        for kernel in kernels:
            assert any(kernel in name for name in names), kernel


def gradients_of_start_states_of_segments() -> None:
    """Of one sequence, of a batch, and of sequences whose lengths the device alone knows."""
    one = [*_gdn(8192, H=4, HV=8)]
    batch = [x.repeat(3, *[1] * (x.dim() - 1)) for x in _gdn(8192)]
    bounds = torch.tensor([0, 3000, 8192], dtype=torch.int32)
    for v_first in (False, True):
        for x, sequences in ((one, 1), (batch, 3)):
            names = _with_states(x, sequences, v_first)
            assert any("segment_map_bwd" in name for name in names)
        _with_states(one, 2, v_first, bounds)


def states_of_wide_values_and_narrow_keys() -> None:
    """States are copied where value heads have parts, and where a variant has another K."""
    for v_first in (False, True):
        for sizes, parts in (((128, 256), 2), ((48, 192), 3), ((96, 192), 1), ((96, 128), 1)):
            chains = not leaves_values(*sizes)  # else wide_states, for which nothing has parts
            for tokens, copies in ((512, 3), (8192, 1)):  # whole sequences, and segments
                names = _with_states([*_gdn(tokens, *sizes)], 1, v_first)
                is_cut = any("segment_map_bwd" in name for name in names)
                assert is_cut == (tokens > 512)
                want = 1 if is_cut else 0 if v_first or parts == 1 else copies
                assert sum("chunk_states" in name for name in names) == chains + want


def gated_delta_rule_of_wide_keys() -> None:
    x = [*_gdn(300)]
    x[:2] = (torch.zeros(1, 300, 2, 256, dtype=torch.bfloat16) for _ in range(2))
    step = _step(lambda *x: chunk_gated_delta_rule(*x)[0], *x)
    names = _is_replayed(step, gdn.FORWARDS, gdn.BACKWARDS)
    assert sum("wide_fwd" in name for name in names) == 1


def segments_of_wide_keys() -> None:
    """Of one sequence, of a batch, and of sequences whose lengths the device alone knows."""
    one = [*_gdn(32768, 256, 64)]
    batch = [x.view(2, -1, *x.shape[2:]) for x in one]
    bounds = torch.tensor([0, 3000, 32768], dtype=torch.int32)
    for v_first in (False, True):
        for x, sequences, cuts in ((one, 1, None), (batch, 2, None), (one, 2, bounds)):
            names = _with_states(x, sequences, v_first, cuts)
            for kernel in ("wide_windows", "wide_map", "wide_scan", "wide_fwd"):
                assert sum(kernel in name for name in names) == 1, names


def ranks_that_share_a_sequence() -> None:
    """In both layouts, plans that solve for A before the chain or in it, raw gates, padded keys."""
    for each, heads, K, raw in (
        (1, (16, 32), 128, False),
        (2, (16, 32), 128, True),
        (2, (2, 4), 96, True),
    ):
        x, half = [*_gdn(1024, K, 128, *heads)], [512] * (each - 1)
        bounds = torch.tensor([0, *half, 1024], dtype=torch.int32)
        before, after = ([1], [0]) if each == 1 else ([0, 3], [3, 0])
        place = ShardPlace("", before, after, front=1)
        options = Options(is_train=True, use_beta_sigmoid_in_kernel=raw)
        gate = [torch.zeros(heads[1]), torch.ones(heads[1])] if raw else []

        def run(
            *x: Tensor, place: Any = place, options: Any = options, cuts: Any = bounds
        ) -> Tensor:
            q, k, v, g, beta, *gate = x
            call = Call(q, k, v, g, beta, 1.0, None, cuts, None, *gate)
            return gdn.apply_sharded(call, options, place)

        tables = *shard_launch.SHARD_FORWARDS, *shard_launch.SHARD_BACKWARDS
        names = _is_replayed(_step(run, *x, *gate), *tables)
        assert sum("link_start" in name for name in names) == (1 if each == 1 else 2)
        assert sum("link_fold" in name for name in names) == (2 if each == 1 else 3)


LAYOUT = SharedLayout.from_forest((130, 70, 0, 64, 40, 1, 65), (-1, 0, 0, 0, 3, 0, 0))
for _with_states_after in False, True:
    _tables = delta_tables.prepare(LAYOUT, _with_states_after)
    _on_host.update(x.data_ptr() for x in _tables[:ON_HOST])


def trees() -> None:
    """A forest of three levels: chains for each level, gradients of siblings added up."""

    def run(*x: Tensor) -> Tensor:
        return shared_prefix_gated_delta_rule(*x, LAYOUT)[0]

    names = _is_replayed(
        _step(run, *_gdn(LAYOUT.num_tokens)), tree.TREE_FORWARDS, tree.TREE_BACKWARDS
    )
    assert sum("fused_fwd" in name for name in names) == 3
    assert sum("dstate_chain" in name for name in names) == 3
    assert sum("child_sums" in name for name in names) == 2


def trees_of_wide_keys() -> None:
    def run(*x: Tensor) -> Tensor:
        return shared_prefix_gated_delta_rule(*x, LAYOUT)[0]

    x = _gdn(LAYOUT.num_tokens, 256, 64)
    names = _is_replayed(_step(run, *x), tree.TREE_FORWARDS, tree.TREE_BACKWARDS)
    assert sum("wide_fwd" in name for name in names) == 3
    assert sum("wide_dstate" in name for name in names) == 3


def trees_with_final_states() -> None:
    def run(*x: Tensor) -> Any:
        return shared_prefix_gated_delta_rule(*x, LAYOUT, output_final_state=True)

    _is_replayed(_step(run, *_gdn(LAYOUT.num_tokens)), tree.TREE_FORWARDS, tree.TREE_BACKWARDS)


def trees_without_gradients() -> None:
    """The norms of q and k belong to the program."""
    x = [*_gdn(LAYOUT.num_tokens)]

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return shared_prefix_gated_delta_rule(*x, LAYOUT, use_qk_l2norm_in_kernel=True)[:1]

    names = _is_replayed(run, tree.TREE_FORWARDS)
    assert sum("l2norm" in name for name in names) == 2


def many_nodes() -> None:
    """Their lengths, which the host has, are compared."""
    parents = -1, *[0] * 299
    lengths = (64, *[3] * 299), (64, *[3] * 299), (64, *[3] * 297, 2, 4)
    layouts = [SharedLayout.from_forest(x, parents) for x in lengths]
    x = [*_gdn(64 + 3 * 299)]
    for layout in layouts:
        tables = delta_tables.prepare(layout, False)
        for table in (tables.nodes, tables.levels):
            assert DRIVER.on_host(table.data_ptr(), table.nbytes)

    def run(layout: SharedLayout) -> Tensor:
        with torch.no_grad():
            return shared_prefix_gated_delta_rule(*x, layout)[0]

    programs.forget()
    for layout in (layouts[0], layouts[0], layouts[1]):
        run(layout)
    assert tree.TREE_FORWARDS.replays() == 1
    run(layouts[2])
    assert tree.TREE_FORWARDS.replays() == 1
    DRIVER.on_host(0, 0)


def convolution() -> None:
    weight, bias = torch.zeros(64, 4, dtype=torch.bfloat16), torch.zeros(64)
    x = torch.zeros(1, 300, 64, dtype=torch.bfloat16)
    tables = conv_ops.conv_fwd.programs, conv_ops.conv_bwd.programs
    names = _is_replayed(
        _step(lambda x, w, b: causal_conv1d(x.mT, w, b, "silu"), x, weight, bias), *tables
    )
    assert len(names) == 3
    for bounds in (torch.tensor([0, 7, 300]), torch.tensor([0, 7, 300], dtype=torch.int32)):
        _is_replayed(
            _step(lambda x, w, to=bounds: causal_conv1d(x[0], w, cu_seqlens=to), x, weight), *tables
        )
    with torch.no_grad():
        _is_replayed(lambda: (causal_conv1d(x[0], weight),), tables[0])


def in_place() -> None:
    """A prompt that goes on from a pool of last tokens, and a norm that writes where it reads."""
    half = {"dtype": torch.bfloat16}
    x, weight = torch.zeros(300, 64, **half), torch.zeros(64, 4)
    last = torch.zeros(5, 3, 64, **half).mT
    tables = torch.tensor([0, 7, 300]), torch.tensor([4, 2])

    def prompt() -> tuple[Tensor, ...]:
        version = last._version
        y = prefill_causal_conv1d(x, last, weight, None, "silu", *tables)
        assert last._version == version + 1
        return (y,)

    assert len(_is_replayed(prompt, conv_prefill.PREFILLS)) == 1
    z, scale = torch.zeros(300, 4, 128, **half), torch.zeros(128)

    def norm() -> tuple[Tensor, ...]:
        version = z._version
        norm_ops.gated_norm_into.replayed(z, z, scale, 1e-5, True, z)
        assert z._version == version + 1
        return ()

    assert len(_is_replayed(norm, norm_ops.gated_norm_into.programs)) == 1


def gated_norm() -> None:
    """With a gate that is a slice of a projection, and packed."""
    x, weight = torch.zeros(300, 4, 128, dtype=torch.bfloat16), torch.zeros(128)
    z = torch.zeros(300, 600, dtype=torch.bfloat16)[:, 8:520].unflatten(1, (4, 128))
    tables = norm_ops.gated_norm_fwd.programs, norm_ops.gated_norm_bwd.programs
    for bounds in (None, torch.tensor([0, 7, 290]), torch.tensor([0, 7, 290], dtype=torch.int32)):

        def run(*given: Tensor, bounds: Tensor | None = bounds) -> Tensor:
            return gated_rms_norm(*given, 1e-5, "sigmoid", bounds)

        assert len(_is_replayed(_step(run, x, z, weight), *tables)) == 3
    with torch.no_grad():
        _is_replayed(lambda: (gated_rms_norm(x, z, weight),), tables[0])


def convolution_over_a_tree() -> None:
    weight = torch.zeros(64, 4, dtype=torch.bfloat16)
    x = torch.zeros(LAYOUT.num_tokens, 64, dtype=torch.bfloat16)
    names = _is_replayed(
        _step(lambda x, w: shared_prefix_conv1d(x, w, None, LAYOUT), x, weight),
        conv_ops.conv_fwd.programs,
        conv_ops.conv_bwd.programs,
    )
    assert len(names) == 4


def steps_of_decoding() -> None:
    """With slots in either width, to a tensor of the caller and to a new one."""
    half = {"dtype": torch.bfloat16}
    both, gates = torch.zeros(3, 4 * 128 + 2 * 128 + 2 * 128, **half), torch.zeros(3, 2, 2, **half)
    rows, z = both[:, :768], both[:, 768:].unflatten(1, (2, 128))
    states, last = torch.zeros(5, 2, 128, 128), torch.zeros(5, 3, 768, **half).mT
    weights = {"z": z, "norm_weight": torch.ones(128, **half)}
    taps, out = torch.zeros(768, 4, **half), torch.zeros(3, 1, 2, 128, **half)
    for slots in (torch.tensor([4, -1, 2]), torch.tensor([4, -1, 2], dtype=torch.int32)):
        rule = gates[:, 0], gates[:, 1], torch.zeros(2), torch.zeros(2), states, slots
        for room in (None, out):
            for norm, name in (({}, "recurrent"), (weights, "recurrent_norm")):

                def step(
                    norm: Any = norm, rule: Any = rule, slots: Any = slots, room: Any = room
                ) -> tuple[Tensor, ...]:
                    return (decode_gated_delta_net(rows, *rule, last, taps, out=room, **norm),)

                def rule_alone(
                    norm: Any = norm, rule: Any = rule, room: Any = room
                ) -> tuple[Tensor, ...]:
                    return (packed_decode_gated_delta_rule(rows, *rule, out=room, **norm),)

                names = _is_replayed(step, hybrid_step.STEPS)
                assert [x.startswith(f"{y}_bf16") for x, y in zip(
                    names, ("conv_update", f"gdn_{name}"), strict=True
                )] == [True, True], names  # fmt: skip
                assert len(_is_replayed(rule_alone, packed.PACKED)) == 1
        names = _is_replayed(
            lambda slots=slots: (causal_conv1d_update(rows, last, taps, None, "silu", slots),),
            conv_update.UPDATES,
        )
        assert len(names) == 1


def steps_of_a_pool() -> None:
    """One program serves any slots, counts and lengths, and all pools of a size."""
    pools = [GdnPool(4, 2, 4, 128, 128, device="cpu") for _ in range(2)]
    step = [x.view(3, 2, *x.shape[2:]) for x in _gdn(6)]
    raw = {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4), "use_gate_in_kernel": True}
    kernels = ["gdn_append_tokens", "gdn_anchored_fwd"]
    for slots in (torch.tensor([2, -1, 0]), torch.tensor([2, -1, 0], dtype=torch.int32)):
        others = slots.flip(0)
        for options in ({}, {**raw, "use_qk_l2norm_in_kernel": True}):

            def decode(slots: Tensor = slots, pool: GdnPool = pools[0], o: Any = options) -> Any:
                return (pool.decode(*step, slots, **o),)

            names = _is_replayed(decode, gdn_pool.DECODES)
            norms = ["gdn_l2norm"] * 2 * bool(options)
            assert [x.split("_bf16")[0].split("_fp32")[0] for x in names] == [
                *norms, "gdn_activate", *kernels
            ]  # fmt: skip
            for pool in pools:
                before = gdn_pool.DECODES.replays(), [x._version for x in pool.tensors]
                launches, _ = _launches(functools.partial(decode, others, pool))
                pool.lengths.fill_(70)
                assert gdn_pool.DECODES.replays() == before[0] + 1
                changed = [x._version - n for x, n in zip(pool.tensors, before[1], strict=True)]
                assert changed == [1] * 6 + [2]
                given = {at for x in launches[-2:] for at in x.addresses}
                assert {x.data_ptr() for x in (*pool.tensors, others)} <= given

        def reject(slots: Tensor = slots, counts: Tensor = slots, pool: Any = pools[0]) -> Any:
            pool.reject(slots, counts)
            return ()

        (name,) = _is_replayed(reject, gdn_pool.REJECTS)
        assert name.startswith("gdn_reject_tokens")
        (launch,), _ = _launches(functools.partial(reject, others, slots, pools[1]))
        lengths = pools[1].tensors.lengths
        assert [x.data_ptr() for x in (others, slots, lengths)] == [*launch.addresses[:3]]


def a_key_holds_stream_gpu_and_dtype() -> None:
    """A program is of one stream and one GPU, and of tensors whose numbers have one width."""

    def work(x: Tensor) -> tuple[Tensor]:
        return (x.new_zeros(3, dtype=torch.float32),)

    assert NATIVE.driver_version() == 13_000  # opens the driver: this program launches nothing
    for dtype, other in ((torch.float32, torch.float16), (torch.int64, torch.int32)):
        x = torch.zeros(40, 2, dtype=dtype)
        table = by_hand._known(x, work=work)
        assert type(table.find(x)) is tuple
        assert table.find(x.to(other)) is None, other
        for what in ("stream", "gpu"):
            DRIVER[what] = 1
            assert table.find(x) is None, what
            DRIVER[what] = 0
        assert type(table.find(x)) is tuple


def events_of_another_gpu() -> None:
    """Events are made in the context of the tensors' GPU, whichever is current."""
    x, bounds = [*_gdn(32_778, HV=8)], torch.zeros(8, dtype=torch.int32)
    DRIVER["gpu"] = 1
    before, entered = api.CALLS.replays(), DRIVER["pushes"] - DRIVER["pops"]
    with torch.no_grad():
        for _ in range(4):
            _launches(lambda: chunk_gated_delta_rule(*x, cu_seqlens=bounds))
    DRIVER["gpu"] = 0
    assert api.CALLS.replays() - before == 2  # with events of GPU 0 cuEventRecord gives error 400
    assert DRIVER["pushes"] - DRIVER["pops"] == entered


def lengths_that_are_new_in_each_call() -> None:
    """Known lengths are told apart by their plans, so calls with other lengths are replayed."""
    x, rng = [*_gdn(8192, H=16, HV=32)], random.Random(0)
    tables = api.CALLS, gdn.FORWARDS, gdn.BACKWARDS
    host = torch.zeros(7, dtype=torch.int32)
    assert DRIVER.on_host(host.data_ptr(), 28)

    def call() -> list[tuple[int, int]]:
        bounds = torch.tensor([0, *sorted(rng.sample(range(1, 8192), 5)), 8192], dtype=torch.int32)
        host.copy_(bounds)
        leaves = [t.detach().requires_grad_() for t in x]
        before = [table.replays() for table in tables]
        of = {"cu_seqlens": bounds, "cu_seqlens_cpu": host}
        o, _ = chunk_gated_delta_rule(*leaves, **of)
        torch.autograd.grad(o, leaves, torch.empty_like(o))
        with torch.no_grad():
            chunk_gated_delta_rule(*x, **of)
        return [table.replays() - n for table, n in zip(tables, before, strict=True)]

    for _ in range(40):
        call()
    kept = [len(table) for table in tables]
    assert [call() for _ in range(100)].count([1, 1, 1]) >= 95
    assert [len(table) for table in tables] == kept
    assert max(kept) < 12
    DRIVER.on_host(0, 0)


def calls_on_the_host_alone_have_no_program() -> None:
    x, table = torch.zeros(40, 2), Programs("test")
    assert DRIVER.on_host(x.data_ptr(), x.nbytes)
    assert [table.find(x) for _ in range(3)] == [None] * 3
    DRIVER.on_host(0, 0)


def sparse_attention_() -> None:
    """Rounded by a kernel of ours, dK and dV are results of a program."""
    q, k, v = (torch.zeros(1, 512, heads, 64, dtype=torch.bfloat16) for heads in (2, 2, 2))
    tables = [op.programs for op in (sparse_ops.vertical_slash_fwd, sparse_ops.vertical_slash_bwd)]

    def run(*x: Tensor) -> Tensor:
        return sparse_attention(*x, index=INDEX)

    names = _is_replayed(_step(run, q, k, v), *tables)
    assert sum("round_sums" in name for name in names) == 1


if __name__ == "__main__":
    for _name, _test in list(globals().items()):
        of_here = getattr(_test, "__module__", "") == "__main__" and _name[0].islower()
        if of_here and (len(sys.argv) == 1 or _name in sys.argv):
            print(_name, flush=True)
            _test()
