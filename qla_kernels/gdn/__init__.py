"""The gated delta net.

Reading order:
    api.py, low_level.py        the public functions: with autograd, and one direction at a time
    keywords.py, validate.py    checks of keyword arguments; checks of tensors, and refusals
    contents.py                 checks of tensor values, which run under QLA_CHECK=1
    autograd.py                 the torch.autograd.Functions
    ops.py                      the torch operators, and what runs CPU tensors: the reference
    launch/, kernels/           the operators on CUDA tensors: host code and device code
    lengths.py, times.py        chunks of sequences and segments; a model of what kernels take
    plan.py, bands.py           where to cut and which kernel, for lengths that are known or not
    choices.py, cuts.py         which plan a call uses; `segments_of`, which shows it to users
    decode/                     decoding, token by token
    prefill/                    the chunked form on a pool of states
    anchored/                   decoding with the bits of the chunked form
    sharded/                    sequences that are split over ranks
    tree/                       sequences with shared prefixes
"""

from qla_kernels.gdn.anchored.extend import Slots
from qla_kernels.gdn.anchored.pool import GdnPool
from qla_kernels.gdn.api import chunk_gated_delta_rule, chunk_gdn
from qla_kernels.gdn.cuts import Cuts, segments_of
from qla_kernels.gdn.decode.api import fused_recurrent_gated_delta_rule, fused_recurrent_gdn
from qla_kernels.gdn.decode.packed import packed_decode_gated_delta_rule
from qla_kernels.gdn.decode.validate import recurrent_refusal
from qla_kernels.gdn.decode.verify import verify_gated_delta_rule
from qla_kernels.gdn.low_level import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from qla_kernels.gdn.prefill.api import prefill_gated_delta_rule, prefill_refusal
from qla_kernels.gdn.sharded.context import CPContext, ShardError, build_cp_context
from qla_kernels.gdn.validate import refusal, wants_gradients

__all__ = [
    "CPContext",
    "Cuts",
    "GdnPool",
    "ShardError",
    "Slots",
    "build_cp_context",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "packed_decode_gated_delta_rule",
    "prefill_gated_delta_rule",
    "prefill_refusal",
    "recurrent_refusal",
    "refusal",
    "segments_of",
    "verify_gated_delta_rule",
    "wants_gradients",
]
