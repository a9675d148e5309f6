"""TileLang's own launch of a variant: its generated host code on its own runtime.

No nvcc is needed: where TileLang would compile the device code, it gets a few bytes, which the
stand-in driver takes for machine code.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from qla_kernels.runtime import jit
from qla_kernels.runtime.native.entry import Entry
from qla_kernels.runtime.native.host_function import read_entry
from qla_kernels.runtime.native.pack import DTYPES


class Both(NamedTuple):
    """One lowering of a variant, for us and for TileLang."""

    entry: Entry
    main: Callable[..., None]  # TileLang's host function
    letters: str  # of the kernel's arguments
    source: str  # CUDA C++


def lowered(kernel: jit.Kernel, variant: Any) -> Both:
    import tilelang
    import tvm_ffi
    from tilelang.engine.lower import (
        create_backend_context,
        device_codegen,
        host_codegen,
        lower_to_host_device_ir,
    )
    from tilelang.transform.pass_config import normalize_pass_configs
    from tvm import runtime
    from tvm.ir.transform import PassContext
    from tvm.target import Target

    sources = []

    def machine_code(code: str, target: Any, config: Any = None) -> bytearray:
        sources.append(code)
        return bytearray(b"\x7fELF")

    assert tilelang
    tvm_ffi.register_global_func("tilelang_callback_cuda_compile", machine_code, override=True)
    prim_func = jit.trace(kernel.module, variant)
    target = Target(jit.TARGET)
    configs = normalize_pass_configs(dict(kernel.module.PASS_CONFIGS))
    with PassContext(opt_level=3, config=configs), target:
        context = create_backend_context(target, None, "auto")
        host, device, *_ = lower_to_host_device_ir(prim_func, context)
        entry = read_entry(prim_func, host, device)
        module = host_codegen(host, context)
        module.import_module(device_codegen(device, context))
    (function,) = device.functions.values()
    main = runtime.Executable(module).jit().get_function("main", query_imports=True)
    return Both(entry, main, "".join(map(_letter, function.params)), sources[0])


def _letter(param: Any) -> str:
    if str(param.dtype) != "handle":
        return {"int32": "i", "float32": "f"}[str(param.dtype)]
    return "m" if str(param.type_annotation.storage_scope) == "grid_constant" else "p"


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class OnGpu:
    """A CPU tensor that says, by DLPack, that it lies on GPU 0."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **asked: Any) -> Any:
        x, numbers = self.x, ctypes.c_int64 * max(self.x.dim(), 1)
        self.sizes, self.strides = numbers(*x.shape), numbers(*x.stride())
        code, bits = DTYPES[str(x.dtype).removeprefix("torch.")]
        dtype = _DataType(code, bits, 1)
        fields = (x.data_ptr(), _Device(2, 0), x.dim(), dtype, self.sizes, self.strides, 0)
        self.managed = _Managed(*fields, None, None)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(ctypes.addressof(self.managed), b"dltensor", None)


def launch(main: Callable[..., None], arguments: list[Any]) -> None:
    """Calls TileLang's host function with CPU tensors that it takes for CUDA tensors."""
    import tvm_ffi

    disguised = [OnGpu(x) if isinstance(x, torch.Tensor) else x for x in arguments]
    main(*(tvm_ffi.from_dlpack(x) if isinstance(x, OnGpu) else x for x in disguised))
