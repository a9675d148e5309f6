"""Wrong bounds and slots on a GPU: every kernel ends, and writes nothing outside its tensors.

    python -m tests.gdn_bad_bounds_gpu             with bands around all tensors, looked at
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 99 \\
        python -m tests.gdn_bad_bounds_gpu bare    without them: the sanitizer sees reads as well

A case that takes longer than LIMIT ends the process.
"""

import faulthandler
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from qla_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tests.gdn_bad_bounds_check import BOUNDS, HV, OF_SLOTS, PARTS, SCALE, SIZE, SLOTS, H, Setting

LIMIT = 120  # s, of which a case waits for nothing but kernels that are compiled
BAND, POISON = 1 << 16, 0xA5  # bytes before and behind a tensor; as an index it is far below 0


class Bands:
    """Memory for tensors, each amid poison."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        buffer = torch.full((2 * BAND + size,), POISON, dtype=torch.uint8, device="cuda")
        self.buffers.append((buffer, size))
        return buffer[BAND : BAND + size].view(dtype).view(shape)

    def place(self, x: Tensor) -> Tensor:
        return self.empty(tuple(x.shape), x.dtype).copy_(x)

    def broken(self) -> int:
        """Tensors beside which something was written."""
        sides = ((buffer[:BAND], buffer[BAND + size :]) for buffer, size in self.buffers)
        return sum(any(bool((side != POISON).any()) for side in pair) for pair in sides)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """What the launch code allocates, all of it contiguous."""
        new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

        def banded_new(x: Tensor, *size: Any, **options: Any) -> Tensor:
            if not x.is_cuda or options.keys() - {"dtype"}:
                return new_empty(x, *size, **options)
            shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            return self.empty(tuple(shape), options.get("dtype") or x.dtype)

        def banded_like(x: Tensor, **options: Any) -> Tensor:
            if not x.is_cuda or options.keys() - {"dtype", "memory_format"}:
                return empty_like(x, **options)
            return self.empty(tuple(x.shape), options.get("dtype") or x.dtype)

        patch.setattr(torch.Tensor, "new_empty", banded_new)
        patch.setattr(torch, "empty_like", banded_like)


def public(s: Setting, bounds: Tensor) -> None:
    """As a caller does it: a forward with a backward, then decoding."""
    q, k, v = (s.rows(heads, SIZE).requires_grad_() for heads in (H, H, HV))
    (g, beta), h0 = s.gates(), s.states().requires_grad_()
    g, beta = g.requires_grad_(), beta.requires_grad_()
    o, final = chunk_gated_delta_rule(
        q, k, v, g, beta, scale=SCALE, initial_state=h0, output_final_state=True,
        cu_seqlens=bounds, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.autograd.backward((o, final), (s.place(torch.ones_like(o)), s.states()))
    with torch.no_grad():
        fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=h0, output_final_state=True, cu_seqlens=bounds
        )


def cases() -> Iterator[tuple[str, Callable[[Setting], None]]]:
    parts = {name: run for name, (run, _) in PARTS.items()} | {"public": public}
    for part, run in parts.items():
        for name, bounds in BOUNDS.items():
            for dtype in (torch.int64, torch.int32):
                if max(map(abs, bounds)) <= 2**31 or dtype == torch.int64:
                    cu_seqlens = torch.tensor(bounds).to(dtype)
                    yield (
                        f"{part}: bounds {name}, {dtype}",
                        lambda s, run=run, b=cu_seqlens: run(s, s.place(b)),
                    )
    for part, (run, _) in OF_SLOTS.items():
        for name, slots in SLOTS.items():
            yield (
                f"{part}: slots {name}",
                lambda s, run=run, x=slots: run(s, s.place(torch.tensor(x))),
            )


def main() -> int:
    bare, bad, done = sys.argv[1:] == ["bare"], [], 0
    for name, run in cases():
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        print(name, flush=True)
        bands = Bands()
        with pytest.MonkeyPatch.context() as patch:
            if not bare:
                bands.patch(patch)
            run(Setting(Tensor.cuda if bare else bands.place, patch))
            torch.cuda.synchronize()
        done += 1
        if broken := bands.broken():
            bad.append(f"{name}: written beside {broken} tensors")
    faulthandler.cancel_dump_traceback_later()
    print("\n".join([*bad, f"{done} cases, {len(bad)} bad"]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
