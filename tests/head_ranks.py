"""Two ranks of FSDP2 or ZeRO-3 whose model has our head, for tests/host/test_packed_head.py."""

import importlib
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from qla_kernels import pack_shared_prompts
from qla_kernels.integrations import transformers_dualkv
from qla_kernels.integrations.packed_head import packed_head

VOCABULARY = 40
WAYS = ("kept", "gathered again", "tied", "cast", *(("adapters",) if find_spec("peft") else ()))
WAYS += ("ZeRO-3",) if find_spec("deepspeed") else ()


def model_of(way: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=way == "tied",
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    transformers_dualkv.prepare(model)
    if way != "adapters":
        return model
    import peft

    settings = {"r": 4, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))


def bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def by_zero(model: Any, rank: int) -> dict[str, Any]:
    """Gradients under DeepSpeed's ZeRO-3, which gathers a module's weights when it is called."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    deepspeed = importlib.import_module("deepspeed")
    comm: Any = importlib.import_module("deepspeed.comm.torch")
    comm.build_shm_op = lambda: None  # it would compile C++
    deepspeed.init_distributed(dist_backend="gloo")
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage,
                "zero_allow_untested_optimizer": True},
    )  # fmt: skip
    engine.backward(loss(engine, model, rank))
    gather = importlib.import_module("deepspeed.utils").safe_get_full_grad
    return {name: gather(p) for name, p in model.named_parameters()}


def gradients(model: Any, rank: int) -> dict[str, Any]:
    """Those of a rank's own batch, of which gloo makes the mean."""
    loss(model, bare(model), rank).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def loss(model: Any, inner: Any, rank: int) -> Any:
    draw = torch.Generator().manual_seed(rank)
    ids = lambda n: torch.randint(VOCABULARY, (n,), generator=draw)  # noqa: E731
    batch = pack_shared_prompts([ids(5)], [[ids(4 + rank), ids(1), ids(3)]])
    with packed_head(inner, batch, temperature=0.7) as values:
        logprobs, entropies = values(model(**batch.model_inputs()))
    return logprobs.sum() + entropies.square().sum()


def main(folder: Path, port: int, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    said: dict[str, dict[str, float]] = {}
    for way in WAYS:
        wanted = [gradients(model_of(way), other) for other in range(world)]
        model = model_of(way)
        if way == "ZeRO-3":
            got = by_zero(model, rank)
        else:
            # a policy casts the tensors of each module's arguments, also those in dataclasses
            policy = MixedPrecisionPolicy(param_dtype=torch.float32 if way == "cast" else None)
            options = {"reshard_after_forward": way != "kept", "mp_policy": policy}
            for layer in bare(model).model.layers:
                fully_shard(layer, **options)
            fully_shard(model, **options)
            got = {name: x.full_tensor() for name, x in gradients(model, rank).items()}
        said[way] = {}
        for name in wanted[0]:
            want = torch.stack([x[name] for x in wanted]).mean(0)
            said[way][name] = float((got[name] - want).norm() / want.norm())
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()
