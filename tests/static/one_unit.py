"""The variants of a kernel through nvcc in one go: most of what it takes for one is the headers."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from qla_kernels.lab.inspect import sass
from qla_kernels.runtime import jit
from tests.lowered import anew

INCLUDE = re.compile(r"^#include .*|^#pragma once", re.MULTILINE)


@contextmanager
def one_unit(kernel: jit.Kernel, variants: Sequence[Any]) -> Iterator[None]:
    """Meanwhile `inspect.facts` reads a variant in the code of all, made when first needed."""
    module = kernel.module

    @cache
    def lowered(variant: Any) -> jit.Lowered:
        prim_func = jit.trace(module, variant)
        found = anew(kernel, prim_func)  # of what the emulator runs
        ((function, (block, dyn_smem)),) = found.functions.items()
        return jit.Lowered(found.device, function, tuple(block), dyn_smem, prim_func)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        assemble = jit.assemble

        @cache
        def assembled() -> jit.Assembled:
            text = joined([lowered(variant).source for variant in variants])
            return assemble(text, module.PASS_CONFIGS, Path(folder))

        patch.setattr(jit, "trace", cache(jit.trace))
        patch.setattr(jit, "lower", lambda _, variant: lowered(variant))
        patch.setattr(jit, "assemble", lambda *_: assembled())
        patch.setattr(sass, "disassemble", cache(sass.disassemble))
        yield


def joined(sources: list[str]) -> str:
    """The sources one behind the other: every line keeps its number, every source its own names."""
    headers = dict.fromkeys(line for source in sources for line in INCLUDE.findall(source))
    parts = [line for line in headers if line.startswith("#include")]
    for i, source in enumerate(sources):
        body = INCLUDE.sub("", source)
        parts += [f"namespace variant_{i} {{", f'#line 1 "{i}/kernel.cu"', body, "}"]
    return "\n".join(parts)
