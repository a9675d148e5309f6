"""python -m qla_kernels.selftest"""

import sys

from qla_kernels.selftest import main

sys.exit(main())
