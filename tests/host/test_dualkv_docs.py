"""docs/dualkv.md and docs/rl-trainers.md: their code runs, and the figure is current."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples import dualkv_grpo
from qla_kernels import SharedLayout, pack_padded
from qla_kernels.dualkv import PaddedGroup, padded_groups
from qla_kernels.integrations import transformers_dualkv, verl
from scripts import dualkv_mask
from tests.compare import assert_close
from tests.readme import names_in

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_functions_for_transformers(code, rollouts):
    model, ids, mask, _, width, whole = rollouts
    batch = pack_padded(ids, mask, width)
    logprobs = batch.gather_logprobs(code["packed_logits"](model, batch))
    assert_close("log-probabilities", batch.to_padded(logprobs).detach(), whole, 1e-6)


def test_the_function_for_padded_rows_of_another_trainer(rollouts):
    model, ids, mask, _, width, whole = rollouts
    found = names_in("docs/rl-trainers.md")["response_logprobs"](model, ids, mask, width)
    assert_close("log-probabilities", found.detach(), whole, 1e-6)


def test_memory_of_logits_in_verl(monkeypatch):
    """Of what torch allocates: 4 bytes a row and word, for all T rows of a replaced forward."""
    monkeypatch.setattr("qla_kernels.dualkv.logprobs.ELEMENTS", 1 << 18)
    vocabulary, prompt = 20000, torch.arange(400)
    sequences = [torch.cat([prompt, torch.randint(1000, (200,))]) for _ in range(4)]
    rows = {"input_ids": sequences, "responses": [x[400:] for x in sequences]}
    data: dict[str, Any] = {
        name: torch.nested.nested_tensor(x, layout=torch.jagged) for name, x in rows.items()
    }
    data |= {"calculate_entropy": True, "temperature": 1.0}
    batch = verl.pack(data)
    head = torch.randn(vocabulary, 8).bfloat16().requires_grad_()

    def loss(hidden):
        logits = (hidden @ head.T)[None]  # gone when the engine's forward_step returns
        found = verl.unpack(logits[0], batch, data)
        return sum(x.values().sum() for x in found.values())

    for count in (len(batch.src_rows), batch.num_tokens):
        hidden = torch.randn(count, 8).bfloat16().requires_grad_()
        with torch.profiler.profile(profile_memory=True) as run:
            loss(hidden).backward()
        events = [x for x in run.profiler.kineto_results.events() if x.name() == "[memory]"]
        now = most = 0
        for event in sorted(events, key=lambda x: x.start_ns()):
            now += event.nbytes()
            most = max(most, now)
        assert most == pytest.approx(4 * count * vocabulary, rel=0.15)
    page = (ROOT / "docs" / "rl-trainers.md").read_text()
    for count, words, name in ((32753, 151936, "M"), (36864, 248320, "T")):
        assert f"{name} = {count}, V = {words}: {4 * count * words / 1e9:.0f} GB" in page
    for most_tokens, split in ((36864, [16]), (20480, [8, 8]), (12288, [4] * 4)):
        group = PaddedGroup(list(range(16)), 4096, [2048] * 16)
        assert [len(x) for x in verl.micro_batches([group], most_tokens)] == split
        tokens = [4096 + 2048 * n for n in split]
        numbers = f"{4 * max(tokens) * 248320 / 1e9:.0f} GB | {98304 / sum(tokens):.2f} x"
        assert f"| {most_tokens} | {', '.join(map(str, split))} | {numbers} |" in page


@pytest.mark.parametrize("page", ["docs/dualkv.md", "docs/rl-trainers.md"])
def test_pages_name_what_there_is(page):
    """Their code runs, and files and functions that they name exist."""
    names_in(page)
    text = (ROOT / page).read_text()
    for name in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / "docs" / name).exists(), name
    for name in re.findall(r"`transformers_dualkv\.(\w+)", text):
        assert hasattr(transformers_dualkv, name), name


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


def test_the_figure_is_current():
    assert dualkv_mask.figure() == dualkv_mask.FIGURE.read_text(), "run scripts/dualkv_mask.py"
