"""Tables and indices that nobody should make, and that a stale buffer may hold."""

from collections.abc import Iterator

import torch
from torch import Tensor

from qla_kernels.dualkv.tables import Tables
from qla_kernels.sparse_ring import VSIndex

MOST = 2**31 - 1
POOL = (
    -MOST - 1,
    -MOST,
    -(2**20),
    -300,
    -128,
    -65,
    -64,
    -1,
    0,
    1,
    63,
    64,
    127,
    128,
    129,
    2**20,
    MOST,
)


def numbers(*shape: int) -> Tensor:
    """int32, of which most would be possible, and some are at the ends of the type."""
    small = torch.randint(-400, 400, shape, dtype=torch.int32)
    far = torch.tensor(POOL, dtype=torch.int32)[torch.randint(len(POOL), shape)]
    return torch.where(torch.rand(shape) < 0.7, small, far)


def bad_tables(right: Tables, *names: str) -> Iterator[Tables]:
    """Of those tables one column, or one table, or some of all numbers are wrong."""
    for name in names:
        table = getattr(right, name)
        columns = table.unbind(-1) if table.dim() == 2 else [table]
        for column in range(len(columns)):
            for number in (-MOST - 1, 1000, MOST):
                wrong = table.clone()
                (wrong[:, column] if table.dim() == 2 else wrong).fill_(number)
                yield right._replace(**{name: wrong})
        for _ in range(3):
            yield right._replace(**{name: numbers(*table.shape)})
    for share in (0.1, 0.1, 0.3, 0.3, 1.0, 1.0):
        yield Tables(
            *(torch.where(torch.rand(x.shape) < share, numbers(*x.shape), x) for x in right)
        )


def bad_indices(B: int, H: int, T: int, n: int, few: bool = False) -> Iterator[VSIndex]:
    """Columns out of order, twice, or nowhere; diagonals without the first, or past the last."""
    ascending = torch.randperm(T)[:n].sort().values.int().expand(B, H, n).contiguous()
    columns = [
        ascending,
        ascending.flip(-1).contiguous(),
        numbers(B, H, n),
        *(torch.full_like(ascending, c) for c in (-MOST - 1, -1, 0, T // 2, T, MOST)),
        torch.randint(T, (B, H, n), dtype=torch.int32),
        torch.randint(-T, 2 * T, (B, H, n), dtype=torch.int32),
        torch.where(torch.rand(B, H, n) < 0.5, ascending, T).int().contiguous(),
    ]
    words = -(-T // (64 * 32))
    bits = [torch.full((B, H, words), b, dtype=torch.int32) for b in (-1, 0)]
    bits.append(torch.randint(-MOST - 1, MOST, (B, H, words), dtype=torch.int32))
    for i, v_idx in enumerate(columns[: 5 if few else None]):
        for d_bits in [bits[(i + 1) % 3]] if few else bits[i % 2 :: 2]:
            counts = numbers(B, H)
            yield VSIndex(v_idx, counts, d_bits, torch.zeros(B, H), T)
