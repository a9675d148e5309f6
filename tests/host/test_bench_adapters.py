"""Every rival's adapter, run against a stand-in that undoes the library's conventions."""

import ast
import os
from graphlib import TopologicalSorter

import pytest
import torch

from benchmarks.families import SETS
from benchmarks.gdn.ours import Ours, ours
from benchmarks.gdn.problem import gdn_inputs, gdn_truth
from benchmarks.gdn.rivals import FLA, Definition, FlashInfer, FlashQLA
from benchmarks.gdn.workloads import Gdn
from benchmarks.harness.adapters import INSTALLING
from benchmarks.harness.records import ROOT
from benchmarks.rivals import implementations, known
from benchmarks.serving import engine_functions
from benchmarks.serving.rivals import VLLM
from qla_kernels.gdn import ops
from tests import zygote
from tests.host import rival_stand_ins as rivals

CPU = torch.device("cpu")
LENGTHS = (70, 1, 130)


def judged(implementation, workload, eager=False):
    inputs = gdn_inputs(workload, CPU, torch.float32)
    assert implementation.inapplicable(workload) is None
    call = implementation.prepare(workload, inputs)
    truth = gdn_truth(workload, inputs)
    verdict = truth.judge(call.collect(call.run()), torch.float32)
    if eager and call.eager is not None:
        call.eager()()
    return verdict


def small(direction, h0=True, gate="model"):
    return Gdn((1, 2), LENGTHS, direction, gate, h0, head_dim=16)


@pytest.fixture
def every_head_size(monkeypatch):
    """The stand-ins take any; the libraries' own 128 would make these tests slow."""
    monkeypatch.setattr(FlashQLA, "inapplicable", lambda self, workload: None)
    monkeypatch.setattr(
        FlashInfer, "inapplicable", lambda self, w: None if w.direction == "fwd" else "no backward"
    )


@pytest.mark.parametrize("h0", [True, False])
@pytest.mark.parametrize("direction", ["fwd", "bwd", "both"])
def test_fla(direction, h0):
    with rivals.installed(**rivals.fla()):
        assert judged(FLA(), small(direction, h0), eager=True).complaint is None


@pytest.mark.parametrize("h0", [True, False])
@pytest.mark.parametrize("direction", ["fwd", "bwd", "both"])
def test_flash_qla(direction, h0, every_head_size):
    with rivals.installed(**rivals.flash_qla()):
        assert judged(FlashQLA(), small(direction, h0), eager=True).complaint is None


def test_fla_builds_its_tables_once_for_all_input_sets():
    with rivals.installed(**rivals.fla()):
        fla = FLA()
        first = gdn_inputs(small("fwd"), CPU, torch.float32)
        second = first._replace(v=first.v + 1)
        other = gdn_inputs(small("fwd"), CPU, torch.float32)
        tables = [fla._packing(x.cu_seqlens)["cu_seqlens"] for x in (first, second, other)]
        assert tables[0] is tables[1]
        assert tables[0] is not tables[2]


