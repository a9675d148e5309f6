"""Schedules: arithmetic, and the refusals that save a hang or a launch failure on the GPU."""

from dataclasses import replace

import pytest

from qla_kernels.tile.schedule import ONE, Named, Role, Schedule

STATE = Role("state", 4, 216, ("kv_full", "u_ready"), ("h_ready", "kv_free"), "h", ("wgmma",))
VALUE = Role("value", 4, 216, ("kv_full", "h_ready"), ("u_ready", "kv_free"), "u | o", ("wgmma",))
LOAD = Role("load", 3, 24, ("kv_free",), (("kv_full", ONE),), "k, v", ("tma_load",))
SPARE = Role("spare", 1, 24)
GOOD = Schedule((STATE, VALUE, LOAD, SPARE), rings={"kv": 2}, smem_bytes=204_800)


def test_spans_follow_the_order_of_roles() -> None:
    assert GOOD.threads == 384
    spans = {role.name: (GOOD.start(role.name), GOOD.end(role.name)) for role in GOOD.roles}
    assert spans == {
        "state": (0, 128),
        "value": (128, 256),
        "load": (256, 352),
        "spare": (352, 384),
    }
    assert GOOD.role("load") is LOAD
    with pytest.raises(KeyError, match="no role 'mma'; roles are state, value, load, spare"):
        GOOD.end("mma")


def test_arrivals_add_up_all_signals() -> None:
    assert GOOD.barriers == ("kv_full", "u_ready", "h_ready", "kv_free")
    arrivals = {barrier: GOOD.arrivals(barrier) for barrier in GOOD.barriers}
    assert arrivals == {"kv_full": 1, "u_ready": 128, "h_ready": 128, "kv_free": 256}
    assert GOOD.slots("kv_full") == GOOD.slots("kv_free") == 2
    assert GOOD.slots("h_ready") == 1
    with pytest.raises(KeyError, match="no barrier 'q_full'"):
        GOOD.arrivals("q_full")


def test_groups_that_take_turns_arrive_one_at_a_time() -> None:
    twins = Role("twins", 8, 112, ("ab_full", "c_free"), ("ab_free", ("c_full", 128)))
    helper = Role("helper", 1, 112, ("ab_free", "c_full"), ("ab_full", "c_free", "c_full"))
    schedule = Schedule((twins, helper))
    assert (schedule.arrivals("ab_free"), schedule.arrivals("c_full")) == (256, 128 + 32)
    assert "| ab_free, c_full (128) |" in schedule.table()


@pytest.mark.parametrize("arrivals", [0, 129])
def test_refuses_arrivals_that_a_role_has_no_threads_for(arrivals: int) -> None:
    with pytest.raises(
        ValueError, match=f"role a: {arrivals} arrivals on x_full; need 1 to its 128"
    ):
        Role("a", 4, 64, (), (("x_full", arrivals),))


def test_table() -> None:
    assert GOOD.table().splitlines() == [
        "| role | warps | regs | waits for | computes | signals | uses |",
        "|---|---|---|---|---|---|---|",
        "| state | 0-3 | 216 | kv_full, u_ready | h | h_ready, kv_free | wgmma |",
        "| value | 4-7 | 216 | kv_full, h_ready | u \\| o | u_ready, kv_free | wgmma |",
        "| load | 8-10 | 24 | kv_free | k, v | kv_full (1) | tma_load |",
        "| spare | 11 | 24 |  |  |  |  |",
    ]


