"""`Signature`: the tensors of a function as data, from which checks, refusals and fakes follow.

    CALL = Signature("x [N, V] or [T, HV, V]; gate like x; weight [V] float; bounds [N + 1] int?")
    CALL.check("f", x, gate, weight, None)

An entry is a name with a shape and a dtype, each of which may be left out; `?` at the end allows
None. A size is a number, or has a name and is the same wherever this name is. `[N + 1]` has one
more entry than N, and `V+` is at least 1. A shape may have several forms, of different ranks.

    like x     the shape and the dtype of x
    as x       x's dtype
    wide x     x's dtype, or float32 if that has more bits
    float      bfloat16, float16, float32 or float64
    int        int32 or int64
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.derivatives import refuse_forward_mode
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import DTYPES, alternatives, dtype_name, expect_tensors, one_of

FLOATS = (*DTYPES, torch.float32, torch.float64)
KINDS = {"float": FLOATS, "int": (torch.int32, torch.int64)}

_ENTRY = re.compile(r"(\w+)\s*(\[.*\])?\s*(?:(like|as|wide) (\w+)|(float|int))?(\?)?")
_SIZE = re.compile(r"(\w+)(\+)?(?: \+ (\d+))?")

BOUNDS = "cu_seqlens [sequences + 1] int?"  # the entry of bounds of packed sequences


class Size(NamedTuple):
    """Record: one axis of a shape in a signature, such as `N + 1`, `V+` or `4`.

    Attributes:
        name: name of the size, "N". All axes with the same name must agree. A number is its own
            name.
        extra: constant that is added to the named size: 1 in `N + 1`.
        least: the smallest value of the named size: 1 for `V+`, else 0.
    """

    name: str
    extra: int
    least: int


class Entry(NamedTuple):
    """Record: what a signature requires of one tensor, such as "weight [V] float?".

    Attributes:
        name: name of the argument.
        forms: the allowed shapes, by number of dimensions; empty if any shape will do.
        rule: "like" (shape and dtype of another tensor), "as" (its dtype), "wide" (its dtype, or
            fp32 if that has more bits), or None.
        other: name of the other tensor that `rule` refers to.
        kind: "float" or "int" if the dtype must be one of these, else None.
        optional: True if the argument may be None.
    """

    name: str
    forms: dict[int, tuple[Size, ...]]
    rule: str | None
    other: str
    kind: str | None
    optional: bool

    @classmethod
    def of(cls, text: str) -> "Entry":
        """Returns the entry that a text such as "weight [V] float" describes."""
        parts = _ENTRY.fullmatch(text.strip())
        assert parts, text
        name, shapes, rule, other, kind, optional = parts.groups()
        forms = {}
        for form in re.findall(r"\[(.*?)\]", shapes or ""):
            axes = [_SIZE.fullmatch(axis).groups() for axis in form.split(", ")]  # type: ignore[union-attr]
            forms[len(axes)] = tuple(Size(x, int(n or 0), len(plus or "")) for x, plus, n in axes)
        return cls(name, forms, rule, other, kind, optional is not None)

    def empty(self, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> Tensor | None:
        """Allocates a tensor with the shape and dtype of this entry; returns it uninitialised.

        Only for entries with a rule, which take the dtype from another tensor (`like x`, `as x`,
        `wide x`). Returns None if that tensor is None.

        Args:
            tensors: the tensors of the call, by name.
            sizes: the values of named sizes, such as {"V": 64}.
        """
        other: Tensor | None = tensors[self.other]
        if other is None:
            return None
        if self.rule == "like":
            return other.new_empty(other.shape)  # empty_like would keep strides
        (form,) = self.forms.values()
        wide = torch.float32 if self.rule == "wide" else other.dtype
        shape = [sizes[size.name] + size.extra for size in form]
        return other.new_empty(shape, dtype=torch.promote_types(other.dtype, wide))

    def fits(self, shape: torch.Size, sizes: dict[str, int]) -> bool:
        """Returns True if this entry allows a tensor of the given shape.

        Args:
            shape: the tensor's shape.
            sizes: the values of named sizes, such as {"V": 64}. Names that are not in it yet are
                added, with the values that `shape` gives them.
        """
        if not self.forms:
            return True
        form = self.forms.get(len(shape))
        if form is None:
            return False
        for (name, extra, least), n in zip(form, shape, strict=True):
            if n - extra < least or sizes.setdefault(name, n - extra) != n - extra:
                return False
        return True

    def needs(self, shape: torch.Size, sizes: Mapping[str, int]) -> str:
        """Describes the shape that this entry requires, such as "[channels, width] = (8, 4)".

        Args:
            shape: the wrong shape, for the error message. If it has the right number of dimensions,
                sizes that are still free get its values.
            sizes: the values of the named sizes that earlier tensors have fixed.
        """
        forms = list(self.forms.values())
        letters = [f"[{', '.join(x + f' + {n}' * (n > 0) for x, n, _ in form)}]" for form in forms]
        if len(forms) == 1:
            own = zip(forms[0], shape, strict=True) if len(shape) == len(forms[0]) else ()
            free = {x: n - more for (x, more, least), n in own if n >= least + more}
            known = {**free, **sizes}
            if all(x in known for x, *_ in forms[0]):
                return f"{letters[0]} = {tuple(known[x] + more for x, more, _ in forms[0])}"
        axes = dict.fromkeys(size for form in forms for size in form)
        also = [f"{x}={sizes[x]}" for x, *_ in axes if x in sizes and not x.isdigit()]
        form = self.forms.get(len(shape), ())
        also += [
            f"{x} at least 1" for (x, _, least), n in zip(form, shape, strict=False) if n < least
        ]
        text = letters[0] if len(letters) == 1 else alternatives(letters)
        return f"{text} with {', '.join(also)}" if also else text


class Signature:
    """The shapes and dtypes that a function requires of its tensors, parsed from a short text.

    For example Signature("x [N, V]; weight [V] float?"): x is a matrix of any dtype, and weight,
    which may be None, is a floating-point vector with as many elements as x has columns.

    Attributes:
        entries: an `Entry` for each tensor, in the order of the text.
        numbers: the sizes that are numbers in the text, such as {"4": 4} for "weight [C, 4]".
        fixes: for the name of a tensor, what an error about its shape says to do.
        given: the names of sizes that the caller of `check` passes.
        fits: function of the tensors and the given sizes; returns True if they fit the entries.
    """

    def __init__(self, text: str, given: str = "", **fixes: str) -> None:
        """Parses the entries of `text`, which semicolons separate.

        Args:
            text: the entries, such as "x [N, V]; weight [V] float?".
            given: names of sizes that callers of `check` pass, separated by spaces.
            fixes: for the name of a tensor, what an error about its shape says to do.
        """
        self.entries = tuple(map(Entry.of, text.split(";")))
        self.numbers = {x: int(x) for x in re.findall(r"(?<=[\[ ])\d+(?=[,\]])", text)}
        self.fixes = {"cu_seqlens": "pass 0 and the end of each sequence", **fixes}
        self.given = given.split()
        code = compile("\n".join(_lines(self.entries, self.given)), __file__, "exec")
        names: dict[str, Any] = {"Tensor": Tensor, **KINDS}
        exec(code, names)
        self.fits: Callable[..., bool] = names["fits"]

    def check(self, op: str, *tensors: Any, **sizes: int) -> None:
        """Raises an error unless tensors fit the entries and are on the device of the first tensor.

        Args:
            op: name of the function with which the error begins.
            tensors: one for each entry, in order; None where the entry is optional.
            sizes: values of the sizes that the signature takes from the caller (`given`).

        Raises:
            ValueError: a shape, dtype or device is wrong; the error says which and what to do.
            Unsupported: a tensor has a forward-mode tangent (torch.func.jvp).
        """
        if not self.fits(*tensors, **sizes):
            names = [entry.name for entry in self.entries]
            self._refuse(op, dict(zip(names, tensors, strict=True)), sizes)
        refuse_forward_mode(op, *tensors)

    def _refuse(self, op: str, tensors: dict[str, Any], sizes: dict[str, int]) -> None:
        sizes = {**sizes, **self.numbers}
        first = self.entries[0].name
        for entry in self.entries:
            name, _, rule, other, kind, optional = entry
            x = tensors[name]
            if x is None and optional:
                continue
            expect_tensors(op, **{name: x})
            like: Any = tensors[other] if rule else None
            before = dict(sizes)
            fix = self.fixes.get(name, f"reshape or expand {name}")
            got = f"{name} has shape {tuple(x.shape)}"
            if rule == "like" and x.shape != like.shape:
                raise ValueError(need(op, got, f"{tuple(like.shape)}, as {other} has", fix))
            if not entry.fits(x.shape, sizes):
                raise ValueError(need(op, got, entry.needs(x.shape, before), fix))
            got = f"{name} is {dtype_name(x.dtype)}"
            if kind and x.dtype not in KINDS[kind]:
                raise ValueError(need(op, got, one_of(KINDS[kind]), "cast it"))
            if rule and x.dtype != like.dtype:
                needs = f"{dtype_name(like.dtype)}, as {other}"
                raise ValueError(need(op, got, needs, "cast one of them"))
            if x.device != tensors[first].device:
                got, needs = f"{name} is on {x.device}", f"{tensors[first].device}, as {first}"
                raise ValueError(need(op, got, needs, f"pass {name}.to({first}.device)"))
        raise AssertionError(f"{op}: arguments do not fit, and no reason says why")


def layouts(text: str, given: str = "", **fixes: str) -> tuple[Signature, Signature]:
    """Parses a text twice: returns the signatures with "K, V" and with "V, K" in place of "{K, V}".

    They are for states [.., K, V] and transposed states [.., V, K]. The arguments are those of
    `Signature`: sizes that callers pass (`given`), and advice for errors about shapes (`fixes`).
    """
    texts = (text.replace("{K, V}", last) for last in ("K, V", "V, K"))
    first, second = (Signature(text, given, **fixes) for text in texts)
    return first, second


def _lines(entries: Sequence[Entry], given: Sequence[str]) -> Iterator[str]:
    """Yields the source of `Signature.fits`: a loop over entries would take twice the time."""
    names = [f"x_{entry.name}" for entry in entries]
    sizes = {size.name for entry in entries for form in entry.forms.values() for size in form}
    known = {*given, *filter(str.isdigit, sizes)}
    seen = set[str]()  # sizes that may be known
    yield f"def fits({', '.join([*names, *given])}):"
    yield "".join(f"    {x} = None\n" for x in sorted(sizes - known))
    for name, (_, forms, rule, other, kind, optional) in zip(names, entries, strict=True):
        at = "        " if optional else "    "
        if optional:
            yield f"    if {name} is not None:"
        yield f"{at}if not isinstance({name}, Tensor): return False"
        if rule:
            yield f"{at}if {name}.dtype != x_{other}.dtype: return False"
        if rule == "like":
            yield f"{at}if {name}.shape != x_{other}.shape: return False"
        if kind:
            yield f"{at}if {name}.dtype not in {kind}: return False"
        if name != names[0]:
            yield f"{at}if {name}.device != {names[0]}.device: return False"
        if not forms:
            continue
        yield f"{at}shape = {name}.shape"
        yield f"{at}rank = len(shape)"
        for rank, form in forms.items():
            yield f"{at}if rank == {rank}:"
            yield f"{at}    {', '.join(f'n{axis}' for axis in range(rank))}, = shape"
            for axis, (size, extra, least) in enumerate(form):
                n = f"n{axis} - {extra}" if extra else f"n{axis}"
                if least or extra:
                    yield f"{at}    if {n} < {least}: return False"
                if size in known:
                    yield f"{at}    if {n} != {size}: return False"
                elif size in seen:
                    yield f"{at}    if {size} is None: {size} = {n}"
                    yield f"{at}    elif {size} != {n}: return False"
                else:
                    yield f"{at}    {size} = {n}"
        yield f"{at}if {' and '.join(f'rank != {rank}' for rank in forms)}: return False"
        shared = set.intersection(*({size.name for size in form} for form in forms.values()))
        seen |= {size.name for form in forms.values() for size in form}
        known |= set() if optional else shared
    yield "    return True"


def check_packed(op: str, batch: int) -> None:
    """Raises ValueError unless a call with packed sequences (cu_seqlens) has a batch size of 1.

    `op` is the function that the error names, and `batch` the batch size of its tensors.
    """
    if batch != 1:
        got, needs = f"cu_seqlens with a batch of {batch}", "packed tokens: a batch of 1"
        raise ValueError(need(op, got, needs, "pack the rows end to end"))
