"""A packed batch: its tokens, their layout, and the way back to the caller's sequences.

Built by the packers. Once it is there, nothing waits for a device: sizes are numbers on the host,
and everything else is an index that lies beside the tokens.
"""

import os
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from qla_kernels.dualkv.logprobs import OP, target_logprobs
from qla_kernels.dualkv.plan import SharedLayout, moved
from qla_kernels.dualkv.validate import unfit_factor
from qla_kernels.errors import need
from qla_kernels.sm90 import expect_tensors


@dataclass(frozen=True, eq=False, repr=False)
class SharedBatch:
    """T packed tokens of S sequences, which have L targets: tokens whose log-probability counts.

    A target is predicted at the token before it. The last token of a prompt so predicts the first
    of every response, and its row of logits is computed once: M rows serve L targets.

    Targets lie sequence by sequence in packed order. Their columns are those of the caller's padded
    tensors: a token's place in its response, or in its whole sequence if it came from a tree.
    """

    layout: SharedLayout
    input_ids: Tensor  # [T]
    position_ids: Tensor  # [T], or [.., T] as given; restarts in each node where its parent ended
    take: Tensor  # [T] which of the caller's tokens, laid end to end, each is; -1 for padding
    multiplicity: Tensor  # [T] int32, in how many sequences each occurs; 0 for padding
    src_rows: Tensor  # [M] packed tokens that predict a target, ascending
    src_inv: Tensor  # [L] each target's place in src_rows
    targets: Tensor  # [L] token ids
    target_cu: Tensor  # [S + 1] sequence s has the targets target_cu[s] to target_cu[s + 1]
    order: Tensor  # [S] the caller's number of each sequence
    group_of: Tensor  # [S] the group of each sequence, counted in packed order
    row: Tensor  # [L] the caller's number of each target's sequence
    column: Tensor  # [L]
    paths: tuple[Tensor, ...]  # S times, on the CPU: the packed tokens of a sequence
    source_shape: tuple[int, ...]  # of the caller's tokens
    width: int  # of the caller's padded tensors, at least

    def __repr__(self) -> str:
        """Reads nothing that may lie on a GPU."""
        groups = len({int(path[0]) for path in self.paths})
        sizes = f"{self.num_sequences} sequences of {groups} groups in {self.num_tokens} tokens"
        return f"SharedBatch({sizes} on {self.layout.tout.device}, {self.rho:.2f} times fewer)"

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @property
    def num_sequences(self) -> int:
        return len(self.paths)

    @property
    def rho(self) -> float:
        """Tokens of the sequences, each by itself, over packed tokens."""
        return _ratio(sum(len(path) for path in self.paths), self.num_tokens)

    @property
    def pair_ratio(self) -> float:
        """The same of visible pairs, which attention takes time for."""
        replicated = sum(len(path) * (len(path) + 1) // 2 for path in self.paths)
        return _ratio(replicated, self.layout.pairs)

    def to(self, device: torch.device | str) -> "SharedBatch":
        """The batch on that device; to a GPU without waiting for it."""
        there: dict[str, Any] = {"layout": self.layout.to(device)}
        for field in fields(self):
            if isinstance(x := getattr(self, field.name), Tensor):
                there[field.name] = moved(x, device)
        return replace(self, **there)

    def prepare(self, num_heads: int, kv_heads: int) -> None:
        """Build what attention with these heads works off, so that its first call need not."""
        self.layout.prepare(num_heads, kv_heads)

    def pack(self, x: Tensor) -> Tensor:
        """A tensor with an entry for each of the caller's tokens, as [T, ...]; padding is 0.

        Of a token that several sequences have, the first sequence's entry is taken.
        """
        expect_tensors("SharedBatch.pack", x=x)
        dims = len(self.source_shape)
        if x.shape[:dims] != self.source_shape:
            needs = f"{self.source_shape} and further dimensions: an entry for each token packed"
            fix = "pass a tensor shaped like the tokens that were packed"
            raise ValueError(need("SharedBatch.pack", f"shape {tuple(x.shape)}", needs, fix))
        return taken(x.flatten(0, dims - 1), self.take)

    @overload
    def gather_logprobs(
        self, logits: Tensor, *, temperature: float = 1.0, entropy: Literal[False] = False
    ) -> Tensor: ...

    @overload
    def gather_logprobs(
        self, logits: Tensor, *, temperature: float = 1.0, entropy: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...

    def gather_logprobs(
        self, logits: Tensor, *, temperature: float = 1.0, entropy: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities of the targets, [L] in fp32 (fp64 of fp64), differentiable.

        Args:
            logits: [M, vocabulary], of the rows src_rows; any float dtype.
            temperature: divides the logits.
            entropy: also return the entropy of the distribution that each target was drawn from.
        """
        expect_tensors(OP, logits=logits)
        if logits.dim() != 2 or logits.shape[0] != self.src_rows.shape[0]:
            needs = f"[{self.src_rows.shape[0]}, vocabulary], the rows src_rows"
            fix = "pass logits_to_keep=batch.src_rows, or hidden[batch.src_rows] to the head"
            got = f"logits of shape {tuple(logits.shape)}"
            raise ValueError(need(OP, got, needs, fix))
        if not logits.is_floating_point():
            fix = "pass what the model's head returns"
            raise ValueError(need(OP, f"logits of {logits.dtype}", "floats", fix))
        if logits.device != self.targets.device:
            got, needs = f"logits on {logits.device}", f"{self.targets.device}, as the batch"
            raise ValueError(need(OP, got, needs, "move the batch: batch.to(logits.device)"))
        if (wrong := unfit_factor("temperature", temperature)) is not None:
            fix = "pass the one that responses were sampled with; one that is learned divides them"
            raise ValueError(need(OP, wrong, "a positive number", fix))
        self._check_targets(logits.shape[1])
        found = target_logprobs(logits, self.src_inv, self.targets, temperature, entropy)
        return found if entropy else found[0]

    def _check_targets(self, vocabulary: int) -> None:
        """Of the CPU, or under QLA_CHECK=1: a negative one would take another token's logit."""
        if torch.compiler.is_compiling() or not len(self.targets):
            return
        if self.targets.is_cpu or os.environ.get("QLA_CHECK", "0") not in ("", "0"):
            for token in (int(self.targets.min()), int(self.targets.max())):
                if not 0 <= token < vocabulary:
                    needs = f"0 to {vocabulary - 1}, as there are logits"
                    fix = "pass logits of the whole vocabulary, and pack token ids"
                    raise ValueError(need(OP, f"a target of {token}", needs, fix))

    def to_padded(self, x: Tensor, width: int | None = None, fill: float = 0.0) -> Tensor:
        """[L, ...] of targets as [S, width, ...] in the caller's order; `fill` between them."""
        expect_tensors("SharedBatch.to_padded", x=x)
        if x.shape[:1] != self.targets.shape:
            got, needs = f"{x.shape[0]} rows", f"{self.targets.shape[0]}, one for each target"
            fix = "pass what gather_logprobs returned, or from_padded"
            raise ValueError(need("SharedBatch.to_padded", got, needs, fix))
        width = self.width if width is None else width
        if width < self.width:
            got = f"width={width}"
            fix = "pass the width of the tensors that were packed"
            needs = f"at least {self.width}, for the longest"
            raise ValueError(need("SharedBatch.to_padded", got, needs, fix))
        padded = x.new_full((self.num_sequences, width, *x.shape[1:]), fill)
        return padded.index_put((self.row, self.column), x)

    def from_padded(self, x: Tensor) -> Tensor:
        """The inverse: [S, width, ...] of the caller's, such as advantages, as [L, ...]."""
        expect_tensors("SharedBatch.from_padded", x=x)
        if x.dim() < 2 or x.shape[0] != self.num_sequences or x.shape[1] < self.width:
            needs = f"({self.num_sequences}, at least {self.width}), a row for each sequence"
            fix = "expand what is per sequence to [S, 1] and then to [S, width]"
            got = f"shape {tuple(x.shape)}"
            raise ValueError(need("SharedBatch.from_padded", got, needs, fix))
        return x[self.row, self.column]

    def to_replicated(self, x: Tensor) -> list[Tensor]:
        """[T, ...] as every sequence alone would have it, in the caller's order; for comparisons.

        The only method that makes replicas, and that waits for a device.
        """
        alone = dict(zip(self.order.tolist(), self.paths, strict=True))
        return [x[alone[i].to(x.device)] for i in sorted(alone)]


def taken(x: Tensor, take: Tensor) -> Tensor:
    """Rows of x [n, ...]; 0 where `take` is -1, as all of it is if there are none."""
    rows = x if len(x) else x.new_zeros(1, *x.shape[1:])
    is_padding = (take < 0).reshape(-1, *[1] * (x.dim() - 1))
    return rows[take.clamp(min=0)].masked_fill(is_padding, 0)


def _ratio(replicated: int, packed: int) -> float:
    return replicated / packed if packed else 1.0
