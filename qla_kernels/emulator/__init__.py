"""Runs the code that TileLang generates for sm_90a on CPU tensors. Read README.md first."""

from qla_kernels.emulator.errors import EmulationError, UnknownCodeError
from qla_kernels.emulator.kernel import EmulatedKernel

__all__ = ["EmulatedKernel", "EmulationError", "UnknownCodeError"]
