"""Shared-prompt attention: a prompt that many responses share is stored and computed once.

Reading order:
    tokens.py, prompts.py, padded.py, prefix_tree.py, assemble.py   pack sequences into a batch
    batch.py, plan.py          the packed batch, and its layout: which token sees which
    logprobs.py, microbatch.py log-probabilities of targets; groups to micro-batches and ranks
    api.py, validate.py, autograd.py   the public function, its checks and its derivative
    ops.py                     the torch operators, and what runs CPU tensors
    launch.py, launch_backward.py, tables.py, shapes.py, heuristics.py, kernels/   on a GPU
    compat.py                  the argument form of other shared-prompt kernels
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
