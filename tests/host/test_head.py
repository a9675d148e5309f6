"""`SharedBatch.logprobs`: log-probabilities from hidden states, on CPU tensors."""

import pytest
import torch
from torch import nn

from qla_kernels import Unsupported, pack_shared_prompts
from qla_kernels.head import refusal, target_logprobs
from qla_kernels.head.parts import Parts
from qla_kernels.runtime.cpu import reference
from tests.compare import assert_close

VOCABULARY, D = 11, 6
FP32, BF16 = 1e-6, 2.0**-8


def some_batch():
    """A prompt with four responses, whose first tokens one row predicts, and one with two."""
    draw = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(VOCABULARY, (n,), generator=draw)  # noqa: E731
    lengths = [(4, [3, 0, 1, 5]), (1, []), (3, [2, 2])]
    responses = [[ids(r) for r in rs] for _, rs in lengths]
    return pack_shared_prompts([ids(p) for p, _ in lengths], responses)


def tensors(rows: int, dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY):
    return tuple(
        torch.randn(*size).to(dtype).requires_grad_() for size in ((rows, D), (vocabulary, D))
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("every", [False, True], ids=["rows of targets", "all packed tokens"])
def test_they_are_those_of_logits(every, temperature):
    batch = some_batch()
    hidden, weight = tensors(batch.num_tokens)
    rows = hidden if every else hidden[batch.src_rows]
    got = batch.logprobs(rows, weight, temperature=temperature, entropy=True)
    logits = hidden[batch.src_rows] @ weight.T
    want = batch.gather_logprobs(logits, temperature=temperature, entropy=True)
    upstream = torch.randn(2, len(batch.targets), dtype=torch.float64)
    grads = [
        torch.autograd.grad((upstream * torch.stack(x)).sum(), (hidden, weight))
        for x in (got, want)
    ]
    for name, a, b in zip(("logprobs", "entropies"), got, want, strict=True):
        assert_close(name, a.detach(), b.detach(), 1e-12)
    for name, a, b in zip(("dhidden", "dweight"), *grads, strict=True):
        assert_close(name, a, b, 1e-12)
    assert torch.equal(batch.logprobs(rows, weight, temperature=temperature), got[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_16_bit_products_are_not_rounded(dtype):
    """Log-probabilities of 16-bit logits are off by 2^-9 of the logits."""
    batch = some_batch()
    hidden, weight = tensors(len(batch.src_rows), dtype)
    got, entropy = batch.logprobs(hidden, weight, entropy=True)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want, want_entropy = batch.logprobs(*exact, entropy=True)
    assert got.dtype == entropy.dtype == torch.float32
    assert_close("logprobs", got.detach(), want.detach(), FP32)
    assert_close("entropies", entropy.detach(), want_entropy.detach(), FP32)
    (got.sum() + entropy.sum()).backward()
    (want.sum() + want_entropy.sum()).backward()
    for x, its in zip((hidden, weight), exact, strict=True):
        assert x.grad.dtype == dtype
        assert_close("a gradient", x.grad, its.grad, BF16)


def test_a_cap_of_logits_is_that_of_the_model():
    batch = some_batch()
    hidden, weight = tensors(len(batch.src_rows))
    logits = 2.5 * torch.tanh(hidden @ weight.T / 2.5)
    want = batch.gather_logprobs(logits, temperature=0.7)
    got = batch.logprobs(hidden, weight, softcap=2.5, temperature=0.7)
    assert_close("logprobs", got.detach(), want.detach(), 1e-12)
    (a,), (b,) = (torch.autograd.grad(x.sum(), weight) for x in (got, want))
    assert_close("dweight", a, b, 1e-12)


def test_under_autocast_products_have_its_dtype():
    """As those of nn.Linear, with fp32 weights, whose gradients are fp32."""
    batch = some_batch()
    hidden, weight = tensors(len(batch.src_rows), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = batch.logprobs(hidden, weight)
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (hidden, weight)]
    want = batch.logprobs(*rounded)
    assert_close("logprobs", got.detach(), want.detach(), FP32)
    got.sum().backward()
    want.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert_close("dweight", weight.grad, rounded[1].grad, BF16)


def test_gradients_that_nobody_wants_are_not_computed():
    batch = some_batch()
    hidden, weight = tensors(len(batch.src_rows))
    batch.logprobs(hidden, weight.detach()).sum().backward()
    want = hidden.grad.clone()
    batch.logprobs(hidden.detach(), weight).sum().backward()
    assert torch.equal(hidden.grad, want)
    assert weight.grad is not None


# Modules of heads


def test_a_head_with_a_bias_that_is_tied_to_the_embedding():
    batch = some_batch()
    embedding, head = nn.Embedding(VOCABULARY, D).double(), nn.Linear(D, VOCABULARY).double()
    head.weight = embedding.weight

    def grads(run):
        hidden = embedding(batch.input_ids)[batch.src_rows]
        return torch.autograd.grad(run(hidden).sum(), (embedding.weight, head.bias))

    got = grads(lambda x: batch.logprobs(x, head))
    want = grads(lambda x: batch.gather_logprobs(head(x)))
    for a, b in zip(got, want, strict=True):
        assert_close("a gradient", a, b, 1e-12)


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, x):
        return self.lm_head(x)


def with_adapters(**settings):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    options = {"r": 3, "target_modules": ["lm_head"], "init_lora_weights": False, **settings}
    return peft.get_peft_model(WithHead(), peft.LoraConfig(**options))


def assert_is_the_module(batch, model, leaves):
    hidden = torch.randn(len(batch.src_rows), D, requires_grad=True)
    head = model.base_model.model.lm_head
    got, want = batch.logprobs(hidden, head), batch.gather_logprobs(model(hidden))
    assert_close("logprobs", got.detach(), want.detach(), FP32)
    a, b = (torch.autograd.grad(x.sum(), [hidden, *leaves]) for x in (got, want))
    for x, y in zip(a, b, strict=True):
        assert_close("a gradient", x, y, 1e-5)


def test_lora_around_the_head():
    """With one adapter, with two, and without."""
    model = with_adapters(lora_alpha=5)
    batch, head = some_batch(), model.base_model.model.lm_head
    own = [head.lora_A.default.weight, head.lora_B.default.weight]
    assert_is_the_module(batch, model, own)
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    assert_is_the_module(batch, model, [*own, head.lora_B.second.weight])
    with model.disable_adapter():
        assert_is_the_module(batch, model, [])
    model.merge_adapter()
    assert_is_the_module(batch, model, [])


def test_a_head_that_peft_trains_whole():
    model = with_adapters(target_modules=["inner"], modules_to_save=["lm_head"])
    head = model.base_model.model.lm_head
    assert_is_the_module(some_batch(), model, [head.modules_to_save.default.weight])
    with torch.no_grad():
        head.modules_to_save.default.weight.zero_()
    with model.disable_adapter():
        assert_is_the_module(some_batch(), model, [])


def test_dropout_of_an_adapter_is_applied():
    model = with_adapters(lora_dropout=0.5)
    batch, head = some_batch(), model.base_model.model.lm_head
    hidden = torch.randn(len(batch.src_rows), D)
    found = []
    for run in (
        lambda: batch.logprobs(hidden, head),
        lambda: batch.gather_logprobs(model(hidden)),
        lambda: batch.logprobs(hidden, head),
    ):
        torch.manual_seed(len(found) // 2)
        found.append(run().detach())
    assert_close("logprobs", found[0], found[1], FP32)
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_are_refused(settings):
    head = with_adapters(**settings).base_model.model.lm_head
    hidden = torch.randn(len(some_batch().src_rows), D)
    with pytest.raises(Unsupported, match=r"SharedBatch.logprobs: a head with .*; need"):
        some_batch().logprobs(hidden, head)


# Memory, compiling, arguments


def test_memory_does_not_grow_with_the_vocabulary_times_tokens(monkeypatch):
    """Of what torch allocates, forward and backward."""
    monkeypatch.setattr(reference().head, "ELEMENTS", 1 << 16)
    rows, vocabulary = 400, 5000
    hidden, weight = tensors(rows, torch.float32, vocabulary)
    targets = torch.randint(vocabulary, (rows,))
    with torch.profiler.profile(profile_memory=True) as run:
        logprobs, entropies = target_logprobs("test", hidden, weight, targets)
        (logprobs.sum() + entropies.sum()).backward()
    events = [x for x in run.profiler.kineto_results.events() if x.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda x: x.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    parts, gradients = 4 * (1 << 16), 4 * D * (rows + vocabulary)
    assert most < 12 * parts + 3 * gradients < 4 * rows * vocabulary


def test_compiled_code_and_operators():
    batch = some_batch()
    hidden, weight = tensors(len(batch.src_rows), torch.float32)
    call = (batch.targets, batch.src_inv)

    def loss(hidden, weight):
        logprobs, entropies = target_logprobs("test", hidden, weight, *call, temperature=0.7)
        return logprobs.sum() + entropies.square().sum()

    want = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    for a, b in zip(got, want, strict=True):
        assert_close("a gradient", a, b, FP32)
    order = batch.src_inv.argsort(stable=True)
    counts = torch.bincount(batch.src_inv, minlength=len(hidden))
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    tables = batch.targets[order].int(), first
    inputs = (
        hidden.detach(),
        weight.detach(),
        None,
        torch.randn(len(hidden), 2),
        torch.randn(11, 2),
    )
    done = torch.ops.qla_kernels.head_fwd(*inputs, *tables, 1.0, 0.0)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.qla_kernels.head_fwd.default, (*inputs, *tables, 1.0, 0.0), test_utils=tests
    )
    upstream = torch.randn(2, len(batch.targets)).unbind()
    for wanted in ([True, True, False, True, True], [True, False, False, True, False]):
        torch.library.opcheck(
            torch.ops.qla_kernels.head_bwd.default,
            (*upstream, *inputs, *tables, *done[1:], 1.0, 0.0, wanted),
            test_utils=tests,
        )


def test_nothing_is_read_back():
    """On meta tensors, whose contents cannot be read."""
    batch = some_batch().to("meta")
    hidden, weight = (x.detach().to("meta").requires_grad_() for x in tensors(batch.num_tokens))
    logprobs, entropies = batch.logprobs(hidden, weight, entropy=True)
    (logprobs + entropies).sum().backward()
    assert weight.grad.shape == weight.shape
    assert hidden.grad.shape == hidden.shape


def test_a_batch_without_targets():
    batch = pack_shared_prompts([[1, 2]], [[[]]])
    hidden, weight = tensors(2)
    found = batch.logprobs(hidden, weight)
    assert found.shape == (0,)
    found.sum().backward()
    assert not weight.grad.any()


def test_derivatives_that_are_refused():
    batch = some_batch()
    hidden, weight = tensors(len(batch.src_rows))
    found = batch.logprobs(hidden, weight)
    (first,) = torch.autograd.grad(found.sum(), weight, create_graph=True)
    with pytest.raises(Unsupported, match=r"SharedBatch.logprobs: a derivative of its grad"):
        first.square().sum().backward()
    with pytest.raises(Unsupported, match=r"SharedBatch.logprobs: an input has a forward-"):
        torch.func.jvp(lambda x: batch.logprobs(x, weight.detach()), (hidden,), (hidden,))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": [[1.0]]}, "hidden is of type list; need a tensor"),
        ({"hidden": torch.zeros(4, D)}, r"hidden has shape \(4, 6\); need \[10, D\], the rows src"),
        ({"hidden": torch.zeros(10, D, device="meta")}, "hidden is on meta; need cpu"),
        ({"hidden": torch.zeros(10, D).long()}, "hidden is int64; need bfloat16, "),
        (
            {"head": torch.zeros(VOCABULARY, 5)},
            r"weight .*\(11, 5\); need .* = \(11, 6\)",
        ),
        (
            {"head": torch.zeros(0, D)},
            r"weight .*\(0, 6\); need .*, V at least 1",
        ),
        ({"head": torch.zeros(VOCABULARY, D, device="meta")}, "weight is on meta; need cpu"),
        ({"head": torch.zeros(3, D)}, r"a target is \d+; need 0 to 2, the columns of logits"),
        ({"head": torch.zeros(VOCABULARY, D).bfloat16()}, "weight is bfloat16 and hidden float32"),
        ({"head": nn.Embedding(VOCABULARY, D)}, "a head of type Embedding; need nn.Linear"),
        ({"temperature": 0}, "temperature=0; need a positive number"),
        ({"temperature": "1"}, "temperature is '1' of type str; need a number"),
        ({"temperature": torch.ones((), requires_grad=True)}, "temperature is a .* that requires"),
        ({"softcap": -1.0}, "softcap=-1.0; need a positive number"),
        ({"entropy": 3}, "entropy is 3 of type int; need True or False"),
    ],
)
def test_malformed_calls(change, text):
    call = {"hidden": torch.zeros(10, D), "head": torch.zeros(VOCABULARY, D), **change}
    with pytest.raises(ValueError, match=f"^SharedBatch.logprobs: {text}"):
        some_batch().logprobs(call.pop("hidden"), call.pop("head"), **call)


def test_what_a_gpu_refuses():
    hidden, weight = (x.detach() for x in tensors(3))
    text = refusal(hidden, Parts(weight), capability=(9, 0))
    assert "hidden is float64; need bfloat16, float16 or float32 on SM90" in text
    text = refusal(hidden.float(), Parts(weight.float()), capability=(8, 0))
    assert "device capability 8.0; need 9.0 (Hopper)" in text
    assert refusal(hidden.half(), Parts(weight.half()), capability=(9, 0)) is None
