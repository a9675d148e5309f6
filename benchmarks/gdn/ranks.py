"""Times one sequence over several GPUs: every rank calls `measured`, and has all rows.

Eager calls in turn; of each repetition the slowest rank counts. Results are compared with ours in
the contiguous layout before they are timed. `scripts/gdn_ranks.py` runs it.
"""

from collections.abc import Callable, Iterable, Sequence
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

from ..harness import records
from ..harness.adapters import describe
from ..harness.ranks import of_all, once
from ..harness.records import FAILED, MEMORY, OK, RANKS, UNSUPPORTED, WRONG, Result, Row
from ..harness.timing import spread
from ..harness.workload import Ceilings, Direction
from .problem import gdn_inputs, gdn_work
from .workloads import Gdn

TENSORS = ("q", "k", "v", "g", "beta")
RESULTS = ("o", *(f"d{name}" for name in TENSORS))
WARM, REPEATED, TOLERANCE = 3, 20, 1e-2
Function = Callable[..., Any]
Key = tuple[str, str]  # a library and a layout
Rank = tuple[Function, dict[str, Tensor], Any]  # a rule, and what it is called with on this rank


class WrongResult(Exception):
    """Ours cannot run, or is wrong: there is nothing to time."""


class Taken(NamedTuple):
    """Of each repetition the slowest rank's ms: of the GPU, and of Python alone."""

    gpu: list[float]
    python: list[float]


def row_of(rule: Gdn, world: int, split: str, ceilings: Ceilings, results: Iterable[Result]) -> Row:
    """The row of a call on one sequence that ranks share in a layout.

    The floor is a share of the one of a GPU: what is sent does not count.
    """
    work = gdn_work(rule)
    sizes = "" if (rule.head_dim, rule.V) == (128, 128) else f", K {rule.head_dim}, V {rule.V}"
    return records.row_of(
        rule, work, ceilings, results, kind=RANKS[rule.direction],
        name=f"{rule.name.replace('gdn-', 'gdn-ranks-', 1)}-over{world}-{split}",
        layout=f"{rule.layout} over {world}, {split}", what=f"{rule.gate} gates{sizes}",
        floor_ms=1e3 * work.floor_seconds(ceilings) / world,
    )  # fmt: skip


def part(x: Tensor, layout: str) -> Tensor:
    """Returns this rank's stretches of a batch, one after the other."""
    rank, world, each = dist.get_rank(), dist.get_world_size(), STRETCHES[layout]
    stretches = x.chunk(each * world, 1)
    return torch.cat([stretches[n] for n in held_by(rank, world, each)], 1).contiguous()


def forward(function: Function, x: dict[str, Tensor], context: Any) -> Any:
    with torch.no_grad():
        return function(*(x[name] for name in TENSORS), cp_context=context)[0]


def both(function: Function, x: dict[str, Tensor], context: Any) -> list[Tensor]:
    """Returns o and the gradients of a forward and backward."""
    inputs = [x[name].detach().requires_grad_() for name in TENSORS]
    o = function(*inputs, cp_context=context)[0]
    return [o.detach(), *torch.autograd.grad(o, inputs, x["do"])]


def times(ways: dict[Key, Function], like: Tensor) -> dict[Key, Taken]:
    """Returns what each way takes; ways take turns."""
    for run in ways.values():
        for _ in range(WARM):
            run()
    samples: dict[Key, list[float]] = {name: [] for name in ways}  # of the GPU, of Python, ..
    for _ in range(REPEATED):
        for name, run in ways.items():
            samples[name] += once(run, like.is_cuda)
    slowest = {
        name: [max(x) for x in zip(*of_all(each, like.device), strict=True)]
        for name, each in samples.items()
    }
    return {name: Taken(each[::2], each[1::2]) for name, each in slowest.items()}


