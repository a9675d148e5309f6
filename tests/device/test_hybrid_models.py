"""Tiny Qwen3-Next and Qwen3.5 of an installed transformers on a GPU, on packed batches.

The measure is the same model in fp64 on the CPU, each sequence alone. Against it a packed call in
bf16 must be about as close as calls in bf16 with each sequence alone.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from qla_kernels import SharedBatch, gated_delta_net
from qla_kernels.integrations import mixers
from qla_kernels.integrations import transformers as swapping
from qla_kernels.integrations import transformers_dualkv as hook
from qla_kernels.runtime import jit
from tests.compare import no_worse
from tests.tiny_hybrids import KINDS, VOCABULARY, alone, gradients, hybrid, packed, together

pytest.importorskip("transformers", reason="needs transformers: pip install 'transformers>=5.9'")

pytestmark = pytest.mark.hopper

GPU = "cuda"
SIZES = {
    "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 256,
    "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
# Every expert takes every token: rounding would send a few tokens to others, and no two arms agree.
ALL_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 64}
LIMIT = 0.15  # relative L2, bf16: torch's own a_proj of OlmoHybrid has 0.116
RATIO = 1.5  # of the errors, packed over alone
CLIP = 0.2

Results = dict[str, Tensor]


def texts() -> list[Tensor]:
    """A prompt with responses, two levels deep; one node is shorter than the convolution."""
    torch.manual_seed(4)

    def draw(n: int) -> Tensor:
        return torch.randint(VOCABULARY, (n,))

    a, b = draw(300), draw(2)
    trunk = torch.cat([a, b])
    long = [torch.cat([trunk, draw(n)]) for n in (1, 200, 64, 65)]
    return [torch.cat([a, draw(130)]), *long, a, draw(90)]


def small(kind: str) -> nn.Module:
    experts = ALL_EXPERTS if kind.endswith("MoE") else {}
    model = hybrid(kind, **SIZES, **experts)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others have no fp64
    return model.to(torch.bfloat16)


def loss_of(logprobs: Tensor, before: Tensor, advantages: Tensor) -> Tensor:
    """GRPO's, whose ratios are clipped or far from it."""
    ratio = (logprobs - before).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def results(model: nn.Module, logprobs: Tensor, before: Tensor, advantages: Tensor) -> Results:
    given = (x.to(logprobs) for x in (before, advantages))
    loss = loss_of(logprobs, *given)
    found = {"log-probabilities": logprobs.detach(), "loss": loss.detach()[None]}
    found |= gradients(model, loss)
    for gate in ("A_log", "dt_bias"):  # few numbers, sums that cancel: all layers' together
        found[gate] = torch.cat([found.pop(name) for name in [*found] if name.endswith(gate)])
    return {name: x.double().cpu() for name, x in found.items()}


def arms(kind: str) -> tuple[list[Results], Results, Results]:
    """Of packed calls without and with checkpointing, of each sequence alone, and the measure."""
    model, sequences = small(kind), texts()
    exact = copy.deepcopy(model).double()
    model.to(GPU)
    swapping.swap(exact)
    measure = alone(exact, sequences)
    torch.manual_seed(6)
    before = measure.detach() + 0.6 * torch.randint(-1, 2, measure.shape)
    rest = before, torch.randn(measure.shape, dtype=torch.float64)
    want = results(exact, measure, *rest)
    on_gpu = [x.to(GPU) for x in sequences]
    swapping.swap(model)
    each = results(model, alone(model, on_gpu).float(), *rest)
    hook.prepare(model)
    batch: SharedBatch = packed(on_gpu)
    kept = results(model, together(model, batch).float(), *rest)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = results(model, together(model, batch).float(), *rest)
    for x in (model, exact):
        swapping.restore(x)
    return [kept, checkpointed], each, want


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_step_is_that_of_each_sequence_alone(kind):
    steps, each, want = arms(kind)
    assert want["A_log"].numel() == 3 * SIZES["linear_num_value_heads"]
    for got in steps:
        assert got.keys() == each.keys() == want.keys()
        no_worse(got, each, want, ratio=RATIO, limit=LIMIT)
    ran = " ".join(jit.compiled())
    for kernel in ("gdn.chunk_grads", "gdn.child_sums", "conv.bwd", "dualkv.bwd_dkv_wide"):
        assert kernel in ran


def test_nodes_that_do_not_continue_from_their_parents_are_noticed(monkeypatch):
    monkeypatch.setattr(mixers, "gated_delta_net", _from_nothing)
    (got, _), each, want = arms("Qwen3.5")
    with pytest.raises(AssertionError, match="log-probabilities: relative"):
        no_worse(got, each, want, ratio=RATIO, limit=LIMIT)


def _from_nothing(*args, layout=None, **kwargs):
    """A layer, node by node."""
    if layout is None:
        return gated_delta_net(*args, **kwargs)
    bounds = torch.tensor([*layout.nodes[:, 0].tolist(), layout.num_tokens], dtype=torch.int32)
    return gated_delta_net(*args, **{**kwargs, "cu_seqlens": bounds.to(GPU)})
