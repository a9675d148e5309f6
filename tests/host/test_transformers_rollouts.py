"""Rollouts of an installed transformers through GdnPool, on the CPU: equal up to rounding.

That they have the bits of the training forward is a test of a GPU: tests/device.
"""

import copy
import gc
import pickle
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qla_kernels import SharedBatch, Unsupported
from qla_kernels.gdn import keywords
from qla_kernels.integrations import rollouts
from qla_kernels.integrations import transformers as integration
from tests.compare import relative_l2
from tests.tiny_hybrids import KINDS, VOCABULARY, gradients, hybrid, packed

pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")

pytestmark = pytest.mark.libraries
HOLDS_POOLS = hasattr(getattr(cache_utils, "Cache", None), "activate_past_recording")
cached = pytest.mark.skipif(not HOLDS_POOLS, reason="its caches hold no pools: refused")
NEW = 15  # past the first chunk
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "output_logits": True}
GREEDY |= {"return_dict_in_generate": True}


@pytest.fixture(params=["Qwen3Next", "Qwen3.5"])
def model(request):
    made = hybrid(request.param)
    yield made.eval()
    integration.restore(made)


def prompts(rows: int = 2, tokens: int = 60) -> Tensor:
    torch.manual_seed(7)
    return torch.randint(1, VOCABULARY, (rows, tokens))


def logits(model: nn.Module, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False, **more).logits


def in_pieces(model: nn.Module, ids: Tensor, pieces: list[int]) -> tuple[Tensor, Any]:
    """Logits of calls that continue one cache, and the cache."""
    found, cache = [], None
    for piece in ids.split(pieces, 1):
        with torch.no_grad():
            out = model(piece, past_key_values=cache, use_cache=True)
        found.append(out.logits)
        cache = out.past_key_values
    return torch.cat(found, 1), cache


def pools(cache: Any) -> list[rollouts.CachedRows]:
    return [getattr(x, rollouts.POOL) for x in cache.layers if hasattr(x, rollouts.POOL)]


def close(got: Tensor, want: Tensor) -> bool:
    return relative_l2(got, want) < 1e-4  # fp32 through four layers


@cached
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_rollouts_have_the_same_tokens(kind):
    model, ids = hybrid(kind).eval(), prompts()
    if hasattr(sys.modules[type(model).__module__], "OlmoHybridDynamicCache"):
        pytest.skip("generate of this release fails for OLMo hybrid")
    want = model.generate(ids, **GREEDY)
    assert integration.swap(model, batch_invariant=True) == 3
    try:
        got = model.generate(ids, **GREEDY)
        assert len(pools(got.past_key_values)) == 3
        assert torch.equal(got.sequences, want.sequences)
        rolled = torch.stack(got.logits, 1).log_softmax(-1)
        trained = logits(model, got.sequences)[:, 59:-1].log_softmax(-1)
        assert close(rolled, trained)
    finally:
        integration.restore(model)


@cached
def test_sequences_of_a_padded_batch_are_as_if_alone(model, monkeypatch):
    """In prefill, decoding and training, with the tokens of the rule in their places of a chunk."""
    starts, seen = [9, 0, 40], []
    ids = prompts(3)
    mask = (torch.arange(60) >= torch.tensor(starts)[:, None]).long()
    want = model.generate(ids, attention_mask=mask, **GREEDY)
    integration.swap(model, batch_invariant=True)
    prefill = rollouts.GdnPool.prefill

    def listening(pool: Any, *args: Any, **options: Any) -> Tensor:
        seen.append(pool)
        return prefill(pool, *args, **options)

    monkeypatch.setattr(rollouts.GdnPool, "prefill", listening)
    got = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(got.sequences, want.sequences)
    assert seen[0].lengths.tolist() == [60 - n + NEW - 1 for n in starts]
    rolled = torch.stack(got.logits, 1)
    whole = torch.cat([mask, torch.ones(3, NEW, dtype=torch.long)], 1)
    together = logits(model, got.sequences, attention_mask=whole)
    for n, start in enumerate(starts):
        alone = logits(model, got.sequences[n : n + 1, start:])[0]
        assert close(rolled[n], alone[59 - start : -1])
        assert close(together[n, start:], alone)


