"""A convolution and a gated delta net over ranks: five steps of training on one, two and four."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import silu

from qla_kernels import causal_conv1d, chunk_gated_delta_rule
from qla_kernels.gdn import build_cp_context
from tests.ranks import serve


def from_rank(before, rows, group):
    """The rows of the rank `before` places before this one, in a circle."""
    everyone = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, rows, group)
    return everyone[(dist.get_rank(group) - before) % len(everyone)]


class RowsOfRankBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return from_rank(1, rows.contiguous(), group)

    @staticmethod
    def backward(ctx, d_rows):  # their gradient is needed where they come from
        return from_rank(-1, d_rows.contiguous(), ctx.group), None


class GatedDeltaNet(nn.Module):
    def __init__(self, width, H, HV, K, V, taps=4):
        super().__init__()
        self.sizes, self.heads = (H * K, H * K, HV * V), ((H, K), (H, K), (HV, V))
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.z = nn.Linear(width, HV * V, bias=False)  # the output gate
        self.gates = nn.Linear(width, 2 * HV, bias=False)
        self.conv = nn.Parameter(torch.randn(sum(self.sizes), taps) / taps)
        self.A_log = nn.Parameter(torch.rand(HV).log())
        self.dt_bias = nn.Parameter(torch.ones(HV))
        self.norm, self.out = nn.RMSNorm(V), nn.Linear(HV * V, width, bias=False)

    def forward(self, x, context, conv_bounds):  # x: [tokens of this rank, width]
        y, lead = self.qkv(x), self.conv.shape[1] - 1
        y = torch.cat([RowsOfRankBefore.apply(y[-lead:], context.group), y])
        y = causal_conv1d(y, self.conv, None, "silu", conv_bounds)[lead:]
        q, k, v = (
            part.unflatten(1, heads)[None]
            for part, heads in zip(y.split(self.sizes, 1), self.heads, strict=True)
        )
        a, b = self.gates(x)[None].chunk(2, 2)
        o, _ = chunk_gated_delta_rule(
            *(q, k, v, a, b), cp_context=context, A_log=self.A_log, dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        return self.out(self.norm(o[0]).flatten(1) * silu(self.z(x)))


def of_this_rank(cu_seqlens, lead, group=None):
    """The rule's context, and the convolution's bounds: `lead` rows stand before this rank's."""
    context, bounds = build_cp_context(cu_seqlens, group), cu_seqlens.tolist()
    first = bounds[-1] // dist.get_world_size(group) * dist.get_rank(group)  # its first token
    before = min(lead, first - max(b for b in bounds if b <= first))  # of the same sequence
    start = cu_seqlens.new_tensor([0, lead - before])
    return context, torch.cat([start, context.cu_seqlens[1:] + lead])


def losses(rank, world, group=None):
    """Returns the losses of five steps; every rank has its part of the tokens."""
    torch.manual_seed(0)  # the same weights and the same batch on every rank
    layer = GatedDeltaNet(width=64, H=2, HV=4, K=16, V=16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    cu_seqlens = torch.tensor([0, 127, 192, 256])  # three sequences
    x, target = (whole.chunk(world)[rank] for whole in torch.randn(2, 256, 64))
    for _ in range(5):
        context, conv_bounds = of_this_rank(cu_seqlens, 3, group)
        loss = (layer(x, context, conv_bounds) - target).square().sum() / 256  # the batch's
        loss.backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad, group=group)  # a sum: each rank has its tokens' part
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach(), group=group)
        yield total.item()


def results(rank):
    groups = {world: dist.new_group([*range(world)]) for world in (1, 2, 4)}
    for world, group in groups.items():
        yield f"{world}", [*losses(rank, world, group)] if rank < world else []


if __name__ == "__main__":
    serve(results)
