"""Swapped layers of transformers in calls without a layout: their convolution, packs, and FSDP2."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu

from qla_kernels.integrations import linear_layers
from qla_kernels.integrations import transformers as swapping
from tests.tiny_hybrids import DENSE, KINDS, VOCABULARY, hybrid


@pytest.fixture
def use():
    """Models of a kind share their module's functions."""
    used: list[nn.Module] = []
    yield lambda model: (used.append(model), model)[1]
    for model in used:
        swapping.restore(model)


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    T, width = x.shape[-1], weight.shape[1]
    return silu(conv1d(x, weight[:, None], bias, padding=width - 1, groups=len(weight))[..., :T])


LAYOUTS = {
    "of a projection": lambda x: x.mT.contiguous().mT,
    "of a cache": lambda x: x.contiguous(),
    "rows of a larger batch": lambda x: x.mT.contiguous().repeat_interleave(2, 0)[::2].mT,
    "tokens of longer rows": lambda x: torch.cat([x, x], 2).mT.contiguous()[:, : x.shape[2]].mT,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("biased", [False, True])
def test_rows(layout, biased):
    x, weight = torch.randn(2, 16, 9), torch.randn(16, 4)
    bias = torch.randn(16) if biased else None
    y = linear_layers.of_rows(LAYOUTS[layout](x), weight, bias, "silu")
    assert y.shape == x.shape
    assert y.stride(1) == 1  # as the gated delta rule reads it
    assert (y - by_torch(x, weight, bias)).abs().max() < 1e-5


def test_a_pack_with_bounds():
    x, weight, bounds = torch.randn(1, 16, 9), torch.randn(16, 4), torch.tensor([0, 2, 7, 9])
    keywords = {"cu_seq_lens_q": bounds, "seq_idx": torch.zeros(1, 9), "cu_seq_lens_k": bounds}
    y = linear_layers.of_rows(x, weight, None, "silu", **keywords)
    parts = [by_torch(part, weight) for part in x.split([2, 5, 2], 2)]
    assert (y - torch.cat(parts, 2)).abs().max() < 1e-5


BOUNDS = torch.tensor([0, 4, 9])
LEFT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another activation": ({}, {"activation": "gelu"}),
    "a wide convolution": ({"width": 5}, {}),
    "sequences without bounds": ({}, {"seq_idx": torch.zeros(1, 9)}),
    "bounds of two rows": ({"rows": 2}, {"cu_seq_lens_q": BOUNDS}),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_to_the_layer(what):
    sizes, keywords = LEFT[what]
    x, weight = torch.randn(sizes.get("rows", 1), 16, 9), torch.randn(16, sizes.get("width", 4))
    given = {"activation": "silu", **keywords}
    assert linear_layers.of_rows(x, weight, None, **given) is None


@pytest.mark.parametrize("kind", DENSE)
def test_a_model_with_another_activation(kind, use):
    """Its MLP has it, too."""
    model, ids = use(hybrid(kind, hidden_act="gelu").eval()), torch.randint(VOCABULARY, (2, 20))
    want = model(ids, use_cache=False).logits
    swapping.swap(model)
    assert (model(ids, use_cache=False).logits - want).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_model_is_each_sequence_alone(kind, use):
    """Packed by transformers' collator: its own functions refuse that without causal-conv1d."""
    transformers = pytest.importorskip("transformers", minversion="5.15")  # before: no bounds
    model = use(hybrid(kind).eval())
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    pack = transformers.DataCollatorWithFlattening(
        return_seq_idx=True, return_flash_attn_kwargs=True, return_tensors="pt"
    )
    texts = [torch.randint(VOCABULARY, (n,)) for n in (5, 2, 13)]
    batch = pack([{"input_ids": text.tolist()} for text in texts])
    if importlib.util.find_spec("causal_conv1d") is None:
        with pytest.raises(ValueError, match="packed sequences apart"):
            model(**batch, use_cache=False)
    swapping.swap(model)
    want = torch.cat([model(text[None], use_cache=False).logits[0] for text in texts])
    got = model(**batch, use_cache=False).logits[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("first", ["swap", "shard"])
@pytest.mark.parametrize("kind", DENSE)
def test_fsdp2_in_either_order(kind, first, use, tmp_path):
    """On one rank, with parameters in bf16 for the forward: results are those without it."""
    dist = torch.distributed
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    ids = torch.randint(VOCABULARY, (2, 20))

    def step(model: nn.Module) -> dict[str, Tensor]:
        logits = model(ids, use_cache=False).logits
        logits.float().square().mean().backward()
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"logits": logits.detach()} | {
            n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in named.items()
        }

    plain = use(hybrid(kind))
    swapping.swap(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    want = step(plain.bfloat16())
    model = hybrid(kind)
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if first == "swap":
            assert swapping.swap(model) == 3
        mesh = dist.init_device_mesh("cpu", (1,))
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
        if first == "shard":
            assert swapping.swap(model) == 3
        assert not swapping.status(model).others
        got = step(use(model))
    finally:
        dist.destroy_process_group()
    for name, x in want.items():
        error = (got[name].float() - x.float()).norm() / x.float().norm()
        assert error < 0.05, name
