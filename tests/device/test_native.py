"""Prebuilt kernels on a GPU: the bits of TileLang's own launches; captures, devices and threads."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.lab import build
from qla_kernels.runtime import jit
from qla_kernels.runtime.native import prebuilt
from qla_kernels.runtime.native.launcher import compile_launcher
from tests.gdn_calls import Call, leaves, on_gpu

pytestmark = [
    pytest.mark.hopper,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

GRADIENTS = ("q", "k", "v", "g", "beta")


def sample() -> Call:
    torch.manual_seed(0)
    x = on_gpu(batch=2, tokens=300)
    del x["initial_state"]
    return x


def both(x: Call) -> list[Tensor]:
    """Output and gradients of a forward and a backward."""
    given = leaves(x)
    o, _ = chunk_gated_delta_rule(**given)
    o.float().square().sum().backward()
    return [o.detach(), *(given[name].grad for name in GRADIENTS)]


def forget() -> None:
    jit.compile.cache_clear()
    prebuilt._kernels.cache_clear()
    prebuilt._found.clear()


@pytest.fixture(scope="module")
def compiled() -> tuple[list[Tensor], set[str]]:
    """Results of TileLang's launches, and the labels of the kernels that ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QLA_PREBUILT", "")
        patch.setattr(jit, "_digests", {})
        forget()
        return both(sample()), set(jit.compiled())


@pytest.fixture(scope="module")
def folder(compiled: tuple[list[Tensor], set[str]], tmp_path_factory) -> Path:
    """Those kernels, prebuilt."""
    wanted = [
        (kernel, variant)
        for kernel in jit.kernel_modules("gdn")
        for variant in kernel.module.VARIANTS
        if jit.label(kernel.module, variant) in compiled[1]
    ]
    path = tmp_path_factory.mktemp("prebuilt")
    compile_launcher(path)
    build.write(build.build_all(wanted, None), path, build.set_of(), build.versions())
    return path


@pytest.fixture
def _prebuilt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QLA_PREBUILT", str(folder))
    refuse: Callable[..., None] = lambda *_: pytest.fail("compiled with TileLang")  # noqa: E731
    monkeypatch.setattr(jit, "_compiled", refuse)
    forget()
    yield
    forget()


@pytest.mark.usefixtures("_prebuilt")
def test_results_have_the_bits_of_tilelangs(compiled: tuple[list[Tensor], set[str]]) -> None:
    for mine, theirs in zip(both(sample()), compiled[0], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("_prebuilt")
def test_kernels_are_loaded_while_a_graph_is_captured(
    compiled: tuple[list[Tensor], set[str]],
) -> None:
    x, graph = sample(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        o, _ = chunk_gated_delta_rule(**x)
    o.zero_()
    graph.replay()
    assert torch.equal(o, compiled[0][0])


@pytest.mark.usefixtures("_prebuilt")
def test_threads_that_launch_first_at_once(compiled: tuple[list[Tensor], set[str]]) -> None:
    x, together, found = sample(), threading.Barrier(8), []

    def run() -> None:
        together.wait()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            found.append(chunk_gated_delta_rule(**x)[0])
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(o, compiled[0][0]) for o in found)


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("_prebuilt")
def test_the_second_gpu(compiled: tuple[list[Tensor], set[str]]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = {k: v.to("cuda:1") if isinstance(v, Tensor) else v for k, v in sample().items()}
    with torch.no_grad():
        o = chunk_gated_delta_rule(**x)[0]
    assert torch.cuda.current_device() == 0
    assert torch.equal(o.to("cuda:0"), compiled[0][0])
