"""Shared prompts in GRPO and RLOO of TRL: each prompt of a batch is computed once.

    from qla_kernels.integrations.trl import shared_prefix_trainer
    trainer = shared_prefix_trainer(trl.GRPOTrainer)(model, reward_funcs=..., args=..., ...)

Policy, old policy and reference compute a prompt once instead of once per response; the trainer is
otherwise TRL's. It refuses models that packing would change. The layers of models with gated delta
nets (Qwen3-Next, Qwen3.5) are swapped for ours. This file does not import TRL; it is tested with
TRL 1.16. For AsyncGRPOTrainer see trl_async.py.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qla_kernels.dualkv import padded_groups
from qla_kernels.errors import Unsupported, need
from qla_kernels.integrations import transformers_dualkv
from qla_kernels.integrations.full_attention import text_config
from qla_kernels.integrations.one_label import LabelledRows, by_prompt, one_label
from qla_kernels.integrations.routers import router_loss

OP, NAME = "shared_prefix_trainer", "shared_prefix"
METHOD = "_get_per_token_logps_and_entropies"
RELEASES = "TRL 1.16 or later"

log = logging.getLogger("qla_kernels")


def shared_prefix_trainer(base: type) -> type:
    """Returns a subclass of a TRL trainer that stores each prompt of a batch once.

    `_get_per_token_logps_and_entropies` packs rows by prompts; TRL's fused head then computes
    log-probabilities and entropies without logits. The model uses our attention from this call to
    the end of the step. In `_generate`, and after `train` and `evaluate`, the model uses its own
    attention. The first step logs how many times fewer tokens the model runs. If a batch splits
    groups, a warning says how to avoid that.

    Args:
        base: trl.GRPOTrainer, trl.RLOOTrainer or a subclass. The constructor of the new class has
            the same arguments.

    Raises:
        TypeError: `base` is no such class.
        Unsupported: TRL cannot be imported or is too old, or `base` overrides TRL's method
            `_get_per_token_logps_and_entropies`. The constructor of the new class raises
            Unsupported for use_liger_kernel, images, and models that `transformers_dualkv.check`
            refuses.
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
            if getattr(self.args, "use_liger_kernel", False):
                _refuse("use_liger_kernel=True, which exchanges layers", "False")
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
            trains = torch.is_grad_enabled()  # not so for old and reference policies
            if trains:
                self._say_split(min(len(group.rows) for group in groups))
            parts = by_prompt(groups, batch_size or len(input_ids))
            results: list[Results] = []
            for rows in parts:
                packed = one_label(input_ids[rows], attention_mask[rows], width)
                if trains:
                    self._say_gain(packed)
                with self.accelerator.autocast():
                    results.append(_run(model, self.accelerator, packed, compute_aux_loss))
            back = torch.tensor([row for rows in parts for row in rows]).argsort()
            logps = torch.cat([x.logps for x in results])[back]
            entropies = [
                x.entropies for x in results if x.entropies is not None and compute_entropy
            ]
            aux = [x.aux_loss for x in results if x.aux_loss is not None]
            return (
                logps,
                torch.cat(entropies)[back] if entropies else None,
                torch.stack(aux).mean() if aux else None,
            )

        def _say_gain(self, packed: LabelledRows) -> None:
            if self._says_gain and self.accelerator.is_main_process:
                log_gain(packed.unpacked, packed.num_tokens)
            self._says_gain = False

        def _say_split(self, fewest: int) -> None:
            if fewest >= self.num_generations or not self._says_split:
                return
            if self.accelerator.is_main_process:
                log.warning(
                    "shared prompts: a batch holds parts of groups (%d of %d responses) and shares "
                    "less: set steps_per_generation=1 and per_device_train_batch_size to a "
                    "multiple of num_generations",
                    fewest, self.num_generations,
                )  # fmt: skip
            self._says_split = False

    return SharedPrefixTrainer


class Results(NamedTuple):
    """Log-probabilities, entropies and auxiliary loss of a model, for padded rows."""

    logps: Tensor  # [B, W']
    entropies: Tensor | None  # a reference policy's head computes none
    aux_loss: Tensor | None


def _run(model: nn.Module, accelerator: Any, packed: LabelledRows, routers: bool) -> Results:
    """Runs the model and TRL's fused head; with `routers`, also their auxiliary loss."""
    inner, logits = bare(accelerator.unwrap_model(model)), []
    backbone = inner.base_model  # the fused head returns a loss, but not the logits of routers

    def keep(*call: Any) -> None:
        logits.append(call[-1].router_logits)

    hook = backbone.register_forward_hook(keep) if routers else None
    try:
        out = model(
            input_ids=packed.input_ids[None],
            position_ids=packed.position_ids[None],
            shared_prefix=packed.layout,
            shift_labels=packed.labels[None],
            fused_lm_head=True,
            **({"output_router_logits": True} if routers else {}),
        )
    finally:
        if hook is not None:
            hook.remove()
    top_k = inner.config.get_text_config().num_experts_per_tok if routers else 0
    aux = router_loss(logits[0], packed, top_k) if routers else None
    entropies = None if out.entropy is None else packed.to_padded(out.entropy[0])
    return Results(packed.to_padded(out.log_probs[0]), entropies, aux)


def bare(model: Any) -> Any:
    """Returns the transformers model inside a model with adapters, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def exchanged(home: Any, **functions: Any) -> Iterator[None]:
    """Replaces functions of the module `home` while a `with` block runs.

    Each keyword is the name of a function of `home`, and its value is the new function.
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
    """Raises Unsupported unless TRL has the fused head that the trainer calls."""
    try:
        importlib.import_module("trl.trainer.utils").add_fused_lm_head  # noqa: B018
    except (ImportError, AttributeError) as error:
        got, fix = f"TRL cannot be used ({error})", "pip install -U trl"
        raise Unsupported(need(OP, got, RELEASES, fix)) from error


def _refuse(got: str, needs: str) -> None:
    raise Unsupported(need(OP, got, needs, "use TRL's own trainer, or change its arguments"))
