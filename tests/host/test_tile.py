"""The device vocabulary: what a schedule's data say, and what is allocated from them."""

from typing import Any

import pytest

from qla_kernels.tile.schedule import ONE, Role, Schedule, Tile

TILES = {"k": Tile((2, 64, 32), "bfloat16", swizzled=True), "sum": Tile((3,), "float32", align=16)}
ROLES = (
    Role("sum", 4, 40, ("k_full", "turn_full", "tail_full", "x_free", "x_in"), ("k_free",)),
    Role(
        "load",
        4,
        40,
        ("k_free",),
        (("k_full", ONE), ("turn_full", 32), "turn_free", "tail_full", "x_free", "x_in"),
    ),
    Role("spare", 4, 40, ("turn_free",)),
)
PLAN = Schedule(ROLES, rings={"k": 2, "turn": 4, "tail": 3}, tiles=TILES)


def test_shared_memory_is_that_of_tiles_and_barriers() -> None:
    assert TILES["k"].bytes == 2 * 64 * 32 * 2
    assert TILES["sum"].bytes == 16
    assert PLAN.smem_bytes == 8192 + 16 + 1024
    assert Schedule((Role("sum", 4, 40),), tiles=TILES).smem_bytes == 8192 + 16
    assert Schedule((Role("sum", 4, 40),), tiles=TILES, smem_bytes=9999).smem_bytes == 9999


def test_a_kernel_allocates_what_its_schedule_declares() -> None:
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    import qla_kernels.tile.language as T
    from qla_kernels.tile.record import Variables
    from qla_kernels.tile.ring import Ring, RingInTurns
    from qla_kernels.tile.rings import rings
    from qla_kernels.tile.strided import strided
    from qla_kernels.tile.tiles import tiles

    seen: dict[str, Any] = {}
    tokens = T.dynamic("tokens")

    @T.prim_func
    def kernel(
        k: strided("k", "token", (tokens, 32), "bfloat16"),
        x: strided("x", "token column", (tokens, 32), "float32"),
    ):
        with T.Kernel(1, threads=PLAN.threads) as _:
            s = tiles(PLAN)
            ring = rings(PLAN, slots={"turn": 3})
            place = Variables("begin length")
            place["begin"] = tokens
            place["length"] = place.begin
            place["length"] += 1
            if place.length > 2:
                x[place.begin, 0] = s.sum[0]
            seen.update(s=s, ring=ring, place=place)

    code = kernel.script()
    for line in (
        's_k = T.sblock_alloc_buffer((2, 64, 32), "bfloat16", scope="shared.dyn")',
        's_sum = T.sblock_alloc_buffer((3,), scope="shared.dyn")',
        'k_full = T.sblock_alloc_buffer((2,), "uint64", scope="shared.barrier")',
        "length[0] = length[0] + 1",
    ):
        assert line in code
    ring = seen["ring"]
    assert type(ring.k) is Ring and (ring.k.stages, ring.k.full.name) == (2, "k_full")
    assert type(ring.turn) is RingInTurns and (ring.turn.slots, ring.turn.stages) == (3, 4)
    assert ring.tail.name == "tail_full" and tuple(ring.tail.shape) == (3,)
    assert (ring.x_free.name, ring.x_in.name) == ("x_free", "x_in")
    k, x = kernel.buffer_map.values()
    assert [str(stride) for stride in k.strides] == ["k_token", "1"]
    assert [str(stride) for stride in x.strides] == ["x_token", "x_column"]


def test_a_tensor_has_a_stride_for_each_dimension() -> None:
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    from qla_kernels.tile.strided import strided

    with pytest.raises(ValueError, match=r"tensor q: 1 axes \(token\) of 3 dimensions"):
        strided("q", "token", (1, 2, 3), "float32")
