"""`packed_head`: a model returns log-probabilities of a batch's targets where it returned logits.

    with packed_head(model, batch, temperature=0.7) as values:
        out = model(**batch.model_inputs())
    logprobs, entropies = values(out)

The module of the model's head runs, so its weight is there under FSDP, and adapters are applied;
only the module's forward is exchanged. Logits of all tokens are in memory at no time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qla_kernels.dualkv import SharedBatch
from qla_kernels.integrations.full_attention import text_config
from qla_kernels.runtime.errors import Unsupported, need

OP = "packed_head"
KEPT = "_qla_kernels_head"  # of a head's module: its PackedHead, which compiled code has seen
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")  # of logits, in configs


class Task(NamedTuple):
    """The targets whose log-probabilities are computed in place of logits."""

    batch: SharedBatch
    temperature: float
    in_fp32: bool


class PackedHead:
    """The forward of a head's module while a task is there; before and after it the module's own.

    Returns [1, L, 2], log-probabilities and entropies, divided by `factor`, with which the model
    multiplies logits.
    """

    def __init__(self, head: nn.Module, factor: float) -> None:
        self.head, self.factor = head, factor
        self.task: Task | None = None

    # compiled code ends before the head, whose task differs at each call
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, hidden: Tensor) -> Tensor:
        assert self.task is not None, "packed_head installs and removes it"
        batch, temperature, in_fp32 = self.task
        hidden, kind = hidden.flatten(0, -2), hidden.device.type  # of one packed row
        on = torch.is_autocast_enabled(kind) and not in_fp32
        with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=on):
            logprobs, entropies = batch.logprobs(
                hidden.float() if in_fp32 else hidden,
                self.head,
                temperature=temperature / self.factor,
                entropy=True,
            )
        return torch.stack([logprobs, entropies], -1)[None] / self.factor


@contextmanager
def packed_head(
    model: Any, batch: SharedBatch, *, temperature: float = 1.0, in_fp32: bool = False
) -> Iterator[Callable[[Any], tuple[Tensor, Tensor]]]:
    """While a `with` block runs, the head of a model computes log-probabilities and entropies.

    Yields a function that takes the model's output and returns both, [L] of the batch's targets.

    Args:
        model: a model of transformers that was prepared, without its wrappers.
        batch: the batch that the model is called with.
        temperature: divides the logits.
        in_fp32: products in fp32, outside of autocast; the head's weight has to be fp32.

    Raises:
        Unsupported: the model caps its logits.
    """
    head = model.get_output_embeddings()
    installed: PackedHead = vars(head).get(KEPT) or PackedHead(head, _factor(model))
    before = vars(head).get("forward")
    installed.task = Task(batch, temperature, in_fp32)
    vars(head).update({KEPT: installed, "forward": installed})
    try:
        yield lambda out: out.logits[0].unbind(-1)
    finally:
        installed.task = None
        del vars(head)["forward"]
        if before is not None:  # an exchanged one
            vars(head)["forward"] = before


def _factor(model: Any) -> float:
    """Returns the number by which a model multiplies logits; Unsupported if it caps them."""
    text = text_config(model)
    if cap := getattr(text, "final_logit_softcapping", None):
        fix = "call batch.logprobs(hidden, head, softcap=..) in a trainer of your own"
        raise Unsupported(need(OP, f"final_logit_softcapping={cap}", "none", fix))
    for name in FACTORS:
        if (factor := getattr(text, name, None)) is not None:
            return float(factor)
    scaling = getattr(text, "logits_scaling", None)
    if scaling is None:
        return 1.0
    multiplies = getattr(text, "model_type", "") == "hyperclovax"  # others divide by it
    return float(scaling) if multiplies else 1 / float(scaling)
