"""Reads what `measure` measures: q and k of a dump, or of a model that runs over tokens.

Whatever is wrong with a file or an option raises a ValueError that says so.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qla_kernels.runtime.errors import need
from qla_kernels.sparse_ring.patterns import Dense
from qla_kernels.sparse_ring.shapes import BLOCK, TILE

OP = "sparse_ring.measure"
FORM, SAVE = '{"q": [T, H, D], "k": [T, Hk, D]}, or a dict of these by layer', "save it so"
LEAST = -(-3 * BLOCK // TILE) * TILE  # tokens: held-out rows need three blocks, calls whole tiles
PAGE = "docs/long-context.md#the-training-program"

OnLayer = Callable[..., None]  # gets layer, q [1, T, H, D] and k [1, T, Hk, D]; perhaps an index


def measure_dump(file: Path, measured: OnLayer, device: str) -> None:
    """Measures the layers of a dump, whose format the docstring of `measure` describes."""
    saved = torch.load(file, weights_only=True, map_location="cpu")
    if not isinstance(saved, dict):
        raise ValueError(need(OP, f"a {type(saved).__name__} in {file}", FORM, SAVE))
    layers = {"0": saved} if {"q", "k"} <= set(saved) else saved
    for layer, heads in layers.items():
        q, k = _heads(f"layer {layer!r} of {file}", heads)
        T = len(q) // TILE * TILE
        q, k = (x[None, :T].to(device).contiguous() for x in (q, k))
        measured(layer, q, k)


def _heads(where: str, heads: Any) -> tuple[Tensor, Tensor]:
    """Returns q and k of a layer of a dump; ValueError unless they are [T, H, D] and [T, Hk, D]."""
    held = heads if isinstance(heads, dict) else {}
    q, k = held.get("q"), held.get("k")
    if not (isinstance(q, Tensor) and isinstance(k, Tensor)):
        raise ValueError(need(OP, where, FORM, SAVE))
    for name, x in (("q", q), ("k", k)):
        got = f"{where}: {name} is {list(x.shape)}"
        if x.dim() != 3:
            fix = f"save {name}[0] of a batch of one sequence"
            raise ValueError(need(OP, got, "[T, heads, D]", fix))
        if x.shape[0] < x.shape[1]:
            got += f", read as [T, heads, D]: {x.shape[0]} tokens of {x.shape[1]} heads"
            fix = f"save {name}.transpose(0, 1)"
            raise ValueError(need(OP, got, "more tokens than heads", fix))
    both = f"{where}: q is {list(q.shape)}, k is {list(k.shape)}"
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        needs = "[T, H, D] and [T, Hk, D] with H a multiple of Hk"
        raise ValueError(need(OP, both, needs, "save both of one sequence, after rotary embedding"))
    if len(q) < TILE:
        fix = "dump a longer sequence"
        raise ValueError(need(OP, f"{both}: {len(q)} tokens", f"at least {TILE}", fix))
    return q, k


def read_tokens(file: Path, start: int, length: int | None) -> Tensor:
    """Returns at most `length` tokens of a file of numpy.save, from `start` on, in whole tiles."""
    tokens = importlib.import_module("numpy").load(file, mmap_mode="r")
    if tokens.ndim != 1:
        got, fix = f"{file} has the shape {list(tokens.shape)}", "save it flat"
        raise ValueError(need(OP, got, "one dimension", fix))
    end = len(tokens) if length is None else start + length
    return _whole_tiles(torch.from_numpy(tokens[start:end].astype("int64")), str(file), length)


def read_text(file: Path, model: str, length: int | None) -> Tensor:
    """Returns at most `length` tokens of a text, in whole tiles, by the tokenizer of a model."""
    tokenizer = importlib.import_module("transformers").AutoTokenizer
    text = file.read_text()
    tokens = tokenizer.from_pretrained(model)(text, return_tensors="pt")["input_ids"].flatten()
    if len(tokens) == 0 and text:
        got, fix = f"no tokenizer in {model}", "pass --tokens, or copy the tokenizer's files there"
        raise ValueError(need(OP, got, "one that makes tokens", fix))
    return _whole_tiles(tokens[:length], str(file), length)


def _whole_tiles(tokens: Tensor, file: str, length: int | None) -> Tensor:
    if length is not None and length < LEAST:
        raise ValueError(need(OP, f"--length {length}", f"at least {LEAST}", "pass a larger one"))
    if len(tokens) < LEAST:
        got, fix = f"{len(tokens)} tokens of {file}", "pass more of them"
        raise ValueError(need(OP, got, f"at least {LEAST}", fix))
    return tokens[: len(tokens) // TILE * TILE]


def measure_model(model: Any, tokens: Tensor, measured: OnLayer, device: str) -> None:
    """Runs a model of transformers over tokens [T], T a multiple of 128, and measures each layer.

    Attention is exact, and logits are not computed.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        got = f"tokens from {int(tokens.min())} to {int(tokens.max())}"
        fix = "make them with this model's tokenizer"
        raise ValueError(need(OP, got, f"0 to {vocabulary - 1}, the model's vocabulary", fix))
    hook: Any = importlib.import_module("qla_kernels.integrations.transformers_sparse_ring")
    hook.prepare(model)
    settings = hook.SparseRingConfig(pattern=Dense(), on_index=measured)
    with torch.no_grad():
        decoder = model.get_decoder().to(device).eval()
        decoder(
            input_ids=tokens[None].to(device),
            position_ids=torch.arange(len(tokens), device=device)[None],
            use_cache=False,
            sparse_ring=settings,
        )


def beyond(config: Any, tokens: int) -> str | None:
    """Returns a warning if a model of transformers was made for fewer positions, or None."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is None or tokens <= most:
        return None
    return f"warning: {tokens} tokens, max_position_embeddings is {most}: see {PAGE}"
