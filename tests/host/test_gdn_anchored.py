"""GdnPool on CPU tensors: any cut of a sequence into calls gives the definition's results."""

import functools
import random

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from qla_kernels.gdn import GdnPool, refusal
from qla_kernels.gdn.anchored import pool as anchored
from qla_kernels.gdn.anchored.extend import Extension, extend
from qla_kernels.gdn.anchored.pages import Page
from qla_kernels.gdn.call import Call, Options
from qla_kernels.runtime.errors import Unsupported
from reference import gdn

H, HV, K, V = 1, 2, 8, 6
NAMES = ("q", "k", "v", "g", "beta")


def sequences(N: int, T: int) -> dict[str, torch.Tensor]:
    def wide(*shape: int) -> torch.Tensor:
        return torch.randn(N, T, *shape, dtype=torch.float64)

    q, k = (normalize(wide(H, K), dim=-1) for _ in range(2))
    return {"q": q, "k": k, "v": wide(HV, V), "g": -wide(HV).exp(), "beta": wide(HV).sigmoid()}


def definition(x: dict[str, torch.Tensor]) -> torch.Tensor:
    return gdn.recurrent(*(x[n] for n in NAMES), K**-0.5, None, None)[0]


def pool(slots: int = 7) -> GdnPool:
    return GdnPool(slots, H, HV, K, V, torch.float64, "cpu")


def part(x: dict[str, torch.Tensor], at: slice) -> list[torch.Tensor]:
    """Tokens of each sequence, and NaN for one of padding."""
    return [torch.cat([t[:, at], torch.full_like(t[:1, at], torch.nan)]) for t in map(x.get, NAMES)]


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_into_calls_gives_the_same_results(seed):
    random.seed(seed)
    x, p, at = sequences(3, 300), pool(), 0
    want = definition(x)
    slots = torch.tensor([*random.sample(range(7), 3), random.choice([-1, 7, 100])])
    while at < 220:
        kind = random.choice(["prefill", "decode", "verify"]) if at else "prefill"
        n = {"prefill": random.choice([1, 5, 63, 64, 65]), "decode": 1}.get(
            kind, random.randint(2, 8)
        )
        tokens, accepted = part(x, slice(at, at + n)), n
        if kind == "prefill":
            goes_on = torch.ones(4, dtype=torch.bool) if at else None
            o = p.prefill(*tokens, slots, has_initial_state=goes_on)
        else:
            o = p.decode(*tokens, slots)
        assert not o[-1].any()
        torch.testing.assert_close(o[:-1], want[:, at : at + n], rtol=0, atol=1e-13)
        if kind == "verify":
            accepted = random.randint(0, n)
            p.reject(slots, torch.full((4,), n - accepted))
        at += accepted
        assert p.lengths[slots[:3]].eq(at).all()


def in_pages(num_pages: int, page: Page) -> tuple[GdnPool, torch.Tensor]:
    """A pool on pages that lie apart and hold NaN; page 0 is for padding."""
    numbers = sum(page.part_bytes()) // 4
    room = torch.full((num_pages, numbers + 24), torch.nan)
    return GdnPool.of(page.slots(room[:, 8 : 8 + numbers]), null_slot=0), room


@pytest.mark.parametrize("seed", range(3))
def test_pages_of_an_engine(seed):
    """The same in pages that held something else: only those of sequences are changed."""
    random.seed(seed)
    x = {name: t.float() for name, t in sequences(3, 300).items()}
    want, at = definition(x), 0
    p, room = in_pages(7, Page(H, HV, K, V, torch.float32))
    slots = torch.tensor([*random.sample(range(1, 7), 3), 0])
    others = [n for n in range(7) if n == 0 or n not in slots]
    while at < 220:
        n = random.choice([1, 5, 8, 64, 65]) if at else 70
        tokens, accepted = part(x, slice(at, at + n)), n
        if n > 8:
            o = p.prefill(*tokens, slots, has_initial_state=torch.full((4,), at > 0))
        else:
            o, accepted = p.decode(*tokens, slots), random.randint(1, n)
            p.reject(slots, torch.full((4,), n - accepted) * (slots > 0))
        assert not o[-1].any()
        torch.testing.assert_close(o[:-1], want[:, at : at + n], rtol=1e-4, atol=1e-5)
        assert room[others].isnan().all(), "a page was written that no sequence has"
        assert room[:, :8].isnan().all(), "numbers before the pages were written"
        assert room[:, -16:].isnan().all(), "numbers behind the pages were written"
        at += accepted
        assert p.lengths[slots[:3]].eq(at).all()


