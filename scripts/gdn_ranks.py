"""Time the gated delta net over several GPUs in both layouts, beside FLA's context parallelism.

    torchrun --nproc-per-node 2 scripts/gdn_ranks.py                      131072 tokens, 16/32 heads
    torchrun --nproc-per-node 4 scripts/gdn_ranks.py --tokens 512k --heads 16/32,4/8 --without-fla
    torchrun --nproc-per-node 2 scripts/gdn_ranks.py --heads 30/30 --head-dim 96/192 --gates model
    torchrun --nproc-per-node 2 scripts/gdn_ranks.py --tokens 256 --heads 1/2 --cpu     does it run?

One sequence, gates as FlashQLA publishes its times with unless --gates says otherwise. Eager calls
in turn; of each repetition the time of the slowest rank counts, by CUDA events, and medians are
printed, in ms, with the time that Python alone takes: where it is as long, the host is what is
timed. Before that o and all gradients are compared with ours in the contiguous layout. FLA's
kernels take minutes to compile and to tune. `--out` gets gdn_ranks.json, the record, and its
tables; `--save` appends it to benchmarks/results, which `python -m benchmarks.show` prints.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.gdn.ranks import WrongResult, measured
from benchmarks.gdn.rivals import FLA
from benchmarks.harness import records
from benchmarks.harness.messages import Machine
from benchmarks.harness.own_shapes import Asked, in_full, names, own_shapes, sizes
from benchmarks.harness.records import Row, Run, write_whole
from benchmarks.harness.timing import measure_ceilings
from benchmarks.harness.workload import Ceilings
from benchmarks.sm90 import describe_run
from qla_kernels.runtime import jit

WITHOUT_GPU = (
    "No GPU: float32 on CPU tensors over gloo, eager calls. FLA was left out, which needs GPUs."
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns options, with a `rules` of every shape that is asked for."""
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N scripts/gdn_ranks.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    said = "of all ranks together, such as 128k (default: 131072)"
    add("--tokens", type=names, default=["131072"], metavar="TOKENS,...", help=said)
    said = "key / value heads (default: 16/32)"
    add("--heads", type=names, default=["16/32"], metavar="FEW/MANY,...", help=said)
    add("--head-dim", type=sizes, metavar="SIZE", help="or K/V, such as 96/192 (default: 128)")
    add("--gates", choices=("published", "model"), help="(default: published)")
    add("--without-fla", action="store_true")
    add("--cpu", action="store_true", help="over gloo, on CPU tensors, in fp32, without FLA")
    add("--out", type=Path, metavar="FOLDER", help="for the record and its tables")
    add("--save", action="store_true", help="append the record to benchmarks/results")
    given = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        raise SystemExit("started by itself; need torchrun --nproc-per-node 2 scripts/gdn_ranks.py")
    world = int(os.environ["WORLD_SIZE"])
    try:
        refuse(given, world)
        lengths = [tokens_of(text, world) for text in given.tokens]
        asked = Asked(given.heads, lengths, given.head_dim, given.gates, direction=["both"])
        rules = own_shapes("gdn", asked)
    except ValueError as error:
        stop(error)
    given.rules = [replace(rule, initial_state=False) for rule in rules]
    given.family = "gdn"  # as the benchmark's options say it
    given.with_fla = not (given.without_fla or given.cpu)
    return given


def stop(error: Exception | str) -> NoReturn:
    """Ends all ranks; the first one says why."""
    raise SystemExit(str(error) if os.environ["RANK"] == "0" else 1)


def refuse(given: argparse.Namespace, world: int) -> None:
    """Raises ValueError where the options do not fit the machine or each other."""
    if given.save and given.cpu:
        raise ValueError("--save with --cpu; need times of GPUs, as pages have; leave --save out")
    if given.save and world < 2:
        fix = "start with torchrun --nproc-per-node 2"
        raise ValueError(f"--save of {world} rank; need two that share a sequence; {fix}")
    if given.cpu:
        return
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", world)), torch.cuda.device_count()
    if here > gpus:
        fix = f"start with torchrun --nproc-per-node {gpus}" if gpus else "--cpu tries it without"
        raise ValueError(f"{here} ranks, {gpus} GPUs; need a GPU for each rank; {fix}")
    if not given.without_fla and not find_spec("fla"):
        fix = "bash scripts/setup_env.sh --rivals installs it, --without-fla leaves it out"
        raise ValueError(f"no module fla; need FLA, to compare with; {fix}")


