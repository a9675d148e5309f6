"""Kernels that another ptxas assembles: what it is given, what is refused, which set they are."""

import json
import zipfile
from pathlib import Path

import pytest

from qla_kernels.lab import build
from qla_kernels.runtime import jit, ptxas
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.native import prebuilt
from qla_kernels.tile.schedule import Role, Schedule

PTX = "//\n// by nvcc\n//\n\n.version 9.0\n.target sm_90a\n.address_size 64\n"
SOURCE = '#include <cuda_bf16.h>\nextern "C" __global__ void f(float *x) { x[threadIdx.x] *= 3; }\n'


def program(folder: Path, said: str = "V12.9.86", then: str = "exit 1") -> Path:
    """A program that calls itself a ptxas of 12.9; `then` is what it does with PTX."""
    path = folder / "ptxas"
    versions = f"ptxas: NVIDIA (R) Ptx\nCuda compilation tools, release {said[1:5]}, {said}"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{versions}" && exit\n{then}\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def compiler() -> None:
    pytest.importorskip("tilelang", reason="names the flags")
    try:
        jit.nvcc()
    except Unsupported as missing:
        pytest.skip(str(missing))


@pytest.fixture
def own(compiler: None) -> Path:
    """The ptxas of this nvcc."""
    found = jit.nvcc().resolve().with_name("ptxas")
    if not found.exists():
        pytest.skip(f"no ptxas beside {jit.nvcc()}")
    return found


def test_a_ptxas_says_which_it_is(tmp_path: Path) -> None:
    assert ptxas.version(program(tmp_path)) == "release 12.9, V12.9.86"
    other = tmp_path / "other"
    for text in ("#!/bin/sh\necho release 12.9", "#!/bin/sh\necho ptxas: of old"):
        other.write_text(text)
        other.chmod(0o755)
        with pytest.raises(Unsupported, match="other is no ptxas; need an assembler of CUDA; pip"):
            ptxas.version(other)
    with pytest.raises(Unsupported, match=r"--ptxas: .*nowhere.*; need a program; pip install"):
        ptxas.version(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("written", "release", "read_as"),
    [
        ("9.0", "release 12.9, V12.9.86", "8.8"),
        ("9.3", "release 12.9, V12.9.86", "8.8"),
        ("8.5", "release 12.9, V12.9.86", "8.5"),
        ("8.10", "release 12.9, V12.9.86", "8.8"),
        ("9.0", "release 13.0, V13.0.88", "9.0"),
    ],
)
def test_versions_are_lowered(written: str, release: str, read_as: str) -> None:
    """The number alone: not one that stands in a comment, or further down."""
    text = PTX.replace("9.0", written) + "// .version 9.0\n"
    found = ptxas.lowered(text, release)
    assert found == (
        text.replace(f"\n.version {written}", f"\n.version {read_as}"),
        written,
        read_as,
    )
    with pytest.raises(ValueError, match=r"a text without .version; need PTX"):
        ptxas.lowered("// .version 9.0", release)


@pytest.mark.parametrize(("said", "of_set"), [("V12.9.86", "12.9"), ("V13.1.20", "13")])
def test_sets_go_by_ptxas(tmp_path: Path, said: str, of_set: str) -> None:
    assert build.set_of(program(tmp_path, said)) == of_set


def test_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = program(tmp_path, "V12.4.131")
    said = (
        "ptxas release 12.4, V12.4.131; need 13 or 12.9; set CUDA_HOME to one of these, or --ptxas"
    )
    with pytest.raises(Unsupported, match=said):
        build.set_of(given)
    assert build.main(["--out", str(tmp_path / "new"), "--ptxas", str(given)]) == 1
    assert said in capsys.readouterr().err


def test_nvccs_own_gives_what_nvcc_gives(own: Path, tmp_path: Path) -> None:
    """So no flag is lost on the way, fast arithmetic and register usage among them."""
    for name, configs in (
        ("plain", {}),
        ("other flags", {"tl.enable_fast_math": True, "tl.ptxas_register_usage_level": 10}),
    ):
        source = SOURCE.replace("*= 3", "= __fdividef(1, x[1]) + sqrtf(x[2]) / x[3]")
        folders = [tmp_path / f"{name}, {side}" for side in ("theirs", "ours")]
        for folder in folders:
            folder.mkdir()
        theirs = jit.assemble(source, configs, folders[0], line_info=False)
        ours = ptxas.assemble("f", source, configs, folders[1], own)
        assert ours.cubin.read_bytes() == theirs.cubin.read_bytes()


