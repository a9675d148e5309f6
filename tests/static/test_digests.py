"""The generated code is the same in every process: what runs is what was tested."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

import tilelang.language as T

from qla_kernels.lab import digests
from qla_kernels.runtime import jit
from qla_kernels.runtime.shared_memory import buffers_by_name


class Variant(NamedTuple):
    size: int = 64


def build(variant: Variant) -> Any:
    @T.macro
    def fill(buffer: Any, value: Any) -> None:
        tile = buffer  # renames the buffer
        for i in T.Parallel(variant.size):
            tile[i] = value

    def both() -> Any:
        return T.alloc_shared((64,), "float32"), T.alloc_shared((64,), "float32")

    @T.prim_func
    def sample(out: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            first = T.alloc_shared((64,), "float32")
            second = T.alloc_shared((64,), "float32")
            pair = both()
            fill(first, 1.0)
            fill(second, 2.0)
            for i in T.Parallel(64):
                out[i] = first[i] + second[i] + pair[0][i] + pair[1][i]

    return sample


def test_every_shared_buffer_has_a_name_of_its_own() -> None:
    module: Any = SimpleNamespace(build=build, __name__="sample")
    names = {name: len(same) for name, same in buffers_by_name(build(Variant())).items()}
    assert sorted(names.values()) == [2, 2], f"the sample's names do not collide: {names}"
    traced = jit.trace(module, Variant())
    assert {len(same) for same in buffers_by_name(traced).values()} == {1}
    assert [*buffers_by_name(traced)] == [*buffers_by_name(jit.trace(module, Variant()))]


def test_two_processes_generate_the_same_code() -> None:
    """And so does every run of the static tier, which compares all kernels with digests.json."""
    sample = ["sparse_ring.gather_columns", "gdn.chunk_table"]
    runs = [digests.in_a_process(sample) for _ in range(2)]
    assert len(runs[0].code) == len(runs[0].launch) == 3
    assert not digests.differences([run.code for run in runs])
    assert not digests.differences([run.launch for run in runs])


def test_a_difference_is_told() -> None:
    runs = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}]
    assert digests.differences(runs) == ["b: 2 x 1, 3 x 1, absent x 1"]
