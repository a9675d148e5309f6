"""Attacks on what a batch does with logits, and on plans of micro-batches."""

from typing import Any

import torch
from torch import Tensor

import qla_kernels
from tests.fuzz import definitions
from tests.fuzz.closeness import close, inside, wanted, wide
from tests.fuzz.draw import FLOATS, Draw
from tests.fuzz.dualkv_packing import tree_call
from tests.fuzz.target import Call, Target


def logprobs_call(d: Draw) -> Call:
    x = tree_call(d)
    batch = qla_kernels.pack_prefix_tree(x["sequences"], loss_mask=x["loss_mask"])
    dtype, vocabulary = d.choose("dtype", FLOATS), d.choose("columns", (4, 5, 70))
    logits = d.choose("gain", (1, 10)) * d.normal("logits", len(batch.src_rows), vocabulary)
    logits = d.strided("logits", logits.to(dtype))
    return {
        "batch": batch,
        "logits": logits.requires_grad_() if d.flag("gradient") else logits,
        "temperature": d.choose("temperature", (1.0, 0.7, 2, 0.05)),
        "entropy": d.flag("entropy"),
    }


def gather_logprobs(batch: Any, **x: Any) -> Any:
    return batch.gather_logprobs(**x)


def verify_logprobs(d: Draw, x: Call, result: Any) -> None:
    batch, logits = x["batch"], x["logits"]
    its = logits.dtype
    results = dict(
        zip(("logprobs", "entropy"), result if x["entropy"] else (result,), strict=False)
    )
    leaves = ["logits"] if logits.requires_grad else []
    given = {"logits": logits} | {f"d{n}": d.normal(f"d{n}", len(batch.targets)) for n in results}
    if leaves:
        upstream = [given[f"d{n}"].to(r.dtype) for n, r in results.items()]
        given |= {f"d{n}": g for n, g in zip(results, upstream, strict=True)}
        (results["dlogits"],) = torch.autograd.grad(list(results.values()), logits, upstream)

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        t["logits"].requires_grad_()
        z = t["logits"]
        found = dict(
            zip(
                ("logprobs", "entropy"),
                definitions.logprobs(
                    z, batch.src_inv.tolist(), batch.targets.tolist(), float(x["temperature"])
                ),
                strict=True,
            )
        )
        loss = sum((found[n] * t[f"d{n}"]).sum() for n in found if f"d{n}" in t) + 0 * z.sum()
        return found | {"dlogits": torch.autograd.grad(loss, z)[0]}

    want = wanted(run, given)
    for name, got in results.items():
        assert got.dtype == (its if name == "dlogits" else wide(its))
        size = given["logits"].abs().max().item() if len(batch.src_rows) else 0
        # log p and e^(z - lse) have the absolute rounding of numbers as large as z
        rough = 1 + size / float(x["temperature"])
        swing = want[name].swings[0] + rough * max(1, got.numel()) ** 0.5
        close(name, got, want[name]._replace(swings=(swing,)), [inside(its)])


def hidden_call(d: Draw) -> Call:
    x = tree_call(d)
    batch = qla_kernels.pack_prefix_tree(x["sequences"], loss_mask=x["loss_mask"])
    dtype, vocabulary = d.choose("dtype", FLOATS), d.choose("columns", (4, 5, 70))
    rows = len(batch.src_rows) if d.flag("rows of targets") else batch.num_tokens
    width = d.choose("width", (1, 3, 16))
    hidden = d.strided("hidden", d.normal("hidden", rows, width).to(dtype))
    weight = d.choose("gain", (1, 10)) * d.normal("weight", vocabulary, width)
    head = d.strided("weight", weight.to(dtype))
    return {
        "batch": batch,
        "hidden": hidden.requires_grad_() if d.flag("gradient") else hidden,
        "head": head.requires_grad_() if d.flag("gradient of weight") else head,
        "temperature": d.choose("temperature", (1.0, 0.7, 2, 0.05)),
        "softcap": d.choose("softcap", (None, 3.0)),
        "entropy": d.flag("entropy"),
    }


def logprobs_of_hidden(batch: Any, **x: Any) -> Any:
    return batch.logprobs(**x)


