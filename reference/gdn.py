"""The gated delta rule: its definition, and the activations around it.

Reading order: `recurrent` below is what the operation means; `gdn_chunked` is the algorithm,
`gdn_backward` its gradients written out by hand, `gdn_segments` the form that cuts long sequences,
`gdn_shards` what ranks that hold parts of sequences tell each other, `gdn_tree` sequences that
share their beginnings, `gdn_anchored` sequences that grow by a few tokens.

Everywhere: q, k [B,T,H,K]; v, o [B,T,HV,V]; g, beta [B,T,HV]; states [N,HV,K,V]. Value head h
reads key head h // (HV / H). With cu_seqlens [N+1], B is 1 and N sequences lie end to end in T;
tokens at or beyond cu_seqlens[-1] belong to none, are never used, and are 0 in every result. K and
V are arbitrary. fp64 inputs compute in fp64, all others in fp32.
"""

import torch
from einops import einsum, rearrange, reduce
from torch import Tensor

from .chunks import sequence_spans
from .gdn_anchored import Anchored, appended, rejected
from .gdn_backward import Backward, chunked_backward
from .gdn_chunked import Forward, chunked, compute_dtype
from .gdn_segments import segmented
from .gdn_shards import backward_link, forward_link
from .gdn_tree import TreeForward, tree_chunked, tree_chunked_backward
from .norm import gated_rms_norm

__all__ = [
    "Anchored",
    "Backward",
    "Forward",
    "TreeForward",
    "appended",
    "backward_link",
    "beta_sigmoid",
    "beta_sigmoid_backward",
    "chunked",
    "chunked_backward",
    "draft_recurrent",
    "forward_link",
    "gate",
    "gate_backward",
    "gated_rms_norm",
    "l2norm",
    "l2norm_backward",
    "recurrent",
    "rejected",
    "segmented",
    "tree_chunked",
    "tree_chunked_backward",
    "tree_recurrent",
]


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T;  o_t = scale S_t^T q_t.

    Decay first, then the delta correction: S <- e^g S;  S <- S + k (beta (v - k^T S))^T. Here beta
    may also be [B,T,HV,V], one for each column. Returns o and the state after each sequence.
    Differentiable by autograd.
    """
    B, T, H, K = q.shape
    dtype = compute_dtype(q)
    scale = scale if scale is not None else K**-0.5
    query, key = (rearrange(x.to(dtype), "b t h k -> (b t) h k") for x in (q, k))
    value = rearrange(v.to(dtype), "b t (h r) v -> (b t) h r v", h=H)
    decay = rearrange(g.to(dtype).exp(), "b t (h r) -> (b t) h r 1 1", h=H)
    weight = beta if beta.ndim == v.ndim else beta[..., None]
    weight = rearrange(weight.to(dtype), "b t (h r) v -> (b t) h r v", h=H)

    spans = sequence_spans(B, T, cu_seqlens).tolist()
    o, final = [value[:0]], []
    for n, (start, end) in enumerate(spans):
        state = value.new_zeros(*value.shape[1:3], K, value.shape[3])  # [h r k v]
        if initial_state is not None:
            state = rearrange(initial_state[n].to(dtype), "(h r) k v -> h r k v", h=H)
        for t in range(start, end):
            state = decay[t] * state
            remembered = einsum(key[t], state, "h k, h r k v -> h r v")
            correction = weight[t] * (value[t] - remembered)
            state = state + einsum(key[t], correction, "h k, h r v -> h r k v")
            o.append(scale * einsum(query[t], state, "h k, h r k v -> h r v")[None])
        final.append(rearrange(state, "h r k v -> (h r) k v"))
    o.append(torch.zeros_like(value[spans[-1][1] if spans else 0 :]))  # tokens of no sequence
    out = rearrange(torch.cat(o), "(b t) h r v -> b t (h r) v", b=B, t=T).to(q.dtype)
    return out, torch.stack(final) if final else value.new_zeros(0, v.shape[2], K, v.shape[3])


def tree_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    nodes: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`recurrent` over a prefix tree: each node continues from the state in which its parent ends.

    nodes [n, 3] as in `gdn_tree`, covering all tokens in order. Returns o and the state after each
    node [n, HV, K, V]. Differentiable by autograd.
    """
    o, states = [v[:, :0]], list[Tensor]()
    for first, end, parent in nodes.tolist():
        at = slice(None), slice(first, end)
        start = None if parent < 0 else states[parent][None]
        found, state = recurrent(q[at], k[at], v[at], g[at], beta[at], scale, start)
        o.append(found)
        states.append(state[0])
    nothing = v.new_zeros(0, v.shape[2], q.shape[-1], v.shape[3], dtype=compute_dtype(q))
    return torch.cat(o, 1), torch.stack(states) if states else nothing


