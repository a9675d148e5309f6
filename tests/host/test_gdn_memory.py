"""What a backward allocates, counted without a GPU: meta tensors, and kernels that do nothing."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn.call import Call, Incoming, Options, SavedForward
from qla_kernels.gdn.launch import backward
from qla_kernels.gdn.tree import launch as tree_launch
from qla_kernels.gdn.tree.ops import IncomingTree, SavedTree
from qla_kernels.gdn.tree.tables import ON_HOST, SIBLINGS, DeltaTables, tree_tables
from qla_kernels.runtime import device, jit
from tests.gdn_calls import call, leaves

MIB = 2**20
PACKED = (3274, 1029, 2909, 5061, 2011, 3793, 9932, 4759)


class Peak(TorchDispatchMode):
    """The most bytes alive at a time in storages made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
        made = func(*args, **(kwargs or {}))
        for x in filter(_is_tensor, tree_leaves(made)):
            storage = x.untyped_storage()
            if id(storage) not in given and id(storage) not in self.alive:
                self.alive[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, id(storage))
        self.bytes = max(self.bytes, sum(self.alive.values()))
        return made


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def peak_of_backward(
    lengths: tuple[int, ...], H: int, HV: int, monkeypatch: pytest.MonkeyPatch
) -> float:
    monkeypatch.setattr(jit, "compile", lambda *_: lambda *_: None)
    monkeypatch.setattr(device, "sm_count", lambda _: 132)
    T, N, size = sum(lengths), len(lengths), 128

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = meta(1, T, H, size), meta(1, T, H, size)
    v, do, A = meta(1, T, HV, size), meta(1, T, HV, size), meta(1, T, HV, 64)
    g_cum, beta = meta(1, T, HV, dtype=torch.float32), meta(1, T, HV)
    h0, dht = (meta(N, HV, size, size, dtype=torch.float32) for _ in range(2))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    with Peak() as peak:
        on_gpu = meta(N + 1, dtype=torch.int32)
        done = backward.gdn_bwd(
            Call(q, k, v, g_cum, beta, size**-0.5, h0, on_gpu, bounds),
            SavedForward(g_cum, A, []),
            Incoming(do, dht),
            Options(),
        )
    assert sum(peak.alive.values()) >= sum(x.nbytes for x in done if x is not None), "results live"
    return peak.bytes / MIB


@pytest.mark.parametrize(
    ("heads", "lengths", "flash_qla"),  # MiB, as measured in record gdn-20261121T205739Z-1b5b
    [
        ((16, 32), (8192,), 371.5),
        ((16, 32), (32768,), 1436.0),
        ((16, 32), PACKED, 1500.0),
        ((4, 8), (8192,), 104.9),
        ((4, 8), (32768,), 370.0),
        ((4, 8), PACKED, 394.0),
    ],
)
def test_a_backward_needs_less_than_flash_qla(heads, lengths, flash_qla, monkeypatch):
    assert peak_of_backward(lengths, *heads, monkeypatch) < 0.95 * flash_qla


def test_what_a_backward_needs_is_counted(monkeypatch):
    """Gradients, a state and, of every second 64 rows of V, a gradient of the state a chunk."""
    T, H, HV = 8192, 16, 32
    states, gradients = T // 64 * HV * 128 * 128 * 2, T * (2 * H + HV) * 128 * 2
    gates = 2 * T * HV * 4 + T * HV * 4  # dg, dbeta; beta in fp32
    least = states + states // 2 + gradients + gates
    got = peak_of_backward((T,), H, HV, monkeypatch) * MIB
    assert least < got < 1.04 * least


@pytest.mark.parametrize("normalised", [False, True])
def test_bytes_a_token_that_a_training_forward_keeps(normalised):
    """A, g_cum and beta of each value head; with normalisation, q and k normalised."""
    H, HV, K, T = 16, 32, 128, 64
    x = call(
        batch=1, tokens=T, heads=(H, HV), sizes=(K, K), dtype=torch.bfloat16, gates=torch.float32
    )
    x = leaves(x)
    inputs = {t.untyped_storage().data_ptr() for t in x.values()}
    storages: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if (start := t.untyped_storage().data_ptr()) not in inputs:
            storages[start] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        o, _ = chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=normalised)
    assert o.requires_grad
    assert sum(storages.values()) / T == 132 * HV + (4 * H * K if normalised else 0)


def test_a_tree_needs_no_states_of_leaves(monkeypatch):
    """2000 responses of a token to a prompt: states, of 2 MiB each, of the prompt and a block."""
    monkeypatch.setattr(jit, "compile", lambda *_: lambda *_: None)
    monkeypatch.setattr(device, "sm_count", lambda _: 132)
    H, HV, size, leaves = 8, 32, 128, 2000
    T, state = 64 + leaves, HV * size * size * 4

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    made = tree_tables([0, *range(64, T + 1)], [-1] + [0] * leaves, False)
    tables = DeltaTables(*made[:ON_HOST], *(x.to("meta") for x in made[ON_HOST:]))
    q, k, v = meta(1, T, H, size), meta(1, T, H, size), meta(1, T, HV, size)
    g, beta = (meta(1, T, HV, dtype=torch.float32) for _ in range(2))
    call = Call(q, k, v, g, beta, size**-0.5)
    with Peak() as forward:
        done = tree_launch.gdn_tree_fwd(call, tables, Options(is_train=True))
    assert done.states.nbytes == state
    results = sum(x.nbytes for x in done if x is not None)
    assert forward.bytes < 1.5 * results

    saved = SavedTree(done.g_cum, done.A, done.states)
    with Peak() as peak:
        tree_launch.gdn_tree_bwd(call, tables, saved, IncomingTree(v, None), Options())
    chunks = (leaves + 1) * state // 2  # in 16 bits: a state, and a gradient in two halves
    least = 2 * chunks + SIBLINGS * state  # results are small beside these
    assert least <= peak.bytes < 1.02 * least
