"""The harness survives whatever an implementation does, and the command runs to its end."""

import dataclasses
import json
import re
import resource
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import sm90, tables
from benchmarks.against import compared
from benchmarks.gdn.workloads import GDN, Gdn
from benchmarks.harness import records
from benchmarks.harness.messages import Options
from benchmarks.harness.own_shapes import remark
from benchmarks.harness.problems import work_of
from benchmarks.harness.records import (
    DIED,
    FAILED,
    MEMORY,
    MISSING,
    NOT_APPLICABLE,
    OK,
    TIME_LIMIT,
    UNSUPPORTED,
    WRONG,
)
from benchmarks.harness.timing import CpuTimer, measure_ceilings, spread
from benchmarks.harness.watchdog import LIMITS, Harness
from benchmarks.harness.without_gpu import for_cpu
from benchmarks.harness.worker import Worker
from benchmarks.harness.workload import Ceilings, Work
from benchmarks.rivals import implementations
from tests.host.bench_fakes import EVERYONE
from tests.limits import HANG

WORKLOAD = Gdn((1, 2), (70, 5), head_dim=16)
PROVIDER = "tests.host.bench_fakes:implementations"
QUICKLY = Options(rounds=1, burst_s=0.0)


class Patient(Harness):
    """Only what hangs runs into the limit of a first call: the rest may share the machine."""

    def _receive(self, begin):
        self._limits["first call"] = 1.0 if begin.implementation == "hangs" else HANG
        return super()._receive(begin)


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    for phase in LIMITS:
        monkeypatch.setitem(LIMITS, phase, HANG)


def harness(tmp_path, names=(), options=QUICKLY, **more):
    return Patient("gdn", names, options, tmp_path / "log", provider=PROVIDER, **more)


WHAT_BECOMES_OF = {
    "right": (OK, ""),
    "wrong_chunk": (WRONG, "o is off by"),
    "unwritten": (WRONG, "ht is off by nan"),
    "forgets": (WRONG, "ht is missing"),
    "raises": (FAILED, "first call: RuntimeError: no such variant"),
    "refuses": (UNSUPPORTED, "got this; need that; do this"),
    "hungry": (MEMORY, "tried to allocate everything"),
    "lacks": (NOT_APPLICABLE, "it has no forward"),
    "absent": (MISSING, "ModuleNotFoundError"),
    "hangs": (TIME_LIMIT, "first call: nothing happened for 1 s"),
    "dies": (DIED, "first call: the process ended with SIGKILL"),
    "dies_on_import": (MISSING, "import: the process ended with SIGKILL"),
}


def test_whatever_an_implementation_does_the_rest_goes_on(tmp_path):
    """One test, because replacing workers takes seconds and every check looks at the same rows."""
    said = []
    with harness(
        tmp_path,
        listener=lambda implementation, phase: said.append((implementation, phase)),
    ) as running:
        rows = [running.row(WORKLOAD) for _ in range(3)]

    # each says what became of it, and only what is right has a time
    assert set(WHAT_BECOMES_OF) == {fake.name for fake in EVERYONE}
    for name, (status, detail) in WHAT_BECOMES_OF.items():
        result = rows[0].result(name)
        assert result.status == status, result
        assert detail in result.detail
        assert (result.p50_ms is not None) == (status == OK)
    assert {name for name, phase in said if phase == "timing"} == {"right"}

    # every implementation has a result in every row
    for row in rows:
        assert {r.implementation for r in row.results} == set(WHAT_BECOMES_OF)
        assert row.result("right").status == OK

    # who ends the worker twice is not tried a third time
    for name in ("hangs", "dies"):
        assert rows[1].result(name).status in (TIME_LIMIT, DIED)
        assert rows[2].result(name).detail == "not tried: ended the worker 2 times"
        assert said.count((name, "first call")) == 2

    # what is right comes with its errors and the counted work
    right = rows[0].result("right")
    assert set(right.errors) == {"o", "ht"}
    assert max(right.errors.values()) < 1e-5
    assert right.p20_ms <= right.p50_ms <= right.p80_ms
    assert rows[0].flops > 0
    assert rows[0].floor_ms > 0


