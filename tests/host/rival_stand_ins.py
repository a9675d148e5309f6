"""Rival libraries as our adapters see them: their signatures and conventions, our reference inside.

On a machine without a GPU the adapters would otherwise be code that nobody ran. Each stand-in takes
its arguments as the library does, undoes the library's conventions and calls the definition, so an
adapter that forgets a conversion gives a wrong result here too. Signatures are facts about fla-core
0.6.0, flash-qla 0.1.3, flashinfer-python 0.7.2 and flash-attn-4 4.0.0b36.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reference import gdn

LOG2E = 1 / math.log(2)


@contextmanager
def installed(**modules: dict[str, Any]) -> Iterator[None]:
    """Puts modules of the given contents into sys.modules; `__` in a name stands for a dot."""
    made: dict[str, ModuleType] = {}
    for encoded, contents in modules.items():
        name = encoded.replace("__", ".")
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        vars(made[name]).update(contents)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# --- FLA: keywords only here; g comes back in base 2, cu_seqlens and chunk_indices are int64


def fla_forward(
    q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first=False,
    cu_seqlens=None, cp_context=None, chunk_indices=None, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, chunk_size=64,
):  # fmt: skip
    _check_fla(cu_seqlens, chunk_indices, output_final_state)
    f = gdn.chunked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    return f.g_cum * LOG2E, f.o, f.A, f.final_state, initial_state, None


def fla_backward(
    q, k, v, g, beta, A, scale, initial_state, do, dht, state_v_first=False, cu_seqlens=None,
    cp_context=None, chunk_indices=None, use_gate_in_kernel=False, g_input=None, A_log=None,
    dt_bias=None, chunk_size=64,
):  # fmt: skip
    _check_fla(cu_seqlens, chunk_indices, True)
    b = gdn.chunked_backward(q, k, v, g / LOG2E, beta, A, do, dht, scale, initial_state, cu_seqlens)
    return b.dq, b.dk, b.dv, b.dbeta, b.dg, b.dh0, None, None


def _check_fla(cu_seqlens, chunk_indices, output_final_state):
    assert output_final_state, "the benchmark asks everyone for the final state"
    assert cu_seqlens.dtype == torch.int64, "FLA documents LongTensor"
    chunks = sum(-(-n // 64) for n in cu_seqlens.diff().tolist())
    assert chunk_indices.shape == (chunks, 2)


def fla_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu=None):
    counts = [-(-n // chunk_size) for n in cu_seqlens.diff().tolist()]
    return torch.tensor([[n, i] for n, count in enumerate(counts) for i in range(count)])


def fla_public(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
    cp_context=None, **kwargs,
):  # fmt: skip
    assert not kwargs, "FLA ignores unknown keywords; we must not pass any"
    _check_fla(cu_seqlens, chunk_indices, output_final_state)
    f = gdn.chunked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    return f.o, f.final_state


def fla() -> dict[str, dict[str, Any]]:
    return {
        "fla__ops__gated_delta_rule__chunk": {
            "chunk_gated_delta_rule_fwd": fla_forward,
            "chunk_gated_delta_rule_bwd": fla_backward,
            "chunk_gated_delta_rule": fla_public,
        },
        "fla__ops__utils__index": {"prepare_chunk_indices": fla_chunk_indices},
    }


# --- FlashQLA: A has no gates in it; int32 cu_seqlens; backward takes its own A


def qla_forward(
    q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None, output_final_state=True,
    output_h=False, auto_cp=True, state_v_first=False, enable_fwd_cp_cache=False,
    cp_context=None, is_train=None,
):  # fmt: skip
    assert auto_cp, "its automatic choice has to be on"
    f = gdn.chunked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    A = gate_free_inverse(k, beta, cu_seqlens)
    assert bool(is_train) == enable_fwd_cp_cache, "kept in training, and only there"
    cache = "cache" if enable_fwd_cp_cache else None
    return f.g_cum, A, f.o, None, f.final_state, cache


def qla_backward(
    q, k, v, g, beta, A, do, dht=None, scale=None, initial_state=None, cu_seqlens=None,
    state_v_first=False, auto_cp=True, cp_cache=None, cp_context=None,
):  # fmt: skip
    assert auto_cp, "its automatic choice has to be on"
    assert cp_cache == "cache", "in a training step its forward keeps segments for the backward"
    torch.testing.assert_close(A, gate_free_inverse(k, beta, cu_seqlens))
    gated = gdn.chunked(q, k, v, _differences(g, cu_seqlens), beta, cu_seqlens=cu_seqlens).A
    b = gdn.chunked_backward(q, k, v, g, beta, gated, do, dht, scale, initial_state, cu_seqlens)
    return b.dq, b.dk, b.dv, b.dbeta, b.dg, b.dh0


def qla_public(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, head_first=False, state_v_first=False,
    auto_cp=True, enable_fwd_cp_cache=True, cp_context=None, force_intra_cp=False,
):  # fmt: skip
    f = gdn.chunked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    return f.o, f.final_state


def qla_cumsum(g, chunk_size=64, cu_seqlens=None, reverse=False, zero_last_chunk=False):
    key = torch.zeros(1, g.shape[1], 1, 1)
    value = torch.zeros(*g.shape, 1)
    return gdn.chunked(key, key, value, g, torch.zeros_like(g), cu_seqlens=cu_seqlens).g_cum


def qla_kkt_solve(k, b, chunk_size=64, cu_seqlens=None):
    return gate_free_inverse(k, b, cu_seqlens)


def gate_free_inverse(k: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
    value = torch.zeros(*beta.shape, 1)
    return gdn.chunked(k, k, value, torch.zeros_like(beta), beta, cu_seqlens=cu_seqlens).A


def _differences(g_cum: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Gates from their chunk-local sums."""
    g = g_cum.clone()
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        inside = torch.arange(start, end)
        inside = inside[(inside - start) % 64 != 0]
        g[:, inside] = g_cum[:, inside] - g_cum[:, inside - 1]
    return g


