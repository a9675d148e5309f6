"""The gated delta net.

Reading order: api.py (what a call means) and low_level.py, validate.py and contents.py (what is
refused, and why), autograd.py and ops.py (what torch sees), then cpu.py or launch.py (what runs),
and kernels/. The form for decoding is apart: recurrent.py, recurrent_ops.py, launch_recurrent.py;
and so are sequences cut over ranks: context_parallel.py, shard_api.py, shard_ops.py, shard_cpu.py,
launch_shards.py.
"""

from qla_kernels.gdn.api import chunk_gated_delta_rule, chunk_gdn
from qla_kernels.gdn.context_parallel import CPContext, ShardError, build_cp_context
from qla_kernels.gdn.low_level import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from qla_kernels.gdn.recurrent import (
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    recurrent_refusal,
)
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
