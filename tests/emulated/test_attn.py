"""What attention families share, emulated."""

import math

import pytest
import torch

from qla_kernels.attn.launch import row_stats

pytestmark = pytest.mark.usefixtures("seeds", "poison")


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 256)]
)
@pytest.mark.parametrize("base2", [True, False])
@pytest.mark.kernels("attn.delta")
def test_row_stats(dtype, size, base2):
    """Two batches of 13 rows: padding, a row that saw no key, strides of a model's slices."""
    o = torch.randn(2, 13, 3, size).to(dtype)
    do = torch.randn(2, 3, 13, 3 * size).to(dtype)[..., size : 2 * size].transpose(1, 2)
    lse = torch.randn(2, 13, 3).transpose(1, 2)
    dlse = torch.randn(2, 3, 13)
    lse[1, 2, 5] = -torch.inf
    stats = row_stats(o, do, lse, dlse, base2=base2)
    without = row_stats(o, do, lse, None, base2=base2)
    assert stats.shape == (2, 3, 2, 16)
    lse2 = torch.where(lse.isinf(), torch.inf, lse if base2 else lse / math.log(2))
    torch.testing.assert_close(stats[:, :, 0, :13], lse2)
    delta = (o.double() * do.double()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(stats[:, :, 1, :13].double(), delta - dlse, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(without[:, :, 1, :13].double(), delta, atol=2e-5, rtol=1e-5)
    assert (stats[:, :, 0, 13:] == torch.inf).all(), "P of padding is not 0"
    assert not stats[:, :, 1, 13:].any()
