"""Finds the kernels, and lowers, compiles and assembles them with TileLang.

A kernel module, `qla_kernels/<family>/kernels/<verb>.py`, defines the code to generate. This file
defines the target and the tools, and caches the results.

Compiling needs no GPU. The target is always given explicitly, so a cache folder
(`TILELANG_CACHE_DIR`) that was filled on a machine without a GPU has the same keys as on a Hopper
machine with the same TileLang: kernels then load there in milliseconds, and neither nvcc nor a C++
compiler is needed.
"""

import importlib
import importlib.util
import logging
import math
import os
import re
import shlex
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from qla_kernels.runtime import compiler, sizes
from qla_kernels.runtime.digests import digest
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.native import prebuilt, recording
from qla_kernels.runtime.shared_memory import name_apart
from qla_kernels.tile.schedule import Schedule

TARGET = {"kind": "cuda", "arch": "sm_90a"}  # the a: wgmma and setmaxnreg exist only there
NVCC_PARTS = "cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime"  # must be of one release

SHORT_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"
}  # fmt: skip

Launch = Callable[..., None]

log = logging.getLogger("qla_kernels")
_tracing = threading.Lock()
_digests: dict[str, Callable[[], str]] = {}  # by label, of this process's kernels


class KernelModule(Protocol):
    """The attributes of a kernel module. Its variants are instances of its own NamedTuple."""

    __name__: str
    VARIANTS: tuple[Any, ...]
    PASS_CONFIGS: Mapping[str, object]

    def __hash__(self) -> int: ...  # modules hash by identity; `compile` remembers by module

    def schedule(self, variant: Any, /) -> Schedule:
        """Returns the roles, barriers and budgets of a variant."""

    def build(self, variant: Any, /) -> Any:
        """Builds and returns the PrimFunc of a variant."""


class Kernel(NamedTuple):
    family: str
    name: str
    module: KernelModule

    def __str__(self) -> str:
        return f"{self.family}.{self.name}".strip(".")  # a file outside has no family


@dataclass(frozen=True)
class Lowered:
    """A variant's generated device code before assembly."""

    source: str  # CUDA C++
    function: str  # the __global__ function's name
    block: tuple[int, ...]  # threads of a CTA along x, y and z
    dyn_smem: int
    prim_func: Any
    host: Any = None  # the TIR module that checks arguments and launches
    device: Any = None  # the TIR module of the __global__ function

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return math.prod(self.block)


@dataclass(frozen=True)
class Assembled:
    cubin: Path
    report: str  # the output of nvcc and ptxas


def kernel_names(family: str | None = None) -> Iterator[tuple[str, str]]:
    """Yields (family, kernel) for every entry of every KERNELS tuple."""
    package = Path(__file__).parents[1]
    for listed in sorted(package.glob("*/kernels/__init__.py")):
        owner = listed.parent.parent.name
        if family in (None, owner):
            names = importlib.import_module(f"{package.name}.{owner}.kernels").KERNELS
            yield from ((owner, name) for name in names)


def kernel_modules(family: str | None = None) -> Iterator[Kernel]:
    """Yields every kernel of a family, or of all; imports each when the iterator reaches it."""
    for owner, name in kernel_names(family):
        module = importlib.import_module(f"qla_kernels.{owner}.kernels.{name}")
        yield Kernel(owner, name, cast(KernelModule, module))


def lower(kernel: Kernel, variant: Any) -> Lowered:
    """Lowers a variant to CUDA C++ with TileLang and returns it, without assembling it.

    Raises ValueError if the kernel builds more or fewer than one device function.
    """
    tilelang = tilelang_for("qla_kernels.runtime.jit")
    from tilelang.transform.pass_config import normalize_pass_configs
    from tvm.ir.transform import PassContext
    from tvm.target import Target

    prim_func = trace(kernel.module, variant)
    target = Target(TARGET)
    config = normalize_pass_configs(dict(kernel.module.PASS_CONFIGS))
    context = PassContext(opt_level=3, config=config)
    with short_errors(kernel.module, variant), context, target:
        artifact = tilelang.lower(prim_func, target=target)
    functions = [function.attrs for function in artifact.device_mod.functions.values()]
    if len(functions) != 1:
        names = ", ".join(str(attrs["global_symbol"]) for attrs in functions)
        got = f"build returned {len(functions)} device functions ({names})"
        fix = "write one kernel a file, and no other launch in its build"
        raise ValueError(need(str(kernel), got, "one device function", fix))
    (attrs,) = functions
    extent = attrs["thread_extent"]
    return Lowered(
        source=artifact.kernel_source,
        function=str(attrs["global_symbol"]),
        block=tuple(int(extent.get(f"threadIdx.{axis}", 1)) for axis in "xyz"),
        dyn_smem=int(attrs.get("dyn_shared_memory_buf", 0)),
        prim_func=prim_func,
        host=artifact.host_mod,
        device=artifact.device_mod,
    )


