"""The set-up says what is missing, in words: an old Python, no venv module, no room, no network."""

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from scripts import dualkv_mask
from tests.limits import HANG

ROOT = Path(__file__).parents[2]
COMMANDS = ("quickstart.sh", "test.sh")
TOOLS = ("awk", "cat", "cp", "cut", "df", "dirname", "env", "grep", "head", "mkdir", "nproc", "rm")
TOOLS += ("sed", "sha256sum", "sort", "tr", "uname")

# Answers the questions that the set-up asks of an interpreter; LOG gets what it was made to run.
PYTHON = """#!/bin/sh
echo "$0 $*" >> "$LOG"
case "$*" in
  *version_info*) echo {version} ;;
  *"import venv"*) exit {venv} ;;
  "-m venv"*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip install pip>=23") ;;
  "-m pip install"*) exit {pip} ;;
  *) ;;
esac
"""


class Machine:
    """A checkout's scripts, and a PATH with only what the test puts there."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder / "checkout", folder / "bin"
        self.log = folder / "log"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copytree(ROOT / "constraints", self.root / "constraints")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.write("nvidia-smi", "#!/bin/sh\nexit 9\n")

    def write(self, name: str, text: str) -> None:
        file = self.bin / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def python(self, name="python3", version="3.11", venv=0, pip=0) -> None:
        self.write(name, PYTHON.format(version=version, venv=venv, pip=pip))

    def free(self, gib: int) -> None:
        header = "Filesystem 1024-blocks Used Available Capacity Mounted on"
        (self.bin / "df").unlink()
        self.write("df", f"#!/bin/sh\necho '{header}'\necho 'disk 1 1 {gib << 20} 1% /'\n")

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shutil.which("bash"), *f"scripts/{script}".split()],
            cwd=self.root,
            env={"PATH": str(self.bin), "LOG": str(self.log), **environment},
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )

    def ran(self, part: str) -> int:
        """How often an interpreter was started with these arguments."""
        return self.log.read_text().count(part) if self.log.exists() else 0


@pytest.fixture
def machine(tmp_path):
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("written for a machine without an NVIDIA driver")
    return Machine(tmp_path)


def refused(machine: Machine, script: str, *words: str, **environment: str) -> None:
    done = machine.run(script, **environment)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("set-up: ")
    assert "; need " in line
    for word in words:
        assert word in line
    assert not (machine.root / ".venv" / ".set-up").exists()


@pytest.mark.parametrize("script", COMMANDS)
def test_no_python_at_all(machine, script):
    refused(machine, script, "no Python found", "Python 3.10 or newer", "apt install")


@pytest.mark.parametrize("script", COMMANDS)
def test_an_old_python(machine, script):
    machine.python(version="3.9")
    refused(machine, script, "python3 is 3.9;", "Python 3.10 or newer", "PYTHON=")


def test_a_named_python_that_is_old(machine):
    machine.python(version="3.11")
    machine.python("other", version="3.8")
    refused(machine, "test.sh", "other is 3.8;", "3.10 or newer", PYTHON="other")


def test_a_newer_python_beside_an_old_one_is_found(machine):
    machine.python(version="3.9")
    machine.python("python3.12", version="3.12")
    machine.run("quickstart.sh")
    assert machine.ran("python3.12 -m venv") == 1


@pytest.mark.parametrize("script", COMMANDS)
def test_no_venv_module(machine, script):
    machine.python(venv=1)
    refused(machine, script, "python3 has no venv module", "apt install python3-venv")


@pytest.mark.parametrize("script", COMMANDS)
def test_no_disk_space(machine, script):
    machine.python()
    machine.free(gib=1)
    refused(machine, script, f"1 GiB free in {machine.root}", "3 GiB")
    assert machine.ran("-m venv") == 0


def test_a_driver_asks_for_a_cuda_build(machine):
    machine.python()
    machine.write("nvidia-smi", "#!/bin/sh\nexit 0\n")
    machine.free(gib=9)
    refused(machine, "quickstart.sh", "9 GiB free", "12 GiB")
    machine.free(gib=90)
    machine.run("quickstart.sh")
    assert machine.ran("-c constraints/tested.txt") == 1
    assert machine.ran("-c constraints/cpu.txt") == 0


def test_a_driver_that_appears_replaces_a_cpu_build(machine):
    machine.python()
    machine.free(gib=90)
    machine.run("quickstart.sh")
    assert machine.ran("pip uninstall") == 0
    machine.write("nvidia-smi", "#!/bin/sh\nexit 0\n")
    machine.run("quickstart.sh")
    assert machine.ran("pip uninstall --yes torch") == 1
    assert machine.ran("-m venv") == 1


def test_pip_fails(machine):
    machine.python(pip=1)
    refused(machine, "quickstart.sh", "pip could not install", "PIP_INDEX_URL")


def test_the_second_run_installs_nothing(machine):
    machine.python()
    for script in ("quickstart.sh", "quickstart.sh", "test.sh"):
        machine.run(script)
    assert machine.ran("-c constraints/cpu.txt") == 1
    assert machine.ran("-m benchmarks.sm90 gdn --quick --plot") == 2
    with (machine.root / "pyproject.toml").open("a") as project:
        project.write("# something else\n")
    machine.run("quickstart.sh")
    assert machine.ran("-c constraints/cpu.txt") == 2


def test_libraries_have_an_environment_of_their_own(machine):
    machine.python()
    for times in (1, 2):
        assert machine.run("test.sh --with-libraries").returncode == 0
        assert machine.ran("-m pytest -q -m libraries and not hopper") == times
    assert machine.ran(f"-m venv --clear {machine.root}/.venv-libraries") == 1
    pins = "-m pip install --upgrade -c constraints/tested.txt -c constraints/cpu.txt trl=="
    assert machine.ran(pins) == machine.ran("-m pip install --upgrade --no-deps verl==") == 1
    alone = f"--no-deps --target {machine.root}/.venv-libraries/fla "
    assert machine.ran(f"{alone}fla-core==") == 1
    other = "--only-binary=:all: --python-version 3.12 --ignore-requires-python megatron-core=="
    assert machine.ran(alone + other) == 1
    for times in (1, 2):  # there may be newer ones
        assert machine.run("test.sh --newest").returncode == 0
        newest = "-m pip install --upgrade -c constraints/cpu.txt transformers accelerate peft trl "
        assert machine.ran(newest) == times
    assert machine.ran(f"-m venv --clear {machine.root}/.venv-newest") == 1
    assert machine.ran("--no-deps verl\n") == 2
    assert machine.ran("ruff") == 0
    assert "test.sh --new; need --with-libraries, --newest" in machine.run("test.sh --new").stderr


RIVALS = "-c constraints/tested.txt -r constraints/rivals.txt"


def test_rivals_are_installed_on_request(machine):
    machine.python()
    machine.write("nvidia-smi", "#!/bin/sh\nexit 0\n")
    machine.free(gib=90)
    assert machine.run("setup_env.sh").returncode == 0
    assert machine.ran(RIVALS) == 0
    assert machine.run("setup_env.sh --rivals").returncode == 0
    assert machine.ran("-e .[compile,test,dev]") == machine.ran(RIVALS) == 1
    assert (
        "setup_env.sh --rival; need --rivals, --help or nothing"
        in machine.run("setup_env.sh --rival").stderr
    )


def test_setting_up_explains_itself_and_then_does_nothing(machine):
    """--help was an unknown argument."""
    machine.python()
    done = machine.run("setup_env.sh --help")
    assert done.returncode == 0
    assert "bash scripts/setup_env.sh --rivals  also what benchmarks compare with" in done.stdout
    assert "root=" not in done.stdout
    assert machine.ran("-m venv") == 0


def test_rivals_need_a_gpu(machine):
    machine.python()
    done = machine.run("setup_env.sh --rivals")
    assert done.returncode == 1
    assert "no NVIDIA driver here; need a GPU" in done.stderr
    assert machine.ran("-m pip install -c constraints/tested.txt -c constraints/cpu.txt") == 1
    assert machine.ran(RIVALS) == 0


def test_an_exported_cdpath_leads_nowhere_else(machine, tmp_path):
    machine.python()
    (tmp_path / "elsewhere" / "scripts").mkdir(parents=True)
    for cdpath in (".", f"{tmp_path}/elsewhere"):
        done = machine.run("quickstart.sh", CDPATH=cdpath)
        assert done.returncode == 0, done.stderr
    assert machine.ran("-m benchmarks.sm90 gdn --quick --plot") == 2
    assert (machine.root / ".venv" / ".set-up").exists()


def test_an_interrupted_installation_is_taken_up_again(machine):
    machine.python(pip=1)
    machine.run("quickstart.sh")
    machine.python()
    shutil.copy(machine.bin / "python3", machine.root / ".venv" / "bin" / "python")
    machine.run("quickstart.sh")
    assert machine.ran("-c constraints/cpu.txt") == 2
    assert machine.ran("-m venv") == 1


def test_without_compilers_the_tests_say_what_did_not_run(machine):
    machine.python()
    script = (machine.bin / "python3").read_text()
    no_nvcc = (
        '*jit.nvcc*) echo "qla_kernels.runtime.jit: no nvcc; need it; install it" >&2; exit 1 ;;'
    )
    machine.write("python3", script.replace("  *) ;;", f"  {no_nvcc}\n  *) ;;"))
    done = machine.run("test.sh")
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("NOT RUN")] == [
        "NOT RUN: the static tier. qla_kernels.runtime.jit: no nvcc; need it; install it",
        "NOT RUN: the emulated tier. no g++; apt install g++",
    ]


def test_a_failed_step_fails_the_run_and_the_rest_still_runs(machine):
    machine.python()
    script = (machine.bin / "python3").read_text()
    machine.write("python3", script.replace("  *) ;;", '  "-m mypy"*) exit 1 ;;\n  *) ;;'))
    done = machine.run("test.sh")
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines() if "FAILED" in line] == [
        ["mypy", "FAILED"]
    ]
    assert machine.ran("-m pytest") == 1


def test_device_check_needs_a_driver(machine):
    machine.python()
    refused(machine, "device_check.sh", "no NVIDIA driver", "Hopper GPU")
    assert not machine.log.exists()


def test_device_check_sets_nothing_up_where_torch_and_tilelang_are_there(machine):
    machine.python()
    machine.write("nvidia-smi", "#!/bin/sh\nexit 0\n")
    machine.run("device_check.sh")
    assert machine.ran("python3 scripts/device_check.py") == 1
    assert machine.ran("-m venv") == machine.ran("-m pip") == 0


def test_scripts_are_valid_shell():
    for script in sorted((ROOT / "scripts").glob("*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_oldest_python_is_the_one_in_pyproject():
    assert 'OLDEST_PYTHON="3.10"' in (ROOT / "scripts" / "setup_env.sh").read_text()
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()


def test_the_picture_of_a_mask_is_drawn():
    assert dualkv_mask.figure().lstrip().startswith("<svg")
