"""Times of one sequence over several GPUs: how they are taken, kept, and shown."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import sm90, tables
from benchmarks.gdn import ranks
from benchmarks.gdn.workloads import Gdn
from benchmarks.harness import records
from benchmarks.harness.records import FAILED, OK, UNSUPPORTED, WRONG, Result
from benchmarks.harness.workload import Ceilings
from qla_kernels import Unsupported
from tests.host.made_up_runs import run_of
from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = Ceilings(790e12, 4.3e12)
QWEN, OLMO = Gdn((16, 32), (131072,)), Gdn((30, 30), (65536,), head_dim=96, value_dim=192)
H100 = {"device": "NVIDIA H100 80GB HBM3", "environment": {"our_kernels": "prebuilt by nvcc 13"}}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return importlib.import_module("gdn_ranks")


def result(name, ms, host=0.5):
    return Result(name, OK, eager_p20_ms=ms, eager_ms=ms, eager_p80_ms=ms, host_ms=host)


def run_of_ranks(rules=(QWEN,), world=2, fla=9.0, **changes):
    """A run in which ours takes 1 ms forward and 4 in both directions, FLA a multiple of it."""
    rows = []
    for rule in rules:
        for direction, ms in (("fwd", 1.0), ("both", 4.0)):
            found = [result("ours", ms, ms / 2), *([result("fla", fla * ms)] if fla else [])]
            of = replace(rule, direction=direction)
            rows += [ranks.row_of(of, world, x, CEILINGS, found) for x in ("contiguous", "zigzag")]
    labels = {"ours": "ours", **({"fla": "FLA"} if fla else {})}
    command = "torchrun --nproc-per-node 2 scripts/gdn_ranks.py"
    values = {"id": "ranks", "labels": labels, "command": command, **H100, **changes}
    return run_of([], rows=tuple(rows), **values)


# --- taking them


def test_two_processes_leave_a_record_that_pages_can_show(tmp_path):
    """Over gloo, on CPU tensors. Both layouts agree before they are timed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "scripts/gdn_ranks.py", "--cpu", "--tokens", "256"),
            *("--heads", "1/2", "--head-dim", "32/64", "--gates", "model", "--out", str(tmp_path)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=HANG,
        stdout=subprocess.PIPE,
        text=True,
    )
    page = (tmp_path / "gdn_ranks.md").read_text()
    assert "| 1/2   | 256x1 over 2, zigzag " in page
    note = "No GPU: float32 on CPU tensors over gloo, eager calls. FLA was left out"
    assert note in page
    assert note in done.stdout
    assert "1/2 heads, 256x1 over 2, zigzag, forward over ranks: ours" in done.stdout
    assert "GPUs," not in done.stdout
    assert "Python alone" not in done.stdout
    run = records.run_from_json(json.loads((tmp_path / "gdn_ranks.json").read_text()))
    records.append(run, tmp_path)
    assert records.load(tmp_path) == [run]
    assert (run.family, run.device_kind, run.environment["ranks"]) == ("gdn", "cpu", 2)
    assert run.kernels == {}  # no kernel runs on a CPU
    program = "torchrun --nproc-per-node 2 scripts/gdn_ranks.py --cpu --tokens 256"
    assert run.command == f"{program} --heads 1/2 --head-dim 32/64 --gates model"
    assert [row.name for row in run.rows] == [
        f"gdn-ranks-{way}-1x2-256x1-model-d32x64-over2-{layout}"
        for way in ("fwd", "both") for layout in ("contiguous", "zigzag")
    ]  # fmt: skip
    for row in run.rows:
        assert (row.heads, row.tokens, row.what) == ("1/2", 256, "model gates, K 32, V 64")
        (ours,) = row.results
        assert ours.p50_ms == ours.host_ms > 0
        assert ours.samples == 20
        assert {*ours.errors} == {"o", "dq", "dk", "dv", "dg", "dbeta"}
        assert max(ours.errors.values()) < 1e-5
    assert tables.newest([run], "ranks") == []  # of a CPU


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--heads 16", "--heads 16; need FEW/MANY with MANY a multiple of FEW, such as 16/32"),
        ("--head-dim 0", "--head-dim 0/0; need sizes of at least 1"),
        ("--tokens 4096x2", "--tokens 4096x2; need one sequence, of a multiple of 4 tokens"),
        ("--tokens 1001", "for 2 ranks in two stretches; such as 1000"),
        ("--save", "--save with --cpu; need times of GPUs, as pages have; leave --save out"),
    ],
)
def test_what_cannot_be_timed_is_refused(script, arguments, said):
    with pytest.raises(SystemExit) as refused:
        script.parse(["--cpu", *arguments.split()])
    assert said in str(refused.value)


