"""The plug-ins for vLLM and SGLang: against recorded interfaces, and against sources if unpacked.

`python scripts/engine_interfaces.py` downloads the wheels' sources and compares them with the
record.
"""

import inspect
import logging
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from qla_kernels import Unsupported
from qla_kernels.integrations import engines, sglang, vllm
from qla_kernels.runtime import device
from reference import conv, gdn
from scripts import engine_interfaces
from tests.serving_traffic import Traffic
from tests.vllm_stand_ins import RECORD, Engine, metadata_of, recorded

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")

ROOT = Path(__file__).resolve().parents[2]


def accepts(function: Any, names: list[str]) -> None:
    """A call with all these parameters, as an engine makes it, reaches the function."""
    own = inspect.signature(function).parameters
    for name in names:
        assert name == "*" or name.startswith("**") or name in own, f"{name} is not a parameter"


@pytest.mark.parametrize("engine", RECORD)
def test_the_record_is_that_of_the_engine(engine):
    folder = engine_interfaces.UNPACKED
    if not (folder / engine).exists():
        pytest.skip(f"no sources of {engine}: python scripts/engine_interfaces.py gets them")
    assert engine_interfaces.interfaces(engine, folder) == RECORD[engine]["interfaces"]


def test_versions_are_those_of_the_record():
    assert {engine: (x["version"],) for engine, x in RECORD.items()} == engines.KNOWN
    assert {engine: x["version"] for engine, x in RECORD.items()} == engine_interfaces.VERSIONS


def test_entry_points():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, module in (("vllm.general_plugins", vllm), ("sglang.srt.plugins", sglang)):
        assert points[group] == {"qla_kernels": f"{module.__name__}:register"}
        assert callable(module.register)


def test_vllm_is_not_touched_unless_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would fail
    for value in (None, "", "another", "qla"):
        if value is None:
            monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("VLLM_PLUGINS", value)
        vllm.register()


