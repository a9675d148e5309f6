"""CPU time of public calls on the stand-in driver, replayed and not, in multiples of an addition.

    python -m tests.native.families_time

The driver's own time is left out. `usual` calls run their launch code each time; kernels are those
of families.py, found without a search. See host_time.py for the numbers.
"""

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qla_kernels.runtime import jit, programs
from tests.native import host_time, standin

Call = Callable[[], object]

BURSTS = 12


def calls() -> dict[str, Call]:
    from qla_kernels import gated_delta_net
    from tests.native import families

    layout, x = families.LAYOUT, [*families._gdn(families.LAYOUT.num_tokens)]
    rows, weight = torch.zeros(layout.num_tokens, 64, dtype=torch.bfloat16), torch.zeros(64, 4)
    q, k, v = torch.zeros(3, 1, 512, 2, 64, dtype=torch.bfloat16).unbind()

    def tree(*x: Tensor) -> Any:
        return families.shared_prefix_gated_delta_rule(*x, layout)[0]

    def conv(x: Tensor, weight: Tensor) -> Tensor:
        return families.causal_conv1d(x, weight)

    def tree_conv(x: Tensor, weight: Tensor) -> Tensor:
        return families.shared_prefix_conv1d(x, weight, None, layout)

    def norm(*x: Tensor) -> Tensor:
        return families.gated_rms_norm(*x)

    def layer(mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, *more: Tensor) -> Tensor:
        weight, z, norm_weight = more
        y, _ = gated_delta_net(
            mixed_qkv, a, b, A_log, None, weight, key_heads=2, z=z, norm_weight=norm_weight
        )
        return y

    half = {"dtype": torch.bfloat16}
    gated = torch.zeros(2, 512, 4, 64, **half), torch.zeros(64)
    whole = torch.zeros(1, 512, 512, **half), *torch.zeros(2, 1, 512, 4, **half), torch.zeros(4)
    whole = *whole, torch.zeros(512, 4), torch.zeros(1, 512, 4, 64, **half), torch.zeros(64)

    def sparse(*x: Tensor) -> Any:
        return families.sparse_attention(*x, index=families.INDEX)

    return {
        "tree, forward": lambda: tree(*x),
        "tree, both": families._step(tree, *x),
        "conv, forward": lambda: conv(rows, weight),
        "conv, both": families._step(conv, rows, weight),
        "conv of a tree, forward": lambda: tree_conv(rows, weight),
        "conv of a tree, both": families._step(tree_conv, rows, weight),
        "norm, forward": lambda: norm(*gated[0], gated[1]),
        "norm, both": families._step(norm, *gated[0], gated[1]),
        "layer, forward": lambda: layer(*whole),
        "layer, both": families._step(layer, *whole),
        "sparse, forward": lambda: sparse(q, k, v),
        "sparse, both": families._step(sparse, q, k, v),
    }


def usual(call: Call) -> Call:
    """Returns the call as it is without programs; its launches have the kernels of the first."""
    from tests.native import families

    search = jit.compile
    families._launched.clear()
    programs.forget()
    call()
    kernels = itertools.cycle(list(families._launched))

    def run() -> None:
        finds = [(table, table.find) for table in programs._tables]
        for table, _ in finds:
            table.find = programs._nothing
        jit.compile = lambda module, variant: next(kernels)
        call()
        jit.compile = search
        for table, find in finds:
            table.find = find

    return run


def main() -> None:
    host_time.CALLS = 60
    torch.set_num_threads(1)
    timed: dict[str, Call] = {}
    for name, call in calls().items():
        timed |= {f"{name}, usual": usual(call)}
        for _ in range(3):
            call()
        timed |= {name: call}
    host_time.report(timed, BURSTS)


if __name__ == "__main__":
    if "STANDIN_FOLDER" not in os.environ:
        command = [sys.executable, "-m", "tests.native.families_time", *sys.argv[1:]]
        os.execve(sys.executable, command, standin.environment(standin.built()))
    main()
