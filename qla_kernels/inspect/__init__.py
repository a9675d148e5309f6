"""What the compiler made of a kernel, compared with what its schedule says. Needs nvcc, no GPU.

    python -m qla_kernels.inspect [family.kernel] [--variant TEXT] [--order] [--json] [--dump DIR]

Reading order: `gather` (which facts, from where), `rules` (what they must be), then the readers:
`threads` (who takes which branch), `script` (the IR), `source` (the CUDA), `sass` (machine code).
"""

from qla_kernels.inspect.gather import Facts, NamedBarrier, RoleFacts, facts
from qla_kernels.inspect.rules import check

__all__ = ["Facts", "NamedBarrier", "RoleFacts", "check", "facts"]
