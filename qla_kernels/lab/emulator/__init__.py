"""Runs the code that TileLang generates for sm_90a on CPU tensors, with its barriers and copies.

    kernel = EmulatedKernel(prim_func)       or load("my_kernel.py", "bf16-k128")
    for seed in range(6):
        kernel(a, b, c, seed=seed)           outputs in place, as on a GPU

It needs Linux, g++ 11 or newer and TileLang (`pip install '.[compile]'` in the checkout), and
neither a GPU nor CUDA. Without them, Unsupported says what is missing. A mistake of the kernel,
such as a deadlock, a slot that is read before its copy landed or an access outside of a tensor,
raises EmulationError, and leaves the tensors as they were. README.md says what is modelled.
"""

from qla_kernels.lab.emulator.case import Case, load
from qla_kernels.lab.emulator.errors import EmulationError, UnknownCodeError
from qla_kernels.lab.emulator.kernel import EmulatedKernel

__all__ = ["Case", "EmulatedKernel", "EmulationError", "UnknownCodeError", "load"]
