"""What the launcher does with arguments, threads, devices, captures and forks.

Each function without an underscore is a test. `python -m tests.native.behaviour NAME...` runs some,
each in a fork of a process that has imported torch and not launched anything, and prints as JSON
what is wrong with each: "" if nothing. It has to be started by `standin.run`. The entry is written
by hand, so TileLang is not needed.
"""

import json
import os
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from qla_kernels.runtime.native.entry import Entry
from qla_kernels.runtime.native.pack import pack, texts
from tests.native import standin

NAME = "family.kernel-bf16"
CUBIN = b"\x7fELF, as far as the stand-in looks"

ENTRY: Entry = {
    "function": "family_kernel_bf16_kernel",
    "tensors": [
        {
            "name": "x",
            "dtype": "bfloat16",
            "sizes": [["rows"], ["heads"], [64]],
            "strides": [["x_row"], ["x_head"], [1]],
        },
        {
            "name": "sums",
            "dtype": "float32",
            "sizes": [["rows"], ["heads"]],
            "strides": [["heads"], [1]],
        },
    ],
    "scalars": [("scale", "float32"), ("ctas", "int32")],
    "order": [True, False, True, False],  # x, scale, sums, ctas
    "symbols": [
        ("rows", 0, "size", 0),
        ("heads", 0, "size", 1),
        ("x_row", 0, "stride", 0),
        ("x_head", 0, "stride", 1),
    ],
    "maps": [
        {
            "tensor": 0,
            "dtype": 9,
            "dims": [[64], ["heads"], ["rows"]],
            "strides": [["x_head", 2, "*"], ["x_row", 2, "*"]],
            "box": [64, 1, 32],
            "steps": [1, 1, 1],
            "interleave": 0,
            "swizzle": 3,
            "l2": 2,
            "fill": 0,
        }
    ],
    "arguments": [
        ("map", [0]),
        ("pointer", [1]),
        ("int32", ["rows", 1, "-"]),
        ("float32", ["scale"]),
    ],
    "launch": [["ctas"], ["rows", 31, "+", 32, "//"], [1], [128], [1], [1], [50176]],
    "dependent": True,
}


def _launch(**how: Any) -> Callable[..., None]:
    native = standin.launcher(**how)
    return native.launcher(NAME, ENTRY["function"], CUBIN, pack(ENTRY), *texts(ENTRY))


def _driver() -> standin.Driver:
    driver = standin.Driver()
    driver.expect(standin.kinds(ENTRY))
    return driver


def _arguments(rows: int = 40, heads: int = 2) -> list[Any]:
    return [torch.zeros(rows, heads, 64, dtype=torch.bfloat16), 0.5, torch.zeros(rows, heads), 3]


def _refused(launch: Callable[..., None], *given: Any) -> str:
    try:
        launch(*given)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("launched")


def numbers() -> None:
    """What the driver is given, by the exchange API and by Python, is what the entry says."""
    x, scale, sums, ctas = given = _arguments()
    driver, records = _driver(), []
    for exchange in (True, False):
        driver.expect(standin.kinds(ENTRY))
        _launch(exchange=exchange)(*given)
        records.append(driver.record())
    assert records[0] == records[1]
    name, rest = records[0].split(b"\0", 1)
    assert name.decode() == ENTRY["function"]
    assert struct.unpack_from("7I", rest) == (ctas, 2, 1, 128, 1, 1, 50176)
    assert struct.unpack_from("Qi", rest[28:]) == (0, 1)  # stream, dependent
    tensor_map, address, rows, real = struct.unpack_from("=128sQif", rest[40:])
    assert struct.unpack_from("10Q", tensor_map) == (x.data_ptr(), 64, 2, 40, 0, 0, 128, 256, 0, 0)
    assert (address, rows, real) == (sums.data_ptr(), 39, scale)
    assert len(rest) == 40 + 144


