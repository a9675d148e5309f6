"""TileLang to sources, without nvcc or a GPU: the device's CUDA and the host wrapper's C."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qla_kernels.lab.emulator.cache import folder, write
from qla_kernels.runtime.jit import TARGET, tilelang_for


@dataclass(frozen=True)
class Generated:
    name: str
    parameters: list[str]
    device: str
    host: str
    launch_parameters: dict[str, list[str]]  # device function -> what the host passes last
    # of each device function: threads along x, y, z; bytes of dynamic shared memory
    functions: dict[str, tuple[tuple[int, ...], int]]


def lower(prim_func: Any, pass_configs: Mapping[str, object]) -> Generated:
    """Lowers for sm_90a, or reads what is on disk of it."""
    path = kept_at(prim_func, pass_configs)
    if path.exists():
        return Generated(**json.loads(path.read_text()))
    return lower_anew(prim_func, pass_configs)


def kept_at(prim_func: Any, pass_configs: Mapping[str, object]) -> Path:
    """The file with a function's generated code; its name is a digest of all that decides it."""
    tilelang = imported()
    from tilelang.transform.pass_config import normalize_pass_configs

    options = str(sorted(map(str, normalize_pass_configs(dict(pass_configs)).items())))
    name, text = str(prim_func.attrs["global_symbol"]), prim_func.script(show_meta=True)
    key = "\n".join([Path(__file__).read_text(), tilelang.__version__, options, name, text])
    return folder() / "lowered" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def lower_anew(prim_func: Any, pass_configs: Mapping[str, object]) -> Generated:
    """Lowers for sm_90a, whatever is on disk, and keeps the result there."""
    tilelang = imported()
    from tilelang.transform.pass_config import normalize_pass_configs
    from tvm import transform
    from tvm.target import Target

    configs = normalize_pass_configs(dict(pass_configs))
    target = Target(TARGET)
    with transform.PassContext(opt_level=3, config=configs), target:
        artifact = tilelang.lower(prim_func, target=target, enable_host_codegen=True)
    lowered = Generated(
        name=str(prim_func.attrs["global_symbol"]),
        parameters=[
            prim_func.buffer_map[p].name if p in prim_func.buffer_map else p.name
            for p in prim_func.params
        ],
        device=artifact.kernel_source,
        host=artifact.rt_mod.inspect_source(),
        launch_parameters={
            str(function.attrs["global_symbol"]): _launch_parameters(function)
            for function in artifact.device_mod.functions.values()
        },
        functions={
            str(function.attrs["global_symbol"]): _launched_with(function.attrs)
            for function in artifact.device_mod.functions.values()
        },
    )
    write(kept_at(prim_func, pass_configs), json.dumps(asdict(lowered)))
    return lowered


def _launch_parameters(function: Any) -> list[str]:
    for name, value in function.attrs.items():
        if name.endswith("kernel_launch_params"):
            return [str(parameter) for parameter in value]
    raise RuntimeError(f"TileLang {version()}: {function} has no launch parameters")


def _launched_with(attrs: Any) -> tuple[tuple[int, ...], int]:
    """The threads of a CTA along each axis, and the bytes of its dynamic shared memory."""
    extent = attrs["thread_extent"]
    block = tuple(int(extent.get(f"threadIdx.{axis}", 1)) for axis in "xyz")
    return block, int(attrs.get("dyn_shared_memory_buf", 0))


def version() -> str:
    """TileLang's."""
    return str(imported().__version__)


def imported() -> Any:
    """Imports and returns TileLang; Unsupported if that fails."""
    return tilelang_for("qla_kernels.lab.emulator")  # before tvm: it makes its own importable
