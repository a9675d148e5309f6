"""The engines' own Triton functions beside ours, on the engines' layouts.

benchmarks/serving/engine_functions.py loads them. On a GPU Triton compiles them. On a CPU its
interpreter runs them, and ours are the reference, so that the same checks say whether both mean the
same.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.serving import engine_functions
from benchmarks.serving.engine_functions import CONVOLUTIONS, DRAFTS, PACKED
from qla_kernels import (
    causal_conv1d_update,
    decode_gated_delta_net,
    packed_decode_gated_delta_rule,
    verify_gated_delta_rule,
)
from reference import gdn

VLLM, SGLANG = ("vllm", 0), ("sglang", -1)  # engines, and the slot of their padding
O, STATES = 1e-2, 2e-5  # o is rounded to 16 bits on both sides, and so are products of theirs
ROUNDED_STATES = 1e-2
ROUNDED_BETA = 2.0**-8  # SGLang's packed_decode rounds beta to the dtype of b; its drafts do not


def function(engine: str, file: str, name: str) -> Any:
    """Returns a function of an engine's file; skips the test if it or Triton is not there."""
    if reason := engine_functions.missing(engine):
        pytest.skip(reason)
    return engine_functions.function(engine, file, name)


class Layer:
    """A layer's tensors as an engine holds them: rows are slices, states lie in pages."""

    def __init__(
        self, engine: tuple[str, int], slots: list[int], device: str, state: torch.dtype,
        dtype: torch.dtype = torch.bfloat16, by_channels: bool = False, tokens: int = 1,
        heads: tuple[int, int] = (2, 4), bias: bool = False,
    ) -> None:  # fmt: skip
        (H, HV), D = heads, 128 if device == "cuda" else 16
        self.engine, self.null, self.device, self.D = *engine, device, D
        count, num_slots, C = len(slots) * tokens, 12, (2 * H + HV) * D

        def normal(*shape: int, to: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape).to(device, to)

        wide = normal(count, C + HV * D + 16)
        self.rows, self.z = wide[:, :C], wide[:, C : C + HV * D].unflatten(1, (HV, D))
        self.a, self.b = (normal(count, 2 * HV)[:, i : i + HV] for i in (0, HV))
        self.A_log = torch.linspace(-3, 0, HV).to(device)
        self.dt_bias = normal(HV, to=torch.float32)
        page = normal(num_slots, HV * D * D + 32, to=state)
        self.states = page[:, :-32].unflatten(1, (HV, D, D))
        size = (C, 3) if by_channels else (3, C)
        last = normal(num_slots, 3 * C + 16)[:, :-16].unflatten(1, size)
        self.last = last if by_channels else last.mT
        self.taps, self.bias = normal(C, 4), normal(C) if bias else None
        self.slots, self.norm = torch.tensor(slots, dtype=torch.int32, device=device), normal(D)
        self.limit = STATES if state == torch.float32 else ROUNDED_STATES
        self.rounding = O if dtype.itemsize == 2 else STATES
        self.live = [n for n, slot in enumerate(slots) if slot != self.null]

    def pools(self) -> tuple[Tensor, Tensor]:
        """Copies of both pools, with their strides."""
        return self.states.clone(), self.last.clone()

    def convolve(self, last: Tensor) -> Tensor:
        run = function(self.engine, CONVOLUTIONS[self.engine], "causal_conv1d_update")
        rows = self.rows.clone()  # vLLM overwrites them
        y: Tensor = run(rows, last, self.taps, self.bias, "silu", conv_state_indices=self.slots)
        return y

    def packed(self, rows: Tensor, states: Tensor) -> Tensor:
        name = "fused_recurrent_gated_delta_rule_packed_decode"
        out = torch.full((len(rows), 1, *states.shape[1:3]), torch.nan).to(rows)
        function(self.engine, PACKED[self.engine], name)(
            mixed_qkv=rows, a=self.a, b=self.b, A_log=self.A_log, dt_bias=self.dt_bias,
            scale=self.D**-0.5, initial_state=states, out=out, ssm_state_indices=self.slots,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        keys = (self.rows.shape[1] - self.z.shape[1] * self.D) // 2
        parts = self.rows.split([keys, keys, self.rows.shape[1] - 2 * keys], 1)
        q, k, v = (x.unflatten(1, (-1, self.D))[None] for x in parts)
        return q, k, v

    def agree(self, what: str, ours: Tensor, theirs: Tensor, limit: float) -> None:
        assert torch.isfinite(ours).all(), what
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-9)
        assert error <= limit, f"{what}: ours and {self.engine}'s differ by {error:.1e}"

    def agree_on_pools(self, ours: Tensor, theirs: Tensor, used: list[int], limit: float) -> None:
        self.agree("slots", ours[used], theirs[used], limit)
        rest = [slot for slot in range(len(ours)) if slot not in used]
        assert torch.equal(ours[rest], theirs[rest]), "a slot was written that nobody named"


def check_convolution(engine: tuple[str, int], device: str, **kind: Any) -> None:
    x = Layer(engine, [5, engine[1], 3, 7], device, torch.float32, **kind)
    (_, ours), (_, theirs) = x.pools(), x.pools()
    slots = {"conv_state_indices": x.slots, "null_slot": x.null}
    y = causal_conv1d_update(x.rows, ours, x.taps, x.bias, "silu", **slots)
    want = x.convolve(theirs)
    x.agree("y", y[x.live], want[x.live], x.rounding)
    assert not y[1].any()
    used = x.slots[x.live].tolist()
    x.agree_on_pools(ours, theirs, used, 0.0)  # tokens are moved, and not computed


