"""Who computes the workloads of each family."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from .harness.adapters import Implementation


def known(family: str) -> list[Implementation]:
    """All, ours first. Modules of other families are not imported."""
    folder = family if family in ("gdn", "conv", "hybrid", "model") else "attention"
    rivals = importlib.import_module(f".{folder}.rivals", __package__)
    found: list[Implementation] = rivals.known(family)
    if family != "gdn":
        return found
    ours, *serving = on_pools()
    return [ours, *found, *serving]


def on_pools() -> list[Implementation]:
    """Those of gdn that are timed on pools of states."""
    rivals = importlib.import_module(".serving.rivals", __package__)
    found: list[Implementation] = rivals.known()
    return found


def names_for(family: str, workloads: Sequence[Any]) -> list[str]:
    """Who is timed on these workloads where nobody is named: engines are, on pools of states."""
    everyone = [i.name for i in implementations(family)]
    served = [workload.served for workload in workloads]
    if not any(served):
        return everyone
    kinds = {workload.kind for workload in workloads if workload.served}
    serving = [i.name for i in on_pools() if kinds & {*i.serves}]
    return [*dict.fromkeys([*([] if all(served) else everyone), *serving])]


def implementations(family: str, names: Sequence[str] = ()) -> list[Implementation]:
    """The family's implementations, or those of the given names; an unknown name is an error."""
    by_name = {implementation.name: implementation for implementation in known(family)}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        need = f"need some of {', '.join(by_name)}"
        if family == "gdn" and not torch.cuda.is_available():
            need += "; on a machine with a GPU also of ours_whole and other variants of ours"
        raise ValueError(f"--impl {','.join(unknown)} of {family}; {need}")
    return [by_name[name] for name in names or by_name if names or not by_name[name].on_request]
