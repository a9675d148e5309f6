"""Importing the package: quick, with neither a GPU nor TileLang; each test in a fresh process."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qla_kernels.runtime import cpu
from tests import zygote
from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]

# What `import` finds here is what it finds where the package was never installed.
WITHOUT_TILELANG = "import sys; sys.modules.update(tilelang=None, tvm=None, tvm_ffi=None)"


KEPT = {k: v for k, v in os.environ.items() if not k.startswith(("QLA_", "PYTHON"))}
NOWHERE = Path(sys.executable).parent  # so that only a path can provide modules


def fresh(code: str, path: str = str(ROOT), **env: str) -> str:
    """What a new interpreter says when it runs this code."""
    how = {"capture_output": True, "text": True, "cwd": NOWHERE, "timeout": HANG}
    env = {**KEPT, "PYTHONPATH": path, **env}
    return said(subprocess.run([sys.executable, "-c", code], env=env, check=False, **how))


def beside_torch(code: str, path: str = str(ROOT)) -> str:
    """What a process says that has imported torch and nothing else when it runs this code."""
    return said(zygote.run(code, cwd=NOWHERE, path=path, env=KEPT))


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_import_brings_neither_torch_nor_tilelang():
    fresh("""
import sys, qla_kernels
assert qla_kernels.__version__
assert not {"torch", "tilelang", "einops", "reference"} & set(sys.modules), sorted(sys.modules)
""")


def test_a_cpu_call_does_not_import_tilelang():
    beside_torch("""
import sys, torch
from qla_kernels import causal_conv1d, chunk_gated_delta_rule, gated_rms_norm
x = torch.randn(1, 5, 2, 8)
chunk_gated_delta_rule(x, x, x, -torch.rand(1, 5, 2), torch.rand(1, 5, 2))
assert not {"tilelang", "tvm", "triton", "torch._dynamo"} & set(sys.modules)
x = torch.randn(9, 8, requires_grad=True)
causal_conv1d(x, torch.randn(8, 4), None, "silu").sum().backward()
gated_rms_norm(x, x, torch.randn(8)).sum().backward()
assert not {"tilelang", "tvm"} & set(sys.modules)
""")


def test_kernel_files_and_what_launches_them_need_no_tilelang():
    beside_torch(
        WITHOUT_TILELANG
        + """
from qla_kernels.runtime import jit
from qla_kernels.gdn.decode import launch
from qla_kernels.gdn.launch import backward, forward
from qla_kernels.dualkv import launch, launch_backward
from qla_kernels.sparse_ring import launch, launch_backward
variants = [(k, v) for k in jit.kernel_modules() for v in k.module.VARIANTS]
assert all(kernel.module.schedule(variant).threads for kernel, variant in variants)
"""
    )


def test_a_cpu_call_needs_neither_tilelang_nor_a_gpu():
    beside_torch(
        WITHOUT_TILELANG
        + """
import torch
from qla_kernels import chunk_gated_delta_rule
q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
o, state = chunk_gated_delta_rule(q, k, v, -torch.rand(1, 5, 2), torch.rand(1, 5, 2))
o.sum().backward()
assert o.isfinite().all() and q.grad.isfinite().all() and state is None
assert sys.modules["tilelang"] is None  # nobody found another
assert not torch.cuda.is_initialized()
"""
    )


def test_import_adds_little_to_torch():
    out = beside_torch("""
import time, torch
start = time.process_time()
import qla_kernels
qla_kernels.chunk_gated_delta_rule
print(time.process_time() - start)
""")
    assert float(out) < 0.3  # seconds of a CPU; 0.005 where this was written


def test_every_public_name_resolves_and_others_do_not():
    beside_torch("""
import qla_kernels
for name in qla_kernels.__all__:
    assert getattr(qla_kernels, name) is getattr(qla_kernels, name), name
    assert name in dir(qla_kernels)
assert qla_kernels.gdn.refusal and qla_kernels.chunk_gdn is qla_kernels.chunk_gated_delta_rule
try:
    qla_kernels.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError("no_such_name was found")
