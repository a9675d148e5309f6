"""Errors of collective calls: a rank is lost, or ranks make different calls."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from qla_kernels.runtime.errors import need


class RankError(RuntimeError):
    """Raised if a transfer between ranks fails: a rank died, hangs, or makes different calls."""


@contextmanager
def lost_ranks_explained(op: str, what: str) -> Iterator[None]:
    """Context manager that turns a RuntimeError of torch.distributed into a RankError.

    Other errors, and a RankError, pass unchanged.

    Args:
        op: name of the function with which the message begins.
        what: what failed, as a clause, such as "a transfer between ranks failed".
    """
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        needs = "every rank of the group alive and in the same call"
        fix = "look at the output of the rank that failed first"
        raise RankError(need(op, f"{what} ({first})", needs, fix)) from error


def expect_equal(op: str, everyone: Sequence[Mapping[str, object]]) -> None:
    """Raises ValueError if the ranks of a group make different calls.

    The error names the first property of the call in which a rank differs from rank 0. A property
    that a rank does not have is not compared.

    Args:
        op: name of the function with which the message begins.
        everyone: for each rank, the properties of its call by name, such as {"dtype": "bfloat16"}.
    """
    for rank, facts in enumerate(everyone):
        for name, first in everyone[0].items():
            other = facts.get(name, first)
            if other != first:
                got = f"{name} is {first} on rank 0 and {other} on rank {rank}"
                fix = f"compare the arguments of ranks 0 and {rank}"
                raise ValueError(need(op, got, "the same call on every rank", fix))
