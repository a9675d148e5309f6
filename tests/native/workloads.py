"""Workloads of all benchmarks are replayed from their third call on, on the stand-in driver.

    python -m tests.native.workloads               all of them
    python -m tests.native.workloads gdn dualkv    some families

It has to be started by `standin.run`. Calls are those of our adapters, as a model makes them, on
inputs of the real sizes, whose memory nothing touches: so plans cut, or do not, as on a GPU. In a
replay neither launch code launches anything, nor torch, and a recorder of the call agrees with it.
Calls that are another way have a reason in EXCEPTIONS.
"""

import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.ours import OursDualKV, OursSparse
from benchmarks.attention.problem import attention_inputs
from benchmarks.attention.workloads import DUALKV, SPARSE_RING
from benchmarks.conv.rivals import conv_inputs
from benchmarks.conv.workloads import CONV, Convolution
from benchmarks.gdn import ours as gdn_ours
from benchmarks.gdn import problem as gdn_problem
from benchmarks.gdn.ours import through_autograd
from benchmarks.gdn.problem import gdn_inputs
from benchmarks.gdn.workloads import GDN, Gdn
from benchmarks.harness.workload import Direction
from benchmarks.hybrid import step
from benchmarks.hybrid.mixing import OverSequences, OverTree
from benchmarks.hybrid.rivals import OursStep
from benchmarks.hybrid.workloads import HYBRID, HybridPart
from benchmarks.serving import ours as serving_ours
from benchmarks.serving import problem as serving_problem
from benchmarks.serving.problem import prefill_inputs
from benchmarks.serving.workloads import EVERY_ROW, PoolPrefill
from qla_kernels import causal_conv1d, chunk_gated_delta_rule, prefill_gated_delta_rule
from qla_kernels.dualkv import SharedLayout
from qla_kernels.dualkv import launch as dualkv_launch
from qla_kernels.dualkv import ops as dualkv_ops
from qla_kernels.gdn import GdnPool
from qla_kernels.gdn.tree.tables import ON_HOST
from qla_kernels.hybrid import delta_tables, shared_prefix_conv1d
from qla_kernels.runtime import jit, programs
from qla_kernels.sparse_ring import build, gradients, launch, ring, shard
from tests.native import gpu  # first: it prepares the process

Run = Callable[[], Any]
Kind = tuple[str, Callable[[], Run]]  # a workload's name, and what prepares its call

MOST_TOKENS = 16384  # of attention
LARGE = 1 << 20  # bytes whose contents no host code reads
META, CPU = torch.device("meta"), torch.device("cpu")

# Calls that launch code launches each time, or torch: why
FAMILIES = "gdn", "serving", "dualkv", "sparse_ring", "conv", "hybrid", "options"
EXCEPTIONS = {
    "gdn-kkt_solve-*": "a kernel alone, which is timed in graphs; no public function launches it",
    "sparse_ring-index-*": "once for a prompt; torch regroups the observed queries by a copy",
}


class _Generator(torch.Generator):
    """Of numbers without memory, whatever the device."""

    def __new__(cls, device: object) -> "_Generator":
        return super().__new__(cls)


@contextmanager
def without_copies() -> Iterator[None]:
    """Copies of large tensors are not filled."""
    usual = Tensor.clone
    Tensor.clone = lambda x, **how: torch.empty_like(x) if x.nbytes > LARGE else usual(x, **how)
    try:
        yield
    finally:
        Tensor.clone = usual


def _randn(*shape: Any, generator: object, **options: Any) -> Tensor:
    """Without memory; torch's own, in Python there, took a sixth of the time."""
    return torch.empty(*shape, **options)


@lru_cache(maxsize=1)  # of those that are called in several ways, one after the other
def made(make: Callable[..., Any], workload: Any) -> Any:
    """A workload's inputs as on a GPU, in memory that is not touched."""
    usual = torch.Generator, torch.randn
    torch.Generator, torch.randn = _Generator, _randn
    try:
        return there(make(workload, META, torch.bfloat16))
    finally:
        torch.Generator, torch.randn = usual