def differ(got: Sequence[Tensor], want: Sequence[Tensor], layout: str) -> dict[str, float]:
    """Returns the relative L2 errors of o and the gradients, over all ranks' tokens."""
    errors = {}
    for name, a, b in zip(RESULTS, got, want, strict=True):
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
) -> tuple[dict[Key, Rank], dict[Key, Result]]:
    """Returns calls of the ways that are right, and of every way its result without times."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = gdn_inputs(replace(rule, direction="both"), device, dtype)._asdict()
    batch = {name: inputs[name] for name in (*TENSORS, "do")}
    for x in batch.values():
        dist.broadcast(x, 0)
    bounds = torch.tensor([0, rule.tokens], device=device)
    right, results, want = dict[Key, Rank](), dict[Key, Result](), list[Tensor]()
    for library, (function, make) in functions(with_fla).items():
        for layout in LAYOUTS:
            parts = {name: part(x, layout) for name, x in batch.items()}

            def first(function: Function, make: Function, parts: Any, layout: str) -> Any:
                call = function, parts, make(bounds, layout)
                return call, both(*call)

            done, result = attempted(library, partial(first, function, make, parts, layout))
            if done:
                call, tensors = done
                want = want or [gathered(x) for x in tensors]
                result = judged(library, differ(tensors, want, layout))
                if result.status == OK:
                    right[library, layout] = call
            results[library, layout] = result
            if not dist.get_rank():
                worst = max((x or 0.0 for x in result.errors.values()), default=0.0)
                said = result.detail or f"off by {worst:.1e}"
                print(f"{rule.name}: {library}, {layout}: {said}", flush=True)
            if library == "ours" and result.status != OK:
                raise WrongResult(f"ours, {layout}: {result.detail}; a wrong result is not timed")
    return right, results


def attempted(library: str, step: Callable[[], Any]) -> tuple[Any, Result]:
    """Returns what a step returns, or None and why, if it raised on any rank."""
    done, why, status = None, "", OK
    try:
        done = step()
    except Unsupported as error:
        why, status = str(error), UNSUPPORTED
    except Exception as error:
        memory = isinstance(error, torch.OutOfMemoryError)
        why, status = f"first call: {describe(error)}", MEMORY if memory else FAILED
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (why, status))
    why, status = next((x for x in everyone if x[1] != OK), ("", OK))
    return (done if status == OK else None), Result(library, status, why)


def judged(library: str, errors: dict[str, float]) -> Result:
    """Returns a result that is right, or wrong; NaN is."""
    wrong = [f"{name} is off by {x:.1e}" for name, x in errors.items() if not x < TOLERANCE]
    return Result(library, WRONG if wrong else OK, ", ".join(wrong), errors=records.rounded(errors))


def measured(rule: Gdn, with_fla: bool, device: torch.device, ceilings: Ceilings) -> list[Row]:
    """Returns a row for each direction and layout."""
    right, results = prepared(rule, with_fla, device)
    like, rows = torch.zeros(1, device=device), []
    ways: tuple[tuple[Direction, Function], ...] = ("fwd", forward), ("both", both)
    for direction, run in ways:
        taken = times({key: partial(run, *call) for key, call in right.items()}, like)
        for split in LAYOUTS:
            of_split = [
                timed(result, taken.get(key), like.is_cuda)
                for key, result in results.items()
                if key[1] == split
            ]
            of = replace(rule, direction=direction)
            rows.append(row_of(of, dist.get_world_size(), split, ceilings, of_split))
    return rows


def timed(result: Result, taken: Taken | None, on_gpu: bool) -> Result:
    """Returns a result with its times, which are of eager calls; on a CPU nothing else is."""
    if taken is None:
        return result
    p20, p50, p80 = spread(taken.gpu)
    result, count = replace(result, host_ms=median(taken.python)), len(taken.gpu)
    if not on_gpu:
        return replace(result, p20_ms=p20, p50_ms=p50, p80_ms=p80, samples=count)
    return replace(result, eager_p20_ms=p20, eager_ms=p50, eager_p80_ms=p80, eager_samples=count)