def test_the_worker_goes_when_the_harness_is_left(tmp_path):
    with harness(tmp_path, ["right"]) as running:
        process = running._process
        assert process.is_alive()
    process.join(HANG)
    assert not process.is_alive()


def test_a_workload_that_cannot_be_made_fails_for_everyone_and_the_next_one_runs(tmp_path):
    impossible = Gdn((2, 3), (5,), head_dim=16)  # 3 value heads cannot share 2 key heads
    with harness(tmp_path, ["right"]) as running:
        assert running.row(impossible).result("right").status == FAILED
        assert running.row(WORKLOAD).result("right").status == OK


def test_spread_is_quantiles():
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    assert spread([float(i) for i in range(101)]) == (20.0, 50.0, 80.0)


def test_a_burst_has_at_least_one_sample_and_takes_turns():
    calls = []
    timer = CpuTimer([lambda: calls.append("a"), lambda: calls.append("b")])
    assert len(timer.burst(0.0)) == 1
    timer.burst(0.0)
    assert calls == ["a", "b"]


def test_ceilings_are_measured_not_assumed():
    ceilings = measure_ceilings(torch.device("cpu"))
    assert 1e8 < ceilings.flops < 1e14
    assert 1e8 < ceilings.bandwidth < 1e13
    assert "float32" in ceilings.matmul


# --- the command


def test_select_by_set_direction_and_name():
    def names(*arguments):
        return [w.name for w in sm90.select(sm90.parse(["gdn", *arguments]))]

    assert len(names("--quick")) == 27
    assert len(names("--quick", "--direction", "bwd")) == 6
    assert all("both" in name for name in names("--quick", "--direction", "both"))
    assert names("--quick", "--only", "*fwd-16x64-2048x1*") == ["gdn-fwd-16x64-2048x1-published-h0"]
    assert names("--heads", "2/4,1/1", "--lengths", "8", "--direction", "both") == [
        "gdn-both-2x4-8x1-published-h0", "gdn-both-1x1-8x1-published-h0"
    ]  # fmt: skip
    assert names("--lengths", "8", "--gates", "model", "--direction", "fwd") == [
        "gdn-fwd-16x32-8x1-model-h0"
    ]
    assert set(names("--set", "kernels,cpu")) == {w.name for w in GDN["kernels"] + GDN["cpu"]}
    assert len(names("--set", "decode,filled", "--direction", "fwd")) == 36 + 24
    assert len(names("--set", "decode,serving", "--direction", "decode,drafts")) == 36 + 36
    assert names("--lengths", "1x100", "--direction", "decode,pool_decode") == [
        "gdn-decode-16x32-100of1-published-h0", "gdn-pool-decode-16x32-100of1"
    ]  # fmt: skip
    assert len(names()) == sum(len(GDN[s]) for s in ("forward", "backward", "short"))


