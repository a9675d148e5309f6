"""Reads an `Entry` from the TIR that TileLang lowers a PrimFunc to.

Kernel arguments, tensor maps and the grid come from the host function that TileLang generates. Each
number there leads back to a scalar argument, or to a size or stride of a tensor, which is replaced
by what the PrimFunc declares in that place. Whatever is not known here is refused with its name.
"""

import re
from typing import Any

from qla_kernels.runtime.native.declared import BINARY, Declared
from qla_kernels.runtime.native.entry import Entry, Expression, MapEntry, symbols_of

_CALLS = {"tirx.shift_right": ">>"}
_DATA, _SHAPE, _STRIDES, _VALUE = 1, 2, 3, 15  # fields of tvm_struct_get
_SET_DEVICE, _ENCODE = "__tvm_set_device", "__tvm_tensormap_create_tiled"
_ATTRIBUTES = {"storage_alignment", "device_id", "device_type", "compute_scope", "tl.assume"}
_LAUNCHED = [f"{index}Idx.{axis}" for index in ("block", "thread") for axis in "xyz"]
_SHARED = "tirx.use_dyn_shared_memory"
_CHECKED = re.compile(  # by the launcher, for every tensor and scalar
    r"num_args should be|args pointer is NULL|expected pointer or tensor handle"
    r"|expected (float|integer)|expected to have non-NULL pointer|ndim mismatch|dtype mismatch"
    r"|requires at least one non-null buffer|(shape|strides)\[\d\] violates|byte_offset violates"
    r"|device_id violates|device_type mismatch|data pointer is NULL"
)


def read_entry(prim_func: Any, host_mod: Any, device_mod: Any) -> Entry:
    """Returns the entry of a lowered PrimFunc; raises ValueError for what is not known here."""
    (host,), (device,) = host_mod.functions.values(), device_mod.functions.values()
    declared = Declared(prim_func)
    launch = HostFunction(declared, host)
    for attribute in ("use_cooperative_groups", "cluster_dims"):
        if attribute in device.attrs:
            raise declared.unknown(attribute)
    tags = [str(tag) for tag in device.attrs["tirx.kernel_launch_params"]]
    function, values = launch.kernel
    if function != str(device.attrs["global_symbol"]):
        raise declared.unknown(f"a call of {function}")
    params, tagged = values[: len(device.params)], values[len(device.params) :]
    numbers = dict(zip(tags, map(launch.number, tagged), strict=True))
    sizes = [numbers.pop(tag, [1]) for tag in _LAUNCHED] + [numbers.pop(_SHARED, [0])]
    if numbers:
        raise declared.unknown(f"launch parameter {next(iter(numbers))}")
    if [*symbols_of(sizes[-1])]:  # the launcher asks for it once, when it loads the kernel
        raise declared.unknown("shared memory whose size depends on tensors")
    arguments = [
        launch.argument(param, value) for param, value in zip(device.params, params, strict=True)
    ]
    return Entry(
        function=function,
        tensors=declared.tensors,
        scalars=[declared.scalars[place] for place in sorted(declared.scalars)],
        order=[place not in declared.scalars for place in range(len(prim_func.params))],
        symbols=declared.symbols,
        maps=[launch.maps[name] for name in launch.maps],
        arguments=arguments,
        launch=sizes,
        dependent=bool(int(device.attrs.get("has_cuda_pdl_sync", 0))),
    )


