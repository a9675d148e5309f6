"""Shared prompts in GRPO and RLOO of TRL: each prompt of a batch is computed once.

    from qla_kernels.integrations.trl import shared_prefix_trainer
    trainer = shared_prefix_trainer(trl.GRPOTrainer)(model, reward_funcs=..., args=..., ...)

Policy, old policy and reference compute a prompt once instead of once per response; the trainer is
otherwise TRL's. It refuses models that would give other results on packed batches. Gated-delta-net
layers (Qwen3-Next, Qwen3.5) run on our kernels. This file does not import TRL; it is tested with
TRL 1.16. For AsyncGRPOTrainer see trl_async.py.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qla_kernels.dualkv import PaddedGroup, SharedBatch, pack_padded, padded_groups
from qla_kernels.integrations import transformers_dualkv
from qla_kernels.integrations.full_attention import text_config
from qla_kernels.integrations.packed_head import packed_head
from qla_kernels.integrations.routers import router_loss
from qla_kernels.runtime.errors import Unsupported, need

OP, NAME = "shared_prefix_trainer", "shared_prefix"
METHOD, SHUFFLE = "_get_per_token_logps_and_entropies", "shuffle_sequence_dict"
RELEASES = "TRL 1.16 or later"
FEWEST_SAVED = 256  # tokens: fewer are not worth a further node of the tree

log = logging.getLogger("qla_kernels")


def shared_prefix_trainer(base: type) -> type:
    """Returns a subclass of a TRL trainer whose training steps compute each prompt once.

    In training steps the model runs on packed batches. These store each prompt once for all of its
    responses, and any other beginning that rows share, such as the turns of an agent before it
    branches. Log-probabilities are computed without storing logits. In these steps the model uses
    this package's attention; in generation, and after `train` and `evaluate`, its own.

    Where TRL shuffles rows, the responses to a prompt stay together. If a batch has only some of
    the responses to a prompt, a warning says how to avoid that. The first step logs how many times
    fewer tokens the model runs.

    Args:
        base: trl.GRPOTrainer, trl.RLOOTrainer or a subclass. The constructor of the new class has
            the same arguments.

    Raises:
        TypeError: `base` is no such class.
        Unsupported: TRL cannot be imported or is too old, or `base` overrides TRL's method
            `_get_per_token_logps_and_entropies`. The constructor of the new class raises it for
            models that `transformers_dualkv.check` refuses, and a training step for batches with
            images.
    """
    _check_release()
    if not isinstance(base, type) or not hasattr(base, METHOD):
        got = base.__name__ if isinstance(base, type) else f"a {type(base).__name__}"
        fix = "call shared_prefix_trainer(trl.GRPOTrainer)(model, ...)"
        raise TypeError(need(OP, got, f"trl.GRPOTrainer, or a class with {METHOD}", fix))
    owner = next(kind for kind in base.__mro__ if METHOD in vars(kind))
    if owner.__module__.partition(".")[0] != "trl":
        got, needs = f"{owner.__name__}.{METHOD}, which would not be called", "TRL's own"
        fix = f"derive {owner.__name__} from shared_prefix_trainer(trl.GRPOTrainer) instead"
        raise Unsupported(need(OP, got, needs, fix))

    class SharedPrefixTrainer(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._own_attention = text_config(self._bare_model())._attn_implementation
            for model in (self.model, self.ref_model):
                if model is not None:
                    unwrapped = self.accelerator.unwrap_model(model)
                    transformers_dualkv.prepare(bare(unwrapped), NAME)
            self._select(self._own_attention)
            self._says_gain = self._says_split = True

        def _bare_model(self) -> Any:
            return bare(self.accelerator.unwrap_model(self.model))

        def _select(self, name: str) -> None:
            model = self._bare_model()
            if text_config(model)._attn_implementation != name:
                transformers_dualkv.select(model, name)

        def train(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().train(*args, **kwargs)
            finally:
                self._select(self._own_attention)

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().evaluation_loop(*args, **kwargs)
            finally:
                self._select(self._own_attention)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            self._select(self._own_attention)
            return super()._generate(*args, **kwargs)

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            with _groups_stay_whole(base):
                return super()._prepare_inputs(*args, **kwargs)

        def _get_per_token_logps_and_entropies(
            self,
            model: nn.Module,
            input_ids: Tensor,
            attention_mask: Tensor,
            logits_to_keep: int,
            batch_size: int | None = None,
            compute_entropy: bool = False,
            compute_aux_loss: bool = False,
            **others: Any,
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            if extra := sorted(name for name, x in others.items() if x is not None):
                _refuse(f"a batch with {', '.join(extra)}", "text alone")
            self._select(NAME)  # until the backward, which recomputes activations, has run
            width = input_ids.shape[1] - logits_to_keep
            groups = padded_groups(input_ids, attention_mask, width)
            trains = torch.is_grad_enabled()  # False for old and reference policies
            if trains:
                self._say_split(min(len(group.rows) for group in groups))
            parts = _by_prompt(groups, batch_size or len(input_ids))
            group_of = {row: i for i, group in enumerate(groups) for row in group.rows}
            results: list[Results] = []
            for rows in parts:
                label = [group_of[row] for row in rows]
                packed = pack_padded(
                    input_ids[rows], attention_mask[rows], width, group_ids=label,
                    fewest_saved=FEWEST_SAVED,
                )  # fmt: skip
                if trains:
                    self._say_gain(packed)
                with self.accelerator.autocast():
                    results.append(self._run(model, packed, logits_to_keep, compute_aux_loss))
            back = torch.tensor([row for rows in parts for row in rows]).argsort()
            aux = [x.aux_loss for x in results if x.aux_loss is not None]
            return (
                torch.cat([x.logps for x in results])[back],
                torch.cat([x.entropies for x in results])[back] if compute_entropy else None,
                torch.stack(aux).mean() if aux else None,
            )

        def _run(
            self, model: nn.Module, packed: SharedBatch, width: int, with_routers: bool
        ) -> Results:
            inner = bare(self.accelerator.unwrap_model(model))
            asked = {"output_router_logits": True} if with_routers else {}
            with packed_head(
                inner,
                packed,
                temperature=self.temperature,
                in_fp32=getattr(self.args, "cast_lm_head_to_fp32", False),
            ) as values:
                out = model(**packed.model_inputs(), **asked)
            logps, entropies = (packed.to_padded(x, width) for x in values(out))
            aux = None
            if with_routers:
                top_k = inner.config.get_text_config().num_experts_per_tok
                aux = router_loss(out.router_logits, packed, top_k)
            return Results(logps, entropies, aux)

        def _say_gain(self, packed: SharedBatch) -> None:
            if self._says_gain and self.accelerator.is_main_process:
                log_gain(sum(len(path) for path in packed.paths), packed.num_tokens)
            self._says_gain = False

        def _say_split(self, fewest: int) -> None:
            if fewest >= self.num_generations or not self._says_split:
                return
            if self.accelerator.is_main_process:
                log.warning(
                    "shared prompts: a batch holds parts of groups (%d of %d responses) and shares "
                    "less: set per_device_train_batch_size to a multiple of num_generations",
                    fewest, self.num_generations,
                )  # fmt: skip
            self._says_split = False

    return SharedPrefixTrainer


class Results(NamedTuple):
    """Record: what a forward computes for B sequences, with responses padded to W columns.

    Attributes:
        logps: [B, W], the log-probability of each response token; 0 for padding.
        entropies: [B, W], the entropy of the distribution that predicts each response token.
        aux_loss: the load-balancing loss of an MoE model; None if it was not requested.
    """

    logps: Tensor
    entropies: Tensor
    aux_loss: Tensor | None


def _by_prompt(groups: Sequence[PaddedGroup], size: int) -> list[list[int]]:
    """Splits the rows of a batch into lists of at most `size` row numbers, group after group.

    A group is the rows that have the same prompt; they are next to each other in the result.
    """
    rows = [row for group in groups for row in group.rows]
    return [rows[i : i + size] for i in range(0, len(rows), size)]


@contextmanager
def _groups_stay_whole(base: type) -> Iterator[None]:
    """Makes the trainer `base` shuffle groups instead of rows while a `with` block runs.

    TRL shuffles the rows of a generation and then cuts them into batches. A group is the rows that
    have the same prompt. Here TRL's function that shuffles is replaced in the trainer's module.
    """
    owner = next((kind for kind in base.__mro__ if "_prepare_inputs" in vars(kind)), base)
    home = sys.modules.get(owner.__module__)
    if not hasattr(home, SHUFFLE):
        yield
        return
    with exchanged(home, **{SHUFFLE: of_groups(getattr(home, SHUFFLE))}):
        yield


def of_groups(shuffle: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that shuffles rows by TRL's function `shuffle`, but keeps groups together.

    A group is the rows that have the same prompt. After `shuffle` has run, all rows of a group move
    to the place of the first of them. So groups are in random order, and the random numbers are
    those that `shuffle` draws.
    """

    @wraps(shuffle)
    def by_groups(rows: dict[str, Any]) -> dict[str, Any]:
        shuffled: dict[str, Any] = shuffle(rows)
        prompts, mask = shuffled.get("prompt_ids"), shuffled.get("prompt_mask")
        if not isinstance(prompts, Tensor) or not isinstance(mask, Tensor):
            return shuffled
        members: dict[tuple[int, ...], list[int]] = {}
        for row, tokens in enumerate(prompts.masked_fill(mask == 0, -1).tolist()):
            members.setdefault(tuple(tokens), []).append(row)
        order = [row for group in members.values() for row in group]
        return {name: _in_order(x, order) for name, x in shuffled.items()}

    return by_groups


