"""Ranks with the kernels: every schedule is the definition, and nobody waits for ever.

A process a GPU over NCCL, and four that share one GPU, whose tensors cross through host memory.
One test each, because one start of the processes serves all of it.
"""

from typing import Any

import pytest
import torch

from tests.ranks import launched, start
from tests.sparse_ring_gpus import DEADLINE

pytestmark = pytest.mark.hopper

Said = list[dict[str, Any]]  # by rank and case

LIMITS = {"o": 5e-3, "dq": 1e-2, "dk": 1e-2, "dv": 1e-2, "lse": 1e-3}  # of any number of ranks
MORE = 1.2  # times the error of one GPU: partial results are fp32 on their way


@pytest.mark.timeout(120)
def test_four_processes_on_one_gpu(tmp_path):
    said = start("tests.sparse_ring_one_gpu", tmp_path)
    assert not [r["no end"] for r in said if "no end" in r]
    every_schedule_is_attention(said)
    every_rank_has_the_same_index(said)


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
def test_a_process_for_each_gpu(tmp_path):
    world = min(torch.cuda.device_count(), 8)
    said, codes = launched("tests.sparse_ring_gpus", tmp_path, world)
    assert not [r["no end"] for r in said if "no end" in r]
    every_schedule_is_attention(said)
    every_rank_has_the_same_index(said)
    calls_repeat_and_wait_for_nothing(said)
    a_difference_is_an_error_on_every_rank(said)
    a_mix_of_known_calls_is_an_error_on_every_rank(said)
    a_graph_of_torch_compile_ends_there(said)
    nobody_waits_long_for_one_that_is_not_there(said)
    assert codes[-1] == 0
    assert None not in codes, "a rank waits for a dead one"
    assert 0 not in codes[:-1], "a rank did not see that one is dead"


def every_schedule_is_attention(said: Said) -> None:
    for r in said:
        ways = {name: e for name, e in r.items() if "Layout(" in name}
        assert len(ways) >= 9
        for name, found in {**ways, "one GPU": r["one GPU"]}.items():
            for (tensor, limit), error, alone in zip(
                LIMITS.items(), found, r["one GPU"], strict=True
            ):
                assert error < limit, (name, tensor)
                assert error < MORE * alone + 1e-4, (name, tensor, alone)


def every_rank_has_the_same_index(said: Said) -> None:
    names = {name for r in said for name in r if name.startswith("index")}
    assert names
    for name in names:
        assert len({r[name] for r in said}) == 1, name


def calls_repeat_and_wait_for_nothing(said: Said) -> None:
    for r in said:
        assert r["again allgather"]
        assert r["again ring"]
        assert r["untouched"]
        assert r["unshard"]
        assert r["sync"] is None
        # across numbers of ranks an LSE may differ in its last bit, and so a line at the very edge
        assert r["diagonals that one GPU chooses otherwise"] <= 1


def a_difference_is_an_error_on_every_rank(said: Said) -> None:
    for case, fact in (
        ("dtype", "q is torch.bfloat16"),
        ("seqlen", "seqlen is "),
        ("layout", "StripedLayout"),
    ):
        assert len({r[case] for r in said}) == 1
        assert said[0][case].startswith("ValueError: sparse_ring_attention: ")
        assert fact in said[0][case]
        assert "on rank 1" in said[0][case]
    assert [r["afterwards"] for r in said] == [None] * len(said)


def a_mix_of_known_calls_is_an_error_on_every_rank(said: Said) -> None:
    for r in said:
        assert r["unmixed"] is None
        assert r["mixed"].startswith("RankError: sparse_ring_attention: rank ")
        assert "made different calls before this one" in r["mixed"]
        assert r["mixed afterwards"] is None
        assert r["unshard of another shape"].startswith(
            "ValueError: unshard: x is torch.bfloat16 ("
        )


def a_graph_of_torch_compile_ends_there(said: Said) -> None:
    for r in said:
        compiled = [same for name, same in r.items() if name.startswith("compiled")]
        assert compiled == [True] * 4


def nobody_waits_long_for_one_that_is_not_there(said: Said) -> None:
    for r in said[:-1]:
        assert r["absent"].startswith("RankError: RingGroups: ranks could not compare")
        assert r["absent for"] < 5 * DEADLINE
