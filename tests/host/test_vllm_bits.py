"""vLLM's layer with the bits of training: its pages in vLLM's own code, and random traffic on them.

`python scripts/engine_interfaces.py` unpacks vLLM's sources; tests that need them are skipped
without.
"""

import ast
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import Unsupported
from qla_kernels.integrations import engines, vllm, vllm_bits
from scripts import engine_interfaces
from tests.vllm_stand_ins import (
    WIDTH,
    OwnLayer,
    Server,
    bits_layer,
    configuration,
    metadata_of,
    module,
    plain_modules,
    recorded,
    trained,
)

H, HV, K, V = 1, 2, 64, 64
ATTENTION = 1 << 12  # bytes of a token in a layer of attention


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"speculative_config": "mtp"}, "speculative decoding; need none"),
        ({"mamba_cache_mode": "align"}, "mode align; need none.*--no-enable-prefix-caching"),
        ({"mamba_cache_mode": "all"}, "mode all; need none.*--no-enable-prefix-caching"),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "states in bfloat16; need float32"),
        ({"kv_transfer_config": "nixl"}, "a KV connector; need none"),
        ({"dtype": torch.float32}, "float32"),
        ({"sizes": (256, 64, 2, 4)}, "K=256; need 64 or 128"),
        ({"sizes": (96, 64, 2, 4)}, "K=96; need 64 or 128"),
        ({"sizes": (64, 40, 2, 4)}, "V=40"),
    ],
    ids=str,
)
def test_what_loses_bits_is_refused_at_the_start(changes, text, monkeypatch):
    sizes = changes.pop("sizes", None)
    with pytest.raises(Unsupported, match=text) as error:
        bits_layer(monkeypatch, configuration(**changes), sizes=sizes)
    assert str(error.value).startswith("QLA_BATCH_INVARIANT=1 in vLLM: ")


def test_a_model_with_states_of_several_kinds_is_refused(monkeypatch):
    model = type("Qwen4", (), {vllm_bits.SPECS: classmethod(lambda cls, config: [])})
    layer, _, _ = bits_layer(monkeypatch, configuration())
    plain_modules(monkeypatch, model)
    with pytest.raises(Unsupported, match="Qwen4 with states of several kinds"):
        vllm_bits.size_pages(layer, configuration())


def test_vllm_is_told_what_a_page_holds(monkeypatch, caplog):
    vllm_bits.say_bytes.cache_clear()
    with caplog.at_level("INFO", logger="qla_kernels"):
        layer, _, model = bits_layer(monkeypatch, configuration())
        bits_layer(monkeypatch, configuration())  # a second layer says nothing
    tokens = 128 * (2 * (H * K + HV * V) + 2 * 4 * HV) + 2 * 16
    sizes = [2 * (WIDTH - 1) * (2 * H * K + HV * V), 4 * HV * K * V, tokens]
    assert [record.args for record in caplog.records] == [(sum(sizes), *sizes)]
    (spec,) = model.get_mamba_specs_from_config(None)
    assert spec.shapes == layer.get_state_shape()
    assert spec.dtypes == layer.get_state_dtype() == (torch.bfloat16, torch.float32)
    assert sum(prod(s) * d.itemsize for s, d in zip(spec.shapes, spec.dtypes, strict=True)) == sum(
        sizes
    )


