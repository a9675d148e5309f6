"""Who is timed on pools of states."""

from ..harness.adapters import Implementation
from .engines import VLLM, SGLang
from .flashinfer import FlashInferGathers, FlashInferPool
from .ours import OursOneToken, OursServing, OursTwo


def known() -> list[Implementation]:
    others = OursOneToken(), OursTwo(), FlashInferGathers(), FlashInferPool(), VLLM(), SGLang()
    return [OursServing(), *others]