MASKS = {
    "left": [0, 0, 1, 1, 1, 1], "right": [1, 1, 1, 1, 0, 0], "a hole": [1, 1, 0, 0, 1, 1],
    "all three": [0, 1, 0, 1, 1, 0], "nothing": [0] * 6,
}  # fmt: skip


def test_padding_and_holes_are_as_without_the_option(model):
    """Masked tokens between others take part, as transformers' layers have it."""
    ids = prompts(len(MASKS), 6 * 12)
    mask = torch.tensor([*MASKS.values()]).repeat_interleave(12, 1)
    want = logits(model, ids, attention_mask=mask)[mask == 1]
    integration.swap(model, batch_invariant=True)
    assert close(logits(model, ids, attention_mask=mask)[mask == 1], want)


@cached
def test_greedy_rollouts_of_a_prompt_with_a_hole(model):
    ids, mask = prompts(3), torch.ones(3, 60, dtype=torch.long)
    mask[0, :9], mask[1, 20:33] = 0, 0
    want = model.generate(ids, attention_mask=mask, **GREEDY)
    integration.swap(model, batch_invariant=True)
    got = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(got.sequences, want.sequences)
    assert close(torch.stack(got.logits), torch.stack(want.logits))


@cached
@pytest.mark.parametrize("pieces", [[1, 89], [64, 26], [30, 5, 1, 1, 50, 3]], ids=str)
def test_a_prompt_in_several_calls(model, pieces):
    ids = prompts(tokens=90)
    integration.swap(model, batch_invariant=True)
    got, cache = in_pieces(model, ids, pieces)
    assert close(got, logits(model, ids))
    assert all(rows.pool.lengths.tolist() == [90, 90] for rows in pools(cache))


BEAMS = {"num_beams": 3, "do_sample": False, "num_return_sequences": 3}
SAMPLES = {"do_sample": True, "num_return_sequences": 3}
PIECES = {"do_sample": False, "prefill_chunk_size": 25}
STATIC = {"do_sample": False, "cache_implementation": "static"}


@cached
@pytest.mark.parametrize("how", [BEAMS, SAMPLES, PIECES, STATIC], ids=str)
def test_ways_to_generate(model, how):
    def drawn() -> Tensor:
        torch.manual_seed(5)
        return model.generate(prompts(), max_new_tokens=12, **how)

    want = drawn()
    integration.swap(model, batch_invariant=True)
    assert torch.equal(drawn(), want)


@cached
def test_selected_rows_go_on_with_their_pools(model):
    """Twice in a row, as a state whose rows were numbered anew would show."""
    integration.swap(model, batch_invariant=True)
    ids = prompts(3, 80)
    _, cache = in_pieces(model, ids[:, :70], [70])
    for at, order in ((70, [2, 0, 0]), (71, [1, 1, 2])):
        order = torch.tensor(order)
        ids = ids[order]
        cache.reorder_cache(order)
        with torch.no_grad():
            got = model(ids[:, at : at + 1], past_key_values=cache).logits
        assert close(got[:, 0], logits(model, ids[:, : at + 1])[:, -1])


@cached
def test_two_caches_and_a_copy(model):
    integration.swap(model, batch_invariant=True)
    ids, others = prompts(2, 71), prompts(4, 71)[2:]
    _, one = in_pieces(model, ids[:, :70], [70])
    _, two = in_pieces(model, others[:, :70], [70])
    three = copy.deepcopy(one)
    for cache, x in ((one, ids), (two, others), (three, ids)):
        with torch.no_grad():
            got = model(x[:, 70:], past_key_values=cache).logits
        assert close(got[:, 0], logits(model, x)[:, -1])
        assert all(rows.pool.lengths.tolist() == [71, 71] for rows in pools(cache))


@cached
def test_a_cache_that_is_reset_begins_anew(model):
    cache = cache_utils.StaticCache(config=model.config, max_cache_len=90)
    with torch.no_grad():
        model(prompts(2, 70), past_key_values=cache)  # holds a state of transformers' own
        integration.swap(model, batch_invariant=True)
        for _ in range(2):
            cache.reset()
            model(prompts(2, 70), past_key_values=cache)
        cache.reset()
        got = model(prompts(2, 90), past_key_values=cache).logits
    assert close(got, logits(model, prompts(2, 90)))
    cache.reset()
    model(prompts(2, 70), past_key_values=cache)
    assert not pools(cache), "a call with gradients has none"
    with torch.no_grad(), pytest.raises(Unsupported, match="a cache without a pool"):
        model(prompts()[:, :1], past_key_values=cache)


