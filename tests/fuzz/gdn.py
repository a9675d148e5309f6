"""Attacks on the gated delta rule: whole sequences, one direction at a time, token by token."""

from typing import Any

import torch
from torch import Tensor

import qla_kernels
from qla_kernels import gdn
from tests.fuzz import definitions
from tests.fuzz.closeness import close, wanted, wide
from tests.fuzz.draw import Draw
from tests.fuzz.dualkv_attention import Forest, forest
from tests.fuzz.gdn_call import (
    DEEPEST,
    OWN,
    TENSORS,
    answers,
    bounds_of,
    classes,
    definition,
    errors,
    live,
    rounded_inputs,
    states,
    tensors,
)
from tests.fuzz.target import Call, Target

TREE_LENGTHS = (0, 1, 2, 3, 20, 65)
SHORT = (0, 1, 2, 3, 7)  # tokens of a sequence that is decoded


def chunk_call(d: Draw) -> Call:
    x = tensors(d, (0, 1, 63, 65, 130) if d.kernels else (0, 1, 2, 3, 30, 63, 64, 65, 100, 130))
    states(d, x)
    for name in TENSORS:
        if name in x and d.flag(f"gradient of {name}", 0.6):
            x[name] = x[name].detach().requires_grad_()
    keywords: dict[str, tuple[Any, ...]] = {
        "chunk_size": (64, 16, 32),
        "chunk_indices": (torch.zeros(1, 2, dtype=torch.int64),),
        "exact": (False, True),
        "batch_invariant": (False, True),
        "warm_log_bound": (-12.0, -30, -float("inf")),
        "enable_fwd_cp_cache": (False, True, None),
    }
    name = d.choose("keyword", (None, *keywords))
    if name is not None:
        x[name] = d.choose(name, keywords[name])
    return x


def tree_call(d: Draw) -> Call:
    nodes, layout = forest(d, d.choose("made", ("from_lengths", "from_forest")), TREE_LENGTHS)
    x = tensors(d, of_tree=layout.num_tokens)
    for name in TENSORS:
        if name in x and d.flag(f"gradient of {name}", 0.6):
            x[name] = x[name].detach().requires_grad_()
    x["state_v_first"] = d.flag("V first")
    x["output_final_state"] = d.flag("final state", 0.5)
    return x | {"layout": layout, "forest": nodes}


def over_tree(forest: Forest, **x: Any) -> Any:
    """`forest` is for the definition."""
    return qla_kernels.shared_prefix_gated_delta_rule(**x)


def verify_chunk(d: Draw, x: Call, result: Any) -> None:
    o, final = result
    results = {"o": o, "final_state": final}
    assert (final is not None) == bool(x.get("output_final_state")), "final state or none"
    names = [n for n in TENSORS if isinstance(x.get(n), Tensor) and x[n].requires_grad]
    assert gdn.refusal(x["q"], x["k"], x["v"], cp_context=x.get("cp_context")) is None
    assert gdn.wants_gradients(x.get(n) for n in TENSORS) == bool(names)
    names = [n for n in names if x.get("use_gate_in_kernel") or n not in ("A_log", "dt_bias")]
    upstream = {}
    use = d.choose("results that are used", ("both", "o", "final_state"))
    if names and o.requires_grad:
        if use != "final_state" or final is None:
            upstream["do"] = upstream_of(d, x, o)
        if use != "o" and final is not None:
            upstream["dht"] = d.strided("dht", d.normal("dht", *final.shape, dtype=final.dtype))
    names = names if upstream else []
    if names:
        pairs = [(n, g) for n, g in (("o", "do"), ("final_state", "dht")) if g in upstream]
        grads = torch.autograd.grad(
            [results[n] for n, _ in pairs], [x[n] for n in names], [upstream[g] for _, g in pairs]
        )
        results |= {f"d{n}": grad for n, grad in zip(names, grads, strict=True)}
    compare(d, x, results, answers(d, x, upstream, names))


def upstream_of(d: Draw, x: Call, o: Tensor) -> Tensor:
    do = d.normal("do", *o.shape, dtype=o.dtype)
    if x.get("cu_seqlens") is not None:
        do[:, live(x) :] = torch.nan  # nobody's
        return d.strided("do", do, OWN)
    return d.strided("do", do)


def compare(d: Draw, x: Call, results: dict[str, Tensor | None], want: dict[str, Any]) -> None:
    """Every result there is, and its dtype."""
    for name, got in results.items():
        if got is None:
            continue
        backward = name not in ("o", "final_state")
        its = (
            wide(x["q"].dtype) if name == "final_state" else x[name[1:] if backward else "q"].dtype
        )
        assert got.dtype == its, f"{name} is {got.dtype}, not {its}"
        if name != "final_state":  # tokens of no sequence have no numbers
            assert name[1:] in ("initial_state", "A_log", "dt_bias") or not got[:, live(x) :].any()
        roundings = 2 if backward and x.get("use_qk_l2norm_in_kernel") else 1
        operands = x["q"].dtype if d.kernels else None
        close(name, got, want[name], errors(d, x, backward), roundings, operands)