@pytest.mark.parametrize(("module", "engine"), [(vllm, "vllm"), (sglang, "sglang")])
def test_an_unknown_version_is_refused(module, engine, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_PLUGINS", "other,qla_kernels")
    monkeypatch.setattr(metadata, "version", lambda _: "0.99.1+cu13")
    text = f"qla_kernels: {engine} 0.99.1; need {engine} {engines.KNOWN[engine][0]}; install it, or"
    if module is vllm:
        with pytest.raises(Unsupported) as error:
            module.register()
        said = str(error.value)
    else:
        module.register()
        said = caplog.text
        assert "--linear-attn-backend qla is not available" in said
    assert text in said


@pytest.mark.parametrize(("module", "engine"), [(vllm, "vllm"), (sglang, "sglang")])
def test_without_the_engine_a_sentence_says_so(module, engine, monkeypatch, caplog):
    """It was importlib's PackageNotFoundError."""
    monkeypatch.setenv("VLLM_PLUGINS", "qla_kernels")

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    known = engines.KNOWN[engine][0]
    text = f"qla_kernels: {engine} is not installed; need {engine} {known}; install it, or leave"
    if module is vllm:
        with pytest.raises(Unsupported, match=text):
            module.register()
    else:
        module.register()
        assert text in caplog.text


def vllm_layer(traffic: Traffic, batch: Any) -> tuple[Any, Engine]:
    """Our layer on a stand-in for vLLM's."""
    engine = Engine(batch)

    class QwenGatedDeltaNetAttention:
        def __init__(self, **settings: Any) -> None:
            self.enable_fused_gdn_spec_decode, self.gqa_interleaved_layout = False, False
            self.head_k_dim = self.head_v_dim = 128
            self.layer_norm_epsilon, self.quant_config = 1e-6, None
            names = dict.fromkeys(("group_size", "bias"))
            self.norm = SimpleNamespace(norm_before_gate=True, activation="silu", **names)
            self.model_config = SimpleNamespace(dtype=torch.bfloat16)
            vars(self).update(settings)

        def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
            return torch.bfloat16, torch.float32

        def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
            core_attn_out.fill_(7)  # vLLM's own

        def _forward_core_fused_norm(
            self, mixed_qkv: Any, b: Any, a: Any, output_gate: Any, core_attn_out: Any
        ) -> None:
            self._forward_core(mixed_qkv, b, a, core_attn_out)
            core_attn_out += 1000  # vLLM's norm

        def _forward_core_fused_norm_packed(self, qkvz: Any, ba: Any, core_attn_out: Any) -> None:
            qkv, z = qkvz.split([2 * self.key_dim + self.value_dim, self.value_dim], -1)
            gate = z.reshape(len(z), -1, self.head_v_dim)
            self._forward_core_fused_norm(qkv, *ba.chunk(2, -1), gate, core_attn_out)

    engine.QwenGatedDeltaNetAttention = QwenGatedDeltaNetAttention
    layer = vllm.layer_on(engine)()
    layer.prefix, layer.tp_size, layer.activation = "layer", 1, None
    channels = traffic.conv_weight.shape[0]
    layer.kv_cache = torch.zeros(len(traffic.pool), channels, 3).double(), traffic.pool
    layer.conv1d = SimpleNamespace(weight=torch.zeros(channels, 1, 4).double(), bias=None)
    layer.conv1d.weight[..., -1] = 1
    layer.norm.weight = traffic.norm_weight
    layer.key_dim, layer.head_k_dim = traffic.H * traffic.K, traffic.K
    layer.value_dim, layer.head_v_dim = traffic.HV * traffic.V, traffic.V
    vars(layer).update(traffic.parameters)
    return layer, engine


def test_vllm_layer_in_a_mixed_batch():
    """Two decoding sequences, then two prompts, of which one starts from 0 and keeps a state."""
    accepts(
        vllm.layer_on(SimpleNamespace(QwenGatedDeltaNetAttention=object))._forward_core,
        recorded("vllm", "QwenGatedDeltaNetAttention._forward_core")["parameters"],
    )
    t = Traffic(1)
    slots, total, kept = [5, 3, 7, 9], 2 + 130 + 5, 11
    checkpoint = SimpleNamespace(
        state_indices=t.table([0, 0, kept, 0]), checkpoint_offsets=t.table([0, 0, 64, 0])
    )
    batch = metadata_of(
        num_prefills=2, num_decodes=2, num_decode_tokens=2, num_actual_tokens=total,
        has_initial_state=torch.tensor([True, True, False, True]),
        non_spec_state_indices_tensor=t.table(slots),
        non_spec_query_start_loc=t.table([0, 1, 2, 132, 137]),
        prefill_query_start_loc=t.table([0, 130, 135]),
        prefill_state_indices=t.table(slots[2:]),
        prefill_has_initial_state=torch.tensor([False, True]), flashinfer_checkpoint_plan="is one",
        checkpoint=checkpoint,
    )  # fmt: skip
    layer, _ = vllm_layer(t, batch)
    rows, a, b = t.rows(total + 3)
    before, out = t.pool.clone(), torch.zeros(total + 3, t.HV, t.V, dtype=torch.float64)
    layer._forward_core(rows, b, a, out)
    starts = [before[5].mT, before[3].mT, torch.zeros_like(before[7].mT), before[9].mT]
    for n, (begin, end) in enumerate(((0, 1), (1, 2), (2, 132), (132, 137))):
        mine = slice(begin, end)
        want, states = t.truth(rows[mine], a[mine], b[mine], starts[n])
        t.agree("o", out[mine], want)
        t.agree("state", t.pool[slots[n]].mT, states[-1])
        last = layer.kv_cache[0]
        if n > 1:
            assert torch.equal(last[slots[n]], rows[end - 3 : end].T)
        if n == 2:
            t.agree("checkpoint", t.pool[kept].mT, states[63])
            assert torch.equal(last[kept], rows[begin + 61 : begin + 64].T)
    assert not out[total:].any()
    same = [slot for slot in range(len(t.pool)) if slot not in [*slots, kept]]
    assert torch.equal(t.pool[same], before[same])
    assert not layer.kv_cache[0][same].any()


def test_vllm_prompts_go_on_from_the_convolutions_pool():
    """A piece of a prompt, whose first tokens need the last ones of the piece before."""
    t = Traffic(3, sizes=(8, 8))
    batch = metadata_of(
        num_prefills=2, num_decodes=0, num_actual_tokens=9,
        has_initial_state=torch.tensor([True, False, True]),
        non_spec_state_indices_tensor=t.table([5, 3, 5]),  # the last has no tokens
        non_spec_query_start_loc=t.table([0, 7, 9, 9]),
        prefill_query_start_loc=t.table([0, 7, 9, 9]), prefill_state_indices=t.table([5, 3, 5]),
        prefill_has_initial_state=torch.tensor([True, False, True]),
    )  # fmt: skip
    layer, engine = vllm_layer(t, batch)
    engine.causal_conv1d_fn = None  # not called
    layer.conv1d.weight, layer.activation = t.conv_weight[:, None], "silu"
    last = t.rows_before.clone()
    layer.kv_cache = last.clone(), t.pool
    rows, a, b = t.rows(9)
    before, out = t.pool.clone(), torch.zeros(9, t.HV, t.V).double()
    layer._forward_core(rows, b, a, out)
    for begin, end, slot in ((0, 7, 5), (7, 9, 3)):
        old = last[5].T if slot == 5 else torch.zeros_like(last[5].T)
        line, mine = torch.cat([old, rows[begin:end]]), slice(begin, end)
        y = conv.forward(line, t.conv_weight, None, True, torch.tensor([0, len(line)]))[3:]
        state = before[5].mT if slot == 5 else torch.zeros_like(before[5].mT)
        want, states = t.truth(y, a[mine], b[mine], state)
        t.agree("o", out[mine], want)
        t.agree("state", t.pool[slot].mT, states[-1])
        assert torch.equal(layer.kv_cache[0][slot], line[-3:].T)


def test_vllm_layer_decodes_and_verifies():
    t = Traffic(2)
    slots = [5, 3, 0]
    batch = metadata_of(
        num_prefills=0, num_decodes=2, num_actual_tokens=3,
        non_spec_state_indices_tensor=t.table(slots),
    )  # fmt: skip
    layer, engine = vllm_layer(t, batch)
    rows, a, b = t.rows(3)
    before, out = t.pool.clone(), torch.ones(3, t.HV, t.V, dtype=torch.float64)
    layer._forward_core(rows, b, a, out)
    for n in range(2):
        want, _ = t.truth(rows[n : n + 1], a[n : n + 1], b[n : n + 1], before[slots[n]].mT)
        t.agree("o", out[n : n + 1], want)
    assert not out[2].any()

    table = [[5, 6, 8], [3, 1, 2]]
    engine.batch = metadata_of(
        num_prefills=0, num_decodes=0, num_actual_tokens=6, num_spec_decodes=2,
        spec_sequence_masks=torch.ones(2, dtype=torch.bool),
        spec_state_indices_tensor=t.table([*table, [0, 0, 0]]),
        spec_query_start_loc=t.table([0, 3, 6, 6]), num_accepted_tokens=t.table([1, 1, 1]),
    )  # fmt: skip
    rows, a, b = t.rows(6)
    before, out = t.pool.clone(), torch.ones(6, t.HV, t.V, dtype=torch.float64)
    layer._forward_core(rows, b, a, out)
    for n in range(2):
        mine = slice(3 * n, 3 * n + 3)
        want, states = t.truth(rows[mine], a[mine], b[mine], before[table[n][0]].mT)
        t.agree("o", out[mine], want)
        t.agree("states", t.pool[table[n]].mT, states)


def test_drafts_beside_prompts():
    """Tokens of both kinds stand in any order; the prompts have tables of their own."""
    t = Traffic(4)
    drafts, prompts = [1, 2, 6], [0, 3, 4, 5]
    batch = metadata_of(
        num_prefills=2, num_decodes=0, num_actual_tokens=7, num_spec_decodes=1,
        spec_sequence_masks=torch.tensor([False, True, False]),
        spec_state_indices_tensor=t.table([[5, 6, 8]]), spec_query_start_loc=t.table([0, 3]),
        num_accepted_tokens=t.table([1]), spec_token_indx=t.table(drafts),
        non_spec_token_indx=t.table(prompts), has_initial_state=torch.tensor([True, False]),
        non_spec_state_indices_tensor=t.table([3, 7]),
        non_spec_query_start_loc=t.table([0, 1, 4]), prefill_query_start_loc=t.table([0, 1, 4]),
        prefill_state_indices=t.table([3, 7]),
        prefill_has_initial_state=torch.tensor([True, False]),
    )  # fmt: skip
    layer, _ = vllm_layer(t, batch)
    rows, a, b = t.rows(7)
    before, out = t.pool.clone(), torch.ones(7, t.HV, t.V, dtype=torch.float64)
    layer._forward_core(rows, b, a, out)
    for index, state in ((drafts, before[5]), (prompts[:1], before[3]), (prompts[1:], None)):
        first = torch.zeros_like(before[3].mT) if state is None else state.mT
        want, states = t.truth(rows[index], a[index], b[index], first)
        t.agree("o", out[index], want)
        if index is drafts:
            t.agree("states", t.pool[[5, 6, 8]].mT, states)
    t.agree("state", t.pool[7].mT, states[-1])


def first_calls(caplog: Any) -> list[str]:
    """What the log says of first calls."""
    found = [r.getMessage() for r in caplog.records if "went to qla_kernels" in r.getMessage()]
    caplog.clear()
    return found


def test_vllms_first_calls_are_logged_once(caplog):
    engines._say_first.cache_clear()
    caplog.set_level(logging.INFO, "qla_kernels")
    t = Traffic(9, sizes=(8, 8))
    decode = metadata_of(
        num_prefills=0, num_decodes=1, num_actual_tokens=1,
        non_spec_state_indices_tensor=t.table([5]),
    )  # fmt: skip
    prefill = metadata_of(
        num_prefills=1, num_decodes=0, num_actual_tokens=5, has_initial_state=torch.tensor([True]),
        non_spec_state_indices_tensor=t.table([5]), prefill_query_start_loc=t.table([0, 5]),
        non_spec_query_start_loc=t.table([0, 5]), prefill_state_indices=t.table([5]),
        prefill_has_initial_state=torch.tensor([True]),
    )  # fmt: skip
    verify = metadata_of(
        num_prefills=0, num_decodes=0, num_actual_tokens=2, num_spec_decodes=1,
        spec_sequence_masks=torch.ones(1, dtype=torch.bool),
        spec_state_indices_tensor=t.table([[5, 6]]), spec_query_start_loc=t.table([0, 2]),
        num_accepted_tokens=t.table([1]),
    )  # fmt: skip
    kinds = ("decode", decode), ("prefill", prefill), ("verification of drafts", verify)
    layer, engine = vllm_layer(t, None)
    rows, a, b = t.rows(5)
    out = torch.zeros(5, t.HV, t.V).double()
    layer._forward_core(rows, b, a, out)  # vLLM profiles, on its own kernels
    assert not first_calls(caplog)
    for what, engine.batch in kinds:
        for _ in range(2):
            layer._forward_core(rows, b, a, out)
        assert first_calls(caplog) == [f"vLLM: the first {what} went to qla_kernels, on cpu"]


@pytest.mark.parametrize(
    ("dtype", "states", "sizes", "capability", "said"),
    [
        (torch.bfloat16, torch.float32, (128, 128), (9, 0), None),
        (torch.bfloat16, torch.bfloat16, (256, 512), (9, 0), None),
        (torch.float16, torch.float32, (128, 128), (9, 0), "q, k and v are float16"),
        (torch.bfloat16, torch.float16, (128, 128), (9, 0), "the pool of states is float16"),
        (torch.bfloat16, torch.float32, (512, 128), (9, 0), "head dimension"),
        (torch.bfloat16, torch.float32, (128, 128), (8, 0), "device capability 8.0"),
    ],
    ids=str,
)
def test_vllms_layer_is_refused_when_it_is_built(
    dtype, states, sizes, capability, said, monkeypatch
):
    """It was the first prefill."""
    monkeypatch.setattr(device, "available", lambda: True)
    monkeypatch.setattr(device, "capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    settings = {
        "enable_fused_gdn_spec_decode": False, "gqa_interleaved_layout": True,
        "head_k_dim": sizes[0], "head_v_dim": sizes[1],
        "model_config": SimpleNamespace(dtype=dtype), "quant_config": "fp8", "norm": None,
        "get_state_dtype": lambda: (dtype, states),
    }  # fmt: skip
    own = type("Own", (), {"__init__": lambda self, **x: vars(self).update(x)})
    layer = vllm.layer_on(SimpleNamespace(QwenGatedDeltaNetAttention=own))
    if said is None:
        layer(**settings)
        return
    with pytest.raises(Unsupported, match=said):
        layer(**settings)


@pytest.mark.parametrize("dim_first", [True, False])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_vllm_layer_decodes_with_its_convolution_and_norm(dim_first, activation):
    names = recorded("vllm", "QwenGatedDeltaNetAttention._forward_core_fused_norm")["parameters"]
    t = Traffic(6, sizes=(8, 8))
    slots = [5, 0, 3]
    batch = metadata_of(
        num_prefills=0, num_decodes=3, num_actual_tokens=3,
        non_spec_state_indices_tensor=t.table([*slots, 0]),
    )  # fmt: skip
    layer, engine = vllm_layer(t, batch)
    assert layer.enable_fused_gdn_spec_decode
    accepts(layer._forward_core_fused_norm, names[1:])
    engine.is_conv_state_dim_first = lambda: dim_first
    engine.causal_conv1d_update = None  # not called
    layer.conv1d.weight, layer.activation = t.conv_weight[:, None], "silu"
    layer.norm.activation = activation
    last = t.rows_before.clone()
    pool = last.clone() if dim_first else last.mT.clone()
    layer.kv_cache = pool, t.pool
    rows, a, b = t.rows(5)  # two of padding, for a graph
    before, gate = t.pool.clone(), torch.randn(5, t.HV, t.V).double()
    out = torch.zeros(5, t.HV, t.V).double()
    given = {"mixed_qkv": rows, "b": b, "a": a, "output_gate": gate, "core_attn_out": out}
    layer._forward_core_fused_norm(**given)
    for n in (0, 2):
        mine, slot = slice(n, n + 1), slots[n]
        row, after = conv.update(rows[mine], last[slot][None], t.conv_weight, None, True)
        want, states = t.truth(row, a[mine], b[mine], before[slot].mT)
        sigmoid = activation == "sigmoid"
        t.agree("y", out[mine], gdn.gated_rms_norm(want, gate[mine], t.norm_weight, 1e-6, sigmoid))
        t.agree("state", t.pool[slot].mT, states[0])
        t.agree("last tokens", pool[slot] if dim_first else pool[slot].mT, after[0])
    assert not out[[1, 3, 4]].any()
    same = [slot for slot in range(len(t.pool)) if slot not in slots]
    assert torch.equal(t.pool[same], before[same])


def test_vllm_layers_norm_of_prompts():
    t = Traffic(7, sizes=(8, 8))
    batch = metadata_of(
        num_prefills=1, num_decodes=0, num_actual_tokens=5, has_initial_state=torch.tensor([True]),
        non_spec_state_indices_tensor=t.table([5]), prefill_query_start_loc=t.table([0, 5]),
        non_spec_query_start_loc=t.table([0, 5]), prefill_state_indices=t.table([5]),
        prefill_has_initial_state=torch.tensor([True]),
    )  # fmt: skip
    layer, engine = vllm_layer(t, batch)
    rows, a, b = t.rows(5)
    start, out = t.pool[5].mT.clone(), torch.zeros(5, t.HV, t.V).double()
    gate = torch.randn_like(out)
    layer._forward_core_fused_norm(rows, b, a, gate, out)
    want, _ = t.truth(rows, a, b, start)
    t.agree("y", out, gdn.gated_rms_norm(want, gate, t.norm_weight, 1e-6))
    engine.batch = None  # vLLM profiles
    layer._forward_core_fused_norm_packed(None, None, out)
    assert not out.any()


def test_vllm_layers_output_is_cleared_behind_the_batch():
    """Its memory is fresh, and projections run on all of its rows."""
    t = Traffic(7, sizes=(8, 8))
    batch = metadata_of(
        num_prefills=0, num_decodes=2, num_actual_tokens=2,
        non_spec_state_indices_tensor=t.table([5, 3]),
    )  # fmt: skip
    layer, _ = vllm_layer(t, batch)
    rows, a, b = t.rows(5)
    out = torch.full((5, t.HV, t.V), torch.nan).double()
    qkvz = torch.cat([rows, torch.randn(5, t.HV * t.V).double()], 1)
    layer._forward_core_fused_norm_packed(qkvz, torch.cat([b, a], 1), out)
    assert out[:2].any()
    assert not out[2:].any()


def test_a_pool_of_another_dtype_keeps_vllms_convolution():
    t = Traffic(8, sizes=(8, 8))
    batch = metadata_of(
        num_prefills=0, num_decodes=1, num_actual_tokens=1,
        non_spec_state_indices_tensor=t.table([5]),
    )  # fmt: skip
    layer, engine = vllm_layer(t, batch)
    layer.kv_cache = layer.kv_cache[0].float(), t.pool
    called = []
    engine.causal_conv1d_update = lambda rows, *args, **named: called.append(named) or rows
    rows, a, b = t.rows(1)
    before, out, gate = t.pool.clone(), *torch.randn(2, 1, t.HV, t.V).double()
    layer._forward_core_fused_norm(rows, b, a, gate, out)
    want, _ = t.truth(rows, a, b, before[5].mT)
    t.agree("y", out, gdn.gated_rms_norm(want, gate, t.norm_weight))
    assert len(called) == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"quant_config": "fp8"},
        {"head_v_dim": 64},
        {
            "norm": SimpleNamespace(
                norm_before_gate=True, group_size=4, bias=None, activation="silu"
            )
        },
        {
            "norm": SimpleNamespace(
                norm_before_gate=True, group_size=None, bias=None, activation="x"
            )
        },
    ],
    ids=str,
)
def test_layers_whose_norm_stays_vllms(setting):
    engine = SimpleNamespace(QwenGatedDeltaNetAttention=None)
    own = type("Own", (), {"__init__": lambda self, **x: vars(self).update(x)})
    engine.QwenGatedDeltaNetAttention = own
    good = {
        "enable_fused_gdn_spec_decode": False, "gqa_interleaved_layout": False, "head_k_dim": 128,
        "head_v_dim": 128, "quant_config": None,
        "model_config": SimpleNamespace(dtype=torch.bfloat16),
        "get_state_dtype": lambda: (torch.bfloat16, torch.float32),
        "norm": SimpleNamespace(norm_before_gate=True, group_size=None, bias=None,
                                activation="silu"),
    }  # fmt: skip
    layer = vllm.layer_on(engine)
    assert layer(**good).enable_fused_gdn_spec_decode
    assert not layer(**{**good, **setting}).enable_fused_gdn_spec_decode
    assert layer(
        **{**good, **setting, "enable_fused_gdn_spec_decode": True}
    ).enable_fused_gdn_spec_decode