@pytest.mark.parametrize("switched", [False, True])
def test_the_environment_chooses_the_layer(switched, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_PLUGINS", "qla_kernels")
    monkeypatch.setenv("QLA_BATCH_INVARIANT", "1" if switched else "0")
    monkeypatch.setattr(engines.metadata, "version", lambda _: engines.KNOWN["vllm"][0])
    registered: dict[str, type] = {}

    def register_oot(name: str) -> Any:
        return lambda layer: registered.setdefault(name, layer)

    pluggable = SimpleNamespace(register_oot=register_oot)
    module(
        monkeypatch, "vllm.model_executor.custom_op", PluggableLayer=pluggable,
        op_registry_oot=registered,
    )  # fmt: skip
    gdn = "vllm.model_executor.layers.mamba.gdn"
    module(monkeypatch, f"{gdn}.qwen_gdn_linear_attn", QwenGatedDeltaNetAttention=OwnLayer)
    warmup = SimpleNamespace(qwen_triton_warmup=None)
    module(monkeypatch, "vllm.model_executor.warmup", kernel_warmup=warmup)
    with caplog.at_level("INFO", logger="qla_kernels"):
        vllm.register()
    assert (warmup.qwen_triton_warmup is None) == switched
    assert ("Bits" in registered[vllm.LAYER].__name__) == switched
    assert ("with the bits of training" in caplog.text) == switched


def test_profiling_runs_a_prefill_of_as_many_sequences_as_there_may_be(monkeypatch):
    layer, _, _ = bits_layer(monkeypatch, configuration())
    seen = []
    prefill = vllm_bits.GdnPool.prefill

    def watched(self: Any, *args: Any, **named: Any) -> Tensor:
        seen.append(args[6].tolist())
        return prefill(self, *args, **named)

    monkeypatch.setattr(vllm_bits.GdnPool, "prefill", watched)
    rows = torch.randn(10, 2 * H * K + HV * V).bfloat16()
    b, a = torch.randn(2, 10, HV).bfloat16()
    out = torch.zeros(10, HV, V).bfloat16()
    layer._forward_core(rows, b, a, out)
    layer._forward_core(rows, b, a, out)
    assert seen == [[0, 1, 2, 10]]
    assert (out == 7).all()


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(seed, monkeypatch):
    server = Server(seed, monkeypatch)
    server.serve(250)


def parts_of_vllm(file: str, name: str, room: dict[str, Any]) -> Any:
    """Runs a class or function of vLLM's sources in a namespace."""
    folder = engine_interfaces.UNPACKED / "vllm"
    if not (folder / file).exists():
        pytest.skip("no sources of vllm: python scripts/engine_interfaces.py gets them")
    tree = ast.parse((folder / file).read_text())
    node = engine_interfaces.lookup(tree, name)
    exec(compile(ast.Module([node], []), file, "exec"), room)
    return room[node.name]


def vllms_spec() -> Any:
    room = {
        "dataclass": dataclass, "KVCacheSpec": PlainBase, "torch": torch, "prod": prod,
        "get_dtype_size": lambda dtype: dtype.itemsize,
        "MambaAttentionBackendEnum": SimpleNamespace(MAMBA2="mamba2"),
        "VllmConfig": Any,
    }  # fmt: skip
    return parts_of_vllm("vllm/v1/kv_cache_interface.py", "MambaSpec", room)


@dataclass(frozen=True, kw_only=True)
class PlainBase:
    block_size: int


@dataclass(frozen=True, kw_only=True)
class AttentionPage:
    """FullAttentionSpec, as vLLM's alignment asks for it."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any
    kv_quant_mode: Any

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * ATTENTION


def test_vllms_own_code_makes_pages_of_it(monkeypatch):
    """Alignment with blocks of attention, then views of pages, then a prompt and a step in them."""
    config = configuration()
    spec = vllms_spec()
    bind = parts_of_vllm(
        "vllm/model_executor/layers/mamba/abstract.py", "MambaBase.bind_kv_cache",
        {"prod": prod, "get_dtype_size": lambda dtype: dtype.itemsize, "torch": torch},
    )  # fmt: skip
    get_spec = parts_of_vllm(
        "vllm/model_executor/layers/mamba/abstract.py", "MambaBase.get_kv_cache_spec",
        {"MambaSpec": spec, "VllmConfig": Any, "KVCacheSpec": Any},
    )  # fmt: skip
    names = {"bind_kv_cache": bind, "get_kv_cache_spec": get_spec}
    names |= {"mamba_type": "gdn", "is_kv_cache_tp_replicated": False}
    layer, engine, _ = bits_layer(monkeypatch, config, base=type("Base", (OwnLayer,), names))
    module(monkeypatch, "vllm.v1.kv_cache_interface", MambaSpec=spec)
    vllm_bits.size_pages(layer, config)  # again, with vLLM's class
    align_pages(monkeypatch, config)
    found = layer.get_kv_cache_spec(config)
    block = config.cache_config.block_size
    assert found.page_size_bytes == config.cache_config.mamba_page_size_padded == block * ATTENTION
    assert found.real_page_size_bytes <= found.page_size_bytes
    assert (block - 16) * ATTENTION < found.real_page_size_bytes, "a block too many"

    pages = torch.full((5, 1, 1, found.page_size_bytes), -1, dtype=torch.int8)
    layer.bind_kv_cache(pages)
    T, total = 70, 71
    rows = torch.randn(total, 2 * H * K + HV * V).bfloat16()
    a, b = torch.randn(2, total, HV).bfloat16()
    out = torch.zeros(total, HV, V).bfloat16()
    table = torch.tensor([3], dtype=torch.int32)
    has, bounds = torch.tensor([False]), torch.tensor([0, T], dtype=torch.int32)
    engine.batch = metadata_of(
        num_prefills=1, num_decodes=0, num_actual_tokens=T, has_initial_state=has,
        non_spec_state_indices_tensor=table, non_spec_query_start_loc=bounds,
        prefill_query_start_loc=bounds, prefill_state_indices=table, prefill_has_initial_state=has,
    )  # fmt: skip
    layer._forward_core(rows[:T], b[:T], a[:T], out[:T])
    engine.batch = metadata_of(
        num_prefills=0, num_decodes=1, num_actual_tokens=1, non_spec_state_indices_tensor=table
    )
    layer._forward_core(rows[T:], b[T:], a[T:], out[T:])
    want = trained(layer, rows, a, b)
    torch.testing.assert_close(out, want, rtol=2**-7, atol=1e-3)
    others = [0, 1, 2, 4]
    assert (pages[others] == -1).all(), "a page was written that nobody named"


def align_pages(monkeypatch: Any, config: Any) -> None:
    """Runs vLLM's alignment of pages with blocks of attention, on what it imports."""
    room = {"VllmConfig": Any, "AttentionBackend": Any,
            "logger": SimpleNamespace(info=lambda *_: None)}  # fmt: skip
    interface = "vllm/platforms/interface.py"
    align = parts_of_vllm(interface, "Platform._align_hybrid_block_size", room)
    module(monkeypatch, "vllm.config.vllm", set_current_vllm_config=lambda _: nullcontext())
    module(
        monkeypatch, "vllm.model_executor.layers.mamba.abstract",
        get_mamba_prefill_checkpoint_alignment=lambda _: None,
    )  # fmt: skip
    module(monkeypatch, "vllm.utils.math_utils", cdiv=lambda x, y: -(-x // y))
    module(monkeypatch, "vllm.utils.torch_utils", STR_DTYPE_TO_TORCH_DTYPE={})
    module(monkeypatch, "vllm.v1.attention.backend", MultipleOf=type("MultipleOf", (), {}))
    module(
        monkeypatch, "vllm.v1.kv_cache_interface", FullAttentionSpec=AttentionPage,
        MLAAttentionSpec=None, get_kv_quant_mode=lambda _: None,
    )  # fmt: skip
    backend = SimpleNamespace(
        customize_spec=lambda spec: spec, get_supported_kernel_block_sizes=lambda: [16]
    )
    platform = SimpleNamespace(_find_non_ssm_backends=lambda _: [backend])
    align.__func__(platform, config, backend)


def test_vllm_lists_the_parts_that_the_layer_uses():
    names = recorded("vllm", "MambaBase.bind_kv_cache")["parameters"]
    assert names == ["self", "kv_cache"]
    assert {"shapes", "dtypes"} <= set(recorded("vllm", "MambaSpec")["fields"])
    own = recorded("vllm", "QwenGatedDeltaNetAttention.get_state_shape")["parameters"]
    assert own == ["self"]
