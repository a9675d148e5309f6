"""Processes that have imported torch and nothing else: forks of one, which start in milliseconds.

For what a new process does that imports torch anyway; an import of torch takes seconds of a core.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

OUTPUTS = ("stdout", "stderr")


def run(
    code: str,
    *arguments: object,
    cwd: Path,
    path: str,
    env: Mapping[str, str],
    start: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:
    """As `python -c code arguments` in a folder, with PYTHONPATH and an environment.

    `start` is the environment that the first process is started with, which the loader reads.
    """
    process = _started(start)
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    with TemporaryDirectory() as folder:
        request = code, [*map(str, arguments)], str(cwd), path.split(os.pathsep), {**env}, folder
        print(json.dumps(request), file=process.stdin, flush=True)
        status = int(process.stdout.readline())
        said = [(Path(folder) / name).read_text() for name in OUTPUTS]
    return subprocess.CompletedProcess([code, *arguments], status, *said)


_processes: dict[str, subprocess.Popen[str]] = {}  # by what is loaded before all else


def _started(start: Mapping[str, str]) -> subprocess.Popen[str]:
    """It ends with this process, which holds its input open."""
    preload = start.get("LD_PRELOAD", "")
    if preload not in _processes:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, __file__]
        _processes[preload] = subprocess.Popen(command, text=True, env={**start}, **pipes)
    return _processes[preload]


def serve() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        else:
            os._exit(answer(*json.loads(line)))


def answer(
    code: str, arguments: list[str], cwd: str, path: list[str], env: dict[str, str], folder: str
) -> int:
    """Runs the code as a fork, and returns its exit status."""
    for name, number in zip(OUTPUTS, (1, 2), strict=True):
        with (Path(folder) / name).open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:1] = path  # the first was the folder of this file
    sys.argv = ["-c", *arguments]
    status: object = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as done:
        status = done.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(status)


if __name__ == "__main__":
    serve()
