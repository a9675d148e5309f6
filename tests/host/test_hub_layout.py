"""A wheel in the layout of Hugging Face's `kernels`; that library itself, where it is installed."""

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.native import prebuilt
from scripts import hub_layout
from tests.limits import HANG
from tests.native import made_up, standin

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

WHEEL = "qla_kernels-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"
ARCH = "torch-stable-abi28-cu{}-x86_64-linux"


def wheel_of(folder: Path, sets: tuple[str, ...]) -> Path:
    """A wheel of this checkout with sets of one kernel, zipped without a build."""
    with zipfile.ZipFile(folder / WHEEL, "w") as file:
        for source, target in (("qla_kernels", ""), ("reference", "qla_kernels/")):
            for path in (standin.ROOT / source).rglob("*.*"):
                if path.suffix in (".py", ".c", ".cuh", ".json"):
                    file.write(path, target + str(path.relative_to(standin.ROOT)))
        file.write(standin.built() / prebuilt.LAUNCHER, hub_layout.INSIDE + prebuilt.LAUNCHER)
        for of_set in sets:
            path = made_up.write(folder, of_set=of_set)
            file.write(path, hub_layout.INSIDE + path.name)
        file.write(standin.ROOT / "LICENSE", "qla_kernels-0.1.0.dist-info/licenses/LICENSE")
    return folder / WHEEL


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """The layout of a wheel with both sets."""
    folder = tmp_path_factory.mktemp("hub")
    hub_layout.write(wheel_of(tmp_path_factory.mktemp("wheel"), prebuilt.SETS), folder)
    return folder


def run(code: str, *arguments: object) -> list[str]:
    """The words that a process prints which finds no checkout, on the stand-in driver."""
    env = standin.environment(standin.built()) | {"PYTHONPATH": ""}
    env["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    cwd = Path(sys.executable).parent
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# What a process does with a loaded module: a call on CPU tensors, and a launch on the stand-in.
USE = """
import sys; sys.modules.update(tilelang=None, tvm=None, tvm_ffi=None)
def use(module):
    import torch
    assert module.__version__ and "chunk_gated_delta_rule" in dir(module)
    x = torch.randn(1, 5, 2, 8)
    o = module.chunk_gated_delta_rule(x, x, x, -torch.rand(1, 5, 2), torch.rand(1, 5, 2))[0]
    assert o.shape == x.shape
    import qla_kernels
    from qla_kernels.runtime import jit
    from qla_kernels.runtime.native import prebuilt
    sys.path.append(sys.argv[2])
    from tests.native import behaviour, made_up, standin
    launch = jit.compile(made_up.gate, made_up.VARIANT)
    file = prebuilt.in_use()
    standin.configured(file.path.parent)
    driver = standin.Driver()
    driver.expect(standin.kinds(behaviour.ENTRY))
    launch(*behaviour._arguments())
    assert driver.record()
    print(file.path.parents[2].name, file.path.name)
"""

# As the library imports a variant: by its __init__.py, under the id of its metadata.
BY_HAND = """
def load(variant):
    import importlib.util, json
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
from pathlib import Path
hub = Path(sys.argv[1])
"""


def test_variants_and_their_sets(hub: Path) -> None:
    found = {
        variant.name: sorted(p.name for p in (variant / hub_layout.INSIDE).glob("*.zip"))
        for variant in (hub / "build").iterdir()
    }
    assert found == {
        ARCH.format(130): ["kernels-13.zip"],
        ARCH.format(126): ["kernels-12.9.zip"],
        "torch-cuda": ["kernels-12.9.zip", "kernels-13.zip"],
    }


def test_one_set_gives_two_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = wheel_of(tmp_path, ("13",))
    assert hub_layout.main([str(wheel), "--out", str(tmp_path / "hub")]) == 0
    names = {ARCH.format(130), "torch-cuda"}
    assert {Path(line).name for line in capsys.readouterr().out.splitlines()} == names


def test_metadata(hub: Path) -> None:
    about = {p.parent.name: json.loads(p.read_text()) for p in hub.glob("build/*/metadata.json")}
    assert len({metadata["id"] for metadata in about.values()}) == 3
    for metadata in about.values():
        assert metadata["id"].isidentifier()
        assert metadata["backend"] == {"type": "cuda", "archs": ["9.0a"]}
        assert metadata["name"] == "qla-kernels"


def test_a_wheel_without_kernels_is_refused(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, ())
    with pytest.raises(Unsupported, match=r"need a wheel with kernels; build one: QLA_PREBUILT="):
        hub_layout.write(wheel, tmp_path / "hub")
    assert hub_layout.main([str(wheel), "--out", str(tmp_path / "hub")]) == 1


@pytest.mark.parametrize("variant", [ARCH.format(130), "torch-cuda"])
def test_a_variant_works_by_itself(hub: Path, variant: str) -> None:
    said = run(USE + BY_HAND + "use(load(hub / 'build' / sys.argv[3]))", hub, standin.ROOT, variant)
    assert said == [variant, "kernels-13.zip"]


def test_a_second_copy_in_a_process_is_refused(hub: Path) -> None:
    code = (
        USE
        + BY_HAND
        + """
first = load(hub / "build" / sys.argv[3])
assert load(hub / "build" / sys.argv[3]).chunk_gdn is first.chunk_gdn
try:
    load(hub / "build" / "torch-cuda")
except ImportError as error:
    print("already; need one copy a process" in str(error))
"""
    )
    assert run(code, hub, standin.ROOT, ARCH.format(130)) == ["True"]


# ---- the library: pip install "kernels>=0.14.1" ----

library = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="needs Hugging Face's kernels"
)

# The library asks torch for its CUDA version, and neither needs a GPU.
BY_LIBRARY = """
import kernels, torch
from pathlib import Path
torch.version.cuda = sys.argv[3]
use(kernels.get_local_kernel(Path(sys.argv[1])))
"""


def arch_or_any(cuda: int) -> str:
    from kernels import __version__

    knows_stable_abi = tuple(map(int, __version__.split(".")[:2])) >= (0, 15)
    return ARCH.format(cuda) if knows_stable_abi else "torch-cuda"


@library
@pytest.mark.parametrize(("of_torch", "at_least"), [("13.0", 130), ("13.2", 130), ("12.8", 126)])
def test_the_library_takes_the_variant_of_torchs_cuda(
    hub: Path, of_torch: str, at_least: int
) -> None:
    variant, file = run(USE + BY_LIBRARY, hub, standin.ROOT, of_torch)
    assert variant == arch_or_any(at_least)
    arch_file = {130: "kernels-13.zip", 126: "kernels-12.9.zip"}[at_least]
    assert file == ("kernels-13.zip" if variant == "torch-cuda" else arch_file)


@library
def test_the_library_refuses_a_torch_without_cuda(hub: Path) -> None:
    code = """
import kernels, sys
from pathlib import Path
try:
    kernels.get_local_kernel(Path(sys.argv[1]))
except OSError:  # FileNotFoundError, from kernels 0.15 on
    print("refused")
"""
    import torch

    if torch.version.cuda:
        pytest.skip("torch has CUDA")
    assert run(code, hub) == ["refused"]
