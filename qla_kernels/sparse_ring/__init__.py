"""Sparse ring attention: vertical-slash masks over sequences that several ranks hold.

Reading order:

    api.py                           the public functions
    patterns.py, layouts.py          their arguments: the mask; the assignment of tokens to ranks
    build.py, select.py, index.py    selection of a mask's lines, and their form as tensors
    plan.py                          tables from which a launch finds its blocks
    ring.py, route.py, gradients.py  order of the launches, and of the transfers between ranks
    groups.py                        process groups, transfers, errors of lost ranks
    agreement.py, call.py            comparison of a call between ranks, before any transfer
    shard.py                         interface of the launches
    cpu*.py, launch*.py, kernels/    the launches for CPU tensors and for GPUs

balance.py is a simulator: it reports how evenly a mask's work is spread over ranks.
"""

from qla_kernels.sparse_ring.api import build_index, sparse_attention, sparse_ring_attention
from qla_kernels.sparse_ring.balance import Balance, balance_report
from qla_kernels.sparse_ring.groups import RingError, RingGroups
from qla_kernels.sparse_ring.index import VSIndex
from qla_kernels.sparse_ring.layouts import ContiguousLayout, StripedLayout, ZigZagLayout
from qla_kernels.sparse_ring.patterns import PAPER, Dense, FixedVerticalSlash, VerticalSlash
from qla_kernels.sparse_ring.validate import refusal

__all__ = [
    "PAPER",
    "Balance",
    "ContiguousLayout",
    "Dense",
    "FixedVerticalSlash",
    "RingError",
    "RingGroups",
    "StripedLayout",
    "VSIndex",
    "VerticalSlash",
    "ZigZagLayout",
    "balance_report",
    "build_index",
    "refusal",
    "sparse_attention",
    "sparse_ring_attention",
]
