"""`python -m qla_kernels` is the doctor, `python -m qla_kernels.info`."""

import sys

from qla_kernels.info import main

sys.exit(main())
