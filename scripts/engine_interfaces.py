"""Interfaces of inference engines that our plug-ins call or replace: signatures and digests.

    python scripts/engine_interfaces.py                      downloads, unpacks, compares
    python scripts/engine_interfaces.py --write              and brings the record up to date
    python scripts/engine_interfaces.py --from build/engines compares with sources that are there

The record, tests/host/engine_interfaces.json, has for each engine and version: the parameters of
functions and methods, and digests of their sources without comments. Wheels are downloaded by pip
without their dependencies; only Python sources are unpacked, to build/engines/<engine>. Exit status
1 if something differs.
"""

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "host" / "engine_interfaces.json"
UNPACKED = ROOT / "build" / "engines"
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}

GDN = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
FLA = "vllm/third_party/flash_linear_attention/ops"
LINEAR = "sglang/srt/layers/attention/linear"
OPS = "sglang/kernels/ops"
# file: names in it, Class.method or function or Class
USED = {
    "vllm": {
        GDN: [
            "QwenGatedDeltaNetAttention._forward_core",
            "QwenGatedDeltaNetAttention._forward_core_decode_non_spec",
            "QwenGatedDeltaNetAttention._forward_core_fused_norm",
            "QwenGatedDeltaNetAttention._forward_core_fused_norm_packed",
            "QwenGatedDeltaNetAttention._rms_norm_gated_cuda",
            "QwenGatedDeltaNetAttention._warmup_prefill_kernels",
            "QwenGatedDeltaNetAttention._can_use_fused_gdn_mtp_decode",
            "QwenGatedDeltaNetAttention.fix_query_key_value_ordering",
            "QwenGatedDeltaNetAttention.forward_cuda",
            "QwenGatedDeltaNetAttention.get_kv_cache_spec",
            "QwenGatedDeltaNetAttention.get_state_shape",
            "qwen_gdn_attention_core",
            "qwen_gdn_attention_core_fused_norm_packed",
            "fi_chunk_gated_delta_rule",
        ],
        "vllm/model_executor/layers/mamba/gdn/base.py": ["GatedDeltaNetAttention.get_state_dtype"],
        "vllm/model_executor/layers/mamba/abstract.py": [
            "MambaBase.bind_kv_cache",
            "MambaBase.get_kv_cache_spec",
        ],
        "vllm/v1/kv_cache_interface.py": ["MambaSpec"],
        "vllm/platforms/interface.py": [
            "Platform._align_hybrid_block_size",
            "Platform.update_block_size_for_backend",
        ],
        "vllm/model_executor/custom_op.py": ["PluggableLayer.register_oot"],
        "vllm/v1/attention/backends/gdn_attn.py": [
            "GDNAttentionMetadata",
            "GDNAttentionMetadataBuilder.build",
            "GDNFlashInferCheckpointPlan",
            "plan_flashinfer_checkpoints",
        ],
        "vllm/model_executor/layers/mamba/ops/causal_conv1d.py": [
            "causal_conv1d_fn",
            "causal_conv1d_update",
        ],
        f"{FLA}/fused_recurrent.py": ["fused_recurrent_gated_delta_rule_packed_decode"],
        f"{FLA}/fused_sigmoid_gating.py": ["fused_sigmoid_gating_delta_rule_update"],
        "vllm/model_executor/layers/mamba/checkpoint.py": [
            "MambaPrefillCheckpointExporter.export",
            "MambaPrefillCheckpointMetadata",
        ],
        "vllm/model_executor/warmup/qwen_triton_warmup.py": ["qwen_triton_warmup"],
        "vllm/plugins/__init__.py": ["load_general_plugins", "load_plugins_by_group"],
    },
    "sglang": {
        f"{LINEAR}/kernels/kernel_backend.py": ["LinearAttnKernelBase"],
        f"{LINEAR}/kernels/gdn_triton.py": ["TritonGDNKernel"],
        f"{LINEAR}/gdn_backend.py": [
            "GDNKernelDispatcher",
            "GDNAttnBackend.__init__",
            "GDNAttnBackend.forward_decode",
            "GDNAttnBackend.forward_extend",
        ],
        f"{LINEAR}/utils.py": ["LinearAttnKernelBackend", "resolve_linear_attn_backends"],
        f"{OPS}/attention/fla/fused_recurrent.py": [
            "fused_recurrent_gated_delta_rule_packed_decode"
        ],
        f"{OPS}/attention/linear/fused_sigmoid_gating_recurrent.py": [
            "fused_sigmoid_gating_delta_rule_update"
        ],
        f"{OPS}/mamba/causal_conv1d_triton.py": ["causal_conv1d_update"],
        "sglang/srt/plugins/hook_registry.py": ["HookRegistry", "HookType"],
        "sglang/srt/plugins/__init__.py": ["load_plugins"],
    },
}


def unpack(engine: str, folder: Path) -> None:
    """Downloads the wheel of an engine and unpacks its Python sources."""
    with tempfile.TemporaryDirectory() as room:
        wanted = f"{engine}=={VERSIONS[engine]}"
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", room, wanted]
        subprocess.run(pip, check=True)
        (wheel,) = Path(room).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name in USED[engine]]
            archive.extractall(folder / engine, names)


def interfaces(engine: str, folder: Path) -> dict[str, Any]:
    """Returns what the record should say, from sources unpacked to `folder`."""
    found: dict[str, Any] = {}
    for file, names in USED[engine].items():
        tree = ast.parse((folder / engine / file).read_text())
        for name in names:
            node = lookup(tree, name)
            text = ast.dump(without_docstrings(node))
            entry: dict[str, Any] = {"digest": hashlib.sha256(text.encode()).hexdigest()[:16]}
            if isinstance(node, ast.ClassDef):
                entry["methods"] = {
                    child.name: parameters(child)
                    for child in node.body
                    if isinstance(child, ast.FunctionDef)
                }
                entry["fields"] = [
                    ast.unparse(child.target)
                    for child in node.body
                    if isinstance(child, ast.AnnAssign)
                ]
            else:
                entry["parameters"] = parameters(node)
            found[f"{file}:{name}"] = entry
    return found


def lookup(tree: Any, name: str) -> Any:
    """Returns the class, function or method of a dotted name."""
    for part in name.split("."):
        kinds = ast.ClassDef, ast.FunctionDef
        tree = next(x for x in tree.body if isinstance(x, kinds) and x.name == part)
    return tree


def parameters(node: Any) -> list[str]:
    """Returns the parameters' names in order; `*` stands before those that have to be named."""
    arguments = node.args
    names = [x.arg for x in (*arguments.posonlyargs, *arguments.args)]
    named = [x.arg for x in arguments.kwonlyargs]
    rest = [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return [*names, *(["*"] if named else []), *named, *rest]


def without_docstrings(node: Any) -> Any:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(child):
            child.body = child.body[1:] or [ast.Pass()]
    return node


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--from", dest="folder", type=Path, help="sources that are there")
    options.add_argument("--write", action="store_true", help="write the record")
    asked = options.parse_args()
    folder = asked.folder or UNPACKED
    found: dict[str, Any] = {}
    for engine, version in VERSIONS.items():
        if asked.folder is None:
            unpack(engine, folder)
        found[engine] = {"version": version, "interfaces": interfaces(engine, folder)}
    if asked.write:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    said = json.loads(RECORD.read_text())
    differ = [
        f"{engine}: {name}"
        for engine in found
        for name, entry in found[engine]["interfaces"].items()
        if said[engine]["interfaces"].get(name) != entry
    ]
    print("\n".join(differ) or "as recorded")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