@pytest.mark.parametrize(
    ("change", "warms"),
    [({}, False), ({"speculative_config": "mtp"}, True), ({"quant_config": "fp8"}, True),
     ({"kv_cache": (torch.zeros(1), None)}, True), (None, True)],
    ids=str,
)  # fmt: skip
def test_vllm_warms_up_only_what_our_layers_leave_to_it(change, warms):
    """None: no layer is ours."""
    called = []
    module = SimpleNamespace(qwen_triton_warmup=lambda *given: called.append(given))
    vllm.skip_warmup(module)
    layer, _ = vllm_layer(Traffic(1, sizes=(8, 8), dtype=torch.bfloat16), None)
    layer.kv_cache = torch.zeros(1, dtype=torch.bfloat16), None
    vars(layer).update({"speculative_config": None, **(change or {})})
    layers = {"attention": object(), **({} if change is None else {"layer": layer})}
    runner = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    module.qwen_triton_warmup(runner, "config")
    assert called == ([(runner, "config")] if warms else [])


VERIFIES = ("_forward_core_fused_norm", "_can_use_fused_gdn_mtp_decode")


@pytest.mark.parametrize(("kernel", "ours"), [("cuda", False), ("triton", True)])
def test_who_verifies_drafts_of_qwen3_5(kernel, ours, monkeypatch):
    """VLLM_GDN_DECODE_KERNEL chooses, in vLLM's own code; docs/serving.md says so."""
    folder = engine_interfaces.UNPACKED
    if not (folder / "vllm").exists():
        pytest.skip("no sources of vllm: python scripts/engine_interfaces.py gets them")
    import ast

    tree = ast.parse((folder / "vllm" / engine_interfaces.GDN).read_text())
    layer = f"{vllm.LAYER}."
    code = ast.Module([engine_interfaces.lookup(tree, layer + name) for name in VERIFIES], [])
    t = Traffic(2)
    table = [[5, 6, 8], [3, 1, 2]]
    batch = metadata_of(
        num_prefills=0, num_decodes=0, num_actual_tokens=6, num_spec_decodes=2,
        spec_sequence_masks=torch.ones(2, dtype=torch.bool),
        spec_state_indices_tensor=t.table(table), spec_query_start_loc=t.table([0, 3, 6]),
        num_accepted_tokens=t.table([1, 1]),
    )  # fmt: skip
    built, engine = vllm_layer(t, batch)
    room: dict[str, Any] = {
        "torch": torch, "GDNAttentionMetadata": object, "MAX_FUSED_GDN_MTP_TOKENS": 8,
        "FUSED_GDN_STATE_DTYPES": (t.pool.dtype,), "supports_fused_mtp_decode": lambda: True,
        "get_forward_context": engine.get_forward_context,
    }  # fmt: skip
    exec(compile(code, engine_interfaces.GDN, "exec"), room)
    base = type(built).__mro__[1]  # in place of the stand-in's
    for name in VERIFIES:
        monkeypatch.setattr(base, name, room[name], raising=False)
    reached: list[str] = []
    built._forward_core_decode_spec_fused_norm = lambda **_: reached.append("vLLM's")
    built._rms_norm_gated_cuda = lambda *_: reached.append("vLLM's norm")
    built.gdn_decode_kernel, built.num_k_heads, built.num_v_heads = kernel, t.H, t.HV
    monkeypatch.setattr(vllm, "_verify", lambda *_: reached.append("ours"))
    rows, a, b = t.rows(6)
    out = torch.zeros(6, t.HV, t.V).double()
    built._forward_core_fused_norm(rows, b, a, torch.zeros_like(out), out)
    assert reached == (["ours", "vLLM's norm"] if ours else ["vLLM's"])  # K and V differ


