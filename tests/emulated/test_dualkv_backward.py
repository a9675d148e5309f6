"""The CUDA backward of shared-prompt attention, emulated: launch.dualkv_bwd on CPU tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qla_kernels import SharedLayout
from qla_kernels.lab.selftest.dualkv_backward import backward, check, upstream
from qla_kernels.lab.selftest.dualkv_forward import FOREST, SharedCall, call
from tests.compare import assert_close

pytestmark = pytest.mark.usefixtures("seeds", "poison")


class Form(NamedTuple):
    deterministic: bool
    dtype: torch.dtype
    size: int


# One pass, and two; each in one dtype and size, as building a kernel takes longer than all its
# calls. The static tier assembles the others, the device tier calls them.
ONE_PASS = Form(False, torch.bfloat16, 128)
TWO_PASSES = Form(True, torch.float16, 64)
WIDE = Form(False, torch.bfloat16, 256)  # it has two passes alone
IDS = {ONE_PASS: "one-pass", TWO_PASSES: "two-passes", WIDE: "wide"}
FORMS = pytest.mark.parametrize("form", IDS, ids=IDS.values())


def forms(name: str, values: Sequence[Any], of_wide: Sequence[Any]) -> pytest.MarkDecorator:
    """Returns every form with each of the values; WIDE, whose calls take longest, with fewer."""
    return pytest.mark.parametrize(
        ("form", name),
        [
            pytest.param(form, value, id=f"{IDS[form]}-{value}")
            for form in IDS
            for value in (of_wide if form is WIDE else values)
        ],
    )


def made(form: Form, layout: Any, *heads: tuple[int, int], **others: Any) -> SharedCall:
    return call(layout, *heads, size=form.size, dtype=form.dtype, **others)


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@forms("seed", range(6), of_wide=[0])
def test_interleavings(seeds, seed, form):
    seeds["seed"] = seed
    x = made(form, SharedLayout.from_forest(*FOREST))
    given = upstream(x)
    check(x, given, backward(x, given, form.deterministic))


@forms("group", [1, 2, 3, 6, 8, 16], of_wide=[1, 8])
def test_query_heads_of_a_key_head(seeds, group, form):
    """Beyond four they take turns, at a run that begins inside a tile."""
    seeds["seed"] = group
    x = made(form, [(130, [20, 7])], (1 + (group == 1), group * (1 + (group == 1))))
    given = upstream(x)
    check(x, given, backward(x, given, form.deterministic))


@FORMS
def test_queries_of_the_responses_alone(form):
    """No query sees the keys of a node that ends before q_shift: their gradients are zeros."""
    whole = made(form, [(140, [33, 5, 70])], (1, 2))
    x = whole._replace(q=whole.q[140:], q_shift=140)
    given = upstream(x)
    check(x, given, backward(x, given, form.deterministic))


@forms("changed", [{"spread": 30.0}, {"spread": 0.0}, {"scale": 0.5}], of_wide=[{"spread": 30.0}])
def test_scores_of_any_size(form, changed):
    """Far apart, so that a row is one key and hidden scores overflow; all equal; a scale."""
    x = made(form, [(150, [30])], **changed)
    given = upstream(x)
    check(x, given, backward(x, given, form.deterministic))


@pytest.mark.parametrize("form", [TWO_PASSES, WIDE], ids=["two-passes", "wide"])
def test_strides_are_taken_as_they_are(form):
    """Slices of one projection, as a model makes them; head after head; dO of a sum."""
    x = made(form, [(40, [33])])
    given = upstream(x)
    given = given._replace(do=given.do[:1, :1].expand(x.q.shape))
    fused = torch.cat([x.q, x.k, x.v], 1)
    sliced = x._replace(**dict(zip("qkv", fused.split([4, 1, 1], 1), strict=True)))
    want = backward(x, given._replace(do=given.do.contiguous()), form.deterministic)
    assert same(backward(sliced, given, form.deterministic), want)
    head_major = given._replace(
        do=given.do.transpose(0, 1).contiguous().transpose(0, 1), dlse=given.dlse.T.contiguous().T
    )
    assert same(backward(x, head_major, form.deterministic), want)


@forms("name", ["q", "k", "v", "do"], of_wide=["k", "do"])
def test_nan_in_a_response_stays_there(form, name):
    """It reaches what the response has a part in: itself and the keys of its prompt."""
    x = made(form, [(150, [20, 40, 9]), (5, [7])])
    given = upstream(x)
    clean = backward(x, given, form.deterministic)
    (given.do if name == "do" else getattr(x, name))[170:210] = torch.nan
    if name != "do":  # as the forward leaves them
        given.o[170:210] = torch.nan
        given.lse2[:, 170:210] = torch.nan
    done = backward(x, given, form.deterministic)
    others = [*range(150, 170), *range(210, 231)]
    assert same([t[others] for t in done[1:]], [t[others] for t in clean[1:]])
    rows = [*range(150), *others]  # whose sums may have been added up in another order
    assert_close("dq", done.dq[rows], clean.dq[rows], 1e-3 if form is ONE_PASS else 0)
    assert done.dk[:150].isnan().any()
    assert done.dq[209].isnan().any()


@FORMS
def test_nothing_to_do(form):
    for groups in ([], [(0, [0])]):
        x = made(form, groups)
        done = backward(x, upstream(x), form.deterministic)
        assert [len(t) for t in done] == [0, 0, 0]
