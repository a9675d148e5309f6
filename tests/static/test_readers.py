"""The gate's readers on texts small enough to check by eye. Needs no compiler."""

import ast

import pytest

from qla_kernels.lab.inspect import sass, script, source
from qla_kernels.lab.inspect.threads import THREAD, Threads, parse_c, split

CTA = frozenset(range(256))


def span(start: int, end: int) -> Threads:
    return frozenset(range(start, end))


@pytest.mark.parametrize(
    ("condition", "taken", "skipped"),
    [
        ("((int)threadIdx.x) < 128", span(0, 128), span(128, 256)),
        ("(128 <= ((int)threadIdx.x)) && (((int)threadIdx.x) < 160)", span(128, 160), None),
        ("(((int)threadIdx.x) >> 5) == 2", span(64, 96), None),
        ("!(((int)threadIdx.x) < 128)", span(128, 256), None),
        ("tl::tl_shuffle_elect<0>()", frozenset({0}), None),
        ("tl::tl_shuffle_elect<128>()", frozenset({0, 128}), None),
        ("rows == 64", CTA, CTA),  # a run-time value: anyone may, anyone may not
        ("(((int)threadIdx.x) < 128) && (rows == 64)", span(0, 128), CTA),
        ("(((int)threadIdx.x) < 128) || (rows == 64)", CTA, span(128, 256)),
        ("(a ? b : c) < 3", CTA, CTA),
        ("(((int)threadIdx.x) % 0) == 0", CTA, CTA),
    ],
)
def test_split(condition: str, taken: Threads, skipped: Threads | None) -> None:
    rest = CTA - taken if skipped is None else skipped
    assert split(parse_c(condition), CTA, (256,), {}) == (taken, rest)


def test_split_follows_definitions() -> None:
    definitions = {"warp": ast.parse(f"{THREAD[0]} // 32", mode="eval").body}
    condition = ast.parse("warp == 3", mode="eval").body
    assert split(condition, CTA, (256,), definitions) == (span(96, 128), CTA - span(96, 128))


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ("((int)threadIdx.y) < 1", span(0, 128)),
        ("((int)threadIdx.x) < 32", span(0, 32) | span(128, 160)),
        ("(((int)threadIdx.y) == 1) && ((((int)threadIdx.x) >> 5) == 3)", span(224, 256)),
        ("((int)threadIdx.z) == 0", CTA),
        ("tl::tl_shuffle_elect<0>()", {0, 128}),  # one thread a row
        ("tl::tl_shuffle_elect<32>()", set(range(0, 256, 32))),
        ("tl::tl_shuffle_elect<256>()", {0, 128}),
    ],
)
def test_split_in_a_block_of_two_rows(condition: str, taken: Threads) -> None:
    assert split(parse_c(condition), CTA, (128, 2, 1), {}) == (taken, CTA - taken)


CUDA = """
extern "C" __global__ void before(float* x);
extern "C" __global__ void __launch_bounds__(256, 1) before(float* x) {
  other[0].arrive();
}
extern "C" __global__ void __launch_bounds__(256, 1) k(float* x) {
  void* s_a = ((void*)((char*)buf_dyn_shmem + 0));
  void* s_b = ((void*)((char*)buf_dyn_shmem + 1024));
  if (tl::tl_shuffle_elect<0>()) {
    a_full[0].init(1/*one*/);
    a_full[1].init(1);
    b_ready[0].init(128);
  }
  if (((int)threadIdx.x) < 128) {
    tl::warpgroup_reg_alloc<240>();
    for (int i = 0; i < n; ++i) {
      a_full[(i & 1)].wait(((i >> 1) & 1));
      ((float*)s_a)[i] = 0;
    }
    b_ready[0].arrive();
  } else {
    tl::warpgroup_reg_dealloc<24>();
    if (((int)threadIdx.x) < 160) {
      if (tl::tl_shuffle_elect<32>()) {
        a_full[(i & 1)].arrive_and_expect_tx(64);
      }
    } else {
      b_ready[0].wait(0);
      tl::mbarrier_cp_async_arrive_noinc(a_full[0]);
      ((float*)s_b)[i] = x[i];
    }
  }
}
"""


