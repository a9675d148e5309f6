"""What two ranks of a ring find within torch.compile, for tests.ranks; the other two do nothing."""

from collections.abc import Iterator
from typing import Any

from tests.ranks import serve
from tests.sparse_ring_ranks import PATIENCE, problem, shards


def compiles(rank: int) -> Iterator[tuple[str, Any]]:
    """Collectives within torch.compile, on two ranks: they end a graph."""
    import torch
    import torch.distributed as dist

    from qla_kernels.sparse_ring import (
        Dense,
        RingGroups,
        StripedLayout,
        VerticalSlash,
        build_index,
        sparse_ring_attention,
    )

    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = RingGroups.create(groups[rank // 2], side_timeout=PATIENCE)
    layout = StripedLayout(2)
    if rank > 1:  # two compilers are enough
        return
    x = problem(2, torch.float64)
    for pattern in (VerticalSlash(0.5, 0.6), Dense()):
        for schedule in ("allgather", "ring"):
            leaves = shards(x, layout, group.rank)

            def layer(q, k, v, pattern=pattern, schedule=schedule):
                around = {"group": group, "layout": layout, "pattern": pattern}
                o = sparse_ring_attention(2 * q, k * 1, v * 1, schedule=schedule, **around)
                index = build_index(q, k, **around)
                return (o * 3).square() + index.v_cnt.sum()

            name = f"compiled {type(pattern).__name__} {schedule}"
            compiled = torch.compile(layer, backend="aot_eager")
            want = layer(*leaves)
            grads = torch.autograd.grad(want.sum(), leaves)
            same = True
            for _ in range(3):
                got = compiled(*leaves)
                both = zip(
                    (got, *torch.autograd.grad(got.sum(), leaves)), (want, *grads), strict=True
                )
                same &= all(torch.allclose(a, b, rtol=1e-13, atol=1e-13) for a, b in both)
            yield name, same
    leaf = shards(x, layout, group.rank)[1]
    whole = torch.compile(lambda k: layout.unshard(k * 2, 1, group) + 1, backend="aot_eager")(leaf)
    yield "compiled unshard", torch.equal(whole, x["k"] * 2 + 1)


if __name__ == "__main__":
    serve(compiles)
