"""One list of fields: what a call passes on, and what follows from it."""

import inspect
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from qla_kernels.gdn import api, keywords, low_level, ops
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.decode import api as decode_api
from qla_kernels.gdn.plan import EXACT_LOG_BOUND, WARM_LOG_BOUND
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.op import schema
from tests import zygote
from tests.gdn_calls import call

RECORDS = (Call, SavedForward, Incoming, Options)
# options that only one direction alone has, or that follow from the call
INTERNAL = {"output_h", "is_train", "auto_cp"}
KEYWORDS = {"enable_fwd_cp_cache", "warm_log_bound"}  # of FLA's **kwargs


def test_a_schema_follows_from_the_fields():
    assert schema({"incoming": Incoming}, torch.Tensor, {}) == (
        "(Tensor do, Tensor? dht, bool output_dh0) -> Tensor"
    )
    for op, records in (("gdn_fwd", (Call, Options)), ("gdn_bwd", RECORDS)):
        names = [x.name for x in getattr(torch.ops.qla_kernels, op).default._schema.arguments]
        assert names == [name for record in records for name in record._fields]


def test_a_type_without_a_place_in_schemas_is_refused():
    class Odd(NamedTuple):
        x: dict

    with pytest.raises(KeyError):
        schema({"odd": Odd}, torch.Tensor, {})


@pytest.mark.parametrize(
    ("function", "without"),
    [
        (api.chunk_gated_delta_rule, INTERNAL | KEYWORDS),
        (low_level.chunk_gated_delta_rule_fwd, {"use_qk_l2norm_in_kernel"}),
        (decode_api.fused_recurrent_gated_delta_rule, INTERNAL | KEYWORDS),
    ],
)
def test_every_option_is_an_argument(function, without):
    arguments = inspect.signature(function).parameters
    assert set(Options._fields) - set(arguments) == without
    if function is api.chunk_gated_delta_rule:
        assert all(name in inspect.getdoc(function) for name in KEYWORDS)


@pytest.mark.parametrize("name", sorted({*Options._fields} - INTERNAL - KEYWORDS))
def test_every_flag_reaches_the_operator(name, monkeypatch):
    heard = []
    monkeypatch.setattr(
        ops.gdn_fwd, "on_cpu", lambda call, options: heard.append(options) or _done(call)
    )
    x = call(sizes=(8, 8))
    flags = {"use_beta_sigmoid_in_kernel": True} if name == "allow_neg_eigval" else {}
    api.chunk_gated_delta_rule(**x, **flags, **{name: True})
    assert heard[0] == Options(**flags, **{name: True})


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariant_reaches_both_directions(invariant, monkeypatch):
    heard = []
    for name in ("gdn_fwd", "gdn_bwd"):
        operator = getattr(ops, name)
        run = operator.on_cpu
        told = lambda *given, run=run: heard.append(given[-1].auto_cp) or run(*given)  # noqa: E731
        monkeypatch.setattr(operator, "on_cpu", told)
    x = call(sizes=(8, 8))
    x["v"].requires_grad_()
    api.chunk_gated_delta_rule(**x, batch_invariant=invariant)[0].sum().backward()
    assert heard == [not invariant] * 2


@pytest.mark.parametrize(
    ("switch", "given", "option", "value"),
    [
        ("EXACT_BY_DEFAULT", {}, "warm_log_bound", EXACT_LOG_BOUND),
        ("EXACT_BY_DEFAULT", {"exact": False}, "warm_log_bound", WARM_LOG_BOUND),
        ("EXACT_BY_DEFAULT", {"warm_log_bound": -3.0}, "warm_log_bound", -3.0),
        ("INVARIANT_BY_DEFAULT", {}, "auto_cp", False),
        ("INVARIANT_BY_DEFAULT", {"batch_invariant": False}, "auto_cp", True),
    ],
    ids=str,
)
def test_the_environment_says_what_a_call_does_not(switch, given, option, value, monkeypatch):
    heard = []
    monkeypatch.setattr(
        ops.gdn_fwd, "on_cpu", lambda call, options: heard.append(options) or _done(call)
    )
    monkeypatch.setattr(keywords, switch, True)
    api.chunk_gated_delta_rule(**call(sizes=(8, 8)), **given)
    assert heard[0] == Options(**{option: value})


def test_the_environment_is_read_at_import():
    said = "from qla_kernels.gdn.keywords import *; print(EXACT_BY_DEFAULT, INVARIANT_BY_DEFAULT)"
    env = os.environ | {"QLA_EXACT": "0", "QLA_BATCH_INVARIANT": "1"}
    root = Path(__file__).parents[2]
    done = zygote.run(said, cwd=root, path=str(root), env=env)
    assert done.stdout == "False True\n"


def test_batch_invariant_over_ranks_is_refused():
    with pytest.raises(Unsupported, match="batch_invariant with cp_context; need sequences that"):
        api.chunk_gated_delta_rule(
            **call(batch=1, sizes=(8, 8)), batch_invariant=True, cp_context=object()
        )


def _done(given: Call) -> ops.GdnForward:
    return ops.GdnForward(given.v, given.initial_state, None, None, None, [])
