"""What a digest of generated code sees, and what it does not."""

import pytest

from qla_kernels.runtime import digests, jit
from qla_kernels.runtime.digests import digest, launch
from qla_kernels.runtime.native import sources

SOURCE = """
// helpers
template <int N> struct Tile { float x[N]; };
extern "C" __global__ void add_kernel(const float* __restrict__ a, float* __restrict__ sum, int n) {
  extern __shared__ __align__(1024) uchar buf_dyn_shmem[];
  void* s_a = ((void*)((char*)buf_dyn_shmem + 0));
  for (int i = 0; i < n; ++i) { /* all */
    float2 pair = make_float2(a[i], 1.0f);
    sum[i] = tl::maximum(pair.x, pair.y);
  }
}
"""
BEFORE = digest(SOURCE, "add_kernel")


def changed(*renames: tuple[str, str], function: str = "add_kernel") -> bool:
    source = SOURCE
    for old, new in renames:
        assert old in source
        source = source.replace(old, new)
    return digest(source, function) != BEFORE


def test_names_comments_and_spaces_do_not_count() -> None:
    assert not changed(("add_kernel", "plus_kernel"), function="plus_kernel")
    assert not changed(("s_a", "s_left"), ("pair", "both"), ("int i", "int row"), (" i ", " row "),
                       ("[i]", "[row]"), ("++i", "++row"))  # fmt: skip
    assert not changed(("// helpers", "// others"), ("/* all */", ""), ("  ", "\t"))
    assert not changed(("buf_dyn_shmem", "memory"), ("* __restrict__ a", "* __restrict__ b"),
                       ("a[i], 1", "b[i], 1"))  # fmt: skip


def test_everything_else_does() -> None:
    assert changed(("1024", "128"))
    assert changed(("+ 0)", "+ 16)"))
    assert changed(("maximum", "minimum"))
    assert changed(("pair.x", "pair.w"))
    assert changed(("float2 pair", "half2 pair"))
    assert changed(("i < n", "n < i"))
    assert changed(("a[i]", "sum[i]"))
    assert changed(("float x[N]", "float y[N]"))  # in front of the kernel


def test_a_launch_is_its_entry_and_the_flags_of_its_compile() -> None:
    flags = {"tl.enable_fast_math": True, "tl.ptxas_register_usage_level": 5}
    before = launch(b"{}", flags)
    assert launch(b"{}", dict(reversed(flags.items()))) == before
    assert launch(b"[]", flags) != before
    assert launch(b"{}", flags | {"tl.enable_fast_math": False}) != before
    assert launch(b"{}", {}) != before


@pytest.mark.parametrize("kernel", [".".join(names) for names in jit.kernel_names()])
def test_digests_are_of_the_sources_that_are_here(kernel: str) -> None:
    fix = f"run: python -m qla_kernels digests {kernel} --write"
    assert digests.sources().get(kernel) == sources.code(sources.module_of(kernel)), fix


def test_records_are_of_kernels_that_there_are() -> None:
    kernels = {".".join(names) for names in jit.kernel_names()}
    assert {*digests.sources()} == kernels
    assert {label.partition("-")[0] for label in digests.recorded()} == kernels
    assert {*digests.launches()} <= {*digests.recorded()}


def test_digests_of_edited_sources_are_not_believed() -> None:
    label = next(iter(digests.launches()))
    kernel = label.partition("-")[0]
    both = digests.recorded()[label], digests.launches()[label]
    assert digests.recorded_for(label, digests.sources()[kernel]) == both
    assert digests.recorded_for(label, "another") is None
    assert digests.recorded_for(f"{kernel}-none", digests.sources()[kernel]) is None
