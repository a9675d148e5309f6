"""Flags, integers and numbers, as callers and their libraries write them."""

import numpy as np
import pytest
import torch

from qla_kernels.runtime import arguments
from qla_kernels.runtime.arguments import flag, integer, number
from qla_kernels.runtime.contents import check_words, checks_contents

LEARNED = torch.ones((), requires_grad=True)


def test_what_is_taken():
    assert [flag("op", "x", x) for x in (True, False, None, 1, 0, np.True_)] == [
        True, False, False, True, False, True,
    ]  # fmt: skip
    assert [integer("op", "n", n) for n in (3, np.int64(3), torch.tensor(3))] == [3, 3, 3]
    assert [number("op", "t", t) for t in (3, np.float32(3), torch.tensor([3.0]))] == [3.0] * 3
    assert all(type(number("op", "t", t)) is float for t in (3, np.float64(3), torch.tensor(3)))


@pytest.mark.parametrize(
    ("read", "x", "text"),
    [
        (flag, 2, "x is 2 of type int; need True or False; pass bool(x)"),
        (flag, "yes", "x is 'yes' of type str; need True or False; pass bool(x)"),
        (flag, torch.ones(2), "x is a float32 tensor of shape (2,) on cpu; need True or False; "
         "pass bool(x)"),
        (integer, 3.0, "x is 3.0 of type float; need an integer; pass int(x)"),
        (integer, None, "x is None of type NoneType; need an integer; pass int(x)"),
        (integer, torch.ones((), dtype=torch.int64, device="meta"),
         "x is an int64 tensor of shape () on meta; need an integer; pass int(x)"),
        (number, "3", "x is '3' of type str; need a number; pass float(x)"),
        (number, LEARNED, "x is a float32 tensor of shape () on cpu that requires a gradient; "
         "need a number; pass float(x)"),
        (number, [1.0] * 99, "x is of type list; need a number; pass float(x)"),
    ],
)  # fmt: skip
def test_what_is_refused(read, x, text):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        read("op", "x", x)
    assert str(error.value) == f"op: {text}"


@pytest.mark.parametrize(
    ("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)]
)
def test_variables_that_switch_something_on(value, on, monkeypatch):
    monkeypatch.delenv("QLA_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("QLA_CHECK", value)
    assert arguments.switched_on("QLA_CHECK") is on
    assert checks_contents() is on


@pytest.mark.parametrize("wrong", [1 << 31, -(1 << 31) - 1, (1 << 32) + 1])
def test_numbers_beyond_int32(wrong):
    check_words("op", "slots", torch.tensor([(1 << 31) - 1, -(1 << 31)]))
    check_words("op", "slots", torch.tensor([3], dtype=torch.int32))
    with pytest.raises(ValueError, match=f"op: slots has {wrong}; need numbers that fit in int32"):
        check_words("op", "slots", torch.tensor([5, wrong]))
