"""Which TileLang compiles our kernels, and what to do without one.

It is not imported here: this package works without it.
"""

import importlib.metadata
import importlib.util
import re

from qla_kernels.runtime.errors import need

OLDEST_TILELANG = "0.1.13"  # of pyproject's extra `compile`; a test compares them
NEEDS_TILELANG = f"TileLang {OLDEST_TILELANG} or newer"
INSTALL = "pip install '.[compile]' in a checkout of qla-kernels"  # the package is on no index
WHEEL = "use a wheel of qla-kernels with kernels in it"


def can_compile() -> bool:
    """Returns whether a TileLang is installed that compiles what is not prebuilt."""
    return importlib.util.find_spec("tilelang") is not None and too_old() is None


def too_old() -> str | None:
    """Returns the installed TileLang's version if our kernels need a newer one, else None."""
    try:
        version = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:  # a checkout of it may be in the path
        return None
    return version if _numbers(version) < _numbers(OLDEST_TILELANG) else None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def refusal(tool: str, lacking: str = "", error: ImportError | None = None) -> str:
    """Returns the text of an error: there is no TileLang, or only one that is too old.

    Args:
        tool: what would compile.
        lacking: why no prebuilt kernel is there, if one would do.
        error: of TileLang's import; None if its version is too old.
    """
    needs = NEEDS_TILELANG + (", or prebuilt kernels" if lacking else "")
    if error is None:
        got, fix = f"tilelang is {too_old()}", WHEEL if lacking else "use another environment"
        fix += ": an engine pins its TileLang"
    else:
        got = f"tilelang cannot be imported ({error})"
        fix = f"{INSTALL}, or {WHEEL}" if lacking else INSTALL
    return need(tool, f"{lacking}, and {got}" if lacking else got, needs, fix)