def test_our_single_kernel_gets_fp32_beta_and_its_table(monkeypatch):
    from qla_kernels.gdn.launch import forward as launch

    def kkt_solve(k, g, beta, cu_seqlens, table):
        assert beta.dtype == torch.float32
        assert int(table.num_chunks) == sum(-(-n // 64) for n in LENGTHS)
        value = torch.zeros(*g.shape, 1)
        found = rivals.gdn.chunked(k, k, value, g, beta, cu_seqlens=cu_seqlens)
        return found.g_cum, found.A

    monkeypatch.setattr(launch, "kkt_solve", kkt_solve)
    workload = Gdn((1, 2), LENGTHS, kernel="kkt_solve")
    assert judged(Ours(), workload).complaint is None


def test_flash_qla_single_kernel_gets_its_gates_back():
    with rivals.installed(**rivals.flash_qla()):
        workload = Gdn((1, 2), LENGTHS, kernel="kkt_solve", head_dim=128)
        assert judged(FlashQLA(), workload).complaint is None


@pytest.mark.parametrize("h0", [True, False])
def test_flashinfer(h0, every_head_size):
    with rivals.installed(**rivals.flashinfer()):
        assert FlashInfer().version() == "stand-in"
        assert judged(FlashInfer(), small("fwd", h0), eager=True).complaint is None


@pytest.mark.parametrize("direction", ["fwd", "bwd", "both"])
def test_ours_on_cpu_tensors(direction):
    assert judged(Ours(), small(direction)).complaint is None


BY_NAME = {way.name: way for way in ours()}


@pytest.mark.parametrize("adapter", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize("direction", ["fwd", "bwd", "both"])
def test_our_low_level_calls(direction, adapter):
    """What is timed on a GPU; the calls take CPU tensors, too."""
    workload = small(direction, h0=adapter.name != "ours_whole")
    inputs = gdn_inputs(workload, CPU, torch.float32)
    call = adapter._low_level(workload, inputs)
    verdict = gdn_truth(workload, inputs).judge(call.collect(call.run()), torch.float32)
    assert verdict.complaint is None
    call.eager()()


def test_a_backward_alone_runs_no_forward_when_it_is_timed(monkeypatch):
    import qla_kernels

    forwards, backwards = [], []

    def counted(function, calls):
        return lambda *args, **options: (calls.append(1), function(*args, **options))[1]

    for name, calls in (("fwd", forwards), ("bwd", backwards)):
        name = f"chunk_gated_delta_rule_{name}"
        monkeypatch.setattr(qla_kernels, name, counted(getattr(qla_kernels, name), calls))
    workload = small("bwd")
    call = Ours()._low_level(workload, gdn_inputs(workload, CPU, torch.float32))
    for _ in range(3):
        call.run()
    assert (len(forwards), len(backwards)) == (1, 3)


def test_the_definition():
    assert judged(Definition(), small("fwd", gate="published")).complaint is None


def test_a_stand_in_notices_a_missing_conversion(every_head_size, monkeypatch):
    """The stand-ins must be able to fail: g passed as it is gives a wrong result."""
    plain = rivals.flashinfer_prefill

    def without_exp(q, k, v, g, *rest, **options):
        return plain(q, k, v, g.log().clamp(min=1e-6), *rest, **options)

    with rivals.installed(flashinfer__gdn_prefill={"chunk_gated_delta_rule": without_exp}):
        complaint = judged(FlashInfer(), small("fwd")).complaint
        assert complaint is not None
        assert "off by" in complaint


@pytest.mark.parametrize(
    ("name", "asked"), [("ours", {None}), ("ours_kept", {True}), ("ours_alone", {False})]
)
def test_what_a_backward_of_ours_gets_from_its_forward(name, asked, monkeypatch):
    """Alone it has what a training step's backward has, unless the adapter says otherwise."""
    heard, given = [], []
    forward, backward = ops.gdn_fwd, ops.gdn_bwd

    def gdn_fwd(call, options):
        heard.append(options.enable_fwd_cp_cache)
        done = forward(call, options)
        return (
            done if heard[-1] is False else done._replace(cp_cache=ops.empty_cache(call.q, 2, 16))
        )

    def gdn_bwd(call, saved, *others):
        given.append(len(saved.cp_cache))
        return backward(call, saved, *others)

    monkeypatch.setattr(ops, "gdn_fwd", gdn_fwd)
    monkeypatch.setattr(ops, "gdn_bwd", gdn_bwd)
    workload = small("bwd")
    inputs = gdn_inputs(workload, CPU, torch.float32)
    adapter = BY_NAME[name]
    adapter._low_level(workload, inputs).run()
    assert (set(heard), given) == (asked, [0 if asked == {False} else 8])
    if None in asked:  # as in a step
        adapter._public(small("both"), inputs)()
        assert heard == [None, None]


def test_what_a_library_lacks_is_said():
    assert "no backward" in FlashInfer().inapplicable(small("bwd"))
    assert "128" in FlashQLA().inapplicable(small("fwd"))
    kernel = Gdn((1, 2), LENGTHS, kernel="kkt_solve")
    assert FLA().inapplicable(kernel) is not None
    assert FlashInfer().inapplicable(kernel) is not None


def test_without_a_gpu_rivals_are_announced_as_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for family in ("gdn", "dualkv", "sparse_ring"):
        for implementation in implementations(family):
            if implementation.needs_cuda:
                assert "needs a CUDA device" in implementation.missing()


def test_without_a_gpu_it_is_said_whether_a_library_is_installed(monkeypatch, tmp_path):
    """It said `needs a CUDA device` of what was not there at all. Nothing is imported."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    library = tmp_path / "a_rival"
    library.mkdir()
    (library / "__init__.py").write_text("raise RuntimeError('no GPU')")
    rival = FlashQLA(module="a_rival.ops")
    assert rival.missing() == f"not installed, and needs a CUDA device; {INSTALLING}"
    monkeypatch.syspath_prepend(tmp_path)
    assert rival.missing() == "installed; needs a CUDA device"
    engine = VLLM()
    for reason, said in ((None, "installed; "), ("no sources", "not installed, and ")):
        monkeypatch.setattr(engine_functions, "missing", lambda name, reason=reason: reason)
        assert str(engine.missing()).startswith(f"{said}needs a CUDA device")


RIVALS = "fla", "flash_qla", "flashinfer", "flash_attn", "causal_conv1d", "vllm", "sglang", "trl"


def test_adapters_import_no_rival():
    """A library that is missing, or broken, is one row's matter."""
    imports = "; ".join(f"implementations({family!r})" for family in SETS)
    program = f"import sys; from benchmarks.rivals import implementations; {imports}; "
    program += f"print({{*{RIVALS}}} & {{*sys.modules}})"
    done = zygote.run(program, cwd=ROOT, path=str(ROOT), env=os.environ)
    assert done.stdout == "set()\n", done.stderr


def test_no_file_of_the_benchmarks_imports_itself_by_way_of_others():
    """Imports inside functions count, too."""
    files = {path: ast.parse(path.read_text()) for path in (ROOT / "benchmarks").rglob("*.py")}
    imports = {path: {*_imported(path, tree)} & {*files} for path, tree in files.items()}
    assert len(imports[ROOT / "benchmarks" / "sm90.py"]) > 5
    TopologicalSorter(imports).prepare()  # raises CycleError


def _imported(path, tree):
    """Files that a file may import: a module, or a package that the name is of."""
    for node in (x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)):
        folder = path.parents[node.level - 1] if node.level else ROOT
        of = folder.joinpath(*(node.module or "").split("."))
        for name in node.names:
            yield from (of / f"{name.name}.py", of / name.name / "__init__.py")
        yield of.with_suffix(".py")


def test_a_library_that_fails_on_import_is_missing_with_its_reason():
    assert "ModuleNotFoundError" in Ours(module="tests.host.no_such_module").missing()


def test_what_is_for_one_question_only_is_left_out_unless_it_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "ours_whole" not in [i.name for i in implementations("gdn")]
    assert [i.name for i in implementations("gdn", ["ours_whole"])] == ["ours_whole"]


def test_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match="--impl fastest of gdn; need some of ours, "):
        implementations("gdn", ["ours", "fastest"])
    assert [i.name for i in implementations("gdn", ["fla", "ours"])] == ["fla", "ours"]
    assert {i.name for i in known("gdn")} >= {"ours", "fla"}
    assert {i.name for i in known("sparse_ring")} == {
        "ours", "fa4", "cudnn", "flex",
    }  # fmt: skip