@cache
def compile(module: KernelModule, variant: Any) -> Launch:
    """Returns the function that launches a variant, prebuilt or compiled with TileLang.

    It takes the tensors and scalars of the kernel's signature, outputs included, launches on
    torch's current stream, and returns nothing. QLA_DUMP asks for files that only a compile gives.
    """
    name = label(module, variant)
    if (found := prebuilt.find(name)) is None:
        return _compiled(module, variant)
    _digests[name] = lambda: found.digest
    return found.launch


def _compiled(module: KernelModule, variant: Any) -> Launch:
    """Compiles a variant with TileLang, or loads it from TileLang's cache; returns its launcher.

    That is TileLang's generated host function: TileLang's Python wrapper around it allocates
    outputs, which is not needed here, and costs 2-4 us a call. For the kernels whose host function
    leaves out a comparison of sizes, `sizes.checked` adds it. Raises Unsupported without TileLang,
    without nvcc on a cache miss, or with a cache folder that cannot be written.
    """
    name = label(module, variant)
    tilelang = tilelang_for(name, name)
    started = time.perf_counter()
    prim_func = trace(module, variant)
    options = {"execution_backend": "tvm_ffi", "pass_configs": dict(module.PASS_CONFIGS)}
    try:
        kernel = tilelang.compile(prim_func, target=TARGET, **options)
    except Exception as error:
        nvcc()  # without a compiler this raises a clearer error than TileLang's
        if isinstance(error, OSError):
            raise Unsupported(_unwritable(f"{name}: {error}")) from error
        raise
    executable = kernel.adapter.get_exportable_executable()
    # A fresh compile gives an executable that links on demand; a cache hit gives a loaded library.
    library = executable.jit() if hasattr(executable, "jit") else executable
    host = library.get_function("main", query_imports=True)
    launch = recording.noting(name, sizes.checked(cast(Launch, host), name, prim_func))
    source = kernel.get_kernel_source()
    _digests[name] = cache(lambda: digest(source, f"{_identifier(name)}_kernel"))
    log.info("compiled %s in %.2f s", name, time.perf_counter() - started)
    if folder := os.environ.get("QLA_DUMP"):
        from qla_kernels.runtime.dump import dump

        dump(Path(folder), module, variant, source)
    return launch


def compiled() -> dict[str, str]:
    """Returns the digest of each variant that this process has a launcher of, by its label."""
    return {name: of() for name, of in sorted(_digests.items())}


