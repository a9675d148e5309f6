"""Four processes over gloo: every schedule is the definition in fp64, and nobody waits for ever.

One test, because one start of the processes serves all of it, wherever tests are run in parallel.
"""

from datetime import timedelta
from typing import Any

from qla_kernels.sparse_ring.agreement import LOOK_BACK
from tests.ranks import DEADLINE, WORLD, start

Said = list[dict[str, Any]]  # by rank and case

DIFFERENCES = {
    "dtype": "q is torch.float64 (1, 256, 2, 16) on cpu on rank 0 and torch.float32",
    "heads": "k is torch.float64 (1, 256, 1, 16) on cpu on rank 0 and",
    "mixed": "k is torch.float64 (1, 256, 1, 16) on cpu on rank 0 and torch.float32",
    "seqlen": "seqlen is 954 on rank 0 and 5 on rank 2",
    "pattern": "recall_s=0.7",
    "contents": "for 1024 tokens, contents ",
    "layout": "stripe=128) on rank 0 and StripedLayout(world=4, stripe=64) on rank 1",
    "odd q": "q is torch.float64 (1, 256, 2, 16) on cpu on rank 0 and of type str on rank 2",
    "odd seqlen": "seqlen is 954 on rank 0 and x of type str on rank 2",
    "odd scale": "scale is 0.25 on rank 0 and x of type str on rank 2",
    "odd index": "the error of its arguments is None on rank 0 and ValueError: sparse_ring_att",
    "no_grad": "requires_grad is True on rank 0 and False on rank 2",
    "known scale": "scale is 0.3 on rank 0 and 0.5 on rank 1",
}

MOVES = {
    "shape": "(1, 256) on cpu on rank 0 and torch.float32 (1, 128) on cpu on rank 1",
    "dtype": "on cpu on rank 0 and torch.float64 (1, 256) on cpu on rank 1",
    "dim": "dim is 1 on rank 0 and 2 on rank 1",
    "type": "x is torch.float32 (1, 256) on cpu on rank 0 and of type list on rank 1",
    "layout": "stripe=128) on rank 0 and StripedLayout(world=2, stripe=128) on rank 1",
    "stripe": "stripe=128) on rank 0 and StripedLayout(world=4, stripe=64) on rank 1",
}


def test_four_processes(tmp_path):
    said = start("tests.sparse_ring_ranks", tmp_path)
    assert not [r["no end"] for r in said if "no end" in r]
    every_schedule_is_attention(said)
    every_rank_has_the_same_index(said)
    calls_repeat_and_touch_nothing(said)
    shards_become_whole_and_change_layout(said)
    shards_that_do_not_fit_are_an_error_on_every_rank(said)
    known_facts_that_are_mixed_are_an_error_on_every_rank(said)
    a_difference_is_an_error_on_every_rank(said)
    nobody_waits_long_for_one_that_is_not_there(said)


def test_two_processes_within_torch_compile(tmp_path):
    """Dynamo once failed on their transfers, with an error of its own."""
    said = start("tests.sparse_ring_compiled", tmp_path)
    assert not [r["no end"] for r in said if "no end" in r]
    for r in said[:2]:
        assert r == {
            **{f"compiled VerticalSlash {schedule}": True for schedule in ("allgather", "ring")},
            **{f"compiled Dense {schedule}": True for schedule in ("allgather", "ring")},
            "compiled unshard": True,
        }


def every_schedule_is_attention(said: Said) -> None:
    errors = {name: e for r in said for name, e in r.items() if "Layout(" in name}
    assert max(errors.values()) < 1e-12, {n: e for n, e in errors.items() if not e < 1e-12}
    for world in (2, 3, 4):
        for layout in ("Striped", "ZigZag", "Contiguous"):
            for schedule in ("allgather", "ring"):
                done = [n for n in errors if n.startswith(f"{layout}Layout(world={world}")]
                assert [n for n in done if f" {schedule} {world}x1 1" in n], (layout, schedule)
    ways = (
        "double_ring 4x1 1",
        "double_ring 2x2 1",
        "double_ring 1x4 1",
        "ring 4x1 2",
        "allgather 4x1 2",
    )
    for way in (*ways, "double_ring 2x2 2", "stripe=64) double_ring 2x2 1"):
        assert [name for name in errors if way in name], way
    # rounded once, whatever the number of ranks: the bound of a single one
    assert max(r["bf16"] for r in said) < 6e-3