def test_the_machine_has_to_have_what_is_asked_for(script, monkeypatch):
    def refused(*arguments):
        with pytest.raises(SystemExit) as said:
            script.parse(arguments)
        return str(said.value)

    gpus = 0
    monkeypatch.setattr(script.torch.cuda, "device_count", lambda: gpus)
    assert refused() == "2 ranks, 0 GPUs; need a GPU for each rank; --cpu tries it without"
    gpus = 1
    assert refused().endswith("start with torchrun --nproc-per-node 1")
    gpus = 2
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    assert "need FLA, to compare with; bash scripts/setup_env.sh --rivals" in refused()
    assert script.parse(["--without-fla", "--save"]).with_fla is False
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert refused("--save").endswith("start with torchrun --nproc-per-node 2")
    monkeypatch.setenv("RANK", "1")
    assert refused("--save") == "1"  # the first one speaks
    monkeypatch.delenv("RANK")
    assert refused() == "started by itself; need torchrun --nproc-per-node 2 scripts/gdn_ranks.py"


def test_shapes_are_asked_for_as_everywhere(script):
    asked = ("--tokens", "128k,1024", "--heads", "16/32,4/8", "--head-dim", "64")
    given = script.parse(["--cpu", *asked])
    assert [(rule.heads, rule.tokens) for rule in given.rules] == [
        ((16, 32), 131072), ((16, 32), 1024), ((4, 8), 131072), ((4, 8), 1024),
    ]  # fmt: skip
    assert {(rule.head_dim, rule.V, rule.gate, rule.initial_state) for rule in given.rules} == {
        (64, 64, "published", False)
    }


def test_a_library_that_fails_or_is_wrong_is_not_timed(monkeypatch):
    """Ours is timed all the same: every rank hears that one failed."""
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)

    def attempted(step, other=("", OK)):
        def gather(found, mine):
            found[:] = [mine, other]

        monkeypatch.setattr(ranks.dist, "all_gather_object", gather)
        return ranks.attempted("fla", step)

    def failing(error):
        raise error

    assert attempted(lambda: 3) == (3, Result("fla", OK))
    got, known = attempted(lambda: failing(TypeError("no layout")))
    assert (got, known.status, known.detail) == (None, FAILED, "first call: TypeError: no layout")
    assert (
        attempted(lambda: failing(Unsupported("op", "K is 7", "need 64")))[1].status == UNSUPPORTED
    )
    assert attempted(lambda: 3, ("elsewhere", FAILED)) == (None, Result("fla", FAILED, "elsewhere"))
    judged = ranks.judged("fla", {"o": 1e-3, "dq": float("nan"), "dk": 0.5})
    assert (judged.status, judged.errors["dq"]) == (WRONG, None)
    assert judged.detail == "dq is off by nan, dk is off by 5.0e-01"
    assert ranks.judged("fla", {"o": 1e-3}).status == OK


def test_rows_of_ranks_have_a_table_and_can_be_recovered(tmp_path, monkeypatch):
    run = run_of_ranks()
    assert {row.kind for row in run.rows} == {*records.RANKS.values()}
    pairs = tables.newest([run], "ranks")
    assert {pair.theirs / pair.ours for pair in pairs} == {9.0}
    assert {pair.row.name for pair in pairs} == {row.name for row in run.rows}
    assert tables.newest([run], "gdn") == []
    path, taken = tmp_path / "gdn_ranks.json", []
    path.write_text(json.dumps(records.dataclasses.asdict(run)))
    monkeypatch.setattr(records, "append", lambda run: taken.append(run) or path)
    assert sm90.main(["gdn", "--recover", str(path)]) == 0
    assert taken == [run]
