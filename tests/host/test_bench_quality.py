"""The quality experiment: its tasks can be solved, and a run that stops goes on."""

import json

import pytest
import torch

from benchmarks import quality
from benchmarks.quality import AGAIN, APART, FIRST_KEY, IGNORED, QUESTION, Attention, Model, Sizes
from qla_kernels.sparse_ring import VerticalSlash


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch):
    text = torch.arange(5000, dtype=torch.int64).remainder(251).to(torch.uint8)
    monkeypatch.setattr(quality, "corpus", lambda evaluation: [text[:50], text + 2 * evaluation])


def whole(task, T=512, seed=3):
    """Tokens with the one behind the last, and which are predicted; bool."""
    tokens, labels = (x[0] for x in quality.rows(task, 1, T, seed))
    known = labels != IGNORED
    assert torch.equal(tokens[1:][known[:-1]], labels[:-1][known[:-1]])  # labels are next tokens
    return torch.cat([tokens, labels[-1:].clamp(min=0)]), torch.nn.functional.pad(known, (1, 0))


def test_each_question_has_the_value_of_its_key():
    tokens, known = whole("recall")
    pairs = tokens[: 2 * (513 // APART)].view(-1, 2)
    values = dict(pairs.tolist())
    assert len(values) == 513 // APART
    asked = known.nonzero()[:, 0]
    assert len(asked) > 20
    assert (tokens[asked - 2] == QUESTION).all()
    assert [values[int(k)] for k in tokens[asked - 1]] == tokens[asked].tolist()
    assert (tokens[asked - 1] >= FIRST_KEY).all()


def test_a_copy_is_at_one_distance():
    tokens, known = whole("copy")
    (again,) = (tokens == AGAIN).nonzero()[:, 0].tolist()
    predicted = known.nonzero()[:, 0]
    assert predicted[0] == again + 2
    assert torch.equal(tokens[predicted], tokens[predicted - again - 1])
    assert len(predicted) > 100


def test_evaluations_have_sequences_of_their_own():
    for task in quality.TASKS:
        trained, again, held_out = (
            quality.rows(task, 2, 256, 5, evaluation)[0] for evaluation in (False, False, True)
        )
        assert torch.equal(trained, again)
        assert not torch.equal(trained, held_out)
        assert not torch.equal(trained, quality.rows(task, 2, 256, 6)[0])


def experiment(folder, *more):
    options = ["--device=cpu", "--tiny", "--short=128", "--short-rows=1", "--short-steps=2"]
    options += ["--length=256", "--turn=1", "--targets=0.3,1", "--evaluated=1", "--max-v=32"]
    assert quality.main([f"--folder={folder}", *options, *more]) == 0
    return json.loads((folder / "quality.json").read_text())


def test_a_run_that_stops_goes_on(tmp_path, capsys):
    through = experiment(tmp_path / "a", "--long-steps=2")["runs"]
    experiment(tmp_path / "b", "--long-steps=1")
    stopped = experiment(tmp_path / "b", "--long-steps=2", "--minutes=0")["runs"]
    assert [len(stopped[name]["losses"]) for name in stopped] == [2, 1, 1, 1]
    resumed = experiment(tmp_path / "b", "--long-steps=2")["runs"]
    assert set(through) == {"short", "exact", "recall 0.3", "recall 1.0"}
    for name, found in through.items():
        assert len(found["losses"]) == len(resumed[name]["losses"]) == 2
        assert found["losses"][0] == resumed[name]["losses"][0]
        steps = [x["step"] for x in found["evaluations"]]
        assert steps == ([1, 2] if name == "short" else [0, 1, 2])
        assert steps == [x["step"] for x in resumed[name]["evaluations"]]
    assert "recall in the last block" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="other settings"):
        experiment(tmp_path / "b", "--seed=1")
    exact, low, full = (through[n]["evaluations"] for n in ("exact", "recall 0.3", "recall 1.0"))
    assert low[-1]["density"] < full[-1]["density"] <= 1
    assert low[-1]["held_out"] < full[-1]["held_out"] <= 1 + 1e-6
    for own, of_exact in zip(full, exact, strict=True):  # nearly every pair is in the mask
        assert own["own"]["copy"]["loss"] == pytest.approx(of_exact["own"]["copy"]["loss"], abs=0.1)


def test_a_model_under_every_diagonal_is_the_exact_model():

    torch.manual_seed(0)
    model = Model(Sizes(quality.VOCABULARY, width=32, layers=2, heads=2, kv_heads=1, head_dim=16))
    for layer in model.layers:  # they begin as 0
        torch.nn.init.normal_(layer.out.weight, std=0.1)
    tokens, labels = quality.rows("copy", 2, 256, 0)
    seen = []
    wide = Attention(VerticalSlash(window=4, max_v=4), lambda *x: seen.append(x[0]))
    with torch.no_grad():
        _, want, right = model(tokens, labels, Attention())
        _, got, found = model(tokens, labels, wide)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(right, found)
    assert seen == [0, 1]