@cached
def test_compiled_calls():
    """Training is one graph; a call with a cache leaves the graph for its pools."""
    kinds = ["linear_attention", "full_attention"]
    model = hybrid("Qwen3.5", num_hidden_layers=2, layer_types=kinds)
    integration.swap(model, batch_invariant=True)
    ids = prompts(2, 62)
    want = logits(model, ids)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert close(logits(whole, ids), want)
    step = torch.compile(model, backend="eager")
    _, cache = in_pieces(model, ids[:, :60], [60])
    with torch.no_grad():
        parts = [step(ids[:, t : t + 1], past_key_values=cache).logits for t in (60, 61)]
        assert close(torch.cat(parts, 1), want[:, 60:])
        torch._dynamo.reset()  # or the code with breaks, compiled above, may be found and run
        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            whole(ids[:, :1], past_key_values=cache)
    integration.restore(model)


@cached
def test_a_cache_that_dies_frees_its_pools(model):
    integration.swap(model, batch_invariant=True)
    _, cache = in_pieces(model, prompts(), [59, 1])
    left = [weakref.ref(rows.pool) for rows in pools(cache)]
    assert len(left) == 3
    del cache
    gc.collect()
    assert not any(pool() for pool in left)


@pytest.mark.parametrize("recomputed", [False, True])
def test_training_steps_agree_with_and_without_a_cache(model, recomputed):
    ids = prompts(2, 70)
    if recomputed:
        how = {"use_reentrant": False}
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    want = gradients(model, model(ids, use_cache=False).logits.square().mean())
    integration.swap(model, batch_invariant=True)
    for use_cache in (False, True):
        got = gradients(model, model(ids, use_cache=use_cache).logits.square().mean())
        for name, x in want.items():
            assert (got[name] - x).abs().max() <= 1e-3 * x.abs().max().clamp(min=1e-5), name


def test_what_trains_is_batch_invariant(model, monkeypatch):
    asked = []

    def listening(*args: Any, **options: Any) -> Any:
        asked.append(options["batch_invariant"])
        return integration.chunk_gated_delta_rule(*args, **options)

    monkeypatch.setattr(rollouts, "chunk_gated_delta_rule", listening)
    integration.swap(model, batch_invariant=True)
    logits(model, prompts())
    assert asked == [True] * 3


@cached
def test_calls_that_cannot_have_the_bits_are_refused(model):
    integration.swap(model, batch_invariant=True)
    ids = prompts()
    token = ids[:, :1]
    _, cache = in_pieces(model, ids, [60])
    with pytest.raises(Unsupported, match=r"gradients of a call that continues a cache; need none"):
        model(token, past_key_values=cache)
    trained = model(ids, use_cache=True).past_key_values
    with torch.no_grad():
        with pytest.raises(Unsupported, match="a cache without a pool; need one that began so"):
            model(token, past_key_values=trained)
        bounds = torch.tensor([0, 20, 60], dtype=torch.int32)
        with pytest.raises(Unsupported, match="cu_seq_lens_q beside a cache; need no cache"):
            model(ids[:1], use_cache=True, cu_seq_lens_q=bounds)
        cache.activate_past_recording()
        with pytest.raises(Unsupported, match="a cache that records the past; need one that is no"):
            model(token, past_key_values=cache)
        layer = next(x for x in model.modules() if integration.CALL in x.__dict__)
        hidden = torch.randn(2, 5, 32)
        with pytest.raises(Unsupported, match="a state without a cache; need transformers' own"):
            layer(hidden, trained)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'hidden"):
            layer(cache_params=cache)
    assert layer.__dict__[integration.CALL].cache is None, "an error leaves no cache behind"