def verify_hidden(d: Draw, x: Call, result: Any) -> None:
    batch, its = x["batch"], x["hidden"].dtype
    names = ("logprobs", "entropy") if x["entropy"] else ("logprobs",)
    results = dict(zip(names, result if x["entropy"] else (result,), strict=True))
    given = {name: x[name] for name in ("hidden", "head")}
    upstream = {n: d.normal(f"d{n}", len(batch.targets)).to(r.dtype) for n, r in results.items()}
    given |= {f"d{n}": g for n, g in upstream.items()}
    leaves = [name for name in ("hidden", "head") if x[name].requires_grad]
    if leaves:
        of = [x[name] for name in leaves]
        grads = torch.autograd.grad(list(results.values()), of, list(upstream.values()))
        results |= {f"grad {name}": g for name, g in zip(leaves, grads, strict=True)}
    keeps = batch.src_rows if len(x["hidden"]) == batch.num_tokens else slice(None)

    def run(t: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in ("hidden", "head"):
            t[name].requires_grad_()
        z = t["hidden"][keeps] @ t["head"].T
        if x["softcap"] is not None:
            z = x["softcap"] * torch.tanh(z / x["softcap"])
        found = dict(
            zip(
                ("logprobs", "entropy"),
                definitions.logprobs(
                    z, batch.src_inv.tolist(), batch.targets.tolist(), float(x["temperature"])
                ),
                strict=True,
            )
        )
        loss = sum((found[n] * t[f"d{n}"]).sum() for n in names) + 0 * z.sum()
        of = torch.autograd.grad(loss, [t["hidden"], t["head"]])
        return found | {"grad hidden": of[0], "grad head": of[1]}

    want = wanted(run, given)
    for name, got in results.items():
        assert got.dtype == (its if name.startswith("grad") else wide(its))
        size = (x["hidden"].detach().double() @ x["head"].detach().double().T).abs()
        # log p and e^(z - lse) have the absolute rounding of numbers as large as z
        rough = 1 + (size.max().item() if size.numel() else 0) / float(x["temperature"])
        swing = want[name].swings[0] + rough * max(1, got.numel()) ** 0.5
        close(name, got, want[name]._replace(swings=(swing,)), [inside(its)])


def plan_call(d: Draw) -> Call:
    groups = []
    for n in range(d.whole("groups", 0, 12)):
        lengths = d.several(f"responses {n}", (0, 1, 10, 50, 200), 9)
        groups.append((d.choose(f"prompt {n}", (1, 0, 30, 100)), lengths))
    return {
        "groups": groups,
        "max_tokens": d.choose("max_tokens", (300, 310, 500, 2000)),
        "ranks": d.choose("ranks", (1, 2, 3, 7)),
        "token_cost": d.choose("token_cost", (24_000.0, 0.0, 1.0)),
    }


def verify_plan(d: Draw, x: Call, plan: Any) -> None:
    """Every response once, with its prompt; batches that fit; as many on every rank."""
    groups, most = x["groups"], x["max_tokens"]
    assert len(plan) == x.get("ranks", 1), "ranks"
    assert len({len(batches) for batches in plan}) == 1, "as many micro-batches on every rank"
    met: dict[int, list[tuple[int, ...]]] = {}

    def cost(batch: Any) -> float:
        total = 0.0
        for group, chosen in batch:
            P, lengths = groups[group][0], [groups[group][1][i] for i in chosen]
            pairs = P * (P + 1) // 2 + sum(P * r + r * (r + 1) // 2 for r in lengths)
            total += x["token_cost"] * (P + sum(lengths)) + pairs
        return total

    for batches in plan:
        costs = [cost(batch) for batch in batches]
        assert costs == sorted(costs, reverse=True), "costliest first"
        for batch in batches:
            tokens = 0
            for group, chosen in batch:
                met.setdefault(group, []).append(chosen)
                tokens += groups[group][0] + sum(groups[group][1][i] for i in chosen)
            assert tokens <= most, f"{tokens} tokens in a micro-batch"
    for n, (prompt, lengths) in enumerate(groups):
        pieces = met.pop(n)
        assert sorted(i for piece in pieces for i in piece) == list(range(len(lengths)))
        assert len(pieces) == 1 or prompt + sum(lengths) > most, "a group was cut that fits"
    assert not met


TARGETS = {
    "dualkv.gather_logprobs": Target(
        logprobs_call, gather_logprobs, verify_logprobs, ("SharedBatch",), given=("batch",)
    ),
    "dualkv.logprobs": Target(
        hidden_call, logprobs_of_hidden, verify_hidden, ("SharedBatch",), given=("batch",)
    ),
    "dualkv.plan_microbatches": Target(
        plan_call, qla_kernels.plan_microbatches, verify_plan, ("plan_microbatches", "Piece")
    ),
}
