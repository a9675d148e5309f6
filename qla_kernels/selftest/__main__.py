"""Command line of the self-test: python -m qla_kernels.selftest [family.kernel [variant]]"""

import sys

from qla_kernels.selftest import main

sys.exit(main(*sys.argv[1:]))