def test_checkpoint_rows_are_those_of_vllms_plan():
    folder = engine_interfaces.UNPACKED
    if not (folder / "vllm").exists():
        pytest.skip("no sources of vllm: python scripts/engine_interfaces.py gets them")
    import ast
    import math

    file = "vllm/v1/attention/backends/gdn_attn.py"
    tree = ast.parse((folder / "vllm" / file).read_text())
    code = ast.Module([engine_interfaces.lookup(tree, "plan_flashinfer_checkpoints")], [])
    room: dict[str, Any] = {"math": math}
    exec(compile(code, file, "exec"), room)
    every, cu_starts, rows = room["plan_flashinfer_checkpoints"]([128, 0, 192], [200, 64, 300])
    assert (every, cu_starts, rows) == (64, [0, 3, 4, 8], [1, 0, 6])  # as checkpoint_starts has it


def sglang_kernel() -> Any:
    return sglang.kernel_on(object)()


def test_sglang_methods_take_what_sglang_passes():
    kernel = sglang_kernel()
    for owner in ("LinearAttnKernelBase", "TritonGDNKernel"):
        for name, names in recorded("sglang", owner)["methods"].items():
            accepts(getattr(kernel, name), names[1:])
    for name in ("packed_decode", "decode", "extend", "target_verify"):
        accepts(
            getattr(kernel, name), recorded("sglang", "GDNKernelDispatcher")["methods"][name][1:]
        )


