"""The tensors and scalars that a PrimFunc declares.

Sizes and strides to check come from here. TileLang's host function compares no size of a tensor
whose buffer shares its name with another one, so it is no source for checks.
"""

from typing import Any

from qla_kernels.runtime.errors import need
from qla_kernels.runtime.native.entry import SIZE, STRIDE, Expression, TensorEntry, symbols_of

BINARY = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//"}  # nodes of TIR


class Declared:
    """The tensors, scalars and symbols of a PrimFunc.

    Attributes:
        tensors: in the order of the arguments.
        scalars: name and dtype of each, by its place among the arguments.
        symbols: the sizes and strides that are read from tensors, and where; others are compared.
        place_of: the index in `tensors` of an argument, by its place.
    """

    def __init__(self, prim_func: Any) -> None:
        self.name = str(prim_func.attrs["global_symbol"])
        self.tensors: list[TensorEntry] = []
        self.scalars: dict[int, tuple[str, str]] = {}  # by the argument's place
        self.symbols: list[tuple[str, int, str, int]] = []
        self.place_of: dict[int, int] = {}  # of an argument that is a tensor: its index in tensors
        self._names: dict[Any, str] = {}
        for place, param in enumerate(prim_func.params):
            name = str(param.name).removesuffix("_handle")
            if param in prim_func.buffer_map:
                self.place_of[place] = len(self.tensors)
                self.tensors.append(self._tensor(name, prim_func.buffer_map[param]))
                continue
            if str(param.dtype) not in ("int32", "float32"):
                raise self.unknown(f"scalar {name} of type {param.dtype}")
            self.scalars[place] = self._symbol(param), str(param.dtype)
        self._find_sources()

    def unknown(self, found: str) -> ValueError:
        fix = "teach it to qla_kernels/runtime/native"
        return ValueError(need(self.name, found, "what the launcher knows", fix))

    def _tensor(self, name: str, buffer: Any) -> TensorEntry:
        sizes = [self.expression(size) for size in buffer.shape]
        strides = [self.expression(stride) for stride in buffer.strides]
        if not strides:  # contiguous
            for axis in range(len(sizes)):
                inner = [size for size in sizes[axis + 1 :] if size != [1]] or [[1]]
                strides.append([*inner[0], *(x for size in inner[1:] for x in (*size, "*"))])
        return {"name": name, "dtype": str(buffer.dtype), "sizes": sizes, "strides": strides}

    def expression(self, node: Any) -> Expression:
        """Returns a node of TIR, a declared size or stride, as an expression in postfix order.

        Its operands are integers and names of symbols. Raises ValueError for unknown nodes.
        """
        kind = type(node).__name__
        if kind == "IntImm":
            return [int(node)]
        if kind == "Var":
            return [self._symbol(node)]
        if kind in BINARY:
            return [*self.expression(node.a), *self.expression(node.b), BINARY[kind]]
        if kind == "Cast":
            return self.expression(node.value)
        raise self.unknown(f"{kind} in a declared size or stride ({node})")

    def _symbol(self, var: Any) -> str:
        if var not in self._names:
            name, taken = str(var.name), set(self._names.values())
            while name in taken:  # variables may share a name: macros rename their arguments
                name += "_"
            self._names[var] = name
        return self._names[var]

    def _find_sources(self) -> None:
        """Fills `symbols`; raises ValueError for a size that would neither be read nor compared."""
        known = {name for name, _ in self.scalars.values()}
        for what in (SIZE, STRIDE):
            for i, tensor in enumerate(self.tensors):
                for axis, expression in enumerate(tensor["sizes" if what == SIZE else "strides"]):
                    (name, *more) = expression
                    if isinstance(name, str) and not more and name not in known:
                        known.add(name)
                        self.symbols.append((name, i, what, axis))
        for tensor in self.tensors:
            for what, declared in ((SIZE, tensor["sizes"]), (STRIDE, tensor["strides"])):
                for axis, expression in enumerate(declared):
                    for name in symbols_of(expression):
                        if name not in known:
                            got = f"{what} of {tensor['name']} along axis {axis} depends on {name}"
                            fix = f"declare a tensor that has the size {name}"
                            needs = f"{name} as a size, a stride or a scalar argument"
                            raise ValueError(need(self.name, got, needs, fix))