def draft_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    parents: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`recurrent` over trees of drafts: a token starts from the state after its parent.

    parents [N, S] integers, S at least the longest sequence: of each token but a sequence's first
    an earlier token of that sequence, or a negative number for the initial state. None: of each
    token the one before. Returns o and the state after each token [B, T, HV, K, V], which is 0 for
    tokens of no sequence.
    """
    (B, T, HV, V), K = v.shape, q.shape[-1]
    o = torch.zeros_like(v, dtype=q.dtype)
    states = v.new_zeros(B, T, HV, K, V, dtype=compute_dtype(q))
    for n, (first, end) in enumerate(sequence_spans(B, T, cu_seqlens).tolist()):
        b = first // max(T, 1)
        first, end = first - b * T, end - b * T
        start = None if initial_state is None else initial_state[n : n + 1]
        for t in range(first, end):
            parent = t - first - 1 if parents is None or t == first else int(parents[n, t - first])
            before = start if parent < 0 else states[b, first + parent][None]
            at = slice(b, b + 1), slice(t, t + 1)
            found, state = recurrent(q[at], k[at], v[at], g[at], beta[at], scale, before)
            o[at], states[b, t] = found, state[0]
    return o, states


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """y = x (sum x^2 + eps)^-1/2 over the last axis, in x.dtype."""
    return _l2norm(x, eps)[0].to(x.dtype)


def l2norm_backward(x: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """dx = rstd (dy - y <dy, y>)."""
    y, rstd = _l2norm(x, eps)
    dy = dy.to(y.dtype)
    return (rstd * (dy - y * (dy * y).sum(-1, keepdim=True))).to(x.dtype)


def _l2norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(compute_dtype(x))
    rstd = (wide.square().sum(-1, keepdim=True) + eps).rsqrt()
    return wide * rstd, rstd


def gate(x: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """g = -exp(A_log) * softplus(x + dt_bias), natural log; x [B,T,HV], A_log and dt_bias [HV]."""
    z = _gate_input(x, dt_bias)
    return -A_log.to(z.dtype).exp() * torch.logaddexp(z, torch.zeros_like(z))


def gate_backward(
    x: Tensor, A_log: Tensor, dt_bias: Tensor | None, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx = -exp(A_log) sigmoid(x + dt_bias) dg;  dA_log = sum_t dg g;  ddt_bias = sum_t dx."""
    z = _gate_input(x, dt_bias)
    dx = -A_log.to(z.dtype).exp() * z.sigmoid() * dg.to(z.dtype)
    dA_log = reduce(dg.to(z.dtype) * gate(x, A_log, dt_bias), "b t h -> h", "sum")
    ddt_bias = None if dt_bias is None else reduce(dx, "b t h -> h", "sum").to(dt_bias.dtype)
    return dx.to(x.dtype), dA_log.to(A_log.dtype), ddt_bias


def _gate_input(x: Tensor, dt_bias: Tensor | None) -> Tensor:
    wide = x.to(compute_dtype(x))
    return wide if dt_bias is None else wide + dt_bias.to(wide.dtype)


def beta_sigmoid(x: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """c sigmoid(x), c = 2 when I - beta k k^T may have negative eigenvalues, else 1."""
    return (2 if allow_neg_eigval else 1) * x.to(compute_dtype(x)).sigmoid()


def beta_sigmoid_backward(x: Tensor, dbeta: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """dx = c dbeta sigmoid (1 - sigmoid)."""
    y = x.to(compute_dtype(x)).sigmoid()
    return ((2 if allow_neg_eigval else 1) * dbeta.to(y.dtype) * y * (1 - y)).to(x.dtype)
