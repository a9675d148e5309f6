"""A few random calls that ranks make together: context parallelism, and rings, over gloo."""

from tests.fuzz import launch_ranks

CASES = 6  # of each function; starting four processes takes longer


def test_ranks_agree_with_the_definition(first_seed):
    plan = [(n, first_seed + i) for i in range(CASES) for n in launch_ranks.FUNCTIONS]
    failures = launch_ranks.failures(plan)
    assert not failures, "\n".join(failures)
