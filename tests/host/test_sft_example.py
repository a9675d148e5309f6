"""The example of packed fine-tuning: SFTTrainer of an installed TRL after `swap`."""

import sys

import pytest

from qla_kernels.integrations import mixers
from qla_kernels.integrations import transformers as swapping
from tests.ranks import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import qwen_setup
import sft_trl

trl = pytest.importorskip("trl")
pytest.importorskip("peft")

pytestmark = pytest.mark.libraries


@pytest.fixture(autouse=True)
def _restored():
    yield
    swapping.restore(qwen_setup.tiny_model())


def test_losses_are_those_of_rows_that_are_not_packed(tmp_path, capsys):
    assert sft_trl.main(["--tiny", "--compare", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "estimated GPU memory: " in printed
    assert "largest relative difference from rows that are not packed" in printed


def test_sequences_that_run_into_each_other_are_noticed(tmp_path, monkeypatch):
    right = mixers.gated_delta_net

    def mixing(*args, cu_seqlens=None, **kwargs):
        return right(*args, **kwargs)

    monkeypatch.setattr(mixers, "gated_delta_net", mixing)
    assert sft_trl.main(["--tiny", "--compare", "--output", str(tmp_path)]) == 1


def test_the_collator_of_packs_passes_bounds():
    """What the page and the docstring say that TRL passes."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collator([{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}])
    assert {"position_ids", "cu_seq_lens_q", "seq_idx"} <= batch.keys()
    assert "attention_mask" not in batch
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]


def test_bad_options_say_what_to_pass(capsys):
    for call, text in {
        (): "need --data FILE or --tiny",
        ("--data", "x", "--compare"): "--compare without --tiny",
        ("--tiny", "--length", "8"): "--length 8; need 256",
    }.items():
        with pytest.raises(SystemExit):
            sft_trl.main(call)
        assert text in capsys.readouterr().err
