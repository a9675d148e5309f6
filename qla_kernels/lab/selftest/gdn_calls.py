"""Arguments of whole calls, as a model would pass them, and the definition's answer to them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from qla_kernels.gdn.call import Call as Record
from qla_kernels.gdn.call import Options
from qla_kernels.runtime.cpu import reference

Call = dict[str, Any]  # keyword arguments of chunk_gated_delta_rule

DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def call(
    lengths: list[int] | None = None,
    batch: int = 2,
    tokens: int = 70,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (16, 8),
    dtype: torch.dtype = torch.float64,
    gates: torch.dtype | None = None,
    padding: int = 0,
    activations: bool = False,
    **others: Any,
) -> Call:
    """Returns a dense batch, or packed `lengths` with `padding` tokens of NaN behind them.

    With `activations`, q, k, g and beta are what comes before the norm, the gate and the sigmoid.
    """
    (H, HV), (K, V) = heads, sizes
    gates = gates or dtype
    x: Call = dict(others)
    if lengths is not None:
        batch, tokens = 1, sum(lengths) + padding
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    num_seqs = batch if lengths is None else len(lengths)
    q, k = (torch.randn(batch, tokens, H, K, dtype=dtype) for _ in range(2))
    g, beta = (torch.randn(batch, tokens, HV, dtype=gates) for _ in range(2))
    x["v"] = torch.randn(batch, tokens, HV, V, dtype=dtype)
    state = (V, K) if others.get("state_v_first") else (K, V)
    x["initial_state"] = torch.randn(num_seqs, HV, *state, dtype=gates)
    if activations:
        x |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
        x |= {"use_beta_sigmoid_in_kernel": True}
        x |= {"A_log": torch.linspace(-4, 2, HV, dtype=gates)}
        x |= {"dt_bias": torch.randn(HV, dtype=gates)}
    else:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        g, beta = -(g.exp()), beta.sigmoid()
    x |= {"q": q, "k": k, "g": g, "beta": beta}
    if padding:
        for name in ("q", "k", "v", "g", "beta"):
            x[name][:, tokens - padding :] = torch.nan
    return x


def small(
    lengths: list[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    size: int = 128,
    **others: Any,
) -> Call:
    """Returns a call that the kernels run, of one key head and two value heads."""
    others = {"heads": (1, 2), "sizes": (size, size), **others}
    padding = others.pop("padding", 3 if lengths else 0)
    return call(lengths, dtype=dtype, gates=torch.float32, padding=padding, **others)


def records(x: Call, **changed: Any) -> tuple[Record, Options]:
    """Returns the call as operators take it, with `changed` in place of some arguments."""
    x = {"scale": None} | x | changed
    if x["scale"] is None:
        x["scale"] = x["q"].shape[-1] ** -0.5
    given = Record(**{name: x[name] for name in Record._fields if name in x})
    return given, Options(**{name: x[name] for name in Options._fields if name in x})


def leaves(x: Call) -> Call:
    """Returns the same call on fresh leaf tensors."""
    return {
        name: value.detach().clone().requires_grad_() if name in DIFFERENTIABLE else value
        for name, value in x.items()
    }


def definition(x: Call) -> tuple[Tensor, Tensor]:
    """Returns o and the final state by the recurrence, differentiable by autograd."""
    gdn = reference().gdn
    # Tokens of no sequence: their gradient is 0, but autograd would make 0 * NaN of it.
    q, k, v, g, beta = (x[name].nan_to_num() for name in ("q", "k", "v", "g", "beta"))
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = gdn.l2norm(q), gdn.l2norm(k)
    if x.get("use_gate_in_kernel"):
        g = gdn.gate(g, x["A_log"], x.get("dt_bias"))
    if x.get("use_beta_sigmoid_in_kernel"):
        beta = gdn.beta_sigmoid(beta, x.get("allow_neg_eigval", False))
    h0, v_first = x.get("initial_state"), x.get("state_v_first")
    h0 = h0.mT if v_first and h0 is not None else h0
    o, final = gdn.recurrent(q, k, v, g, beta, x.get("scale"), h0, x.get("cu_seqlens"))
    return o, final.mT if v_first else final


def gradients(outputs: tuple[Tensor | None, ...], inputs: Call) -> dict[str, Tensor]:
    """Returns gradients of a fixed random projection of the outputs, for every tensor leaf."""
    generator = torch.Generator().manual_seed(1)
    names = [n for n in DIFFERENTIABLE if n in inputs and inputs[n].requires_grad]
    used = [x for x in outputs if x is not None]
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in used]
    found = torch.autograd.grad(used, [inputs[n] for n in names], weights)
    return dict(zip(names, found, strict=True))
