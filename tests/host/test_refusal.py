"""Well-formed calls that this version cannot run. A GPU's answer is asked for by its capability."""

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


def tensors(K: int = 128, V: int = 128, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Any:
    """q, k, v of a call that a Hopper GPU takes."""
    q, k = (torch.empty(2, 8, 2, K, dtype=dtype, device="meta") for _ in range(2))
    v = torch.empty(2, 8, 4, V, dtype=dtype, device="meta")
    return {"q": q, "k": k, "v": v, **changed}


def strided(stride: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    room = torch.empty(1 << 16, dtype=torch.bfloat16, device="meta")
    return room.as_strided((2, 8, 2, 128), stride, offset)


STRIDES = (
    "need a last stride of 1 and the rest positive multiples of 16 bytes; pass {0}.contiguous()"
)
REFUSED = {
    "capability": (
        {"capability": (10, 0)},
        "device capability 10.0; need 9.0 (Hopper); run on an H100 or H200, " + ELSEWHERE,
    ),
    "K": (
        tensors(K=90),
        "head dimension K=90; need a multiple of 16 up to 128, or 256 on SM90; pad q and k to 96, "
        + ELSEWHERE,
    ),
    "small V": (
        tensors(V=32),
        f"head dimension V=32; need {VALUES} on SM90; pad v to 64, " + ELSEWHERE,
    ),
    "large V": (
        tensors(V=520),
        f"head dimension V=520; need {VALUES} on SM90; use fla.ops.gated_delta_rule",
    ),
    "fp32": (
        tensors(dtype=torch.float32),
        "q, k and v are float32; need bfloat16 or float16 on SM90; "
        "cast them, as with x.to(torch.bfloat16), in a model by torch.autocast, " + ELSEWHERE,
    ),
    "mixed": (
        tensors(v=tensors(dtype=torch.float16)["v"]),
        "q is bfloat16, k is bfloat16, v is float16; need one dtype; cast k and v to bfloat16",
    ),
    "mixed, q of integers": (
        tensors(q=torch.zeros_like(tensors()["q"], dtype=torch.int32)),
        "q is int32, k is bfloat16, v is bfloat16; need one dtype; cast q, k and v to bfloat16",
    ),
    "last stride": (
        tensors(q=strided((4096, 512, 256, 2))),
        "q has strides (4096, 512, 256, 2) and offset 0; " + STRIDES.format("q"),
    ),
    "stride": (
        tensors(k=strided((4096, 260, 128, 1))),
        "k has strides (4096, 260, 128, 1) and offset 0; " + STRIDES.format("k"),
    ),
    "base": (
        tensors(q=strided((4096, 256, 128, 1), 4)),
        "q has strides (4096, 256, 128, 1) and offset 4; " + STRIDES.format("q"),
    ),
    "output_h": (
        {"output_h": True, "cu_seqlens": torch.tensor([0, 8])},
        "output_h=True with cu_seqlens; need cu_seqlens_cpu too: how many states there are depends "
        "on the lengths; pass cu_seqlens_cpu",
    ),
    "cp_context": (
        {"cp_context": STRIPED},
        "cp_context with layout 'striped'; need 'contiguous' or 'zigzag'; "
        "build the context with one of them",
    ),
}


@pytest.mark.parametrize("row", REFUSED)
def test_refusal_on_a_gpu(row):
    change, text = REFUSED[row]
    assert refusal(**{**tensors(), "capability": HOPPER, **change}) == (
        f"chunk_gated_delta_rule: {text}"
    )


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
    assert refusal(x, x, x) == (
        "chunk_gated_delta_rule: q, k and v are float8_e4m3fn; "
        "need bfloat16, float16, float32 or float64; cast them"
    )


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
