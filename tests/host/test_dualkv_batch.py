"""What a packed batch gives back: log-probabilities, padded tensors; and plans of micro-batches."""

import copy
import pickle
import random
import time
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qla_kernels import Unsupported, pack_prefix_tree, pack_shared_prompts, plan_microbatches
from qla_kernels.dualkv import Piece, logprobs
from qla_kernels.dualkv import batch as batch_module
from tests.compare import assert_close

VOCABULARY = 11
ROWS = 10  # of logits that some_batch needs


def some_batch(seed: int = 0, **others):
    """Prompts of 4, 1 and 3 tokens; responses that are empty, and a group without any."""
    draw = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(VOCABULARY, (n,), generator=draw)  # noqa: E731
    lengths = [(4, [3, 0, 1, 5]), (1, []), (3, [2, 2])]
    prompts = [ids(p) for p, _ in lengths]
    responses = [[ids(r) for r in rs] for _, rs in lengths]
    return pack_shared_prompts(prompts, responses, **others)


@pytest.fixture(params=[1, 40, 1 << 25], ids=["rows one by one", "rows three by three", "at once"])
def parts(request, monkeypatch):
    monkeypatch.setattr(logprobs, "ELEMENTS", request.param)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropies_and_gradients(temperature):
    """Of logits of every packed token, by torch; one row has the targets of several responses."""
    batch = some_batch()
    every = torch.randn(batch.num_tokens, VOCABULARY, dtype=torch.float64, requires_grad=True)
    rows = batch.src_rows[batch.src_inv]
    distribution = torch.distributions.Categorical(logits=every[rows] / temperature)
    want = distribution.log_prob(batch.targets), distribution.entropy()
    got = batch.gather_logprobs(every[batch.src_rows], temperature=temperature, entropy=True)
    weights = torch.randn(2, len(batch.targets), dtype=torch.float64)
    for name, a, b in zip(("logprobs", "entropies"), got, want, strict=True):
        assert_close(name, a.detach(), b.detach(), 1e-12)
    (got_grad,), (want_grad,) = (
        torch.autograd.grad((weights * torch.stack(x)).sum(), every) for x in (got, want)
    )
    assert_close("dlogits", got_grad, want_grad, 1e-12)
    alone = batch.gather_logprobs(every[batch.src_rows], temperature=temperature)
    assert torch.equal(alone, got[0])


@pytest.mark.usefixtures("parts")
def test_logprobs_of_low_precision_are_wide():
    """Logits in bf16: results in fp32, one rounding in the gradient, tokens ruled out by -inf."""
    batch = some_batch()
    logits = torch.randn(len(batch.src_rows), VOCABULARY + 1).bfloat16()
    logits[:, VOCABULARY] = -torch.inf
    logits.requires_grad_()
    got, entropy = batch.gather_logprobs(logits, entropy=True)
    exact = logits.detach().double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=exact[:, :VOCABULARY][batch.src_inv])
    want = distribution.log_prob(batch.targets)
    assert got.dtype == entropy.dtype == torch.float32
    assert_close("logprobs", got.detach(), want.detach(), 1e-6)
    assert_close("entropies", entropy.detach(), distribution.entropy().detach(), 1e-6)
    weight = torch.randn_like(got)
    (weight * got + entropy).sum().backward()
    (weight.double() * want + distribution.entropy()).sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    assert_close("dlogits", logits.grad, exact.grad, 2**-8)


def test_a_batch_without_targets():
    batch = pack_shared_prompts([[1, 2]], [[[]]])
    logits = torch.zeros(0, VOCABULARY, requires_grad=True)
    found = batch.gather_logprobs(logits)
    assert found.shape == (0,)
    found.sum().backward()
    assert batch.to_padded(found, width=3).shape == (1, 3)


def test_logits_of_other_rows_are_refused():
    batch = some_batch()
    with pytest.raises(
        ValueError, match=r"need \[\d+, vocabulary\], the rows src_rows; give the model"
    ):
        batch.gather_logprobs(torch.zeros(batch.num_tokens, VOCABULARY))


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan")])
def test_a_temperature_that_is_none(temperature):
    batch = some_batch()
    logits = torch.zeros(len(batch.src_rows), VOCABULARY)
    with pytest.raises(ValueError, match=f"temperature={temperature}; need a positive number"):
        batch.gather_logprobs(logits, temperature=temperature)