def there(x: Any) -> Any:
    """x with memory for its tensors that have none."""
    if isinstance(x, Tensor) and x.is_meta:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    if isinstance(x, tuple):
        parts = map(there, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def of_adapter(adapter: Any, make: Callable[..., Any], workload: Any) -> Run:
    """The call that is timed as `eager`, or the only one."""
    inputs = made(make, workload)
    with without_copies():
        call = adapter.prepare(workload, inputs)
    return call.run if call.eager is None else call.eager()


def with_gradients(run: Callable[..., Tensor], *given: Tensor) -> Run:
    """Forward and backward."""

    def both() -> Any:
        leaves = [x.detach().requires_grad_() for x in given]
        y = run(*leaves)
        return torch.autograd.grad(y, leaves, torch.empty_like(y))

    return both


def gdn() -> Iterator[Kind]:
    """Packed, with lengths on the host as well or on the device alone, and as a dense batch."""
    rows: dict[object, Gdn] = {}
    for w in (w for name in GDN if name != "cpu" for w in GDN[name]):
        both = [replace(w, direction="both")] if w.direction == "bwd" else []
        for x in (w, *both):
            alike = x.kind, x.heads, x.lengths, x.initial_state, x.head_dim, x.V
            rows.setdefault(alike, x)
    for w in rows.values():
        yield w.name, partial(of_adapter, gdn_ours.Ours(), gdn_inputs, w)
        if w.kind in ("fwd", "bwd", "both"):
            yield f"{w.name}, lengths on the device", partial(_without_lengths, w)
            if len(set(w.lengths)) == 1:
                yield f"{w.name}, dense", partial(_dense, w)
        if w.kind == "decode":
            yield f"{w.name}, pool", partial(_in_gdn_pool, w)


def _lengths_on_host(inputs: Any) -> Tensor:
    return gpu.host(torch.tensor([0, *inputs.lengths]).cumsum(0))


def _gates(workload: Gdn, _: object, device: torch.device) -> Tensor:
    return torch.empty(1, workload.tokens, workload.heads[1], device=device)


gdn_ours.on_host = serving_ours.on_host = _lengths_on_host
gdn_problem._gate, gdn_problem.normalize = _gates, lambda x, dim: x


def _in_gdn_pool(w: Gdn) -> Run:
    """Of few sequences: a pool fills its memory. Launches do not depend on their number."""
    return of_adapter(gdn_ours.ours()[-1], gdn_inputs, replace(w, lengths=w.lengths[:8]))


def _without_lengths(w: Gdn) -> Run:
    inputs = made(gdn_inputs, w)
    packed = {"cu_seqlens": inputs.cu_seqlens}
    return through_autograd(chunk_gated_delta_rule, w, inputs, **packed)


def _dense(w: Gdn) -> Run:
    inputs = made(gdn_inputs, w)
    x = {
        name: x.view(len(w.lengths), -1, *x.shape[2:])
        for name, x in inputs._asdict().items()
        if name in ("q", "k", "v", "g", "beta", "do") and x is not None
    }
    return through_autograd(chunk_gated_delta_rule, w, inputs._replace(**x))


def serving() -> Iterator[Kind]:
    for w in EVERY_ROW:
        make = prefill_inputs if isinstance(w, PoolPrefill) else step.step_inputs
        yield w.name, partial(of_adapter, serving_ours.OursServing(), make, w)


def _pool(states: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """As pool_of, whose memory is written."""
    size = states[0].numel()
    pages = states.new_empty(num_slots, size + serving_problem.PAGE)
    return torch.unflatten(pages[:, :size], 1, states.shape[1:])


serving_problem.pool_of = serving_ours.pool_of = _pool
serving_ours.paged = lambda inputs, slots: _pool(inputs.states, slots.starts, slots.num_slots)
step.inputs_of_beta = lambda x: x


def dualkv() -> Iterator[Kind]:
    """Rows with many tokens are shortened; tables differ, and launches do not depend on them."""
    for name, rows in DUALKV.items():
        for w in rows if name != "layer" else ():  # a layer's attention is a row of its own
            short = replace(w.reduced(max(1, w.tokens // MOST_TOKENS)), dtype=w.dtype)
            yield w.name, partial(of_adapter, OursDualKV(), attention_inputs, short)
            if name == "short":
                narrow = replace(short, head_dim=64)
                yield narrow.name, partial(of_adapter, OursDualKV(), attention_inputs, narrow)


for _op in "dualkv_fwd", "dualkv_bwd":  # where torch's dispatcher sees tensors of the CPU
    getattr(dualkv_ops, _op).on_cpu = getattr(dualkv_launch, _op)


def sparse_ring() -> Iterator[Kind]:
    for w in dict.fromkeys(w for rows in SPARSE_RING.values() for w in rows):
        for head_dim in (64, 128) if w.direction != "index" else (128,):
            factor = max(1, w.tokens // MOST_TOKENS)
            short = replace(w.reduced(factor), head_dim=head_dim)
            adapter = partial(of_adapter, OursSparse(), attention_inputs, short)
            yield f"{w.name}, D = {head_dim}", adapter


for _module in build, ring, shard, gradients:
    _module.launches = lambda _: launch


def conv() -> Iterator[Kind]:
    for w in dict.fromkeys(w for rows in CONV.values() for w in rows):
        yield w.name, partial(_convolution, w)


def _convolution(w: Convolution) -> Run:
    """By the public functions; the adapter's operators are timed in graphs alone."""
    x, weight, bias, dy, bounds = made(conv_inputs, w)
    if w.shares:
        layout = SharedLayout.from_lengths(w.groups)
        gpu.host(layout.nodes)
    leaves = [x.requires_grad_(dy is not None) for x in (x, weight, bias)]

    def run() -> Any:
        if w.shares:
            y = shared_prefix_conv1d(*leaves, layout, "silu")
        else:
            y = causal_conv1d(*leaves, "silu", bounds)
        return y if dy is None else torch.autograd.grad(y, leaves, dy)

    return run


def hybrid() -> Iterator[Kind]:
    """What mixes tokens in a training step; attention's rows are dualkv's, the rest is torch."""
    for w in HYBRID["block"]:
        lengths = tuple(p + r for p, responses in w.groups for r in responses)
        ways = OverTree(w, CPU), OverSequences(lengths, w, CPU)
        for way, T in zip(ways, (w.tokens, w.whole_tokens), strict=True):
            for part in (_convolved, _delta):
                yield f"{w.name}, {type(way).__name__}{part.__name__}", partial(part, w, way, T)
    for w in HYBRID["step"]:
        yield w.name, partial(of_adapter, OursStep(), step.step_inputs, w)


def _convolved(w: HybridPart, way: Any, T: int) -> Run:
    channels = sum(w.linear_columns)
    return with_gradients(way.convolve, room(T, channels), room(channels, w.width))


def _delta(w: HybridPart, way: Any, T: int) -> Run:
    if isinstance(way, OverSequences):
        way._bounds = way._bounds.clone()  # the other one is the host's
        gpu.host(way._bounds_cpu)
    else:
        for table in delta_tables.prepare(way._layout, False)[:ON_HOST]:
            gpu.host(table)
    (H, HV), D = w.linear_heads, w.linear_dim
    q, k, v = room(T, H, D), room(T, H, D), room(T, HV, D)
    return with_gradients(way.delta, q, k, v, room(T, HV, dtype=torch.float32), room(T, HV))


def options() -> Iterator[Kind]:
    """Calls that no benchmark times."""
    raw = dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    norms = {"use_qk_l2norm_in_kernel": True}
    ways = {
        "exact": {"exact": True},
        "batch invariant": {"batch_invariant": True},
        "segments kept": {"enable_fwd_cp_cache": True},
        "norms": norms,
        "raw gates": {**raw, **norms, "state_v_first": True},
    }
    directions: tuple[Direction, ...] = "fwd", "both"
    for direction in directions:
        for lengths in ((8192,), (2048,) * 8):
            w = Gdn((4, 8), lengths, direction, initial_state=True)
            for name, way in ways.items():
                yield f"{w.name}, {name}", partial(_with_options, w, way)
    for K, V in ((96, 192), (64, 128), (128, 256)):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"prefill of {K} x {V}, {dtype}", partial(_prefilled, K, V, dtype)
    for K, V in ((96, 192), (64, 128), (128, 256)):
        for tokens in (1, 4):
            yield f"pool of {K} x {V}, {tokens} tokens", partial(_raw_in_gdn_pool, K, V, tokens)


def _with_options(w: Gdn, way: dict[str, Any]) -> Run:
    if "use_gate_in_kernel" in way:
        gates = (room(w.heads[1], dtype=torch.float32).requires_grad_() for _ in range(2))
        way = {**way, **dict(zip(("A_log", "dt_bias"), gates, strict=True))}
    inputs = made(gdn_inputs, w)
    bounds = {"cu_seqlens": inputs.cu_seqlens, "cu_seqlens_cpu": _lengths_on_host(inputs)}
    return through_autograd(chunk_gated_delta_rule, w, inputs, **bounds, **way)


def _prefilled(K: int, V: int, dtype: torch.dtype) -> Run:
    x = made(gdn_inputs, Gdn((2, 8), (8192,), head_dim=K, value_dim=V))
    states, slots = room(5, 8, V, K, dtype=dtype), torch.ones(1, dtype=torch.int64)
    return partial(
        prefill_gated_delta_rule, *x[:5], states, slots, state_v_first=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def _raw_in_gdn_pool(K: int, V: int, tokens: int) -> Run:
    """As a layer calls it: raw gates in bf16, and q, k and v that are slices of a projection."""
    N, (H, HV) = 5, (2, 8)
    rows, gates = room(N, tokens, 2 * H * K + HV * V), room(2, N, tokens, HV)
    q, k, v = (
        x.unflatten(2, (heads, -1))
        for x, heads in zip(rows.split((H * K, H * K, HV * V), 2), (H, H, HV), strict=True)
    )
    A_log, dt_bias = (room(HV, dtype=torch.float32) for _ in range(2))
    slots, counts = (torch.zeros(N, dtype=dtype) for dtype in (torch.int32, torch.int64))
    pool = GdnPool(N, H, HV, K, V, device="cpu")

    def run() -> Tensor:
        for norms in (False, True):
            o = pool.decode(
                q, k, v, *gates, slots, use_qk_l2norm_in_kernel=norms, use_gate_in_kernel=True,
                A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True,
            )  # fmt: skip
            pool.reject(slots, counts)
        return o

    return run


def _zero(x: Tensor) -> Tensor:
    return x if x.nbytes > LARGE else x.fill_(0)


# Below what recorders see. Fresh memory that is filled has to be found first, page by page.
operators = torch.library.Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that it is overridden
    operators.impl("zero_", _zero, "CPU", allow_override=True)


def main(families: Iterable[str]) -> int:
    gc.collect()
    gc.freeze()  # to walk through modules again and again took a tenth of the time
    found, known = [], set[str]()
    for family in families:
        begin, num = time.thread_time(), 0
        for name, prepare in globals()[family]():
            num += 1
            complaint = not_replayed(prepare)
            expected = [pattern for pattern in EXCEPTIONS if fnmatch(name, pattern)]
            known.update(expected)
            if bool(complaint) != bool(expected):
                found.append(f"{name}: {complaint or 'is replayed, and should not be'}")
        print(f"{family}: {num} workloads, {time.thread_time() - begin:.1f} s", flush=True)
    if set(families) == set(FAMILIES):
        found += [f"{pattern}: no such workload" for pattern in EXCEPTIONS.keys() - known]
    print(*found, sep="\n")
    return len(found)


def not_replayed(prepare: Callable[[], Run]) -> str:
    """What the third and the fourth call launch, other than by a replay; "" if nothing."""
    gpu.forget()
    reasons.clear()
    run = prepare()
    for _ in range(2):
        run()
    gpu.launched.clear()
    before = replays()
    run()
    if gpu.launched:
        return f"launches {' '.join(gpu.launched)}: {'; '.join(reasons)}"
    if replays() == before:
        return "nothing is replayed"
    with gpu.kernels_of_torch() as torchs:
        run()
    if torchs.found:
        return " ".join(["torch launches", *torchs.found])
    os.environ["QLA_CHECK_PROGRAMS"] = "1"  # records the call, and compares its form with that
    try:
        run()
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ["QLA_CHECK_PROGRAMS"]
    return ""


reasons: list[str] = []  # why calls have no program
jit.log.setLevel(logging.DEBUG)
jit.log.addHandler(logging.NullHandler())
jit.log.addFilter(lambda record: reasons.append(record.getMessage()) or False)


def replays() -> int:
    return sum(table.replays() for table in programs._tables)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:] or FAMILIES)))
