"""The block over a packed tree and over whole sequences, and a step of decoding, by our kernels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

import qla_kernels

from ..harness.adapters import Call, Implementation
from .layers import LayerInputs, packed, whole_by_ours
from .mixing import OverTree
from .step import DecodeStep, StepInputs, gate_of
from .workloads import PARTS, HybridPart

Convolution = tuple[Tensor, Tensor, None, str]  # the last tokens, taps, no bias, activation
Rule = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # a, b, A_log, dt_bias, states, slots


def over_tree(workload: HybridPart, inputs: LayerInputs) -> Call:
    return packed(workload, inputs, OverTree(workload, inputs.x.device))


def in_one(rows: Tensor, rule: Rule, convolution: Convolution, z: Tensor, norm: Tensor) -> Tensor:
    return qla_kernels.decode_gated_delta_net(rows, *rule, *convolution, z=z, norm_weight=norm)


def in_two(rows: Tensor, rule: Rule, convolution: Convolution, z: Tensor, norm: Tensor) -> Tensor:
    """The same two launches by two calls: states are loaded after the convolution."""
    rows = qla_kernels.causal_conv1d_update(rows, *convolution, rule[-1])
    return qla_kernels.packed_decode_gated_delta_rule(rows, *rule, z=z, norm_weight=norm)


def apart(rows: Tensor, rule: Rule, convolution: Convolution, z: Tensor, norm: Tensor) -> Tensor:
    """Convolution and rule by us, norm and gate by torch, in launches of its own."""
    rows = qla_kernels.causal_conv1d_update(rows, *convolution, rule[-1])
    o = qla_kernels.packed_decode_gated_delta_rule(rows, *rule)
    return rms_norm(o, norm.shape, norm, 1e-6) * silu(z).unsqueeze(1)


class OursStep(Implementation):
    """A layer's step on pools in which sequence n has slot n."""

    name, label, distribution = "ours_step", "ours", "qla-kernels"
    module, needs_cuda = "qla_kernels", False
    lacks = dict.fromkeys(PARTS, "only decodes")
    step = staticmethod(in_one)

    def decoding(self, workload: DecodeStep, inputs: StepInputs) -> Call:
        assert inputs.last is not None, "a layer convolves"
        a, b = inputs.gates.unbind(1)
        A_log, dt_bias, taps, norm = inputs.weights
        rows, z = inputs.rows[:, : workload.channels], gate_of(workload, inputs)
        states, last = inputs.states.clone(), inputs.last.clone().mT
        slots = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        rule = a, b, A_log, dt_bias, states, slots
        run = partial(self.step, rows, rule, (last, taps, None, "silu"), z, norm)
        # a view of y, but no view of the pool: the harness overwrites results with NaN
        return Call.public(run, lambda y: {"o": y.transpose(0, 1), "ht": states.clone()})


def known(family: str) -> list[Implementation]:
    own: dict[str, Any] = {"distribution": "qla-kernels", "module": "qla_kernels.hybrid"}
    own |= {"needs_cuda": False, "lacks": {"decoding": "only trains"}}
    return [
        Implementation(name="ours", label="ours", prepare=over_tree, **own),
        Implementation(name="whole", label="whole sequences", prepare=whole_by_ours, **own),
        OursStep(),
        OursStep(name="ours_step_two", label="ours, two calls", step=in_two),
        OursStep(name="ours_step_apart", label="ours, torch's norm", step=apart),
    ]
