"""Shared-prompt attention: prompts that many responses have in common are stored and run once.

Reading order: tokens.py (what packers take), prompts.py, padded.py and prefix_tree.py (from
sequences to a batch), batch.py (the batch), plan.py (who sees whom), logprobs.py and microbatch.py;
then api.py (what a call means), validate.py, autograd.py and ops.py (what torch sees), and cpu.py
(what runs). compat.py takes the arguments of other kernels.
"""

from qla_kernels.dualkv.api import shared_prefix_attention
from qla_kernels.dualkv.batch import SharedBatch
from qla_kernels.dualkv.compat import dualkv_varlen
from qla_kernels.dualkv.microbatch import Piece, plan_microbatches
from qla_kernels.dualkv.padded import PaddedGroup, pack_padded, padded_groups
from qla_kernels.dualkv.plan import SharedLayout
from qla_kernels.dualkv.prefix_tree import pack_prefix_tree
from qla_kernels.dualkv.prompts import pack_shared_prompts
from qla_kernels.dualkv.validate import refusal

__all__ = [
    "PaddedGroup",
    "Piece",
    "SharedBatch",
    "SharedLayout",
    "dualkv_varlen",
    "pack_padded",
    "pack_prefix_tree",
    "pack_shared_prompts",
    "padded_groups",
    "plan_microbatches",
    "refusal",
    "shared_prefix_attention",
]
