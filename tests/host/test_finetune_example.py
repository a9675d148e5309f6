"""The fine-tuning example: a Trainer of an installed transformers, with our kernels and without."""

import pytest
import torch

from examples import finetune_qwen3_5
from qla_kernels.integrations import transformers as swapping

pytestmark = pytest.mark.libraries


@pytest.fixture(autouse=True)
def _restored():
    """Models of a kind share functions: a test of another file would find ours."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    if not hasattr(transformers, "Qwen3_5ForCausalLM"):
        pytest.skip("this transformers has no Qwen3.5")
    yield
    swapping.restore(finetune_qwen3_5.tiny_model())


@pytest.mark.parametrize("options", [[], ["--checkpointing"], ["--bf16"]], ids=str)
def test_losses_are_those_of_plain_transformers(options, tmp_path, capsys):
    call = ["--tiny", "--compare", "--steps", "3", "--output", str(tmp_path), *options]
    assert finetune_qwen3_5.main(call) == 0
    said = capsys.readouterr().out
    assert "3 layers call our functions" in said
    assert "largest relative difference from a run without our kernels" in said


def test_it_learns(tmp_path, monkeypatch, capsys):
    assert finetune_qwen3_5.main(["--tiny", "--output", str(tmp_path)]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("loss "))
    first, last = (float(x) for x in line.split() if x[0].isdigit())
    assert last < first - 0.5


def test_a_wrong_kernel_is_noticed(tmp_path, monkeypatch, capsys):
    right = swapping.chunk_gated_delta_rule

    def wrong(q, k, v, g, beta, **kwargs):
        return right(q, k, v, g, beta / 2, **kwargs)

    monkeypatch.setattr(swapping, "chunk_gated_delta_rule", wrong)
    call = ["--tiny", "--compare", "--steps", "2", "--output", str(tmp_path)]
    assert finetune_qwen3_5.main(call) == 1


def test_a_short_text_says_what_to_pass():
    with pytest.raises(SystemExit, match="10 tokens; need 64; pass a smaller --length"):
        finetune_qwen3_5.Chunks(torch.arange(10), 64)
