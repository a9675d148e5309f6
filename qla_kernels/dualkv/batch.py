"""`SharedBatch`: a batch that stores shared prompts once, and its map to the caller's sequences.

pack_shared_prompts, pack_padded and pack_prefix_tree build it. Its methods do not wait for a GPU,
apart from `to_replicated`, copies to the CPU, and checks under QLA_CHECK=1: sizes are numbers on
the host, and indices are on the device of the tokens.
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
    """A packed batch of sequences that stores shared prefixes, such as prompts, once.

    `pack_shared_prompts`, `pack_padded` and `pack_prefix_tree` make batches. The caller passes S
    sequences, each a prompt with a response, or any sequences that may share prefixes. The batch
    has T packed tokens: each shared prefix once, followed by what continues it.

    L is the number of targets, the tokens in the loss, such as all tokens of responses. The
    log-probability of a target comes from the logits of the token before it in its sequence, its
    predictor. M is the number of predictors. M <= L, because the last token of a shared prompt
    predicts the first token of several responses.

    The caller numbers sequences; the batch orders them as they are packed. Targets are ordered by
    sequence, in the order of the batch, and within a sequence by position.

    Attributes:
        layout: which packed tokens see each other.
        input_ids: [T], token ids; 0 for padding.
        position_ids: [T], the position of each token in its sequences; [.., T] if the caller passed
            positions with more dimensions.
        take: [T], the index of each packed token among the caller's tokens, counted row after row
            or sequence after sequence; -1 for padding.
        multiplicity: [T] int32, the number of sequences that contain the token; 0 for padding.
        src_rows: [M], the predictors' indices among the packed tokens, ascending.
        src_inv: [L], for each target, the index of its predictor in src_rows.
        targets: [L], token ids of the targets.
        target_cu: [S + 1], bounds: sequence s of the batch has the targets target_cu[s] to
            target_cu[s + 1].
        order: [S], the caller's number of each sequence of the batch.
        group_of: [S], the number of the group of each sequence; the sequences of a group share a
            prompt, or with `pack_prefix_tree` their first token.
        row: [L], the caller's number of each target's sequence: its row in a padded tensor.
        column: [L], the column of each target in a padded tensor: its index in its response, or
            with `pack_prefix_tree` in its whole sequence.
        paths: S tensors on the CPU: the indices of the packed tokens of each sequence.
        source_shape: the shape of the caller's tokens.
        width: the smallest number of columns of a padded tensor that has a place for each target.
    """

    layout: SharedLayout
    input_ids: Tensor
    position_ids: Tensor
    take: Tensor
    multiplicity: Tensor
    src_rows: Tensor
    src_inv: Tensor
    targets: Tensor
    target_cu: Tensor
    order: Tensor
    group_of: Tensor
    row: Tensor
    column: Tensor
    paths: tuple[Tensor, ...]
    source_shape: tuple[int, ...]
    width: int

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

        First switch the model to this package's attention (`integrations.transformers_dualkv`). The
        model then returns logits [1, M, vocabulary], only for the M packed tokens src_rows, which
        directly precede a token in the loss: pass `logits[0]` to `gather_logprobs`. For a batch
        without tokens in the loss it returns no logits, and a warning is logged once.
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
        """Builds the index tables that the attention kernels need for this batch, on the host.

        Without it the first attention call builds them, which is not possible in compiled code or
        while a CUDA graph is captured.

        Args:
            num_heads: number of query heads.
            kv_heads: number of key heads.
            head_dim: head size.
        """
        self.layout.prepare(num_heads, kv_heads, head_dim=head_dim)

    def pack(self, x: Tensor) -> Tensor:
        """Copies one value per token from the caller's order to the order of the packed tokens.

        x is [*source_shape, ...], where source_shape is the shape of the tokens that were packed;
        the result is [T, ...]. A token that several sequences share gets the value of the first of
        these sequences, and padding gets 0. Raises ValueError if x has another shape.
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
        """Computes the log-probabilities of the tokens in the loss from hidden states.

        The tokens in the loss, called targets, are for example all tokens of responses. L is their
        number. Returns [L] in the order of the field `targets`, in fp32 (fp64 if hidden is fp64);
        differentiable. Computes logits in blocks, again in the backward, and never stores the
        logits of all tokens; on a GPU a block takes at most 528 MiB. Logits are fp32 and are not
        rounded to 16 bits.

        Args:
            hidden: [T, D], the input of the head for all T packed tokens; or [M, D], the rows
                `self.src_rows` of it, which are the tokens directly before targets. M <= L, because
                the last token of a shared prompt predicts the first token of several responses.
            head: the model's head, `model.get_output_embeddings()`, or its weight [vocabulary, D].
                A module may be nn.Linear, or PEFT's LoRA around one.
            temperature: divides the logits.
            softcap: c, for models that cap logits by c * tanh(logits / c); their config has it as
                final_logit_softcapping.
            entropy: True returns (log-probabilities, entropies), both [L]; the entropies are those
                of the distributions that predict the targets.

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
        """Computes the log-probabilities of the tokens in the loss from a model's logits.

        The tokens in the loss, called targets, are for example all tokens of responses. L is their
        number. Returns [L] in the order of the field `targets`, in fp32 (fp64 if logits are fp64);
        differentiable. `logprobs` does the same from hidden states, and saves the memory of logits.

        Args:
            logits: [M, vocabulary] in any float dtype: the logits of the packed tokens
                `self.src_rows`, which are the tokens directly before targets. M <= L, because the
                last token of a shared prompt predicts the first token of several responses.
            temperature: divides the logits.
            entropy: True returns (log-probabilities, entropies), both [L]; the entropies are those
                of the distributions that predict the targets.

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

        Targets are the tokens in the loss, such as all tokens of responses; L is their number. The
        result has a row for each of the S sequences, in the caller's order; the column of a target
        is its index in its response (in its whole sequence, for a batch of `pack_prefix_tree`).

        Args:
            x: [L, ...], in the order in which `logprobs` returns its results.
            width: number of columns; None: `self.width`, the smallest that has room for all
                targets.
            fill: the value of entries without a target.

        Raises:
            ValueError: width is too small, or x does not have L rows.
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
        """Selects from a padded tensor x [S, width, ...] the values of the tokens in the loss.

        Returns [L, ...]; L is the number of targets (tokens in the loss, such as all tokens of
        responses), in the order of the field `targets`. The inverse of `to_padded`. x has a row for
        each of the S sequences, in the caller's order, such as a tensor of advantages; the column
        of a target is its index in its response (in its whole sequence, for a batch of
        `pack_prefix_tree`). Raises ValueError unless x has S rows and at least `self.width`
        columns.
        """
        expect_tensors("SharedBatch.from_padded", x=x)
        if x.dim() < 2 or x.shape[0] != self.num_sequences or x.shape[1] < self.width:
            needs = f"({self.num_sequences}, at least {self.width}), a row for each sequence"
            fix = "pass [S, width]; expand a number per sequence by x[:, None].expand(-1, width)"
            got = f"x has shape {tuple(x.shape)}"
            raise ValueError(need("SharedBatch.from_padded", got, needs, fix))
        return x[self.row, self.column]

    def to_replicated(self, x: Tensor) -> list[Tensor]:
        """Splits x [T, ...], one value per packed token, by sequence; returns a list of S tensors.

        The value of a shared token is copied to each sequence that contains it, so that results can
        be compared with runs that do not share prefixes. Sequences are in the caller's order. Waits
        for a GPU. Raises ValueError if x does not have T rows.
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
    """Logs that a model returns no logits for this batch, for example prompts without responses."""
    fix = "for log-probabilities of prompts use pack_prefix_tree(prompts); for logits of every "
    fix += "token pass model(**(batch.model_inputs() | {'logits_to_keep': 0}))"
    got, needs = "a batch without targets", "one, or the model returns no logits"
    log.warning("%s", need("SharedBatch.model_inputs", got, needs, fix))


def taken(x: Tensor, take: Tensor) -> Tensor:
    """Returns the rows x[take], with 0 in place of a row where `take` is -1.

    x is [n, ...]; n may be 0 if all entries of `take` are -1.
    """
    rows = x if len(x) else x.new_zeros(1, *x.shape[1:])
    is_padding = (take < 0).reshape(-1, *[1] * (x.dim() - 1))
    return rows[take.clamp(min=0)].masked_fill(is_padding, 0)


def _ratio(replicated: int, packed: int) -> float:
    """Returns replicated / packed; 1.0 for an empty batch."""
    return replicated / packed if packed else 1.0
