"""docs/dualkv.md: its code runs, recipes give what whole sequences give, the figure is current."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples import dualkv_grpo
from qla_kernels import SharedLayout
from scripts import dualkv_mask
from tests.compare import assert_close

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "dualkv.md").read_text()


@pytest.fixture(scope="module")
def code() -> dict[str, Any]:
    """What the document's code defines, all of it run from top to bottom."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S):
        exec(compile(block, "docs/dualkv.md", "exec"), names)
    return names


class Model(torch.nn.Module):
    """The example's, called as transformers' are, and always in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dualkv_grpo.Qwen3()

    def forward(self, input_ids, position_ids, use_cache, shared_prefix, logits_to_keep):
        assert not use_cache
        with torch.autocast("cpu", enabled=False):
            logits = self.inner(input_ids[0], position_ids[0], logits_to_keep, shared_prefix)
        return SimpleNamespace(logits=logits[None])


@pytest.fixture
def rollouts():
    """Shuffled rows of padded tensors, their labels, and log-probabilities of whole sequences."""
    torch.manual_seed(0)
    model = Model()
    data = dualkv_grpo.sample(model.inner)
    whole = dualkv_grpo.whole_sequences(model.inner, data.prompts, data.responses)
    answers = [(p, r, g) for g, p in enumerate(data.prompts) for r in data.responses[g]]
    rows, width = torch.randperm(len(answers)), data.mask.shape[1]
    prompt_width = max(len(p) for p in data.prompts)
    ids = torch.zeros(len(rows), prompt_width + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, i in enumerate(rows.tolist()):
        prompt, response, _ = answers[i]
        span = slice(prompt_width - len(prompt), prompt_width + len(response))
        ids[row, span], mask[row, span] = torch.cat([prompt, response]), 1
    uid = [f"group {answers[i][2]}" for i in rows.tolist()]
    return model, ids, mask, uid, prompt_width, whole[rows].detach()


def test_verl_recipe(code, rollouts):
    model, ids, mask, uid, prompt_width, whole = rollouts
    actor = SimpleNamespace(actor_module=model, device_name="cpu")
    call = {
        "input_ids": ids,
        "attention_mask": mask,
        "uid": uid,
        "responses": ids[:, prompt_width:],
    }
    entropy, logprobs = code["forward_micro_batch"](actor, call, 1.0, calculate_entropy=True)
    assert_close("log-probabilities", logprobs.detach(), whole, 1e-6)
    assert entropy.shape == whole.shape
    assert code["forward_micro_batch"](actor, call, 0.7)[0] is None


def test_trl_recipe(code, rollouts):
    model, ids, mask, _, _, whole = rollouts

    class Base:
        temperature = 1.0

    trainer = code["shared_prefix_trainer"](Base)()
    method = trainer._get_per_token_logps_and_entropies
    logprobs, entropy = method(model, ids, mask, whole.shape[1], batch_size=4, pixel_values=None)
    assert_close("log-probabilities", logprobs.detach(), whole, 1e-6)
    assert entropy is None
    _, entropy = method(model, ids, mask, whole.shape[1], compute_entropy=True)
    assert not entropy.requires_grad


@pytest.mark.parametrize("by_label", [False, True])
def test_recipe_for_micro_batches(code, rollouts, by_label):
    _, ids, mask, uid, prompt_width, _ = rollouts
    labels = uid if by_label else None
    found = code["micro_batches"](ids, mask, prompt_width, 28, labels)
    assert sorted(row for rows in found for row in rows) == list(range(len(ids)))
    assert len(found) > 1


def test_figures_of_the_text():
    """What it says about when packing pays."""
    for groups, tokens, pairs in (
        ([(16384, [2048] * 28)], 7.0, 4.2),
        ([(1024, [4096] * 16)], 1.2, 1.0),
    ):
        ((prompt, responses),) = groups
        layout = SharedLayout.from_lengths(groups)
        lengths = [prompt + r for r in responses]
        assert round(sum(lengths) / layout.num_tokens, 1) == tokens
        assert round(sum(n * (n + 1) // 2 for n in lengths) / layout.pairs, 1) == pairs


def test_every_file_it_names_exists():
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / name).exists(), name


def test_the_figure_is_current():
    assert dualkv_mask.figure() == dualkv_mask.FIGURE.read_text(), "run scripts/dualkv_mask.py"