def test_a_page_takes_as_many_bytes_as_a_slot():
    page = Page(2, 4, 64, 128, torch.bfloat16)
    p, _ = in_pages(3, page)
    own = GdnPool(2, 2, 4, 64, 128, device="cpu")
    assert p.bytes_per_slot == own.bytes_per_slot == sum(page.part_bytes()) - 2 * 12


def test_tensors_that_are_no_pages_say_what_is_needed():
    page = Page(H, HV, K, V, torch.float32)
    tensors = in_pages(3, page)[0].tensors
    with pytest.raises(ValueError, match="null_slot 3; need 0 to 2"):
        GdnPool.of(tensors, 3)
    with pytest.raises(ValueError, match=r"v_tail has shape .*; need \(3, 128, 2, 6\)"):
        GdnPool.of(tensors._replace(v_tail=tensors.v_tail[:, :64]), 0)
    with pytest.raises(ValueError, match=r"lengths is int64 .*; need int32"):
        GdnPool.of(tensors._replace(lengths=tensors.lengths.long()), 0)
    with pytest.raises(ValueError, match=r"g and beta with strides .*; need one distance"):
        GdnPool.of(tensors._replace(g_tail=tensors.g_tail.contiguous()), 0)
    turned = tensors.anchors.mT.contiguous().mT
    with pytest.raises(ValueError, match=r"anchors is float32 .* contiguous slots"):
        GdnPool.of(tensors._replace(anchors=turned), 0)