def test_sglang_kernel_on_a_pool(caplog):
    engines._say_first.cache_clear()
    caplog.set_level(logging.INFO, "qla_kernels")
    t, kernel = Traffic(3), sglang_kernel()
    shape = {"ssm_states": t.pool, "cache_indices": t.table([4, -1, 2])}
    rows, a, b = t.rows(3)
    before = t.pool.clone()
    o = kernel.packed_decode(
        rows, a, b, **t.parameters, scale=t.K**-0.5, **shape, num_v_heads=t.HV, head_v_dim=t.V,
        replayssm_d=None,
    )  # fmt: skip
    assert o.shape == (1, 3, t.HV, t.V)
    t.pool.copy_(before)
    loc = t.table([0, 1, 2, 3])
    again = kernel.decode(*t.split(rows), a, b, **t.parameters, **shape, query_start_loc=loc)
    assert torch.allclose(o, again)
    assert first_calls(caplog) == ["SGLang: the first decode went to qla_kernels, on cpu"]
    for n, slot in ((0, 4), (2, 2)):
        mine = slice(n, n + 1)
        want, states = t.truth(rows[mine], a[mine], b[mine], before[slot].mT)
        t.agree("o", o[0, mine], want)
        t.agree("state", t.pool[slot].mT, states[0])
    with pytest.raises(Unsupported, match="--enable-linear-replayssm"):
        kernel.packed_decode(
            rows, a, b, **t.parameters, scale=1.0, **shape, num_v_heads=t.HV, head_v_dim=t.V,
            replayssm_d=o,
        )  # fmt: skip