def refusals() -> None:
    """They name tensor, axis, what was got and what is needed; both ways of reading a tensor."""
    for launch in (_launch(), _launch(exchange=False)):
        x, scale, sums, ctas = _arguments()
        like = "; launch it with such a tensor"
        for given, said in (
            (
                (x, scale, sums[:39], ctas),
                f"sums has size 39 along axis 0; need 40, rows{like}",
            ),
            (
                (x, scale, sums.T.contiguous().T, ctas),
                f"sums has stride 1 along axis 0; need 2, heads{like}",
            ),
            ((x[:, :, :32], scale, sums, ctas), f"x has size 32 along axis 2; need 64{like}"),
            (
                (x.repeat_interleave(2, 2)[:, :, ::2], scale, sums, ctas),
                f"x has stride 2 along axis 2; need 1{like}",
            ),
            ((x[0], scale, sums, ctas), f"x has 2 dimensions; need 3{like}"),
            ((x.half(), scale, sums, ctas), f"x is torch.float16; need bfloat16{like}"),
            ((x, scale, sums.tolist(), ctas), f"sums is no tensor; need a torch.Tensor{like}"),
            ((x, scale, sums, 0.5), "ctas is 0.5; need an integer; pass such a number"),
            ((x, "a", sums, ctas), "scale is 'a'; need a number; pass such a number"),
            (
                (x, scale, sums, 1 << 31),
                "ctas is 2147483648; need an integer of 32 bits; pass such a number",
            ),
            (
                (x, scale, sums, 0),
                "a launch of 0 CTAs along x; need 1 to 2147483647; launch where there is work",
            ),
        ):
            assert _refused(launch, *given) == f"ValueError: {NAME}: {said}"
        said = f"{NAME}: 3 arguments; need 2 tensors and 2 scalars; pass those"
        assert _refused(launch, x, scale, sums) == f"TypeError: {said}"
    on_cpu = "x is not on a GPU; need a CUDA tensor; launch it with such a tensor"
    assert _refused(_launch(device_type=2), *_arguments()) == f"ValueError: {NAME}: {on_cpu}"


def kinds_of_tensors() -> None:
    """Parameters, and tensors that require gradients, are tensors like others."""
    for exchange in (True, False):
        launch, (x, scale, sums, ctas) = _launch(exchange=exchange), _arguments()
        launch(torch.nn.Parameter(x), scale, sums.requires_grad_() * 2, ctas)
        with torch.inference_mode():
            launch(x.clone(), scale, sums.clone(), ctas)


class Far(torch.Tensor):
    """Says that its rows are 2^31 elements apart."""

    def stride(self) -> tuple[int, ...]:
        return 1 << 31, 64, 1


def single_elements() -> None:
    """Strides along axes of one element do not count, whatever they are."""
    launch, driver = _launch(exchange=False), _driver()
    x, scale, sums, ctas = _arguments(rows=1)
    launch(x.as_subclass(Far), scale, sums.as_strided(sums.shape, (77, 1)), ctas)
    assert driver.record()


def wide_numbers() -> None:
    """A stride that does not fit the kernel's 32-bit numbers is refused."""
    x, scale, sums, ctas = _arguments(rows=2)
    said = _refused(_launch(exchange=False), x.as_subclass(Far), scale, sums, ctas)
    assert "x has stride 2147483648 along axis 0; need 2147483647, the most that fits" in said


def unaligned() -> None:
    x, scale, sums, ctas = _arguments()
    room = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    said = _refused(_launch(), room, scale, sums, ctas)
    assert f"{NAME}: no tensor map of x; need an address and strides that are multiples" in said


def failures() -> None:
    """The driver's own errors are named."""
    driver, launch = _driver(), _launch()
    driver["fail"] = 1
    said = _refused(launch, *_arguments())
    assert f"{NAME}: cuLaunchKernelEx gave CUDA_ERROR_INVALID_VALUE (1)" in said
    native = standin.launcher()
    broken = native.launcher(NAME, ENTRY["function"], b"no ELF", pack(ENTRY), *texts(ENTRY))
    assert "cuLibraryLoadData gave CUDA_ERROR_INVALID_VALUE" in _refused(broken, *_arguments())


