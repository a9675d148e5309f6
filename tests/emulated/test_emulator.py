"""The emulator runs correct kernels correctly, whatever the interleaving."""

import pytest
import torch

from qla_kernels.lab.emulator import EmulatedKernel, EmulationError
from tests.compare import assert_close
from tests.emulated import inline_samples, row_samples, samples
from tests.emulated import sample_cases as cases
from tests.emulated.sample_cases import nan, tf32

SEEDS = range(6)
BF16_STEP = 2.0**-8

TOLERANCES = {  # one rounding to bf16 costs half a step; fp32 sums of bf16 products next to nothing
    "ring_gemm": BF16_STEP / 2,
    "gemm_forms": 1e-6,
    "sequence_sums": 1e-6,
    "sums_in_turns": 1e-6,
    "blocks_then_columns": 1e-6,
    "reduce_add": 1e-6,
    "attention": BF16_STEP,
    "reverse_halves": 0.0,
}


@pytest.mark.parametrize("name", TOLERANCES)
def test_correct_kernels_agree_with_torch_for_every_seed(name: str) -> None:
    kernel = EmulatedKernel(getattr(samples, name)(), samples.FAST)
    case = getattr(cases, name)()
    initial = case.output.clone()
    for seed in SEEDS:
        case.output.copy_(initial)
        kernel(*case.arguments, seed=seed)
        assert_close(f"{name}, seed {seed}", case.output, case.want, TOLERANCES[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_warp_products_agree_with_torch(dtype: torch.dtype) -> None:
    kernel = EmulatedKernel(samples.warp_gemm(str(dtype).removeprefix("torch.")))
    a, b, c = torch.randn(32, 64).to(dtype), torch.randn(64, 64).to(dtype), nan(32, 64)
    kernel(a, b, c)
    want = tf32(a) @ tf32(b) if dtype is torch.float32 else a.float() @ b.float()
    assert_close("product", c, want, 1e-6)


def test_warpgroups_of_one_code_agree_with_torch_for_every_seed() -> None:
    kernel = EmulatedKernel(row_samples.twins(), samples.FAST)
    case = cases.twins()
    for seed in SEEDS:
        case.output.fill_(torch.nan)
        kernel(*case.arguments, seed=seed)
        assert_close(f"seed {seed}", case.output, case.want, BF16_STEP / 2)


@pytest.mark.parametrize("schedule", ["random", "late", "eager"])
def test_a_schedule_can_be_forced(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMU_SCHEDULE", schedule)
    kernel = EmulatedKernel(samples.ring_gemm(), samples.FAST)
    case = cases.ring_gemm()
    kernel(*case.arguments, seed=1)
    assert_close(schedule, case.output, case.want, BF16_STEP / 2)


def test_inline_cuda_runs() -> None:
    kernel = EmulatedKernel(inline_samples.inline_cuda())
    x, y = torch.randn(128), nan(128)
    a, b, c = torch.randn(16, 8), torch.randn(8, 8), nan(16, 8)
    kernel(x, y, a, b, c)
    assert_close("scan", y, x.view(4, 32).cumsum(1).flatten(), 1e-6)
    assert_close("tf32 product", c, tf32(a) @ tf32(b), 1e-6)


def test_a_block_may_poll_for_an_earlier_one() -> None:
    """Blocks start in the order of their numbers, and what one waits for goes on meanwhile."""
    kernel = EmulatedKernel(inline_samples.passing(9, step=1))
    x = torch.randn(9, 32)
    for seed in SEEDS:
        sums, flags = nan(9, 32), torch.zeros(9, dtype=torch.int32)
        kernel(x, sums, flags, seed=seed)
        assert_close("sums", sums, x.cumsum(0), 1e-6)
        assert flags.all()


def test_views_and_shared_storages_are_passed_as_they_are() -> None:
    halves = EmulatedKernel(samples.reverse_halves())
    both = torch.randn(12, 128)
    x, y = both[:6], both[6:]
    before = x.clone()
    halves(x, y)
    assert torch.equal(x, before)
    assert torch.equal(y, before.flip(1))

    wide = nan(6, 256)
    with pytest.raises(EmulationError, match=r"input Y strides\[0\]"):  # the sample is dense
        halves(x, wide[:, :128])
    assert wide.isnan().all()