def test_a_packed_prefill_begins_some_sequences_and_extends_others():
    x, p = sequences(2, 200), pool()
    want, slots = definition(x), torch.tensor([2, 5])
    first = [t[:, :70] for t in map(x.get, NAMES)]
    p.prefill(*first, slots)
    packed = [torch.cat([t[0, 70:200], t[1, :3]])[None] for t in map(x.get, NAMES)]
    bounds, goes_on = torch.tensor([0, 130, 133]), torch.tensor([True, False])
    o = p.prefill(*packed, slots, bounds, goes_on)
    torch.testing.assert_close(o[0, :130], want[0, 70:], rtol=0, atol=1e-13)
    torch.testing.assert_close(o[0, 130:], want[1, :3], rtol=0, atol=1e-13)
    assert p.lengths.tolist() == [0, 0, 200, 0, 0, 3, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_a_prefill_without_tokens_begins_sequences_and_leaves_others(packed):
    """Whatever a slot held: the sequence that begins there has no state. Padding is not changed."""
    x = {name: t.float() for name, t in sequences(3, 75).items()}
    want, (p, room) = definition(x), in_pages(4, Page(H, HV, K, V, torch.float32))
    p.prefill(*part(x, slice(70)), torch.tensor([1, 2, 3, 0]))
    before = room.clone()
    none = [t[:, :0] for t in part(x, slice(70))]
    bounds = torch.zeros(5, dtype=torch.int64) if packed else None
    tokens = [t[:1] for t in none] if packed else none
    goes_on = torch.tensor([True, False, False, False])
    o = p.prefill(*tokens, torch.tensor([1, 2, 9, 0]), bounds, goes_on)
    assert o.shape == tokens[2].shape
    assert p.lengths.tolist()[1:] == [70, 0, 70]
    kept = [0, 1, 3]
    assert torch.equal(room[kept].view(torch.int32), before[kept].view(torch.int32))
    first = p.decode(*(t[[0, 1]] for t in part(x, slice(70, 71))), torch.tensor([1, 3]))
    begun = p.decode(*(t[1:2] for t in part(x, slice(5))), torch.tensor([2]))
    torch.testing.assert_close(first[0], want[0, 70:71], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(begun[0], want[1, :5], rtol=1e-4, atol=1e-5)


def test_options_are_those_of_the_chunked_form():
    x, p = sequences(2, 70), pool()
    x |= {"q": 3 * x["q"], "k": 2 * x["k"], "g": torch.randn_like(x["g"])}
    A_log, dt_bias = torch.randn(HV).double(), torch.randn(HV).double()
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    q, k = gdn.l2norm(x["q"]), gdn.l2norm(x["k"])
    g, beta = gdn.gate(x["g"], A_log, dt_bias), gdn.beta_sigmoid(x["beta"], True)
    want = gdn.recurrent(q, k, x["v"], g, beta, 0.5, None, None)[0]
    slots = torch.tensor([0, 1])
    parts = [[t[:, at] for t in map(x.get, NAMES)] for at in (slice(69), slice(69, 70))]
    o = [
        p.prefill(*parts[0], slots, scale=0.5, **options),
        p.decode(*parts[1], slots, scale=0.5, **options),
    ]
    torch.testing.assert_close(torch.cat(o, 1), want, rtol=0, atol=1e-13)


def test_wrong_calls_say_what_is_needed():
    x, p = sequences(2, 9), pool()
    tokens, slots = list(map(x.get, NAMES)), torch.tensor([0, 1])
    with pytest.raises(Unsupported, match="decode of 9 tokens; need 1 to 8; append them with"):
        p.decode(*tokens, slots)
    few = [t[:, :1] for t in tokens]
    with pytest.raises(ValueError, match=r"state_indices \[0, 0\]; need different ones"):
        p.decode(*few, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="state_indices has 4294967297; need numbers that fit in"):
        p.decode(*few, torch.tensor([0, (1 << 32) + 1]))
    with pytest.raises(ValueError, match="state_indices has -4294967296; need numbers that fit in"):
        p.reject(torch.tensor([-(1 << 32)]), torch.tensor([0]))
    with pytest.raises(ValueError, match="state_indices is float32; need int32 or int64; cast it"):
        p.decode(*few, torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"state_indices has shape \(1,\)"):
        p.decode(*few, slots[:1])
    with pytest.raises(TypeError, match="unexpected keyword argument 'output_h'"):
        p.decode(*few, slots, output_h=True)
    with pytest.raises(ValueError, match=r"\(H, HV, K, V\) = .*; need .*, those of the pool"):
        p.decode(few[0][..., :4], few[1][..., :4], *few[2:], slots)
    with pytest.raises(ValueError, match="q is float32 on cpu; need float64 on cpu, as the pool"):
        p.decode(*(t.float() for t in few), slots)
    with pytest.raises(ValueError, match=r"\(slots, H, HV, K, V\) = .*; need at least one"):
        GdnPool(0, H, HV, K, V, device="cpu")


def test_a_pool_of_wide_heads_is_refused_on_a_gpu(monkeypatch):
    x = [torch.zeros(1, 2, 1, n, dtype=torch.bfloat16) for n in (256, 256, 64)]
    x += [torch.zeros(1, 2, 1) for _ in range(2)]
    p, slots = GdnPool(1, 1, 1, 256, 64, device="cpu"), torch.tensor([0])
    p.prefill(*x, slots)
    monkeypatch.setattr(anchored, "refusal", functools.partial(refusal, capability=(9, 0)))
    for call in (p.prefill, p.decode):
        with pytest.raises(Unsupported, match="GdnPool: head dimension K=256; need less than 256"):
            call(*x, slots)


@pytest.mark.parametrize("taken", [-1, 6])
def test_no_more_tokens_are_taken_back_than_a_tail_holds(taken):
    x, p = sequences(1, 69), pool()
    slots = torch.tensor([2, -1])
    p.prefill(*(t[:, :69].repeat(2, *[1] * (t.dim() - 1)) for t in map(x.get, NAMES)), slots)
    wrong = rf"num_tokens \[{taken}, 9\]; need 0 to \[5, .*\] of them; take back at most"
    with pytest.raises(ValueError, match=wrong):
        p.reject(slots, torch.tensor([taken, 9]))
    p.reject(slots, torch.tensor([5, 9]))
    assert p.lengths[2] == 64


def test_bytes_of_a_slot():
    p = GdnPool(3, 16, 32, 128, 128, torch.bfloat16, "cpu")
    anchor, k, v, gates = 32 * 65536, 128 * 16 * 256, 128 * 32 * 256, 2 * 128 * 32 * 4
    assert p.bytes_per_slot == anchor + k + v + gates + 8


def step(p: GdnPool, x: list[torch.Tensor], slots: torch.Tensor, options: dict) -> torch.Tensor:
    """A prompt, a step of drafts of which some are taken back, and a token."""
    o = [
        p.prefill(*(t[:, :70] for t in x), slots, **options),
        p.decode(*(t[:, 70:74] for t in x), slots, **options),
    ]
    p.reject(slots, slots.clamp(0, 3))
    return torch.cat([*o, p.decode(*(t[:, 74:75] for t in x), slots, **options)], 1)


@pytest.mark.parametrize("raw", [False, True])
def test_compiles_to_one_graph(raw):
    x, options = sequences(3, 75), {}
    if raw:
        options = {"A_log": torch.randn(HV).double(), "dt_bias": torch.randn(HV).double()}
        flags = "use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel"
        options |= dict.fromkeys(flags, True)
    tokens, slots = list(map(x.get, NAMES)), torch.tensor([1, -1, 3])
    one, other = pool(), pool()
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        got, want = compiled(one, tokens, slots, options), step(other, tokens, slots, options)
        assert torch.equal(got, want)
        assert all(map(torch.equal, one.tensors, other.tensors))
    assert one.lengths.tolist() == [0, 74, 0, 72, 0, 0, 0]


@pytest.mark.parametrize("drafts", [False, True])
def test_opcheck(drafts):
    x, p = sequences(2, 70 if not drafts else 3), pool()
    p.tensors.lengths[2] = p.tensors.anchored[2] = 64
    slots, goes_on = torch.tensor([2, -1]), None if drafts else torch.tensor([True, False])
    call, places = Call(*map(x.get, NAMES), 0.5), Extension(slots, goes_on, drafts, p.null_slot)
    operator = torch.ops.qla_kernels.gdn_pool_extend.default
    torch.library.opcheck(operator, (*call, *p.tensors, *places, *Options()))
    operator = torch.ops.qla_kernels.gdn_pool_reject.default
    given = p.tensors.lengths, p.tensors.anchored, slots, torch.tensor([0, 9]), p.null_slot
    torch.library.opcheck(operator, given)


class OtherNans(TorchDispatchMode):
    """Numbers put by index have other bits of NaN, as CUDA's deterministic algorithms give them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index_put_.default and args[2].is_floating_point():
            x, indices, values = args
            other = torch.full_like(values, torch.nan).view(torch.int64).add_(1).view(values.dtype)
            args = x, indices, torch.where(values.isnan(), other, values)
        return func(*args, **(kwargs or {}))


def test_the_slot_of_padding_keeps_the_bits_of_nan():
    x, p = sequences(1, 5), pool()
    for held in p.tensors[:5]:
        held[p.null_slot] = torch.nan
    before = [held.clone() for held in p.tensors]
    nobody = Extension(torch.tensor([p.null_slot]), None, False, p.null_slot)
    with OtherNans():
        extend(Call(*map(x.get, NAMES), 0.5), p.tensors, nobody)
    for held, was in zip(p.tensors, before, strict=True):
        assert torch.equal(held.view(torch.uint8), was.view(torch.uint8))