def test_sglang_kernel_extends_and_verifies(caplog):
    engines._say_first.cache_clear()
    caplog.set_level(logging.INFO, "qla_kernels")
    t, kernel = Traffic(4), sglang_kernel()
    rows, a, b = t.rows(140)
    before, tracked = t.pool.clone(), torch.full((2, *t.pool.shape[1:]), torch.nan).double()
    g = gdn.gate(a[None], *t.parameters.values())
    o, none, h = kernel.extend(
        *t.split(rows), g, b[None].sigmoid(), ssm_states=t.pool, cache_indices=t.table([4, 2]),
        query_start_loc=t.table([0, 130, 140]), track_state=tracked,
        track_chunk_idx=t.table([2, -1]), state_checkpoint_cu_starts=None, layer_id=3,
    )  # fmt: skip
    assert none is None
    assert h is None
    for n, (slot, mine) in enumerate(((4, slice(130)), (2, slice(130, 140)))):
        want, states = t.truth(rows[mine], a[mine], b[mine], before[slot].mT)
        t.agree("o", o[0, mine], want)
        t.agree("state", t.pool[slot].mT, states[-1])
        if n == 0:
            t.agree("tracked state", tracked[0].mT, states[127])
    assert tracked[1].isnan().all()

    rows, a, b = t.rows(8)
    before, buffer = t.pool.clone(), torch.randn(6, 4, *t.pool.shape[1:]).double()
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    o = kernel.target_verify(
        **t.parameters, q=t.split(rows)[0], k=t.split(rows)[1], v=t.split(rows)[2], a=a, b=b,
        ssm_states=t.pool, cache_indices=t.table([4, -1]), query_start_loc=t.table([0, 4, 8]),
        intermediate_states_buffer=buffer, intermediate_state_indices=torch.arange(6),
        cache_steps=4, retrieve_parent_token=parents, stable_rows=False,
    )  # fmt: skip
    assert torch.equal(t.pool, before)
    assert not o[0, 4:].any()
    for t_last, path in ((2, [0, 2]), (3, [0, 1, 3])):
        want, states = t.truth(rows[path], a[path], b[path], before[4].mT)
        t.agree("o", o[0, t_last], want[-1])
        t.agree("state", buffer[0, t_last].mT, states[-1])
    said = "SGLang: the first {} went to qla_kernels, on cpu"
    want = [said.format(what) for what in ("prefill", "verification of drafts")]
    assert first_calls(caplog) == want


