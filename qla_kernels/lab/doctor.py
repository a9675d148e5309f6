"""The doctor: prints this machine's versions and GPUs, and what the main calls would run on it.

    python -m qla_kernels                          the whole report
    python -m qla_kernels doctor --json            the same as JSON
    python -m qla_kernels doctor --fingerprint     one hash of the generated code of each family

Put its output at the top of a bug report. A probe that fails reports its failure and does not stop
the others. Nothing is compiled. The exit status is 0, whatever the report says, and 2 for wrong
arguments.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import qla_kernels
from qla_kernels.integrations import engines
from qla_kernels.lab import command_line
from qla_kernels.runtime import digests, jit
from qla_kernels.runtime.native import checks, prebuilt
from qla_kernels.runtime.sm90 import CAPABILITY, head_sizes

PACKAGE = Path(__file__).parents[1]

# Versions with which the tests ran, on CPUs and on a GPU; pyproject.toml accepts more. A test
# compares them with the constraints that CI installs from.
TESTED = {"torch": ("2.11", "2.13"), "tilelang": ("0.1.15",), "nvcc": ("13.0",)}

# Libraries that the benchmarks compare with: the module, and distributions that may contain it.
RIVALS = {
    "fla": ("flash-linear-attention", "fla-core"),
    "flash_qla": ("flash-qla",),
    "flashinfer": ("flashinfer-python",),
    "flash_attn.cute": ("flash-attn-4",),
}

HOOKS = {  # of qla_kernels.integrations: the call that enables each, and its effect
    "FLA registry": ("fla.register()", "FLA asks us, and runs what we refuse"),
    "transformers": ("transformers.swap(model)", "gated-delta-net layers call us"),
    "transformers attention": ("transformers_dualkv.register()", '"shared_prefix" is ours'),
    "TRL GRPO": ("trl.shared_prefix_trainer(GRPOTrainer)", "each prompt of a batch runs once"),
    "veRL FSDP": ("verl.patch()", "each prompt of a micro-batch runs once"),
    "transformers ring": ("transformers_sparse_ring.prepare(model)", '"sparse_ring" is ours'),
}

# Kernels that are no family of their own, and the families that launch them
SHARED = {"attn": ("dualkv", "sparse_ring"), "head": ("dualkv",)}
# Shapes of the first arguments of a call that each family's `refusal` is asked about
STANDARD: dict[str, list[tuple[int, ...]]] = {
    "gdn": [(1, 64, 2, 128)] * 3,
    "conv": [(64, 128), (128, 4)],
    "norm": [(64, 2, 128), (64, 2, 128), (128,)],
    "dualkv": [(64, 2, 128)] * 3,
    "sparse_ring": [(1, 128, 2, 128)] * 3,
}

Section = dict[str, object]


def report() -> dict[str, Section]:
    """Returns the doctor's report, a dict of sections by name; all values fit in JSON."""
    return {
        "qla_kernels": {
            "version": qla_kernels.__version__,
            "folder": str(PACKAGE),
            "python": f"{platform.python_version()} on {platform.platform()}",
        },
        "device": _probed({"driver": _driver, "GPUs": _gpus}),
        "versions": _versions(),
        "kernel cache": _probed({"folder": lambda: str(jit.cache_dir()), "size": _cache_size}),
        "prebuilt kernels": checks.section(),
        "paths": _probed(
            {"CPU tensors": _cpu_path}
            | {f"CUDA, {family}": _cuda_path(family) for family in STANDARD}
        )
        | {f"{name} hook": f"integrations.{call}: {then}" for name, (call, then) in HOOKS.items()}
        | _probed(engines.PLUG_INS),
        "rivals": _probed({name: _rival(name) for name in RIVALS} | {"cuDNN SDPA": _cudnn}),
        "fingerprints": {family: fingerprint(family) for family in families()},
    }


def families() -> list[str]:
    """Returns the families that have kernels, without those whose kernels other families share."""
    return sorted({family for family, _ in jit.kernel_names()} - set(SHARED))


def fingerprint(family: str) -> str:
    """Returns one digest of the generated code of a family's kernels, equal on all machines."""
    shared = (name for name, families in SHARED.items() if family in families)
    return digests.of_family((family, *shared))


def _probed(probes: Mapping[str, Callable[[], object]]) -> Section:
    """Returns each probe's answer, or a text that says how it failed."""
    answers: Section = {}
    for name, probe in probes.items():
        try:
            answers[name] = probe()
        except Exception as error:  # the report includes any fault of this machine
            answers[name] = f"unknown ({type(error).__name__}: {error})"
    return answers


