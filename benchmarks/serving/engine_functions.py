"""The engines' own Triton functions, from the files that scripts/engine_interfaces.py unpacks.

What they import of their engine gets stand-ins, so that no engine has to be installed. On a GPU
Triton compiles them; without one its interpreter runs them. Tests and benchmarks call them.
"""

import functools
import importlib
import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

# scripts are no package: what they name has no types here
engine_interfaces = importlib.import_module("scripts.engine_interfaces")
FLA, OPS = engine_interfaces.FLA, engine_interfaces.OPS
CONVOLUTIONS = {
    "vllm": "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
    "sglang": f"{OPS}/mamba/causal_conv1d_triton.py",
}
PACKED = {
    "vllm": f"{FLA}/fused_recurrent.py",
    "sglang": f"{OPS}/attention/fla/fused_recurrent.py",
}
DRAFTS = {
    "vllm": f"{FLA}/fused_sigmoid_gating.py",
    "sglang": f"{OPS}/attention/linear/fused_sigmoid_gating_recurrent.py",
}


def missing(engine: str) -> str | None:
    """Why an engine's functions cannot be had; None if they can."""
    version = engine_interfaces.VERSIONS[engine]
    for files in (CONVOLUTIONS, PACKED, DRAFTS):
        if not (engine_interfaces.UNPACKED / engine / files[engine]).exists():
            return (
                f"no sources of {engine} {version}: python scripts/engine_interfaces.py gets them"
            )
    if importlib.util.find_spec("triton") is None:
        return "needs Triton"
    return None


@functools.cache
def function(engine: str, file: str, name: str) -> Any:
    """Returns a function of an engine's file. Raises LookupError if it or Triton is not there."""
    if reason := missing(engine):
        raise LookupError(reason)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read where Triton decorates a function
    if os.environ.get("TRITON_INTERPRET") == "1":
        _take_any_mask()
    before = dict(sys.modules)
    try:
        for full, content in _stand_ins().items():
            parts = full.split(".")
            for i in range(1, len(parts) + 1):
                stand_in = sys.modules.setdefault(".".join(parts[:i]), ModuleType(parts[i - 1]))
                stand_in.__path__ = []
            vars(sys.modules[full]).update(content)
        path = engine_interfaces.UNPACKED / engine / file
        full = file.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None, "a path that ends in .py has a loader"
        assert spec.loader is not None, "a path that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for full in set(sys.modules) - set(before):
            if full.partition(".")[0] in ("vllm", "sglang"):
                del sys.modules[full]
    return getattr(module, name)


def _stand_ins() -> dict[str, dict[str, Any]]:
    import triton
    import triton.language as tl

    def no(*_: Any, **__: Any) -> bool:
        return False

    exp, log = tl.exp, tl.log
    if not torch.cuda.is_available():  # the interpreter replaces members of tl alone
        exp, log = (lambda x: tl.exp(x)), (lambda x: tl.log(x))
    platform = SimpleNamespace(
        is_arch_support_pdl=no, is_cpu=no, is_cuda=no, is_device_capability_family=no
    )
    kinds = ("get_device_sm", "is_cuda", "is_gfx95_supported", "is_hip", "is_sm90_supported")
    return {
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.third_party.flash_linear_attention.ops.op": {"exp": exp, "log": log},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": no},
        "sglang.kernels.ops.attention.fla.op": {"exp": exp},
        "sglang.kernels.ops.attention.fla.utils": {"input_guard": lambda function: function},
        "sglang.srt.utils": dict.fromkeys(kinds, no),
    }


@functools.cache
def _take_any_mask() -> None:
    """The interpreter makes int32 of a mask that begins with a comparison of scalars."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self: Any, at: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, at, mask, *others)

    def masked_store(self: Any, at: Any, value: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, at, value, mask, *others)

    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store
