"""Launches every prebuilt kernel of an environment on the stand-in driver, with made-up arguments.

    /path/to/python -m tests.native.every                the kernels of the wheel installed there
    QLA_PREBUILT=FOLDER python -m tests.native.every     those of FOLDER

That Python and its torch are what is tested: neither GPU nor nvcc nor TileLang is needed, only a C
compiler. Prints how many were launched; exit status 1 if one was not.
"""

import os
import random
import subprocess
import sys
from collections.abc import Sequence

from tests.native import standin

# The installed package goes before the checkout, whose root follows for tests.native.
INSTALLED = """
import sys
import qla_kernels
sys.path.append(sys.argv.pop(1))
from tests.native import every
sys.exit(every.launch_all())
"""


def launch_all() -> int:
    """In a process on the stand-in: launches all kernels of the file in use."""
    sys.modules.update(tilelang=None, tvm=None, tvm_ffi=None)  # type: ignore[arg-type]
    import json

    import torch

    import qla_kernels
    from qla_kernels.runtime import jit
    from qla_kernels.runtime.native import prebuilt
    from tests.native.compare import arguments

    file = prebuilt.in_use()
    if isinstance(file, str):
        print(f"no kernels: {file}")
        return 1
    standin.configured(file.path.parent)
    driver, rng, launched, named = standin.Driver(), random.Random(0), 0, set()
    for kernel in jit.kernel_modules():
        for variant in kernel.module.VARIANTS:
            label = jit.label(kernel.module, variant)
            named.add(label)
            if not file.has(label):
                continue
            entry = json.loads(file.read(label, "entry"))
            driver.expect(standin.kinds(entry))
            jit.compile(kernel.module, variant)(*arguments(entry, rng))
            assert driver.record().startswith(entry["function"].encode() + b"\0"), label
            launched += 1
    print(f"{launched} of {len(named)} variants launched from {file.path}")
    print(f"{qla_kernels.__file__}, torch {torch.__version__}, python {sys.version.split()[0]}")
    return int(launched < len(file.kernels))


def main(arguments: Sequence[str]) -> int:
    env = standin.environment(standin.built(), standin.LIBRARIES[:1])
    env |= {k: v for k, v in os.environ.items() if k == "QLA_PREBUILT"}
    del env["PYTHONPATH"]
    command = [sys.executable, "-c", INSTALLED, str(standin.ROOT), *arguments]
    return subprocess.run(command, cwd=standin.built(), env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