def _driver() -> str | None:
    from qla_kernels.runtime import device

    return device.driver()


def _gpus() -> list[str]:
    import torch

    from qla_kernels.runtime import device

    found = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.device("cuda", i)
        major, minor = device.capability(gpu)
        found.append(f"{device.name(gpu)}, capability {major}.{minor}, {device.sm_count(gpu)} SMs")
    return found


def _versions() -> Section:
    versions = _probed(
        {
            "torch": lambda: _version("torch"),
            "tilelang": lambda: _version("tilelang"),
            "apache-tvm-ffi": lambda: _version("tvm_ffi", "apache-tvm-ffi"),
            "nvcc": lambda: jit.nvcc_version() if _installed("tilelang") else "not used",
            "CUDA of torch": _torch_cuda,
        }
    )
    shown = {name: str(version) for name, version in versions.items()}
    return versions | {"tested together": tested(shown | _tools())}


def _tools() -> dict[str, str]:
    """Returns the versions of TileLang and nvcc that built the prebuilt kernels, if those run."""
    try:
        file = prebuilt.in_use()
    except Exception:  # `checks.section` reports it
        return {}
    return {} if isinstance(file, str) else {k: file.manifest[k] for k in ("tilelang", "nvcc")}


def tested(versions: dict[str, str]) -> str:
    """Returns "yes" if the tests ran with these versions, otherwise which of them are untested."""
    strangers = []
    for name, series in TESTED.items():
        release = versions[name].removeprefix("release ").partition("+")[0]
        if not any(f"{release}.".startswith((f"{s}.", f"{s},")) for s in series):
            strangers.append(f"{name} {versions[name]} (tested: {', '.join(series)})")
    return (
        f"no: {'; '.join(strangers)}; run `python -m qla_kernels selftest`" if strangers else "yes"
    )


def _version(module: str, *distributions: str) -> str | None:
    """Returns an installed module's version without importing it; None if it is not installed."""
    if not _installed(module):
        return None
    for name in distributions or (module,):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "installed, version unknown"


def _installed(module: str) -> bool:
    """Returns whether a module is installed, from its files.

    Importing a parent package could take seconds, or fail.
    """
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    return bool(spec) and (not rest or any(folder.joinpath(*rest).exists() for folder in folders))


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _cache_size() -> str:
    return f"{jit.cache_size() / 2**20:.1f} MiB"


def _cpu_path() -> str:
    reference = importlib.import_module("qla_kernels.runtime.cpu").reference
    return f"{reference().__name__}, chunked"


def _cuda_path(family: str) -> Callable[[], str]:
    """Returns a probe that says how a standard call would run: on this GPU, or else on Hopper."""

    def probe() -> str:
        import torch

        from qla_kernels.runtime import device

        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in STANDARD[family]]
        here = device.available()
        capability = device.capability(torch.device("cuda", 0)) if here else CAPABILITY
        validate = importlib.import_module(f"qla_kernels.{family}.validate")
        reason = validate.refusal(*tensors, capability=capability)
        ours = "our kernels" if family == "conv" else f"our kernels, {head_sizes(validate)}"
        if isinstance(prebuilt.in_use(), str) and not prebuilt.can_compile():
            ours = f"no kernels: none are prebuilt; {prebuilt.NOTHING_TO_LAUNCH}"
        answer = ours if reason is None else f"refused: {reason}"
        return answer if here else f"(no GPU here; on Hopper) {answer}"

    return probe


def _rival(name: str) -> Callable[[], str]:
    return lambda: _version(name, *RIVALS[name]) or "not installed"


def _cudnn() -> str:
    from torch.backends import cudnn

    version = cudnn.version()  # type: ignore[no-untyped-call]
    return f"cuDNN {version}" if version else "not in this torch build"


def text(sections: dict[str, Section]) -> str:
    lines = []
    for title, section in sections.items():
        lines.append(title)
        width = max(map(len, section))
        for name, value in section.items():
            values = value if isinstance(value, list) else [value]
            shown = [str(v) for v in values if v is not None] or ["none"]
            lines += [f"  {name if i == 0 else '':{width}}  {v}" for i, v in enumerate(shown)]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = command_line.parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fingerprint", action="store_true", help="print one hash per family")
    options = parser.parse_args(arguments)
    facts: object
    if options.fingerprint:
        facts = {family: fingerprint(family) for family in families()}
        shown = "\n".join(f"{family} {value}" for family, value in facts.items())
    else:
        facts = report()
        shown = text(facts)
    sys.stdout.write((json.dumps(facts, indent=2) if options.json else shown) + "\n")
    return 0
