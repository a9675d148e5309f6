"""docs/dualkv.md: its code runs, recipes give what whole sequences give, the figure is current."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples import dualkv_grpo
from qla_kernels import SharedLayout
from qla_kernels.dualkv import padded_groups
from scripts import dualkv_mask
from tests.compare import assert_close
from tests.readme import names_in

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "dualkv.md").read_text()


@pytest.fixture(scope="module")
def code() -> dict[str, Any]:
    return names_in("docs/dualkv.md")


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


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.fixture(params=["padded", "nested"])
def rows_of_verl(rollouts, request):
    """As its engine has them: sequences without padding, prompts and responses with it or not."""
    _, ids, mask, _, width, _ = rollouts
    real = mask.bool()
    data = {
        "input_ids": jagged([x[m] for x, m in zip(ids, real, strict=True)]),
        "prompts": ids[:, :width],
        "responses": ids[:, width:],
        "attention_mask": mask,
        "temperature": 1.0,
        "max_token_len_per_gpu": 28,
    }
    if request.param == "nested":
        for name, part in (("prompts", slice(width)), ("responses", slice(width, None))):
            data[name] = jagged([x[part][m[part]] for x, m in zip(ids, real, strict=True)])
    return data


def test_verl_recipe(code, rollouts, rows_of_verl):
    model, _, mask, _, width, whole = rollouts
    data, lengths = rows_of_verl, mask[:, width:].sum(1).tolist()
    inputs, kept = code["prepare_model_inputs"](None, data)
    output = model(**inputs, use_cache=False)
    found = code["prepare_model_outputs"](None, output, kept, data, None)
    assert set(found) == {"log_probs"}
    for values, want, n in zip(found["log_probs"].unbind(), whole, lengths, strict=True):
        got = values[len(values) - n - 1 : -1]  # as its losses take them
        assert_close("log-probabilities", got.detach(), want[:n], 1e-6)
    more = {**data, "calculate_entropy": True}
    entropy = code["prepare_model_outputs"](None, output, kept, more, None)["entropy"]
    assert torch.equal(entropy.offsets(), data["input_ids"].offsets())


@pytest.mark.parametrize("most", [0, 5])
def test_verl_recipe_for_micro_batches(code, rows_of_verl, most, monkeypatch):
    """Another rank has `most` of them."""
    stand_in = SimpleNamespace(
        device=SimpleNamespace(get_device_name=lambda: "cpu"),
        tensordict_utils=SimpleNamespace(index_select_tensor_dict=lambda data, rows: rows),
    )
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verl.utils", stand_in)
    monkeypatch.setattr(dist, "all_reduce", lambda x, *_, **__: x.clamp_(min=most))
    taken, found = code["prepare_micro_batches"](rows_of_verl)
    assert taken == found
    assert sorted(row for rows in found for row in rows) == list(range(7))
    assert all(found)
    assert len(found) == max(3, most)  # of 60 tokens, with prompts


def test_trl_recipe(code, rollouts):
    model, ids, mask, _, _, whole = rollouts

    class Base:
        temperature = 1.0

    trainer = code["shared_prefix_trainer"](Base)()
    method = trainer._get_per_token_logps_and_entropies
    call = (model, ids, mask, whole.shape[1])
    logprobs, *others = method(*call, batch_size=4, pixel_values=None, compute_aux_loss=False)
    assert_close("log-probabilities", logprobs.detach(), whole, 1e-6)
    assert others == [None, None]
    assert not method(*call, compute_entropy=True)[1].requires_grad
    trainer._entropy_bonus_enabled = True
    assert method(*call, compute_entropy=True)[1].requires_grad
    for given in ({"pixel_values": torch.zeros(1)}, {"compute_aux_loss": True}):
        with pytest.raises(NotImplementedError, match=f"shared prompts and {next(iter(given))}"):
            method(*call, **given)


@pytest.mark.parametrize("fails", [False, True])
def test_trl_recipe_generates_by_torch_s_attention(code, fails):
    """It once failed at the first step: TRL generates with the model that it trains."""
    chosen = ["shared_prefix"]

    class Base:
        model = SimpleNamespace(set_attn_implementation=chosen.append)
        accelerator = SimpleNamespace(unwrap_model=lambda model: model)

        def _generate(self, prompts):
            assert chosen[-1] == "sdpa"
            return prompts if not fails else 1 / 0

    trainer = code["shared_prefix_trainer"](Base)()
    if fails:
        with pytest.raises(ZeroDivisionError):
            trainer._generate([1, 2])
    else:
        assert trainer._generate([1, 2]) == [1, 2]
    assert chosen == ["shared_prefix", "sdpa", "shared_prefix"]


@pytest.mark.parametrize("by_label", [False, True])
def test_recipe_for_micro_batches(code, rollouts, by_label):
    _, ids, mask, uid, width, _ = rollouts
    groups = padded_groups(ids, mask, width, group_ids=uid if by_label else None)
    found = code["micro_batches"](groups, 28)
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
