"""What a call does once, however often it comes, and does again when it has to."""

import pytest
import torch

from qla_kernels.gdn.kernels import kkt_solve
from qla_kernels.gdn.launch import chunks as launch
from qla_kernels.gdn.launch import tensors
from qla_kernels.gdn.lengths import sequence_chunks


def test_a_schedule_is_made_once(monkeypatch):
    made, schedule = [], kkt_solve.schedule
    monkeypatch.setattr(kkt_solve, "schedule", lambda v: made.append(v) or schedule(v))
    launch._ctas_per_sm.cache_clear()
    variant = kkt_solve.VARIANTS[0]
    ctas = schedule(variant).ctas_per_sm
    for chunks, heads in ((1000, 2), (1000, 4), (3, 2)) * 2:
        want = max(1, min(chunks, ctas * 132 // heads))
        assert launch.walkers(variant, chunks, heads, 132) == want
    assert made == [variant]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plans_of_bounds_go_by_their_numbers(dtype, monkeypatch):
    """Not by the tensor: it may be written to."""
    planned = []
    monkeypatch.setattr(
        tensors, "sequence_chunks", lambda *x: planned.append(x) or sequence_chunks(*x)
    )
    tensors._chunks_between.cache_clear()
    bounds = torch.tensor([0, 64, 300, 300], dtype=dtype)
    want = sequence_chunks(3, 300, [64, 236, 0])
    column = torch.stack([bounds, bounds + 1], 1)[:, 0]
    for same in (bounds, bounds.clone(), column):
        assert tensors.chunks_of(3, 300, same) == want
    assert len(planned) == 1
    bounds[1] = 128
    assert tensors.chunks_of(3, 300, bounds) == sequence_chunks(3, 300, [128, 172, 0])
    assert tensors.chunks_of(3, 300, None) == sequence_chunks(3, 300)
    tensors._chunks_between.cache_clear()


def test_rows_in_reach_of_one_launch():
    def rows(step: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device="meta").as_strided((2, 9, 4), (step, 4, 1))

    near, far = rows((1 << 30) - 8), rows(1 << 30)
    assert tensors.parts_in_reach(near, near) == [tensors.WHOLE]
    assert tensors.parts_in_reach(near, far) == [slice(0, 1), slice(1, 2)]
    assert tensors.parts_in_reach(rows((1 << 28) - 1, torch.float64)) == [tensors.WHOLE]
    assert len(tensors.parts_in_reach(rows(1 << 28, torch.float64))) == 2


def test_single_tokens_flatten_as_far_as_a_launch_reaches():
    for step, flat in ((1 << 29, True), (1 << 30, False)):
        x = torch.empty(0, dtype=torch.bfloat16, device="meta").as_strided(
            (2, 1, 4, 64), (step, step, 64, 1)
        )
        assert tensors.flattens(x) == flat
        assert tensors.flattens(x[:1])


def test_bounds_of_many_lengths_are_one_table():
    made = set()
    for B in (1, 2, 3, 8, 32, tensors.BOUNDS + 5):
        for T in (1, 63, 64, 1000, 4095, 4096, 4097, 70000):
            x = torch.empty(1).expand(B, T, 4)
            bounds = tensors.sequence_bounds(x, None)
            assert bounds.is_contiguous()
            assert bounds.data_ptr() % 16 == 0
            if B * T < 1 << 31:
                assert torch.equal(bounds, T * torch.arange(B + 1, dtype=torch.int32))
            made.add((B, bounds.untyped_storage().data_ptr()))
    assert sum(B == 1 for B, _ in made) == 2  # of 16384 lengths each
