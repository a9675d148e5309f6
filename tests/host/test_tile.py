"""The device vocabulary: what a schedule's data say, and what is allocated from them."""

from typing import Any

import pytest

from qla_kernels.tile.schedule import ONE, Role, Schedule, Tile

TILES = {"k": Tile((2, 64, 64), "bfloat16", swizzled=True), "sum": Tile((3,), "float32", align=16)}
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
    assert TILES["k"].bytes == 2 * 64 * 64 * 2
    assert TILES["sum"].bytes == 16
    assert PLAN.smem_bytes == 16384 + 16 + 1024
    assert Schedule((Role("sum", 4, 40),), tiles=TILES).smem_bytes == 16384 + 16
    assert Schedule((Role("sum", 4, 40),), tiles=TILES, smem_bytes=9999).smem_bytes == 9999


def test_a_kernel_allocates_what_its_schedule_declares() -> None:
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    import qla_kernels.tile.language as T
    from qla_kernels.runtime.shared_memory import buffers_by_name
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
        o: strided("o", "token 32", (tokens, 4, 32), "float32"),
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

    assert "length[0] = length[0] + 1" in kernel.script()
    shared = {name: tuple(found[0].shape) for name, found in buffers_by_name(kernel).items()}
    barriers = {"k_full": 2, "k_free": 2, "turn_full": 4, "turn_free": 4, "tail_full": 3}
    barriers |= {"x_free": 1, "x_in": 1}
    tiles_in_code = {"s_k": (2, 64, 64), "s_sum": (3,)}
    assert shared == tiles_in_code | {name: (n,) for name, n in barriers.items()}
    names = [*shared]
    assert names.index("k_full") < names.index("k_free") < names.index("turn_full")
    assert names.index("x_in") < names.index("x_free"), "of other events: before full and free"
    ring = seen["ring"]
    assert (type(ring.k), ring.k.stages) == (Ring, 2)
    assert (type(ring.turn), ring.turn.slots, ring.turn.stages) == (RingInTurns, 3, 4)
    assert [x.name for x in (ring.tail, ring.x_free)] == ["tail_full", "x_free"]
    with pytest.raises(ValueError, match="slots of kv; the schedule has the rings k, turn, tail"):
        rings(PLAN, slots={"kv": 3})
    k, x, o = kernel.buffer_map.values()
    assert [str(stride) for stride in k.strides] == ["k_token", "1"]
    assert [str(stride) for stride in x.strides] == ["x_token", "x_column"]
    assert [str(stride) for stride in o.strides] == ["o_token", "32", "1"]


def test_a_tensor_has_no_more_axes_than_dimensions() -> None:
    pytest.importorskip("tilelang", reason="kernel files import TileLang")
    from qla_kernels.tile.strided import strided

    def strides(axes: str, shape: tuple[int, ...]) -> list[str]:
        return [str(stride) for stride in strided("q", axes, shape, "float32").strides]

    assert strides("token", (9, 3, 4, 5)) == ["q_token", "20", "5", "1"]
    assert strides("token 1 head", (9, 3, 4)) == ["q_token", "1", "q_head"]
    with pytest.raises(ValueError, match=r"tensor q: 2 axes \(token head\); need at most one"):
        strided("q", "token head", (1,), "float32")
