"""A convolution and a gated delta net whose tokens are spread over ranks: losses of a training."""

import pytest

from tests.ranks import start


def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path):
    ranks = start("tests.layer_ranks", tmp_path)
    losses = {world: ranks[0][str(world)] for world in (1, 2, 4)}
    assert len(losses[1]) == 5
    assert losses[1] == sorted(losses[1], reverse=True)
    for world in (2, 4):  # a wrong convolution, or its lost gradient, changes them by 5e-5 and more
        assert losses[world] == pytest.approx(losses[1], rel=5e-6)
        assert all(rank[str(world)] == losses[world] for rank in ranks[:world])