class Backend(str):
    def is_custom(self) -> bool:
        return self == "qla"


def dispatched(flags: tuple[str | None, ...], monkeypatch: Any) -> str:
    """The parts that are ours if SGLang constructs its dispatcher with these flags."""
    names = ("backend", "decode_backend", "prefill_backend", "verify_backend")
    mamba = SimpleNamespace(**{f"linear_attn_{n}": x for n, x in zip(names, flags, strict=True)})
    context = ModuleType("sglang.srt.runtime_context")
    context.get_exec = lambda: SimpleNamespace(mamba=mamba)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setattr(sglang, "kernel_class", lambda: sglang.kernel_on(object))
    asked = [Backend(x or flags[0]) for x in flags[1:3]]
    asked.append(Backend(flags[3] or "triton"))
    seen, dispatcher = [], SimpleNamespace()

    def construct(self: Any, decode: Any, prefill: Any, verify: Any) -> None:
        seen.extend((decode, prefill, verify))
        self.decode_kernel = self.extend_kernel = self.verify_kernel = None

    sglang.take_over(construct, dispatcher, *asked)
    assert "qla" not in seen  # the engine's own would refuse it
    found = [n for n in ("decode", "extend", "verify") if getattr(dispatcher, f"{n}_kernel")]
    return " ".join(found)


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        (("triton", None, None, None), ""),
        (("qla", None, None, None), "decode extend verify"),
        (("triton", "qla", "qla", None), "decode extend verify"),
        (("triton", "qla", None, None), "decode verify"),
        (("triton", "qla", None, "triton"), "decode"),
        (("triton", None, "qla", None), "extend"),
        (("qla", "triton", None, None), "extend"),
    ],
)
def test_sglang_dispatcher(flags, ours, monkeypatch):
    assert dispatched(flags, monkeypatch) == ours


