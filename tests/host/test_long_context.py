"""The training example: two ranks over gloo, its loss, its sequences."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qla_kernels.sparse_ring import StripedLayout
from tests import long_context_ranks as ranks
from tests.ranks import ROOT, forked

sys.path.insert(0, str(ROOT / "examples"))

from long_context.loss import IGNORED, linear_cross_entropy
from long_context.sequences import Dealer, Documents, Synthetic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def said(folder):
    pytest.importorskip("transformers")
    told, codes = forked("tests.long_context_ranks", folder, 2)
    assert codes == [0, 0], told[0].get("no end", told[1].get("no end"))
    return told[0]


def losses(lines):
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_that_resumes_has_the_losses_of_one_that_did_not_stop(said):
    through = losses(said["through"])
    assert len(through) == ranks.STEPS
    assert losses(said["resumed"]) == through[ranks.SAVED :]
    assert said["printed"].count(f"\nresumed at step {ranks.SAVED} from ") == 1
    assert through[-1] < through[0]


def test_an_exported_model_is_the_one_that_was_trained(said, folder):
    """Its loss on the next sequence is the one of the run that went on."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / ranks.EXPORTED)
    tokens = Synthetic(ranks.LENGTH, model.config.vocab_size)[ranks.STEPS][None]
    want = [model(tokens, labels=tokens).loss.item()]
    assert losses(said["after the export"]) == pytest.approx(want, rel=1e-5)


def test_a_folder_is_trained_and_exported_with_its_tokenizer(said, folder):
    """--layers had no effect on it, its tokenizer was lost, and too many positions went unsaid."""
    exported = folder / "again"
    assert json.loads((exported / "config.json").read_text())["num_hidden_layers"] == 1
    assert (exported / "tokenizer.json").read_text() == "a tokenizer"
    text = f"warning: {ranks.LENGTH + 100} tokens, max_position_embeddings is {ranks.LENGTH}: see"
    assert said["printed"].count(text) == 1


def test_a_checkpoint_of_another_model_is_refused(said):
    assert re.search(
        r"step-000004 is of another model: causal\.model\.layers\.1\.\S+ is \(.*\) there, and "
        "missing here; pass its --model and --layers, or another --checkpoints",
        said["another model"],
    )


def test_the_dense_ring_is_found_from_a_program_of_examples(monkeypatch):
    """It was not: a program's path begins at its own folder, and benchmarks/ is beside that."""
    pytest.importorskip("transformers")
    from long_context import attention

    monkeypatch.setattr(sys, "path", [x for x in sys.path if not Path(x, "benchmarks").is_dir()])
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    alone = SimpleNamespace(world=1, whole=None)
    assert attention.dense(alone, "definition").name == "dense_ring"
    monkeypatch.undo()


def test_a_start_without_torchrun_says_so(monkeypatch):
    import long_context_train as example

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="start with torchrun --nproc-per-node N"):
        example.start("cpu")


def test_a_mask_that_is_none_is_refused_before_ranks_join(monkeypatch):
    """Its ValueError came out of the middle of a traceback of torchrun."""
    import long_context_train as example

    monkeypatch.setattr(sys, "argv", ["long_context_train.py", "--recall", "95"])
    monkeypatch.setattr(example, "start", lambda _: pytest.fail("joined the other ranks"))
    said = r"^VerticalSlash: recall_v is 95\.0; need a number from 0 to 1; pass a share, such as"
    with pytest.raises(SystemExit, match=said):
        example.main()


def test_a_model_or_layers_that_cannot_run_end_with_a_sentence(tmp_path):
    """Qwen3.5 ended in a traceback after it was loaded, and layers beyond the last were ignored."""
    transformers = pytest.importorskip("transformers")
    from long_context.model import configuration

    transformers.Qwen3_5Config().save_pretrained(tmp_path)
    said = f"--model {tmp_path}: sparse_ring: layers of linear_attention, .*; need layers of full"
    with pytest.raises(SystemExit, match=said):
        configuration(str(tmp_path), 512, None)
    assert configuration("tiny", 512, None, (0, 1)).num_hidden_layers == 2
    with pytest.raises(SystemExit, match="dense_layers has 1; need 0 to 0 for a model of 1 l"):
        configuration("tiny", 512, 1, (0, 1))


def test_a_number_of_steps_between_checkpoints_below_1_is_refused():
    """It was a ZeroDivisionError after the first step."""
    import long_context_train as example

    with pytest.raises(SystemExit, match="--save-every 0; need 1 or more; pass more than --steps"):
        example.parse(["--save-every", "0"])


def test_options_of_the_other_attention_are_named(said):
    """They were ignored in silence."""
    import long_context_train as example

    assert said["printed"].count("without effect under --attention dense: --max-s\n") == 1
    assert said["printed"].count("without effect") == 1
    dense = ["--attention", "dense", "--dense-layers", "0", "1", "--max-s", "3", "--log-lines", "1"]
    given = ["--max-s", "--dense-layers", "--log-lines"]
    assert example.parse(dense).without_effect == given
    assert example.parse(["--dense-kernel", "fa4"]).without_effect == ["--dense-kernel"]


def test_density_and_recall_of_each_layer_are_logged(said):
    logged = [line for line in said["through"] if "density" in line]
    assert [(line["step"], line["layer"]) for line in logged] == [
        (step, layer) for step in range(0, ranks.STEPS, ranks.SAVED) for layer in ("0", "1")
    ]
    for line in logged:
        assert 0 < line["density"] < 1
        assert 0.5 <= line["window_recall"] <= 1


