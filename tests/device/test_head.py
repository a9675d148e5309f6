"""Log-probabilities from hidden states on a GPU: no waiting, little memory, the same bits."""

import pytest
import torch

from qla_kernels import pack_shared_prompts
from qla_kernels.head import target_logprobs
from qla_kernels.head.shapes import COLUMNS, TOKENS
from tests.compare import assert_close

pytestmark = pytest.mark.hopper

D, VOCABULARY = 256, COLUMNS + 3000
LOGITS = 4 * COLUMNS  # bytes of a row's block


def some(rows, dtype=torch.bfloat16, vocabulary=VOCABULARY, width=D):
    hidden = torch.randn(rows, width).to(dtype)
    weight = (torch.randn(vocabulary, width) * 3 / width**0.5).to(dtype)
    return hidden, weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_batch_without_waiting(dtype):
    prompts = [torch.arange(40), torch.arange(9)]
    responses = [[torch.randint(1000, (n,)) for n in (30, 0, 17, 25)], [torch.randint(1000, (5,))]]
    batch = pack_shared_prompts(prompts, responses)
    hidden, weight = some(batch.num_tokens, dtype)
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    want = batch.logprobs(*exact, temperature=0.7, entropy=True)
    upstream = torch.randn(2, len(batch.targets))
    wanted = torch.autograd.grad(want, exact, [*upstream.double()])
    there, on_gpu = batch.to("cuda"), [x.cuda().requires_grad_() for x in (hidden, weight)]
    given = upstream.cuda()
    there.logprobs(*on_gpu)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = there.logprobs(*on_gpu, temperature=0.7, entropy=True)
        grads = torch.autograd.grad(got, on_gpu, [*given])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, a, b in zip(("log-probabilities", "entropies"), got, want, strict=True):
        assert_close(name, a.detach().cpu(), b.detach(), 1e-5)
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}[dtype]
    for name, a, b in zip(("dhidden", "dweight"), grads, wanted, strict=True):
        assert_close(name, a.cpu(), b, 1.5 * rounding)


def test_the_same_call_gives_the_same_bits():
    hidden, weight = (x.cuda().requires_grad_() for x in some(3000))
    targets = torch.randint(VOCABULARY, (3000,), device="cuda")
    rows = torch.randint(2000, (3000,), device="cuda")
    found = []
    for _ in range(2):
        out = target_logprobs("test", hidden, weight, targets, rows)
        found.append((*out, *torch.autograd.grad(sum(x.sum() for x in out), (hidden, weight))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_memory_is_a_block_of_logits_and_sums():
    """Logits of all would be 2.9 GB, and their gradient half of that."""
    rows, vocabulary = TOKENS, 44_000
    hidden, weight = (x.cuda().requires_grad_() for x in some(rows, vocabulary=vocabulary))
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    target_logprobs("test", hidden[:8], weight, targets[:8])[0].sum().backward()
    torch.cuda.synchronize()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropies = target_logprobs("test", hidden, weight, targets)
    (logprobs.sum() + entropies.sum()).backward()
    most = torch.cuda.max_memory_allocated() - before
    of_block = rows * LOGITS * 3 // 2  # logits in fp32, gradients in 16 bits
    assert most < of_block + 8 * rows * D + 4 * vocabulary * D + (64 << 20)


def test_a_target_outside_of_the_vocabulary_is_nan():
    """It is not read on a GPU, and must not be the logit of another word."""
    hidden, weight = (x.cuda() for x in some(3))
    targets = torch.tensor([5, -100, VOCABULARY], device="cuda")
    logprobs, entropies = target_logprobs("test", hidden, weight, targets)
    assert logprobs.isnan().tolist() == [False, True, True]
    assert not entropies.isnan().any()
