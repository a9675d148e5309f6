"""Patches veRL when this module is imported. veRL's workers import it with this option:

    actor_rollout_ref.model.external_lib=qla_kernels.integrations.verl_patch

Every worker then calls `integrations.verl.patch()` before it builds its model.
"""

from qla_kernels.integrations.verl import patch
from qla_kernels.runtime.errors import Unsupported

try:
    patch()
except Unsupported as error:
    raise error from None  # its text names the cause
