"""`VSIndex`: the lines of a mask as tensors.

Shapes do not depend on the lines, and every rank holds the same index. A head of 512K tokens takes
17 KB: 4096 columns of 4 bytes, and one bit for each of 8192 diagonals.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from qla_kernels.runtime.errors import need
from qla_kernels.sparse_ring.patterns import Dense, FixedVerticalSlash, Lines
from qla_kernels.sparse_ring.plan import diagonals, pack
from qla_kernels.sparse_ring.shapes import BLOCK, WORD


class VSIndex(NamedTuple):
    """Record: the mask of `sparse_attention`, for each query head of each batch row.

    A mask consists of columns (tokens that all later tokens see) and diagonals (distances d in
    blocks of 64 tokens: block i of the queries sees block i - d of the keys). Diagonal 0 is always
    present.

    `to_lists`, `check` and `described(contents=True)` copy the mask to the host, and wait for a
    GPU.

    Attributes:
        v_idx: int32 [B, H, n], the columns of each head, ascending; unused entries are T.
        v_cnt: int32 [B, H], the number of columns of each head.
        d_bits: int32 [B, H, ceil(T / 64 / 32)], the diagonals of each head as bits: diagonal d is
            bit d % 32 of word d // 32.
        window_recall: fp32 [B, H], the share of the attention of the last complete block of 64
            queries that the mask keeps; NaN if the mask was not chosen from q and k, 1 for full
            attention.
        T: number of tokens, with padding.
    """

    v_idx: Tensor
    v_cnt: Tensor
    d_bits: Tensor
    window_recall: Tensor
    T: int

    @property
    def blocks(self) -> int:
        """The number of blocks of 64 tokens in the sequence."""
        return self.T // BLOCK

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all tensors of the index."""
        return sum(x.numel() * x.element_size() for x in self[:4])

    def diagonals(self) -> Tensor:
        """Returns bool [B, H, T / 64]: entry d is True if the mask contains diagonal d.

        Diagonal d means that each block i of 64 queries sees block i - d of the keys.
        """
        return diagonals(self.d_bits, self.blocks)

    def density(self) -> Tensor:
        """Returns which fraction of the causal (query, key) pairs is in the mask, fp64 [B, H]."""
        active, blocks = self.diagonals(), self.blocks
        size = torch.full((blocks,), BLOCK * BLOCK, device=active.device)
        size[0] = BLOCK * (BLOCK + 1) // 2
        tiles = torch.arange(blocks, 0, -1, device=active.device)
        slashes = (active * size * tiles).sum(-1)
        block = self.v_idx.long() // BLOCK
        below = (blocks - 1 - block).clamp(min=0)  # row blocks that see all of the column's block
        covered = (active[..., 1:].cumsum(-1)).long()
        covered = torch.nn.functional.pad(covered, (1, 0)).gather(-1, below)
        alone = (below - covered) * BLOCK * (self.v_idx < self.T)
        return (slashes + alone.sum(-1)).double() / (self.T * (self.T + 1) // 2)

    def to_mask(self) -> Tensor:
        """Returns the mask as bool [B, H, T, T], True where query i sees key j; for small T."""
        token = torch.arange(self.T, device=self.v_idx.device)
        distance = (token[:, None] // BLOCK - token // BLOCK).clamp(min=0)
        columns = torch.zeros(*self.v_idx.shape[:2], self.T + 1, device=token.device).bool()
        columns = columns.scatter(-1, self.v_idx.long(), True)[..., None, : self.T]
        return (self.diagonals()[..., distance] | columns) & (token <= token[:, None])

    def to_lists(self) -> list[list[tuple[list[int], list[int]]]]:
        """Returns the mask as lists of ints: result[b][h] is (columns, diagonals).

        These are those of query head h in batch row b. A column is a token; a diagonal is a
        distance in blocks of 64 tokens. Waits for a GPU.
        """
        active = self.diagonals()
        return [
            [
                (v[:n].tolist(), d.nonzero()[:, 0].tolist())
                for v, n, d in zip(rows, counts.tolist(), of_row, strict=True)
            ]
            for rows, counts, of_row in zip(self.v_idx, self.v_cnt, active, strict=True)
        ]

    def runs(self) -> Tensor:
        """Returns the mean length of the runs of consecutive diagonals, fp64 [B, H].

        For example 2 for the diagonals 0, 1, 2 and 7. Longer runs are faster.
        """
        active = self.diagonals()
        starts = active & ~torch.nn.functional.pad(active, (1, 0))[..., :-1]
        return active.sum(-1).double() / starts.sum(-1)

    def described(self, contents: bool) -> str:
        """Returns a text that describes the index, so that ranks can compare theirs.

        The text has the shapes of the tensors and T. With `contents` it also has a hash of the
        tensors' values, for which it waits for a GPU.
        """
        shapes = f"{[tuple(x.shape) for x in self[:3]]} for {self.T} tokens"
        if not contents:
            return shapes
        lines = b"".join(x.cpu().numpy().tobytes() for x in self[:3])
        return f"{shapes}, contents {hashlib.sha256(lines).hexdigest()}"

    def check_form(self, op: str, B: int, H: int, T: int, on: torch.device) -> None:
        """Raises ValueError unless the index fits q [B, T, H, D] on the device `on`.

        Checks shapes, dtypes, T and the device, on which kernels rely. Does not read the columns
        and diagonals themselves: wrong ones give wrong results, but no access outside of a tensor.

        Args:
            op: the function that the error names.
            B, H, T: batch rows, query heads, and tokens with padding, of q.
            on: the device of q.
        """
        v, n, d = self[:3]
        words, kind = -(-T // (BLOCK * WORD)), torch.int32
        if (
            (self.T, n.shape, v.shape[:-1], d.shape) == (T, (B, H), (B, H), (B, H, words))
            and (v.dtype is n.dtype is d.dtype is kind)
            and n.device == on
        ):
            return
        shapes = ((B, H, *v.shape[2:3]), (B, H), (B, H, words))
        for name, x, shape in zip(self._fields, (v, n, d), shapes, strict=False):
            if (self.T, x.shape, x.dtype, x.device) != (T, shape, kind, on):
                got = f"index has {self.T} tokens, and its {name} is {_form(x.dtype, x.shape)}"
                got, needs = f"{got} on {x.device}", f"{T} tokens, and {_form(kind, shape)} on {on}"
                fix = "build the index from this call's q, k and pattern"
                raise ValueError(need(op, got, needs, fix))

    def check(self, op: str) -> None:
        """Raises ValueError unless columns ascend and are below T, and every head has diagonal 0.

        Waits for a GPU, so the public functions call this check under QLA_CHECK=1 only. `op` is the
        function that the error names.
        """
        v, n = self.v_idx, self.v_cnt[..., None]
        slot = torch.arange(v.shape[-1], device=v.device)
        rising = (v[..., 1:] > v[..., :-1]) | (slot[1:] >= n)
        inside = torch.where(slot < n, (v >= 0) & (v < self.T), v == self.T)
        if not (rising.all() and inside.all()):
            needs = f"columns that ascend below {self.T}, then {self.T} in unused places"
            fix = "make the index by build_index"
            raise ValueError(need(op, "index.v_idx is out of order", needs, fix))
        if not (self.d_bits[..., 0] & 1).all():
            got = "index.d_bits has a head without diagonal 0"
            fix = "set bit 0 of word 0 of each head, or make the index by build_index"
            raise ValueError(need(op, got, "diagonal 0 in every head", fix))


def known_index(
    pattern: FixedVerticalSlash | Dense, B: int, H: int, T: int, device: object
) -> VSIndex:
    """Builds the `VSIndex` of a pattern whose mask does not depend on q and k.

    Args:
        pattern: lists of columns and diagonals, or Dense() for full causal attention.
        B, H: number of batch rows and of query heads.
        T: number of tokens, with padding.
        device: device of the index.
    """
    on = torch.device(str(device))
    nan = torch.full((B, H), float("nan"), device=on)
    if isinstance(pattern, Dense):
        v_idx = torch.empty(B, H, 0, dtype=torch.int32, device=on)
        active = torch.ones(B, H, T // BLOCK, dtype=torch.bool, device=on)
        return VSIndex(
            v_idx, v_idx.sum(-1, dtype=torch.int32), pack(active), torch.ones_like(nan), T
        )
    v_idx = torch.stack([_padded(head, T, pattern.v_idx) for head in _each(pattern.v_idx, H)])
    active = torch.zeros(H, T // BLOCK, dtype=torch.bool, device="cpu")
    active[:, 0] = True
    for h, head in enumerate(_each(pattern.d_idx, H)):
        active[h, list(head)] = True
    count = (v_idx < T).sum(-1, dtype=torch.int32)
    v, n, d = (x.to(on).expand(B, *x.shape).contiguous() for x in (v_idx, count, pack(active)))
    return VSIndex(v, n, d, nan, T)


def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def _each(lines: Lines, H: int) -> Lines:
    return lines * H if len(lines) == 1 else lines


def _padded(head: tuple[int, ...], T: int, lines: Lines) -> Tensor:
    unused = max(map(len, lines)) - len(head)
    return torch.tensor([*head, *[T] * unused], dtype=torch.int32, device="cpu")


def refused_lines(pattern: FixedVerticalSlash, H: int, T: int) -> tuple[str, str, str] | None:
    """Returns None if the listed columns and diagonals fit H query heads and T tokens.

    Otherwise returns (got, needs, fix), three texts of which `errors.need` makes an error message:
    the lists are not those of 1 or H heads, or an entry is past the end of the sequence.
    """
    for name, lines, end in (("v_idx", pattern.v_idx, T), ("d_idx", pattern.d_idx, T // BLOCK)):
        if len(lines) not in (1, H):
            fix = "pass one list for all heads, or a list for each head of q"
            return f"{name} has lines of {len(lines)} heads", f"1 or {H} lists", fix
        last = max([0, *[head[-1] for head in lines if head]])  # as torch.compile can trace it
        if last >= end:
            unit = "tokens" if name == "v_idx" else "blocks of 64 tokens"
            needs, fix = f"lines below {end}, the number of {unit}", "remove the other lines"
            return f"{name} has the line {last}", needs, fix
    return None
