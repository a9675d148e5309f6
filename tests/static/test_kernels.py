"""Every variant of every kernel compiles for sm_90a and is what its schedule says it is."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tilelang", reason="kernel files import TileLang")

from qla_kernels.lab import inspect
from qla_kernels.lab.emulator.lowering import kept_at
from qla_kernels.lab.inspect import gather, sass
from qla_kernels.runtime import digests, jit
from qla_kernels.runtime.errors import Unsupported
from qla_kernels.runtime.shared_memory import buffers_by_name
from tests import lowered
from tests.emulated.test_cases import BY_TYPE, same_as_bf16
from tests.static import checked
from tests.static.one_unit import one_unit

KERNELS = list(jit.kernel_modules())
TYPES = re.compile("bfloat16_t|bfloat16|bf16|half_t|float16|fp16")


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    try:
        jit.nvcc()
    except Unsupported as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_variants_agree_with_their_schedules(kernel: jit.Kernel, traced_once) -> None:
    said, unread = checked.check(kernel, checked.due(kernel))
    assert not said, "\n".join(said)
    if unread:
        pytest.skip("the rest agrees, but " + "; ".join(sorted(unread)))


def test_all_variants_are_on_record(traced_once) -> None:
    """And none that is gone. With other tools than those of the record, all are checked anew."""
    labels = {jit.label(kernel.module, variant) for kernel, variant in _variants()}
    assert labels == set(digests.recorded()), "python -m qla_kernels digests --write"
    if checked.tools() == checked.recorded()["tools"]:
        keys = {jit.label(k.module, variant): checked.key(k, variant) for k, variant in _variants()}
        assert keys == checked.recorded()["variants"], lowered.WRITE
        for kernel in KERNELS:
            assert code_on_record(kernel) == code_as_digested(kernel), lowered.WRITE
    files = {file.name.removesuffix(".json.xz") for file in lowered.FOLDER.iterdir()}
    assert files == set(map(str, KERNELS)), f"{lowered.FOLDER}: one file a kernel"


def code_on_record(kernel: jit.Kernel) -> dict[str, str]:
    """Digests of what the emulated tier is given, by the name of the emulator's file."""
    found = {name: json.loads(text) for name, text in lowered.on_record(str(kernel)).items()}
    return {name: digests.digest(x["device"], *x["functions"]) for name, x in found.items()}


def code_as_digested(kernel: jit.Kernel) -> dict[str, str]:
    module, known = kernel.module, digests.recorded()
    return {
        kept_at(jit.trace(module, v), module.PASS_CONFIGS).name: known[jit.label(module, v)]
        for v in module.VARIANTS
    }


def test_every_kernel_names_its_shared_buffers_apart(traced_once) -> None:
    for kernel, variant in _variants():
        named = buffers_by_name(jit.trace(kernel.module, variant))
        shared = [name for name, same in named.items() if len(same) > 1]
        assert not shared, f"{jit.label(kernel.module, variant)}: {shared}"


def test_code_of_both_16_bit_types_is_the_same_but_for_the_type(traced_once) -> None:
    """So the emulated tier runs one of the two; BY_TYPE names the kernels of which it is not so."""
    differ = set()
    for kernel, variant in _variants():
        if same_as_bf16("", variant, kernel.module.VARIANTS):
            pair = variant, variant._replace(dtype="bfloat16")
            one, other = (TYPES.sub("16 bits", jit.trace(kernel.module, v).script()) for v in pair)
            if one != other:
                differ.add(str(kernel))
    assert differ == BY_TYPE


def test_a_key_covers_all_that_a_check_depends_on(monkeypatch) -> None:
    kernel = next(k for k in KERNELS if len(k.module.VARIANTS) > 1)
    first, second, *_ = kernel.module.VARIANTS
    module, found = kernel.module, {checked.key(kernel, first), checked.key(kernel, second)}

    def changed(owner: Any, name: str, value: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            found.add(checked.key(kernel, first))

    more = replace(module.schedule(first), spill_bytes=999, spill_reason="a test")
    changed(module, "schedule", lambda _: more)
    changed(module, "PASS_CONFIGS", {**module.PASS_CONFIGS, "tl.ptxas_register_usage_level": 3})
    changed(jit, "nvcc_version", lambda: "another")
    changed(sass, "nvdisasm_version", lambda: "another")
    changed(gather, "_reader_version", lambda: "another")
    changed(digests, "recorded", lambda: {jit.label(module, first): "another"})
    assert len(found) == 8


def test_what_is_not_on_record_is_checked(monkeypatch) -> None:
    kernel = next(k for k in KERNELS if str(k) == "gdn.chunk_table")
    module = kernel.module
    everyone = [jit.label(module, variant) for variant in module.VARIANTS]
    monkeypatch.setattr(checked, "recorded", lambda: {"variants": dict.fromkeys(everyone, "old")})
    assert checked.due(kernel) == [*module.VARIANTS]
    right = module.schedule(module.VARIANTS[0])
    wrong = replace(right, smem_bytes=right.smem_bytes + 1024)
    monkeypatch.setattr(module, "schedule", lambda _: wrong)
    said, _ = checked.check(kernel, checked.due(kernel))
    assert said


def test_other_code_on_record_is_found(monkeypatch) -> None:
    (kernel,) = (k for k in KERNELS if str(k) == "gdn.chunk_table")
    wrong = {name: text + " " for name, text in lowered.on_record(str(kernel)).items()}
    monkeypatch.setattr(lowered, "on_record", lambda _: wrong)
    with pytest.raises(AssertionError, match="other code"):
        checked.check(kernel, kernel.module.VARIANTS)


def test_a_variant_among_others_is_what_it_is_alone(monkeypatch, tmp_path) -> None:
    (kernel,) = (k for k in KERNELS if str(k) == "gdn.chunk_table")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    with one_unit(kernel, kernel.module.VARIANTS):
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
    package = Path(jit.__file__).parents[1]
    found = [*package.glob("*/kernels/*.py"), *package.glob("*/kernels/*/__init__.py")]
    files = {
        (module.parts[-3], module.name)
        for file in found
        if "\ndef build(" in file.read_text()
        for module in [file.parent if file.name == "__init__.py" else file.with_suffix("")]
    }
    assert files == set(jit.kernel_names()), "KERNELS in kernels/__init__.py and the files differ"


def _variants() -> Iterator[tuple[jit.Kernel, Any]]:
    for kernel in KERNELS:
        for variant in kernel.module.VARIANTS:
            yield kernel, variant
