"""Runs the code that TileLang generates for sm_90a on CPU tensors. Read README.md first."""

from tests.emulator.errors import EmulationError, UnknownCodeError
from tests.emulator.kernel import EmulatedKernel

__all__ = ["EmulatedKernel", "EmulationError", "UnknownCodeError"]
