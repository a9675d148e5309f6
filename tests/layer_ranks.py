"""The layer of examples/gdn_over_ranks.py: five steps of training on one, two and four ranks."""

import sys

import torch
import torch.distributed as dist

from tests.ranks import ROOT, serve

sys.path.insert(0, str(ROOT / "examples"))

from gdn_over_ranks import GatedDeltaNet, of_this_rank


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