def flash_qla() -> dict[str, dict[str, Any]]:
    return {
        "flash_qla": {
            "chunk_gated_delta_rule_fwd": qla_forward,
            "chunk_gated_delta_rule_bwd": qla_backward,
            "chunk_gated_delta_rule": qla_public,
        },
        "flash_qla__ops__gated_delta_rule__chunk": {
            "chunk_local_cumsum": qla_cumsum,
            "kkt_solve": qla_kkt_solve,
        },
    }


# --- FlashInfer: [tokens, heads, D], e^g and beta in fp32, states [N, HV, V, K]


def flashinfer_prefill(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, use_qk_l2norm_in_kernel=False, output=None, output_state=None,
    state_checkpoints=None, checkpoint_cu_starts=None, checkpoint_every_n_tokens=0,
    use_cp="auto", state_indices=None, _cp_chunk_len=None, backend="auto", max_seqlen=None,
):  # fmt: skip
    assert use_cp == "auto"
    assert type(max_seqlen) is int
    assert max_seqlen == int(cu_seqlens.diff().max())
    assert all(x.is_contiguous() for x in (q, k, v, g, beta))
    assert g.dtype == beta.dtype == torch.float32
    assert initial_state is None or initial_state.is_contiguous()
    state = None if initial_state is None else initial_state.mT
    f = gdn.chunked(q[None], k[None], v[None], g.log()[None], beta[None], scale, state, cu_seqlens)
    return f.o[0], f.final_state.mT.contiguous()


def flashinfer() -> dict[str, dict[str, Any]]:
    return {
        "flashinfer": {"__version__": "stand-in"},
        "flashinfer__gdn_prefill": {"chunk_gated_delta_rule": flashinfer_prefill},
    }


# --- flash-attn-4: packed queries and keys, lse [heads, tokens], natural log


def fa4_varlen(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    *, softmax_scale=None, causal=False, return_lse=False,
):  # fmt: skip
    assert return_lse
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    scores = _scores(q, k, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


def fa4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, cu_seqlens_q=None,
    cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
):  # fmt: skip
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = _scores(q, k, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    p = (scores - lse[..., None]).exp()
    dp = torch.einsum("qhd,khd->hqk", dout, values)
    ds = softmax_scale * p * (dp - torch.einsum("qhd,qhd->hq", dout, out)[..., None])
    dq = torch.einsum("hqk,khd->qhd", ds, keys)
    dk = torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, (-1, group)).sum(2)
    dv = torch.einsum("hqk,qhd->khd", p, dout).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv, None


def _scores(q, k, cu_q, cu_k, scale, causal):
    owner_q, place_q = _owner_and_place(cu_q)
    owner_k, place_k = _owner_and_place(cu_k)
    seen = owner_q[:, None] == owner_k
    if causal:
        seen &= place_k <= place_q[:, None]
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (scale * torch.einsum("qhd,khd->hqk", q, keys)).masked_fill(~seen, -math.inf)


def _owner_and_place(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    lengths = cu_seqlens.diff().long()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return owner, torch.arange(len(owner)) - cu_seqlens[owner]


def flash_attn_4() -> dict[str, dict[str, Any]]:
    return {
        "flash_attn__cute__interface": {
            "flash_attn_varlen_func": fa4_varlen,
            "_flash_attn_bwd": fa4_backward,
        }
    }
