"""A kernel file whose kernel is that of tests/native/behaviour.py: no nvcc, no TileLang."""

import json
from pathlib import Path

from qla_kernels.gdn.kernels import gate
from qla_kernels.lab import build
from qla_kernels.runtime import digests, jit
from qla_kernels.runtime.native import sources
from tests.native import behaviour

VARIANT, *_ = gate.VARIANTS
LABEL = jit.label(gate, VARIANT)


EDITED = {"sources": "other", "code": "other"}  # of a kernel whose sources are not those here


def of(module: str) -> dict[str, str]:
    return {"sources": sources.fingerprint(module), "code": sources.code(module)}


def built(**changed: str) -> build.Built:
    """A kernel named gdn.gate; `changed` is different in the manifest."""
    entry = json.dumps(behaviour.ENTRY).encode()
    about = {
        "digest": "0123456789abcdef",
        "launch": "fedcba9876543210",
        **of(gate.__name__),
        "entry": build.checksum(entry),
        "cubin": build.checksum(behaviour.CUBIN),
    }
    return build.Built(LABEL, entry, behaviour.CUBIN, about | changed)


def built_all() -> list[build.Built]:
    """The same kernel under the name of every variant, as a wheel has to have them."""
    return [
        kernel._replace(label=label, about=kernel.about | of(module))
        for kernel in [built()]
        for label in digests.recorded()
        for module in [sources.module_of(label)]
    ]


def write(folder: Path, *kernels: build.Built, of_set: str = "13") -> Path:
    versions = {"tilelang": "0.1.15", "nvcc": "release 13.0, V13.0.88"}
    return build.write(kernels or [built()], folder, of_set, versions)
