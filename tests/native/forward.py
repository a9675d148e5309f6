"""A public forward of the gated delta net on the stand-in driver.

    python -m tests.native.forward variants        prints the kernels that it launches, as labels
    python -m tests.native.forward launches        launches them, prebuilt, without TileLang
    python -m tests.native.forward by_python       the same, as with a torch before 2.10

CPU tensors go to the host code of GPUs. `launches` has to be started by `standin.run`, with
QLA_PREBUILT; it prints the functions that the driver was given.
"""

import sys
from contextlib import nullcontext
from typing import Any

import torch

from qla_kernels.runtime import device, jit


def forward() -> torch.Tensor:
    """Returns o [1, 256, 4, 128] of a call that normalises q and k: three launches."""
    from qla_kernels import chunk_gated_delta_rule
    from qla_kernels.gdn import ops
    from qla_kernels.gdn.launch import forward as launch

    ops.gdn_fwd, ops.l2norm_fwd = launch.gdn_fwd, launch.l2norm_fwd
    device.of, device.sm_count = nullcontext, lambda _: 132
    q, k = torch.zeros(2, 1, 256, 2, 128, dtype=torch.bfloat16)
    v = torch.zeros(1, 256, 4, 128, dtype=torch.bfloat16)
    g = torch.zeros(1, 256, 4)
    return chunk_gated_delta_rule(q, k, v, g, g, use_qk_l2norm_in_kernel=True)[0]


def variants() -> list[str]:
    asked: list[str] = []

    def compile(module: Any, variant: Any) -> Any:
        asked.append(jit.label(module, variant))
        return lambda *arguments: None

    jit.compile = compile
    forward()
    return asked


def by_python() -> list[str]:
    return launches(exchange=False)


def launches(exchange: bool = True) -> list[str]:
    from qla_kernels.runtime.native import prebuilt
    from tests.native import standin

    file = prebuilt.in_use()
    assert isinstance(file, prebuilt.KernelFile), file
    standin.configured(file.path.parent, exchange=exchange)
    driver = standin.Driver()
    driver.expect("")
    o = forward()
    assert o.shape == (1, 256, 4, 128)
    size = 7 * 4 + 8 + 4  # what the record has after a name, where no arguments are expected
    record, names = driver.record(), []
    while record:
        name, record = record.split(b"\0", 1)
        names.append(name.decode())
        record = record[size:]
    return names


if __name__ == "__main__":
    sys.modules.update(tilelang=None, tvm=None, tvm_ffi=None)
    print(*globals()[sys.argv[1]](), sep="\n")
