"""All mutants of a file: one operator, constant, statement or order of arguments is changed.

Of kernels, device code alone is changed: what is inside `@T.prim_func` and `@T.macro`. Text of
errors and logs, annotations and assertions stay as they are.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not",
    "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and", "+": "-", "-": "+",
    "*": "+", "/": "*", "//": "*", "%": "//", "<<": ">>", ">>": "<<", "&": "|", "&&": "||",
    "||": "&&",
}  # fmt: skip
SIGNS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and",
    ast.Or: "or", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//",
    ast.Mod: "%", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&",
}  # fmt: skip
SYMMETRIC = {"max", "min", "isinstance"}  # or checked by the type checker
WORDS = {"need", "debug", "info", "warning", "error"}  # calls that make text
DROPPED = (ast.AugAssign, ast.Raise)
OPERATOR, CONSTANT, STATEMENT, ARGUMENTS = KINDS = "operator", "constant", "statement", "arguments"


class Mutant(NamedTuple):
    path: str
    line: int
    kind: str
    begin: int  # bytes of the file that are replaced
    end: int
    new: bytes

    def applied(self, data: bytes) -> bytes:
        return data[: self.begin] + self.new + data[self.end :]

    def lines(self, data: bytes) -> tuple[str, str]:
        """Returns the first line that is changed, before and after."""
        place = data[: self.begin].count(b"\n")
        before, after = (x.split(b"\n")[place].decode() for x in (data, self.applied(data)))
        return before.strip(), after.strip()


def of_file(root: Path, path: str) -> list[Mutant]:
    data = (root / path).read_bytes()
    found = _of_c(data) if path.endswith(".c") else _of_python(data, "/kernels/" in path)
    made = {
        (begin, new): Mutant(path, data[:begin].count(b"\n") + 1, kind, begin, end, new)
        for kind, begin, end, new in found
        if data[begin:end] != new
    }
    return sorted(made.values())


Edit = tuple[str, int, int, bytes]  # kind, begin, end, new


def _of_python(data: bytes, is_kernel: bool) -> Iterator[Edit]:
    tree, first = ast.parse(data), [0]
    for line in data.splitlines(keepends=True):
        first.append(first[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        where = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore
        return first[where[0] - 1] + where[1], first[where[2] - 1] + where[3]

    def between(left: ast.AST, right: ast.AST, op: ast.AST) -> Iterator[Edit]:
        if (sign := SIGNS.get(type(op))) is not None:
            begin, end = span(left)[1], span(right)[0]
            if (at := data.find(sign.encode(), begin, end)) >= 0:
                yield OPERATOR, at, at + len(sign), OPERATORS[sign].encode()

    def edits(node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            yield CONSTANT, *span(node), repr(new).encode()
        elif isinstance(node, ast.Call) and _name(node) not in SYMMETRIC:
            given = [span(x) for x in node.args[:2] if not isinstance(x, ast.Starred)]
            if len(given) == 2:
                (a, b), (c, d) = given
                yield ARGUMENTS, a, d, data[c:d] + data[b:c] + data[a:b]
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        is_put = isinstance(node, ast.Assign) and isinstance(
            node.targets[0], ast.Subscript | ast.Attribute
        )
        if is_call or is_put or isinstance(node, DROPPED):
            yield STATEMENT, *span(node), b"pass"

    def walk(node: ast.AST, inside: bool) -> Iterator[Edit]:
        if isinstance(node, ast.Assert | ast.JoinedStr) or _name(node) in WORDS:
            return
        if isinstance(node, ast.FunctionDef):
            marks = {ast.unparse(x) for x in node.decorator_list}
            inside = inside or bool(marks & {"T.prim_func", "T.macro"})
            children: list[ast.AST] = [*node.body, *node.args.defaults]
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value is not None else []
        else:
            children = list(ast.iter_child_nodes(node))
        if inside:
            yield from edits(node)
        for child in () if isinstance(node, ast.Raise) else children:
            yield from walk(child, inside)

    yield from walk(tree, not is_kernel)


def _name(node: ast.AST) -> str:
    """Returns the name of a called function; of a statement, of the call that it is."""
    node = node.value if isinstance(node, ast.Expr) else node
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


_SIGN = re.compile(r" (<=|>=|==|!=|<<|>>|<|>|&&|\|\||\+|-|\*|/|%|&) ")
_NUMBER = re.compile(r"(?<![\w.\"])\d+(?![\w.\"])")
_STATEMENT = re.compile(
    r"(?<=^    )(?: *)(?:[\w>.\[\]*&-]+ [+*|&-]?= [^;\"]+|(?!return)\w+\([^;\"]*\));$", re.MULTILINE
)
_PAIR = re.compile(r"\b(?!sizeof|while|if|for|switch)\w+\(([\w>.&\[\]-]+), ([\w>.&\[\]-]+)(?=[,)])")


def _of_c(data: bytes) -> Iterator[Edit]:
    """Of function bodies, which are indented. Comments and texts are blanked first."""
    text = re.sub(r"/\*.*?\*/", _blank, data.decode(), flags=re.DOTALL)
    assert text.isascii(), "offsets are those of bytes"
    at = 0
    for line in text.splitlines(keepends=True):
        if line.startswith("    ") and '"' not in line and "enum" not in line:
            for kind, pattern in zip(KINDS, (_SIGN, _NUMBER, _STATEMENT, _PAIR), strict=True):
                for match in pattern.finditer(line):
                    yield kind, *_c_edit(kind, match, at)
        at += len(line)


def _c_edit(kind: str, match: re.Match[str], at: int) -> tuple[int, int, bytes]:
    if kind == OPERATOR:
        new, (begin, end) = OPERATORS[match[1]].replace("//", "/"), match.span(1)
    elif kind == ARGUMENTS:
        new, begin, end = f"{match[2]}, {match[1]}", match.start(1), match.end(2)
    else:
        new, (begin, end) = str(int(match[0]) + 1) if kind == CONSTANT else ";", match.span()
    return at + begin, at + end, new.encode()


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])
