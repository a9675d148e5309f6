"""The worked example: one GRPO update, packed and of whole sequences; and the model it has."""

import importlib.util

import pytest
import torch

from examples import dualkv_grpo
from qla_kernels import pack_padded, pack_shared_prompts
from qla_kernels.integrations import transformers as swapping
from reference import dualkv
from tests.compare import assert_close

# One response at a time, a group in pieces, all groups at once.
PLANS = [24, 28, 1000]


@pytest.mark.parametrize("max_tokens", PLANS)
def test_the_example_agrees(max_tokens, capsys):
    assert dualkv_grpo.main(["--max-tokens", str(max_tokens)]) == 0
    said = capsys.readouterr().out
    assert "  gradient of layers.2.qkv.weight\n" in said
    assert "DIFFERS" not in said


def test_the_example_notices_a_wrong_mask(monkeypatch, capsys):
    """Responses that see each other: the exit status says so."""

    def leaky(q, k, v, layout):
        return dualkv.attention(q, k, v, torch.full_like(layout.tout, layout.num_tokens)).o

    monkeypatch.setattr(dualkv_grpo, "shared_prefix_attention", leaky)
    assert dualkv_grpo.main([]) == 1
    said = capsys.readouterr().out
    assert "log-probabilities  DIFFERS" in said
    assert "gradient of head.weight  DIFFERS" in said


@pytest.mark.parametrize("max_tokens", PLANS)
def test_the_example_agrees_on_a_model_of_transformers(max_tokens, capsys):
    pytest.importorskip("transformers")
    assert dualkv_grpo.main(["--transformers", "--max-tokens", str(max_tokens)]) == 0
    assert "DIFFERS" not in capsys.readouterr().out


@pytest.mark.parametrize("max_tokens", PLANS)
def test_the_example_agrees_on_a_model_with_gated_delta_nets(max_tokens, capsys):
    pytest.importorskip("transformers")
    call = ["--transformers", "qwen3-next", "--max-tokens", str(max_tokens)]
    status = dualkv_grpo.main(call)
    # models of a kind share functions: a test of another file would find ours
    assert swapping.restore(dualkv_grpo.TransformersQwen3Next().model) == 2
    assert status == 0
    said = capsys.readouterr().out
    assert "linear_attn.in_proj_qkvz.weight\n" in said
    assert "DIFFERS" not in said


def test_the_example_says_when_transformers_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dualkv_grpo.main(["--transformers"]) == 0
    assert capsys.readouterr().out.startswith("skipped: transformers is not installed; pip")


# Tokens of prompts and of responses that other implementations have been tested with.
BATCHES = [
    [(48, [32, 24])],
    [(48, [32, 24]), (48, [28, 20])],
    [(48, [32, 24]), (32, [28, 20])],
    [(64, [24, 32]), (32, [16]), (48, [20, 28])],
    [(16, [16, 24]), (64, [32]), (32, [20, 16, 28]), (48, [24, 32]), (24, [16]), (56, [20, 24])],
    [(1, [32, 24]), (48, [16, 20])],
    [(32, [1, 1]), (48, [1, 24])],
    [(8, [16, 24]), (80, [16, 24])],
    [(32, [4, 64, 8]), (48, [2, 48])],
    [(24, [32]), (48, [16]), (16, [24]), (64, [20])],
    [(128, [4, 8]), (64, [2, 4])],
]


@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_log_probabilities_of_a_model(lengths):
    """The first prompt, where another is as long or longer, begins it: nothing may be confused."""
    text = torch.randint(dualkv_grpo.VOCABULARY, (128,))
    prompts = [text[:p] for p, _ in lengths]
    responses = [[torch.randint(dualkv_grpo.VOCABULARY, (r,)) for r in rs] for _, rs in lengths]
    model, batch = dualkv_grpo.Qwen3(), pack_shared_prompts(prompts, responses)
    with torch.no_grad():
        logits = model(batch.input_ids, batch.position_ids, batch.src_rows, batch.layout)
        got = batch.to_padded(batch.gather_logprobs(logits))
        want = dualkv_grpo.whole_sequences(model, prompts, responses)
        assert_close("log-probabilities", got, want, 1e-6)


def test_log_probabilities_of_padded_rows():
    """Shuffled rows of a trainer, padded on both sides."""
    model = dualkv_grpo.Qwen3()
    data = dualkv_grpo.sample(model)
    whole = dualkv_grpo.whole_sequences(model, data.prompts, data.responses)
    pairs = [(p, r) for p, rs in zip(data.prompts, data.responses, strict=True) for r in rs]
    rows, width = torch.randperm(len(pairs)), data.mask.shape[1]
    prompt_width = max(map(len, data.prompts))
    ids = torch.zeros(len(rows), prompt_width + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, i in enumerate(rows.tolist()):
        prompt, response = pairs[i]
        span = slice(prompt_width - len(prompt), prompt_width + len(response))
        ids[row, span], mask[row, span] = torch.cat([prompt, response]), 1
    batch = pack_padded(ids, mask, prompt_width)
    logits = model(batch.input_ids, batch.position_ids, batch.src_rows, batch.layout)
    got = batch.to_padded(batch.gather_logprobs(logits), width)
    assert_close("log-probabilities", got.detach(), whole[rows].detach(), 1e-6)


def test_a_rank_without_work_can_keep_the_others_company():
    """A batch of padding alone: no targets, a loss of 0, gradients of 0 and no NaN."""
    model, batch = dualkv_grpo.Qwen3(), pack_shared_prompts([], [], pad_to=8)
    logits = model(batch.input_ids, batch.position_ids, batch.src_rows, batch.layout)
    loss = batch.gather_logprobs(logits).sum()
    loss.backward()
    assert loss == 0
    assert all(not p.grad.any() for p in model.parameters())
