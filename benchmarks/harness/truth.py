"""What a result has to be. A wrong one is not timed."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .adapters import Outputs

# Largest relative L2 error of a whole tensor with bf16 operands. Rounding them costs 3e-3 to 5e-3;
# one wrong chunk in 512 makes 4e-2. Gradients of gates sum terms that cancel.
_BF16_LIMITS = {
    "o": 1e-2, "ht": 1e-2, "kept": 1e-2, "A": 1e-2,
    "dq": 1.5e-2, "dk": 1.5e-2, "dv": 1.5e-2, "dh0": 1.5e-2, "dg": 3e-2, "dbeta": 3e-2,
    "y": 1e-2, "dx": 1.5e-2, "dw": 3e-2,  # a layer's, and the gradients of its weights
    "recall": 1e-3,  # of an index: two lines of the same mass may be taken for each other
}  # fmt: skip
_OF_BF16 = {torch.bfloat16: 1.0, torch.float16: 0.25, torch.float32: 1e-2}
_FP32_LIMIT = 1e-5  # of what is computed in fp32 whatever the operands are
WORST_HEAD = 4  # one head may be this much worse than the whole


class Verdict(NamedTuple):
    errors: dict[str, float]  # relative L2 by tensor
    complaint: str | None  # None: the result is right


class Truth(NamedTuple):
    want: Outputs
    key_heads: tuple[int, ...]  # those that were computed
    num_key_heads: int
    in_fp32: tuple[str, ...] = ("g_cum",)
    slack: float = 1.0  # of several operations behind each other: times the limits of one
    rounded: tuple[str, ...] = ()  # to bf16, whatever the operands are

    @torch.no_grad()
    def judge(self, got: Outputs, dtype: torch.dtype, leaves_out: tuple[str, ...] = ()) -> Verdict:
        errors: dict[str, float] = {}
        complaint = None
        for name, want in self.want.items():
            if name in leaves_out:
                continue
            if name not in got:
                return Verdict(errors, f"{name} is missing")
            found = self._pick(name, got[name])
            if found.shape != want.shape:
                return Verdict(
                    errors, f"{name} has shape {tuple(found.shape)}, not {tuple(want.shape)}"
                )
            limit = _FP32_LIMIT
            if name in self.rounded or name not in self.in_fp32:
                of_dtype = _OF_BF16[torch.bfloat16 if name in self.rounded else dtype]
                limit = _BF16_LIMITS[name.partition(".")[0]] * of_dtype * self.slack
            whole, worst, head = head_errors(found, want, head_axis(name))
            errors[name] = whole
            if not whole <= limit:  # NaN does not pass
                complaint = complaint or f"{name} is off by {whole:.1e}, limit {limit:.0e}"
            elif name in ("o", "ht") and not worst <= WORST_HEAD * limit:
                complaint = complaint or f"{name} of head {head} is off by {worst:.1e}"
        return Verdict(errors, complaint)

    def _pick(self, name: str, got: Tensor) -> Tensor:
        if len(self.key_heads) == self.num_key_heads:
            return got
        axis = head_axis(name)
        group = got.shape[axis] // self.num_key_heads
        index = [h * group + i for h in self.key_heads for i in range(group)]
        return got.index_select(axis, torch.tensor(index, device=got.device))


def relative_l2(got: Tensor, want: Tensor) -> float:
    error, scale = (got.double() - want.double()).norm(), want.double().norm()
    return float(error / scale) if scale > 0 else float(error)


def head_errors(got: Tensor, want: Tensor, axis: int) -> tuple[float, float, int]:
    """Relative L2 error of the whole, of the worst head, and which head that is."""
    pairs = list(zip(got.unbind(axis), want.unbind(axis), strict=True))
    error = torch.stack([(a.double() - b.double()).norm() for a, b in pairs]).cpu()
    scale = torch.stack([b.double().norm() for _, b in pairs]).cpu()
    each = torch.where(error == 0, 0.0, error / scale)  # a head may be exactly zero
    head = int(each.nan_to_num(nan=math.inf).argmax())
    whole = error.norm() / scale.norm() if scale.norm() > 0 or error.norm() > 0 else error.norm()
    return float(whole), float(each[head]), head


def head_axis(name: str) -> int:
    """Of states [N, HV, K, V], and of the rest [1, T, H, ...]."""
    return 1 if name in ("ht", "dh0", "kept") else 2
