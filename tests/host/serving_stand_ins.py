"""FlashInfer's functions on states of an engine, and the engines' own: signatures, and definitions.

Signatures are facts about flashinfer-python 0.7.2.post1, vllm 0.33.0 and sglang 0.5.23. Each undoes
its library's conventions and computes by the definition, as those in rival_stand_ins.py do.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from reference import gdn


def prefill(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, use_qk_l2norm_in_kernel=False, output=None, output_state=None,
    state_checkpoints=None, checkpoint_cu_starts=None, checkpoint_every_n_tokens=0,
    use_cp="auto", state_indices=None, _cp_chunk_len=None, backend="auto", max_seqlen=None,
):  # fmt: skip
    assert output_final_state
    assert not use_qk_l2norm_in_kernel
    assert max_seqlen == int(cu_seqlens.diff().max())
    assert all(x.is_contiguous() for x in (q, k, v, g, beta))
    assert g.dtype == beta.dtype == torch.float32
    if state_indices is None:
        assert initial_state.is_contiguous()
        states = initial_state
    else:
        assert output_state is not None, "it does not make a pool"
        assert len(set(state_indices.tolist())) == len(cu_seqlens) - 1
        states = initial_state[state_indices.long()]
    call = q[None], k[None], v[None], g.log()[None], beta[None], scale
    f = gdn.chunked(*call, states.float().mT, cu_seqlens)
    o, final = f.o[0], f.final_state.mT.contiguous()
    if every := checkpoint_every_n_tokens:
        lengths, starts = cu_seqlens.diff(), checkpoint_cu_starts
        assert torch.equal(starts.diff(), lengths // every)
        assert every % 64 == 0
        assert starts.dtype == torch.int64
        bounds = cu_seqlens.tolist()
        for n, start in enumerate(bounds[:-1]):
            for i in range(int(starts[n + 1] - starts[n])):
                at = slice(start, start + every * (i + 1))
                part = (x[:, at] for x in call[:5])
                state = gdn.chunked(*part, scale, states[n : n + 1].float().mT).final_state
                state_checkpoints[starts[n] + i] = state[0].mT
    if output is not None:
        o = output.copy_(o)
    if output_state is None:
        return o, final
    at = slice(None) if state_indices is None else state_indices.long()
    output_state[at] = final.to(output_state.dtype)
    return o, output_state


def _step(q, k, v, a, b, A_log, dt_bias, states, scale=None):
    """[N, T, ..] from states [N, HV, V, K]: o, and the states after each token [N, T, HV, V, K]."""
    g = gdn.gate(a.float(), A_log.float(), dt_bias.float())
    states, o, kept = states.float().mT, [], []
    q, k = (gdn.l2norm(x.float()) for x in (q, k))
    for t in range(q.shape[1]):
        token = (x[:, t : t + 1] for x in (q, k, v.float(), g, b.float().sigmoid()))
        found, states = gdn.recurrent(*token, scale, states)
        o.append(found)
        kept.append(states.mT)
    return torch.cat(o, 1).to(v.dtype), torch.stack(kept, 1)


def decode(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True,
    initial_state=None, initial_state_indices=None, output_state_indices=None,
    intermediate_states_buffer=None, disable_state_update=False, backend="auto",
):  # fmt: skip
    assert use_qk_l2norm
    assert q.shape[1] == a.shape[1] == b.shape[1] == 1
    assert (initial_state is None) == (initial_state_indices is None) != (state is None)
    if state is not None:
        o, kept = _step(q, k, v, a, b, A_log, dt_bias, state, scale)
        return output.copy_(o), state.copy_(kept[:, 0])
    live = initial_state_indices >= 0  # of the rest nothing is read or written, and o is 0
    slots = initial_state_indices[live].long()
    given = (x[live] for x in (q, k, v, a, b))
    o, kept = _step(*given, A_log, dt_bias, initial_state[slots], scale)
    output.zero_()[live] = o
    initial_state[slots] = kept[:, 0]
    return output, initial_state


def mtp(
    q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None, output=None,
    intermediate_states_buffer=None, ssm_state_indices=None, disable_state_update=None,
    use_qk_l2norm=True, output_state_indices=None, cache_replayssm=False,
):  # fmt: skip
    assert use_qk_l2norm
    assert disable_state_update is False, "slots need states that are written"
    assert ssm_state_indices.dtype == torch.int32
    assert ssm_state_indices.shape == q.shape[:2]
    live = initial_state_indices >= 0
    given = (x[live] for x in (q, k, v, a, b))
    states = initial_state[initial_state_indices[live].long()]
    o, kept = _step(*given, A_log, dt_bias, states, scale)
    output[live] = o
    initial_state[ssm_state_indices[live].long()] = kept
    return output, initial_state


def flashinfer(**wrong: Any) -> dict[str, dict[str, Any]]:
    """Modules for `installed`; `wrong` functions replace those of their name."""
    decoding = {"gated_delta_rule_decode_pretranspose": decode, "gated_delta_rule_mtp": mtp}
    return {
        "flashinfer": {"__version__": "stand-in"},
        "flashinfer__gdn_prefill": {"chunk_gated_delta_rule": prefill, **wrong},
        "flashinfer__gdn_decode": {**decoding, **wrong},
    }


def _engine_packed(null: int) -> Any:
    def packed(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,
        use_qk_l2norm_in_kernel=False,
    ):  # fmt: skip
        assert use_qk_l2norm_in_kernel
        assert out.is_contiguous()
        live = ssm_state_indices > null
        slots, (HV, D) = ssm_state_indices[live].long(), initial_state.shape[1:3]
        keys = (mixed_qkv.shape[1] - HV * D) // 2
        parts = mixed_qkv[live].split([keys, keys, HV * D], 1)
        q, k, v = (x.unflatten(1, (-1, D))[:, None] for x in parts)
        gates = a[live][:, None], b[live][:, None]
        o, kept = _step(q, k, v, *gates, A_log, dt_bias, initial_state[slots], scale)
        out.zero_()[live] = o
        initial_state[slots] = kept[:, 0]
        return out, initial_state

    return packed


def _vllms_drafts(
    A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0, scale=None, initial_state=None,
    inplace_final_state=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None,
    use_qk_l2norm_in_kernel=False, is_kda=False,
):  # fmt: skip
    assert use_qk_l2norm_in_kernel
    o = torch.zeros_like(v)
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        first = int(ssm_state_indices[n, num_accepted_tokens[n] - 1])
        if first > 0:
            part = (x[:, start:end] for x in (q, k, v, a, b))
            o[:, start:end], kept = _step(*part, A_log, dt_bias, initial_state[first][None], scale)
            initial_state[ssm_state_indices[n].long()] = kept[0]
    return o, initial_state


def _sglangs_drafts(
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source,
    initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
    is_kda=False, lower_bound=None, disable_state_update=False, intermediate_states_buffer=None,
    intermediate_state_indices=None, cache_steps=None, retrieve_parent_token=None,
):  # fmt: skip
    assert use_qk_l2norm_in_kernel
    assert disable_state_update
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0)
    o = torch.zeros_like(v)
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        slot = int(initial_state_indices[n])
        if slot >= 0:
            part = [x[:, start:end] for x in (q, k, v, a[None], b[None])]
            o[:, start:end], kept = _step(
                *part, A_log, dt_bias, initial_state_source[slot][None], scale
            )
            intermediate_states_buffer[intermediate_state_indices[n], :cache_steps] = kept[0]
    return o


def _convolve(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, out=None
):  # fmt: skip
    slots = conv_state_indices.long()
    tokens = torch.cat([conv_state[slots], x[..., None]], -1)
    conv_state[slots] = tokens[..., 1:]
    assert bias is None
    assert activation == "silu"
    y = silu((tokens * weight).float().sum(-1))  # in bf16 Triton rounds products to it, too
    return (x if out is None else out).copy_(y)  # vLLM's way; SGLang has no `out`


def engine_function(engine: str, file: str, name: str) -> Any:
    """Instead of engine_functions.function."""
    if name == "causal_conv1d_update":
        if engine == "vllm":
            return _convolve
        return lambda x, *args, **options: _convolve(x, *args, out=torch.empty_like(x), **options)
    if "packed_decode" in name:
        return _engine_packed({"vllm": 0, "sglang": -1}[engine])
    return {"vllm": _vllms_drafts, "sglang": _sglangs_drafts}[engine]


def gated_norm(o: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """Instead of the Triton kernel."""
    return gdn.gated_rms_norm(o, z.unsqueeze(1), weight).to(o.dtype)