def test_the_list_says_lengths_in_words(capsys):
    assert sm90.main(["gdn", "--lengths", "3000x5,1x100", "--direction", "fwd", "--list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split(maxsplit=1) == [
        "gdn-fwd-16x32-3000x5-published-h0", "5 sequences of 3000 tokens"
    ]  # fmt: skip
    assert second.endswith(" 100 sequences of 1 token")


@pytest.mark.parametrize(
    ("arguments", "there_is"),
    [
        (["--set", "nonsense"], "'anchors'"),
        (["--direction", "up"], "need fwd, bwd, both, decode, pool_decode, drafts, pool_prefill"),
        (["--impl", "fastest"], "--impl fastest of gdn; need some of ours, "),
        (["--lengths", "12x50+7"], "6144+2048; dualkv, conv and hybrid have responses to a prompt"),
        (["sparse_ring", "--lengths", "12x50+7"], "dualkv, conv and hybrid have responses to a pr"),
        (
            ["--lengths", "6000x2", "--direction", "decode"],
            "6000 tokens of each sequence; need",
        ),
        (
            ["--lengths", "6000x2", "--direction", "drafts"],
            "such as 2x2; fwd and pool_prefill",
        ),
        (["--lengths", "8", "--set", "decode"], "--direction decode, for one, decodes shapes of y"),
        (["--lengths", "8", "--save"], "your record will be out/gdn.json; --out names the folder"),
        (["--lengths", "8+9", "--direction", "decode"], "need sequences of equal length, such as"),
        (["--lengths", "2x8", "--direction", "pool_decode"], "need --lengths 1x8 for pool_decode"),
        (["--lengths", "1x8", "--direction", "drafts"], "of more tokens each for drafts, as 4x8"),
        (["--lengths", "4x8", "--direction", "drafts", "--gates", "model"], "need no --gates"),
        (["conv", "--lengths", "8", "--direction", "decode"], "this family has fwd, bwd"),
        (["--head-dim", "64"], "a shape without --lengths; need them, such as --lengths 4096x2"),
        (["--lengths", "8", "--head-dim", "0"], "--head-dim 0/0; need sizes of at least 1"),
        (
            ["--lengths", "8", "--head-dim", "96/"],
            "argument --head-dim: invalid sizes value: '96/'",
        ),
        (
            ["conv", "--lengths", "8", "--head-dim", "96/192"],
            "need one size: gdn alone has K and V",
        ),
        (["--lengths", "0x4"], "--lengths 0x4; need sequences such as 4096x2"),
        (["--lengths", "four"], "--lengths four; need sequences such as 4096x2"),
        (["--lengths", "8", "--heads", "3/4"], "--heads 3/4; need FEW/MANY with MANY a multiple"),
        (["--lengths", "8", "--density", "0.1"], "--density and --run of gdn; need sparse_ring"),
        (["dualkv", "--lengths", "8", "--direction", "both"], "this family has fwd, bwd"),
        (["dualkv", "--lengths", "0x8+8"], "--lengths 0x8+8; need numbers of at least 1"),
        (["sparse_ring", "--lengths", "100"], "a multiple of 64 tokens from 128 on"),
        (["sparse_ring", "--lengths", "256", "--density", "5"], "a density above 0 and at most 1"),
        (["conv", "--lengths", "8", "--head-dim", "9"], "= 576 channels; need a multiple of 128"),
        (
            ["hybrid", "--lengths", "8", "--heads", "1/2"],
            "gdn, conv and dualkv time parts with other heads, docs/models.md times a model or con",
        ),
        (
            ["model", "--lengths", "8", "--heads", "1/2"],
            "need --lengths alone: layers of model have the sizes of models; gdn, conv and dualkv",
        ),
        (["model", "--lengths", "8+9"], "need sequences of equal length, such as 2048x4"),
    ],
)
def test_bad_arguments_are_refused_with_what_there_is(arguments, there_is, capsys):
    with pytest.raises(SystemExit):
        sm90.parse(arguments if arguments[0] in sm90.SETS else ["gdn", *arguments])
    said = capsys.readouterr().err
    assert there_is in said
    assert len(said.splitlines()) == 2  # the usage is short


def test_64_tokens_of_a_sequence_may_be_decoded():
    (found,) = sm90.parse(["gdn", "--lengths", "64x2", "--direction", "decode"]).own
    assert found.lengths == (64, 64)


def test_without_a_gpu_workloads_are_shorter_and_kernels_left_out():
    found, said = for_cpu([*GDN["anchors"], *GDN["kernels"], *GDN["cpu"]])
    assert len(found) == 28
    assert found[0].lengths == (512,)
    assert found[-1] == GDN["cpu"][0]
    assert said == (
        "No GPU: float32 on the CPU path, lengths 64 times shorter. "
        "12 of 40 workloads are left out: single kernels have no CPU path."
    )
    decoded, said = for_cpu(GDN["decode"])
    assert [w.lengths for w in decoded[:4]] == [(1,), (2,), (4,), (1, 1)]
    assert "64 times fewer sequences to decode" in said


@pytest.mark.parametrize("family", ["dualkv", "sparse_ring"])
def test_without_a_gpu_attention_is_shorter_too(family):
    """A quick run at the length of a GPU's took hours on two cores, and so did some sets later."""
    for name, workloads in sm90.SETS[family].items():
        found, said = for_cpu(workloads)
        assert len({w.name for w in found}) == len(found)
        left_out = len(workloads) - len(found)
        assert (f"{left_out} of {len(workloads)} workloads are left out: they" in said) == (
            left_out > 0
        ), name
        by_tokens = {w.reduced(64).name: w for w in workloads}
        for short in found:
            whole = by_tokens[short.name]
            assert (short.kind, short.heads) == (whole.kind, whole.heads)
            assert short.tokens <= max(128, whole.tokens / 64 + 64)
            assert 0 < short.pairs <= 2 * whole.pairs / 64
            assert work_of(short).flops < 1e11  # a minute
    quick, _ = for_cpu(sm90.SETS[family][sm90.QUICK[family][0]])
    assert sum(4 * w.pairs * w.heads[1] * w.head_dim for w in quick) < 2e11  # a few minutes


OWN = {
    "gdn": (
        ["--heads", "2/4", "--lengths", "40x2,64"],
        "fwd-2x4-40+40 bwd-2x4-40+40 64x1-published-h0-d16x64",
    ),
    "gdn decode": (
        ["--heads", "2/4", "--lengths", "1x20", "--direction", "decode,pool_decode,pool_prefill"],
        "gdn-decode-2x4-20of1-published-h0-d64 pool-decode-2x4-20of1 prefill-2x4-20of1-fp32",
    ),
    "gdn drafts": (
        ["--heads", "2/4", "--lengths", "2x20", "--direction", "drafts"],
        "gdn-drafts-2x4-20of2",
    ),
    "conv": (["--heads", "2/4", "--lengths", "9x2,2x7+3"], "conv-fwd-128-9x2 conv-bwd-128-2x7+3"),
    "dualkv": (["--heads", "1/2", "--lengths", "3x40+9,33"], "fwd-1x2-3x40+9-d64 bwd-1x2-33-d64"),
    "sparse_ring": (["--lengths", "256", "--density", "0.5"], "fwd-8x32-0.25k-50%-run1-d64"),
    "hybrid": (["--lengths", "2x9+5"], "hybrid-block-2x9+5"),
    "model": (["--lengths", "9x3"], "model-Qwen3.5-9B-9x3 model-OLMo-Hybrid-7B-9x3"),
}


@pytest.mark.parametrize("case", OWN)
def test_shapes_of_one_s_own_run_without_a_gpu(case):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: this is the path without one")
    (arguments, names), family = OWN[case], case.partition(" ")[0]
    size = ["--head-dim", {"gdn": "16/64", "conv": "16"}.get(case, "64")]
    if family in ("hybrid", "model"):  # of a small model
        size = []
    workloads, said = for_cpu(sm90.select(sm90.parse([family, *arguments, *size])), own=True)
    assert said.startswith("No GPU: float32 on the CPU path")
    assert "shorter" not in said
    assert "fewer" not in said
    for name in names.split():
        assert any(name in workload.name for workload in workloads), name
    sent = []
    worker = Worker(sent.append, implementations(family, ["ours"]))
    for workload in workloads:
        worker.row(workload, ["ours"], QUICKLY)
    results = [message for message in sent if isinstance(message, records.Result)]
    assert [result.status for result in results] == [OK] * len(workloads), results
    assert all(result.p50_ms > 0 for result in results)


def test_thousands_of_tokens_may_have_either_letter():
    """Tables have `64K tokens`, and 64K was refused."""
    small, large = (sm90.parse(["sparse_ring", "--lengths", x]).own for x in ("64k", "64K"))
    assert small == large
    assert large[0].tokens == 65536


def test_dualkv_without_a_prompt_is_remarked():
    """gdn's LENGTHxCOUNT gave rows without anything shared, and no rival of sharing."""
    for family, lengths, said in (
        ("dualkv", "6144+2048,4096x2", "no shared prompts in these --lengths; need COUNTxPROMPT+"),
        ("dualkv", "6144+2048,2x9+5", ""),
        ("conv", "6144+2048", ""),
        ("gdn", "6144+2048", ""),
    ):
        found = remark(family, sm90.parse([family, "--lengths", lengths]).own)
        assert found.startswith(said)
        assert bool(found) == bool(said)


def test_shapes_of_one_s_own_are_shortened_where_a_cpu_needs_minutes():
    own = sm90.select(sm90.parse(["gdn", "--lengths", "64x2,64k", "--direction", "bwd"]))
    assert [w.lengths for w in own] == [(64, 64), (65536,)]
    (short, long), said = for_cpu(own, own=True)
    assert short == own[0]
    assert long.lengths == (1024,)
    assert said == "No GPU: float32 on the CPU path, lengths 1 to 64 times shorter."
    huge = sm90.select(sm90.parse(["dualkv", "--lengths", "40000x64000+64000"]))
    found, said = for_cpu(huge, own=True)
    assert not found
    assert said.endswith("2 of 2 workloads are left out: they would take minutes each.")


@pytest.mark.parametrize(
    ("family", "row", "shown"),
    [
        ("dualkv", "dualkv-bwd-8x32-D", "D/64"),
        ("sparse_ring", "*-fwd-*-128k-5%-run4", "2k-5%-run4"),
    ],
)
def test_attention_runs_without_a_gpu(family, row, shown, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: this is the path without one")
    assert sm90.main([family, "--quick", "--only", row, "--out", str(tmp_path)]) == 0
    assert "float32 on the CPU path, lengths 64 times shorter" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / f"{family}.json").read_text())["rows"]
    assert (found["layout"], found["results"][0]["status"]) == (shown, OK)


