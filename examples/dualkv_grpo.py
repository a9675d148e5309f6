"""Runs one GRPO update with each prompt run once, and compares it with one on whole sequences.

    python examples/dualkv_grpo.py                  a tiny Qwen3, defined in this file
    python examples/dualkv_grpo.py --transformers   a tiny Qwen3 of Hugging Face transformers
    python examples/dualkv_grpo.py --transformers qwen3-next    one with gated delta nets

Both updates start from the same random weights and the same rollouts. They must agree on every
log-probability, on the loss and on the gradient of every parameter; if not, the exit status is 1.
The packed update runs fewer tokens.
"""

import argparse
import copy
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qla_kernels import (
    SharedLayout,
    pack_shared_prompts,
    plan_microbatches,
    shared_prefix_attention,
)
from qla_kernels.integrations import transformers_dualkv

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 3, 4, 2, 16
CLIP, KL = 0.2, 0.05
AGREE = 1e-5  # fp32: relative difference of log-probabilities, loss and gradients


class Layer(nn.Module):
    """A layer of Qwen3: normalised queries and keys, rotary positions, few key heads, gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor, layout: SharedLayout | None) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (-1, HEAD_DIM))  # [T, heads, D]
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = rotate(self.q_norm(q), positions), rotate(self.k_norm(k), positions)
        if layout is not None:
            o = shared_prefix_attention(q, k, v, layout)
        else:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            o = o.transpose(0, 1)
        x = x + self.out(o.flatten(1))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None] * 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Qwen3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(
        self, ids: Tensor, positions: Tensor, rows: Tensor, layout: SharedLayout | None = None
    ) -> Tensor:
        """Returns what the head gets of some rows of packed tokens.

        Without a layout, tokens are one sequence.
        """
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions, layout)
        last: Tensor = self.norm(x[rows])
        return last

    def forward(
        self, ids: Tensor, positions: Tensor, rows: Tensor, layout: SharedLayout | None = None
    ) -> Tensor:
        """Returns the logits of these rows."""
        logits: Tensor = self.head(self.hidden(ids, positions, rows, layout))
        return logits


class TransformersQwen3(nn.Module):
    """Qwen3 of transformers, unmodified, with the interface of the class above."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        sizes = {
            "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
            "num_key_value_heads": KV_HEADS,
        }  # fmt: skip
        self.model = self.made(transformers, sizes)
        transformers_dualkv.prepare(self.model)

    @property
    def head(self) -> nn.Module:
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def made(self, transformers: Any, sizes: dict[str, Any]) -> Any:
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))

    def hidden(
        self, ids: Tensor, positions: Tensor, rows: Tensor, layout: SharedLayout | None = None
    ) -> Tensor:
        self.model.set_attn_implementation("eager" if layout is None else "shared_prefix")
        packed = {} if layout is None else {"shared_prefix": layout}
        done = self.model.base_model(
            ids[None], position_ids=positions[None], use_cache=False, **packed
        )
        last: Tensor = done.last_hidden_state[0][rows]
        return last

    def forward(
        self, ids: Tensor, positions: Tensor, rows: Tensor, layout: SharedLayout | None = None
    ) -> Tensor:
        logits: Tensor = self.head(self.hidden(ids, positions, rows, layout))
        return logits


class TransformersQwen3Next(TransformersQwen3):
    """Qwen3-Next of transformers: two layers of gated delta nets, and one of attention."""

    def made(self, transformers: Any, sizes: dict[str, Any]) -> Any:
        config = transformers.Qwen3NextConfig(
            **sizes, num_experts=0, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16,
            layer_types=["linear_attention"] * (LAYERS - 1) + ["full_attention"],
        )  # fmt: skip
        model = transformers.Qwen3NextForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                nn.init.uniform_(parameter, -3.0, 0.0)  # states that last for some tokens
            elif parameter.dim() > 1:  # with weights as small as its own it hardly uses them
                nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
        return model


class Rollouts(NamedTuple):
    """Prompts, the responses to each, and the tensors of GRPO, [S, W] over padded responses."""

    prompts: list[Tensor]
    responses: list[list[Tensor]]
    mask: Tensor  # True where a response has a token
    advantages: Tensor  # reward of each response minus the mean reward of its group
    old: Tensor  # log-probabilities under the policy that sampled the response
    reference: Tensor  # log-probabilities under the reference model


def sample(model: nn.Module) -> Rollouts:
    """Returns rollouts of random tokens: groups of different sizes, one with an empty response."""
    lengths = [(13, [7, 1, 0, 11]), (1, [5]), (9, [4, 4])]
    prompts = [torch.randint(VOCABULARY, (p,)) for p, _ in lengths]
    responses = [[torch.randint(VOCABULARY, (r,)) for r in rs] for _, rs in lengths]
    longest = torch.tensor([r for _, rs in lengths for r in rs])
    mask = torch.arange(int(longest.max())) < longest[:, None]
    rewards = [torch.randn(len(rs)) for _, rs in lengths]
    advantages = torch.cat([r - r.mean() for r in rewards])[:, None].expand(mask.shape)
    with torch.no_grad():
        now = whole_sequences(model, prompts, responses)
    old, reference = (now + 0.3 * torch.randn_like(now) for _ in range(2))
    return Rollouts(prompts, responses, mask, advantages, old, reference)


