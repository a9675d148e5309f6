"""Verification of drafts with a slot a sequence: docs/lessons.md."""

import torch

from qla_kernels import verify_gated_delta_rule
from qla_kernels.lab.selftest.gdn_recurrent import STATE
from reference import gdn
from tests.compare import assert_close
from tests.gdn_calls import call

TOKENS = ("q", "k", "v", "g", "beta")
ACCEPTED, DRAFTS, LAST = (3, 1, 4, 2, 4), 4, 7  # LAST: a column behind all tokens of a call
SLOT = 4


def check(dtype: torch.dtype, sizes: tuple[int, int], limit: float) -> None:
    """Compares a server's loop with one long call in fp64.

    A call runs the tokens that were accepted of the drafts before, then new drafts. Of its row of
    slots one column names a state, so that one is read, and the one between both is written.
    """
    torch.manual_seed(3)
    x = call(batch=1, tokens=sum(ACCEPTED) + DRAFTS, sizes=sizes, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pool = torch.randn(6, *x["initial_state"].shape[1:], dtype=wide)
    pool[SLOT] = x["initial_state"][0]
    others = pool.clone()

    def truth(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = (x[n][:, :tokens].double() for n in TOKENS)
        return gdn.recurrent(*given, initial_state=x["initial_state"].double())

    want, _ = truth(sum(ACCEPTED))
    begin = kept = 0
    for count in ACCEPTED:
        now = {n: x[n][:, begin - kept : begin + DRAFTS] for n in TOKENS}
        column = kept - 1 if kept else LAST
        table = torch.full((1, LAST + 1), -1)
        table[0, column] = SLOT
        accepted = torch.tensor([column + 1])
        o = verify_gated_delta_rule(
            **now, initial_state=pool, state_indices=table, num_accepted_tokens=accepted
        )
        found = o[:, kept : kept + count]
        assert_close("o", found, want[:, begin : begin + count], limit)
        if begin:
            assert_close("state", pool[SLOT], truth(begin)[1][0], min(limit, STATE))
        others[SLOT] = pool[SLOT]
        assert torch.equal(pool, others), "another slot was written"
        begin, kept = begin + count, count