def test_source() -> None:
    code = source.read(CUDA, "k", (256,))
    assert code.barriers == {"a_full": [1, 1], "b_ready": [128]}
    assert code.waits == {"a_full": span(0, 128), "b_ready": span(160, 256)}
    assert code.arrives == {"b_ready": span(0, 128), "a_full": {128} | span(160, 256)}
    assert code.registers == [(span(0, 128), "alloc", 240), (span(128, 256), "dealloc", 24)]
    assert code.buffers["s_a"].threads == span(0, 128)
    assert code.buffers["s_b"] == source.Buffer(1024, span(160, 256))
    numbers = {text.strip(): n for n, text in enumerate(CUDA.splitlines(), 1)}
    assert code.lines[numbers["a_full[(i & 1)].arrive_and_expect_tx(64);"]] == {128}


IR = """
@T.prim_func
def k(x_handle: T.handle):
    tx: T.int32 = T.launch_thread_idx(0)
    with T.sblock("root"):
        s_a = T.sblock_alloc_buffer((2, 64, 64), "bfloat16", scope="shared.dyn")
        s_b_1 = T.sblock_alloc_buffer((64,), data=s_b, scope="shared.dyn")
        r_a = T.sblock_alloc_buffer((64, 64), scope="local.fragment")
        r_b = T.sblock_alloc_buffer((64, 64), scope="local.fragment")
        warp: T.int32 = tx // 32
        if warp < 4:
            T.gemm(T.region(s_a[0, 0, 0], 1), T.region(r_a[0, 0], 3))
        else:
            T.copy(T.region(r_b[0, 0], 1), T.region(s_b_1[0], 2))
            r_a[0, 0] = T.float32(0)
"""


def test_script() -> None:
    ir = script.read(IR, (256,))
    assert ir.shared_bytes == {"s_a": 2 * 64 * 64 * 2, "s_b": 64 * 4}
    assert ir.fragments == {"r_a": {span(0, 128), span(128, 256)}, "r_b": {span(128, 256)}}


def test_script_of_a_block_of_two_rows() -> None:
    rows = IR.replace(
        "tx: T.int32 = T.launch_thread_idx(0)", "ty: T.int32 = T.launch_thread_idx(1)"
    )
    ir = script.read(rows.replace("tx // 32", "ty * 4"), (128, 2, 1))
    assert ir.fragments == {"r_a": {span(0, 128), span(128, 256)}, "r_b": {span(128, 256)}}


REPORT = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Function properties for k
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size, 1024 bytes smem
"""


def test_ptxas_report() -> None:
    spent = sass.spent(REPORT, "k")
    assert (spent.registers, spent.static_smem, spent.stack) == (168, 1024, 16)
    assert (spent.spill_stores, spent.spill_loads) == (8, 12)
    assert len(spent.warnings) == 1
    with pytest.raises(ValueError, match="nothing about other"):
        sass.spent(REPORT, "other")


LISTING = """
.text.k:
\t//## File "/somewhere/barrier.h", line 9 inlined at "/somewhere/kernel.cu", line 70
\t//## File "/somewhere/kernel.cu", line 70
        /*0010*/              @!P0 WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R24, gsb0 ;
        /*0038*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
\t//## File "/somewhere/barrier.h", line 9
        /*0040*/                   UBLKCP.S.G [UR4], [UR6], UR8 ;
        /*0050*/              @UP1 UBLKCP.G.S [UR4], [UR6], UR7, desc[UR10] ;
\t//## File "/somewhere/kernel.cu", line 80
        /*0060*/                   EXIT ;
.L_x_1:
        /*0070*/              @!P0 BRA `(.L_x_1) ;
        /*0080*/                   BRA `(.L_x_0) ;
.L_x_2:
        /*0090*/                   BRA `(.L_x_2) ;
\t//--------------------- .text.other
"""


def test_disassembly() -> None:
    found = list(sass.instructions(LISTING, "k"))
    lines = {i.address: i.line for i in found}
    assert (lines[0x30], lines[0x40], lines[0x60]) == (70, None, 80)
    assert (lines[0x70], lines[0x80], lines[0x90]) == (70, 70, None)  # a slow path, and padding
    assert [i.unit for i in found if i.unit] == ["wgmma", "wgmma", "tma_load", "tma_store"]
    assert found[2].top_register == 88
    assert sass.order(found) == [("WARPGROUP.DEPBAR.LE 0x1", 1), ("HGMMA", 2), ("UBLKCP", 2)]