def loss_of(logprobs: Tensor, data: Rollouts, rows: slice | Tensor = slice(None)) -> Tensor:
    """Returns the clipped objective plus a KL penalty to the reference, averaged over tokens."""
    ratio = (logprobs - data.old[rows]).exp()
    gain = data.advantages[rows]
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    behind = data.reference[rows] - logprobs
    penalty = behind.exp() - behind - 1
    return ((KL * penalty - objective) * data.mask[rows]).sum() / data.mask.sum()


def whole_sequences(
    model: nn.Module, prompts: list[Tensor], responses: list[list[Tensor]]
) -> Tensor:
    """Returns log-probabilities [S, W], computed from each prompt and response as one sequence."""
    logprobs, width = [], max(len(answer) for answers in responses for answer in answers)
    for prompt, answers in zip(prompts, responses, strict=True):
        for answer in answers:
            ids = torch.cat([prompt, answer])
            positions = torch.arange(len(ids))
            logits = model(ids, positions, positions[len(prompt) - 1 : -1])
            of_tokens = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
            logprobs.append(F.pad(of_tokens, (0, width - len(answer))))
    return torch.stack(logprobs)


class Update(NamedTuple):
    logprobs: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    tokens: int


def usual_update(model: nn.Module, data: Rollouts) -> Update:
    logprobs = whole_sequences(model, data.prompts, data.responses)
    loss = loss_of(logprobs, data)
    loss.backward()
    tokens = sum(len(p) + len(r) for p, rs in zip(*data[:2], strict=True) for r in rs)
    return Update(logprobs.detach(), loss.detach(), gradients_of(model), tokens)


def packed_update(model: Any, data: Rollouts, max_tokens: int) -> Update:
    """Runs micro-batches of at most max_tokens packed tokens; their gradients add up."""
    lengths = [(len(p), [len(r) for r in rs]) for p, rs in zip(*data[:2], strict=True)]
    first = [sum(len(rs) for rs in data.responses[:g]) for g in range(len(lengths))]
    logprobs, loss, tokens = torch.zeros(data.mask.shape), torch.zeros(()), 0
    (micro_batches,) = plan_microbatches(lengths, max_tokens)
    for pieces in micro_batches:
        batch = pack_shared_prompts(
            [data.prompts[g] for g, _ in pieces],
            [[data.responses[g][i] for i in chosen] for g, chosen in pieces],
        )
        hidden = model.hidden(batch.input_ids, batch.position_ids, batch.src_rows, batch.layout)
        found = batch.to_padded(batch.logprobs(hidden, model.head), width=data.mask.shape[1])
        rows = torch.tensor([first[g] + i for g, chosen in pieces for i in chosen])
        part = loss_of(found, data, rows)
        part.backward()
        logprobs[rows] = found.detach()
        loss += part.detach()
        tokens += batch.num_tokens
    return Update(logprobs, loss, gradients_of(model), tokens)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(make: Callable[[], nn.Module], max_tokens: int) -> dict[str, Any]:
    """Runs both updates; returns their numbers of tokens and relative differences of results."""
    model = make()
    data = sample(model)
    usual = usual_update(copy.deepcopy(model), data)
    packed = packed_update(model, data, max_tokens)

    def differ(a: Tensor, b: Tensor) -> float:
        return float((a - b).norm() / b.norm())

    gradients = {name: differ(packed.gradients[name], x) for name, x in usual.gradients.items()}
    return {
        "tokens": (usual.tokens, packed.tokens),
        "log-probabilities": differ(packed.logprobs, usual.logprobs),
        "loss": differ(packed.loss, usual.loss),
        **{f"gradient of {name}": x for name, x in gradients.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    models = {"qwen3": TransformersQwen3, "qwen3-next": TransformersQwen3Next}
    parser.add_argument(
        "--transformers", nargs="?", const="qwen3", choices=models, help="use a model of theirs"
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="packed tokens of a micro-batch")
    options = parser.parse_args(arguments)
    make: Callable[[], nn.Module] = Qwen3
    if options.transformers:
        if importlib.util.find_spec("transformers") is None:
            print("skipped: transformers is not installed; pip install transformers")
            return 0
        make = models[options.transformers]
    torch.manual_seed(0)
    found = compare(make, options.max_tokens)
    whole, packed = found.pop("tokens")
    print(f"{whole} tokens in whole sequences, {packed} packed: {whole / packed:.2f} times fewer")
    for name, difference in found.items():
        print(f"{difference:.1e}  {name}{'' if difference < AGREE else '  DIFFERS'}")
    return int(max(found.values()) >= AGREE)


if __name__ == "__main__":
    sys.exit(main())
