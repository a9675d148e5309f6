"""Every rival's adapter, run against a stand-in that undoes the library's conventions."""

import pytest
import torch

from benchmarks import attention, baselines_attention, baselines_gdn, ours_gdn
from benchmarks.attention import attention_inputs, attention_truth
from benchmarks.baselines import implementations
from benchmarks.baselines_attention import (
    CudnnAttention,
    FlashAttention4,
    FlashAttention4Shared,
    FlexAttention,
    merge,
)
from benchmarks.baselines_gdn import FLA, Definition, FlashInfer, FlashQLA
from benchmarks.inputs import gdn_inputs
from benchmarks.ours_attention import OursDualKV, OursDualKVRepeatable, OursSparse
from benchmarks.ours_gdn import Ours
from benchmarks.truth import gdn_truth
from benchmarks.workloads import Gdn
from benchmarks.workloads_attention import SharedPrompts, VerticalSlash
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
        second = gdn_inputs(small("fwd"), CPU, torch.float32, 1, first.cu_seqlens)
        other = gdn_inputs(small("fwd"), CPU, torch.float32)
        tables = [fla._packing(x.cu_seqlens)["cu_seqlens"] for x in (first, second, other)]
        assert tables[0] is tables[1]
        assert tables[0] is not tables[2]


def test_our_single_kernel_gets_fp32_beta_and_its_table(monkeypatch):
    from qla_kernels.gdn import launch

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


@pytest.mark.parametrize("adapter", ours_gdn.ours(), ids=lambda x: x.name)
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
                assert implementation.missing() == "needs a CUDA device"


def test_a_library_that_fails_on_import_is_missing_with_its_reason(monkeypatch):
    class Broken(Ours):
        module = "tests.host.no_such_module"

    assert "ModuleNotFoundError" in Broken().missing()


def test_what_is_for_one_question_only_is_left_out_unless_it_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "ours_whole" not in [i.name for i in implementations("gdn")]
    assert [i.name for i in implementations("gdn", ["ours_whole"])] == ["ours_whole"]


def test_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match=r"no implementation \['fastest'\] of gdn"):
        implementations("gdn", ["ours", "fastest"])
    assert [i.name for i in implementations("gdn", ["fla", "ours"])] == ["fla", "ours"]
    assert {i.name for i in baselines_gdn.known("gdn")} >= {"ours", "fla"}
    assert {i.name for i in baselines_attention.known("sparse_ring")} == {
        "ours", "fa4", "cudnn", "flex",
    }  # fmt: skip


# --- attention

GROUPS = (
    ((5, (3, 7, 1)), (4, (2,)), (6, ())),  # unequal groups, one without responses
    ((8, (4, 4)), (8, (4, 4))),  # equal lengths, which cuDNN needs
)


def attention_verdict(implementation, workload):
    inputs = attention_inputs(workload, CPU, torch.float32)
    call = implementation.prepare(workload, inputs)
    truth = attention_truth(workload, inputs)
    return truth.judge(call.collect(call.run()), torch.float32)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_our_attention(direction):
    shared = SharedPrompts("test", GROUPS[0], direction, heads=(2, 4), head_dim=16)
    for adapter in (OursDualKV(), OursDualKVRepeatable()):
        assert attention_verdict(adapter, shared).complaint is None
    for density in (0.6, 1.0):
        masked = VerticalSlash(512, density, 1, direction=direction, heads=(1, 2), head_dim=16)
        assert attention_verdict(OursSparse(), masked).complaint is None


def test_our_index_holds_what_the_definitions_holds(monkeypatch):
    workload = VerticalSlash(1024, direction="index", heads=(2, 4), head_dim=16)
    assert attention_verdict(OursSparse(), workload).complaint is None
    assert FlexAttention().inapplicable(workload) is not None
    assert FlashAttention4().inapplicable(workload) is not None
    calls = OursSparse().prepare(workload, attention_inputs(workload, CPU, torch.float32))
    v_idx, v_cnt, d_bits, held = calls.run()
    truth = attention_truth(workload, attention_inputs(workload, CPU, torch.float32))
    fewer = calls.collect((v_idx, v_cnt, torch.ones_like(d_bits), held))
    assert "recall is off" in truth.judge(fewer, torch.float32).complaint


def test_a_dense_mask_is_a_rivals_causal_attention():
    workload = VerticalSlash(256, heads=(2, 4), head_dim=16)
    assert workload.pairs == 256 * 257 // 2
    with rivals.installed(**rivals.flash_attn_4()):
        assert FlashAttention4().inapplicable(workload) is None
        assert attention_verdict(FlashAttention4(), workload).complaint is None


def test_truth_of_a_long_workload_is_of_two_key_heads(monkeypatch):
    workload = VerticalSlash(256, direction="bwd", heads=(3, 6), head_dim=16)
    inputs = attention_inputs(workload, CPU, torch.float32)
    whole = attention_truth(workload, inputs)
    monkeypatch.setattr(attention, "ALL_HEADS", 255)
    part = attention_truth(workload, inputs)
    assert part.key_heads == (0, 2)
    for name, heads in (("dq", [0, 1, 4, 5]), ("dk", [0, 2]), ("dv", [0, 2])):
        assert torch.equal(part.want[name], whole.want[name][:, :, heads])
    call = OursSparse().prepare(workload, inputs)
    assert part.judge(call.collect(call.run()), torch.float32).complaint is None


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("adapter", [FlashAttention4, FlashAttention4Shared])
def test_flash_attention_4(adapter, direction, groups):
    workload = SharedPrompts("test", groups, direction, heads=(2, 4), head_dim=16)
    with rivals.installed(**rivals.flash_attn_4()):
        assert attention_verdict(adapter(), workload).complaint is None


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_cudnn(direction, monkeypatch):
    monkeypatch.setattr(
        torch.nn.attention.SDPBackend, "CUDNN_ATTENTION", torch.nn.attention.SDPBackend.MATH
    )
    workload = SharedPrompts("test", GROUPS[1], direction, heads=(2, 4), head_dim=16)
    assert attention_verdict(CudnnAttention(), workload).complaint is None
    ragged = SharedPrompts("test", GROUPS[0], direction)
    assert "packed" in CudnnAttention().inapplicable(ragged)


@pytest.mark.parametrize(
    "workload",
    [
        SharedPrompts("test", GROUPS[0], "fwd", heads=(2, 4), head_dim=16),
        VerticalSlash(256, 0.6, 1, heads=(1, 2), head_dim=16),
    ],
)
def test_flex_attention(workload, monkeypatch):
    monkeypatch.setattr(FlexAttention, "compiled", False)
    assert attention_verdict(FlexAttention(), workload).complaint is None


def test_merge_of_disjoint_keys_is_attention_over_all():
    q, k, v = torch.randn(3, 2, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)

    def attend(keys):
        scores = torch.einsum("qhd,khd->hqk", q, k[keys])
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys]), scores.logsumexp(-1)

    o, lse = merge(attend(slice(0, 4)), attend(slice(4, 10)))
    whole = attend(slice(0, 10))
    torch.testing.assert_close(o, whole[0])
    torch.testing.assert_close(lse, whole[1])