def test_roles_of_one_register_count_are_not_specialised() -> None:
    one = Schedule((Role("row", 2, 255),))  # any number of warps: no set_max_nreg to share
    assert not one.specialised
    assert one.threads == 64
    assert GOOD.specialised


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ((), "without roles"),
        ((replace(LOAD, waits=()), LOAD), "role names repeat: load, load"),
        ((Role("a", 33, 32),), "1056 threads; a CTA has at most 1024"),
        ((Role("a", 4, 256),), "256 registers a thread; need 1 to 255"),
        ((Role("a", 4, 64), Role("b", 3, 24)), "7 warps; roles with different registers"),
        ((Role("a", 3, 64), Role("b", 1, 24)), "warpgroup 0: set_max_nreg acts on whole"),
        ((Role("a", 4, 64), Role("b", 4, 20)), "role b: set_max_nreg 20; need a multiple of 8"),
        ((Role("a", 1, 264), Role("b", 3, 264), Role("c", 4, 24)), "role a: set_max_nreg 264"),
        ((Role("a", 4, 64, ("x_full",)),), "waited on but never signalled: x_full"),
        ((Role("a", 4, 64, (), ("x_full",)),), "signalled but never waited on: x_full"),
        (
            (Role("a", 8, 240), Role("b", 4, 64)),
            r"1 CTAs per SM need 69632 registers \(a 256x240, b 128x64\); an SM has 65536",
        ),
    ],
)
def test_refuses_roles(roles: tuple[Role, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Schedule(roles)


def test_refuses_a_role_that_is_none() -> None:
    with pytest.raises(ValueError, match="role a: 0 warps; need at least 1"):
        Role("a", 0, 64)
    with pytest.raises(ValueError, match=r"role a uses \['tensor cores'\]; known are wgmma, mma"):
        Role("a", 4, 64, uses=("tensor cores",))


def test_refuses_rings_without_barriers() -> None:
    with pytest.raises(ValueError, match="ring q: no barrier q_<event> in any role"):
        replace(GOOD, rings={"kv": 2, "q": 2})
    with pytest.raises(ValueError, match="ring kv: 0 slots"):
        replace(GOOD, rings={"kv": 0})


def test_ids_of_named_barriers_follow_one_another() -> None:
    named = {"turn": Named(256, copies=2, used=False), "solve": Named(128, copies=3)}
    schedule = replace(GOOD, named=named)
    assert [*schedule.ids("turn"), *schedule.ids("solve")] == [8, 9, 10, 11, 12]
    assert schedule.first_id("solve") == 10
    with pytest.raises(KeyError, match="no named barrier 'meet'; there are turn, solve"):
        schedule.first_id("meet")


@pytest.mark.parametrize(
    ("barrier", "said"),
    [
        (Named(128, copies=0), "named barrier turn: 0 copies; need at least 1"),
        (Named(100), "named barrier turn: for 100 threads; need whole warps, 32 to the CTA's 384"),
        (Named(416), "named barrier turn: for 416 threads"),
        (Named(128, copies=9), "named barrier turn: its ids end at 16; the hardware's end at 15"),
    ],
)
def test_refuses_named_barriers(barrier: Named, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(GOOD, named={"turn": barrier})


def test_budgets_count_every_resident_cta() -> None:
    small = Schedule((Role("a", 4, 128),), smem_bytes=57_344, ctas_per_sm=4)
    assert small.ctas_per_sm == 4  # 4 x (56 KiB + the system's 1 KiB) fills the 228 KiB
    with pytest.raises(ValueError, match="4 CTAs per SM need 233476 B shared memory"):
        replace(small, smem_bytes=57_345)
    with pytest.raises(ValueError, match="5 CTAs per SM need 81920 registers"):
        replace(small, ctas_per_sm=5)
    with pytest.raises(ValueError, match="232449 B shared memory; a CTA has 232448"):
        Schedule((Role("a", 4, 128),), smem_bytes=232_449)


def test_roles_share_what_the_cta_starts_with() -> None:
    """An SM has 65536 registers, 170.7 for each of 384 threads; a thread starts with 168."""
    full = (replace(STATE, regs=240), replace(VALUE, regs=240), LOAD, SPARE)
    assert Schedule(full).threads * 168 == 240 * 256 + 24 * 128
    over = (*full[:2], replace(LOAD, regs=32), replace(SPARE, regs=32))
    with pytest.raises(
        ValueError,
        match=r"roles ask for 65536 registers \(.*\); a CTA starts with at most 168 x 384 = 64512, "
        r"and set_max_nreg would wait for ever: take 1024 from some role",
    ):
        Schedule(over)
    alike = Schedule((Role("row", 12, 170),))  # no set_max_nreg: nothing to wait for
    assert not alike.specialised
    half = (Role("a", 4, 104), Role("b", 4, 152))  # 128 a thread where two CTAs share an SM
    assert Schedule(half, ctas_per_sm=2).threads == 256
    with pytest.raises(ValueError, match="starts with at most 80 x 256 = 20480"):
        Schedule((Role("a", 4, 48), Role("b", 4, 120)), ctas_per_sm=3)


def test_spills_need_a_number_and_a_reason() -> None:
    declared = replace(GOOD, spill_bytes=16, spill_reason="once per CTA, outside the loop")
    assert declared.spill_bytes == 16
    for half in ({"spill_bytes": 16}, {"spill_reason": "no number"}):
        with pytest.raises(ValueError, match="spills need both a number and a reason"):
            replace(GOOD, **half)


class Barrier:
    """Stands for a TileLang barrier buffer: knows its length, and which slot was asked for."""

    def __init__(self, slots: int) -> None:
        self.shape = (slots,)

    def __getitem__(self, slot: int) -> int:
        return slot


def test_ring_follows_slots_and_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tilelang", reason="ring.py emits TileLang operations")
    from qla_kernels.tile import ring

    monkeypatch.setattr(ring.T, "barrier_wait", lambda slot, parity: (slot, parity))
    monkeypatch.setattr(ring.T, "barrier_arrive", lambda slot: slot)
    three = ring.Ring(Barrier(3), Barrier(3), stages=3)
    steps = range(7)
    slots = [0, 1, 2, 0, 1, 2, 0]
    assert [three.wait(i) for i in steps] == list(zip(slots, [0, 0, 0, 1, 1, 1, 0], strict=True))
    acquired = [three.acquire(i) for i in steps]  # the first pass waits for nothing: parity 1
    assert acquired == list(zip(slots, [1, 1, 1, 0, 0, 0, 1], strict=True))
    for method in (three.slot, three.barrier, three.commit, three.release):
        assert [method(i) for i in steps] == slots


def test_named_barriers_take_ids_and_counts_from_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tilelang", reason="named_barriers.py emits TileLang operations")
    from qla_kernels.tile import named_barriers

    monkeypatch.setattr(named_barriers.T, "call_extern", lambda *call: call[1:])
    schedule = replace(GOOD, named={"turn": Named(256, copies=2), "solve": Named(128)})
    turn = named_barriers.NamedBarrier(schedule, "turn")
    solve = named_barriers.NamedBarrier(schedule, "solve")
    assert turn.sync(1) == ("tl::__sync_thread_partial", 9, 256)
    assert turn.arrive() == ("tl::__named_barrier_arrive", 8, 256)
    assert solve.sync() == ("tl::__sync_thread_partial", 10, 128)
    assert solve.id() == 10


def test_ring_refuses_barriers_of_another_length() -> None:
    pytest.importorskip("tilelang", reason="ring.py emits TileLang operations")
    from qla_kernels.tile.ring import Ring

    with pytest.raises(ValueError, match=r"ring of 3 stages: its free barrier has shape \[2\]"):
        Ring(Barrier(3), Barrier(2), stages=3)
