"""Density and recall by layer: of a dump, of a model, and as a log of training."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qla_kernels.integrations import transformers_sparse_ring as hook
from qla_kernels.sparse_ring import (
    Dense,
    FixedVerticalSlash,
    VerticalSlash,
    build_index,
    measure,
)


def heads(T: int = 512, H: int = 4, Hk: int = 2, D: int = 16):
    return torch.randn(1, T, H, D), torch.randn(1, T, Hk, D)


def test_held_out_recall_is_the_share_of_the_softmax_under_the_mask():
    q, k = heads()
    index = build_index(q, k, FixedVerticalSlash([3, 70], [0, 2]))
    rows = measure.held_out_rows(512, 100)
    S = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)) * 16**-0.5
    P = S.masked_fill(torch.ones(512, 512).tril() == 0, -torch.inf).softmax(-1)
    want = (P * index.to_mask()).sum(-1)[..., rows]
    got = measure.held_out_recall(q, k, index, rows)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


def test_held_out_rows_are_not_those_that_chose_the_lines():
    rows = measure.held_out_rows(1000, 10_000)
    assert rows.tolist() == list(range(125, 14 * 64))  # block 14 is the last complete one
    assert measure.held_out_rows(1000, 5).tolist() == measure.held_out_rows(1000, 5).tolist()
    with pytest.raises(ValueError, match="100 tokens; need at least 192"):
        measure.held_out_rows(100, 5)


def test_every_diagonal_holds_everything():
    q, k = heads()
    index = build_index(q, k, Dense())
    held = measure.held_out_recall(q, k, index, measure.held_out_rows(512, 20))
    line = measure.lines_of_layer(7, index, held)
    assert line.layer == "7"
    assert line.density == pytest.approx(1)
    assert line.held_out == pytest.approx(1)
    assert line.worst_held_out == pytest.approx(1)
    assert (line.columns, line.diagonals, line.run_length) == (0, 8, 8)


def test_a_log_keeps_the_latest_lines_of_each_layer():
    q, k = heads()
    log = measure.LineLog()
    for layer, lines in ((1, [0, 1]), (0, [0, 3, 4]), (1, [0, 2])):
        log(layer, q, k, build_index(q, k, FixedVerticalSlash([5], lines)))
    first, second = log.lines()
    assert [first.layer, second.layer] == ["0", "1"]
    assert (first.diagonals, first.run_length) == (3, 1.5)
    assert (second.diagonals, second.run_length) == (2, 1)
    assert first.held_out is None
    assert "held out" not in str(first)


def test_the_hook_calls_with_each_layers_tensors_and_lines():
    q, k, v = (torch.randn(1, h, 256, 8) for h in (4, 2, 2))
    called = []
    settings = hook.SparseRingConfig(
        pattern=FixedVerticalSlash([3], [0]), on_index=lambda *x: called.append(x)
    )
    layer = SimpleNamespace(layer_idx=5, is_causal=True)
    o, _ = hook.attention(layer, q, k, v, None, sparse_ring=settings)
    ((number, got_q, got_k, index),) = called
    assert number == 5
    assert torch.equal(got_q, q.transpose(1, 2))
    assert torch.equal(got_k, k.transpose(1, 2))
    assert index.to_lists()[0][0] == ([3], [0])
    silent = hook.SparseRingConfig(pattern=FixedVerticalSlash([3], [0]))
    assert torch.equal(o, hook.attention(layer, q, k, v, None, sparse_ring=silent)[0])


@pytest.mark.parametrize("by_layer", [False, True])
def test_the_command_measures_a_dump(by_layer, tmp_path, capsys):
    layers = {n: {"q": q[0], "k": k[0]} for n, (q, k) in ((n, heads(700)) for n in (3, 8))}
    torch.save(layers if by_layer else layers[3], tmp_path / "qk.pt")
    out = tmp_path / "lines.json"
    call = [f"--dump={tmp_path / 'qk.pt'}", "--recall=0.4,0.8", "--rows=20", "--device=cpu"]
    assert measure.main([*call, f"--out={out}", "--least=0.999"]) == 0
    low, high = json.loads(out.read_text())
    assert [x["layer"] for x in low["layers"]] == (["3", "8"] if by_layer else ["0"])
    for a, b in zip(low["layers"], high["layers"], strict=True):
        assert 0.4 <= a["worst_window"] <= a["window_recall"] < b["window_recall"] <= 1
        assert a["density"] < b["density"]
        assert a["held_out"] < b["held_out"] <= 1
        assert np.mean(a["heads"]["held_out"]) == pytest.approx(a["held_out"])
        assert min(a["heads"]["window"]) == pytest.approx(a["worst_window"])
        assert len(a["heads"]["density"]) == 4
    said = capsys.readouterr().out
    assert said.count("held out") == 2 * (1 + by_layer) + 2
    measure.main([*call, "--least=0"])
    assert "held-out recall below 0.0: no layer\n" in capsys.readouterr().out


@pytest.mark.parametrize("layers", [(3, 8), (0,)])
def test_layers_are_listed_for_targets_above_the_threshold(layers):
    """All were listed for a target of 0.9 and a threshold of 0.9."""
    found = [measure.LayerLines(str(n), *[0.0] * 7, 0.85, 0.8) for n in layers]
    found.append(measure.LayerLines("9", *[0.0] * 7, 0.92, 0.9))
    patterns = [VerticalSlash(x, x) for x in (0.9, 0.95)]
    said = list(measure._report(SimpleNamespace(patterns=patterns, lines=[found] * 2), 0.9))
    listed = [line for line in said if "listed" in line or "below" in line]
    option, setting = ("3 8", "3, 8") if len(layers) == 2 else ("0", "0,")
    assert listed == [
        "no layers are listed for the target 0.9: it is not above --least 0.9",
        f"held-out recall below 0.9: --dense-layers {option}, or dense_layers=({setting})",
    ]


def saved(*shapes):
    return dict(zip("qk", map(torch.zeros, shapes), strict=False))


@pytest.mark.parametrize(
    ("dump", "text"),
    [
        ({0: saved((300, 1, 8))}, "layer 0 of .*; need .* a dict of these by layer; save it so"),
        ({0: (torch.zeros(300, 1, 8),) * 2}, "layer 0 of .*; need .* a dict of these by layer"),
        ({n: {0: torch.zeros(300, 1, 8)} for n in "qk"}, "layer '0' of .*; need .* by layer"),
        ([torch.zeros(300, 1, 8)], "a list in .*; need .* by layer"),
        (saved((50, 1, 8), (50, 1, 8)), "50 tokens; need at least 128; dump a longer sequence"),
        (saved((4, 1024, 64), (2, 1024, 64)), r"q is \[4, 1024, 64\], read as \[T, heads, D\]: "
         r"4 tokens of 1024 heads; need more tokens than heads; save q\.transpose\(0, 1\)"),
        (saved((1, 300, 4, 8), (1, 300, 2, 8)), r"q is \[1, 300, 4, 8\]; need \[T, heads, D\]; "
         r"save q\[0\] of a batch of one sequence"),
        (saved((300, 4, 8), (301, 2, 8)), r"q is \[300, 4, 8\], k is \[301, 2, 8\]; need .*"),
        (saved((300, 4, 8), (300, 3, 8)), "with H a multiple of Hk"),
    ],
)  # fmt: skip
def test_a_dump_of_another_form_is_refused(dump, text, tmp_path):
    """[H, T, D] was once called a sequence of too few tokens; some others an AttributeError."""
    torch.save(dump, tmp_path / "qk.pt")
    with pytest.raises(SystemExit, match=text):
        measure.main([f"--dump={tmp_path / 'qk.pt'}", "--device=cpu"])


def test_the_help_names_the_defaults(capsys):
    with pytest.raises(SystemExit):
        measure.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "targets; default: 0.9,0.95",
        "held-out rows; default: 256",
        "are listed; default: 0.9",
        "of its block's others; default: 8",
        "share of the columns; default: --recall",
    ):
        assert text in said


@pytest.fixture(scope="module")
def model_and_tokens(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("measured")
    config = transformers.Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=50,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(50, size=700))
    return folder / "model", folder / "ids.npy"


def test_the_command_measures_a_model(model_and_tokens, tmp_path, capsys):
    """Its numbers are those of q and k of the model with its own attention."""
    model, ids = model_and_tokens
    call = [f"--model={model}", "--length=600", "--rows=20", "--device=cpu"]
    out = tmp_path / "lines.json"
    more = [f"--tokens={ids}", "--recall=0.6", f"--out={out}", "--recall-v=0.3", "--kappa=4"]
    assert measure.main([*call, *more]) == 0
    (found,) = json.loads(out.read_text())
    assert found["pattern"] == asdict(VerticalSlash(0.3, 0.6, kappa=4))
    assert [x["layer"] for x in found["layers"]] == ["0", "1"]
    assert all(x["window_recall"] >= 0.6 for x in found["layers"])
    said = capsys.readouterr()
    assert said.out.startswith(
        f"one sequence of 512 tokens of {ids}, from token 0 on; --length is 600\n"
        "recall_v = 0.3, recall_s = 0.6\n"
    )
    assert "layer   1: density" in said.out
    assert "warning" not in said.err
    with pytest.raises(SystemExit):
        measure.main(call)


def test_a_sequence_beyond_the_model_s_positions_is_said(model_and_tokens, capsys):
    """Nothing told that the rotary embedding was extrapolated."""
    model, ids = model_and_tokens
    call = [f"--model={model}", f"--tokens={ids}", "--rows=2", "--device=cpu", "--recall=0.5"]
    assert measure.main(call) == 0
    assert "warning: 640 tokens, max_position_embeddings is 512: see" in capsys.readouterr().err
    assert measure.main([*call, "--start=200"]) == 0
    said = capsys.readouterr()
    assert "of 384 tokens of" in said.out
    assert "from token 200 on" in said.out
    assert "warning" not in said.err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("--length=100", "--length 100; need at least 256; pass a larger one"),
        ("--start=500", "200 tokens of .*ids.npy; need at least 256; pass more of them"),
        ("--max-v=2", "max_v is 2; need at least 1, at least sink = 4"),
        ("--tokens=large.npy", "tokens from 60 to 60; need 0 to 49, the model's vocabulary"),
        ("--tokens=pairs.npy", r"has the shape \[300, 2\]; need one dimension; save it flat"),
    ],
)
def test_what_the_command_cannot_measure_is_named(change, text, model_and_tokens, tmp_path):
    """Each was called a text too short, or an IndexError."""
    model, ids = model_and_tokens
    np.save(tmp_path / "large", np.full(300, 60))
    np.save(tmp_path / "pairs", np.zeros((300, 2)))
    change = change.replace("tokens=", f"tokens={tmp_path}/")
    with pytest.raises(SystemExit, match=text):
        measure.main([f"--model={model}", f"--tokens={ids}", "--device=cpu", change])


def test_a_folder_without_a_tokenizer_is_named(model_and_tokens, tmp_path):
    """It was called a text too short: transformers makes a tokenizer without a vocabulary."""
    (tmp_path / "text").write_text("words " * 1000)
    call = [f"--model={model_and_tokens[0]}", f"--text={tmp_path / 'text'}", "--device=cpu"]
    with pytest.raises(SystemExit, match=r"no tokenizer in .*model; need one that makes tokens"):
        measure.main(call)


def test_q_and_k_of_a_model_are_dumped_for_the_command(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=50,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    layers = {}

    def keep(layer, q, k, index):
        layers[layer] = {"q": q[0].cpu(), "k": k[0].cpu()}

    monkeypatch.chdir(tmp_path)
    model = transformers.Qwen2ForCausalLM(config)
    hook.prepare(model)
    settings = hook.SparseRingConfig(pattern=Dense(), on_index=keep)
    with torch.no_grad():
        model(torch.randint(50, (1, 384)), use_cache=False, sparse_ring=settings)
    torch.save(layers, "qk.pt")
    assert measure.main(["--dump=qk.pt", "--rows=20", "--device=cpu"]) == 0
    assert "layer   1: density" in capsys.readouterr().out


def test_patterns_are_measured_in_turn():
    q, k = heads()
    measured = measure.Measured([VerticalSlash(0.3, 0.3), VerticalSlash(0.9, 0.9)], 16)
    measured(0, q, k)
    measured(1, q, k)
    assert [[x.layer for x in lines] for lines in measured.lines] == [["0", "1"], ["0", "1"]]