@pytest.mark.parametrize("out", [["--out", "/a/folder"], ["--out=/a/folder"], []])
def test_a_record_names_no_folder_of_its_machine(out, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sm90.py", "gdn", *out, "--save"])
    assert records.command_line() == "python -m benchmarks.sm90 gdn --save"


def test_the_command_runs_to_the_end(tmp_path, capsys):
    """One forward and one backward row through the CPU path: table, JSON, figures, record."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: this is the path without one")
    out = tmp_path / "out"
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    status = sm90.main([
        "gdn", "--quick", "--only", "gdn-?wd-2x8-2048x1-*", "--out", str(out), "--plot",
    ])  # fmt: skip
    assert status == 0
    printed = capsys.readouterr().out
    assert "token loop" in printed
    assert re.search(r"missing, FlashQLA: (not )?installed.* needs a CUDA device", printed)
    assert "Ran 1 workloads on" in printed
    for name in ("gdn.md", "gdn.json", "gdn-fwd-2x8.svg"):
        assert (out / name).stat().st_size > 0
        assert str(out / name) in printed
    entry = json.loads((out / "gdn.json").read_text())
    assert entry["device_kind"] == "cpu"
    assert entry["rows"][0]["results"][0]["status"] == OK
    assert entry["kernels"] == {}  # no kernel runs on a CPU
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
    assert used < 120  # seconds of a CPU


def test_a_record_is_recovered_once_and_own_shapes_never(tmp_path, monkeypatch, capsys):
    """It appended rows a second time, and runs that no page can show."""
    taken = []
    monkeypatch.setattr(records, "append", lambda run: taken.append(run) or tmp_path)
    runs = [x for x in records.load() if x.family == "gdn"]
    run = [x for x in runs if not x.rows[0].kind.startswith("ranks")][-1]
    path = tmp_path / "gdn.json"

    def recover(run: records.Run) -> tuple[int, str]:
        path.write_text(json.dumps(dataclasses.asdict(run)))
        return sm90.main([run.family, "--recover", str(path)]), capsys.readouterr().err

    new = dataclasses.replace(run, id="another")
    assert recover(new) == (0, "")
    assert [x.id for x in taken] == ["another"]
    own = dataclasses.replace(run.rows[0], name="gdn-fwd-3x3-7x1-model-h0")
    for wrong, said in (
        (run, f"{run.id}, which is on record; need a new run of named workloads"),
        (dataclasses.replace(new, rows=(own,)), "a run of your own shapes"),
    ):
        status, text = recover(wrong)
        assert (status, said in text) == (2, True)
    path.write_text("{")
    assert sm90.main(["gdn", "--recover", str(path)]) == 2
    assert "need the FAMILY.json of --out" in capsys.readouterr().err
    assert len(taken) == 1


def test_nothing_that_matches_is_an_error_that_names_sets(capsys):
    for more in ([], ["--list"]):
        assert sm90.main(["gdn", "--direction", "decode", *more]) == 2
        assert "try --set decode" in capsys.readouterr().err


def test_decoding_runs_without_a_gpu(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: this is the path without one")
    only = ["--quick", "--set", "decode", "--only", "gdn-decode-2x8-128of2-*"]
    assert sm90.main(["gdn", *only, "--out", str(tmp_path), "--plot"]) == 0
    printed = capsys.readouterr().out
    assert "### decode, ms" in printed
    assert "64 times fewer sequences to decode" in printed
    row = json.loads((tmp_path / "gdn.json").read_text())["rows"][0]
    assert (row["kind"], row["layout"], row["tokens"]) == ("decode", "2+2", 4)
    assert [r["status"] for r in row["results"][:2]] == [OK, OK]  # ours and the token loop
    assert (tmp_path / "gdn-decode-2x8.svg").stat().st_size > 0


def command(*arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own, which a test can end."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sm90", *arguments],
        cwd=records.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_run_that_is_killed_leaves_its_rows(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: this is the path without one")
    only = ("--only", "gdn-fwd-2x8-*", "--impl", "ours")
    process = command("gdn", "--quick", *only, "--out", str(tmp_path))
    assert any(re.match(r"\[1/\d+\] gdn-fwd-2x8-\S+  1 sequence of", x) for x in process.stdout)
    partial = tmp_path / "gdn.json"
    deadline = time.monotonic() + HANG
    while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    run = records.run_from_json(json.loads(partial.read_text()))
    records.append(run, tmp_path / "results")
    (found,) = records.load(tmp_path / "results")
    assert 1 <= len(found.rows) <= 7
    assert found.rows[0].time_ms("ours") > 0


def test_a_run_is_compared_with_the_newest_times_on_record():
    """By row and implementation, on the same device; ours alone decides."""
    row, other = Gdn((1, 2), (70,)), Gdn((1, 2), (80,))

    def run(times, device="GPU", of=row, id="gdn-new"):
        each = [
            records.Result(name, OK, p50_ms=graph, eager_ms=eager)
            for name, (graph, eager) in times.items()
        ]
        labels = {name: name for name in times}
        made = records.row_of(of, Work(0.0, 0.0), Ceilings(1.0, 1.0), each)
        known = {"environment": {}, "versions": {}, "device": device, "labels": labels}
        made = records.begun("gdn", "cuda", "", rows=(made,), **known)
        return dataclasses.replace(made, id=id)

    older = run({"ours": (2.0, None)}, id="gdn-1aaa")
    old = run({"ours": (1.0, 3.0), "fla": (5.0, None)}, id="gdn-2bbb")
    for times, threshold, status in (
        ({"ours": (1.02, 3.0), "fla": (9.0, None)}, 3, 0),  # a rival may be slower
        ({"ours": (1.04, 3.0)}, 3, 1),
        ({"ours": (1.04, 3.0)}, 5, 0),
        ({"ours": (0.5, 3.2)}, 3, 1),
    ):
        text, found = compared(run(times), [older, old], threshold)
        assert found == status
        assert "2bbb" in text
        assert "1aaa" not in text
        assert (tables.SLOWER in text) == bool(status)
    text, _ = compared(run({"fla": (4.0, 1.0)}), [older, old], 3)
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")]
    assert cells[3:8] == ["timed", "5.00", "4.00", "0.800", "2bbb"]
    for nothing in (run({"ours": (1.0, 1.0)}, "another"), run({"ours": (1.0, 1.0)}, of=other)):
        text, found = compared(nothing, [older, old], 3)
        assert (found, "nothing to compare with" in text) == (2, True)
    assert compared(old, [old], 3)[1] == 2  # itself


@pytest.mark.parametrize(
    ("against", "status"),
    [("2026-11-28,new_lengths", 2), ("nonsense-of-records", None)],
)
def test_the_command_compares_with_records(against, status, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: this is the path without one")
    command = ["conv", "--lengths", "8", "--impl", "ours", "--direction", "fwd"]
    command += ["--against", against, "--out", str(tmp_path)]
    if status is None:
        with pytest.raises(SystemExit):
            sm90.main(command)
        assert "nonsense-of-records: no record matches" in capsys.readouterr().err
    else:
        assert sm90.main(command) == status
        assert "nothing to compare with: no record of these rows on" in capsys.readouterr().out
