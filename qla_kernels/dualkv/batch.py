"""`SharedBatch`: packed tokens, their layout, and the mapping back to the caller's sequences.

pack_shared_prompts, pack_padded and pack_prefix_tree build it. Its methods do not wait for a GPU,
apart from `to_replicated`, copies to the CPU, and checks under QLA_CHECK=1: sizes are host numbers,
and indices are on the device of the tokens.
"""

import functools
import logging
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from qla_kernels.dualkv.logprobs import OP, target_logprobs
from qla_kernels.dualkv.plan import SharedLayout, moved
from qla_kernels.dualkv.validate import unfit_factor
from qla_kernels.head import target_logprobs as logprobs_of_hidden
from qla_kernels.runtime.arguments import flag, integer, number
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import expect_tensors

log = logging.getLogger("qla_kernels")


@dataclass(frozen=True, eq=False, repr=False)
class SharedBatch:
    """S sequences in T packed tokens, of which L are targets; the pack_* functions make batches.

    Targets are the tokens whose log-probability is computed, from the logits of the previous token.
    The last token of a prompt predicts the first token of every response, so M rows of logits serve
    L targets.

    Targets are ordered by sequence, and within a sequence in packed order. The caller's tensors may
    be padded: the value of a target then has row `row` and column `column`. `column` is the index
    of the target in its response. If pack_prefix_tree made the batch, `column` is the index of the
    target in its whole sequence.
    """

    layout: SharedLayout
    input_ids: Tensor  # [T]
    position_ids: Tensor  # [T], or [.., T] as passed; a node continues where its parent ended
    take: Tensor  # [T] index into the caller's tokens, laid end to end; -1 for padding
    multiplicity: Tensor  # [T] int32, number of sequences that contain the token; 0 for padding
    src_rows: Tensor  # [M] packed tokens that predict a target, ascending
    src_inv: Tensor  # [L] index of each target into src_rows
    targets: Tensor  # [L] token ids
    target_cu: Tensor  # [S + 1] sequence s has the targets target_cu[s] to target_cu[s + 1]
    order: Tensor  # [S] the caller's number of each sequence
    group_of: Tensor  # [S] the group of each sequence, counted in packed order
    row: Tensor  # [L] the caller's number of each target's sequence
    column: Tensor  # [L]
    paths: tuple[Tensor, ...]  # S tensors on the CPU: the packed tokens of each sequence
    source_shape: tuple[int, ...]  # shape of the caller's tokens
    width: int  # the smallest width of a padded tensor that holds every column

    def __repr__(self) -> str:
        """Returns a text with the numbers of sequences, groups and tokens; reads no GPU tensor."""
        groups = len({int(path[0]) for path in self.paths})
        sizes = f"{self.num_sequences} sequences of {groups} groups in {self.num_tokens} tokens"
        return f"SharedBatch({sizes} on {self.layout.tout.device}, {self.rho:.2f} times fewer)"

    @property
    def num_tokens(self) -> int:
        """The number of packed tokens, T, with padding."""
        return self.layout.num_tokens

    @property
    def num_sequences(self) -> int:
        """The number of sequences that the caller passed, S."""
        return len(self.paths)

    @property
    def rho(self) -> float:
        """The number of tokens without sharing, divided by the number of packed tokens."""
        return _ratio(sum(len(path) for path in self.paths), self.num_tokens)

    @property
    def pair_ratio(self) -> float:
        """The number of (query, key) pairs without sharing, divided by the number with sharing.

        The work of attention is proportional to the number of pairs.
        """
        replicated = sum(len(path) * (len(path) + 1) // 2 for path in self.paths)
        return _ratio(replicated, self.layout.pairs)

    def to(self, device: torch.device | str) -> "SharedBatch":
        """Returns a copy of the batch on `device`.

        A copy to a GPU does not wait for the GPU.
        """
        copies: dict[str, Any] = {"layout": self.layout.to(device)}
        for field in fields(self):
            if isinstance(x := getattr(self, field.name), Tensor):
                copies[field.name] = moved(x, device)
        return replace(self, **copies)

    def model_inputs(self) -> dict[str, Any]:
        """Returns keyword arguments for a transformers model: `model(**batch.model_inputs())`.

        The model must use our attention: see `integrations.transformers_dualkv`. The model returns
        logits only for the M tokens src_rows; pass `out.logits[0]` to `gather_logprobs`. If the
        batch has no targets, there are no logits; a warning then says so once.
        """
        if not len(self.targets) and 0 not in self.source_shape:  # padding alone has 0 tokens
            _warn_of_no_targets()
        return {
            "input_ids": self.input_ids[None],
            "position_ids": self.position_ids.unsqueeze(-2),
            "use_cache": False,
            "shared_prefix": self.layout,
            "logits_to_keep": self.src_rows,
        }

    def prepare(self, num_heads: int, kv_heads: int, head_dim: int = 128) -> None:
        """Builds the tables of the attention kernels before the first call.

        Args:
            num_heads: number of query heads, H.
            kv_heads: number of key heads, Hk.
            head_dim: D.
        """
        self.layout.prepare(num_heads, kv_heads, head_dim=head_dim)

    def pack(self, x: Tensor) -> Tensor:
        """Copies values of the caller's tokens, [*source_shape, ...], to packed order, [T, ...].

        Padding tokens get 0. A token that several sequences share gets the value of the first of
        these sequences. Raises ValueError if x has another shape.
        """
        expect_tensors("SharedBatch.pack", x=x)
        dims = len(self.source_shape)
        if x.shape[:dims] != self.source_shape:
            needs = f"{self.source_shape} and further dimensions, an entry for each token"
            fix = "pass a tensor that begins with the shape of the tokens that were packed"
            got = f"x has shape {tuple(x.shape)}"
            raise ValueError(need("SharedBatch.pack", got, needs, fix))
        return taken(x.flatten(0, dims - 1), self.take)

    @overload
    def logprobs(
        self,
        hidden: Tensor,
        head: Tensor | nn.Module,
        *,
        temperature: float = 1.0,
        softcap: float | None = None,
        entropy: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def logprobs(
        self,
        hidden: Tensor,
        head: Tensor | nn.Module,
        *,
        temperature: float = 1.0,
        softcap: float | None = None,
        entropy: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def logprobs(
        self,
        hidden: Tensor,
        head: Tensor | nn.Module,
        *,
        temperature: float = 1.0,
        softcap: float | None = None,
        entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the targets' log-probabilities, [L] in fp32 (fp64 for fp64); differentiable.

        There are no logits of all tokens in memory, neither here nor in the backward, which
        computes them a second time. On a GPU logits are sums in fp32 that are not rounded, and take
        at most 528 MiB.

        Args:
            hidden: [M, D], the input of the head at the tokens src_rows, or [T, D], at all tokens.
            head: the model's head, `model.get_output_embeddings()`, or its weight [vocabulary, D].
                A module may be nn.Linear, or PEFT's LoRA around one.
            temperature: divides the logits.
            softcap: c of c tanh(logits / c), for models with final_logit_softcapping.
            entropy: also return [L], the entropy of the distribution that predicts each target.

        Raises:
            ValueError: arguments of wrong shape, dtype or device, a temperature that is not a
                positive number, or (on the CPU, or under QLA_CHECK=1) a target outside the
                vocabulary.
            Unsupported: the head is another module, or the GPU or a dtype has no kernel.
        """
        op = "SharedBatch.logprobs"
        expect_tensors(op, hidden=hidden)
        entropy = flag(op, "entropy", entropy)
        rows, every = self.src_rows.shape[0], self.num_tokens
        if hidden.dim() != 2 or hidden.shape[0] not in (rows, every):
            needs = f"[{rows}, D], the rows src_rows, or [{every}, D], all packed tokens"
            fix = "pass the input of the model's head, without the batch dimension of 1"
            raise ValueError(need(op, f"hidden has shape {tuple(hidden.shape)}", needs, fix))
        if hidden.device != self.targets.device:
            got, needs = f"hidden is on {hidden.device}", f"{self.targets.device}, as the batch"
            raise ValueError(need(op, got, needs, "move the batch: batch.to(hidden.device)"))
        if hidden.shape[0] != rows:
            hidden = hidden[self.src_rows]
        logprobs, entropies = logprobs_of_hidden(
            op,
            hidden,
            head,
            self.targets,
            self.src_inv,
            temperature=temperature,
            softcap=softcap,
        )
        return (logprobs, entropies) if entropy else logprobs

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
        """Returns the targets' log-probabilities, [L] in fp32 (fp64 for fp64); differentiable.

        `logprobs` does so without logits in memory. This is for a model that returns them.

        Args:
            logits: [M, vocabulary], the logits of the tokens src_rows; any float dtype.
            temperature: divides the logits.
            entropy: also return [L], the entropy of the distribution that predicts each target.

        Raises:
            ValueError: logits of another shape, dtype or device, a temperature that is not a
                positive number, or (on the CPU, or under QLA_CHECK=1) a target outside the
                vocabulary.
        """
        expect_tensors(OP, logits=logits)
        entropy = flag(OP, "entropy", entropy)
        if logits.dim() != 2 or logits.shape[0] != self.src_rows.shape[0]:
            needs = f"[{self.src_rows.shape[0]}, vocabulary], the rows src_rows"
            fix = "give the model logits_to_keep=batch.src_rows, or its head hidden[batch.src_rows]"
            got = f"logits has shape {tuple(logits.shape)}"
            raise ValueError(need(OP, got, needs, fix))
        if not logits.is_floating_point():
            fix = "pass the output of the model's head"
            raise ValueError(need(OP, f"logits is {logits.dtype}", "a float dtype", fix))
        if logits.device != self.targets.device:
            got, needs = f"logits is on {logits.device}", f"{self.targets.device}, as the batch"
            raise ValueError(need(OP, got, needs, "move the batch: batch.to(logits.device)"))
        if (wrong := unfit_factor("temperature", temperature)) is not None:
            fix = "pass the temperature of sampling; divide logits by one that is learned"
            raise ValueError(need(OP, wrong, "a positive number", fix))
        self._check_targets(logits.shape[1])
        logprobs, entropies = target_logprobs(
            logits, self.src_inv, self.targets, temperature, entropy
        )
        return (logprobs, entropies) if entropy else logprobs

    def _check_targets(self, vocabulary: int) -> None:
        """Raises ValueError if a target is not in 0 .. vocabulary - 1.

        Checks targets on the CPU, and those on a GPU only under QLA_CHECK=1; checks nothing while
        torch.compile traces. A negative target would read the logit of another token.
        """
        if torch.compiler.is_compiling() or not len(self.targets):
            return
        if self.targets.is_cpu or checks_contents():
            for token in (int(self.targets.min()), int(self.targets.max())):
                if not 0 <= token < vocabulary:
                    needs = f"0 to {vocabulary - 1}, the columns of logits"
                    fix = "pass logits of the whole vocabulary, and pack token ids"
                    raise ValueError(need(OP, f"a target is {token}", needs, fix))

    def to_padded(self, x: Tensor, width: int | None = None, fill: float = 0.0) -> Tensor:
        """Copies one value per target, x [L, ...], to a padded tensor [S, width, ...].

        Rows are in the caller's order of sequences. The value of a target goes to row `row` and
        column `column`; other entries are `fill`. `width` defaults to `self.width`, the smallest
        possible. Raises ValueError if `width` is smaller or x does not have L rows.
        """
        op = "SharedBatch.to_padded"
        expect_tensors(op, x=x)
        if x.shape[:1] != self.targets.shape:
            got = f"x has shape {tuple(x.shape)}"
            needs = f"{self.targets.shape[0]} rows, one for each target"
            fix = "pass a result of gather_logprobs or from_padded"
            raise ValueError(need(op, got, needs, fix))
        width = self.width if width is None else integer(op, "width", width)
        if width < self.width:
            needs = f"at least {self.width}, for the longest sequence"
            fix = "pass the width of the tensors that were packed"
            raise ValueError(need(op, f"width={width}", needs, fix))
        fill = fill if isinstance(fill, int) else number(op, "fill", fill)
        padded = x.new_full((self.num_sequences, width, *x.shape[1:]), fill)
        return padded.index_put((self.row, self.column), x)

    def from_padded(self, x: Tensor) -> Tensor:
        """Copies the entries of a padded tensor x [S, width, ...] at the targets to [L, ...].

        This is the inverse of `to_padded`. The rows of x, for example of a tensor of advantages,
        are in the caller's order of sequences. Raises ValueError unless x has S rows and at least
        `self.width` columns.
        """
        expect_tensors("SharedBatch.from_padded", x=x)
        if x.dim() < 2 or x.shape[0] != self.num_sequences or x.shape[1] < self.width:
            needs = f"({self.num_sequences}, at least {self.width}), a row for each sequence"
            fix = "pass [S, width]; expand a number per sequence by x[:, None].expand(-1, width)"
            got = f"x has shape {tuple(x.shape)}"
            raise ValueError(need("SharedBatch.from_padded", got, needs, fix))
        return x[self.row, self.column]

    def to_replicated(self, x: Tensor) -> list[Tensor]:
        """Splits x [T, ...], a value per packed token, by sequence; returns a list of S tensors.

        Sequences are in the caller's order. The tensors have copies of shared tokens, for
        comparison with runs that do not share prefixes. Waits for the device. Raises ValueError if
        x does not have T rows.
        """
        op = "SharedBatch.to_replicated"
        expect_tensors(op, x=x)
        if x.shape[:1] != (self.num_tokens,):
            got, needs = (
                f"x has shape {tuple(x.shape)}",
                f"{self.num_tokens} rows, one for each token",
            )
            raise ValueError(need(op, got, needs, "pass a tensor over the packed tokens"))
        alone = dict(zip(self.order.tolist(), self.paths, strict=True))
        return [x[alone[i].to(x.device)] for i in sorted(alone)]


@functools.cache  # once, and not for every batch
def _warn_of_no_targets() -> None:
    """Warns that a model returns no logits for this batch, such as prompts without responses."""
    fix = "for log-probabilities of prompts use pack_prefix_tree(prompts); for logits of every "
    fix += "token pass model(**(batch.model_inputs() | {'logits_to_keep': 0}))"
    got, needs = "a batch without targets", "one, or the model returns no logits"
    log.warning("%s", need("SharedBatch.model_inputs", got, needs, fix))


def taken(x: Tensor, take: Tensor) -> Tensor:
    """Returns x[take] for x [n, ...], with 0 where `take` is -1.

    n may be 0 if all entries of `take` are -1.
    """
    rows = x if len(x) else x.new_zeros(1, *x.shape[1:])
    is_padding = (take < 0).reshape(-1, *[1] * (x.dim() - 1))
    return rows[take.clamp(min=0)].masked_fill(is_padding, 0)


def _ratio(replicated: int, packed: int) -> float:
    """Returns replicated / packed; 1.0 for an empty batch."""
    return replicated / packed if packed else 1.0
