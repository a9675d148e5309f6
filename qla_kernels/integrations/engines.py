"""Facts about the inference engines that plug-ins of this package work with.

A plug-in replaces parts of an engine that are not a public interface, so that it knows each version
by name. tests/host/engines.json has the digests of these parts.
"""

import logging
from importlib import metadata

from qla_kernels.errors import need

log = logging.getLogger("qla_kernels")

KNOWN = {"vllm": ("0.33.0",), "sglang": ("0.5.23",)}


def unknown_version(engine: str) -> str | None:
    """Returns why the plug-in does not work with the installed engine, or None if it does."""
    try:
        got = f"{engine} {metadata.version(engine).partition('+')[0]}"
    except metadata.PackageNotFoundError:
        got = f"{engine} is not installed"
    known = [f"{engine} {version}" for version in KNOWN[engine]]
    if got in known:
        return None
    return need("qla_kernels", got, " or ".join(known), "install it, or leave the plug-in off")
