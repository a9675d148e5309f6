"""A rank of random calls that several processes make together, for launch_ranks.

Every rank draws the same case from its seed. The ranks of its group make the call, and send the
first of them what they got; that one puts it together and compares it with the definition of the
whole sequence.
"""

import json
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.gdn import build_cp_context
from qla_kernels.sparse_ring import (
    RingGroups,
    StripedLayout,
    build_index,
    sparse_ring_attention,
)
from tests.fuzz import attention_answers
from tests.fuzz.closeness import close
from tests.fuzz.draw import Draw
from tests.fuzz.gdn_call import TENSORS, answers, errors, tensors
from tests.fuzz.sparse import heads_of, mask_of, pattern, queries, verify_index
from tests.fuzz.sparse_layouts import held_by, layout, unit_of

TOGETHER = timedelta(seconds=300)  # a rank that waits longer has lost the others


class Group:
    """The ranks that make a call; `parts` is what each has to say, on the first of them."""

    def __init__(self, group: Any, rings: dict[int, RingGroups]) -> None:
        self.group, self.rings = group, rings  # rings by the size of a node
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def parts(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self.group)
        return found if self.rank == 0 else []


def context_parallel(d: Draw, at: Group) -> None:
    """chunk_gated_delta_rule with a cp_context of either layout, forward and backward."""
    context_layout = d.choose("context's layout", ("contiguous", "zigzag"))
    size = d.choose("tokens of a rank", (1, 2, 16, 33, 70)) * (1 + (context_layout == "zigzag"))
    T = size * at.world
    d.fixed |= {"packed": False, "rows": 1, "tokens": T}
    x = tensors(d)
    numbers = d.numbers("bounds")
    cuts = sorted(numbers.randint(0, T) for _ in range(d.whole("cuts", 0, 5)))
    x["cu_seqlens"] = torch.tensor([0, *cuts, T])
    names = [n for n in TENSORS if n in x and d.flag(f"gradient of {n}", 0.7)]
    names = [n for n in names if n not in ("A_log", "dt_bias") or x.get("use_gate_in_kernel")]
    do = d.normal("do", *x["v"].shape, dtype=x["v"].dtype)
    context = build_cp_context(x["cu_seqlens"], at.group, layout=context_layout)
    tokens = torch.arange(T).view(at.world, size)
    if context_layout == "zigzag":
        halves = tokens.view(2 * at.world, -1)
        tokens = torch.cat([halves[: at.world], halves[at.world :].flip(0)], 1)
    whole_rows = slice(at.rank * size, (at.rank + 1) * size)  # with the strides of the whole batch
    mine = tokens[at.rank] if context_layout == "zigzag" else whole_rows
    call = {n: _part(n, t, mine) for n, t in x.items() if n != "cu_seqlens"}
    leaves = {n: call[n].detach().clone().requires_grad_() for n in names}
    o, state = chunk_gated_delta_rule(**{**call, **leaves}, cp_context=context)
    assert state is None
    got = {"o": o.detach()}
    if names:
        grads = torch.autograd.grad(o, list(leaves.values()), do[:, mine])
        got |= {f"d{n}": grad for n, grad in zip(names, grads, strict=True)}
    everyone = at.parts(got)
    if not everyone:
        return
    want = answers(d, x, {"do": do} if names else {}, names)
    for name in got:
        rows = [part[name] for part in everyone]
        if name in ("dA_log", "ddt_bias"):  # each rank's are those of its tokens, and rounded
            whole, roundings = sum(row.double() for row in rows).to(rows[0].dtype), at.world + 1
        else:
            whole, roundings = torch.cat(rows, 1)[:, tokens.flatten().argsort()], 2
        close(name, whole, want[name], errors(d, x, name != "o"), roundings)


def _part(name: str, value: Any, mine: slice) -> Any:
    return value[:, mine] if name in ("q", "k", "v", "g", "beta") else value


