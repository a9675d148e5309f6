"""The named sets of every family, and the sets of a run that names none."""

from typing import Any

from .attention.workloads import DUALKV, SPARSE_RING
from .conv.workloads import CONV
from .gdn.workloads import GDN
from .harness.records import Run
from .hybrid.workloads import HYBRID
from .model.workloads import MODEL
from .serving.workloads import SERVING

SETS: dict[str, dict[str, tuple[Any, ...]]] = {
    "gdn": {**GDN, **SERVING}, "conv": dict(CONV), "dualkv": dict(DUALKV),
    "sparse_ring": dict(SPARSE_RING), "hybrid": dict(HYBRID), "model": dict(MODEL),
}  # fmt: skip
DEFAULT = {
    "gdn": ("forward", "backward", "short"), "conv": ("packs", "trees"),
    "dualkv": ("long", "short"), "sparse_ring": ("anchor",), "hybrid": ("block", "parts"),
    "model": ("training",),
}  # fmt: skip
QUICK = {
    "gdn": ("anchors",), "conv": ("packs", "trees"), "dualkv": ("long",),
    "sparse_ring": ("anchor",), "hybrid": ("block",), "model": ("training",),
}  # fmt: skip


def sets_of(run: Run) -> list[str]:
    """The sets that a run's rows are of: few, and each as far as possible in the run."""
    found, left = list[str](), {row.name for row in run.rows}
    sets = {n: {w.name for w in of} for n, of in SETS.get(run.family, {}).items()}
    while sets:
        best = max(sets, key=lambda n: len(sets[n] & left) ** 2 / len(sets[n]))
        if not sets[best] & left:
            break
        found.append(best)
        left -= sets[best]
    return found
