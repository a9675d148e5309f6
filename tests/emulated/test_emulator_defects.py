"""Kernels with one mistake each: the emulator reports it, or the numbers are wrong; none hangs."""

import math
import re

import pytest
import tilelang
import torch
from torch import Tensor

from qla_kernels.lab.emulator import EmulatedKernel, EmulationError, UnknownCodeError
from tests.compare import relative_l2
from tests.emulated import inline_samples, row_samples, samples
from tests.emulated import sample_cases as cases
from tests.emulated.sample_cases import Case

SEEDS = range(6)
WRONG = 0.02  # a relative error that no rounding explains


def outcome(kernel: EmulatedKernel, case: Case, seed: int) -> str:
    """The report; "wrong numbers" without one; "" when nothing was noticed."""
    case.output.fill_(math.nan)
    try:
        kernel(*case.arguments, seed=seed)
    except EmulationError as error:
        return str(error)
    return "" if relative_l2(case.output, case.want) < WRONG else "wrong numbers"


RACE = (
    r"copy by thread \d+: writes to byte \d+ of dynamic shared memory, where a wgmma of threads"
    r" 0..127 \(kernel.cpp:\d+\) may still read: the mbarrier that it waited for last, free\[\d\],"
    r" does not say so. Arrive, or release the slot, behind T.wait_wgmma;"
)
RING_REPORTS = {
    # slots count as free at half the arrivals, twice as often: what follows depends on the seed
    "arrive count": r"full\[\d\]: more arrivals than its count of 1|deadlock|wrong numbers",
    "parity": r"deadlock(?s:.*)threads 128\.\.159: waiting for free\[0\], parity 0: phase 0 is open"
    r" and needs 128 of 128 arrivals",
    "no full wait": r"full\[\d\]: more arrivals than its count of 1 in phase|full\[\d\]: data was"
    r" loaded in phase \d, but no thread waited for it|wrong numbers",
    "no wgmma wait": RACE,
    "early release": RACE,
    "load too much": r"full\[1\]: data was loaded in phase 2, but no thread waited for it",
    "load too little": r"deadlock(?s:.*)threads 0\.\.127: waiting for full\[0\], parity 0: phase 2",
    "no store wait": r"thread 0 ends without waiting for its TMA store",
}


@pytest.mark.parametrize("defect", samples.RING_DEFECTS)
def test_mistakes_with_a_ring_are_noticed_by_every_seed(defect: str) -> None:
    kernel = EmulatedKernel(samples.ring_gemm(defect), samples.FAST)
    case = cases.ring_gemm()
    for seed in SEEDS:
        assert re.search(RING_REPORTS[defect], outcome(kernel, case, seed)), f"seed {seed}"


PRODUCT = """__device__ void f(float* x) {
  __shared__ __align__(128) bfloat16_t ones[64 * 16];  // both operands, the second of 8 rows
  for (int i = threadIdx.x; i < 64 * 16; i += 128) ones[i] = bfloat16_t(1.0f);
  %s
  __syncthreads();
  tl::GmmaDescriptor at;
  tl::initialize_wgmma_descriptor<0, 8, 16>(at, ones);
  float c[4];
  constexpr auto bf16 = tl::DataType::kBFloat16;
  tl::wgmma_ss<bf16, bf16, tl::DataType::kFloat32, 64, 8, 16, false, false>(
      uint64_t(at), uint64_t(at), reinterpret_cast<uint32_t*>(c), false);
  tl::warpgroup_commit_batch();
  __syncthreads();
  %s
  tl::wait_wgmma<0>();
  x[threadIdx.x] = c[0];
}
"""


def test_what_a_product_reads_is_fenced(capsys) -> None:
    """A report alone, and NaN: a kernel may ignore a product."""
    x = torch.zeros(128)
    EmulatedKernel(inline_samples.calling(PRODUCT % ("", ""), "f"))(x)
    assert x.isnan().all()
    said = r"wgmma \(kernel.cpp:\d+\) reads a static .*, which thread \d+ wrote without T.fence_pr"
    assert re.search(said, capsys.readouterr().out)
    EmulatedKernel(inline_samples.calling(PRODUCT % ("tl::fence_proxy_async();", ""), "f"))(x)
    assert x.eq(16).all()
    assert not capsys.readouterr().out