@pytest.mark.usefixtures("compiler")
def test_what_a_ptxas_is_given(tmp_path: Path) -> None:
    """A stand-in of 12.9 keeps its arguments."""
    then = f'echo "$@" > {tmp_path}/given; touch "$6"'
    given = program(tmp_path, then=then)
    configs = {"tl.ptxas_register_usage_level": 10}
    ptxas.assemble("f", SOURCE, configs, tmp_path, given)
    head, _, tail = (tmp_path / "given").read_text().partition(" -o ")
    options = ["-arch=sm_90a", "-m64", "--verbose", "--register-usage-level=10"]
    assert head.split() == options
    assert tail.split() == [str(tmp_path / "kernel.cubin"), str(tmp_path / "kernel.ptx")]
    assert "\n.version 8.8\n" in (tmp_path / "kernel.ptx").read_text()


@pytest.mark.usefixtures("compiler")
def test_ptx_that_it_does_not_know_is_refused(tmp_path: Path) -> None:
    line = "ptxas kernel.ptx, line 30; error   : Unknown modifier '.fresh'"
    then = f'echo "{line}" >&2; echo "ptxas fatal   : Ptx assembly aborted" >&2; exit 255'
    with pytest.raises(Unsupported) as refused:
        ptxas.assemble("gdn.x", SOURCE, {}, tmp_path, program(tmp_path, then=then))
    written = (tmp_path / "kernel.ptx").read_text()
    assert ".version 8.8" in written
    assert str(refused.value) == (
        "gdn.x: ptxas release 12.9, V12.9.86 refuses its PTX 9.0, read as 8.8 (ptxas kernel.ptx, "
        "line 30; error   : Unknown modifier '.fresh'); need PTX that this ptxas knows; build with "
        "nvcc of a toolkit of that release, or leave the kernel out"
    )


def test_a_text_that_means_something_else_is_refused(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc's own ptxas has to give the same machine code under either number."""
    lower = ptxas.lowered
    given = program(tmp_path, then='touch "$5"')
    ptxas.assemble("gdn.x", SOURCE, {}, tmp_path, given)

    def other(ptx: str, release: str) -> tuple[str, str, str]:
        text, written, read_as = lower(ptx, release)
        changed = text.replace("0f40400000", "0f40800000")  # 3 as 4
        assert changed != text
        return changed, written, read_as

    monkeypatch.setattr(ptxas, "lowered", other)
    said = r"gdn.x: its PTX 9.\d, read as 8.8, is another program; need PTX that means the same in"
    with pytest.raises(Unsupported, match=said):
        ptxas.assemble("gdn.x", SOURCE, {}, tmp_path, given)


def test_what_came_later_is_refused(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By nvcc's ptxas as well, which says since when it exists: here since PTX 7.8."""
    monkeypatch.setitem(ptxas.NEWEST_PTX, "12.9", (7, 0))
    code = SOURCE.replace("{ x", '{ asm("barrier.cluster.arrive;"); x')
    said = (
        r"ptxas release .* refuses its PTX .*, read as 7.0 \(.*version 7.* or later.*\); need PTX"
    )
    with pytest.raises(Unsupported, match=said):
        ptxas.assemble("gdn.x", code, {}, tmp_path, program(tmp_path))


REPORT = """ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {smem} bytes smem
"""


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({}, ""),
        ({"spills": 8}, "spills: 8 B stored, 0 B loaded; none declared"),
        ({"registers": 60}, "registers: 60 a thread; the schedule allows 40"),
        ({"smem": 8}, "shared memory: 512 B dynamic + 8 B static = 520 B; the schedule says 512 B"),
    ],
)
def test_resources_are_those_of_the_schedule(numbers: dict[str, int], said: str) -> None:
    schedule = Schedule(roles=(Role("rows", warps=4, regs=40),), smem_bytes=512)
    lowered = jit.Lowered("", "f", (128,), 512, None)
    report = REPORT.format(**{"spills": 0, "registers": 40, "smem": 0, **numbers})
    if not said:
        build.check_resources("f", lowered, report, schedule)
        return
    with pytest.raises(Unsupported) as refused:
        build.check_resources("f", lowered, report, schedule)
    assert str(refused.value).startswith(f"f: {said}; need the resources of its schedule; build")


def test_the_command(own: Path, tmp_path: Path) -> None:
    given = ["sparse_ring.round_sums", "--out", str(tmp_path), "--ptxas", str(own)]
    assert build.main(given) == 0
    (path,) = tmp_path.glob("kernels-*.zip")
    with zipfile.ZipFile(path) as file:
        manifest = json.loads(file.read(prebuilt.MANIFEST))
    assert manifest["ptxas"] == ptxas.version(own)
    assert path.name == f"kernels-{manifest['set']}.zip"
    assert len(manifest["kernels"]) == 2
