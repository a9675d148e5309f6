"""The zigzag layout of sequences over ranks: 2, 3 and 4 processes over gloo; contexts, refusals."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import build_cp_context
from qla_kernels.gdn.sharded.gathered import folded, lines, signatures, signed
from qla_kernels.gdn.sharded.layouts import Stretch
from tests.gdn_calls import Call, call, gradients, leaves
from tests.gdn_zigzag_ranks import LENGTHS, lengths_of
from tests.ranks import WORLD, start

LIMITS = {
    **dict.fromkeys((*LENGTHS, "random", "short", "FLA's context"), 1e-10),
    "fp32": 2e-5,  # a token's state sums 480 products, each rounded to 6e-8: at most 3e-5
}
REFUSED = {
    "layout": "layout is zigzag on rank 0 and contiguous on rank 2",
    "other bounds": "3 stretches after stretch 1 and 2 before stretch 2 hold the sequence between",
    "place": "cp_context with 3 stretches before and 2 behind stretch 2 of 8; need at most 2 and 5",
    "front": "front_num_seqs 0 and 2 sequences; need at least one sequence in either stretch",
    "pairs": "ranks by part [2, 0] and [1]; need one number for each of two stretches",
    "half a pair": "cp_context without pre_num_ranks_by_part; need what FLA's build_cp_context",
    "missing": "cp_context without part_len",
    "length": "120 tokens, and cp_context says that 100 are here; need this rank's tokens",
    "front's end": "whose first 1 sequences end at token 50; need the first stretch's end, 60",
    "whole batch": "480 tokens, and cp_context says that 120 are here; need this rank's tokens",
}
COMPARED = ("layout", "other bounds")  # neither is wrong by itself


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return start("tests.gdn_zigzag_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", LIMITS)
def test_ranks_are_one(said, case, world):
    errors = [rank.get(f"{case}, {world} ranks", rank.get("no end")) for rank in said[:world]]
    assert all(isinstance(e, float) and e < LIMITS[case] for e in errors), errors


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(said, case):
    assert len(said) == WORLD
    for n, rank in enumerate(said):
        text = rank[f"refused {case}"]
        assert text.startswith("ValueError: ")
        assert REFUSED[case] in text
        if case not in COMPARED:  # the one that knows says it to the others
            assert ("rank 2: " in text) == (n != 2)


def test_ranks_go_on_after_an_error(said):
    assert [rank["refused nothing"] for rank in said] == [None] * WORLD


def test_each_layout_is_compared_once(said):
    """As on GPUs, where batches change and layouts take turns."""
    for rank in said:
        assert rank["changing"] < 1e-10
        assert rank["exchanges"] == 2


@pytest.mark.parametrize("case", ["mixed scale", "mixed line", "a backward"])
def test_what_is_mixed_after_it_was_agreed_on_is_an_error(said, case):
    """On each rank: every one has a stretch behind those of rank 2."""
    for rank in said:
        assert rank[case].startswith("RankError: cp_context: the link of rank "), rank[case]
        assert rank["afterwards"] is None


@pytest.fixture
def at(monkeypatch):
    """Makes this process a rank of a group."""

    def place(rank: int, world: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)

    return place


@pytest.mark.parametrize("world", [1, 2, 3])
def test_contexts_say_where_sequences_lie(at, world):
    """Counted token by token."""
    for seed in range(60):
        lengths = lengths_of(seed, 12)
        of_token = [n for n, length in enumerate(lengths) for _ in range(length)]
        size = 12 // (2 * world)
        stretches = [of_token[i : i + size] for i in range(0, 12, size)]
        for rank in range(world):
            at(rank, world)
            numbers = (rank, 2 * world - 1 - rank)
            found = build_cp_context(torch.tensor([0, *lengths]).cumsum(0), layout="zigzag")
            cuts = [0]
            for number in numbers:
                cuts += [len(list(its)) for _, its in itertools.groupby(stretches[number])]
            assert found.cu_seqlens.tolist() == list(itertools.accumulate(cuts))
            assert (found.part_len, found.layout) == (size, "zigzag")
            assert found.front_num_seqs == len(set(stretches[rank]))
            for i, number in enumerate(numbers):
                begin, end = stretches[number][0], stretches[number][-1]
                before = sum(begin in other for other in stretches[:number])
                after = sum(end in other for other in stretches[number + 1 :])
                assert found.pre_num_ranks_by_part[i] == before
                assert found.post_num_ranks_by_part[i] == after
                assert found.is_first_by_part[i] == (before == 0)
                assert found.is_last_by_part[i] == (after == 0)
            assert found.pre_num_ranks is found.is_last_rank is None


@pytest.mark.libraries
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_contexts_are_those_of_an_installed_fla(at, layout):
    theirs = pytest.importorskip("fla.ops.cp.context", exc_type=ImportError)
    if not hasattr(theirs.FLACPContext, "layout"):
        pytest.skip("this FLA is older than 0.6 and has one layout")
    names = ("pre_num_ranks", "post_num_ranks", "is_first_rank", "is_last_rank", "layout",
        "part_len", "front_num_seqs", "pre_num_ranks_by_part", "post_num_ranks_by_part",
        "is_first_by_part", "is_last_by_part")  # fmt: skip
    for seed in range(60):
        bounds = torch.tensor([0, *lengths_of(seed, 24)]).cumsum(0)
        for world, rank in ((2, 0), (2, 1), (3, 1), (3, 2)):
            at(rank, world)
            ours = build_cp_context(bounds, layout=layout)
            want = theirs.get_cp_cu_seqlens(bounds, world_size=world, rank=rank, layout=layout)
            assert ours.cu_seqlens.tolist() == want.cu_seqlens.tolist()
            assert {n: getattr(ours, n) for n in names} == {n: getattr(want, n) for n in names}


def test_contexts_that_cannot_be(at):
    at(0, 2)
    bounds = torch.tensor([0, 70])
    with pytest.raises(ValueError, match="layout 'striped'; need 'contiguous' or 'zigzag'; build"):
        build_cp_context(bounds, layout="striped")
    text = "70 tokens for 2 ranks in the zigzag layout; need a multiple of 4; pad the last sequence"
    with pytest.raises(ValueError, match=text):
        build_cp_context(bounds, layout="zigzag")


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def alone_in_zigzag(lengths: list[int]) -> Call:
    x = call(lengths, activations=True)
    del x["initial_state"]
    return {**x, "cp_context": build_cp_context(x.pop("cu_seqlens"), layout="zigzag")}


def test_a_rank_is_its_own_neighbour_in_a_compiled_graph(alone):
    x = alone_in_zigzag([20, 70, 50])

    def layer(x: Call) -> tuple[torch.Tensor, None]:
        return chunk_gated_delta_rule(**x)

    eager, traced = leaves(x), leaves(x)
    want, got = layer(eager), torch.compile(layer, fullgraph=True, backend="aot_eager")(traced)
    assert torch.equal(got[0], want[0])
    got_grads, want_grads = gradients(got, traced), gradients(want, eager)
    assert all(torch.equal(got_grads[n], want_grads[n]) for n in want_grads)


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=str)
def test_ranks_without_a_token(alone, lengths):
    x = leaves(alone_in_zigzag(lengths))
    result = chunk_gated_delta_rule(**x)
    assert result[0].shape == x["v"].shape
    assert all(dx.shape == x[n].shape and not dx.any() for n, dx in gradients(result, x).items())


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function is torch.ops.aten.baddbmm.default
        return function(*arguments, **(options or {}))


def test_the_states_that_enter_two_stretches_share_what_they_fold():
    """Of four stretches, rank 1 holds 1 and 2: what enters 2 goes on from what enters 1."""
    facts, (HV, V, K) = ("forward",), (2, 3, 4)
    maps = torch.randn(4, HV, V + K, K)
    ranks, passed = [], []
    for r in range(2):  # a sequence that passes through all
        its = [Stretch(n, n + 1, number, 3 - number) for n, number in enumerate((r, 3 - r))]
        ranks.append(signed([maps[r], maps[3 - r]], signatures(facts, its, reverse=False)))
        passed.append(lines(facts, its, r, 2, reverse=False))
    with Products() as seen:
        got = folded(torch.stack(ranks), passed[1], V)
    b, M = maps.split((V, K), 2)
    want = torch.stack([b[0], b[0] @ M[1] + b[1]])
    assert seen.count == 1
    torch.testing.assert_close(got, want)
    alone = folded(torch.stack(ranks), passed[0], V)
    torch.testing.assert_close(alone[1], want[1] @ M[2] + b[2])
    assert not alone[0].any()
