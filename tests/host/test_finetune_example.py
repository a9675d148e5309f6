"""The fine-tuning example: a Trainer of an installed transformers, with our kernels and without."""

import sys

import pytest
import torch

from qla_kernels.integrations import mixers
from qla_kernels.integrations import transformers as swapping
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import finetune_qwen3_5
import qwen_setup

pytestmark = pytest.mark.libraries


@pytest.fixture(autouse=True)
def _restored():
    """Models of a kind share functions: a test of another file would find ours."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    if not hasattr(transformers, "Qwen3_5ForCausalLM"):
        pytest.skip("this transformers has no Qwen3.5")
    yield
    swapping.restore(qwen_setup.tiny_model())


@pytest.mark.parametrize("options", [[], ["--full"], ["--full", "--bf16"]], ids=str)
def test_losses_are_those_of_plain_transformers(options, tmp_path, capsys):
    if "--full" not in options:
        pytest.importorskip("peft")
    call = ["--tiny", "--compare", "--steps", "3", "--output", str(tmp_path), *options]
    assert finetune_qwen3_5.main(call) == 0
    printed = capsys.readouterr().out
    assert "1 layers call our functions" in printed
    assert "estimated GPU memory: " in printed
    assert "largest relative difference from a run without our kernels" in printed


def test_it_learns(tmp_path, capsys):
    assert finetune_qwen3_5.main(["--tiny", "--full", "--output", str(tmp_path)]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("loss "))
    first, last = (float(x) for x in line.split() if x[0].isdigit())
    assert last < first - 0.3


@pytest.mark.parametrize("options", [[], ["--full"]], ids=str)
def test_a_wrong_kernel_is_noticed(options, tmp_path, monkeypatch):
    if not options:
        pytest.importorskip("peft")
    right = mixers.gated_delta_net

    def wrong(mixed_qkv, a, b, *args, **kwargs):
        return right(mixed_qkv, a, b - 1, *args, **kwargs)

    monkeypatch.setattr(mixers, "gated_delta_net", wrong)
    call = ["--tiny", "--compare", "--steps", "2", "--output", str(tmp_path), *options]
    assert finetune_qwen3_5.main(call) == 1


@pytest.mark.parametrize("hybrid", [True, False])
def test_all_projections_get_adapters(hybrid):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(qwen_setup.tiny_model(hybrid), qwen_setup.adapters(4))
    plain = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lora_" not in name
    ]
    assert plain
    assert all(name.endswith(("base_layer", "lm_head")) for name in plain)


def published(hidden: int, layers: int, width: int, heads: tuple[int, int], values: int) -> object:
    """A Qwen3.5 of these sizes without memory of its weights."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=width,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=values, linear_key_head_dim=128,
        linear_value_head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen3_5ForCausalLM(config).float()


def gigabytes(line: str) -> float:
    return float(line.split(" GB")[0].split()[-1])


def test_the_estimate_is_near_what_a_gpu_measured():
    """A step of the Trainer with 8192 tokens and weights in fp32 took 49.9 GB on an H100."""
    model = published(2048, 24, 6144, (8, 2), 16)
    line = qwen_setup.estimate(model, 8192, logits=True)
    assert gigabytes(line) == pytest.approx(49.9, rel=0.03)


def test_the_numbers_of_the_docstring():
    model = published(2560, 32, 9216, (16, 4), 32)
    full = gigabytes(qwen_setup.estimate(model, 8192, logits=True))
    less = gigabytes(qwen_setup.estimate(model, 4096, logits=True))
    table = " ".join(finetune_qwen3_5.__doc__.split())
    assert f"--full {full:.1f} " in table
    assert f"--batch 1 has {less:.1f}" in table
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model.bfloat16(), qwen_setup.adapters(16))
    lora = gigabytes(qwen_setup.estimate(model, 8192, logits=True))
    assert f"LoRA {lora:.1f} " in table
    assert gigabytes(qwen_setup.estimate(model, 8192, logits=False)) == 11.9  # sft_trl.py: 12


def test_a_short_text_says_what_to_pass():
    with pytest.raises(SystemExit, match="10 tokens; need 64; pass a smaller --length"):
        finetune_qwen3_5.Chunks(torch.arange(10), 64)


def test_bad_options_say_what_to_pass(monkeypatch, capsys):
    for call, text in {
        (): "need --text FILE or --tiny",
        ("--tiny", "--full", "--batch", "0"): "--batch 0; need 1 or more",
    }.items():
        with pytest.raises(SystemExit):
            finetune_qwen3_5.main(call)
        assert text in capsys.readouterr().err
    monkeypatch.setattr(qwen_setup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SystemExit, match=r"peft: not installed; .*pip install peft, or pass --full"
    ):
        finetune_qwen3_5.main(["--tiny"])
