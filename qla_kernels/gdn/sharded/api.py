"""The public function with a cp_context: checks a call, compares it with other ranks', and runs it.

A rank whose call is wrong must not leave the other ranks waiting. It sends its error to them before
it raises, and every rank of the group raises.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qla_kernels.gdn.autograd import apply_sharded, normalised
from qla_kernels.gdn.call import Call, Options
from qla_kernels.gdn.contents import check_contents
from qla_kernels.gdn.keywords import scale_of
from qla_kernels.gdn.sharded import ops as shard_ops
from qla_kernels.gdn.sharded.context import (
    TOKENS_FACT,
    LinePlace,
    agree,
    group_of,
    layout_refused,
    place_of,
)
from qla_kernels.gdn.sharded.layouts import CONTIGUOUS, ShardPlace
from qla_kernels.gdn.validate import (
    OP,
    Gate,
    check_activations,
    check_tensors,
    refusal,
)
from qla_kernels.runtime import contents, device
from qla_kernels.runtime.contents import checks_contents
from qla_kernels.runtime.derivatives import refuse_forward_mode
from qla_kernels.runtime.errors import Unsupported, need
from qla_kernels.runtime.sm90 import dtype_name, require


class CheckedCall(NamedTuple):
    """A rank's call after its own checks; it is not yet compared with other ranks'."""

    call: Call
    place: LinePlace
    facts: dict[str, object]  # these must be the same on all ranks


def sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cp_context: Any,
    gate: Gate,
    options: Options,
) -> Tensor:
    """Checks a call with a cp_context, compares it with other ranks', runs it and returns o.

    Raises:
        ValueError: the arguments on this rank or another one are wrong, or differ between ranks.
        Unsupported: this version cannot run the call.
        ShardError: ranks could not exchange data.
    """
    try:
        _refuse_states(initial_state is not None or options.output_final_state)
        call, place, facts = _checked(q, k, v, g, beta, scale, cp_context, gate, options)
    except Exception as problem:  # every kind of error is sent to the other ranks
        tell(problem, cp_context, q)
        raise
    if not torch.compiler.is_compiling():
        with device.of(q):  # torch may exchange objects on the current GPU
            agree(OP, place, facts, None, q.is_cuda)
    before, after = ([x.before for x in place.stretches], [x.after for x in place.stretches])
    shard = ShardPlace(place.group.group_name, before, after, place.front)
    if options.use_qk_l2norm_in_kernel:
        call = normalised(call, options.is_train)
    if options.is_train:
        return apply_sharded(call, options, shard)
    o: Tensor = shard_ops.gdn_shard_fwd(call, options, shard).o
    return o


def tell(problem: Exception, cp_context: Any, q: object) -> None:
    """Sends this rank's error to the ranks of its group, and raises it here and on the other ranks.

    Does nothing, and leaves raising to the caller, while torch.compile traces, without an
    initialised process group, and on a rank outside the group.
    """
    if torch.compiler.is_compiling() or not dist.is_initialized():
        return
    group = group_of(OP, cp_context)
    if dist.get_rank(group) < 0:  # not one of them
        return
    nobody = LinePlace(group, group.rank(), group.size(), CONTIGUOUS, 0, None, [])
    with device.of(q) if isinstance(q, Tensor) else nullcontext():
        agree(OP, nobody, {}, problem, False)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    cp_context: Any,
    gate: Gate,
    options: Options,
) -> CheckedCall:
    if (reason := layout_refused(cp_context)) is not None:
        raise Unsupported(need(OP, *reason))
    place = place_of(OP, cp_context)
    bounds = cp_context.cu_seqlens, getattr(cp_context, "cu_seqlens_cpu", None)
    check_tensors(OP, q, k, v, g, beta, None, *bounds)
    check_activations(OP, v, gate, options)
    require(refusal(q, k, v, cp_context=cp_context))
    call = Call(q, k, v, g, beta, scale_of(OP, scale, q), None, *bounds, *gate.parameters())
    refuse_forward_mode(OP, *call)
    _check_open_ends(place, q.shape[1], len(bounds[0]))
    if not torch.compiler.is_compiling():
        if checks_contents():
            check_contents(OP, call)
        _check_part(place, q.shape[1], *bounds)
    others = options._asdict()
    facts = {
        "gradients": others.pop("is_train"),
        "layout": place.layout,
        "heads and sizes": (q.shape[2], *v.shape[2:], q.shape[-1]),
        "dtype": dtype_name(q.dtype),
        "use_gate_in_kernel": gate.use_gate_in_kernel,
        "scale": call.scale,
        TOKENS_FACT: q.shape[1],
        **others,
    }
    return CheckedCall(call, place, facts)


def _refuse_states(states: bool) -> None:
    if states:
        got = "initial_state or output_final_state with cp_context"
        needs = "neither: a sequence's ends may be on other ranks"
        raise ValueError(need(OP, got, needs, "drop it, or gather the sequence on one rank"))


def _check_open_ends(place: LinePlace, num_tokens: int, num_bounds: int) -> None:
    is_open = any(x.before or x.after for x in place.stretches)
    if is_open and (num_tokens == 0 or num_bounds < 2):
        got = "no token on a rank that a sequence goes through"
        fix = "make cp_context with build_cp_context"
        raise ValueError(need(OP, got, "at least one", fix))


def _check_part(
    place: LinePlace, num_tokens: int, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None
) -> None:
    """Raises ValueError if the context does not fit the number of tokens on this rank.

    Bounds that are only on a GPU are not checked.
    """
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    counts = [] if place.size is None else [2 * place.size]
    if known.is_cpu:
        counts.append(contents.check_bounds(OP, num_tokens, known))
    for here in counts:
        if here != num_tokens:
            got = f"{num_tokens} tokens, and cp_context says that {here} are here"
            fix = "pass each rank its part of q, k, v, g and beta"
            raise ValueError(need(OP, got, "this rank's tokens", fix))
    if place.size is not None and known.is_cpu and known[place.front] != place.size:
        got = f"cp_context whose first {place.front} sequences end at token {known[place.front]}"
        needs, fix = f"the first stretch's end, {place.size}", "make it with build_cp_context"
        raise ValueError(need(OP, got, needs, fix))