@pytest.mark.parametrize("wanted", [False, True])
def test_sglang_says_that_rollouts_do_not_have_the_bits_of_training(wanted, monkeypatch, caplog):
    monkeypatch.setenv("QLA_BATCH_INVARIANT", "1" if wanted else "0")
    dispatched(("triton", None, None, None), monkeypatch)
    assert not caplog.records  # nothing is ours
    dispatched(("qla", None, None, None), monkeypatch)
    assert ("do not have the bits of training" in caplog.text) == wanted


def test_sglang_hook_by_its_own_registry(monkeypatch):
    """hook_registry.py is plain Python: it runs, and applies our hook to a stand-in."""
    file = engine_interfaces.UNPACKED / "sglang/sglang/srt/plugins/hook_registry.py"
    if not file.exists():
        pytest.skip("no sources of sglang: python scripts/engine_interfaces.py gets them")
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    exec(compile(file.read_text(), str(file), "exec"), vars(registry))
    choices = ModuleType("sglang.srt.arg_groups.choices")
    choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES = ["triton"]
    extend = choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES.extend
    choices.add_linear_attn_kernel_backend_choices = extend
    monkeypatch.setitem(sys.modules, choices.__name__, choices)
    monkeypatch.setattr(metadata, "version", lambda _: RECORD["sglang"]["version"])
    stand_in = ModuleType("stand_in")
    for name in ("GDNKernelDispatcher", "GDNAttnBackend"):
        setattr(stand_in, name, type(name, (), {"__init__": lambda *_: None}))
    monkeypatch.setitem(sys.modules, "stand_in", stand_in)
    monkeypatch.setattr(sglang, "DISPATCHER", "stand_in.GDNKernelDispatcher.__init__")
    monkeypatch.setattr(sglang, "BACKEND", "stand_in.GDNAttnBackend.__init__")
    called, started = [], []
    monkeypatch.setattr(sglang, "start", lambda construct, *given: started.append(given[1:]))
    monkeypatch.setattr(sglang, "take_over", lambda construct, *given: called.append(given))
    sglang.register()
    sglang.register()  # in another place of the same process
    assert choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES == ["triton", "qla"]
    registry.HookRegistry.apply_hooks()
    stand_in.GDNKernelDispatcher("decode", "prefill", "verify")
    assert [given[1:] for given in called] == [("decode", "prefill", "verify")]
    stand_in.GDNAttnBackend("runner")
    assert started == [("runner",)]


@pytest.mark.parametrize(
    ("ours", "dtype", "states", "K", "said"),
    [
        ("extend", torch.bfloat16, torch.float32, 128, None),
        ("extend", torch.float16, torch.float32, 128, "q, k and v are float16"),
        ("extend", torch.bfloat16, torch.float16, 128, "the pool of states is float16"),
        ("decode", torch.float16, torch.float32, 128, None),
        ("decode", torch.bfloat16, torch.float32, 512, "head dimension"),
        ("", torch.float16, torch.float16, 512, None),
    ],
)
def test_sglangs_server_does_not_start_with_layers_that_are_refused(
    ours, dtype, states, K, said, monkeypatch
):
    """It was the first prefill."""
    kernel = type("Kernel", (), {})
    monkeypatch.setattr(sglang, "kernel_class", lambda: kernel)
    parts = {f"{name}_kernel": kernel() if name == ours else None for name in ("extend", "decode")}
    pool = SimpleNamespace(temporal=torch.empty(2, 0, 4, 128, K, dtype=states))
    cache = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=pool))
    runner = SimpleNamespace(dtype=dtype, req_to_token_pool=cache)
    backend = SimpleNamespace()

    def construct(backend: Any, model_runner: Any) -> None:
        backend.kernel_dispatcher = SimpleNamespace(**parts)

    if said is None:
        sglang.start(construct, backend, runner)
        return
    with pytest.raises(Unsupported, match=said):
        sglang.start(construct, backend, runner)
