"""The public functions on CPU tensors, by the generated sm_90a code: for `--emulated`.

The operators' launches are called in place of the reference, and what they compile runs in
tests/emulator. Each kernel takes g++ 20 to 60 s the first time, and is kept in build/emulator.
"""

import functools
import itertools
from typing import Any

import torch

from qla_kernels import device, jit
from qla_kernels.conv import launch as conv_launch
from qla_kernels.conv import ops as conv_ops
from qla_kernels.dualkv import launch as dualkv_launch
from qla_kernels.dualkv import ops as dualkv_ops
from qla_kernels.dualkv import tables
from qla_kernels.dualkv.shapes import KEY_TILES
from qla_kernels.gdn import ops
from qla_kernels.gdn.decode import api as recurrent
from qla_kernels.gdn.decode import launch as launch_recurrent
from qla_kernels.gdn.launch import backward
from qla_kernels.gdn.launch import forward as launch
from qla_kernels.gdn.tree import launch as tree_launch
from qla_kernels.gdn.tree import ops as tree_ops
from qla_kernels.sparse_ring import build, ring, shard
from qla_kernels.sparse_ring import launch as sparse_launch
from tests.emulator import EmulatedKernel

SMS = 4  # so that plans for few SMs cut sequences into segments


@functools.cache
def _emulated(module: Any, variant: Any) -> EmulatedKernel:
    return EmulatedKernel(module.build(variant), module.PASS_CONFIGS)


def install() -> None:
    """For this process, and for good: fresh memory is NaN, and every launch has another seed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    seeds = itertools.count()
    jit.compile = lambda module, variant: (
        lambda *args: _emulated(module, variant)(*args, seed=next(seeds))
    )
    device.sm_count = lambda _: SMS
    ops.gdn_fwd, ops.gdn_bwd = launch.gdn_fwd, backward.gdn_bwd
    tree_ops.gdn_tree_fwd = tree_launch.gdn_tree_fwd
    tree_ops.gdn_tree_bwd = tree_launch.gdn_tree_bwd
    ops.l2norm_fwd, ops.l2norm_bwd = launch.l2norm_fwd, launch.l2norm_bwd
    recurrent.gdn_recurrent = launch_recurrent.gdn_recurrent
    recurrent.gdn_recurrent_slots = launch_recurrent.gdn_recurrent_slots
    conv_ops.conv_fwd, conv_ops.conv_bwd = conv_launch.conv_fwd, conv_launch.conv_bwd
    dualkv_ops.dualkv_fwd, dualkv_ops.dualkv_bwd = _dualkv_fwd, _dualkv_bwd
    for module in (build, ring, shard):
        module.tiles = lambda _: sparse_launch


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
