"""Command line of the self-test: python -m qla_kernels.selftest [NAME [PART or VARIANT]]."""

import sys

from qla_kernels.selftest import main

sys.exit(main(*sys.argv[1:]))
