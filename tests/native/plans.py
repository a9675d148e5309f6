"""plans.c plans as gdn/plan.py does.

    python -m tests.native.plans            2,000 random batches
    python -m tests.native.plans 200000     as many as one likes

It has to be started by `standin.run`, or starts itself.
"""

import os
import random
import struct
import sys

import torch

from qla_kernels.gdn import choices, known, plan
from qla_kernels.gdn.choices import BatchLengths
from qla_kernels.gdn.known import representative
from qla_kernels.gdn.launch.tensors import chunks_in_order, chunks_of
from qla_kernels.gdn.times import STEP
from tests.native import standin

HEADS = [(2, 4), (1, 2), (4, 8), (8, 8), (16, 16), (16, 32), (16, 48), (16, 64), (32, 32), (3, 6)]
SIZES = [(128, 128), (64, 64), (128, 64), (96, 192), (128, 256), (128, 512), (32, 128), (64, 320)]


def lengths_of(rng: random.Random) -> list[int]:
    count = rng.choice((1, 2, 3, 6, 8, 16, 40, 200))
    mean = 2 ** rng.uniform(4, 16) / count
    kind = rng.choice(("equal", "spread", "long", "empty"))
    if kind == "equal":
        return [int(mean)] * count
    spread = [int(mean * rng.lognormvariate(0, 1)) for _ in range(count)]
    if kind == "long":
        spread[rng.randrange(count)] *= 8
    if kind == "empty":
        spread[rng.randrange(count)] = 0
    return spread


def by_python(
    bounds: torch.Tensor, H: int, K: int, HV: int, V: int, sms: int, bound: float, trains: bool
) -> tuple[int, ...]:
    num_sequences, num_tokens = len(bounds) - 1, int(bounds[-1])
    chunks = chunks_of(num_sequences, num_tokens, bounds)
    batch = BatchLengths(chunks, (num_sequences, num_tokens), True, lambda: chunks_in_order(bounds))
    shape = HV, K, V, sms
    forward = choices.forward(batch, shape, bound)
    keeps, most, width = False, 0, 0
    if trains:
        capacity = None
        if forward.segment_chunks is not None:
            keeps = choices.keeps(batch, H, shape, bound, forward)
        if keeps:
            capacity = forward.capacity(num_sequences, num_tokens)
        gradients = choices.backward(batch, shape, plan.gradient_bound(bound), True, capacity)
        most, width = gradients.segment_chunks or 0, gradients.kernel.tile_v
    return (
        list(STEP).index(forward.kernel), forward.segment_chunks or 0,
        int(forward.warm_log_bound > -float("inf")), int(forward.shares), int(len(chunks) == 1),
        int(keeps), most, width,
    )  # fmt: skip


def main(count: int) -> None:
    native = standin.replaying()
    native.plan_with(tuple(map(float, known.constants())))
    rng = random.Random(0)
    seen: dict[str, int] = {}
    for i in range(count):
        (H, HV), (K, V) = rng.choice(HEADS), rng.choice(SIZES)
        sms, trains, exact = rng.choice((132, 114, 78)), rng.random() < 0.7, rng.random() < 0.3
        lengths = lengths_of(rng)
        dtype = rng.choice((torch.int32, torch.int64))
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
        tokens = int(bounds[-1])
        bound = known._BOUNDS[exact]
        q, v = (torch.empty(1).expand(1, tokens, *size) for size in ((H, K), (HV, V)))
        key = native.plans(q, v, bounds, bounds, sms, exact, trains)
        ours = struct.unpack(f"{len(key) // 8}q", key)[-known._NUM_PLANS :]
        theirs = by_python(bounds, H, K, HV, V, sms, bound, trains)
        assert ours == theirs, (i, lengths, H, K, HV, V, sms, bound, trains, ours, theirs)
        kind = ("cut" if theirs[1] else "shares" if theirs[3] else "whole") + (
            ", kept" if theirs[5] else ", cut backward" if theirs[6] else ""
        )
        seen[kind] = seen.get(kind, 0) + 1
    print(f"{count} plans are equal:", ", ".join(f"{n} {kind}" for kind, n in sorted(seen.items())))


def left_to_python() -> None:
    """Checks see bounds that are not valid, and calls that launches refuse, as they are."""
    native, q, v = standin.replaying(), torch.empty(1, 300, 2, 64), torch.empty(1, 300, 4, 64)
    bounds = torch.tensor([0, 100, 300], dtype=torch.int32)
    known._sms[-1] = 132
    first = representative(native, q, v, bounds, bounds, {})
    assert first is not bounds
    other = torch.tensor([0, 101, 299], dtype=torch.int32)  # tokens may be left out
    assert representative(native, q, v, other, other, {}) is first
    assert representative(native, q, v, other, other, {"exact": True}) is not first
    bounds[1] = 7  # the caller's own
    assert first.tolist() == [0, 100, 300]
    lists = [1, 100, 300], [0, 200, 100], [0, 100, 301], [0, -5, 300], [0], [0, 300]
    wrong = [torch.tensor(x, dtype=torch.int32) for x in lists]
    wrong += [other.float(), other.view(3, 1), torch.zeros(6, dtype=torch.int32)[::2]]
    for x in (*wrong, [0, 100, 300]):
        assert representative(native, q, v, bounds, x, {}) is x, x
    wide, odd = (torch.empty(1, 300, 2, K) for K in (256, 60))
    calls = [
        (q, v, None, {}),
        (q, v[0], other, {}),
        (q.numpy(), v, other, {}),
        (wide, v, other, {}),
    ]
    calls += [(odd, v, other, {}), (q, v, other, {"warm_log_bound": -3.0})]
    calls += [(q, v, other, {"enable_fwd_cp_cache": True})]
    for given in calls:
        assert representative(native, *given[:3], other, given[3]) is other
    assert representative(None, q, v, other, other, {}) is other
    os.environ["QLA_CHECK"] = "1"  # compares the bounds
    assert representative(native, q, v, other, other, {}) is other
    del os.environ["QLA_CHECK"]
    zero = torch.zeros(5, dtype=torch.int64)
    assert representative(native, q[:, :0], v[:, :0], zero, zero, {}) is not zero


if __name__ == "__main__":
    if "STANDIN_FOLDER" not in os.environ:
        command = [sys.executable, "-m", "tests.native.plans", *sys.argv[1:]]
        os.execve(sys.executable, command, standin.environment(standin.built()))
    main(int(sys.argv[1]) if sys.argv[1:] else 2000)
    left_to_python()
