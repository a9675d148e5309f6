"""Sparse ring attention: vertical-slash masks over sequences that several ranks hold.

Reading order: api.py (what a call means), patterns.py and layouts.py (what it is given), build.py,
select.py and index.py (which lines), plan.py (how a launch finds its blocks), ring.py, route.py and
gradients.py (who sends what when), groups.py (over which groups, and what if a rank is lost),
agreement.py and call.py (what ranks compare first), then cpu.py (what runs). balance.py simulates
how evenly work is spread.
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