""")


PUBLIC = ("", ".gdn", ".dualkv", ".hybrid", ".conv", ".sparse_ring", ".lab.emulator")


@pytest.mark.parametrize("name", PUBLIC)
def test_help_explains_every_public_name(name):
    module = importlib.import_module(f"qla_kernels{name}")
    callables = [x for x in (getattr(module, n) for n in module.__all__) if callable(x)]
    assert callables
    assert [x for x in callables if not inspect.getdoc(x)] == []


def test_hooks_are_found_without_an_import_of_their_own():
    fresh("""
import sys, qla_kernels
for name in qla_kernels.integrations.__all__:
    hook = getattr(qla_kernels.integrations, name)
    assert hook.__name__ == f"qla_kernels.integrations.{name}"
    assert name in dir(qla_kernels.integrations)
assert not {"fla", "megatron", "sglang", "transformers", "trl", "verl", "vllm"} & set(sys.modules)
assert not hasattr(qla_kernels.integrations, "no_such_hook")
""")


def test_nothing_shows_an_import_that_takes_the_name_of_a_library():
    """Two documented lines once left `transformers.AutoModelForCausalLM` an AttributeError."""
    libraries = "fla|megatron|sglang|transformers|trl|verl|vllm"
    taken = rf"from qla_kernels\.integrations import (?:\w+, )*({libraries})\b(?! as )"
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    files += [file for name in ("examples", "qla_kernels") for file in ROOT.glob(f"{name}/**/*.py")]
    assert [file.name for file in files if re.search(taken, file.read_text())] == []


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("debug", "[qla_kernels] fine\n"),
        ("warning", ""),
        ("loud", "[qla_kernels] QLA_LOG=loud; need debug, info, warning or error; using info\n"),
    ],
)
def test_qla_log_sets_the_level_of_the_packages_logger(level, said):
    code = "import logging, qla_kernels; logging.getLogger('qla_kernels').debug('fine')"
    assert fresh(code, QLA_LOG=level) == said


def test_an_unknown_variable_is_named():
    code = "import qla_kernels; print(*qla_kernels.VARIABLES)"
    known, said = fresh(code, QLA_EXAT="1", QLA_EXACT="1").splitlines()
    assert said.startswith("QLA_EXAT is unknown; there are QLA_BATCH_INVARIANT, QLA_CHECK, ")
    files = [f for f in (ROOT / "qla_kernels").rglob("*") if f.suffix in (".py", ".c")]
    read = {name for f in files for name in re.findall(r"\"(QLA_\w+)\"", f.read_text())}
    assert read == {*known.split()}


def foreign(folder: Path) -> str:
    """A path on which the name `reference` is another package, which says so if it is imported."""
    (folder / "reference").mkdir()
    (folder / "reference" / "__init__.py").write_text("print('foreign code ran')")
    return os.pathsep.join([str(folder), str(ROOT)])


CPU_CALL = """
import torch
from qla_kernels import chunk_gated_delta_rule
x = torch.ones(1, 5, 2, 8)
chunk_gated_delta_rule(x, x, x, -torch.ones(1, 5, 2), torch.ones(1, 5, 2))
"""


def test_a_foreign_package_called_reference_is_neither_used_nor_run(tmp_path):
    code = (
        CPU_CALL + "from qla_kernels.runtime.cpu import reference; print(reference().gdn.__file__)"
    )
    assert beside_torch(code, foreign(tmp_path)) == f"{ROOT / 'reference' / 'gdn.py'}\n"


@pytest.mark.parametrize("lines", [(CPU_CALL, "import reference"), ("import reference", CPU_CALL)])
def test_a_foreign_package_called_reference_is_imported_by_its_name(lines, tmp_path):
    """Before and after a CPU call."""
    assert beside_torch("\n".join(lines), foreign(tmp_path)) == "foreign code ran\n"


@pytest.mark.parametrize("ours_first", [False, True])
def test_whoever_imports_reference_gets_the_modules_that_cpu_calls_use(ours_first):
    lines = [
        "from qla_kernels.runtime.cpu import reference; reference()",
        "from reference import gdn",
    ]
    lines = lines if ours_first else lines[::-1]
    beside_torch("\n".join([*lines, "assert reference().gdn is gdn"]))


def test_a_package_without_its_reference_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "PACKAGE", tmp_path / "qla_kernels")
    with pytest.raises(ImportError, match=r"the reference package is absent; need .*; install"):
        cpu.reference.__wrapped__()
