"""Reads TileLang's IR before lowering, for facts that lowering drops: fragments and buffer sizes.

TileLang gives a fragment one layout over one set of threads. If two roles share a fragment,
lowering silently drops the code of one of them, so the sharing has to be found in the IR.
"""

import ast
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

from qla_kernels.lab.inspect.threads import THREAD, Block, Threads, everyone, split

_INDICES = {f"T.launch_thread_idx({i})": ast.Name(name) for i, name in enumerate(THREAD)}


@dataclass
class Script:
    fragments: dict[str, set[Threads]] = field(default_factory=dict)  # the threads at each use
    shared_bytes: dict[str, int] = field(default_factory=dict)  # of each shared buffer


def read(script: str, block: Block) -> Script:
    """Parses a PrimFunc's script; returns the uses of fragments and the sizes of shared buffers.

    The script is parsed as Python but never executed.
    """
    walk = _Walk(block)
    walk.visit(ast.parse(script))
    return Script(dict(walk.fragments), walk.shared_bytes)


class _Walk(ast.NodeVisitor):
    def __init__(self, block: Block) -> None:
        self.block = block
        self.threads = everyone(block)
        self.definitions: dict[str, ast.expr] = {}
        self.fragments: defaultdict[str, set[Threads]] = defaultdict(set)
        self.shared_bytes: dict[str, int] = {}
        self._fragment_names: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        outside = self.threads
        taken, skipped = split(node.test, outside, self.block, self.definitions)
        for self.threads, statements in ((taken, node.body), (skipped, node.orelse)):
            for statement in statements if self.threads else ():
                self.visit(statement)
        self.threads = outside

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name) and node.value is not None:
            index = _INDICES.get(ast.unparse(node.value))
            self.definitions[node.target.id] = index or node.value
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        for name in ast.walk(node.target):  # may reuse the name of an earlier definition
            if isinstance(name, ast.Name):
                self.definitions.pop(name.id, None)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="sblock_alloc_buffer")) as call,
            ):
                self._allocate(name, call)
            case _:
                self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._fragment_names:
            self.fragments[node.id].add(self.threads)

    def _allocate(self, name: str, call: ast.Call) -> None:
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        scope = ast.literal_eval(options.get("scope", ast.Constant("global")))
        if scope == "local.fragment":
            self._fragment_names.add(name)
        elif scope in ("shared", "shared.dyn"):
            shape = ast.literal_eval(call.args[0])
            dtype = ast.literal_eval(call.args[1]) if len(call.args) > 1 else "float32"
            data = options.get("data")  # an annotated buffer is known by its data's name
            name = data.id if isinstance(data, ast.Name) else name
            self.shared_bytes[name] = math.prod(shape) * _bits(dtype) // 8


def _bits(dtype: str) -> int:
    """Returns the bits of a dtype such as `bfloat16`, `float8_e4m3` or `int32`; 8 for a bool."""
    size = re.search(r"\d+", dtype)
    return int(size[0]) if size else 8
