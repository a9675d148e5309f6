"""`assert_close` accepts what rounding does and points at what a bug does."""

import pytest
import torch

from tests.compare import assert_close, bias_of, no_worse, relative_l2


@pytest.fixture
def want() -> torch.Tensor:
    return torch.randn(2, 256, 3, 8, dtype=torch.float64)


def test_a_rounding_passes_and_its_error_is_returned(want):
    error = assert_close("o", want.bfloat16(), want, 2e-3)
    assert 1.5e-3 < error < 1.8e-3  # 2^-8 / sqrt(3) of each binade's upper end, averaged
    assert assert_close("o", want, want, 0.0) == 0


def test_shape(want):
    with pytest.raises(AssertionError, match=r"o: shape \(2, 255, 3, 8\), want \(2, 256, 3, 8\)"):
        assert_close("o", want[:, :-1], want, 1e-3)


def test_not_finite_says_how_many_and_where(want):
    got = want.clone()
    got[1, 7, 2, 5:] = torch.nan
    with pytest.raises(AssertionError, match=r"3 of 12288 not finite, first nan at \(1, 7, 2, 5\)"):
        assert_close("o", got, want, 1e-3)
    with pytest.raises(AssertionError, match="the test is wrong"):
        assert_close("o", want, got, 1e-3)


def test_a_wrong_block_is_found(want):
    got = want.clone()
    got[0, 130, 1] += 3
    with pytest.raises(AssertionError) as failure:
        assert_close("o", got, want, 1e-3)
    assert "first off at (0, 130, 1, 0)" in str(failure.value)
    assert "indices 128..191 of axis 1 hold 100%" in str(failure.value)


def test_error_spread_thinly_shows_its_largest_element(want):
    got = want + 1.5e-3 * torch.randn_like(want).sign()
    with pytest.raises(AssertionError, match=r"relative L2 1\.\d+e-03 > 1.000e-03; largest error"):
        assert_close("o", got, want, 1e-3)


def test_truncation_is_a_bias(want):
    """Truncating to bf16 is within a tolerance of two roundings, but all errors shrink."""
    bits = want.float().view(torch.int32) & ~0xFFFF
    truncated = bits.view(torch.float32)
    assert relative_l2(truncated, want) < 4e-3
    with pytest.raises(AssertionError, match="the errors point one way"):
        assert_close("o", truncated, want, 4e-3)


def test_offset_is_a_bias(want):
    assert bias_of(want + 1e-3, want) == pytest.approx(1e-3, rel=0.1)
    with pytest.raises(AssertionError, match="the errors point one way"):
        assert_close("o", want + 1e-3, want, 2e-3)


def test_bias_can_be_set(want):
    assert_close("o", want + 1e-3, want, 2e-3, bias=2e-3)


def test_small_tensors_are_not_failed_by_chance():
    for seed in range(200):
        torch.manual_seed(seed)
        want = torch.randn(5, dtype=torch.float64)
        assert_close("dA_log", want.bfloat16(), want, 4e-3)


def test_zero_and_empty_tensors():
    zero = torch.zeros(3, 4)
    assert_close("o", zero, zero, 1e-3)
    assert_close("o", zero[:0], zero[:0], 1e-3)
    with pytest.raises(AssertionError, match="relative L2 inf"):
        assert_close("o", zero + 1e-9, zero, 1e-3)
    assert_close("o", zero + 1e-9, zero, 1e-3, at_least=1e-3)


def test_no_worse_than_another(want):
    rounded, coarse = (
        {"o": want.to(dtype), "few": want[0, 0]} for dtype in (torch.half, torch.bfloat16)
    )
    truth = {"o": want, "few": want[0, 0]}
    no_worse(rounded, coarse, truth, ratio=1.1, limit=0.02)
    no_worse(coarse, coarse, truth, ratio=1.0, limit=0.02)
    with pytest.raises(AssertionError, match=r"o: relative L2 1\.\d+e-03 > 2\.\d+e-04; theirs 2"):
        no_worse(coarse, rounded, truth, ratio=1.1, limit=0.02)
    with pytest.raises(AssertionError, match=r"o: relative L2 1\.\d+e-03 > 1.000e-03; theirs 1"):
        no_worse(coarse, coarse, truth, ratio=1.1, limit=1e-3)
    no_worse(coarse, rounded, truth, ratio=1.1, limit=0.02, floor=2e-3)
    off = {**coarse, "few": 1.01 * want[0, 0]}
    no_worse(off, coarse, truth, ratio=1.1, limit=0.02)
    with pytest.raises(AssertionError, match=r"few: relative L2 nan > 2.000e-02; theirs 0"):
        no_worse({**coarse, "few": want[0, 0] / 0 * 0}, coarse, truth, ratio=1.1, limit=0.02)
