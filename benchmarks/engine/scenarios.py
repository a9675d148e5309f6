"""What runs in which engine: scenarios, each with engines that are off and on, and the commands."""

from typing import Any, NamedTuple

ASK: dict[str, Any] = {"do": "ask"}
BF16 = {"states": "bfloat16"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4,
         "prompt_lookup_min": 2}  # fmt: skip
MTP = {"method": "mtp", "num_speculative_tokens": 2}


class Scenario(NamedTuple):
    """Engines of one model with the same options, and what they are asked."""

    kind: str
    options: dict[str, Any]
    engines: tuple[dict[str, Any], ...]
    commands: tuple[dict[str, Any], ...] = (ASK,)
    size: str = "check"


def _engines(*named: str) -> tuple[dict[str, Any], ...]:
    """Returns engines such as "off:triton": who runs, and which prefill vLLM is told."""
    split = (name.partition(":") for name in named)
    return tuple({"who": who, "prefill": prefill or "flashinfer"} for who, _, prefill in split)


# A rival of FlashInfer needs its package; `off:triton` runs without
PAIR = _engines("off:triton", "on")
SCENARIOS = {
    "dense": Scenario("qwen35", {}, _engines("off:triton", "off", "on", "on:triton")),
    "dense-bf16": Scenario("qwen35", BF16, PAIR),
    "moe": Scenario("qwen35-moe", {}, PAIR, size="few"),
    "next": Scenario("next-moe", {"states": "auto"}, PAIR, size="few"),
    "next-fp32": Scenario("next-moe", {}, PAIR, size="few"),
    "chunked": Scenario("qwen35", {"chunk": 1024}, PAIR),
    "no-caching": Scenario("qwen35", {"caching": False}, PAIR),
    "preemption": Scenario("qwen35", {"blocks": 56}, PAIR, ({"do": "ask", "crowd": 12},)),
    "sleep": Scenario("qwen35", {"sleep": True}, PAIR[1:], ({"do": "sleep"}, ASK)),
    "eager": Scenario("qwen35", {"eager": True}, PAIR),
    "compile": Scenario("qwen35", {"mode": 3, "graphs": "FULL_AND_PIECEWISE"}, PAIR),
    "piecewise": Scenario("qwen35", {"mode": 3, "graphs": "PIECEWISE"}, PAIR),
    "ngram": Scenario("qwen35", {"spec": NGRAM}, PAIR),
    "mtp": Scenario("qwen35", {"spec": MTP}, PAIR),
    "mtp-fused": Scenario("qwen35", {"spec": MTP, "gdn_decode": "cuda"}, PAIR),
    "next-mtp": Scenario("next-moe", {"spec": MTP}, PAIR, size="few"),
    "bits": Scenario("qwen35", {"bits": True, "eager": True}, PAIR[1:], ({"do": "bits"}, ASK)),
    "bits-graphs": Scenario("qwen35", {"bits": True}, PAIR[1:]),
    "tp2": Scenario("qwen35", {"gpus": 2}, PAIR),
}
# Sequences x tokens, and sequences that decode
SHAPES = [
    [1, 16], [1, 256], [1, 1024], [1, 4096], [1, 16000], [2, 8000], [4, 4096], [8, 2000],
    [16, 1024], [64, 16], [64, 64], [64, 256],
]  # fmt: skip
DECODES = [1, 64, 256]
PROFILE: dict[str, Any] = {
    "eager": True, "dummy": True, "caching": False, "seqs": 256, "cache_gb": 8,
}  # fmt: skip
RIVALS = {"off:triton": "triton", "off": "flashinfer"}
PROFILES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("qwen35", PROFILE),
    "bf16": ("qwen35", PROFILE | BF16),
    "next": ("next-moe", PROFILE | {"states": "auto"}),
}
BENCH: dict[str, Any] = {"dummy": True, "mode": 3, "graphs": "FULL_AND_PIECEWISE", "cache_gb": 24}
LOADS = [(64, 8192, 256), (64, 1024, 128), (8, 8192, 256), (8, 1024, 128)]
