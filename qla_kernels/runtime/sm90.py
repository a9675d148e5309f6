"""What every kernel of this package requires of the GPU and of tensors.

The functions `refused_*` return a reason (got, needs, fix) why no kernel can run a call, or None.
They look at shapes, dtypes, strides and the device's capability, which all ranks of a job share.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qla_kernels.runtime.errors import Unsupported, need

CAPABILITY = (9, 0)
HEAD_SIZES = (64, 128)  # of sparse_ring; gdn/shapes.py and dualkv/shapes.py have their own
DTYPES = (torch.bfloat16, torch.float16)
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as kernels get a late dtype
TMA_ALIGNMENT = 16  # bytes, of a tensor's base and of every stride but the last

Reason = tuple[str, str, str]  # got, need, fix


def refused_device(
    capability: tuple[int, int],
    dtype: torch.dtype,
    elsewhere: str,
    what: str = "q, k and v are",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Reason | None:
    """Returns None if kernels run on this kind of GPU in this dtype, else the reason why not.

    Kernels need a Hopper GPU. A reason is (got, needs, fix), three texts of which `errors.need`
    makes an error message.

    Args:
        capability: compute capability of the GPU, such as (9, 0).
        dtype: dtype of the tensors.
        elsewhere: what the caller can do instead, such as "use CPU tensors".
        what: how the message names these tensors, with a verb: "q, k and v are".
        dtypes: the dtypes that the kernels have.
    """
    if capability != CAPABILITY:
        got = f"device capability {capability[0]}.{capability[1]}"
        needs = f"{CAPABILITY[0]}.{CAPABILITY[1]} (Hopper)"
        return got, needs, f"run on an H100 or H200, or {elsewhere}"
    if dtype not in dtypes:
        them = "it" if what.endswith(" is") else "them"
        cast = f"x.to(torch.{dtype_name(DTYPES[0])}), in a model by torch.autocast"
        fix = f"cast {them}, as with {cast}, or {elsewhere}"
        return f"{what} {dtype_name(dtype)}", f"{one_of(dtypes)} on SM90", fix
    return None


def refused_anywhere(device: torch.device, fix: str = "move them") -> Reason | None:
    """Returns None for a CPU, CUDA or meta device, else the reason why no function can run on it.

    A reason is (got, needs, fix), three texts of which `errors.need` makes an error message. `fix`
    is the advice in it.
    """
    if device.type in ("cpu", "cuda", "meta"):
        return None
    return f"tensors are on {device.type}", "cpu or cuda", fix


def refused_head_size(
    size: int, letter: str, padded: str, elsewhere: str, sizes: Sequence[int] = HEAD_SIZES
) -> Reason | None:
    """Returns None if a kernel has this head size, else the reason why a call cannot run.

    A reason is (got, needs, fix), three texts of which `errors.need` makes an error message.

    Args:
        size: the head size.
        letter: its name in messages: D, K or V.
        padded: the tensors to pad to a larger head size, as text: "q and k".
        elsewhere: what the caller can do instead, such as "use CPU tensors".
        sizes: the sizes that kernels have, in ascending order.
    """
    if size in sizes:
        return None
    room = [s for s in sizes if s > size]
    fix = f"pad {padded} to {room[0]}, or {elsewhere}" if room else elsewhere
    return f"head dimension {letter}={size}", f"{alternatives(sizes)} on SM90", fix


def head_sizes(validate: Any) -> str:
    """Returns text about the head sizes that the kernels of a family have: "head size 64 or 128".

    `validate` is the family's module validate.py, such as qla_kernels.gdn.validate. If it has a
    constant HEAD_SIZES, the text comes from there.
    """
    sizes = getattr(validate, "HEAD_SIZES", HEAD_SIZES)
    return sizes if isinstance(sizes, str) else f"head size {alternatives(sizes)}"


def refused_strides(name: str, x: Tensor, batch_may_repeat: bool = False) -> Reason | None:
    """Returns None if TMA, Hopper's copy engine, can read x, else the reason why a call cannot run.

    A reason is (got, needs, fix), three texts of which `errors.need` makes an error message.

    Args:
        name: what the message calls x.
        x: any tensor, of at least two dimensions.
        batch_may_repeat: True also accepts a stride of 0 in the first dimension, as `expand` makes.
            The caller must then launch the kernel once per entry of the first dimension. If the
            second dimension has size 1, the stride of 0 is still refused.
    """
    if tma_readable(x, batch_may_repeat):
        return None
    return (
        f"{name} has strides {tuple(x.stride())} and offset {x.storage_offset()}",
        f"a last stride of 1 and the rest positive multiples of {TMA_ALIGNMENT} bytes",
        f"pass {name}.contiguous()",
    )


def tma_readable(x: Tensor, batch_may_repeat: bool = False) -> bool:
    """Returns True if TMA, Hopper's copy engine, can read a tensor with x's strides.

    The last stride must be 1; the other strides and the offset in the storage must be multiples of
    16 bytes, and no stride may be 0. The address itself is not checked; `require_aligned` does
    that.

    Args:
        x: any tensor, of at least two dimensions.
        batch_may_repeat: True also accepts a stride of 0 in the first dimension, as `expand` makes.
            The caller must then launch the kernel once per entry of the first dimension. If the
            second dimension has size 1 (one token per row), the stride of 0 is still refused,
            because kernels then use it as the distance between tokens.
    """
    offset = 0  # untraceable
    if not torch.compiler.is_compiling():
        offset = int(x.storage_offset())
        if x.is_contiguous() and offset % TMA_ALIGNMENT == 0:
            return True  # nearly every call, and host time counts
    if x.numel() == 0:
        return True  # nothing is launched
    # The stride of a dimension of one element is never used, so any value of it is fine.
    steps = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    aligned = all(s * x.element_size() % TMA_ALIGNMENT == 0 for s in (*steps, offset))
    # A TMA descriptor cannot have a stride of 0.
    inner = steps[1:] if batch_may_repeat and x.shape[0] > 1 and x.shape[1] > 1 else steps
    return x.stride(-1) == 1 and aligned and 0 not in inner


def low_words(x: Tensor) -> Tensor:
    """Returns x as int32 numbers without a copy: x if it is int32, else a view of an int64 tensor.

    The view has the low 32 bits of each number. x may have any strides.
    """
    return x if x.dtype == torch.int32 else x.unsqueeze(-1).view(torch.int32).select(-1, 0)


def readable(x: Tensor) -> Tensor:
    """Returns x, or a contiguous copy if kernels cannot read its strides or its address.

    Kernels need a last stride of 1. The address must be a multiple of 16 bytes, and the other
    strides positive multiples of 16 bytes.
    """
    step = TMA_ALIGNMENT // x.element_size()
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    aligned = all(s > 0 and s % step == 0 for s in strides)
    if x.stride(-1) == 1 and aligned and x.data_ptr() % TMA_ALIGNMENT == 0:
        return x
    return x.contiguous()


def require_aligned(op: str, **tensors: Tensor) -> None:
    """Raises Unsupported unless the address of each tensor is a multiple of 16 bytes.

    The tensors are passed by the names that the error uses. torch.compile cannot trace this check.
    """
    for name, x in tensors.items():
        if past := x.data_ptr() % TMA_ALIGNMENT:
            got = f"{name} begins {past} bytes past a multiple of {TMA_ALIGNMENT}"
            fix = f"pass {name}.contiguous()"
            raise Unsupported(need(op, got, "an aligned first element", fix))


def require(reason: str | None) -> None:
    """Raises Unsupported with the text `reason`; None, for a call that can run, raises nothing."""
    if reason is not None:
        raise Unsupported(reason)


def expect_tensors(op: str, **arguments: object) -> None:
    """Raises ValueError unless all keyword arguments but `op` are tensors.

    The error names the function `op` and the first argument that is no tensor.
    """
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            got = f"{name} is of type {type(x).__name__}"
            raise ValueError(need(op, got, "a tensor", f"pass {name} as one"))


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def one_of(dtypes: tuple[torch.dtype, ...]) -> str:
    """Joins names of dtypes to a text for a message, such as `bfloat16, float16 or float32`."""
    return alternatives([dtype_name(d) for d in dtypes])


def alternatives(choices: Sequence[object]) -> str:
    """Joins two or more choices to a text for a message, such as `64, 128 or 256`."""
    *head, last = map(str, choices)
    return f"{', '.join(head)} or {last}"