def threads() -> None:
    """Many threads that launch first, at once: the kernel is loaded once, and all launch."""
    driver, launch = _driver(), _launch()
    together, errors = threading.Barrier(16), []

    def run() -> None:
        given = _arguments()
        together.wait()
        try:
            for _ in range(50):
                launch(*given)
            assert driver.library.standin_mode() == 0  # captures are strict again
        except Exception as error:
            errors.append(error)

    runners = [threading.Thread(target=run) for _ in range(16)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert not errors
    assert driver["loads"] == 1


def captures() -> None:
    """A kernel is loaded while a stream is captured; later launches load nothing."""
    driver, launch = _driver(), _launch()
    driver["capturing"] = 1
    launch(*_arguments())
    launch(*_arguments())
    assert driver["loads"] == 1
    assert driver.library.standin_mode() == 0


class OnGpu1(torch.Tensor):
    def get_device(self) -> int:
        return 1


def devices() -> None:
    """Another device's context is made current for a launch; one load serves all devices."""
    driver, launch = _driver(), _launch(exchange=False)
    launch(*_arguments())
    assert (driver["pushes"], driver["pops"], driver["loads"]) == (0, 0, 1)
    x, scale, sums, ctas = _arguments()
    elsewhere = [y.as_subclass(OnGpu1) for y in (x, sums)]
    launch(elsewhere[0], scale, elsewhere[1], ctas)
    assert (driver["pushes"], driver["pops"], driver["loads"]) == (1, 1, 1)
    said = _refused(launch, x, scale, elsewhere[1], ctas)
    assert "sums is on GPU 1; need GPU 0, where x is" in said
    driver["no_context"] = 1  # of a thread that has not used CUDA yet
    launch(*_arguments())
    assert (driver["pushes"], driver["pops"]) == (2, 2)


def forks() -> None:
    """A forked child may launch if its parent had not; else it is told what to do."""
    for used in (False, True):
        launch, given = _launch(), _arguments()
        if used:
            launch(*given)
        child = os.fork()
        if child == 0:
            try:
                launch(*given)
                os._exit(0)
            except RuntimeError as error:
                said = "this process was forked from one that had used CUDA; need a process of its"
                os._exit(7 if said in str(error) else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (7 if used else 0)
        launch(*given)  # the parent is not disturbed


def memory() -> None:
    """Launches, refusals and launchers that are dropped leave nothing behind."""
    import resource

    launch, given = _launch(), _arguments()
    wrong = [*given[:2], given[2][:3], given[3]]

    def used() -> int:
        for _ in range(20_000):
            launch(*given)
        for _ in range(5_000):
            _refused(launch, *wrong)
        for _ in range(500):
            _launch(exchange=False)(*given)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    first = used()
    assert used() - first < 2_000  # KiB; an int kept by each launch would be 600
    assert sys.getrefcount(given[0]) < 5


def entries() -> None:
    """An entry that is cut short, or too large, is refused before it can be launched."""
    native, numbers = standin.launcher(), pack(ENTRY)
    for wrong in (b"", numbers[:-8], numbers + bytes(8), b"\xff" * len(numbers)):
        said = _refused(native.launcher, NAME, "f", CUBIN, wrong, *texts(ENTRY))
        assert "an entry that this launcher cannot read" in said


def _apart(test: Callable[[], None]) -> str:
    """What is wrong with a test, in a process of its own; "" if nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            test()
        except BaseException:
            os.write(writing, traceback.format_exc()[-4000:].encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or (f"ended with {code}" if code else "")


if __name__ == "__main__":
    print(json.dumps({name: _apart(globals()[name]) for name in sys.argv[1:]}))
