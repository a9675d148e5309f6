"""What a digest of generated code sees, and what it does not."""

from qla_kernels.digests import digest

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