def test_a_temperature_that_is_learned():
    """It once got no gradient, and nobody said so."""
    batch = some_batch()
    logits = torch.zeros(len(batch.src_rows), VOCABULARY)
    learned = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="temperature is a tensor that requires a gradient"):
        batch.gather_logprobs(logits, temperature=learned)
    want = batch.gather_logprobs(logits, temperature=2.0)
    assert torch.equal(batch.gather_logprobs(logits, temperature=torch.tensor(2.0)), want)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"logits": [[1.0]]}, "logits is of type list; need a tensor"),
        (
            {"logits": torch.zeros(ROWS, VOCABULARY).long()},
            "logits is torch.int64; need a float",
        ),
        (
            {"logits": torch.zeros(ROWS, VOCABULARY, device="meta")},
            "logits is on meta; need cpu",
        ),
        ({"logits": torch.zeros(ROWS, 3)}, r"a target is \d+; need 0 to 2, the columns of logits"),
        ({"temperature": "1"}, "temperature is of type str; need a positive number"),
        ({"temperature": torch.ones(2)}, r"temperature is a tensor of shape \(2,\); need"),
    ],
)
def test_malformed_logits(change, text):
    batch = some_batch()
    call = {"logits": torch.zeros(ROWS, VOCABULARY), **change}
    with pytest.raises(ValueError, match=f"^SharedBatch.gather_logprobs: {text}"):
        batch.gather_logprobs(call.pop("logits"), **call)


def test_a_label_that_no_packer_has_read():
    """It once took the logit of another token. Those on a GPU are read under QLA_CHECK=1 alone."""
    batch = some_batch()
    batch.targets[3] = -100
    with pytest.raises(ValueError, match="a target is -100; need 0 to 10, the columns of"):
        batch.gather_logprobs(torch.zeros(ROWS, VOCABULARY))


def test_second_derivatives_are_refused():
    """They were 0, in silence, where the gradient that came in was a constant."""
    logits = torch.randn(ROWS, VOCABULARY, dtype=torch.float64, requires_grad=True)
    found = some_batch().gather_logprobs(logits)
    (first,) = torch.autograd.grad(found.sum(), logits, create_graph=True)
    with pytest.raises(Unsupported, match=r"gather_logprobs: a derivative of its grad"):
        first.square().sum().backward()


def test_forward_mode_is_refused():
    logits = torch.randn(ROWS, VOCABULARY, dtype=torch.float64)
    with pytest.raises(Unsupported, match=r"gather_logprobs: an input has a forward-"):
        torch.func.jvp(some_batch().gather_logprobs, (logits,), (logits,))


def test_a_batch_says_what_it_is():
    here = some_batch(pad_to=32)
    text = "SharedBatch(6 sequences of 2 groups in 32 tokens on {}, 1.09 times fewer)"
    assert repr(here) == text.format("cpu")
    assert repr(here.to("meta")) == text.format("meta")
    assert repr(here.layout) == "SharedLayout(32 tokens in 9 nodes on cpu)"


def test_to_padded_is_from_padded_backwards():
    batch = some_batch()
    grid = torch.randn(6, 7, 2, requires_grad=True)
    flat = batch.from_padded(grid)
    padded = batch.to_padded(flat, width=7, fill=-1.0)
    lengths = [3, 0, 1, 5, 2, 2]
    inside = torch.arange(7) < torch.tensor(lengths)[:, None]
    assert torch.equal(padded[inside], grid[inside])
    assert (padded[~inside] == -1).all()
    assert torch.equal(batch.from_padded(padded), flat)
    assert batch.to_padded(flat).shape == (6, 5, 2)
    padded.sum().backward()
    assert torch.equal(grid.grad[..., 0] == 1, inside)


def test_padded_tensors_that_do_not_fit():
    batch = some_batch()
    L = len(batch.targets)
    with pytest.raises(ValueError, match="width=4; need at least 5, for the longest"):
        batch.to_padded(torch.zeros(L), width=4)
    with pytest.raises(ValueError, match=f"need {L} rows, one for each target"):
        batch.to_padded(torch.zeros(12))
    with pytest.raises(ValueError, match=r"shape \(6, 1\); need \(6, at least 5\)"):
        batch.from_padded(torch.zeros(6, 1))
    with pytest.raises(ValueError, match=r"shape \(5,\); need \(21,\) and further dimensions"):
        batch.pack(torch.zeros(5))


