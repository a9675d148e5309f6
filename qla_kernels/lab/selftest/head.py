"""The cases of the kernels between the products of a head: three blocks of the vocabulary."""

from typing import Any

import torch
from torch import Tensor

from qla_kernels.head import launch
from qla_kernels.head.shapes import COLUMNS
from qla_kernels.lab.selftest.cases import Cases, dtype_of
from qla_kernels.lab.selftest.compare import assert_close
from qla_kernels.runtime.cpu import reference

# A gradient is a sum of products with dz, rounded once to dtype, and is rounded once itself
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}
SUMS = 3e-6  # fp32: a product, 2^x of the GPU, sums over the vocabulary

SIZES = 24, 5  # D, r of the low-rank addition: not a multiple of 8
SHARED = [1] * 9 + [40, 0, 2]  # targets of each row: the row of a prompt's end has many
VOCABULARY = 2 * COLUMNS + 1001  # a last block that is not a multiple of 4


def inputs(
    dtype: torch.dtype, counts: list[int], vocabulary: int, bias: bool, low: bool
) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """Returns [hidden, weight, bias, low, up], targets and first; logits have a size of about 3."""
    D, r = SIZES
    rows = len(counts)
    hidden, weight = torch.randn(rows, D).to(dtype), torch.randn(vocabulary, D).to(dtype) * 0.6
    of_bias = torch.randn(vocabulary).to(dtype) if bias else None
    of_low = torch.randn(rows, r).to(dtype) if low else None
    up = torch.randn(vocabulary, r).to(dtype) * 0.3 if low else None
    targets = torch.randint(vocabulary, (sum(counts),), dtype=torch.int32)
    targets[: min(2, len(targets))] = vocabulary - 1
    if len(targets) > 20:
        targets[12:15] = targets[11]  # equal targets of one row
    first = torch.tensor([0, *counts]).cumsum(0).int()
    return [hidden, weight, of_bias, of_low, up], targets, first


def _head(
    variant: Any, given: tuple[list[int], int, bool, bool, float, float], device: str
) -> None:
    """Checks log-probabilities, entropies and all gradients against fp64."""
    counts, vocabulary, bias, low, temperature, softcap = given
    dtype, ours = dtype_of(variant), reference().head
    tensors, targets, first = inputs(dtype, counts, vocabulary, bias, low)
    hidden, *head = (None if x is None else x.double() for x in tensors)
    numbers = temperature, softcap or None
    want = ours.forward(hidden, ours.Head(*head), targets, first, *numbers)
    dlogprobs, dentropy = torch.randn(2, len(targets))
    of_rows = torch.zeros_like(want.entropy)
    of_rows.index_add_(0, ours.rows_of(first), dentropy.double())
    grads = ours.backward(
        dlogprobs.double(), of_rows, hidden, ours.Head(*head), targets, first, want.lse,
        want.entropy, *numbers,
    )  # fmt: skip
    call: list[Any] = [None if x is None else x.to(device) for x in (*tensors, targets, first)]
    run: Any = launch  # its arguments are in lists here
    done = run.head_fwd(*call, temperature, softcap)
    for name, got, exact in (
        ("log-probabilities", done.logprobs, want.logprobs),
        ("entropies", done.entropy, want.entropy),
        ("lse", done.lse2 * torch.log(torch.tensor(2.0)), want.lse),
    ):
        assert_close(name, got.cpu(), exact, SUMS)
    call = [dlogprobs.to(device), dentropy.to(device), *call, done.lse2, done.entropy]
    wanted = [x is not None for x in tensors]
    got_grads = run.head_bwd(*call, temperature, softcap, wanted)
    for name, grad, exact in zip(grads._fields, got_grads, grads, strict=True):
        assert (grad is None) == (exact is None), name
        if grad is not None:
            assert_close(name, grad.cpu(), exact, 1.5 * ROUNDING[dtype])


CASES = (
    Cases(
        ("head.row_grads", "head.row_sums"),
        _head,
        [
            (SHARED, VOCABULARY, True, True, 1.0, 0.0),
            ([1] * 5, 70, False, False, 0.7, 0.0),
            (SHARED, COLUMNS + 3, True, False, 1.3, 2.0),
        ],
        [([1] * 20_000, 20_001, False, True, 1.0, 0.0)],  # two blocks of rows
    ),
)
