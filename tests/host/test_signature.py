"""Signatures: what they accept and refuse, and that the reasons agree with the test."""

import importlib
import pkgutil
import random
from types import SimpleNamespace

import pytest
import torch

import qla_kernels
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.signature import Entry, Signature, layouts

CALL = Signature(
    "x [N, V+] or [B, N, V+]; y like x; w [V] float?; ends [N + 1] int?; s [N, 2] as x"
)


def tensors(**changed):
    given = {"x": torch.zeros(3, 4), "y": torch.zeros(3, 4), "w": None, "ends": None}
    return {**given, "s": torch.zeros(3, 2), **changed}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": [1.0]}, "x is of type list; need a tensor; pass x as one"),
        ({"x": torch.zeros(3)}, "x has shape (3,); need [N, V] or [B, N, V]; reshape or expand x"),
        ({"x": torch.zeros(3, 0)}, "x has shape (3, 0); need [N, V] or [B, N, V] with V at least"),
        (
            {"y": torch.zeros(4, 3)},
            "y has shape (4, 3); need (3, 4), as x has; reshape",
        ),
        ({"y": torch.zeros(3, 4).half()}, "y is float16; need float32, as x; cast one of them"),
        ({"w": torch.zeros(5)}, "w has shape (5,); need [V] = (4,); reshape or expand w"),
        ({"w": torch.zeros(4).long()}, "w is int64; need bfloat16, float16, float32 or float64; c"),
        ({"w": torch.zeros(4, device="meta")}, "w is on meta; need cpu, as x; pass w.to(x.device)"),
        ({"ends": torch.zeros(3).int()}, "ends has shape (3,); need [N + 1] = (4,); reshape"),
        ({"ends": torch.zeros(4)}, "ends is float32; need int32 or int64; cast it"),
        ({"s": None}, "s is of type NoneType; need a tensor"),
        ({"s": torch.zeros(3, 3)}, "s has shape (3, 3); need [N, 2] = (3, 2); reshape or expand s"),
    ],
)
def test_what_does_not_fit(changed, text):
    CALL.check("f", *tensors().values())
    with pytest.raises(ValueError, match=r"^f: ") as error:
        CALL.check("f", *tensors(**changed).values())
    assert str(error.value).startswith(f"f: {text}")


def test_sizes_of_the_caller_and_both_layouts():
    first, last = layouts("q; state [N, {K, V}]", "N K", state="look at N")
    q = torch.zeros(1)
    first.check("f", q, torch.zeros(2, 3, 5), N=2, K=3)
    last.check("f", q, torch.zeros(2, 5, 3), N=2, K=3)
    with pytest.raises(ValueError, match=r"need \[N, V, K\] = \(2, 3, 3\); look at N$"):
        last.check("f", q, torch.zeros(2, 3, 5), N=2, K=3)


def test_a_tangent_is_refused():
    x = torch.zeros(3, 4)
    with torch.autograd.forward_ad.dual_level():
        given = tensors(x=torch.autograd.forward_ad.make_dual(x, x))
        with pytest.raises(Unsupported, match="tangent"):
            CALL.check("f", *given.values())


def test_results_without_values():
    sizes, x = {"N": 3}, torch.zeros(3, 4, dtype=torch.float16).T
    given = SimpleNamespace(x=x, none=None).__dict__
    like = Entry.of("y like x").empty(given, sizes)
    assert (like.shape, like.dtype, like.is_contiguous()) == (x.shape, x.dtype, True)
    wide = Entry.of("y [N, N + 1] wide x").empty(given, sizes)
    assert (wide.shape, wide.dtype) == ((3, 4), torch.float32)
    assert Entry.of("y [N] as x").empty(given, sizes).dtype == torch.float16
    assert Entry.of("y like none").empty(given, sizes) is None


def signatures():
    """All of the package's families."""
    for module in pkgutil.walk_packages(qla_kernels.__path__, "qla_kernels."):
        if not any(part in module.name for part in (".kernels", ".integrations", ".lab", ".__")):
            for value in vars(importlib.import_module(module.name)).values():
                several = value if type(value) is tuple else (value,)
                yield from (each for each in several if isinstance(each, Signature))


def drawn(signature, dice):
    """Random tensors that fit, and the sizes that the caller gives."""
    names = {size.name for entry in signature.entries for f in entry.forms.values() for size in f}
    sizes = {name: int(name) if name.isdigit() else dice.randint(1, 3) for name in names}
    given = {}
    for entry in signature.entries:
        form = dice.choice([*entry.forms.values()]) if entry.forms else ()
        shape = [sizes[size.name] + size.extra for size in form]
        dtype = {"float": torch.bfloat16, "int": torch.int32, None: torch.float32}[entry.kind]
        if entry.rule:
            other = given[entry.other]
            shape, dtype = shape if entry.rule == "as" else other.shape, other.dtype
        given[entry.name] = torch.empty(shape, dtype=dtype, device="meta")
    return given, {name: sizes[name] for name in signature.given}


def changed(x, dice):
    wrong = [None, [0.0], x[None], x.new_empty([*x.shape[:-1], 9]), x.to(torch.complex64)]
    return dice.choice([*wrong, x.new_empty([0] * x.dim()), torch.empty(x.shape, dtype=x.dtype), x])


def test_reasons_agree_with_the_test():
    """For random tensors of every signature, right ones and such with one that is not."""
    dice, seen, refused = random.Random(0), 0, 0
    for signature in signatures():
        seen += 1
        for _ in range(60):
            given, sizes = drawn(signature, dice)
            signature.check("f", *given.values(), **sizes)
            name = dice.choice([*given])
            given[name] = changed(given[name], dice)
            try:
                signature._refuse("f", given, sizes)
            except ValueError:
                has_reason = True
            except AssertionError:
                has_reason = False
            assert signature.fits(*given.values(), **sizes) != has_reason, (given, sizes)
            refused += has_reason
    assert seen > 20
    assert refused > 30 * seen