def ring(d: Draw, at: Group) -> None:
    """sparse_ring_attention and build_index: every layout and schedule, and what layouts move."""
    its = layout(d)
    while its.world != at.world:  # the group decides
        its = type(its)(at.world, its.stripe) if hasattr(its, "stripe") else type(its)(at.world)
    T = unit_of(its) * d.choose("units", (1, 2) if at.world < 4 else (1,))
    d.fixed["tokens"] = T
    x = queries(d, grads=False)
    names = [n for n in "qkv" if d.flag(f"gradient of {n}")]
    striped = isinstance(its, StripedLayout)
    schedule = d.choose("schedule", ("auto", "allgather", "ring", *["double_ring"] * striped))
    inner = d.choose("inner size", tuple(at.rings))
    settings = {n: x[n] for n in ("seqlen", "scale") if n in x}
    seqlen = x.get("seqlen", T)
    local = {n: its.shard(x[n], 1, at.rank).contiguous() for n in "qkv"}
    group, made = at.rings[inner], pattern(d, x)
    index = build_index(local["q"], local["k"], made, layout=its, group=group, **settings)
    lines = {"index": index} if d.flag("index is given") else {"pattern": made}
    leaves = {n: t.requires_grad_(n in names) for n, t in local.items()}
    o, lse, used = sparse_ring_attention(
        *leaves.values(),
        group=group,
        layout=its,
        schedule=schedule,
        chunks_per_launch=d.choose("chunks a launch", (None, 1, 2, 5)),
        return_lse=True,
        return_index=True,
        **lines,
        **settings,
    )
    B, _, H, D = x["q"].shape
    do, dlse = d.normal("do", B, T, H, D, dtype=o.dtype), d.normal("dlse", B, H, T, dtype=lse.dtype)
    dlse[..., seqlen:] = 0
    mine = torch.tensor(held_by(its, T)[at.rank])
    got = {"o": o.detach(), "lse": lse.detach()}
    if names:
        upstream = [do[:, mine], dlse[..., mine]]
        grads = torch.autograd.grad([o, lse], [leaves[n] for n in names], upstream)
        got |= {f"d{n}": grad for n, grad in zip(names, grads, strict=True)}
    got["unshard"] = its.unshard(local["k"].detach(), 1, group)
    assert torch.equal(got["unshard"], x["k"]), "unshard"
    other = layout(Draw(d.target, d.seed + 1, {"world": at.world}))
    if T % unit_of(other) == 0:
        theirs = other.shard(x["k"], 1, at.rank)
        assert torch.equal(its.exchange(theirs, 1, other, group), local["k"]), "exchange"
    everyone = at.parts((got, [t.tolist() for t in (*index[:3], *used[:3])]))
    if not everyone:
        return
    assert all(said == everyone[0][1] for _, said in everyone), "one index on all ranks"
    assert heads_of(index) == heads_of(used), "the index that was used"
    whole = {n: x[n] for n in ("q", "k")} | settings | {"pattern": made}
    verify_index(d, whole, index)
    order = torch.tensor([t for tokens in held_by(its, T) for t in tokens]).argsort()
    given = {n: x[n] for n in "qkv"} | ({"do": do, "dlse": dlse} if names else {})
    scale = x.get("scale") or D**-0.5
    want = attention_answers.answers(d, given, names, mask_of(index, seqlen), scale)
    for name in got:
        if name != "unshard":
            axis = 2 if name == "lse" else 1
            rows = torch.cat([part[name] for part, _ in everyone], axis)
            attention_answers.compare(d, name, rows.index_select(axis, order), want[name], o.dtype)


CASES: dict[str, Callable[[Draw, Group], None]] = {
    "ranks.context_parallel": context_parallel,
    "ranks.ring": ring,
}


def groups(world: int) -> list[Group]:
    """This rank's groups: of all ranks, and of each smaller number of neighbours."""
    found = []
    for size in range(world, 1, -1):
        sets = [list(range(n, min(n + size, world))) for n in range(0, world, size)]
        made = [dist.new_group(ranks, timeout=TOGETHER) for ranks in sets]
        own = next(g for g, ranks in zip(made, sets, strict=True) if dist.get_rank() in ranks)
        rings = {}
        for inner in range(1, size + 1):
            mine = sets[dist.get_rank() // size]
            if size % inner == 0:
                ring_of = RingGroups.create(own, inner if len(mine) == size else len(mine))
                rings[inner] = ring_of
        if dist.get_world_size(own) == size:
            found.append(Group(own, rings))
    return found


def main(folder: Path, port: int, rank: int, world: int) -> None:
    """Of the cases in plan.json: what failed, by (name, seed), and how many were done."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TOGETHER)
    mine = {group.world: group for group in groups(world)}
    failures = []
    plan = json.loads((folder / "plan.json").read_text())
    for name, seed in plan:
        d = Draw(name, seed)
        size = d.choose("world", tuple(range(2, world + 1)))
        wrong = None
        if size in mine:
            d.fixed["world"] = size
            try:
                CASES[name](d, mine[size])
            except Exception as error:
                where = traceback.format_exc() if not isinstance(error, AssertionError) else ""
                wrong = f"rank {rank}: {type(error).__name__}: {error} {where}"
        if wrong is not None:
            failures.append((name, seed, wrong, str(d)))
        (folder / f"{rank}.json").write_text(json.dumps({"failures": failures, "at": [name, seed]}))
        dist.barrier()  # nobody runs ahead: whose turn it is says who is lost
    (folder / f"{rank}.json").write_text(json.dumps({"failures": failures, "at": None}))
    os._exit(0)  # torch would wait for those that died