def test_a_batch_moves_whole():
    here = some_batch(pad_to=32)
    there = here.to("meta")
    for field in fields(here):
        if isinstance(getattr(here, field.name), torch.Tensor):
            assert getattr(there, field.name).is_meta, field.name
    assert there.layout.tout.is_meta
    assert there.layout.nodes.device.type == "cpu"  # the host's
    assert (there.num_tokens, there.num_sequences) == (32, 6)


def test_prompts_and_responses_are_packed_unread():
    """Lengths alone decide; tokens may lie where nobody can look at them."""
    want = some_batch(pad_to=32)
    prompts = [torch.empty(n, dtype=torch.long, device="meta") for n in (4, 1, 3)]
    lengths = ((3, 0, 1, 5), (), (2, 2))
    responses = [[prompts[0].new_empty(r) for r in rs] for rs in lengths]
    got = pack_shared_prompts(prompts, responses, pad_to=32)
    for field in fields(want):
        if isinstance(x := getattr(want, field.name), torch.Tensor):
            assert getattr(got, field.name).is_meta, field.name
            assert getattr(got, field.name).shape == x.shape, field.name
    assert got.layout.tout.is_meta
    assert torch.equal(got.layout.nodes, want.layout.nodes)


def test_nothing_is_read_back_once_it_is_built():
    """On meta tensors, whose contents cannot be read."""
    batch = some_batch().to("meta")
    logits = torch.zeros(len(batch.src_rows), VOCABULARY, device="meta", requires_grad=True)
    logprobs_, entropies = batch.gather_logprobs(logits, entropy=True)
    advantages = batch.from_padded(torch.zeros(6, 5, device="meta"))
    batch.to_padded(advantages * logprobs_ + entropies).sum().backward()
    assert logits.grad.shape == logits.shape
    assert batch.pack(torch.zeros(21, device="meta")).shape == (21,)
    assert (batch.rho, batch.pair_ratio) == (some_batch().rho, some_batch().pair_ratio)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_batch_goes_to_other_processes_without_its_tables(copied):
    batch = some_batch()
    batch.prepare(4, 2)
    other = copied(batch)
    assert not other.layout.prepared
    assert torch.equal(other.layout.tout, batch.layout.tout)
    assert torch.equal(other.layout.nodes, batch.layout.nodes)
    assert torch.equal(other.targets, batch.targets)


# Micro-batches.

group = st.tuples(st.integers(1, 20), st.lists(st.integers(0, 12), max_size=8))


@settings(max_examples=150, deadline=None)
@given(groups=st.lists(group, max_size=12), slack=st.integers(0, 40), ranks=st.integers(1, 4))
def test_plan_loses_nothing_and_exceeds_nothing(groups, slack, ranks):
    limit = slack + max((p + max(rs, default=0) for p, rs in groups), default=1)
    plan = plan_microbatches(groups, limit, ranks=ranks)
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    pieces = [piece for batches in plan for batch in batches for piece in batch]
    found = sorted((g, i) for g, responses in pieces for i in responses)
    assert found == [(g, i) for g, (_, rs) in enumerate(groups) for i in range(len(rs))]
    assert {g for g, _ in pieces} == {*range(len(groups))}
    for batches in plan:
        for batch in batches:
            assert sum(groups[g][0] + sum(groups[g][1][i] for i in rs) for g, rs in batch) <= limit
    for g, (prompt, responses) in enumerate(groups):
        if prompt + sum(responses) <= limit:
            assert [piece.group for piece in pieces].count(g) == 1


def test_a_prompt_is_charged_once():
    """Two groups of 10 + 4 * 5 fill 60 tokens; charged by sequence they would be 120."""
    assert plan_microbatches([(10, [5] * 4)] * 2, 60) == [
        [[Piece(0, (0, 1, 2, 3)), Piece(1, (0, 1, 2, 3))]]
    ]


def test_a_group_is_cut_only_if_it_has_to_be():
    plan = plan_microbatches([(10, [5, 9, 1, 5]), (3, [2])], 20)
    assert sorted(piece for batches in plan for batch in batches for piece in batch) == [
        (0, (0, 3)), (0, (1, 2)), (1, (0,)),
    ]  # fmt: skip


def test_ranks_get_as_many_micro_batches_and_about_as_much_work():
    groups = [(100, [50] * n) for n in range(1, 17)]
    plan = plan_microbatches(groups, 1000, ranks=4, token_cost=0.0)

    def pairs(batches):
        return sum(
            100 * 101 // 2 + len(rs) * (100 * 50 + 50 * 51 // 2) for b in batches for _, rs in b
        )

    work = [pairs(batches) for batches in plan]
    assert max(work) < 1.25 * min(work)
    for batches in plan:
        assert [pairs([b]) for b in batches] == sorted((pairs([b]) for b in batches), reverse=True)


