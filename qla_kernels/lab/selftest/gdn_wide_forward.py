"""The forward at K = 256: the cases of solve_score and wide_fwd."""

from typing import Any
from unittest import mock

from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.ops import GdnForward
from qla_kernels.gdn.plan import Plan
from qla_kernels.gdn.times import ForwardChoice
from qla_kernels.lab.selftest.cases import Cases, dtype_of, to
from qla_kernels.lab.selftest.gdn_calls import Call, small
from qla_kernels.lab.selftest.gdn_forward import check, check_saved, forward

# Lengths 0, 1 and around 64, and several chunks; V of one tile and of more
LENGTHS = ([64], [0, 65, 1, 130], [63, 200, 0])


def planned_forward(x: Call, plan: Plan, **changed: Any) -> GdnForward:
    """Runs a forward by this plan."""
    with mock.patch.object(launch, "planned", return_value=(plan, False)):
        return forward(x, **changed)


def whole_forward(x: Call, tile_v: int, **changed: Any) -> GdnForward:
    """Runs a forward of whole sequences whose CTAs compute so many columns of V."""
    return planned_forward(x, Plan(ForwardChoice(tile_v, False), None), **changed)


def _wide_fwd(variant: Any, i: int, device: str) -> None:
    """Checks LENGTHS[i] with that width: every other one without initial state, two in training."""
    V = variant.tile_v * (1 + i % 2)
    x = small(LENGTHS[i], dtype_of(variant), sizes=(variant.K, V))
    if i % 2:
        x["initial_state"] = None
    done = to(whole_forward(to(x, device), variant.tile_v, is_train=i < 2), "cpu")
    check(x, done.o, done.final_state)
    if i < 2:
        check_saved(x, done.g_cum, done.A)


CASES = (
    Cases(
        ("gdn.wide_fwd", "gdn.solve_score"),
        _wide_fwd,
        range(len(LENGTHS)),
        emulated=("bf16-k256-v128", "fp16-k256-v64"),
    ),
)
