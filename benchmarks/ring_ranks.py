"""Times the ranks of a ring one after the other on one device, without their transfers.

    python -m benchmarks.ring_ranks --worlds 4,8 --tokens 131072
    python -m benchmarks.ring_ranks --worlds 4 --tokens 1024 --device cpu

What each rank of a larger machine would compute is launched here as it would be there, with memory
of its own where chunks of others would arrive. Of each layout and schedule: forward and backward of
the slowest rank, what that takes beyond its share of the time on one device (`overhead`), and the
slowest rank by the mean of all (`makespan`). Transfers, and how far they hide, need the machine:
`benchmarks.ring`.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from qla_kernels.sparse_ring import RingGroups

from .ring.layer import Clock
from .ring.links import Silent
from .ring.rows import Row, alone, layer_of, mask_options, node_size, tell, ways


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    tell(measured(options), options.out)
    dist.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ring_ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mask_options(parser)
    parser.add_argument("--worlds", type=lambda x: [int(n) for n in x.split(",")], default=[4, 8])
    return parser.parse_args(arguments)


def measured(options: argparse.Namespace) -> Iterator[Row]:
    clock = Clock(options.device, options.samples, options.queued)
    for tokens in options.tokens:
        layer = layer_of(options, tokens)
        yield (one := alone(layer, clock))
        for world in options.worlds:
            by_rank = [
                ways(ring_of(r, world, 1), ring_of(r, world, options.nodes), tokens, None)
                for r in range(world)
            ]
            for way_of_ranks in zip(*by_rank, strict=True):
                calls = (layer.calls(way) for way in way_of_ranks)
                taken = [(clock.slowest(f), clock.slowest(b)) for f, b in calls]
                forward, backward = map(max, zip(*taken, strict=True))
                slowest, mean = max(map(sum, taken)), sum(map(sum, taken)) / world
                yield Row(
                    way_of_ranks[0].what,
                    tokens,
                    world,
                    forward,
                    backward,
                    layer.work / slowest / 1e9,
                    overhead=slowest / (one.both_ms / world) - 1,
                    makespan=slowest / mean,
                )


def ring_of(rank: int, world: int, nodes: int) -> RingGroups:
    """A rank of a ring that nobody else is in."""
    inner = node_size(world, nodes)
    return RingGroups(
        Silent(None, rank, world),
        Silent(None, rank % inner, inner),
        Silent(None, rank // inner, world // inner),
        agreement=None,
    )


if __name__ == "__main__":
    main()
