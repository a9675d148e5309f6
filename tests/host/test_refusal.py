"""Well-formed calls that this version cannot run. A GPU's answer is asked for by its capability."""

import operator
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qla_kernels import Unsupported, chunk_gated_delta_rule, chunk_gated_delta_rule_fwd
from qla_kernels.gdn import refusal, wants_gradients
from tests.gdn_calls import call

HOPPER = (9, 0)
STRIPED = SimpleNamespace(layout="striped")
ELSEWHERE = "or use fla.ops.gated_delta_rule"
VALUES = "a multiple of 64 up to 512"
STRIDES = "a last stride of 1 and the rest positive multiples of 16 bytes"


def parts(text: str | None) -> tuple[str, ...]:
    """Returns what a refusal says that came, is needed, and helps; all three are there."""
    match = re.fullmatch(r"chunk_gated_delta_rule: (.+?); need (.+); (.+)", text or "")
    assert match, text
    return match.groups()


def tensors(K: int = 128, V: int = 128, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Any:
    """q, k, v of a call that a Hopper GPU takes."""
    q, k = (torch.empty(2, 8, 2, K, dtype=dtype, device="meta") for _ in range(2))
    v = torch.empty(2, 8, 4, V, dtype=dtype, device="meta")
    return {"q": q, "k": k, "v": v, **changed}


def strided(stride: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    room = torch.empty(1 << 16, dtype=torch.bfloat16, device="meta")
    return room.as_strided((2, 8, 2, 128), stride, offset)


REFUSED = {  # a call, and what its refusal names: what came, what is needed, what to do
    "capability": ({"capability": (10, 0)}, "capability 10.0", "9.0", ELSEWHERE),
    "K": (tensors(K=90), "K=90", "a multiple of 16 up to 128, or 256", "to 96, " + ELSEWHERE),
    "small V": (tensors(V=32), "V=32", VALUES, "pad v to 64, " + ELSEWHERE),
    "large V": (tensors(V=520), "V=520", VALUES, "use fla"),
    "fp32": (tensors(dtype=torch.float32), "float32", "bfloat16 or float16", "cast"),
    "mixed": (
        tensors(v=tensors(dtype=torch.float16)["v"]),
        "q is bfloat16, k is bfloat16, v is float16", "one dtype", "cast k and v to bfloat16",
    ),
    "mixed, q of integers": (
        tensors(q=torch.zeros_like(tensors()["q"], dtype=torch.int32)),
        "q is int32", "one dtype", "cast q, k and v to bfloat16",
    ),
    "last stride": (
        tensors(q=strided((4096, 512, 256, 2))),
        "q has strides (4096, 512, 256, 2)", STRIDES, "q.contiguous()",
    ),
    "stride": (
        tensors(k=strided((4096, 260, 128, 1))),
        "k has strides (4096, 260, 128, 1)", STRIDES, "k.contiguous()",
    ),
    "base": (
        tensors(q=strided((4096, 256, 128, 1), 4)), "offset 4", STRIDES, "q.contiguous()",
    ),
    "output_h": (
        {"output_h": True, "cu_seqlens": torch.tensor([0, 8])},
        "output_h=True", "cu_seqlens_cpu", "pass cu_seqlens_cpu",
    ),
    "cp_context": (
        {"cp_context": STRIPED}, "layout 'striped'", "'contiguous' or 'zigzag'", "one of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_refusal_on_a_gpu(row):
    change, *want = REFUSED[row]
    got = parts(refusal(**{**tensors(), "capability": HOPPER, **change}))
    assert all(map(operator.contains, got, want)), (got, want)


def test_no_refusal_on_hopper():
    for K in (64, 128):
        for V in range(64, 513, 64):
            for dtype in (torch.bfloat16, torch.float16):
                x = tensors(K, V, dtype)
                assert refusal(**x, capability=HOPPER) is None
    slices = tensors(q=strided((8192, 1024, 128, 1)), k=strided((8192, 1024, 128, 1), 256))
    assert refusal(**slices, capability=HOPPER) is None
    transposed = tensors(q=strided((4096, 128, 1024, 1)))  # head-major memory
    assert refusal(**transposed, capability=HOPPER) is None


def test_elements_that_share_memory():
    """As of expand: no TMA descriptor has a stride of 0, but rows of a batch may have one each."""
    for dim, tokens in ((1, 8), (2, 8), (0, 1)):
        x = tensors(v=torch.empty(2, tokens, 2, 128, dtype=torch.bfloat16, device="meta"))
        x["v"] = x["v"].narrow(dim, 0, 1).expand(2, tokens, 2, 128)
        assert "positive multiples of 16 bytes; pass v.contiguous()" in refusal(
            **x, capability=HOPPER
        )
    assert refusal(**tensors(q=strided((0, 512, 128, 1))), capability=HOPPER) is None


def test_the_stride_of_a_single_element_is_no_reason():
    one_head = torch.empty(1, 8, 1, 128, dtype=torch.bfloat16).as_strided(
        (1, 8, 1, 128), (3, 128, 5, 1)
    )
    assert refusal(one_head, one_head, one_head, capability=HOPPER) is None
    nothing = one_head[:, :0]
    assert refusal(nothing, nothing, nothing, capability=HOPPER) is None


def test_states_are_counted_where_the_host_knows_the_lengths():
    bounds = torch.tensor([0, 8])
    for lengths in ({}, {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds}):
        assert refusal(**tensors(), capability=HOPPER, output_h=True, **lengths) is None
    assert refusal(**tensors(), capability=HOPPER, cu_seqlens=bounds) is None


def test_cpu_takes_every_float_dtype_and_head_size():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x = torch.empty(1, 3, 2, 7, dtype=dtype)
        assert refusal(x, x, x) is None
    x = torch.empty(1, 3, 2, 7, dtype=torch.float8_e4m3fn)
    got, needs, _ = parts(refusal(x, x, x))
    assert ("float8_e4m3fn" in got, "float64" in needs) == (True, True)


def test_the_public_functions_raise_what_refusal_says():
    x = call(lengths=[70])
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    half = (q.float(), k, v, g, beta)
    for op, args, others in (
        (chunk_gated_delta_rule, half, {}),
        (chunk_gated_delta_rule_fwd, half, {}),
        (chunk_gated_delta_rule, (q, k, v, g, beta), {"cp_context": STRIPED}),
    ):
        with pytest.raises(Unsupported) as error:
            op(*args, **others)
        assert str(error.value) == refusal(*args[:3], **others, op=op.__name__)


def test_wants_gradients():
    x, leaf = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert wants_gradients((x, None, leaf))
    assert not wants_gradients((x, None))
    with torch.no_grad():
        assert not wants_gradients((leaf,))
