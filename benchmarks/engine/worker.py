"""An engine of vLLM in a process of its own: reads commands as lines of JSON, answers in a file.

    python -m benchmarks.engine.worker ANSWERS '{"who": "on", "kind": "qwen35", ...}'

Commands: ask, bench, profile, bits, sleep, stop; the functions below are named like them.
"""

import functools
import importlib
import itertools
import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from . import models

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "QLA_LOG": "info",
    "TOKENIZERS_PARALLELISM": "false", "VLLM_USE_DEEP_GEMM": "0", "PYTHONUNBUFFERED": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}  # fmt: skip
SIZES = [1, 2, 4, 8, 16, 32, 64]  # of batches whose decoding step is a CUDA graph


def environment(setup: dict[str, Any]) -> dict[str, str]:
    """Returns the variables of a worker's environment."""
    given = ENVIRONMENT | {"VLLM_PLUGINS": "qla_kernels" if setup["who"] == "on" else ""}
    if setup.get("bits"):
        given["QLA_BATCH_INVARIANT"] = "1"
    if setup.get("spec"):  # otherwise Qwen3.5's drafts run on vLLM's CUDA kernel
        given["VLLM_GDN_DECODE_KERNEL"] = setup.get("gdn_decode", "triton")
    if setup.get("cpu"):
        given |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "2"}
        given |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return given


