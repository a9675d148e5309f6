"""Times one sequence over several GPUs: every rank calls `measured`, and has all rows.

Eager calls in turn; of each repetition the slowest rank counts. Results are compared with ours in
the contiguous layout before they are timed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels import Unsupported, chunk_gated_delta_rule
from qla_kernels.gdn import build_cp_context
from qla_kernels.gdn.sharded.layouts import LAYOUTS, STRETCHES, held_by

from ..harness.adapters import describe
from ..harness.floor import Ceilings
from ..harness.records import FAILED, MEMORY, OK, UNSUPPORTED, WRONG, Result, Row
from ..harness.timing import event, spread
from .inputs import gdn_inputs
from .ranks import over_ranks
from .workloads import Gdn

GIVEN = ("q", "k", "v", "g", "beta")
FOUND = ("o", *(f"d{name}" for name in GIVEN))
WARM, REPEATED, TOLERANCE = 3, 20, 1e-2
Function = Callable[..., Any]
Key = tuple[str, str]  # a library and a layout


class WrongResult(Exception):
    """Ours cannot run, or is wrong: there is nothing to time."""


class Way(NamedTuple):
    """A library in a layout, and what its functions are called with on this rank."""

    library: str
    layout: str
    call: tuple[Function, dict[str, Tensor], Any]


class Taken(NamedTuple):
    """Of each repetition the slowest rank's ms: of the GPU, and of Python alone."""

    gpu: list[float]
    python: list[float]


def part(x: Tensor, layout: str) -> Tensor:
    """Returns this rank's stretches of a batch, one after the other."""
    rank, world, each = dist.get_rank(), dist.get_world_size(), STRETCHES[layout]
    stretches = x.chunk(each * world, 1)
    return torch.cat([stretches[n] for n in held_by(rank, world, each)], 1).contiguous()


def forward(function: Function, x: dict[str, Tensor], context: Any) -> Any:
    with torch.no_grad():
        return function(*(x[name] for name in GIVEN), cp_context=context)[0]


def both(function: Function, x: dict[str, Tensor], context: Any) -> list[Tensor]:
    """Returns o and the gradients of a forward and backward."""
    inputs = [x[name].detach().requires_grad_() for name in GIVEN]
    o = function(*inputs, cp_context=context)[0]
    return [o.detach(), *torch.autograd.grad(o, inputs, x["do"])]


