"""A convolution and a gated delta net whose tokens are spread over ranks: losses of a training."""

import pytest
import torch.distributed as dist

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import build_cp_context
from tests.compare import relative_l2
from tests.gdn_calls import call
from tests.ranks import start


def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path):
    ranks = start("tests.layer_ranks", tmp_path)
    losses = {world: ranks[0][str(world)] for world in (1, 2, 4)}
    assert len(losses[1]) == 5
    assert losses[1] == sorted(losses[1], reverse=True)
    for world in (2, 4):  # a wrong convolution, or its lost gradient, changes them by 5e-5 and more
        assert losses[world] == pytest.approx(losses[1], rel=5e-6)
        assert all(rank[str(world)] == losses[world] for rank in ranks[:world])


@pytest.mark.parametrize(("layout", "tolerance"), [("contiguous", 0.0), ("zigzag", 1e-12)])
def test_the_part_of_a_single_rank_is_all(layout, tolerance):
    """Zigzag gives one rank two stretches, which pass a state on."""
    x = call([30, 40])
    del x["initial_state"]
    want, _ = chunk_gated_delta_rule(**x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        context = build_cp_context(x.pop("cu_seqlens"), layout=layout)
        o, _ = chunk_gated_delta_rule(**x, cp_context=context)
    finally:
        dist.destroy_process_group()
    assert relative_l2(o, want) <= tolerance
