"""The CUDA backward of shared-prompt attention, emulated: launch.dualkv_bwd on CPU tensors."""

import pytest
import torch

from qla_kernels import SharedLayout
from qla_kernels.dualkv import launch, tables
from qla_kernels.dualkv.kernels.bwd_dkv import Variant
from qla_kernels.dualkv.ops import Backward
from tests.dualkv_backward_check import Upstream, check, upstream
from tests.dualkv_forward_check import FOREST, GROUPS, Call, call

pytestmark = pytest.mark.usefixtures("seeds", "poison")

# Both dtypes and both sizes; the static tier assembles the other two.
VARIANTS = (Variant("bfloat16", 128), Variant("float16", 64))


def backward(x: Call, given: Upstream) -> Backward:
    q, k, v, *rest = x.arguments()
    return launch.dualkv_bwd(
        given.do, q, k, v, given.o, given.lse2, given.dlse, *rest, deterministic=True
    )


def same(got: Backward, want: Backward) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_groups(variant, groups):
    x = call(GROUPS[groups], size=variant.D, dtype=getattr(torch, variant.dtype))
    given = upstream(x, with_dlse=groups != "short")
    check(x, given, backward(x, given))


@pytest.mark.parametrize("seed", range(6))
def test_interleavings(seeds, seed):
    seeds["seed"] = seed
    x = call(SharedLayout.from_forest(*FOREST))
    given = upstream(x)
    check(x, given, backward(x, given))


@pytest.mark.parametrize("group", [1, 2, 3, 6, 8, 16])
def test_query_heads_of_a_key_head(seeds, group):
    """Beyond four they take turns, at a run that begins inside a tile."""
    seeds["seed"] = group
    x = call([(130, [20, 7])], heads=(1 + (group == 1), group * (1 + (group == 1))))
    given = upstream(x)
    check(x, given, backward(x, given))


def test_runs_in_parts(monkeypatch):
    """Sums of parts: not those of the whole bit for bit, but as close to the truth."""
    monkeypatch.setattr(tables, "SHORTEST_PART", 3)
    x = call([(150, [70, 3]), (20, [9])], heads=(2, 4))
    splits = tables.Tables(*x.arguments()[3]).split
    assert splits[:, 3].max() > 2, "nothing much is split; the test is wrong"
    given = upstream(x)
    check(x, given, backward(x, given))


def test_queries_of_the_responses_alone():
    """No query sees the keys of a node that ends before q_shift: their gradients are zeros."""
    whole = call([(140, [33, 5, 70])], heads=(1, 2))
    x = whole._replace(q=whole.q[140:], q_shift=140)
    given = upstream(x)
    check(x, given, backward(x, given))


@pytest.mark.parametrize("changed", [{"spread": 30.0}, {"spread": 0.0}, {"scale": 0.5}], ids=str)
def test_scores_of_any_size(changed):
    """Far apart, so that a row is one key and hidden scores overflow; all equal; a scale."""
    x = call([(150, [30])], **changed)
    given = upstream(x)
    check(x, given, backward(x, given))


def test_strides_are_taken_as_they_are():
    """Slices of one projection, as a model makes them; head after head; dO of a sum."""
    x = call([(40, [33])])
    given = upstream(x)
    given = given._replace(do=given.do[:1, :1].expand(x.q.shape))
    fused = torch.cat([x.q, x.k, x.v], 1)
    sliced = x._replace(**dict(zip("qkv", fused.split([4, 1, 1], 1), strict=True)))
    want = backward(x, given._replace(do=given.do.contiguous()))
    assert same(backward(sliced, given), want)
    head_major = given._replace(
        do=given.do.transpose(0, 1).contiguous().transpose(0, 1), dlse=given.dlse.T.contiguous().T
    )
    assert same(backward(x, head_major), want)


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_nan_in_a_response_stays_there(name):
    """It reaches what the response has a part in: itself and the keys of its prompt."""
    groups = [(150, [20, 40, 9]), (5, [7])]
    x = call(groups)
    given = upstream(x)
    clean = backward(x, given)
    (given.do if name == "do" else getattr(x, name))[170:210] = torch.nan
    if name != "do":  # as the forward leaves them
        given.o[170:210] = torch.nan
        given.lse2[:, 170:210] = torch.nan
    done = backward(x, given)
    others = [*range(150, 170), *range(210, 231)]
    for a, b in zip(done, clean, strict=True):
        assert torch.equal(a[others], b[others])
    assert torch.equal(done.dq[:150], clean.dq[:150])
    assert done.dk[:150].isnan().any()
    assert done.dq[209].isnan().any()


def test_nothing_to_do():
    for groups in ([], [(0, [0])]):
        x = call(groups)
        done = backward(x, upstream(x))
        assert [len(t) for t in done] == [0, 0, 0]