def slowest(values: Sequence[float], like: Tensor) -> list[float]:
    """Returns the largest of all ranks."""
    x = torch.tensor(values, dtype=torch.float64, device=like.device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    found: list[float] = x.tolist()
    return found


def once(run: Function, like: Tensor) -> tuple[float, float]:
    """Returns the ms of a call, of the GPU and of Python alone. All ranks begin together."""
    if not like.is_cuda:
        dist.barrier()
        begin = time.perf_counter()
        run()
        return (1e3 * (time.perf_counter() - begin),) * 2
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    first, last = event(), event()
    begin = time.perf_counter()
    first.record()
    kept = run()  # freed only after the end was recorded
    last.record()
    python = 1e3 * (time.perf_counter() - begin)
    last.synchronize()
    del kept
    return first.elapsed_time(last), python


def times(ways: dict[Key, Function], like: Tensor) -> dict[Key, Taken]:
    """Returns what each way takes; ways take turns."""
    for run in ways.values():
        for _ in range(WARM):
            run()
    found: dict[Key, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(REPEATED):
        for name, run in ways.items():
            found[name].append(once(run, like))
    columns = {name: zip(*each, strict=True) for name, each in found.items()}
    return {name: Taken(*(slowest(x, like) for x in pair)) for name, pair in columns.items()}


def differ(got: Sequence[Tensor], want: Sequence[Tensor], layout: str) -> dict[str, float]:
    """Returns the relative L2 errors of o and the gradients, over all ranks' tokens."""
    errors = {}
    for name, a, b in zip(FOUND, got, want, strict=True):
        x, y = a.double(), part(b, layout).double()
        sums = torch.stack([(x - y).square().sum(), y.square().sum()])
        dist.all_reduce(sums)
        errors[name] = float((sums[0] / sums[1]).sqrt())
    return errors


def gathered(x: Tensor) -> Tensor:
    """Returns the batch whose stretches the ranks hold in the contiguous layout."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def functions(with_fla: bool) -> dict[str, tuple[Function, Function]]:
    """Returns of each library the rule, and what makes a context of bounds and a layout."""
    found: dict[str, tuple[Function, Function]] = {
        "ours": (chunk_gated_delta_rule, lambda x, y: build_cp_context(x, layout=y))
    }
    if with_fla:
        from fla.ops.cp import build_cp_context as of_fla
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule_of_fla

        found["fla"] = rule_of_fla, lambda x, y: of_fla(x, group=dist.group.WORLD, layout=y)
    return found


def prepared(
    rule: Gdn, with_fla: bool, device: torch.device
) -> tuple[list[Way], dict[Key, Result]]:
    """Returns the ways that are right, and of every way what is known before it is timed."""
    made = gdn_inputs(rule, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    batch = {name: getattr(made, name) for name in (*GIVEN, "do")}
    for x in batch.values():
        dist.broadcast(x, 0)
    bounds = torch.tensor([0, rule.tokens], device=device)
    right, known, want = list[Way](), dict[Key, Result](), list[Tensor]()
    for library, (function, make) in functions(with_fla).items():
        for layout in LAYOUTS:
            parts = {name: part(x, layout) for name, x in batch.items()}
            got, result = attempted(library, partial(called, function, parts, make, bounds, layout))
            if got:
                call, tensors = got
                want = want or [gathered(x) for x in tensors]
                result = judged(library, differ(tensors, want, layout))
                if result.status == OK:
                    right.append(Way(library, layout, call))
            known[library, layout] = result
            if not dist.get_rank():
                said = (
                    result.detail or f"off by {max(x or 0.0 for x in result.errors.values()):.1e}"
                )
                print(f"{rule.name}: {library}, {layout}: {said}", flush=True)
            if library == "ours" and result.status != OK:
                raise WrongResult(f"ours, {layout}: {result.detail}; a wrong result is not timed")
    return right, known


def called(
    function: Function, parts: dict[str, Tensor], make: Function, bounds: Tensor, layout: str
) -> tuple[tuple[Function, dict[str, Tensor], Any], list[Tensor]]:
    call = function, parts, make(bounds, layout)
    return call, both(*call)


def attempted(library: str, step: Callable[[], Any]) -> tuple[Any, Result]:
    """Returns what a step returns, or None and why, if it raised on any rank."""
    found, why, status = None, "", OK
    try:
        found = step()
    except Unsupported as error:
        why, status = str(error), UNSUPPORTED
    except Exception as error:
        memory = isinstance(error, torch.OutOfMemoryError)
        why, status = f"first call: {describe(error)}", MEMORY if memory else FAILED
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (why, status))
    why, status = next((x for x in said if x[1] != OK), ("", OK))
    return (found if status == OK else None), Result(library, status, why)


def judged(library: str, errors: dict[str, float]) -> Result:
    """Returns a result that is right, or wrong; NaN is."""
    rounded = {name: float(f"{x:.3g}") if x < float("inf") else None for name, x in errors.items()}
    wrong = [f"{name} is off by {x:.1e}" for name, x in errors.items() if not x < TOLERANCE]
    return Result(library, WRONG if wrong else OK, ", ".join(wrong), errors=rounded)


def measured(rule: Gdn, with_fla: bool, device: torch.device, ceilings: Ceilings) -> list[Row]:
    """Returns a row for each direction and layout."""
    right, known = prepared(rule, with_fla, device)
    like = torch.zeros(1, device=device)
    taken = {
        direction: times({(w.library, w.layout): partial(run, *w.call) for w in right}, like)
        for direction, run in (("fwd", forward), ("both", both))
    }
    rows = []
    for of in over_ranks(rule, dist.get_world_size(), LAYOUTS):
        results = [
            timed(result, taken[of.rule.direction].get((library, layout)), like.is_cuda)
            for (library, layout), result in known.items()
            if layout == of.split
        ]
        rows.append(of.row(ceilings, results))
    return rows


def timed(result: Result, taken: Taken | None, on_gpu: bool) -> Result:
    """Returns a result with its times, which are of eager calls; on a CPU nothing else is."""
    if taken is None:
        return result
    result, count = replace(result, host_ms=median(taken.python)), len(taken.gpu)
    p20, p50, p80 = spread(taken.gpu)
    if not on_gpu:
        return replace(result, p20_ms=p20, p50_ms=p50, p80_ms=p80, samples=count)
    return replace(result, eager_p20_ms=p20, eager_ms=p50, eager_p80_ms=p80, eager_samples=count)