def test_what_a_product_reads_stays() -> None:
    behind = "if (threadIdx.x == 0) ones[0] = bfloat16_t(3.0f);"
    source = PRODUCT % ("tl::fence_proxy_async();", behind)
    kernel = EmulatedKernel(inline_samples.calling(source, "f"))
    report = r"thread 0: writes to a static shared array, where a wgmma of threads 0..127 \S+ may"
    for seed in SEEDS:
        with pytest.raises(
            EmulationError, match=f"{report} still read: it has waited for no mbarr"
        ):
            kernel(torch.zeros(128), seed=seed)


def test_a_product_that_nobody_waits_for_is_reported() -> None:
    source = PRODUCT.replace("  tl::wait_wgmma<0>();\n", "") % ("tl::fence_proxy_async();", "")
    kernel = EmulatedKernel(inline_samples.calling(source, "f"))
    with pytest.raises(EmulationError, match=r"thread \d+ ends without waiting for its wgmma"):
        kernel(torch.zeros(128))


EARLIER = """__device__ void f(float* x) {
  __shared__ __align__(128) bfloat16_t ones[64 * 16];
  __shared__ uint64_t ready[1];
  __shared__ int seen[1];
  if (threadIdx.x == 0) tl::mbarrier_init(ready[0], 128), seen[0] = 0;
  for (int i = threadIdx.x; i < 64 * 16; i += 256) ones[i] = bfloat16_t(1.0f);
  tl::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x >= 128) {
    tl::mbarrier_wait(ready[0], 0);
    seen[0] = 1;
    return;
  }
  float c[2][4];
  constexpr auto bf16 = tl::DataType::kBFloat16;
  for (int i = 0; i < 2; ++i) {
    tl::GmmaDescriptor at;
    tl::initialize_wgmma_descriptor<0, 8, 16>(at, ones);
    tl::wgmma_ss<bf16, bf16, tl::DataType::kFloat32, 64, 8, 16, false, false>(
        uint64_t(at), uint64_t(at), reinterpret_cast<uint32_t*>(c[i]), false);
    tl::warpgroup_commit_batch();
  }
  tl::wait_wgmma<1>();
  tl::mbarrier_arrive(ready[0]);
  tl::wait_wgmma<0>();
  x[threadIdx.x] = (c[0][0] + c[1][0]) * AtomicLoad(seen, 0);  // no barrier orders it
}
"""


def test_threads_that_wait_for_an_earlier_product_go_on_before_the_later_one() -> None:
    """They once waited until all that any thread of the warpgroup had asked for was done."""
    kernel = EmulatedKernel(inline_samples.calling(EARLIER, "f", threads=256))
    results = []
    for seed in range(16):
        kernel(x := torch.zeros(128), seed=seed)
        results.append(x.unique().tolist())
    assert [32] in results  # all have signalled, and been seen, with the later one in flight
    assert [0, 32] in results or [0] in results


STORE = """__device__ void f(float* x) {
  __shared__ __align__(16) float s[4];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) s[i] = i;
    %s
    tl::tma_store(x, s, 16);
    %s
    tl::tma_store_arrive();
    tl::tma_store_wait<0>();
  }
}
"""


@pytest.mark.parametrize(
    ("before", "behind", "report"),
    [
        (
            "",
            "",
            r"a TMA store reads a static .*, which thread 0 wrote without T.fence_proxy_async",
        ),
        (
            "tl::fence_proxy_async();",
            "s[1] = 5;",
            r"a TMA store still reads a static .*, and thread",
        ),
        ("tl::fence_proxy_async();", "", ""),
    ],
)
def test_what_a_store_reads_is_fenced_and_stays(before: str, behind: str, report: str) -> None:
    """TileLang puts fences behind stores that it knows; not into or behind inline CUDA."""
    kernel = EmulatedKernel(inline_samples.calling(STORE % (before, behind), "f"))
    x = torch.zeros(128)
    if report:
        with pytest.raises(EmulationError, match=report):
            kernel(x)
    else:
        kernel(x)
        assert torch.equal(x[:4], torch.arange(4.0))


