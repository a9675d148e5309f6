"""How tests compare tensors: as the self-test does, and with the errors of another library."""

from torch import Tensor

from qla_kernels.lab.selftest.compare import assert_close, bias_of, relative_l2

__all__ = ["assert_close", "bias_of", "no_worse", "relative_l2"]

FEW = 256  # numbers whose error is a matter of luck
FP32 = 1e-5  # what sums and decays in fp32 cost


def no_worse(
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    truth: dict[str, Tensor],
    ratio: float,
    limit: float,
    floor: float = FP32,
) -> None:
    """Fail unless each error of `ours` is within `limit` and within `ratio` times that of `theirs`.

    Errors below `floor` are not compared. Tensors of few numbers are held to `limit` alone.
    """
    worse = []
    for name, want in truth.items():
        error, other = relative_l2(ours[name], want), relative_l2(theirs[name], want)
        allowed = limit if want.numel() < FEW else min(limit, max(ratio * other, floor))
        if not error <= allowed:
            worse.append(f"{name}: relative L2 {error:.3e} > {allowed:.3e}; theirs {other:.3e}")
    assert not worse, "\n".join(worse)
