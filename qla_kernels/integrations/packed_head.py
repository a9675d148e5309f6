"""`packed_head`: makes a model return log-probabilities of a batch's targets in place of logits.

    with packed_head(model, batch, temperature=0.7) as values:
        out = model(**batch.model_inputs())
    logprobs, entropies = values(out)

The logits of all tokens are never in memory together. Only the forward of the head's module is
replaced: the model still calls the module, so FSDP gathers its weight, and its adapters count.
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
KEPT = "_qla_kernels_head"  # attribute of a head's module: its PackedHead, which is used again
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")  # of logits, in configs


class Task(NamedTuple):
    """Record: the batch and the settings with which a `PackedHead` computes log-probabilities.

    Attributes:
        batch: the packed batch. Its targets are the tokens whose log-probabilities are wanted.
        temperature: logits are divided by this number before the softmax.
        in_fp32: True to multiply hidden states and the head's weight in fp32, without autocast.
    """

    batch: SharedBatch
    temperature: float
    in_fp32: bool


class PackedHead:
    """Replacement forward of a model's LM head, which returns log-probabilities instead of logits.

    `packed_head` installs it for a `with` block. It returns [1, L, 2]: log-probability and entropy
    of each of L targets, the tokens in the loss, such as all tokens of responses. It is called with
    the hidden states [1, M, D] of the tokens directly before targets; M <= L, because the last
    token of a shared prompt predicts the first token of several responses. Some models multiply the
    output of their head by a factor; both results are divided by it first, which cancels that.

    Args:
        head: the LM head, a module from D to the vocabulary.
        factor: the factor by which the model multiplies logits, 1 for most models.
    """

    def __init__(self, head: nn.Module, factor: float) -> None:
        self.head, self.factor = head, factor
        self.task: Task | None = None

    # not compiled, because the task differs at each call
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
    """Context manager in which a model returns log-probabilities of a batch's targets, not logits.

    Targets are the tokens in the loss, such as all tokens of responses; L is their number. Call the
    model in the block, by `out = model(**batch.model_inputs())`. The `as` variable of the
    block is a function: given `out`, it returns the log-probabilities and the entropies of the
    targets, each [L].

    Args:
        model: a transformers model after `transformers_dualkv.prepare`, which selects this
            package's attention. Pass the model itself, not a wrapper such as DDP.
        batch: the packed batch with which the block calls the model.
        temperature: logits are divided by this number.
        in_fp32: multiply hidden states and the head's weight, which must be fp32, without autocast.

    Raises:
        Unsupported: the model caps its logits (final_logit_softcapping).
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
        if before is not None:  # another library's
            vars(head)["forward"] = before


def _factor(model: Any) -> float:
    """Returns the number by which a model multiplies its logits, from its config.

    Raises Unsupported if the model caps its logits.
    """
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
