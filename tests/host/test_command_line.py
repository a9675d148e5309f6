"""The one command line: every command shows its options, and says what it lacks."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from qla_kernels.__main__ import COMMANDS, main
from qla_kernels.lab import selftest
from qla_kernels.runtime import jit
from tests import zygote
from tests.limits import HANG

ROOT = Path(__file__).resolve().parents[2]

# Runs the command line where TileLang cannot be imported.
WITHOUT_TILELANG = """
import sys
sys.modules.update(tilelang=None, tvm=None, tvm_ffi=None)
from qla_kernels.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
# Says the exit status, and TileLang if a command has imported it.
IMPORTED = """
import sys
from qla_kernels.__main__ import main
try:
    status = main(sys.argv[1:])
except SystemExit as done:
    status = done.code
print(status, *sorted({"tilelang", "tvm"} & {*sys.modules}))
"""


def run(*command: object, cwd: Path = ROOT, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


def forked(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return zygote.run(code, *arguments, cwd=ROOT, path=str(ROOT), env=os.environ)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_options(command, capsys):
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m qla_kernels {command} ")
    # examples in the docstring are of this command
    shown = re.findall(r"^ +python -m qla_kernels ?(\w*)", said, re.M)
    assert set(shown) <= {command, "" if command == "doctor" else command}
    assert shown


def test_all_commands_are_listed(capsys):
    for ask in ("-h", "--help"):
        assert main([ask]) == 0
        said = capsys.readouterr().out
        assert re.findall(r"^  (\w+)  +\w", said, re.M) == [*COMMANDS]


def test_without_a_command_it_is_the_doctor(capsys):
    assert main(["--fingerprint"]) == 0
    short = capsys.readouterr().out
    assert main(["doctor", "--fingerprint"]) == 0
    assert capsys.readouterr().out == short
    done = run("-m", "qla_kernels")
    assert (done.returncode, done.stdout[:12]) == (0, "qla_kernels\n")


def test_another_command_is_named_with_the_known_ones(capsys):
    assert main(["selftests"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "python -m qla_kernels: no command 'selftests'; need one of "
        f"{', '.join(COMMANDS)}; see python -m qla_kernels --help\n"
    )


def test_the_installed_command_is_this_one():
    text = (ROOT / "pyproject.toml").read_text()
    (target,) = re.findall(r'^\[project.scripts\]\nqla-kernels = "(.*)"$', text, re.M)
    assert EntryPoint("qla-kernels", target, "console_scripts").load() is main


def test_starting_imports_no_tilelang():
    assert forked(IMPORTED, "--help").stdout.splitlines()[-1] == "0"
    assert forked(IMPORTED, "no-command").stdout.splitlines()[-1] == "2"
    for command in (
        ["doctor", "--fingerprint"],
        ["inspect", "conv.fwd", "--schedule"],
        ["selftest"],
    ):
        assert forked(IMPORTED, *command).stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "--out", "{folder}"),
        ("inspect", "gdn.gate"),
        ("digests", "gdn.gate"),
        ("emulate", "examples/own_kernel.py"),
        ("warmup", "--in-process", "conv"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_a_command_needs_is_said(arguments, tmp_path):
    given = [argument.format(folder=tmp_path) for argument in arguments]
    done = forked(WITHOUT_TILELANG, *given)
    said = done.stdout + done.stderr
    assert done.returncode in (1, 2)
    assert re.search(r"tilelang cannot be imported \(.*; need TileLang [\d.]+ or newer", said)
    assert "Traceback" not in said


def test_what_needs_a_checkout_says_so(tmp_path):
    shutil.copytree(ROOT / "qla_kernels", tmp_path / "qla_kernels")
    for command in (("digests", "--write"),):
        done = run("-m", "qla_kernels", *command, cwd=tmp_path, path=tmp_path)
        assert done.returncode == 2
        assert done.stderr == (
            f"{' '.join(command)}: no pyproject.toml in {tmp_path}; need a checkout; clone the "
            "repository, and run the command there\n"
        )


def test_schedules_need_no_tilelang():
    done = forked(WITHOUT_TILELANG, "inspect", "gdn.kkt_solve", "--schedule")
    assert done.returncode == 0, done.stderr
    assert "| solve | 0-3 |" in done.stdout


def test_schedules_of_a_kernel_name_every_variant(capsys):
    assert main(["inspect", "gdn.kkt_solve", "--schedule"]) == 0
    said = capsys.readouterr().out
    (kernel,) = (k for k in jit.kernel_modules("gdn") if k.name == "kkt_solve")
    for variant in kernel.module.VARIANTS:
        assert jit.label(kernel.module, variant) in said
    assert kernel.module.schedule(kernel.module.VARIANTS[0]).table() in said
    assert main(["inspect", "gdn.kkt_solve", "--schedule", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["variants"]


def test_an_unknown_kernel_is_refused_with_the_known_ones(capsys):
    assert main(["inspect", "gdn.kkt", "--schedule"]) == 2
    assert "no variant matches; kernels: attn.delta, conv.fwd" in capsys.readouterr().out


def test_selftest_passes_here(capsys):
    assert main(["selftest"]) == 0
    assert capsys.readouterr().out.count("ok  ") >= 2


def test_selftest_fails_on_a_wrong_result(monkeypatch, capsys):
    broken = selftest.Result("broken", False, "o: 1 > 0")
    monkeypatch.setattr(selftest, "run", lambda *_: [broken])
    assert main(["selftest", "--json"]) == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert result["passed"] is False


def test_selftest_names_what_it_has_cases_of(capsys):
    with pytest.raises(SystemExit) as done:
        main(["selftest", "gdm"])
    assert done.value.code == 2
    assert "gdm has no cases; need a family of gdn" in capsys.readouterr().err
