"""Models of an installed transformers on a GPU, with our functions in their gated-delta-net layers.

In fp32, with the definition in those layers, the model is the measure. In bf16 ours must be about
as close as what it comes with: flash-linear-attention where that is installed, PyTorch elsewhere.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qla_kernels import Unsupported
from qla_kernels.integrations import transformers as integration
from tests.compare import assert_close, no_worse
from tests.gdn_calls import definition
from tests.tiny_models import HEAD_SIZES, KINDS, VOCABULARY, step, tiny

pytestmark = pytest.mark.hopper

LIMIT = 0.05  # relative L2, bf16 through two layers and back: PyTorch's own is off by 0.02


@pytest.fixture(params=KINDS)
def model(request, untuned, monkeypatch):
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    sizes = HEAD_SIZES.get(request.param, (128, 128))
    made = tiny(request.param, width=256, head_sizes=sizes)
    for name, parameter in made.named_parameters():
        if name.endswith("A_log"):  # as made, all is forgotten at once: no gradient but rounding's
            nn.init.constant_(parameter, -3.0)
    made.to("cuda", torch.bfloat16)
    yield made
    integration.restore(made)


def results(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    logits, loss, grads = step(model, ids)
    return {"logits": logits, "loss": loss} | grads


def tokens(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), device="cuda")


def definition_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The definition, called as a layer calls its function."""
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return definition({**x, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel})


def test_a_training_step(model, monkeypatch):
    ids = tokens(200)
    theirs = results(model, ids)
    assert integration.swap(model) == 1
    ours = results(model, ids)
    assert integration.restore(model) == 1
    monkeypatch.setitem(integration.HELD, integration.HOLDS, definition_of)
    monkeypatch.setitem(integration.SHARED, integration.SHARES, definition_of)
    monkeypatch.setitem(integration.TAKES, definition_of, definition_of)
    wide = copy.deepcopy(model).float()
    assert integration.swap(wide) == 1
    truth = results(wide, ids)
    no_worse(ours, theirs, truth, ratio=1.5, limit=LIMIT)


@torch.no_grad()
def test_prefill_and_decoding_are_one_long_call(model):
    integration.swap(model)
    ids = tokens(105)
    want = model(ids).logits
    out, parts = None, []
    for piece in ids.split([100, 1, 1, 1, 1, 1], 1):
        out = model(piece, past_key_values=out and out.past_key_values, use_cache=True)
        parts.append(out.logits)
    assert_close("logits", torch.cat(parts, 1), want, LIMIT)


def test_it_is_ours_that_run(model):
    """They refuse fp32, which what the model comes with would compute."""
    integration.swap(model.float())
    with pytest.raises(Unsupported, match="float32"):
        model(tokens(70))
