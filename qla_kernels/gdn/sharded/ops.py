"""The torch.library operators on one rank's part of sequences.

    gdn_shard_fwd, gdn_shard_bwd   gdn_fwd and gdn_bwd, with the exchange between ranks inside

They are collective: every rank of the group named `group` calls them, in the same order. `before`
is the number of ranks before this one that hold its first sequence, `after` the number of ranks
after it that hold its last one. CPU tensors go to sharded/cpu.py, CUDA tensors to
sharded/launch.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from qla_kernels.gdn.ops import GdnBackward, state_dtype
from qla_kernels.gdn.sharded.context import Facts
from qla_kernels.operators import define, imported_late
from qla_kernels.tile.constants import CHUNK

# use_qk_l2norm_in_kernel: q and k were normalised before; only compared with the other ranks' flag
_OPTIONS = """bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, float warm_log_bound,
    str group, int before, int after, bool use_qk_l2norm_in_kernel=False"""
SCHEMAS = {
    "gdn_shard_fwd": f"""(
        Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale,
        Tensor cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? A_log, Tensor? dt_bias, *, bool is_train,
        {_OPTIONS}
    ) -> (Tensor o, Tensor? entered, Tensor? g_cum, Tensor? A)""",
    "gdn_shard_bwd": f"""(
        Tensor q, Tensor k, Tensor v, Tensor g_cum, Tensor beta, Tensor A, Tensor do, float scale,
        Tensor cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? entered,
        Tensor? g, Tensor? A_log, Tensor? dt_bias, *,
        {_OPTIONS}
    ) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dg,
          Tensor? dA_log, Tensor? ddt_bias)""",
}


class ShardForward(NamedTuple):
    """Results of gdn_shard_fwd; fp32 is fp64 where q is fp64."""

    o: Tensor  # [1, T, HV, V] in q's dtype
    entered: Tensor | None  # [HV, V, K] fp32: the state that enters from other ranks; None if none
    g_cum: Tensor | None  # as in gdn_fwd's results
    A: Tensor | None


def facts_of(step: str, q: Tensor, v: Tensor, scale: float, *settings: object) -> Facts:
    """Returns the facts of a call, which are equal on all ranks and part of the links' checksums.

    step: "forward" or "backward".
    """
    return step, str(q.dtype), tuple(q.shape[2:]), tuple(v.shape[2:]), scale, *settings


def without_dh0(done: GdnBackward) -> tuple[Tensor | None, ...]:
    """Returns the results of gdn_shard_bwd: all gradients but dh0.

    The ranks before this one get the gradient of the state that enters here from the links.
    """
    return done.dq, done.dk, done.dv, done.dbeta, done.dg, done.dA_log, done.ddt_bias


def _fake_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    *_: Tensor | None,
    is_train: bool,
    before: int,
    **__: Any,
) -> ShardForward:
    B, T, HV, V = v.shape
    wide = state_dtype(q)
    return ShardForward(
        o=q.new_empty(v.shape),
        entered=q.new_empty(HV, V, q.shape[-1], dtype=wide) if before else None,
        g_cum=q.new_empty(g.shape, dtype=wide) if is_train else None,
        A=q.new_empty(B, T, HV, CHUNK) if is_train else None,
    )


def _fake_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cum: Tensor,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    entered: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    like = (q, k, v, beta, g_cum if g is None else g, A_log, dt_bias)
    return tuple(None if x is None else x.new_empty(x.shape) for x in like)


def _defined(op: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    home = "qla_kernels.gdn.sharded"
    on_cuda, on_cpu = imported_late(f"{home}.launch", op), imported_late(f"{home}.cpu", op)
    return define(op, SCHEMAS[op], fake, CUDA=on_cuda, CPU=on_cpu)


gdn_shard_fwd = _defined("gdn_shard_fwd", _fake_fwd)
gdn_shard_bwd = _defined("gdn_shard_bwd", _fake_bwd)