def test_too_few_groups_leave_empty_micro_batches_rather_than_cut_one():
    plan = plan_microbatches([(10, [5, 5]), (4, [4])], 100, ranks=3)
    assert sorted(len(batch) for batches in plan for batch in batches) == [0, 1, 1]
    assert plan_microbatches([], 10, ranks=2) == [[], []]


def test_what_cannot_fit_is_refused():
    text = "group 1 has a prompt of 10 and a response of 5 tokens; need no more than max_tokens=14"
    with pytest.raises(ValueError, match=text):
        plan_microbatches([(3, [1]), (10, [5, 1])], 14)
    with pytest.raises(ValueError, match="a prompt of 15 and a response of 0 tokens"):
        plan_microbatches([(15, [])], 14)
    with pytest.raises(ValueError, match="ranks=0; need at least 1"):
        plan_microbatches([], 14, ranks=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_tokens": float("nan")}, "max_tokens=nan; need 0 or more"),
        ({"max_tokens": "8"}, "max_tokens is '8' of type str; need a number"),
        ({"max_tokens": -1}, "max_tokens=-1; need 0 or more; pass the number of tokens that"),
        ({"ranks": 1.5}, "ranks is 1.5 of type float; need an integer"),
        ({"ranks": 10**7}, "ranks=10000000; need at least 1 and at most 131072; pass the number"),
        ({"token_cost": float("nan")}, "token_cost=nan; need 0 or more, and finite"),
        ({"groups": [(3, [1]), (3, [-1])]}, r"group 1 has lengths 3 and \[-1\]; need whole numb"),
        ({"groups": [(3.5, [1])]}, r"group 0 has lengths 3.5 and \[1\]; need whole numbers of"),
    ],
)
def test_malformed_plans(change, text):
    with pytest.raises(ValueError, match=f"^plan_microbatches: {text}"):
        plan_microbatches(**{"groups": [(3, [1])], "max_tokens": 14, **change})


def test_a_plan_of_many_groups_is_quick():
    """It took 9 s: each group looked at each micro-batch, and each micro-batch at each rank."""
    draw = random.Random(0)
    groups = [(draw.randint(1, 2000), [draw.randint(1, 2000)] * 4) for _ in range(20_000)]
    started = time.process_time()
    plan = plan_microbatches(groups, 20_000, ranks=4096)
    assert time.process_time() - started < 5
    assert sum(len(batch) for batches in plan for batch in batches) == len(groups)
    assert sum(map(len, plan_microbatches([(10, [5])], 20, ranks=1 << 17))) == 1 << 17


def test_a_call_without_targets_is_noticed_once(caplog):
    """Prompts without responses give no logits and no log-probabilities; nothing said so."""
    batch_module._warn_of_no_targets.cache_clear()
    some_batch().model_inputs()
    pack_shared_prompts([], [], pad_to=8).model_inputs()  # of a rank without work
    assert not caplog.messages
    prompts = [torch.arange(1, 20), torch.arange(30, 57)]
    for _ in range(2):
        assert not len(pack_shared_prompts(prompts, [[], []]).model_inputs()["logits_to_keep"])
    (said,) = caplog.messages
    assert said.startswith("SharedBatch.model_inputs: a batch without targets; need one, or the m")
    assert "use pack_prefix_tree(prompts)" in said
    assert len(pack_prefix_tree(prompts).model_inputs()["logits_to_keep"]) == 44


def test_all_keywords_of_a_call():
    """Positions of several axes keep them."""
    prompt, answers = torch.arange(1, 4), [torch.arange(4, 6), torch.arange(6, 7)]
    batch = pack_shared_prompts([prompt], [answers])
    call = batch.model_inputs()
    assert list(call) == [
        "input_ids", "position_ids", "use_cache", "shared_prefix", "logits_to_keep",
    ]  # fmt: skip
    assert call["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert call["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3]]
    assert call["shared_prefix"] is batch.layout
    assert call["use_cache"] is False
    assert call["logits_to_keep"] is batch.src_rows
    several = replace(batch, position_ids=batch.position_ids.expand(3, -1)).model_inputs()
    assert several["position_ids"].shape == (3, 1, 6)
