"""Runs small cases of everything that can run on this machine, against the definition in fp64.

    python -m qla_kernels.selftest                  also: python -m qla_kernels.info --selftest
    python -m qla_kernels.selftest gdn.fused_fwd    one kernel alone

The inputs, in cases.py, are small enough to run under compute-sanitizer, yet contain a partial
chunk, a chunk of one token and shared key heads. On a Hopper GPU each kernel is launched by itself;
on other GPUs no kernel is launched.
"""

import sys

import torch

from qla_kernels import device, jit
from qla_kernels.selftest import (
    conv,
    dualkv_backward,
    dualkv_forward,
    gdn_backward,
    gdn_forward,
    gdn_public,
    gdn_segments,
    sparse_ring_backward,
    sparse_ring_forward,
    sparse_ring_index,
)
from qla_kernels.selftest.cases import Result
from qla_kernels.sm90 import CAPABILITY

__all__ = ["KERNELS", "Result", "main", "run"]

KERNELS = {
    **gdn_forward.KERNELS,
    **gdn_backward.KERNELS,
    **gdn_segments.KERNELS,
    **conv.KERNELS,
    **dualkv_forward.KERNELS,
    **dualkv_backward.KERNELS,
    **sparse_ring_index.KERNELS,
    **sparse_ring_forward.KERNELS,
    **sparse_ring_backward.KERNELS,
}


def run(only: str = "") -> list[Result]:
    """Runs every case, or the case of the kernel `only`; returns the results."""
    results: list[Result] = []
    if not only:
        results += gdn_public.run("cpu", torch.float32)
        results += gdn_public.run("cpu", torch.bfloat16)
    if not device.available():
        return [*results, Result("GPU", None, 0, "torch sees none")]
    capability = device.capability(torch.device("cuda"))
    if capability != CAPABILITY:
        note = f"capability {capability[0]}.{capability[1]}, kernels are for Hopper (9.0)"
        return [*results, Result("GPU", None, 0, note)]
    if not only:
        results += gdn_public.run("cuda", torch.bfloat16)
    for kernel in [only] if only else map(".".join, jit.kernel_names()):
        check = KERNELS.get(kernel)
        results += check() if check else [Result(kernel, None, 0, "no case")]
    return results


def main(only: str = "") -> int:
    results = run(only)
    sys.stdout.write("\n".join(map(str, results)) + "\n")
    return 0 if all(result.passed for result in results) else 1