SLOW_STORE = """__device__ void f(float* x) {
  __shared__ __align__(16) float s[4];
  __shared__ uint64_t free[1];
  if (threadIdx.x == 0) tl::mbarrier_init(free[0], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) s[i] = i;
    tl::fence_proxy_async();
    tl::tma_store(x, s, 16);
    tl::tma_store_arrive();
    tl::mbarrier_arrive(free[0]);
    tl::tma_store_wait<0>();
  } else if (threadIdx.x == 32) {
    tl::mbarrier_wait(free[0], 0);
    s[1] = 5;
  }
}
"""


def test_others_go_on_while_a_store_is_waited_for() -> None:
    """A wait once carried out the store at once, and nobody could come before it."""
    kernel = EmulatedKernel(inline_samples.calling(SLOW_STORE, "f"))
    with pytest.raises(EmulationError, match=r"a TMA store still reads a static .*, and thread 32"):
        kernel(torch.zeros(128), seed=2)  # late


HANDED_ON = """__device__ void f(float* x) {
  __shared__ __align__(128) float s[32];
  __shared__ uint64_t written[1];
  __shared__ uint64_t handed_on[1];
  if (threadIdx.x == 0) {
    tl::mbarrier_init(written[0], 32);
    tl::mbarrier_init(handed_on[0], 32);
  }
  __syncthreads();
  int lane = threadIdx.x %% 32;
  if (threadIdx.x < 32) {
    s[lane] = lane + 1;
    tl::fence_proxy_async();
    tl::mbarrier_arrive(written[0]);
  } else if (threadIdx.x < 64) {
    tl::mbarrier_wait(written[0], 0);
    tl::mbarrier_arrive(handed_on[0]);
  } else if (threadIdx.x < 96) {
    %s;
    %s
  }
}
"""
READS = {
    "a thread": "x[lane] = s[lane];",
    "ldmatrix": "unsigned r; tl::ptx_ldmatrix_x1(s + lane % 8 * 4, &r); x[lane] = "
    "__uint_as_float(r);",
    "a TMA store": "if (!lane) tl::tma_store(x, s, 128), tl::tma_store_arrive(), "
    "tl::tma_store_wait<0>();",
}


@pytest.mark.parametrize("reader", READS)
def test_a_read_that_nothing_orders_behind_the_write_is_reported(reader: str) -> None:
    """Where the write comes first by chance. Where it does not, the numbers are wrong."""
    kernel = EmulatedKernel(inline_samples.calling(HANDED_ON % ("", READS[reader]), "f"))
    reports = []
    for seed in range(16):
        x = torch.zeros(128)
        try:
            kernel(x, seed=seed)
        except EmulationError as error:
            reports.append(str(error))
        else:
            assert not torch.equal(x[:32], torch.arange(1.0, 33.0))
    said = r"reads a static shared array, and no barrier says that thread \d+ has written it: wait"
    assert any(re.search(said, report) for report in reports)
    late = "a TMA store still reads a static shared array"  # written behind the start of the store
    assert all(re.search(f"{said}|{late}", report) for report in reports)


@pytest.mark.parametrize("reader", READS)
@pytest.mark.parametrize("barrier", ["written", "handed_on"])
def test_a_barrier_orders_a_read_behind_the_write(reader: str, barrier: str) -> None:
    """Directly, and by another warp."""
    wait = f"tl::mbarrier_wait({barrier}[0], 0)"
    kernel = EmulatedKernel(inline_samples.calling(HANDED_ON % (wait, READS[reader]), "f"))
    for seed in SEEDS:
        kernel(x := torch.zeros(128), seed=seed)
        assert torch.equal(x[:32], torch.arange(1.0, 33.0))


LOADED = """__device__ void f(float* x) {
  __shared__ __align__(128) float s[2][32];
  __shared__ uint64_t full[2];
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; ++i) {
      tl::mbarrier_init(full[i], 1);
      tl::mbarrier_arrive_expect_tx(full[i], 128);
      tl::tma_load(s[i], x, full[i], 128);
    }
  __syncthreads();
  tl::mbarrier_wait(full[%d], 0);
  x[64 + threadIdx.x %% 32] = s[1][threadIdx.x %% 32];
  for (int i = 0; i < 2; ++i) tl::mbarrier_wait(full[i], 0);
}
"""


