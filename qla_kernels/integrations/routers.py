"""The load-balancing loss of MoE routers, for batches that store shared prompts once."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from qla_kernels.runtime.errors import need

OP = "router_loss"


class Packed(Protocol):
    """Protocol: the properties of a packed batch that `router_loss` reads; a `SharedBatch` fits.

    Attributes:
        num_tokens: T, the number of packed tokens.
        multiplicity: [T], the number of sequences that contain each token: 8 for the tokens of a
            prompt with 8 responses, and 0 for padding.
    """

    @property
    def num_tokens(self) -> int: ...

    @property
    def multiplicity(self) -> Tensor: ...


def router_loss(router_logits: Sequence[Tensor], batch: Packed, top_k: int) -> Tensor:
    """Returns the load-balancing loss of an MoE model for a batch that stores shared prompts once.

    A packed token counts once for each sequence that contains it, so the loss is that of the
    sequences without packing; transformers' own loss would count it once. For E experts the loss is
    E sum_e f_e p_e, as in transformers: f_e is the number of tokens that chose expert e among their
    top_k experts, and p_e the sum of the probabilities of expert e, both over all layers and
    divided by the number of tokens.

    Args:
        router_logits: [T, E] of each layer: `out.router_logits` of a call with
            output_router_logits=True.
        batch: the packed batch of that call.
        top_k: the number of experts per token: `config.num_experts_per_tok`.

    Raises:
        ValueError: there are no logits, or they do not have T rows.
    """
    if not router_logits:
        fix = "pass output_router_logits=True to the model"
        raise ValueError(need(OP, "no router_logits", "one tensor a layer", fix))
    weight = batch.multiplicity.float()  # [T]
    device, experts = router_logits[0].device, router_logits[0].shape[-1]
    chosen, mass = torch.zeros(2, experts, device=device).unbind()
    for logits in router_logits:
        rows = logits.reshape(-1, experts)
        if len(rows) != batch.num_tokens:
            got, needs = f"logits of {len(rows)} tokens", f"{batch.num_tokens}, as in the batch"
            raise ValueError(need(OP, got, needs, "pass the batch of that call"))
        probability, here = rows.softmax(-1), weight.to(rows.device)
        picked = probability.topk(top_k, -1).indices.flatten()
        chosen = chosen.index_add(0, picked.to(device), here.repeat_interleave(top_k).to(device))
        mass = mass + (here[:, None] * probability.float()).sum(0).to(device)
    tokens = weight.sum().clamp(min=1).to(device) * len(router_logits)  # padding alone: 0
    return experts * (chosen * mass).sum() / tokens.square()
