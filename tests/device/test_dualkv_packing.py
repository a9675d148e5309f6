"""Packed batches on a GPU: the same as on the CPU, and nothing waits once they are built."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from qla_kernels import SharedBatch, pack_padded, pack_shared_prompts
from tests.compare import assert_close

pytestmark = pytest.mark.hopper

VOCABULARY = 1000
LENGTHS = [(40, [30, 0, 17]), (1, [5]), (9, [4, 4, 60])]
PROMPTS = [torch.arange(p) for p, _ in LENGTHS]
RESPONSES = [[torch.arange(r) + 7 for r in rs] for _, rs in LENGTHS]


@pytest.fixture
def no_waiting():
    torch.zeros(1, device="cuda")  # the context is there
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def assert_equal(got: SharedBatch, want: SharedBatch) -> None:
    for field in fields(SharedBatch):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if isinstance(b, Tensor):
            assert a.is_cuda, field.name
            assert torch.equal(a.cpu(), b), field.name
    assert got.layout.tout.is_cuda
    assert torch.equal(got.layout.tout.cpu(), want.layout.tout)


def test_a_batch_is_the_same_wherever_its_tokens_are():
    want = pack_shared_prompts(PROMPTS, RESPONSES, pad_to=256)
    assert_equal(want.to("cuda"), want)
    prompts = [x.cuda() for x in PROMPTS]
    responses = [[x.cuda() for x in rs] for rs in RESPONSES]
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = pack_shared_prompts(prompts, responses, pad_to=256)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(got, want)


def test_padded_rows_on_the_gpu():
    ids, mask = torch.randint(3, (6, 12)), torch.ones(6, 12, dtype=torch.long)
    ids[:, :4] = torch.tensor([[1, 2, 1, 1], [2, 2, 2, 2]]).repeat(3, 1)
    mask[2, 9:] = 0
    assert_equal(pack_padded(ids.cuda(), mask.cuda(), 4), pack_padded(ids, mask, 4))


def test_log_probabilities_without_waiting(no_waiting):
    here = pack_shared_prompts(PROMPTS, RESPONSES)
    there = here.to("cuda")
    logits = torch.randn(len(here.src_rows), VOCABULARY).pin_memory()
    on_gpu = logits.to("cuda", non_blocking=True).requires_grad_()
    found = there.gather_logprobs(on_gpu, temperature=0.7, entropy=True)
    advantages = there.from_padded(torch.ones(7, 60, device="cuda"))
    loss = there.to_padded(advantages * found[0] + found[1], fill=0.0).sum()
    loss.backward()
    torch.cuda.set_sync_debug_mode("default")
    exact = logits.double().requires_grad_()
    logprobs, entropies = here.gather_logprobs(exact, temperature=0.7, entropy=True)
    (logprobs + entropies).sum().backward()
    assert_close("log-probabilities", found[0].detach().cpu(), logprobs.detach(), 1e-6)
    assert_close("entropies", found[1].detach().cpu(), entropies.detach(), 1e-6)
    assert_close("dlogits", on_gpu.grad.cpu(), exact.grad, 1e-5)