def options(setup: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of vLLM's LLM."""
    timed = setup.get("dummy", False)
    place = models.folder if timed else functools.partial(models.checkpoint, device="cpu")
    given: dict[str, Any] = {
        "model": str(place(setup["kind"], setup["size"])), "skip_tokenizer_init": True, "seed": 0,
        "load_format": "dummy" if timed else "auto", "dtype": "bfloat16",
        "max_model_len": 2048 if setup.get("cpu") else 24576,
        "max_num_batched_tokens": setup.get("chunk", 16384), "max_num_seqs": setup.get("seqs", 64),
        "enable_prefix_caching": setup.get("caching", True) and not setup.get("bits"),
        "mamba_ssm_cache_dtype": setup.get("states", "float32"),
        "gdn_prefill_backend": setup.get("prefill", "flashinfer"), "disable_log_stats": False,
        "max_logprobs": 5, "gpu_memory_utilization": 0.04,
        "kv_cache_memory_bytes": int(setup.get("cache_gb", 3) * 2**30),
        "tensor_parallel_size": setup.get("gpus", 1),
        "enable_sleep_mode": setup.get("sleep", False),
    }  # fmt: skip
    if setup.get("blocks"):
        given["num_gpu_blocks_override"] = setup["blocks"]
    if setup.get("spec"):
        given["speculative_config"] = setup["spec"]
    if setup.get("cpu"):
        for name in ("gpu_memory_utilization", "kv_cache_memory_bytes"):
            del given[name]
        return given | {"enforce_eager": True}
    if setup.get("backend", "FLASH_ATTN"):
        given["attention_backend"] = setup.get("backend", "FLASH_ATTN")
    if setup.get("eager"):
        return given | {"enforce_eager": True}
    given["compilation_config"] = {
        "mode": setup.get("mode", 0), "cudagraph_mode": setup.get("graphs", "FULL_DECODE_ONLY"),
        "cudagraph_capture_sizes": SIZES,
    }  # fmt: skip
    return given


class Worker:
    """The engine, and what the commands need of it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup, self.small = setup, setup.get("cpu", False)
        begin = time.perf_counter()
        import torch

        if not hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.11 beside vLLM 0.33.0
            torch.accelerator.empty_host_cache = lambda: None
        if setup["who"] == "off" and setup.get("prefill", "flashinfer") == "flashinfer":
            borrow_flashinfer()
        self.calls = count_calls() if setup["who"] == "on" else Counter()
        if setup.get("hook"):
            runpy.run_path(setup["hook"], {"setup": setup})
        from vllm import LLM, SamplingParams

        self.params = functools.partial(
            SamplingParams, temperature=0, detokenize=False, ignore_eos=True
        )
        imported = time.perf_counter()
        self.llm = LLM(**options(setup))
        config = self.llm.llm_engine.vllm_config
        self.about = {
            "import_s": round(imported - begin, 1),
            "start_s": round(time.perf_counter() - imported, 1),
            "cache_mode": str(config.cache_config.mamba_cache_mode),
            "block_size": config.cache_config.block_size,
            "blocks": config.cache_config.num_gpu_blocks,
            "graphs": str(config.compilation_config.cudagraph_mode),
            "layers": self.llm.apply_model(layer_names)[0],
            "versions": versions(),
        }

    def metric(self, name: str) -> float:
        """Returns the sum of a counter of vLLM's."""
        mine = [x for x in self.llm.get_metrics() if x.name == f"vllm:{name}"]
        return float(sum(x.value for x in mine))

    def run(self, prompts: dict[str, list[int]], params: Any) -> dict[str, Any]:
        given = [{"prompt_token_ids": x} for x in prompts.values()]
        return dict(zip(prompts, self.llm.generate(given, params, use_tqdm=False), strict=True))

    def ask(self, new: int = 24, crowd: int = 0, **_: Any) -> dict[str, Any]:
        """Greedy tokens of all prompts with their log-probabilities; those of prompts' tokens.

        crowd: so many prompts that end just before a block of the cache does, in place of others.
        """
        size = self.about["block_size"]
        crowded = {f"n{i}": models.tokens(900 + i, size - 4) for i in range(crowd)}
        given = crowded or models.prompts(self.small)
        params = self.params(max_tokens=new, logprobs=0)
        self.llm.reset_prefix_cache()
        first = {name: greedy(out) for name, out in self.run(given, params).items()}
        self.llm.reset_prefix_cache()
        again = {name: greedy(out) for name, out in self.run(given, params).items()}
        self.llm.reset_prefix_cache()
        shared = {}
        for name in [x for x in given if x.startswith("s")]:  # later ones hit the cache
            shared[name] = greedy(self.run({name: given[name]}, params)[name])
        few = {name: x for name, x in given.items() if name[0] == "n" and 16 < len(x) < 5000}
        outs = self.run(few, self.params(max_tokens=1, prompt_logprobs=0))
        prompt = {k: [of_token(x) for x in out.prompt_logprobs[1:]] for k, out in outs.items()}
        return {
            "given": given, "first": first, "again": again, "shared": shared, "prompt": prompt,
            "same_bits": first == again, "hits": sum(bool(x["cached"]) for x in shared.values()),
            "preempted": self.metric("num_preemptions"), "calls": dict(self.calls),
            "accepted": self.metric("spec_decode_num_accepted_tokens"),
            "drafts": self.metric("spec_decode_num_draft_tokens"),
        }  # fmt: skip

    def sleep(self, level: int = 1, **_: Any) -> dict[str, Any]:
        """The same tokens before and after a sleep."""
        given, params = models.prompts(self.small), self.params(max_tokens=8, logprobs=0)
        before = {name: greedy(out) for name, out in self.run(given, params).items()}
        self.llm.reset_prefix_cache()
        self.llm.sleep(level)
        self.llm.wake_up()
        self.llm.reset_prefix_cache()
        after = {name: greedy(out) for name, out in self.run(given, params).items()}
        return {"same_bits": before == after}

    def bench(self, requests: int, isl: int, osl: int, seed: int = 0, **_: Any) -> dict[str, Any]:
        """Time to the first token, times between tokens, tokens a second; all requests at once."""
        engine, vocab = self.llm.llm_engine, models.config(self.setup["kind"], self.setup["size"])
        self.llm.reset_prefix_cache()
        params = self.params(max_tokens=osl)
        times: dict[str, list[float]] = {}
        seen: Counter[str] = Counter()
        given = [
            models.tokens(seed * 100003 + isl * 1009 + i, isl, vocab["vocab_size"])
            for i in range(requests)
        ]
        begin = time.perf_counter()
        for i, x in enumerate(given):
            engine.add_request(f"{seed}-{isl}-{requests}-{i}", {"prompt_token_ids": x}, params)
        while engine.has_unfinished_requests():
            outs = engine.step()
            now = time.perf_counter()
            for out in outs:
                count = len(out.outputs[0].token_ids)
                if count > seen[out.request_id]:
                    seen[out.request_id] = count
                    times.setdefault(out.request_id, []).append(now)
        whole = time.perf_counter() - begin
        assert sum(seen.values()) == requests * osl, seen
        first = sorted(1e3 * (x[0] - begin) for x in times.values())
        between = sorted(1e3 * (b - a) for x in times.values() for a, b in itertools.pairwise(x))
        return {
            "requests": requests, "isl": isl, "osl": osl, "seconds": whole,
            "tokens_per_s": requests * osl / whole,
            "ttft_p50": at(first, 0.5), "ttft_p99": at(first, 0.99),
            "itl_p50": at(between, 0.5), "itl_p99": at(between, 0.99),
        }  # fmt: skip

    def profile(self, shapes: list[list[int]], decodes: list[int], **_: Any) -> dict[str, Any]:
        """GPU time of the layers' region by kernel, in prefill and in decoding."""
        from . import profile

        return profile.measure(self, shapes, decodes)

    def bits(self, **_: Any) -> dict[str, Any]:
        """Bits of a gated-delta layer in the engine, and of one training forward."""
        from . import bits

        return bits.compare(self)


def at(ordered: list[float], part: float) -> float:
    """Returns a quantile of ordered numbers, the nearest one."""
    return round(ordered[min(int(part * len(ordered)), len(ordered) - 1)], 3)


def of_token(step: dict[int, Any]) -> float:
    """Returns the log-probability of the token that vLLM reports first, the given one."""
    return round(float(next(iter(step.values())).logprob), 5)


def greedy(out: Any) -> dict[str, Any]:
    one = out.outputs[0]
    chosen = [step[t].logprob for t, step in zip(one.token_ids, one.logprobs, strict=True)]
    return {"ids": list(one.token_ids), "lp": chosen, "cached": out.num_cached_tokens or 0}


def layer_names(model: Any) -> list[str]:
    return sorted({type(x).__name__ for x in model.modules() if models.is_layer(x)})


def count_calls() -> "Counter[str]":
    """Counts the calls of our kernels by their kind; those in replayed graphs are not seen."""
    plug_in: Any = importlib.import_module("qla_kernels.integrations.vllm")
    of_bits: Any = importlib.import_module("qla_kernels.integrations.vllm_bits")
    calls: Counter[str] = Counter()
    say = plug_in.say_ran

    def counted(engine: str, what: str, where: Any) -> None:
        calls[what] += 1
        say(engine, what, where)

    plug_in.say_ran = of_bits.say_ran = counted
    return calls


def borrow_flashinfer() -> None:
    """FlashInfer's prefill without its other functions, which may not be installed."""
    import vllm.utils.flashinfer as used

    used.has_flashinfer = lambda: False
    import flashinfer.gdn_prefill  # noqa: F401


def versions() -> dict[str, str]:
    from importlib import metadata

    import torch

    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("vllm", "triton", "flashinfer", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            module = sys.modules.get(name)
            if module is not None:
                found[name] = getattr(module, "__version__", "?")
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def main() -> None:
    answers, setup = sys.argv[1], json.loads(sys.argv[2])
    os.environ.update(environment(setup))

    def answer(what: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        try:
            result = call()
        except Exception as error:
            import traceback

            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:600]}
        seconds = round(time.perf_counter() - begin, 1)
        with open(answers, "a") as file:
            print(json.dumps({"do": what, "seconds": seconds, "result": result}), file=file)
        return result

    worker: Any = None

    def start() -> Any:
        nonlocal worker
        worker = Worker(setup)
        return worker.about

    if "error" in answer("start", start):
        os._exit(1)
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "stop":
            break
        answer(what, functools.partial(getattr(worker, what), **command))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
