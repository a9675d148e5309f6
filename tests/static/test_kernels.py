"""Every variant of every kernel compiles for sm_90a and is what its schedule says it is."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels import digests, inspect, jit
from qla_kernels.errors import Unsupported
from scripts import schedules
from tests.static.one_unit import one_unit

KERNELS = list(jit.kernel_modules())


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    try:
        jit.nvcc()
    except Unsupported as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_variants_agree_with_their_schedules(kernel: jit.Kernel) -> None:
    said, unchecked, generated = [], set(), {}
    with one_unit(kernel):
        for variant in kernel.module.VARIANTS:
            lowered = jit.lower(kernel, variant)
            label = jit.label(kernel.module, variant)
            generated[label] = digests.digest(lowered.source, lowered.function)
            facts = inspect.facts(kernel, variant)
            if violations := inspect.check(facts, kernel.module.schedule(variant)):
                said += [facts.kernel, *violations]
            unchecked |= set(facts.unchecked)
    assert not said, "\n".join(said)
    if version("tilelang") == digests.lowered_by():
        everyone = digests.recorded().items()
        on_record = {name: of for name, of in everyone if name.partition("-")[0] == str(kernel)}
        assert generated == on_record, f"python scripts/digests.py {kernel} --write, if intended"
    if unchecked:
        pytest.skip("the rest agrees, but " + "; ".join(sorted(unchecked)))


def test_a_variant_among_others_is_what_it_is_alone(monkeypatch, tmp_path) -> None:
    (kernel,) = (k for k in KERNELS if str(k) == "gdn.chunk_table")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    with one_unit(kernel):
        among = [inspect.facts(kernel, variant) for variant in kernel.module.VARIANTS]
    alone = [inspect.facts(kernel, v, tmp_path / str(v)) for v in kernel.module.VARIANTS]
    assert among == alone


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_variants_are_distinct_and_few(kernel: jit.Kernel) -> None:
    variants = kernel.module.VARIANTS
    assert variants
    assert len(set(variants)) == len(variants)
    # each costs every user a compile, and CI seconds; more than this wants run-time arguments.
    # fused_fwd's four for pools and two for equal shares are apart: what they add left the others
    # no registers
    pools = [v for v in variants if getattr(v, "pool", "")]
    shares = [v for v in variants if getattr(v, "shares", False)]
    assert len(variants) - len(pools) - len(shares) <= 12
    assert len(pools) <= 4
    assert len(shares) <= 2


def test_no_two_variants_share_a_function_name() -> None:
    """TileLang's disk cache has mixed up kernels of one name before."""
    named: dict[str, str] = {}
    for kernel, variant in _variants():
        name, label = jit.function_name(kernel.module, variant), jit.label(kernel.module, variant)
        assert name not in named, f"{label} and {named[name]} are both {name}"
        named[name] = label


def test_every_kernel_file_is_listed() -> None:
    """A kernel is a file, or a folder with its parts, that has a `build`."""
    package = Path(jit.__file__).parent
    found = [*package.glob("*/kernels/*.py"), *package.glob("*/kernels/*/__init__.py")]
    files = {
        (module.parts[-3], module.name)
        for file in found
        if "\ndef build(" in file.read_text()
        for module in [file.parent if file.name == "__init__.py" else file.with_suffix("")]
    }
    assert files == set(jit.kernel_names()), "KERNELS in kernels/__init__.py and the files differ"


def test_document_is_current() -> None:
    written = schedules.DOCUMENT.read_text()
    assert written == schedules.document(), "run python scripts/schedules.py"


def _variants() -> Iterator[tuple[jit.Kernel, Any]]:
    for kernel in KERNELS:
        for variant in kernel.module.VARIANTS:
            yield kernel, variant
