"""The gated delta net.

api.py (what a call means), low_level.py, validate.py and contents.py (what is refused, and why),
autograd.py and ops.py (what torch sees), then cpu.py or launch/ (what runs), and kernels/. Decoding
is in decode/, sequences cut over ranks in sharded/.
"""

from qla_kernels.gdn.api import chunk_gated_delta_rule, chunk_gdn
from qla_kernels.gdn.decode.api import (
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    recurrent_refusal,
)
from qla_kernels.gdn.low_level import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from qla_kernels.gdn.sharded.context import CPContext, ShardError, build_cp_context
from qla_kernels.gdn.validate import refusal, wants_gradients

__all__ = [
    "CPContext",
    "ShardError",
    "build_cp_context",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "recurrent_refusal",
    "refusal",
    "wants_gradients",
]
