"""The GRPO example: a trainer of an installed TRL, with our class and without."""

import logging

import pytest

from examples import grpo_trl

pytest.importorskip("trl")

pytestmark = pytest.mark.libraries


def steps(folder, capsys, *options):
    """The numbers of each step's line."""
    assert grpo_trl.main(["--tiny", "--steps", "3", "--output", str(folder), *options]) == 0
    lines = [x.split() for x in capsys.readouterr().out.splitlines() if x.startswith("step ")]
    return [[float(x) for x in line[3::2]] for line in lines]


def ours(caplog):
    return [x.getMessage() for x in caplog.records if x.name == "qla_kernels"]


@pytest.mark.parametrize("options", [[], ["--accumulate", "2"], ["--hybrid"]], ids=str)
def test_steps_are_those_of_plain_trl(options, tmp_path, capsys, caplog):
    want = steps(tmp_path, capsys, *options, "--plain")
    assert not ours(caplog)
    with caplog.at_level(logging.WARNING, "qla_kernels"):
        got = steps(tmp_path, capsys, *options)
    (said,) = ours(caplog)  # nothing about parts of groups
    assert float(said.split()[-3]) > 2.5  # times fewer tokens
    assert len(got) == len(want) == 3
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
        assert a[1] > 0  # the gradient


def test_no_prompts_says_what_to_pass(capsys):
    with pytest.raises(SystemExit):
        grpo_trl.main([])
    assert "need --prompts FILE or --tiny" in capsys.readouterr().err