def test_a_read_of_a_copy_whose_mbarrier_was_not_waited_for_is_reported(monkeypatch) -> None:
    monkeypatch.setenv("EMU_SCHEDULE", "eager")  # the copy is there
    kernel = EmulatedKernel(inline_samples.calling(LOADED % 0, "f"))
    with pytest.raises(EmulationError, match=r"no barrier says that a copy has written it"):
        kernel(torch.ones(128))
    EmulatedKernel(inline_samples.calling(LOADED % 1, "f"))(torch.ones(128))


SIDE_BY_SIDE = """__device__ void f(float* x) {
  __shared__ __align__(16) float s[4];
  __shared__ __align__(16) bfloat16_t t[4];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) {
    s[warp] = warp;
    t[warp] = bfloat16_t(float(warp));
  }
  __syncwarp();
  x[threadIdx.x] = s[warp] + float(t[warp]);
}
"""


def test_warps_may_read_what_they_wrote_beside_what_others_write() -> None:
    kernel = EmulatedKernel(inline_samples.calling(SIDE_BY_SIDE, "f"))
    for seed in SEEDS:
        kernel(x := torch.zeros(128), seed=seed)
        assert torch.equal(x, 2.0 * (torch.arange(128) // 32))


CLEANED = (
    PRODUCT.replace("i = threadIdx.x; i < 64 * 16; i += 128", "i = 0; i < 0; ++i")
    .replace(
        "  __syncthreads();\n",
        """  __shared__ uint64_t clean[1];
  if (threadIdx.x == 0) tl::mbarrier_init(clean[0], 128);
  __syncthreads();
  if (threadIdx.x >= 128) {
    for (int i = threadIdx.x - 128; i < 64 * 16; i += 128) ones[i] = bfloat16_t(1.0f);
    tl::fence_proxy_async();
    tl::mbarrier_arrive(clean[0]);
    return;
  }
""",
        1,
    )
    .replace("  __syncthreads();\n  %s", "  %s")
)


def test_a_product_of_what_nothing_orders_before_it_is_nan(capsys) -> None:
    """A report alone, as of a missing fence."""
    kernel = EmulatedKernel(inline_samples.calling(CLEANED % ("", ""), "f", threads=256))
    said = r"wgmma \(kernel.cpp:\d+\) reads a static .*, and no barrier says that thread \d+ has"
    reported = []
    for seed in range(0, 16, 2):  # memory begins as NaN
        kernel(x := torch.zeros(128), seed=seed)
        assert x.isnan().all()
        reported.append(re.search(said, capsys.readouterr().out))
    assert any(reported)
    waiting = CLEANED.replace("  float c[4];", "  tl::mbarrier_wait(clean[0], 0);\n  float c[4];")
    kernel = EmulatedKernel(inline_samples.calling(waiting % ("", ""), "f", threads=256))
    for seed in SEEDS:
        kernel(x := torch.zeros(128), seed=seed)
        assert x.eq(16).all()
    assert not capsys.readouterr().out


TICKETS = """__device__ void f(float* x) {
  __shared__ int next[1];
  if (threadIdx.x == 0) next[0] = 0;
  __syncthreads();
  x[threadIdx.x] = float(atomicAdd(next, 1));
}
"""


def test_a_seed_reproduces_its_interleaving() -> None:
    kernel = EmulatedKernel(inline_samples.calling(TICKETS, "f"))
    results = []
    for seed in (1, 1, 3):
        x = torch.zeros(128)
        kernel(x, seed=seed)
        assert torch.equal(x.sort().values, torch.arange(128.0))
        results.append(x)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_slots_in_turns_need_barriers_of_their_own() -> None:
    """A warpgroup that skips steps takes an earlier load, on its way to the slot, for its own."""
    kernel = EmulatedKernel(samples.sums_in_turns("barriers of slots"), samples.FAST)
    assert all(outcome(kernel, cases.sums_in_turns(), seed) for seed in SEEDS)


def test_a_producer_two_phases_off_is_noticed() -> None:
    kernel = EmulatedKernel(samples.blocks_then_columns("two phases off"), samples.FAST)
    case = cases.blocks_then_columns(num_blocks=4, num_columns=192)
    assert all(outcome(kernel, case, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    ("defect", "report"),
    [
        ("count of both", r"c_full\[0\], parity 0: phase 0 is open and needs 128 of 256 arrivals"),
        # slot 0 has both phases of its two arrivals: before, after or while it is sent
        ("slot of both", r"c_full\[(0\], parity 0: phase 2|1\], parity 0: phase 0) is open"),
    ],
)
def test_twins_that_signal_wrongly_are_noticed_by_every_seed(defect: str, report: str) -> None:
    kernel = EmulatedKernel(row_samples.twins(defect), samples.FAST)
    case = cases.twins()
    for seed in SEEDS:
        said = outcome(kernel, case, seed)
        waiting = (
            rf"(deadlock|a TMA store still reads)(?s:.*)threads 28\d\.\.319: waiting for {report}"
            "|a TMA store reads .*, and no barrier says that"
        )
        assert re.search(waiting, said), said


def test_a_named_barrier_with_two_uses_is_reported() -> None:
    kernel = EmulatedKernel(samples.reverse_halves("named barrier"))
    case = cases.reverse_halves()
    for seed in SEEDS:
        assert re.search(
            r"named barrier 8 is shared: warps .* and warps|no barrier says that thread \d+ has",
            outcome(kernel, case, seed),
        )


def test_a_shared_named_barrier_can_be_allowed_and_what_it_does_shows() -> None:
    kernel = EmulatedKernel(samples.reverse_halves("named barrier"), share_named_barriers=True)
    case = cases.reverse_halves()
    outcomes = [outcome(kernel, case, seed) for seed in SEEDS]
    assert all(re.search("wrong numbers|no barrier says that thread", said) for said in outcomes)


@pytest.fixture(scope="module")
def misuse() -> EmulatedKernel:
    return EmulatedKernel(inline_samples.misuse())


def mode(number: int) -> Tensor:
    x = torch.ones(128)
    x[0] = number
    return x


def test_a_block_that_polls_for_a_later_one_runs_out_of_time() -> None:
    """On a GPU the later one might wait for its SM."""
    kernel = EmulatedKernel(inline_samples.passing(9, step=-1))
    flags = torch.zeros(9, dtype=torch.int32)
    with pytest.raises(EmulationError, match=r"time limit of 0\.5 s, threads still move"):
        kernel(torch.randn(9, 32), torch.zeros(9, 32), flags, time_limit=0.5)


@pytest.mark.parametrize(
    ("number", "report"),
    [
        (1, r"time limit of 0\.5 s, threads still move\n  threads"),
        (2, r"time limit of 0\.5 s\n  block \(0, 0, 0\): thread \d+ computes and never waits"),
        (3, r"deadlock(?s:.*)waiting in __syncwarp for lanes ffff0000 of the warp"),
        (4, r"executes __s\w+ .*while other lanes execute __s\w+"),
        (5, r"thread \d+: memory fault at byte \d+ of x, which has 512 bytes"),
        (8, r"thread \d+: integer division by zero"),
        (9, r"deadlock(?s:.*)waiting at named barrier 0: 96 of 128 threads are there"),
        (11, r"named barrier 8 is shared: warps .* count 64"),
        (13, r"thread \d+ ends without waiting for its cp\.async"),
    ],
)
def test_misuse_is_reported(misuse: EmulatedKernel, number: int, report: str) -> None:
    with pytest.raises(EmulationError, match=report):
        misuse(mode(number), seed=1, time_limit=0.5)


@pytest.mark.parametrize(
    ("number", "seeds", "report"),
    [
        (14, (0,), r"thread 0: memory fault at byte 512 of x, which has 512 bytes"),
        (15, (1,), r"thread 0: memory fault at 4 bytes before x"),
        (16, (0, 1), r"thread 0: memory fault at byte 34359738368 of x"),
        (17, (0, 1), r"thread 0: memory fault at 34359738368 bytes before x"),
        (6, (0,), r"wrote before the start of x"),
        (6, (1,), r"thread 0: memory fault at 4 bytes before x"),
        (18, (0,), r"thread 0: memory fault at byte 512 of x"),
        (18, (1,), r"wrote past the end of x"),
    ],
)
def test_an_access_outside_a_tensor_is_reported(misuse, number, seeds, report) -> None:
    """Reads by one of two neighbouring seeds, writes by every seed."""
    for seed in seeds:
        with pytest.raises(EmulationError, match=report):
            misuse(mode(number), seed=seed)


def test_a_box_outside_a_tensor_reads_zeros_and_writes_nothing() -> None:
    kernel = EmulatedKernel(samples.move_rows(), samples.FAST)
    x = torch.randn(100, 64)
    for seed in range(2):
        for source in (-(2**30), -64, -1, 0, 37, 99, 100, 2**30):
            for target in (-(2**30), -63, 0, 60, 100, 2**30):
                y = torch.full((100, 64), math.nan)
                kernel(x, y, source, target, seed=seed)
                for row in range(100):
                    moved = row - target
                    if not 0 <= moved < 64:
                        assert y[row].isnan().all()
                    elif 0 <= source + moved < 100:
                        assert torch.equal(y[row], x[source + moved])
                    else:
                        assert not y[row].any()


@pytest.mark.parametrize(("columns", "more"), [(36, 64), (60, 4)])
def test_a_box_wider_than_a_tensor_reads_zeros_and_writes_what_there_is(columns, more) -> None:
    kernel = EmulatedKernel(samples.move_rows(), samples.FAST)
    x = torch.randn(100, columns)
    y = torch.full((100, more), math.nan)
    kernel(x, y, 0, 0)
    want = torch.cat([x, torch.zeros(100, 64)], 1)[:, :64]
    assert torch.equal(y[:64, :64], want[:64, :more])
    assert y[64:].isnan().all()
    assert y[:, 64:].isnan().all()


def test_uninitialised_shared_memory_is_nan(misuse: EmulatedKernel) -> None:
    x = mode(7)
    misuse(x)
    assert x.isnan().all()


def test_waiting_for_cp_async_by_inline_assembly_works(misuse: EmulatedKernel) -> None:
    x = mode(12)
    misuse(x)
    assert torch.equal(x, mode(12) + 1)


def test_failed_launches_leave_the_tensors_alone(misuse: EmulatedKernel) -> None:
    x = mode(6)
    with pytest.raises(EmulationError):
        misuse(x)
    assert torch.equal(x, mode(6))


def test_prints_are_passed_on(misuse: EmulatedKernel, capsys: pytest.CaptureFixture[str]) -> None:
    misuse(mode(10))
    assert capsys.readouterr().out == "block (0, 0, 0), thread 0: mode 10\n"


def test_the_host_wrapper_and_the_tensor_maps_refuse_bad_arguments() -> None:
    kernel = EmulatedKernel(samples.ring_gemm(), samples.FAST)
    a, b, c = cases.ring_gemm().arguments
    with pytest.raises(EmulationError, match="input A dtype mismatch, expected bfloat16"):
        kernel(a.half(), b, c)
    odd = torch.zeros(192 * 320 + 1, dtype=torch.bfloat16)[1:].view(192, 320)
    with pytest.raises(EmulationError, match="tensor map refused: the address is not 16-byte"):
        kernel(odd, b, c)
    with pytest.raises(TypeError, match=r"takes 3 arguments \(A, B, C\), got 2"):
        kernel(a, b)


def test_unknown_functions_are_named() -> None:
    source = "__device__ void f(float* x) { tl::warp_dance(x); *x = __sinpif(*x); }"
    with pytest.raises(UnknownCodeError) as error:
        EmulatedKernel(inline_samples.calling(source, "f"))
    for part in (
        "tl::warp_dance; __sinpif",
        tilelang.__version__,
        "lab/emulator/device",
    ):
        assert part in str(error.value)


def test_unknown_assembly_is_named() -> None:
    source = '__device__ void f(float* x) { asm volatile("nanosleep.u32 5;"); }'
    with pytest.raises(UnknownCodeError, match=r"know: nanosleep\.u32 5 .*ASSEMBLY"):
        EmulatedKernel(inline_samples.calling(source, "f"))
