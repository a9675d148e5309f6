"""Warp-specialised Hopper kernels for linear and sparse attention.

    from qla_kernels import chunk_gated_delta_rule

    o, final_state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

CUDA tensors run the kernels and CPU tensors run the reference, under one signature. A call that
this version cannot run raises `Unsupported`; it never falls back to a slower implementation.

Importing this package imports neither torch nor TileLang and touches no GPU: a public name's module
is imported when the name is first used. Environment: QLA_LOG=debug|info|warning|error prints
choices and compiles, QLA_CHECK=1 reads and checks the contents of tensors (slow), QLA_DUMP=folder
keeps generated code.
"""

import importlib
import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qla_kernels import conv, dualkv, gdn, hybrid, integrations, norm, sparse_ring
    from qla_kernels.conv.api import causal_conv1d
    from qla_kernels.conv.update import causal_conv1d_update
    from qla_kernels.dualkv.api import shared_prefix_attention
    from qla_kernels.dualkv.batch import SharedBatch
    from qla_kernels.dualkv.microbatch import plan_microbatches
    from qla_kernels.dualkv.padded import pack_padded
    from qla_kernels.dualkv.plan import SharedLayout
    from qla_kernels.dualkv.prefix_tree import pack_prefix_tree
    from qla_kernels.dualkv.prompts import pack_shared_prompts
    from qla_kernels.gdn.api import chunk_gated_delta_rule, chunk_gdn
    from qla_kernels.gdn.decode.api import fused_recurrent_gated_delta_rule, fused_recurrent_gdn
    from qla_kernels.gdn.decode.packed import packed_decode_gated_delta_rule
    from qla_kernels.gdn.decode.verify import verify_gated_delta_rule
    from qla_kernels.gdn.low_level import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
    from qla_kernels.gdn.prefill.api import prefill_gated_delta_rule
    from qla_kernels.hybrid.conv import shared_prefix_conv1d
    from qla_kernels.hybrid.delta import shared_prefix_gated_delta_rule
    from qla_kernels.hybrid.layer import gated_delta_net
    from qla_kernels.hybrid.step import decode_gated_delta_net
    from qla_kernels.norm.api import gated_rms_norm
    from qla_kernels.runtime.errors import Unsupported
    from qla_kernels.sparse_ring.api import sparse_attention, sparse_ring_attention

__version__ = "0.1.0"

__all__ = [
    "SharedBatch",
    "SharedLayout",
    "Unsupported",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gdn",
    "conv",
    "decode_gated_delta_net",
    "dualkv",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "gated_delta_net",
    "gated_rms_norm",
    "gdn",
    "hybrid",
    "integrations",
    "norm",
    "pack_padded",
    "pack_prefix_tree",
    "pack_shared_prompts",
    "packed_decode_gated_delta_rule",
    "plan_microbatches",
    "prefill_gated_delta_rule",
    "shared_prefix_attention",
    "shared_prefix_conv1d",
    "shared_prefix_gated_delta_rule",
    "sparse_attention",
    "sparse_ring",
    "sparse_ring_attention",
    "verify_gated_delta_rule",
]

_HOME = {
    "SharedBatch": "qla_kernels.dualkv.batch",
    "SharedLayout": "qla_kernels.dualkv.plan",
    "Unsupported": "qla_kernels.runtime.errors",
    "causal_conv1d": "qla_kernels.conv.api",
    "causal_conv1d_update": "qla_kernels.conv.update",
    "chunk_gated_delta_rule": "qla_kernels.gdn.api",
    "chunk_gated_delta_rule_bwd": "qla_kernels.gdn.low_level",
    "chunk_gated_delta_rule_fwd": "qla_kernels.gdn.low_level",
    "chunk_gdn": "qla_kernels.gdn.api",
    "decode_gated_delta_net": "qla_kernels.hybrid.step",
    "fused_recurrent_gated_delta_rule": "qla_kernels.gdn.decode.api",
    "fused_recurrent_gdn": "qla_kernels.gdn.decode.api",
    "gated_delta_net": "qla_kernels.hybrid.layer",
    "gated_rms_norm": "qla_kernels.norm.api",
    "pack_padded": "qla_kernels.dualkv.padded",
    "pack_prefix_tree": "qla_kernels.dualkv.prefix_tree",
    "pack_shared_prompts": "qla_kernels.dualkv.prompts",
    "packed_decode_gated_delta_rule": "qla_kernels.gdn.decode.packed",
    "plan_microbatches": "qla_kernels.dualkv.microbatch",
    "prefill_gated_delta_rule": "qla_kernels.gdn.prefill.api",
    "shared_prefix_attention": "qla_kernels.dualkv.api",
    "shared_prefix_conv1d": "qla_kernels.hybrid.conv",
    "shared_prefix_gated_delta_rule": "qla_kernels.hybrid.delta",
    "sparse_attention": "qla_kernels.sparse_ring.api",
    "sparse_ring_attention": "qla_kernels.sparse_ring.api",
    "verify_gated_delta_rule": "qla_kernels.gdn.decode.verify",
}
_FAMILIES = ("conv", "dualkv", "gdn", "hybrid", "norm", "sparse_ring")


def __getattr__(name: str) -> object:
    if name in _FAMILIES or name == "integrations":
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _log_to_stderr(level: str) -> None:
    """Adds a stderr handler to the package's logger and sets its level, for QLA_LOG.

    An unknown level counts as info and logs a warning.
    """
    log = logging.getLogger(__name__)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    log.addHandler(handler)
    log.propagate = False  # a root handler would print each line again
    known = level.upper() in ("DEBUG", "INFO", "WARNING", "ERROR")
    log.setLevel(level.upper() if known else logging.INFO)
    if not known:
        log.warning("QLA_LOG=%s; need debug, info, warning or error; using info", level)


# Of the environment; README.md says what each does.
VARIABLES = (
    "QLA_BATCH_INVARIANT", "QLA_CHECK", "QLA_CHECK_PROGRAMS", "QLA_DUMP", "QLA_EXACT", "QLA_LOG",
    "QLA_PREBUILT", "QLA_PROGRAMS",
)  # fmt: skip

if os.environ.get("QLA_LOG"):
    _log_to_stderr(os.environ["QLA_LOG"])
for _name in os.environ:
    if _name.startswith("QLA_") and _name not in VARIABLES:
        _known = ", ".join(VARIABLES)
        logging.getLogger(__name__).warning("%s is unknown; there are %s", _name, _known)