def assemble(
    source: str, pass_configs: Mapping[str, object], folder: Path, line_info: bool = True
) -> Assembled:
    """Assembles CUDA C++ to a cubin in `folder`, with TileLang's flags; returns cubin and report.

    Raises RuntimeError with nvcc's output if nvcc fails.
    """
    code, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    code.write_text(source)
    flags = [f for f in nvcc_flags(pass_configs) if line_info or f != "-lineinfo"]
    command = [str(nvcc()), *flags, "-o", str(cubin), str(code)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return Assembled(cubin, done.stdout + done.stderr)


def nvcc_flags(pass_configs: Mapping[str, object]) -> list[str]:
    """Returns the flags with which TileLang calls nvcc for a kernel with these pass configs."""
    tilelang_for("qla_kernels.runtime.jit")
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    flags = ["--cubin", "-O3", "-lineinfo", f"-arch={TARGET['arch']}", "-std=c++20"]
    flags += [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    # ptxas reports registers and spills; the suppressed warnings are about TileLang's own headers
    flags += ["--ptxas-options=--verbose", "-diag-suppress=1444,20012"]
    if pass_configs.get("tl.enable_fast_math"):
        flags.append("--use_fast_math")
    if (level := pass_configs.get("tl.ptxas_register_usage_level")) is not None:
        flags.append(f"--ptxas-options=--register-usage-level={level}")
    extra = pass_configs.get("tl.device_compile_flags") or ()
    for flag in (extra,) if isinstance(extra, str) else cast(Iterable[str], extra):
        flags += shlex.split(flag)
    return flags


@cache
def nvcc() -> Path:
    """Returns the path of the nvcc that TileLang would call; Unsupported if it does not exist."""
    tilelang_for("qla_kernels.runtime.jit")
    from tilelang.env import CUDA_HOME

    if not (path := Path(CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc").exists():
        packages = " ".join(f'"nvidia-{part}==13.0.*"' for part in NVCC_PARTS)
        fix = f"install the CUDA toolkit and set CUDA_HOME, or pip install {packages}"
        raise Unsupported(need("kernels", f"no nvcc at {path}", "CUDA 12 or later", fix))
    return path


@cache
def nvcc_version() -> str:
    """Returns nvcc's release, such as `release 13.0, V13.0.88`.

    If nvcc's output has no such line, returns all of it.
    """
    said = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return next((line.partition(", ")[2] for line in said.splitlines() if "release" in line), said)


def cache_dir() -> Path:
    """Returns TileLang's folder of compiled kernels, whether or not TileLang is installed."""
    return Path(os.path.expanduser(os.environ.get("TILELANG_CACHE_DIR", "~/.tilelang/cache")))


def cache_size() -> int:
    """Returns the number of bytes in `cache_dir()`."""
    return sum(file.stat().st_size for file in cache_dir().rglob("*") if file.is_file())


def variant_id(variant: Any) -> str:
    """Returns a variant's id, such as `bf16-k128-v64-solves`.

    It joins the values of the fields and the names of the flags that are set.
    """
    return "-".join(filter(None, (_short(*field) for field in variant._asdict().items())))


def _short(field: str, value: object) -> str:
    if isinstance(value, bool):
        return field * value
    if isinstance(value, int):
        return f"{field.rpartition('_')[2][0].lower()}{value}"  # of tile_v the v
    return SHORT_TYPES.get(str(value), str(value))


def label(module: KernelModule, variant: Any) -> str:
    """Returns a variant's name in logs, tests, records and dumps: `gdn.kkt_solve-bf16-k128`."""
    family, _, name = module.__name__.removeprefix("qla_kernels.").rpartition(".kernels.")
    return "-".join(filter(None, (f"{family}.{name}".strip("."), variant_id(variant))))


def function_name(module: KernelModule, variant: Any) -> str:
    """Returns the PrimFunc's name, unique among variants; the device function adds `_kernel`."""
    return _identifier(label(module, variant))


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def trace(module: KernelModule, variant: Any) -> Any:
    """Runs the kernel's `build`; returns the PrimFunc with the variant's `function_name`.

    Runs one build at a time: TileLang does not promise that its builder is thread-safe.
    """
    with _tracing, short_errors(module, variant):
        prim_func = module.build(variant)
    prim_func = prim_func.with_attr("global_symbol", function_name(module, variant))
    name_apart(prim_func)
    return prim_func


class KernelError(RuntimeError):
    """A kernel's file has a mistake: where, and TileLang's message.

    Attributes:
        original: what was raised.
        message: its text, shortened.
    """

    def __init__(self, text: str, original: Exception, message: str) -> None:
        super().__init__(text)
        self.original, self.message = original, message


@contextmanager
def short_errors(module: Any, variant: Any, *passing: type[Exception]) -> Iterator[None]:
    """Turns what TileLang raises and logs about a kernel into a KernelError of few lines.

    TileLang logs the whole kernel, and its tracebacks are of its own code. The lines that are named
    are those of kernels' files, the innermost last. Unsupported and `passing` stay as they are.
    """
    log = logging.getLogger("tilelang.language.eager.builder")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    except Exception as error:
        if isinstance(error, (Unsupported, KernelError, *passing)):
            raise
        tilelang = importlib.util.find_spec("tilelang")
        theirs = str(Path(tilelang.origin).parent) if tilelang and tilelang.origin else "tilelang"
        frames = [x for x in traceback.extract_tb(error.__traceback__) if Path(x.filename).exists()]
        ours = [x for x in frames if theirs not in x.filename and x.filename != __file__]
        places = [f"  {x.filename}, line {x.lineno}: {x.line}" for x in ours[-3:]]
        message = [line for line in str(error).splitlines() if line.strip()]
        short = "\n  ".join(line[:200] for line in message[:3] + message[3:][-1:])
        text = f"{label(module, variant)}: {type(error).__name__}: {short}"
        raise KernelError("\n".join([text, *places]), error, short) from None
    finally:
        log.setLevel(before)


def tilelang_for(tool: str, wanted: str = "") -> Any:
    """Imports and returns TileLang; Unsupported if that fails, or if it is too old.

    `wanted` is a variant that a tool compiles because it is not prebuilt.
    """
    lacking = prebuilt.lacking(wanted) if wanted else ""
    if compiler.too_old() and importlib.util.find_spec("tilelang"):
        raise Unsupported(compiler.refusal(tool, lacking))
    # TileLang announces every compile on stderr by default; the log line in `compile` is enough
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    try:
        return importlib.import_module("tilelang")
    except ImportError as error:
        raise Unsupported(compiler.refusal(tool, lacking, error)) from error
    except OSError as error:  # TileLang makes its cache folder when it is imported
        raise Unsupported(_unwritable(f"tilelang cannot be imported ({error})")) from error


def _unwritable(got: str) -> str:
    """Returns the text of an error: TileLang could not write to its cache folder."""
    needs = f"a writable cache folder ({cache_dir()}), and free space there and in TMPDIR"
    return need("kernels", got, needs, "set TILELANG_CACHE_DIR to another folder")
