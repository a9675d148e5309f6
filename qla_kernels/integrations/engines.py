"""The inference engines for which this package has plug-ins, and their versions.

A plug-in replaces parts of an engine that are not a public interface, so it works only with the
versions listed here. tests/host/engines.json has the digests of these parts.
"""

import logging
import os
from functools import cache
from importlib import metadata

import torch

from qla_kernels.gdn import prefill_refusal, refusal
from qla_kernels.runtime import device
from qla_kernels.runtime.errors import need
from qla_kernels.runtime.sm90 import CAPABILITY

log = logging.getLogger("qla_kernels")

KNOWN = {"vllm": ("0.33.0",), "sglang": ("0.5.23",)}


def unknown_version(engine: str) -> str | None:
    """Returns why this package's plug-in for an inference engine cannot run, or None if it can.

    It cannot if the engine is not installed, or in another version than those that the plug-in was
    tested with. `engine` is "vllm" or "sglang".
    """
    try:
        got = f"{engine} {metadata.version(engine).partition('+')[0]}"
    except metadata.PackageNotFoundError:
        got = f"{engine} is not installed"
    known = [f"{engine} {version}" for version in KNOWN[engine]]
    if got in known:
        return None
    return need("qla_kernels", got, " or ".join(known), "install it, or leave the plug-in off")


def say_ran(engine: str, what: str, where: torch.device) -> None:
    """Logs that an inference engine's call ran on this package's kernels.

    Logs once for each kind of call and device. Calls that are replayed from a CUDA graph run no
    Python, so they log nothing.

    Args:
        engine: the name of the engine, such as "vLLM".
        what: the kind of call, such as "prefill".
        where: the device of the call's tensors.
    """
    if not torch.compiler.is_compiling():
        _say_first(engine, what, str(where))


@cache
def _say_first(engine: str, what: str, where: str) -> None:
    log.info("%s: the first %s went to qla_kernels, on %s", engine, what, where)


def plug_in_of_vllm() -> str:
    """Returns a line of text about this package's plug-in for vLLM.

    It says which version of vLLM is installed, and whether the plug-in fits it and is switched on.
    """
    named = os.environ.get("VLLM_PLUGINS")
    on = "on" if "qla_kernels" in (named or "").split(",") else "off"
    return _fits("vllm", f"VLLM_PLUGINS is {'not set' if named is None else repr(named)}: {on}")


def plug_in_of_sglang() -> str:
    """Returns a line of text about this package's plug-in for SGLang.

    It says which version of SGLang is installed, whether the plug-in fits it, and which options
    switch it on.
    """
    return _fits(
        "sglang", "on by --linear-attn-prefill-backend qla and --linear-attn-decode-backend qla"
    )


def refused_layer(
    K: int, V: int, dtype: torch.dtype, states: torch.dtype, *, prefill: bool = True
) -> str | None:
    """Returns why this package cannot run a gated-delta-net layer of vLLM or SGLang, or None.

    The answer is for the GPU of this process, or for a Hopper GPU if there is none.

    Args:
        K, V: sizes of a key and of a value.
        dtype: of q, k and v.
        states: the dtype of the engine's state cache.
        prefill: True if the kernels are to run prefill, False if they are to run decoding alone.
    """
    q, v = (torch.empty(0, 1, 1, size, dtype=dtype, device="cpu") for size in (K, V))
    pool = torch.empty(0, 1, V, K, dtype=states, device="cpu")
    here = CAPABILITY
    if device.available():
        here = device.capability(torch.device("cuda", torch.cuda.current_device()))
    if prefill:
        return prefill_refusal(q, q, v, pool=pool, capability=here)
    return refusal(q, q, v, capability=here)


PLUG_INS = {"vLLM plug-in": plug_in_of_vllm, "SGLang plug-in": plug_in_of_sglang}


def _fits(engine: str, switch: str) -> str:
    try:
        version = metadata.version(engine)
    except metadata.PackageNotFoundError:
        return f"not installed; the plug-in works with {' or '.join(KNOWN[engine])}"
    if reason := unknown_version(engine):
        return f"{version} is installed; refused: {reason}"
    return f"{version} is installed, a known version; {switch}"