def tokens_of(text: str, world: int) -> str:
    """Returns 128k in full; raises ValueError unless both layouts can split so many tokens."""
    found = re.fullmatch(r"\d+", in_full(text))
    tokens = int(found[0]) if found else 0
    each = 2 * world
    if not tokens or tokens % each:
        nearest = max(each, round(tokens / each) * each)
        fix = f"such as {nearest}" if found else "such as 131072 or 128k"
        need = f"one sequence, of a multiple of {each} tokens for {world} ranks in two stretches"
        raise ValueError(f"--tokens {text}; need {need}; {fix}")
    return str(tokens)


def begun(given: argparse.Namespace, ceilings: Ceilings) -> Run:
    """Returns a record without rows."""
    world, kind = dist.get_world_size(), "cpu" if given.cpu else "cuda"
    environment = {**records.device_environment(kind), "ranks": world}
    versions = records.package_versions(("torch", "triton", "tilelang", "numpy"))
    labels = {"ours": "ours"}
    if given.with_fla:
        labels["fla"], versions["fla"] = FLA.label, FLA().version()
    device = records.device_name(kind)
    machine = Machine(device, kind, environment, versions, labels, {}, ceilings)
    program = f"torchrun --nproc-per-node {world} scripts/gdn_ranks.py"
    notes = [WITHOUT_GPU] if given.cpu else []
    return replace(describe_run(given, machine, notes), command=records.command_line(program))


def kernels() -> dict[str, str]:
    """Returns the digests of what any rank launched."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, jit.compiled())
    return {label: digest for of_rank in found for label, digest in of_rank.items()}


def tell(rows: Sequence[Row], run: Run) -> None:
    on_gpus = run.device_kind == "cuda"
    for row in rows:
        for r in row.results:
            time, python = r.time_ms(eager=on_gpus), f" (Python alone {r.host_ms or 0:.2f})"
            took = r.status if time is None else f"{time:.3f} ms{python if on_gpus else ''}"
            operation = tables.OPERATIONS[row.kind].replace("GPUs", "GPUs" if on_gpus else "ranks")
            said = f"{row.heads} heads, {row.layout}, {operation}"
            print(f"{said}: {run.labels[r.implementation]} {took}", flush=True)


def write(run: Run, out: Path) -> list[Path]:
    """After every shape: what comes later cannot lose it."""
    out.mkdir(parents=True, exist_ok=True)
    record = json.dumps(dataclasses.asdict(run))
    return [
        write_whole(out / "gdn_ranks.json", record),
        write_whole(out / "gdn_ranks.md", tables.page(run)),
    ]


def main() -> None:
    given = parse()
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA's own kernels: FlashQLA takes no contexts
    device = torch.device("cpu")
    if not given.cpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if given.cpu else "nccl")
    first = not dist.get_rank()
    ceilings = measure_ceilings(device) if first else Ceilings(1.0, 1.0)
    run, files = begun(given, ceilings), list[Path]()
    if first and run.notes:
        print(run.notes, flush=True)
    for rule in given.rules:
        try:
            rows = measured(rule, given.with_fla, device, ceilings)
        except WrongResult as error:
            stop(error)
        run = replace(run, rows=(*run.rows, *rows), kernels=kernels())
        if first:
            tell(rows, run)
            files = write(run, given.out) if given.out else []
    run = replace(run, environment_after=records.device_environment(run.device_kind))
    if first:
        files = write(run, given.out) if given.out else []
        files += [records.append(run)] if given.save else []
        print("\n".join(map(str, files)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
