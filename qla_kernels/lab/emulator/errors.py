"""What can go wrong with an emulated kernel."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """The kernel broke a rule, the host wrapper refused its arguments, or time ran out."""


class UnknownCodeError(EmulationError):
    """The generated source uses something that the emulator does not model."""