def test_the_dense_ring_and_every_diagonal_train_alike(said):
    """Other layouts, kernels, labels' places, and with or without recomputation."""
    for name in ("loss", "norm"):
        dense, ours = ([line[name] for line in said[k]] for k in ("dense", "every diagonal"))
        assert dense == pytest.approx(ours, rel=1e-4)


def test_the_first_loss_is_that_of_the_model_by_itself(said):
    from long_context.model import causal_model, configuration

    config = configuration("tiny", ranks.LENGTH, None)
    model = causal_model("tiny", config, "eager", torch.device("cpu"))
    tokens = Synthetic(ranks.LENGTH, model.config.vocab_size)[0][None]
    want = model(tokens, labels=tokens).loss  # it shifts labels by itself
    assert said["dense"][0]["loss"] == pytest.approx(want.item(), rel=1e-5)


def test_two_rings_train_on_two_sequences(said):
    (step,) = (line for line in said["two rings"] if "loss" in line)
    assert step["tokens"] == 2 * ranks.LENGTH


@pytest.mark.parametrize("rows", [1, 7, 20, 100])
def test_a_loss_in_parts_has_the_gradients_of_the_whole(rows):
    h, w = torch.randn(20, 8, dtype=torch.float64), torch.randn(13, 8, dtype=torch.float64)
    y = torch.randint(13, (20,))
    y[3:9] = IGNORED
    leaves = [x.requires_grad_() for x in (h, w)]
    want = torch.nn.functional.cross_entropy(h @ w.T, y, reduction="sum")
    got = linear_cross_entropy(h, w, y, rows)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    grads = (torch.autograd.grad(3 * x, leaves) for x in (got, want))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_loss_makes_no_gradients_if_none_are_wanted():
    h, w = torch.randn(20, 8), torch.randn(13, 8)
    loss = linear_cross_entropy(h, w, torch.zeros(20, dtype=torch.int64), 7)
    assert not loss.requires_grad


def test_shards_of_a_document_make_up_the_document(tmp_path):
    """Of documents of 5, 1 and 400 tokens the second has no next token to predict."""
    tokens = np.arange(406, dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    np.save(tmp_path / "bounds.npy", np.array([0, 5, 6, 406]))
    source = Documents(tmp_path / "tokens.npy", tmp_path / "bounds.npy", 300, 500)
    layout = StripedLayout(2)
    assert source[0].tolist() == [0, 1, 2, 3, 4]
    assert source[2].tolist() == source[0].tolist()  # from the start again
    shards = [Dealer(source, layout, r, 1, 2, torch.device("cpu")).shard(0) for r in range(2)]
    order = layout.perm(512).argsort()
    whole = [torch.cat([s[n] for s in shards], 1)[0, order].tolist() for n in range(3)]
    assert whole[0][:300] == list(range(6, 306))
    assert whole[1][:300] == [*range(7, 306), IGNORED]
    assert set(whole[1][299:]) == {IGNORED}
    assert whole[2] == list(range(512))
    assert [s.seqlen for s in shards] == [300, 300]
    slices = Documents(tmp_path / "tokens.npy", None, 200, 500)
    assert slices[1].tolist() == list(range(200, 400))
    with pytest.raises(SystemExit, match="pass a smaller --length"):
        Documents(tmp_path / "tokens.npy", None, 1000, 500)


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ([0, 5, 200], "bounds end at 200, tokens at 406; append 406"),
        ([0], "bounds end at 0, tokens at 406; append 406"),
        ([0, 500], "bounds end at 500, tokens at 406; they are of other tokens"),
        ([5, 406], r"bounds are \[  5 406\] ..; need 0 first"),
        ([], r"bounds are \[\] ..; need 0 first"),
        ([0, 9, 5, 406], "9 is followed by 5; need bounds in ascending order"),
    ],
)
def test_bounds_that_do_not_cover_the_tokens_are_refused(bounds, text, tmp_path):
    """Tokens behind the last bound were left out, and [0] was called a --length too large."""
    np.save(tmp_path / "tokens.npy", np.arange(406))
    np.save(tmp_path / "bounds.npy", np.array(bounds))
    with pytest.raises(SystemExit, match=f"bounds.npy: {text}"):
        Documents(tmp_path / "tokens.npy", tmp_path / "bounds.npy", 300, 500)


def test_tokens_outside_of_the_vocabulary_are_named(tmp_path):
    """They were an IndexError of torch."""
    np.save(tmp_path / "tokens.npy", np.arange(400))
    source = Documents(tmp_path / "tokens.npy", None, 200, 300)
    assert len(source[0]) == 200
    with pytest.raises(SystemExit, match=r"token 300 is 300; need 0 to 299, the model's vocab"):
        source[1]
    np.save(tmp_path / "tokens.npy", np.zeros((2, 200)))
    with pytest.raises(SystemExit, match=r"has the shape \[2, 200\]; need one dimension"):
        Documents(tmp_path / "tokens.npy", None, 200, 300)


def test_commands_of_the_example_s_docstring_parse():
    """Random weights on a GPU have a bounded mask: it would hold nearly all pairs."""
    import long_context_train as example

    text = example.__doc__.replace("\\\n", " ")
    commands = re.findall(r"^ *torchrun .*/long_context_train.py ([^$\n]*)$", text, re.M)
    for command in commands:
        options = example.parse(command.split())
        assert options.model != "qwen2.5-3b" or options.attention == "dense" or options.max_s
    assert len(commands) > 3