class HostFunction:
    """The host function's tensor maps and launch, in terms of what the PrimFunc declares."""

    def __init__(self, declared: Declared, host: Any) -> None:
        self.declared = declared
        self.args = host.params[1]
        self.maps: dict[Any, MapEntry] = {}  # by the variable that holds the map
        self.kernel: tuple[str, list[Any]] = "", []
        self._bound: dict[Any, Any] = {}
        self._arrays: dict[Any, Any] = {}  # by a buffer: the pointer to its memory
        self._statement(host.body)
        if not self.kernel[0]:
            raise declared.unknown("no launch")

    def _statement(self, node: Any) -> None:
        kind = type(node).__name__
        if kind == "SeqStmt":
            for inner in node.seq:
                self._statement(inner)
        elif kind == "Bind":
            self._bound[node.var] = node.value
        elif kind == "DeclBuffer":
            self._arrays[node.buffer] = node.buffer.data
        elif kind == "AssertStmt":
            self._check(node)
        elif kind == "AttrStmt" and str(node.attr_key) in _ATTRIBUTES:
            self._statement(node.body)
        elif kind == "Evaluate":
            self._evaluate(node.value)
        else:
            raise self.declared.unknown(f"{kind} {getattr(node, 'attr_key', '')}".strip())

    def _check(self, node: Any) -> None:
        """Raises ValueError if the launcher does not make this check of the host function."""
        message = "".join(str(part.value) for part in node.message_parts)
        if not _CHECKED.search(message):
            raise self.declared.unknown(f"the check {message!r}")

    def _evaluate(self, node: Any) -> None:
        operator = _operator(node)
        if operator == "tirx.ret":
            return
        if operator != "tirx.tvm_call_packed":
            raise self.declared.unknown(operator)
        function, values = str(node.args[0].value), list(node.args[1:])
        if function == _ENCODE:
            self.maps[values[0]] = self._map(values)
        elif function.startswith("__tvm"):
            if function != _SET_DEVICE:
                raise self.declared.unknown(f"a call of {function}")
        elif self.kernel[0]:
            raise self.declared.unknown(f"a second launch, {function}")
        else:
            self.kernel = function, values

    def _map(self, values: list[Any]) -> MapEntry:
        rank = int(values[2])
        lists = [values[4 + i * rank :][:rank] for i in range(4)]
        dims, strides, box, steps = lists
        interleave, swizzle, l2, fill = (int(x) for x in values[4 + 4 * rank :])
        return {
            "tensor": self._tensor(values[3]),
            "dtype": int(values[1]),
            "dims": [self.number(x) for x in dims],
            "strides": [self.number(x) for x in strides[1:]],
            "box": [int(x) for x in box],
            "steps": [int(x) for x in steps],
            "interleave": interleave,
            "swizzle": swizzle,
            "l2": l2,
            "fill": fill,
        }

    def argument(self, param: Any, value: Any) -> tuple[str, Expression]:
        """Returns the type of a kernel argument, and the tensor's or map's number or its value."""
        dtype = str(param.dtype)
        if dtype == "handle":
            if str(param.type_annotation.storage_scope) == "grid_constant":
                if value not in self.maps:
                    raise self.declared.unknown(f"{value} as a tensor map")
                return "map", [list(self.maps).index(value)]
            return "pointer", [self._tensor(value)]
        if dtype not in ("int32", "float32"):
            raise self.declared.unknown(f"kernel argument {param.name} of type {dtype}")
        expression = self.number(value)
        scalars = dict(self.declared.scalars.values())
        floats = [name for name in symbols_of(expression) if scalars.get(name) == "float32"]
        if (dtype == "float32") != (floats == expression):
            raise self.declared.unknown(f"{value} as {dtype} argument {param.name}")
        return dtype, expression

    def _tensor(self, node: Any) -> int:
        """Returns the number of the tensor that a pointer belongs to."""
        handle, field = self._field(self._value(node))
        if field != _DATA:
            raise self.declared.unknown(f"{node} as a tensor's address")
        return self._tensor_of_handle(handle)

    def _tensor_of_handle(self, node: Any) -> int:
        """Handles are args[i], or that plus the header of an object that holds a tensor."""
        node = self._value(node)
        if type(node).__name__ == "Select":
            node = node.false_value
        handle, field = self._field(node)
        if not handle.same_as(self.args) or field != _VALUE:
            raise self.declared.unknown(f"{node} as a tensor")
        return self.declared.place_of[int(node.args[1])]

    def _value(self, node: Any) -> Any:
        while type(node).__name__ == "Var" and node in self._bound:
            node = self._bound[node]
        return node

    def _field(self, node: Any) -> tuple[Any, int]:
        if _operator(node) != "tirx.tvm_struct_get":
            raise self.declared.unknown(f"{node} in place of a field of an argument")
        return node.args[0], int(node.args[2])

    def number(self, node: Any) -> Expression:
        """Returns a number of the host function in terms of the PrimFunc's symbols and scalars."""
        node = self._value(node)
        kind, operator = type(node).__name__, _operator(node)
        if kind == "IntImm":
            return [int(node)]
        if kind == "Cast":
            return self.number(node.value)
        if kind in BINARY:
            return [*self.number(node.a), *self.number(node.b), BINARY[kind]]
        if operator in _CALLS:
            return [*map_flat(self.number, node.args), _CALLS[operator]]
        if operator == "tirx.if_then_else" and _operator(node.args[0]) == "tirx.isnullptr":
            return self.number(node.args[2])  # torch always hands over strides
        if kind == "Select":  # a float scalar, which may be passed as an int
            return self.number(node.true_value)
        if kind == "BufferLoad":
            return self._declared_number(node)
        if operator == "tirx.tvm_struct_get":
            base, field = self._field(node)
            if base.same_as(self.args) and field == _VALUE:
                return [self.declared.scalars[int(node.args[1])][0]]
        raise self.declared.unknown(f"{operator or kind} ({node})")

    def _declared_number(self, node: Any) -> Expression:
        """Returns the declared expression of a size or stride that the host function reads."""
        handle, field = self._field(self._value(self._arrays[node.buffer]))
        if field not in (_SHAPE, _STRIDES):
            raise self.declared.unknown(f"{node} in place of a size")
        tensor = self.declared.tensors[self._tensor_of_handle(handle)]
        (axis,) = (int(x) for x in node.indices)
        return (tensor["sizes"] if field == _SHAPE else tensor["strides"])[axis]


def map_flat(function: Any, nodes: Any) -> Expression:
    return [x for node in nodes for x in function(node)]


def _operator(node: Any) -> str:
    return str(node.op.name) if type(node).__name__ == "Call" else ""