def _in_order(x: Any, order: list[int]) -> Any:
    """Returns the rows of x in the order of their numbers in `order`.

    x is a tensor or a list; anything else, and a tensor without dimensions, is returned unchanged.
    """
    if isinstance(x, Tensor):
        return x[order] if x.dim() else x
    return [x[row] for row in order] if isinstance(x, Sequence) else x


def bare(model: Any) -> Any:
    """Returns the model of transformers inside a PEFT model with adapters, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def exchanged(home: Any, **functions: Any) -> Iterator[None]:
    """Replaces functions of a Python module while a `with` block runs.

    Args:
        home: the module.
        functions: for each name of a function of the module, as a keyword, the new function.
    """
    before = {name: getattr(home, name) for name in functions}
    vars(home).update(functions)
    try:
        yield
    finally:
        vars(home).update(before)


def log_gain(unpacked: int, packed: int) -> None:
    """Logs how many times fewer tokens a batch has after packing.

    The message is a warning, so that it is visible by default. `unpacked` and `packed` are the
    numbers of tokens before and after packing.
    """
    log.warning(
        "shared prompts: the first batch has %d tokens in place of %d, %.2f times fewer",
        packed, unpacked, unpacked / max(packed, 1),
    )  # fmt: skip


def _check_release() -> None:
    """Raises Unsupported unless TRL can be imported and is new enough: it has a fused head."""
    try:
        importlib.import_module("trl.trainer.utils").add_fused_lm_head  # noqa: B018
    except (ImportError, AttributeError) as error:
        got, fix = f"TRL cannot be used ({error})", "pip install -U trl"
        raise Unsupported(need(OP, got, RELEASES, fix)) from error


def _refuse(got: str, needs: str) -> None:
    """Raises Unsupported with a text that says what a step got and what it needs."""
    raise Unsupported(need(OP, got, needs, "use TRL's own trainer, or change its arguments"))
