"""Sizes that TileLang's host code does not compare are compared before a launch."""

import os
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from qla_kernels.runtime import jit, sizes
from qla_kernels.runtime.errors import Unsupported
from tests import zygote

pytest.importorskip("tilelang", reason="kernel files import TileLang")

# What the generated host code of these kernels was seen not to read.
UNREAD = {
    "attn.delta": ["o"],
    "dualkv.bwd": ["q", "k"],
    "dualkv.bwd_dkv": ["q"],
    "dualkv.bwd_dkv_wide": ["q", "k"],
    "dualkv.bwd_dq": ["q"],
    "dualkv.dkv_combine": ["dk"],
    "gdn.chunk_grads": ["dq"],
    "gdn.wide_grads": ["q", "k", "h", "dq"],
    "sparse_ring.gather_columns": ["k", "k_columns"],
    "sparse_ring.round_sums": ["dk"],
    "sparse_ring.scatter": ["dk"],
}
ROOT = Path(__file__).parents[2]


def arguments(prim_func: Any) -> list[Any]:
    """Tensors of the declared shapes, every symbol a number of its own, and zeros for scalars."""
    symbols: dict[str, int] = {}
    made: list[Any] = []
    for param in prim_func.params:
        if param not in prim_func.buffer_map:
            made.append(0)
            continue
        shape = [str(size) for size in prim_func.buffer_map[param].shape]
        for name in re.findall(r"[A-Za-z_]\w*", " ".join(shape)):
            symbols.setdefault(name, len(symbols) + 2)
        made.append(torch.empty([eval(size, {}, symbols) for size in shape], device="meta"))
    return made


@pytest.mark.parametrize("kernel", list(jit.kernel_modules()), ids=str)
def test_a_size_that_the_host_code_does_not_read_is_refused(kernel: jit.Kernel) -> None:
    variant = kernel.module.VARIANTS[0]
    prim_func = jit.trace(kernel.module, variant)
    found = sizes.unread(prim_func)
    assert [tensor.name for tensor in found] == UNREAD.get(str(kernel), [])

    launched: list[tuple[Any, ...]] = []
    label = jit.label(kernel.module, variant)
    launch = sizes.checked(lambda *given: launched.append(given), label, prim_func)
    right = arguments(prim_func)
    launch(*right)
    assert len(launched) == 1
    for tensor in found:
        for axis in range(right[tensor.place].dim()):
            wrong = list(right)
            wrong[tensor.place] = right[tensor.place].narrow(axis, 0, 1)
            with pytest.raises(
                ValueError, match=rf"; need .*, the sizes of {tensor.like_name};"
            ) as e:
                launch(*wrong)
            got = list(wrong[tensor.place].shape)
            assert str(e.value).startswith(f"{label}: {tensor.name} is {got}; need ")
    assert len(launched) == 1


@pytest.mark.parametrize("name", ["attn.delta", "sparse_ring.gather_columns", "gdn.chunk_table"])
def test_the_host_code_leaves_out_what_is_compared_here(name: str) -> None:
    """As TileLang generates it. A TileLang that reads all sizes makes `sizes` superfluous."""
    (kernel,) = (kernel for kernel in jit.kernel_modules() if str(kernel) == name)
    lowered = jit.lower(kernel, kernel.module.VARIANTS[0])
    host = lowered.host.script()
    left_out = []
    for param, buffer in lowered.prim_func.buffer_map.items():
        (sizes_of,) = re.findall(rf"(\w+): .* = T.tvm_struct_get\({param.name}, 0, 2, ", host)
        (array,) = re.findall(rf"(\w+) = T.decl_buffer\(.*, data={sizes_of}\)", host)
        axes = range(len(buffer.shape))
        read = [axis for axis in axes if re.search(rf"\b{array}\[{axis}\]", host)]
        assert read in ([], [*axes])
        if not read:
            left_out.append(param.name.removesuffix("_handle"))
    assert sorted(left_out) == UNREAD.get(name, [])


class Named:
    """As much of a PrimFunc's argument or buffer as is asked for."""

    def __init__(self, name: str, shape: list[object] | None = None) -> None:
        self.name, self.shape = name, shape


def prim_func(**tensors: Named) -> Any:
    params = {name: Named(f"{name}_handle") for name in tensors}
    buffers = {params[name]: buffer for name, buffer in tensors.items()}
    scalar = Named("scale")
    return types.SimpleNamespace(
        params=[scalar, *buffers], buffer_map=buffers, attrs={"global_symbol": "sample"}
    )


def test_a_launch_without_gaps_is_not_wrapped() -> None:
    assert sizes.checked(print, "sample", prim_func(q=Named("q", [8]), k=Named("k", [8]))) is print


def test_two_shapes_under_one_name_are_refused() -> None:
    both = prim_func(q=Named("rows", ["T", 64]), k=Named("rows", ["T", 128]))
    with pytest.raises(ValueError, match=r"sample: q .* and k .* both named rows; need one shape"):
        sizes.unread(both)


LAUNCH = """
import torch
from qla_kernels.runtime import jit
from qla_kernels.attn.kernels import delta
launch = jit.compile(delta, delta.VARIANTS[0])
rows = torch.empty(1, 8, 2, 1, 64, dtype=torch.bfloat16)
row, stats = torch.empty(1, 2, 8), torch.empty(1, 2, 2, 8)
for o in (rows[:, :7], rows):
    try:
        launch(o, rows, row, row, stats, 1.0, 0)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_kernel_from_the_disk_cache_is_checked_alike(tmp_path: Path) -> None:
    """What the host code says of the right sizes is that the tensors are not on a GPU."""
    try:
        jit.nvcc()
    except Unsupported as missing:
        pytest.skip(str(missing))
    for _ in ("compiled", "found"):
        env = os.environ | {"TILELANG_CACHE_DIR": str(tmp_path)}
        done = zygote.run(LAUNCH, cwd=ROOT, path=str(ROOT), env=env)
        assert done.returncode == 0, done.stderr
        wrong, right = done.stdout.splitlines()
        assert wrong == (
            "ValueError attn.delta-bf16: o is [1, 7, 2, 1, 64]; need [1, 8, 2, 1, 64],"
            " the sizes of do; launch it with such a tensor"
        )
        assert "device_type" in right
    assert len(list(tmp_path.glob("**/kernels/*"))) == 1
