"""The command line: `python -m qla_kernels COMMAND`, installed as `qla-kernels COMMAND` too.

Without a command it runs the doctor. Only the module of the command is imported.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from qla_kernels.lab.command_line import PROGRAM
from qla_kernels.runtime.errors import need


class Command(NamedTuple):
    """A command: its module, and a line of help."""

    module: str  # has main(arguments), which returns the exit status
    what: str


COMMANDS = {
    "doctor": Command("lab.doctor", "prints versions, GPUs, and what the main calls would run on"),
    "selftest": Command("lab.selftest", "runs small cases of everything that can run here"),
    "warmup": Command("lab.warmup", "makes kernels ready before they are needed"),
    "build": Command("lab.build", "compiles kernels ahead of time"),
    "check": Command("lab.check", "checks an edited kernel: schedule, emulator, GPU"),
    "inspect": Command("lab.inspect.command", "compares compiled kernels with their schedules"),
    "emulate": Command("lab.emulator.command", "emulates the kernel of a file on the CPU"),
    "digests": Command("lab.digests", "prints or compares digests of generated code"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ("doctor",)
    if name in ("-h", "--help"):
        sys.stdout.write(f"{usage()}\n")
        return 0
    if name.startswith("-"):
        name, rest = "doctor", [name, *rest]
    if name not in COMMANDS:
        fix = f"see {PROGRAM} --help"
        known = ", ".join(COMMANDS)
        sys.stderr.write(f"{need(PROGRAM, f'no command {name!r}', f'one of {known}', fix)}\n")
        return 2
    module = importlib.import_module(f"qla_kernels.{COMMANDS[name].module}")
    return int(module.main(rest))


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.what}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} [COMMAND] [OPTIONS]",
            "",
            *lines,
            "",
            "The default command is the doctor. COMMAND --help shows a command's options.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