def forward_call(d: Draw) -> Call:
    x = tensors(d, norm=False)
    states(d, x)
    x["is_train"] = d.choose("is_train", (None, True, False))
    x["output_h"] = d.flag("output_h") and (not d.kernels or "cu_seqlens_cpu" in x)
    x["enable_fwd_cp_cache"] = d.choose("cache", (False, True, None))
    x["auto_cp"] = d.flag("auto_cp")
    if d.flag("out"):
        x["out"] = d.strided("out", torch.full_like(x["v"], 7.0).contiguous(), OWN)
    return x


def verify_forward(d: Draw, x: Call, result: Any) -> None:
    g_cum, A, o, h, final, cache = result
    train = x.get("is_train") is None or bool(x["is_train"])
    given = (g_cum, A, h, final, cache)
    asked = (train, train, x.get("output_h"), x.get("output_final_state", True))
    for got, want in zip(given, (*asked, x.get("enable_fwd_cp_cache")), strict=True):
        assert (got is not None) == bool(want), "results that were asked for"
    if x.get("out") is not None:
        assert o is x["out"]

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        done = definition(x, t)
        swapped = (s.mT if x.get("state_v_first") else s for s in (done.final, done.chunks))
        final, h = swapped
        o = torch.nn.functional.pad(done.o, (0, 0, 0, 0, 0, x["q"].shape[1] - live(x)))
        return {"o": o, "final": final, "h": h}

    want = wanted(run, *rounded_inputs(x), classes(d, x))
    limit = errors(d, x, False)
    close("o", o, want["o"], limit)
    for name, got in (("final", final), ("h", h)):
        if got is not None and len(got):  # how many chunks no row has is not said
            close(name, got, want[name], limit)
    if train and not d.kernels:
        _verify_kept(d, x, g_cum, A)


def _verify_kept(d: Draw, x: Call, g_cum: Tensor, A: Tensor) -> None:
    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        end, beta = live(x), t["beta"]
        raw = x.get("use_gate_in_kernel")
        g = definitions.gate(t["g"], t["A_log"], t.get("dt_bias")) if raw else t["g"]
        if x.get("use_beta_sigmoid_in_kernel"):
            beta = (2 if x.get("allow_neg_eigval") else 1) * beta.sigmoid()
        k, g, beta = (y[:, :end] for y in (t["k"], g.clamp(min=-DEEPEST), beta))
        total = definitions.cumulated(g, bounds_of(x))
        rounded = total + t["rounding of g"][:, :end]
        return {"g_cum": total, "A": definitions.chunk_inverse(k, rounded, beta, bounds_of(x))}

    want = wanted(run, *rounded_inputs(x), classes(d, x))
    assert not g_cum[:, live(x) :].any()
    assert not A[:, live(x) :].any()
    exact = errors(d, x, rounded=False)
    close("g_cum", g_cum[:, : live(x)], want["g_cum"], exact)
    close("A", A[:, : live(x)], want["A"], exact)


def backward_call(d: Draw) -> Call:
    """Of what the forward returned."""
    x = tensors(d, activations=False)
    states(d, x)
    final = x.pop("output_final_state")
    if "initial_state" not in x:
        x.pop("state_v_first")
    g_cum, A, o, _, state, _ = qla_kernels.chunk_gated_delta_rule_fwd(**x)
    given = {**x, "g": g_cum, "A": A, "do": upstream_of(d, x, o)}
    if final:
        given["dht"] = d.strided("dht", d.normal("dht", *state.shape, dtype=state.dtype))
    return given


def verify_backward(d: Draw, given: Call, result: Any) -> None:
    names = ["q", "k", "v", "beta", "g", "initial_state"]
    dtypes = [given[n].dtype for n in names[:4]] + [wide(given["q"].dtype)] * 2
    g_cum, bounds = given["g"].detach().cpu().double(), bounds_of(given)
    g = g_cum.clone()  # as the forward was given them
    for start, end in definitions.chunk_bounds(live(given), bounds):
        g[:, start + 1 : end] = g_cum[:, start + 1 : end] - g_cum[:, start : end - 1]
    x = {**given, "g": g, "state_v_first": bool(given.get("state_v_first"))}
    if x.get("initial_state") is None:
        assert result[-1] is None
        names.pop()
    upstream = {n: given[n] for n in ("do", "dht") if given.get(n) is not None}
    want = answers(d, x, upstream, names)
    for name, dtype, got in zip(names, dtypes, result, strict=False):
        assert got.dtype == dtype, f"d{name} is {got.dtype}"
        assert name == "initial_state" or not got[:, live(x) :].any()
        operands = x["q"].dtype if d.kernels else None
        close(f"d{name}", got, want[f"d{name}"], errors(d, x), operands=operands)


