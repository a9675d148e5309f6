"""docs/gdn.md: its code runs, says what it should, and its numbers are counted."""

import inspect
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import qla_kernels
from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import segments_of
from tests.compare import assert_close, relative_l2
from tests.gdn_calls import call, leaves
from tests.limits import HANG
from tests.ranks import ENVIRONMENT
from tests.readme import names_in, snippets

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "gdn.md").read_text()


@pytest.fixture(scope="module")
def code() -> dict[str, Any]:
    return names_in("docs/gdn.md")


def test_every_input_has_a_gradient(code):
    assert all(code[n].grad.any() for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias"))


def test_decoding_goes_on_where_a_prompt_ended(code):
    given = [code[n].detach().double() for n in ("q", "k", "v", "decays", "betas")]
    for n, (begin, end) in enumerate(((0, 150), (150, 200))):
        tokens = [*range(begin, end), *[end - 1] * 3]  # the last one three times more
        o, (state,) = chunk_gated_delta_rule(
            *(x[:, tokens] for x in given), output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert_close("o", code["o_t"][:, n], o[:, -1], 1e-5)  # fp32
        assert_close("state", code["ht"][n], state, 1e-5)


def test_a_rank_s_part_of_one_rank_is_all(code):
    x = call([30, 40])
    del x["initial_state"]
    want, _ = chunk_gated_delta_rule(**x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert torch.equal(code["on_this_rank"](**x, rank=0, world=1), want)
        in_two = code["on_this_rank"](**x, rank=0, world=1, layout="zigzag")
        assert relative_l2(in_two, want) < 1e-12
    finally:
        dist.destroy_process_group()


def test_a_layer_of_one_s_own_over_ranks(tmp_path):
    """The program, started as the page says: its losses do not depend on the number of ranks."""
    (program,) = [block for block in snippets("docs/gdn.md") if "init_process_group" in block]
    (tmp_path / "train.py").write_text(program)
    losses = {}
    for world in (1, 2, 4):
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        ran = subprocess.run(
            [*torchrun, "--nproc-per-node", str(world), tmp_path / "train.py"],
            cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, timeout=HANG,
            capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-3000:]
        losses[world] = [float(x) for x in re.findall(r"^loss (.*)$", ran.stdout, re.M)]
    assert len(losses[1]) == 5
    assert losses[1] == sorted(losses[1], reverse=True)
    for world in (2, 4):  # a wrong convolution, or its lost gradient, changes them by 5e-5 and more
        assert losses[world] == pytest.approx(losses[1], rel=5e-6)


def test_the_table_of_cuts_is_the_plan_s(code):
    assert f"print(cuts)  # {code['cuts']}\n" in TEXT
    assert f"print(cuts.cut, cuts.segments)  # True {code['cuts'].segments}\n" in TEXT
    assert code["wide"].segments == (5,)
    assert not code["backward"].cut
    row = r"^\| (\d+)/(\d+), (\d+)/(\d+) \| (\d+)x(\d+) \| (.*) \| (.*) \|$"
    rows = re.findall(row, TEXT, re.M)
    assert len(rows) == 12
    for *numbers, forward, backward in rows:
        H, HV, K, V, T, N = map(int, numbers)
        for said, direction in ((forward, "fwd"), (backward, "bwd")):
            cuts = segments_of([T] * N, (H, HV), K, V, direction=direction, sm_count=132)
            want = f"cut, {cuts.segments[0]}" if cuts.cut else "whole"
            assert (said, len({*cuts.segments})) == (want, 1), numbers


@pytest.mark.parametrize("normalised", [False, True])
def test_what_is_kept_for_the_backward_is_as_it_says(normalised):
    H, HV, K, T = 16, 32, 128, 64
    x = call(
        batch=1, tokens=T, heads=(H, HV), sizes=(K, K), dtype=torch.bfloat16, gates=torch.float32
    )
    x = leaves(x)
    given = {t.untyped_storage().data_ptr() for t in x.values()}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if (start := t.untyped_storage().data_ptr()) not in given:
            kept[start] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        o, _ = chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=normalised)
    assert o.requires_grad
    norms = 4 * H * K if normalised else 0
    assert sum(kept.values()) / T == 132 * HV + norms
    assert "132 HV a token" in TEXT
    assert "4 H K a token" in TEXT
    assert f"{132 * HV / 1e3:.1f} KB and {4 * H * K / 1e3:.1f} KB a token" in TEXT


def test_serving_is_prefill_and_decoding():
    """The last block of docs/integrations.md: two prompts, and then a token of each, in a pool."""
    (code,) = [block for block in snippets("docs/integrations.md") if "slots" in block]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/integrations.md", "exec"), names)
    prompts, pool = names["prompts"].tolist(), names["pool"]
    of_o, of_states = (2**-9, 1e-6) if pool.is_cpu else (1e-2, 1e-2)  # o is rounded once, to bf16
    for n, (slot, bounds) in enumerate(zip(names["slots"], pairwise(prompts), strict=True)):
        whole = (
            torch.cat([x[:, slice(*bounds)], y[:, n : n + 1]], 1)
            for x, y in zip(names["given"], names["step"], strict=True)
        )
        o, (state,) = chunk_gated_delta_rule(*(x.double() for x in whole), output_final_state=True)
        assert_close("o", names["o"][:, slice(*bounds)].double(), o[:, :-1], of_o)
        assert_close("o", names["o_t"][:, n].double(), o[:, -1], of_o)
        assert_close("state", pool[slot].mT.double(), state, of_states)
    assert not pool[[0, 1, 3, 4, 6, 7]].any()


def test_the_table_of_defaults_of_pools_is_that_of_the_functions():
    rows = re.findall(r"^\| (`\w+`.*?) \| (True|False).*? \| (True|False) \|", TEXT, re.M)
    said = {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert len(said) == 5
    for name, defaults in said.items():
        own = inspect.signature(getattr(qla_kernels, name)).parameters
        found = (own[x].default for x in ("state_v_first", "use_qk_l2norm_in_kernel"))
        assert tuple(map(str, found)) == defaults, name


def test_one_pool_gives_what_one_call_gives(code):
    """In fp32; the page's own comparison is coarser."""
    assert_close("o", code["o_parts"], code["o_whole"], 1e-5)
    assert_close("state", code["states"][1], code["end"][0], 1e-5)
    assert not code["states"][[0, 2, 3, 5, 6, 8]].any()


@pytest.mark.parametrize(
    ("changed", "first"), [("g", "g_cum"), ("k", "A"), ("v", "o"), ("h0", "o"), ("do", "dq")]
)
def test_the_first_wrong_result_is_that_of_the_wrong_kernel(changed, first):
    """docs/architecture.md, (d): results are in an order in which each depends on those before."""
    results = names_in("docs/architecture.md")["results"]
    x = call(batch=1, tokens=70)
    h0 = x["initial_state"]
    given = {name: x[name] for name in ("q", "k", "v", "g", "beta")} | {"do": x["v"], "h0": h0}
    want = results(**given)
    got = results(**given | {changed: given[changed] / 2})
    assert next(name for name in want if not torch.equal(want[name], got[name])) == first


def test_every_file_it_names_exists():
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / name).exists(), name