def check_packed(engine: tuple[str, int], device: str, state: torch.dtype, **kind: Any) -> None:
    x = Layer(engine, [5, engine[1], 3, 7, engine[1]], device, state, **kind)
    (ours, _), (theirs, _) = x.pools(), x.pools()
    rule = x.a, x.b, x.A_log, x.dt_bias
    o = packed_decode_gated_delta_rule(x.rows, *rule, ours, x.slots, null_slot=x.null)
    want = x.packed(x.rows, theirs)
    x.agree("o", o[x.live], want[x.live], O)
    assert not o[[1, 4]].any()
    limit = max(x.limit, ROUNDED_BETA if engine == SGLANG else 0.0)
    x.agree_on_pools(ours, theirs, x.slots[x.live].tolist(), limit)


def check_step(engine: tuple[str, int], device: str, state: torch.dtype, **kind: Any) -> None:
    """Theirs are three calls; o is rounded between the rule and the norm."""
    x = Layer(engine, [9, 2, engine[1]], device, state, **kind)
    ours, theirs = x.pools(), x.pools()
    rule, convolution = (x.a, x.b, x.A_log, x.dt_bias), (x.taps, x.bias, "silu")
    norm = {"z": x.z, "norm_weight": x.norm, "null_slot": x.null}
    y = decode_gated_delta_net(x.rows, *rule, ours[0], x.slots, ours[1], *convolution, **norm)
    o = x.packed(x.convolve(theirs[1]), theirs[0])
    want = gdn.gated_rms_norm(o.float(), x.z.unsqueeze(1).float(), x.norm.float())
    x.agree("y", y[x.live], want[x.live], 2 * x.rounding)
    assert not y[2].any()
    used = x.slots[x.live].tolist()
    x.agree_on_pools(ours[0], theirs[0], used, max(x.limit, x.rounding))  # rows differ a little
    x.agree_on_pools(ours[1], theirs[1], used, 0.0)


FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True, "state_v_first": True,
}  # fmt: skip


def check_vllms_drafts(device: str, state: torch.dtype, **kind: Any) -> None:
    """A slot for each draft; a sequence starts from the slot of the last one that was accepted."""
    x = Layer(VLLM, [0, 0, 0], device, state, tokens=3, **kind)
    table = torch.tensor([[5, 3, 8], [0, 0, 0], [2, 9, 4]], dtype=torch.int32, device=device)
    accepted = torch.tensor([2, 1, 3], dtype=torch.int32, device=device)
    bounds = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=device)
    (ours, _), (theirs, _) = x.pools(), x.pools()
    a, b, parameters = x.a[None], x.b[None], {"A_log": x.A_log, "dt_bias": x.dt_bias}
    o = verify_gated_delta_rule(
        *x.split(), a, b, ours, table, num_accepted_tokens=accepted, cu_seqlens=bounds,
        null_slot=0, **parameters, **FLAGS,
    )  # fmt: skip
    run = function("vllm", DRAFTS["vllm"], "fused_sigmoid_gating_delta_rule_update")
    q, k, v = x.split()
    want, _ = run(
        a=a, b=b, q=q, k=k, v=v, **parameters, initial_state=theirs, cu_seqlens=bounds,
        ssm_state_indices=table, num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    for mine in (slice(0, 3), slice(6, 9)):
        x.agree("o", o[0, mine], want.view(o.shape)[0, mine], O)
    assert not o[0, 3:6].any()
    x.agree_on_pools(ours, theirs, [5, 3, 8, 2, 9, 4], x.limit)


def check_sglangs_drafts(device: str, state: torch.dtype, tree: bool, **kind: Any) -> None:
    """Rows of a buffer for the states after drafts; the pool is not changed."""
    x = Layer(SGLANG, [5, 2], device, state, tokens=4, **kind)
    bounds = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    rows = torch.tensor([1, 0], dtype=torch.int32, device=device)
    parents = torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 1]], device=device) if tree else None
    buffer = torch.randn(3, 4, *x.states.shape[1:]).to(device, state)
    ours, theirs, before = buffer.clone(), buffer.clone(), x.states.clone()
    a, b, parameters = x.a[None], x.b[None], {"A_log": x.A_log, "dt_bias": x.dt_bias}
    o = verify_gated_delta_rule(
        *x.split(), a, b, x.states, x.slots, checkpoints=ours, checkpoint_indices=rows,
        parents=parents, cu_seqlens=bounds, **parameters, **FLAGS,
    )  # fmt: skip
    assert torch.equal(x.states, before)
    run = function("sglang", DRAFTS["sglang"], "fused_sigmoid_gating_delta_rule_update")
    q, k, v = x.split()
    want = run(
        a=x.a, b=x.b, q=q, k=k, v=v, **parameters, softplus_beta=1.0, softplus_threshold=20.0,
        initial_state_source=x.states, initial_state_indices=x.slots, cu_seqlens=bounds,
        use_qk_l2norm_in_kernel=True, disable_state_update=True, cache_steps=4,
        intermediate_states_buffer=theirs, intermediate_state_indices=rows,
        retrieve_parent_token=parents,
    )  # fmt: skip
    x.agree("o", o, want.view(o.shape), O)
    x.agree_on_pools(ours, theirs, [0, 1], ROUNDED_STATES if tree else x.limit)
    assert torch.equal(x.states, before)