def every_rank_has_the_same_index(said: Said) -> None:
    for name in {name for r in said for name in r if name.startswith("index of a ring")}:
        assert len({r[name] for r in said if name in r}) == 1, name
    assert all(r["index of one rank"] for r in said)


def calls_repeat_and_touch_nothing(said: Said) -> None:
    """The observed queries were once broadcast into a view of q."""
    for r in said:
        assert all(r[f"twice {schedule}"] for schedule in ("allgather", "ring", "double_ring"))
        assert r["untouched"]


def shards_become_whole_and_change_layout(said: Said) -> None:
    assert all(r["unshard"] and r["exchange"] for r in said)


def shards_that_do_not_fit_are_an_error_on_every_rank(said: Said) -> None:
    """The missing half of a whole tensor was once what lay in memory."""
    for op in ("unshard", "exchange"):
        for case, fact in MOVES.items():
            assert len({r[f"{op} {case}"] for r in said}) == 1
            assert said[0][f"{op} {case}"].startswith(f"ValueError: {op}: "), said[0]
            assert fact in said[0][f"{op} {case}"]
    for r in said:
        assert r["unshard to nobody"].startswith(
            "ValueError: unshard: group is of type NoneType; need"
        )
        assert r["moved afterwards"] is None


def known_facts_that_are_mixed_are_an_error_on_every_rank(said: Said) -> None:
    """Facts that had been agreed on were once compared no more."""
    for r in said:
        assert r["known scale afterwards"] is None
        for case in ("mixed and then new", "mixed long ago"):
            text = (
                "RankError: call: rank 3 and rank 0 made different calls before this one; need the"
            )
            assert r[case].startswith(text), r[case]
        assert r["mixed calls ago"] <= 2 * LOOK_BACK
        assert r["mixed afterwards"] is None
        assert r["facts kept"] == 0
        assert r["patterns described"] == 1
    assert len({r["mixed calls ago"] for r in said}) == 1


def a_difference_is_an_error_on_every_rank(said: Said) -> None:
    for case, fact in DIFFERENCES.items():
        assert len({r[case] for r in said}) == 1
        assert said[0][case].startswith("ValueError: sparse_ring_attention: ")
        assert fact in said[0][case]
    assert {r["rings"] for r in said} == {
        "ValueError: RingGroups: the ring is [0, 1, 2, 3] in nodes of 2 on rank 0 and "
        "[0, 1, 2, 3] in nodes of 3 on rank 2; need one ring on all of its ranks; "
        "compare the arguments of ranks 0 and 2"
    }
    (nodes,) = {r["nodes"] for r in said}
    assert nodes.startswith("ValueError: RingGroups: inner_size is 3 for 4 ranks; need a divisor")
    for odd in ("0", "2.0"):
        (nodes,) = {r[f"inner_size {odd}"] for r in said}
        assert nodes.startswith("ValueError: RingGroups: ")
        assert odd in nodes
    assert {r["everybody"] for r in said} == {
        "ValueError: sparse_ring_attention: seqlen is 0; need 1 to 1024, the tokens of the "
        "sequence; pass the number of tokens before the padding"
    }
    assert all(r["positions"].startswith("ValueError: sparse_ring: ") for r in said)
    assert all("token 0 of rank 2 has a wrong position" in r["positions"] for r in said)
    assert [r["right positions"] for r in said] == [None] * WORLD
    assert [r["afterwards"] for r in said] == [None] * WORLD  # the group is as good as before


def nobody_waits_long_for_one_that_is_not_there(said: Said) -> None:
    for r in (said[0], said[1], said[3]):
        assert r["absent"].startswith("RankError: RingGroups: ranks could not compare")
        assert r["absent for"] < 5 * DEADLINE
    for r in (said[0], said[1], said[3]):
        late = f"ranks [2] did not make their ring within {timedelta(seconds=DEADLINE)}"
        assert r["missing"].startswith(f"RankError: RingGroups: {late}")
        assert r["missing for"] < 5 * DEADLINE
    assert "death" not in said[3]
    for r in said[:3]:
        assert r["before a death"] is None
        assert r["death"].startswith("RankError: RingGroups: a transfer between ranks")
        assert r["death for"] < 5 * DEADLINE
