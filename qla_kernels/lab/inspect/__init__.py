"""Compares a kernel's compiled code with its schedule. Needs nvcc, but no GPU.

    python -m qla_kernels inspect [family.kernel] [OPTIONS]

Reading order: `gather` (collects the facts), `rules` (compares them with the schedule), then the
readers: `threads` (which threads take a branch), `script` (IR), `source` (CUDA), `sass` (machine
code).
"""

from qla_kernels.lab.inspect.gather import Facts, NamedBarrierFacts, RoleFacts, facts
from qla_kernels.lab.inspect.rules import check

__all__ = ["Facts", "NamedBarrierFacts", "RoleFacts", "check", "facts"]
