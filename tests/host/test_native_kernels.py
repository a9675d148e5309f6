"""Entries of real kernels: launches equal TileLang's own, and what is unknown is refused."""

import shutil
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from qla_kernels.runtime import jit
from tests.native import standin

pytest.importorskip("tilelang", reason="lowers kernels")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# Few that lower in a second or two: 1 to 5 dimensions, maps, shared stride symbols, unread sizes,
# dependent launches. `python -m tests.native.compare` takes all.
SAMPLE = ["attn.delta", "gdn.kkt_solve", "gdn.segment_scan", "dualkv.dkv_combine"]
SAMPLE += ["sparse_ring.bwd_dkv_columns", "gdn.chunk_table"]
SAMPLE += ["sparse_ring.mark_candidates", "sparse_ring.gather_columns"]  # numbers of their own


class Variant(NamedTuple):
    """Of kernels that are made up here."""

    dtype: str = "int32"


def test_launches_are_those_of_tilelang_byte_by_byte() -> None:
    said = standin.run("-m", "tests.native.compare", "--first", *SAMPLE)
    assert said.count("'same'") == len(SAMPLE) + 1  # and in total
    assert "refused here alone" in said  # delta's o, of which TileLang compares no size


def numbers_of_one_name(variant: Any) -> Any:
    """As in select_lines, which takes 20 s to lower: both numbers are named `cap` in the end."""
    import tilelang.language as T

    @T.macro
    def put(out: Any, at: Any, cap: Any) -> None:
        out[at] = cap

    @T.prim_func
    def made_up(out: T.Tensor((2,), "int32"), first: T.int32, second: T.int32):
        with T.Kernel(1, threads=32):
            put(out, 0, first)
            put(out, 1, second)

    return made_up


def test_numbers_have_names_of_their_own() -> None:
    """A macro gives two arguments the name of its parameter."""
    from qla_kernels.runtime.native.host_function import read_entry
    from qla_kernels.runtime.native.pack import pack

    module: Any = ModuleType("made_up")
    module.PASS_CONFIGS, module.build = {}, numbers_of_one_name
    lowered = jit.lower(jit.Kernel("tests", "made_up", module), Variant())
    declared = [str(param.name) for param in lowered.prim_func.params]
    assert len(set(declared)) < len(declared), "the made-up kernel is not as it was"
    entry = read_entry(lowered.prim_func, lowered.host, lowered.device)
    names = [name for name, _ in entry["scalars"]]
    assert len(set(names)) == len(names)
    pack(entry)
    entry["scalars"] = [("cap", dtype) for _, dtype in entry["scalars"]]
    with pytest.raises(ValueError, match="two numbers named cap; need a name for each"):
        pack(entry)


def test_wrong_entries_launch_something_else() -> None:
    """The control: the comparison above can fail."""
    said = standin.run("-m", "tests.native.compare", "--first", "--wrong", "gdn.kkt_solve")
    assert "same" not in said
    for wrong in ("grid", "dependent", "order of arguments", "an argument", "a map's swizzle"):
        assert f"{wrong} differ" in said


@pytest.fixture(scope="module")
def lowered() -> jit.Lowered:
    (kernel,) = (k for k in jit.kernel_modules("gdn") if k.name == "gate")
    return jit.lower(kernel, kernel.module.VARIANTS[0])


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("cluster_dims", (2, 1, 1)), ("use_cooperative_groups", 1)],
)
def test_launches_of_other_kinds_are_refused(
    lowered: jit.Lowered, attribute: str, value: Any
) -> None:
    from qla_kernels.runtime.native.host_function import read_entry

    ((name, function),) = lowered.device.functions.items()
    changed = type(lowered.device)({name: function.with_attr(attribute, value)})
    with pytest.raises(ValueError, match=rf"{attribute}; need what the launcher knows; teach it"):
        read_entry(lowered.prim_func, lowered.host, changed)


def test_what_the_host_function_does_besides_is_refused(lowered: jit.Lowered) -> None:
    from tvm import tirx

    from qla_kernels.runtime.native.host_function import read_entry

    ((name, host),) = lowered.host.functions.items()
    for added, said in (
        (tirx.Evaluate(tirx.call_packed("__tvm_other", 1)), "a call of __tvm_other"),
        (tirx.Evaluate(tirx.call_packed("another_kernel", 1)), "a second launch, another_kernel"),
        (tirx.AssertStmt(host.params[2] == 3, "RuntimeError", ["odd"]), "the check 'odd'"),
    ):
        body = tirx.SeqStmt([host.body, added])
        changed = type(lowered.host)({name: host.with_body(body)})
        with pytest.raises(ValueError, match=f": {said}; need what the launcher knows"):
            read_entry(lowered.prim_func, changed, lowered.device)


def test_a_size_that_nothing_gives_is_refused() -> None:
    """It could be neither read nor compared."""
    import tilelang.language as T

    from qla_kernels.runtime.native.declared import Declared

    n, m = T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def even(x: T.Tensor((2 * n, m), "float32"), y: T.Tensor((m,), "float32")):
        with T.Kernel(1, threads=32):
            y[0] = x[0, 0]

    said = r"even: size of x along axis 0 depends on n; need n as a size, a stride or a scalar"
    with pytest.raises(ValueError, match=said):
        Declared(even)
