"""Thousands of steps of a server's traffic on a pool: no slot changes that nobody named."""

import pytest

from tests.serving_traffic import Traffic


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(seed):
    traffic = Traffic(seed)
    for _ in range(400):
        traffic.step()
    assert all(traffic.done.values()), traffic.done


def test_a_slot_that_nobody_named_is_noticed():
    traffic = Traffic(0)

    def wrong():
        traffic.pool[3] += 1
        return set()

    traffic.prefill = traffic.decode = traffic.verify = traffic.preempt = wrong
    with pytest.raises(AssertionError, match="nobody named"):
        traffic.step()
