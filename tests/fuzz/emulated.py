"""The public functions on CPU tensors, by the generated sm_90a code: for `--emulated`.

The operators' launches are called in place of the reference, and qla_kernels.lab.emulator runs what
they compile. Each kernel takes g++ 20 to 60 s the first time, and is kept in build/emulator.
"""

import functools
import itertools
from typing import Any

import torch

from qla_kernels.conv import launch as conv_launch
from qla_kernels.conv import ops as conv_ops
from qla_kernels.dualkv import launch as dualkv_launch
from qla_kernels.dualkv import ops as dualkv_ops
from qla_kernels.dualkv import tables
from qla_kernels.dualkv.shapes import KEY_TILES
from qla_kernels.gdn import ops
from qla_kernels.gdn.decode import api as recurrent
from qla_kernels.gdn.decode import launch as launch_recurrent
from qla_kernels.gdn.decode import packed, verify
from qla_kernels.gdn.launch import backward
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.tree import launch as tree_launch
from qla_kernels.gdn.tree import ops as tree_ops
from qla_kernels.lab.emulator import case
from qla_kernels.norm import launch as norm_launch
from qla_kernels.norm import ops as norm_ops
from qla_kernels.runtime import device, jit
from qla_kernels.sparse_ring import build, gradients, ring
from qla_kernels.sparse_ring import launch as sparse_launch
from tests import lowered

SMS = 4  # so that plans for few SMs cut sequences into segments


_emulated = functools.cache(case.emulated)


def install() -> None:
    """For this process, and for good: fresh memory is NaN, and every launch has another seed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    lowered.unpack()
    seeds = itertools.count()
    jit.compile = lambda module, variant: (
        lambda *args: _emulated(module, variant)(*args, seed=next(seeds))
    )
    device.sm_count = lambda _: SMS
    _replace(ops, launch, "gdn_fwd", "l2norm_fwd")
    _replace(ops, backward, "gdn_bwd", "l2norm_bwd")
    _replace(tree_ops, tree_launch, "gdn_tree_fwd", "gdn_tree_bwd")
    _replace(recurrent, launch_recurrent, "gdn_recurrent", "gdn_recurrent_slots")
    _replace(packed, launch_recurrent, "gdn_recurrent_slots", "gdn_recurrent_norm")
    _replace(verify, launch_recurrent, "gdn_verify")
    _run_on_cpu(conv_ops, conv_launch, "conv_fwd", "conv_bwd", "conv_update")
    _run_on_cpu(norm_ops, norm_launch, "gated_norm_fwd", "gated_norm_bwd")
    dualkv_ops.dualkv_fwd.on_cpu, dualkv_ops.dualkv_bwd.on_cpu = _dualkv_fwd, _dualkv_bwd
    for module in (build, gradients, ring):
        assert callable(module.launches)
        module.launches = lambda _: sparse_launch


def _replace(module: Any, by: Any, *names: str) -> None:
    """Gives functions of `module` those of `by`; a name that is no longer there is an error."""
    for name in names:
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        setattr(module, name, getattr(by, name))


def _run_on_cpu(operators: Any, launches: Any, *names: str) -> None:
    """Lets the operators of a module run launch code on CPU tensors."""
    for name in names:
        getattr(operators, name).on_cpu = getattr(launches, name)


def _dualkv_fwd(q: Any, k: Any, v: Any, nodes: Any, scale: float, q_shift: int) -> Any:
    return dualkv_launch.dualkv_fwd(q, k, v, _tables(q, k, nodes, q_shift), scale, q_shift)


def _dualkv_bwd(do: Any, q: Any, k: Any, *rest: Any) -> Any:
    *middle, nodes, scale, q_shift, deterministic = rest
    built = _tables(q, k, nodes, q_shift)
    return dualkv_launch.dualkv_bwd(do, q, k, *middle, built, scale, q_shift, deterministic)


def _tables(q: Any, k: Any, nodes: Any, q_shift: int) -> Any:
    """CPU tensors come with the nodes alone; kernels want what is built of them."""
    built = tables.build(nodes[0], q.shape[1], k.shape[1], q_shift, KEY_TILES[q.shape[2]])
    return tables.views(tables.one_buffer(built), built)
