"""An entry as `launcher.c` reads it: one array of int64, and the texts of its messages."""

from array import array
from collections.abc import Iterator, Mapping

from qla_kernels.runtime.errors import need
from qla_kernels.runtime.native.entry import OPERATORS, SIZE, Entry, Expression

CODES = {"+": 3, "-": 4, "*": 5, "//": 6, ">>": 7}  # of operators; launcher.c has the same numbers
END, CONSTANT, SYMBOL = 0, 1, 2
KINDS = ("pointer", "map", "int32", "float32")  # of kernel arguments

# DLPack's code and bits of each dtype
DTYPES = {
    "bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32), "float64": (2, 64),
    "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8),
    "bool": (6, 8),
}  # fmt: skip

Check = tuple[int, str, int, Expression]  # tensor, size or stride, axis, expected


def pack(entry: Entry) -> bytes:
    """Returns the numbers of an entry in the order of `read_entry` of launcher.c.

    Raises ValueError if two numbers share a name, because expressions refer to them by name.
    """
    scalars = [name for name, _ in entry["scalars"]]
    names = [*scalars, *(name for name, *_ in entry["symbols"])]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        got, fix = f"two numbers named {', '.join(twice)}", "build the kernel again"
        raise ValueError(need(entry["function"], got, "a name for each", fix))
    places = {name: i for i, (name, *_) in enumerate(entry["symbols"])}
    places |= {name: len(places) + i for i, name in enumerate(scalars)}
    checks = list(checks_of(entry))
    tensor_at = [place for place, is_tensor in enumerate(entry["order"]) if is_tensor]
    scalar_at = [place for place, is_tensor in enumerate(entry["order"]) if not is_tensor]
    numbers = [len(entry["tensors"]), len(scalars), len(entry["symbols"]), len(checks)]
    numbers += [len(entry["maps"]), len(entry["arguments"]), int(entry["dependent"])]
    for place, tensor in zip(tensor_at, entry["tensors"], strict=True):
        numbers += [place, len(tensor["sizes"]), *DTYPES[tensor["dtype"]]]
    for place, (_, dtype) in zip(scalar_at, entry["scalars"], strict=True):
        numbers += [place, int(dtype == "float32")]
    for _, index, what, axis in entry["symbols"]:
        numbers += [index, int(what != SIZE), axis]
    for index, what, axis, expected in checks:
        numbers += [index, int(what != SIZE), axis, *_coded(expected, places)]
    for number in entry["launch"]:
        numbers += _coded(number, places)
    for kind, value in entry["arguments"]:
        numbers.append(KINDS.index(kind))
        if kind == "int32":
            numbers += _coded(value, places)
        else:
            (which,) = value
            numbers.append(scalars.index(which) if isinstance(which, str) else which)
    for spec in entry["maps"]:
        numbers += [spec["tensor"], len(spec["dims"]), spec["dtype"], spec["interleave"]]
        numbers += [spec["swizzle"], spec["l2"], spec["fill"], *spec["box"], *spec["steps"]]
        for number in (*spec["dims"], *spec["strides"]):
            numbers += _coded(number, places)
    return array("q", numbers).tobytes()


def checks_of(entry: Entry) -> Iterator[Check]:
    """Yields the sizes and strides that are compared: all but those that symbols are read from."""
    read = {(index, what, axis) for _, index, what, axis in entry["symbols"]}
    for index, tensor in enumerate(entry["tensors"]):
        for what, declared in ((SIZE, tensor["sizes"]), ("stride", tensor["strides"])):
            for axis, expected in enumerate(declared):
                if (index, what, axis) not in read:
                    yield index, what, axis, expected


def texts(entry: Entry) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names and the needs that `launcher` of launcher.c takes."""
    tensors = entry["tensors"]
    names = [tensor["name"] for tensor in tensors] + [name for name, _ in entry["scalars"]]
    needs = [_spelled(expected) for *_, expected in checks_of(entry)]
    needs += ["the most that fits int32"] * len(entry["symbols"])
    return (*names, *(tensor["dtype"] for tensor in tensors)), tuple(needs)


def _spelled(expression: Expression) -> str:
    """Returns an expression in infix form, `192 * group` for [192, "group", "*"].

    Returns "" for a constant, whose value the message has anyway.
    """
    stack: list[str] = []
    for token in expression:
        if token in OPERATORS:
            right, left = stack.pop(), stack.pop()
            stack.append(f"{left} {token} {right}" if token == "*" else f"({left} {token} {right})")
        else:
            stack.append(str(token))
    return "" if len(expression) == 1 and isinstance(expression[0], int) else stack[0]


def _coded(expression: Expression, places: Mapping[str, int]) -> Iterator[int]:
    for token in expression:
        if isinstance(token, int):
            yield from (CONSTANT, token)
        elif token in CODES:
            yield CODES[token]
        else:
            yield from (SYMBOL, places[token])
    yield END
