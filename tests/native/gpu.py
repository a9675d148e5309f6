"""A process in which tensors of the CPU pass for those of a GPU, on the stand-in driver.

Importing this prepares the process, which `standin.run` has to have started. Host code of GPUs
runs: all tensors are a GPU's but those that `host` was given. So launch code and programs treat
them as there, streams included. Kernels are made up from the arguments of their first launch; their
names say what the driver writes down, and `made` has what they are. Memory is not touched, and
`kernels_of_torch` says which operators of torch would have been launches.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qla_kernels.gdn import known
from qla_kernels.runtime import device, jit, programs
from qla_kernels.runtime.native import recording
from qla_kernels.runtime.native.pack import pack, texts
from qla_kernels.runtime.native.placeholders import Placeholder
from tests.native import standin
from tests.native.behaviour import CUBIN

NATIVE, DRIVER = standin.replaying(passing=True), standin.Driver()
DRIVER["still"] = DRIVER["full"] = 1
SMS, SECOND = 132, 7  # a stream

launched: list[str] = []  # kernels, by launch code; a replay launches without it
Key = tuple[str, tuple[Any, ...]]  # a label, and what each argument is like
made: list[Key] = []  # made-up kernels, whose names begin with the place here
_kernels: dict[Key, Any] = {}
_on_host: list[Tensor] = []  # as long as they are known, their memory is theirs


def host(x: Tensor) -> Tensor:
    """Returns x, which is a tensor of the host from now on."""
    _on_host.append(x)
    storage = x.untyped_storage()
    assert not storage.nbytes() or DRIVER.on_host(storage.data_ptr(), storage.nbytes())
    return x


def forget() -> None:
    """Forgets programs, made-up kernels and the host's tensors."""
    programs.forget()
    known.forget()
    _kernels.clear()
    made.clear()
    DRIVER.on_host(0, 0)
    _on_host.clear()


def is_on_host(x: Tensor) -> bool:
    return DRIVER.is_on_host(x.data_ptr())


def _made_up(module: Any, variant: Any) -> Callable[..., None]:
    label = jit.label(module, variant)

    def launch(*given: Any) -> None:
        key = label, tuple(map(standin.like, given))
        if key not in _kernels:
            entry = standin.entry("", given)
            floats = [name for name, dtype in entry["scalars"] if dtype == "float32"]
            entry["arguments"] += [("float32", [name]) for name in floats]
            entry["function"] = f"{len(made)}|{standin.kinds(entry)}"
            made.append(key)
            _kernels[key] = NATIVE.launcher(
                label, entry["function"], CUBIN, pack(entry), *texts(entry)
            )
        launched.append(label)
        _kernels[key](*given)

    return launch


class _Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number


@contextmanager
def _fork(x: Tensor) -> Iterator[Any]:
    here, second = _Stream(DRIVER["stream"]), _Stream(SECOND)

    @contextmanager
    def aside() -> Iterator[None]:
        DRIVER["stream"] = SECOND
        yield
        DRIVER["stream"] = here.cuda_stream

    _wait(second, here)
    yield aside()
    _wait(here, second)


def _wait(stream: _Stream, other: _Stream) -> None:
    """An event, as torch has them."""
    recording.note_wait(stream, other)
    DRIVER.note("record", 0, other.cuda_stream)
    DRIVER.note("wait", 0, stream.cuda_stream)


def _representative(native: Any, q: Any, v: Any, cu_seqlens: Any, given: Any, options: Any) -> Any:
    """What stands for a tensor of the host is one, too."""
    found = _usual(native, q, v, cu_seqlens, given, options)
    return found if found is given or is_on_host(found) else host(found)


class kernels_of_torch(TorchDispatchMode):
    """Notes operators that would be launched on a GPU: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if not is_view and not re.match(r"aten::(new_)?empty|aten::detach", func._schema.name):
            self.found.append(func._schema.name.removeprefix("aten::"))
        return done


_usual, known.representative = known.representative, _representative
jit.compile = _made_up
known.copy_of = lambda x: host(x.clone())
device.fork = _fork
device.of = lambda x: torch._C._AutoDispatchBelowADInplaceOrView()
device.sm_count, device.capability = lambda _: SMS, lambda _: (9, 0)
device.capturing = lambda: False
torch._C._cuda_getCurrentRawStream = lambda _: DRIVER["stream"]
for _of in (Tensor, Placeholder):
    _of.is_cuda = property(lambda x: not is_on_host(x))
    _of.is_cpu = property(is_on_host)
Placeholder.is_cuda, Placeholder.is_cpu = True, False