@cached
def test_a_cache_is_not_continued_without_the_option(model):
    integration.swap(model, batch_invariant=True)
    for rows in (1, 2, 8):  # 8 is K and V
        _, cache = in_pieces(model, prompts(rows), [60])
        for change in (integration.restore, lambda m: integration.swap(m, batch_invariant=False)):
            change(model)
            for piece in (1, 3):
                with torch.no_grad(), pytest.raises((RuntimeError, ValueError)):
                    model(prompts(rows)[:, :piece], past_key_values=copy.deepcopy(cache))
            integration.swap(model, batch_invariant=True)


def test_a_cache_of_a_call_with_gradients_is_not_continued_without_the_option(model):
    """By one row: what transformers keeps must not become a state by broadcasting."""
    integration.swap(model, batch_invariant=True)
    cache = model(prompts(1), use_cache=True).past_key_values
    integration.restore(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        model(prompts(1)[:, :1], past_key_values=cache, cache_position=torch.tensor([60]))


@cached
def test_a_cache_that_began_without_the_option_is_refused(model):
    integration.swap(model)
    _, cache = in_pieces(model, prompts(), [60])
    integration.swap(model, batch_invariant=True)
    with torch.no_grad(), pytest.raises(Unsupported, match="a cache without a pool"):
        model(prompts()[:, :1], past_key_values=cache)


def test_caches_of_an_older_transformers_are_refused(model, monkeypatch):
    integration.swap(model, batch_invariant=True)
    if HOLDS_POOLS:
        monkeypatch.setattr(rollouts.LayerCall, "_part", lambda _: None)  # as in 4.57
    with torch.no_grad(), pytest.raises(Unsupported, match=r"transformers 5\.14 or later"):
        model(prompts(), use_cache=True)
    logits(model, prompts())


def test_packed_calls_of_shared_prompts_are_refused(model):
    integration.swap(model, batch_invariant=True)
    batch: SharedBatch = packed([prompts()[0], prompts()[1]])
    with torch.no_grad(), pytest.raises(Unsupported, match="shared_prefix; need whole sequences"):
        model(batch.input_ids[None], use_cache=False, shared_prefix=batch.layout)


def calls(model: nn.Module) -> list[Any]:
    return [x.__dict__[integration.CALL] for x in model.modules() if integration.CALL in x.__dict__]


def test_the_option_is_changed_and_kept_by_further_swaps(model, monkeypatch):
    integration.swap(model)
    assert calls(model) == [None] * 3
    for asked, has in ((True, True), (None, True), (False, False), (None, False), (True, True)):
        assert integration.swap(model, batch_invariant=asked) == 3
        assert [x is not None for x in calls(model)] == [has] * 3
        logits(model, prompts())
    integration.restore(model)
    assert not calls(model)
    for layer in model.modules():
        assert not layer._forward_pre_hooks
        assert not layer._forward_hooks
    monkeypatch.setattr(keywords, "INVARIANT_BY_DEFAULT", True)
    integration.swap(model, batch_invariant=False)
    integration.swap(model)
    assert calls(model) == [None] * 3
    integration.restore(model)
    integration.swap(model)
    assert all(calls(model))


@cached
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_model_has_calls_of_its_own(model, way):
    integration.swap(model, batch_invariant=True)
    other = way(model)
    assert not {id(x) for x in calls(model)} & {id(x) for x in calls(other)}
    if hasattr(next(other.modules()), integration.BESIDE):  # functions of the layer, not its module
        integration.restore(model)
    got, cache = in_pieces(other, prompts(), [50, 10])
    assert close(got, logits(other, prompts()))
    assert len(pools(cache)) == 3
    integration.restore(other)


@cached
def test_another_model_of_the_kind_is_as_it_was(model):
    other = copy.deepcopy(model)
    integration.swap(other)
    integration.swap(model, batch_invariant=True)
    got, cache = in_pieces(other, prompts(), [50, 10])
    assert not pools(cache)
    assert close(got, logits(model, prompts()))
    integration.restore(other)


def test_functions_that_another_model_restored_are_not_used_unnoticed(model):
    """Where layers share functions; others hold their own."""
    other = copy.deepcopy(model)
    integration.swap(model, batch_invariant=True)
    integration.swap(other)
    integration.restore(other)
    if hasattr(model, integration.BESIDE):
        logits(model, prompts())
        return
    with pytest.raises(Unsupported, match=r"calls other functions .* need these; call swap\(mo"):
        logits(model, prompts())
    integration.swap(model)
    logits(model, prompts())
