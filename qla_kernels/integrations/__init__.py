"""Makes models of other libraries run on our kernels.

    from qla_kernels import integrations

    integrations.fla.register()
    integrations.transformers.swap(model)

Most modules here have the name of their library. Use them through `integrations`, as above: a plain
import would hide the library's own name. A module is imported when it is first used. This package
imports no other library.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qla_kernels.integrations import (
        fla,
        megatron,
        sglang,
        transformers,
        transformers_dualkv,
        transformers_sparse_ring,
        trl,
        trl_async,
        verl,
        vllm,
    )

__all__ = [
    "fla",
    "megatron",
    "sglang",
    "transformers",
    "transformers_dualkv",
    "transformers_sparse_ring",
    "trl",
    "trl_async",
    "verl",
    "vllm",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