def recurrent_call(d: Draw) -> Call:
    columns = d.flag("beta of columns", 0.3)
    x = tensors(d, SHORT, columns)
    pool = d.flag("pool", 0.5)
    slots = d.choose("slots", (9, 5, 30)) if pool else None
    x.pop("cu_seqlens_cpu", None)
    N = x["q"].shape[0] if "cu_seqlens" not in x else x["cu_seqlens"].shape[0] - 1
    states(d, x, slots)
    if pool:
        order = d.numbers("slots").sample(range(slots or 0), N)
        index = [
            i if d.uniform("padding slots", N)[n] < 0.8 else -1 - i for n, i in enumerate(order)
        ]
        x["state_indices"] = torch.tensor(index, dtype=torch.int64).to(d.device)
        if d.flag("narrow indices"):
            x["state_indices"] = x["state_indices"].int()
    for name in ("g", "beta"):
        raw = x.get("use_gate_in_kernel" if name == "g" else "use_beta_sigmoid_in_kernel")
        if not raw and d.flag(f"no {name}", 0.15):
            x[name] = None
    return x


def decode(**x: Any) -> Any:
    """Also what a pool held before, because the call replaces it."""
    pool = x.get("initial_state")
    held = pool.clone() if isinstance(pool, Tensor) else None
    return *qla_kernels.fused_recurrent_gated_delta_rule(**x), held


def verify_recurrent(d: Draw, x: Call, result: Any) -> None:
    o, final, held = result
    assert gdn.recurrent_refusal(x["q"], x["k"], x["v"]) is None
    assert (final is not None) == bool(x.get("output_final_state"))
    x, v = dict(x), x["v"]
    for name, value in (("g", 0.0), ("beta", 1.0)):
        if x.get(name) is None:
            x[name] = torch.full(v.shape[:3], value, dtype=v.dtype)
    exact = errors(d, x, rounded=False)  # nothing but results is rounded to 16 bits
    index, pool = x.get("state_indices"), x.get("initial_state")
    padding = torch.zeros(0, dtype=torch.long)
    if index is not None:
        assert final is None or final is pool
        slots = index.cpu().long()
        padding = (slots < 0).nonzero()[:, 0]
        x["initial_state"] = held[slots.clamp(min=0).to(pool.device)]
        want = answers(d, x, {}, [])
        used = slots[slots >= 0]
        others = torch.ones(len(pool), dtype=torch.bool).index_fill(0, used, False)
        assert torch.equal(pool.cpu()[others], held.cpu()[others]), "a slot nobody named"
        value = want["final_state"].value[slots >= 0]
        state = want["final_state"]._replace(value=value)
        computed = wide(x["q"].dtype)  # a pool may be wider
        close("slots", pool[used.to(pool.device)], state, exact, operands=computed)
    else:
        want = answers(d, x, {}, [])
        if final is not None:
            assert final.dtype == wide(x["q"].dtype)
            close("final_state", final, want["final_state"], exact)
    assert o.dtype == x["q"].dtype
    value = want["o"].value.clone()
    bounds = bounds_of(x)
    for n in padding.tolist():
        if bounds is None:
            value[n] = 0
        else:
            value[:, bounds[n] : bounds[n + 1]] = 0
    close("o", o, want["o"]._replace(value=value), exact)


TARGETS = {
    "gdn.chunk": Target(
        chunk_call,
        qla_kernels.chunk_gated_delta_rule,
        verify_chunk,
        ("chunk_gated_delta_rule", "chunk_gdn", "wants_gradients"),
    ),
    "gdn.tree": Target(
        tree_call,
        over_tree,
        verify_chunk,
        ("shared_prefix_gated_delta_rule",),
        given=("forest",),
    ),
    "gdn.forward": Target(
        forward_call,
        qla_kernels.chunk_gated_delta_rule_fwd,
        verify_forward,
        ("chunk_gated_delta_rule_fwd",),
    ),
    "gdn.backward": Target(
        backward_call,
        qla_kernels.chunk_gated_delta_rule_bwd,
        verify_backward,
        ("chunk_gated_delta_rule_bwd",),
        given=("cu_seqlens=None",),  # g_cum and A are then those of another call
    ),
    "gdn.recurrent": Target(
        recurrent_call,
        decode,
        verify_recurrent,
        ("fused_recurrent_gated_delta_rule", "fused_recurrent_gdn", "recurrent_refusal"),
    ),
}
