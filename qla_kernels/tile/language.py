"""TileLang's language, imported when a kernel is traced rather than when its file is imported.

Kernel files say `import qla_kernels.tile.language as T`. Host code reads variants, schedules and
sizes from kernel files, also where TileLang is not installed: prebuilt kernels need none. Without
this, importing gdn's kernels takes 2 s, most of it for macros that nobody uses.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("tilelang.language"), name)


class macro:
    """A TileLang macro that is made from its function when it is first used."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._made(*args, **kwargs)

    @functools.cached_property
    def _made(self) -> Any:
        return importlib.import_module("tilelang.language").macro(self.__wrapped__)


def make_full_bank_swizzled_layout(buffer: Any) -> Any:
    return importlib.import_module("tilelang.layout").make_full_bank_swizzled_layout(buffer)
