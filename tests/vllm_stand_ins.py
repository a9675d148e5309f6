"""Stand-ins for vLLM: its module of the gated-delta layer, its layer, its scheduling on pages."""

import json
import random
import sys
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qla_kernels import chunk_gated_delta_rule
from qla_kernels.integrations import vllm_bits

RECORD = json.loads((Path(__file__).parent / "host" / "engine_interfaces.json").read_text())
WIDTH = 4  # of the convolution
SIZES = 64, 64, 2, 4  # K, V, heads and value heads of a layer, on two ranks
LIMIT = 2e-5  # of fp32: products of 64 numbers in another order, over some 5 chunks


def recorded(engine: str, name: str) -> dict[str, Any]:
    entries = RECORD[engine]["interfaces"]
    return next(x for full, x in entries.items() if full.rpartition(":")[2] == name)


class Engine:
    """What vLLM's module has for our layer; a convolution that changes nothing.

    A step of decoding does not use it: the weights of `vllm_layer` change nothing either.
    """

    def __init__(self, batch: Any) -> None:
        self.batch, self.exported = batch, None

    def get_forward_context(self) -> Any:
        return SimpleNamespace(attn_metadata={"layer": self.batch})

    def is_conv_state_dim_first(self) -> bool:
        return True

    def causal_conv1d_update(self, *args: Any, **named: Any) -> Any:
        return self._convolved("causal_conv1d_update", args, named)

    def causal_conv1d_fn(self, *args: Any, **named: Any) -> Any:
        return self._convolved("causal_conv1d_fn", args, named)

    def _convolved(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        names = recorded("vllm", name)["parameters"]
        assert set(named) <= set(names[len(args) :]), f"{name} does not take {sorted(named)}"
        return args[0]

    def current_workspace_manager(self) -> Any:
        def get_simultaneous(spec: Any) -> tuple[torch.Tensor]:
            shape, dtype = spec
            return (torch.full(shape, torch.nan, dtype=dtype),)

        return SimpleNamespace(get_simultaneous=get_simultaneous)


def metadata_of(**given: Any) -> Any:
    """GDNAttentionMetadata, with the fields that the record has and no others."""
    fields = recorded("vllm", "GDNAttentionMetadata")["fields"]
    assert set(given) <= set(fields)
    return SimpleNamespace(**dict.fromkeys(fields) | given)


def configuration(**changes: Any) -> Any:
    """What the layer reads of a VllmConfig."""
    cache = {
        "mamba_cache_mode": "none", "mamba_ssm_cache_dtype": "auto", "cache_dtype": "auto",
        "kv_cache_dtype_skip_layers": [], "block_size": 16, "mamba_block_size": 4096,
        "mamba_page_size_padded": None, "use_replayssm": False,
    }  # fmt: skip
    model = SimpleNamespace(
        dtype=torch.bfloat16, architecture="Qwen3NextForCausalLM", use_mla=False,
        get_num_kv_heads=lambda _: 1, get_head_size=lambda: 1,
    )  # fmt: skip
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**cache), speculative_config=None, kv_transfer_config=None,
        model_config=model, parallel_config=None, num_speculative_tokens=0,
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )  # fmt: skip
    for name, value in changes.items():
        owner = next((x for x in (config.cache_config, model) if hasattr(x, name)), config)
        setattr(owner, name, value)
    return config


class OwnLayer:
    """What vLLM's layer has for ours."""

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        self.model_config, self.prefix, self.tp_size = vllm_config.model_config, prefix, 2
        self.head_k_dim, self.head_v_dim, self.num_k_heads, self.num_v_heads = config
        self.key_dim = self.head_k_dim * self.num_k_heads
        self.value_dim = self.head_v_dim * self.num_v_heads
        channels = (2 * self.key_dim + self.value_dim) // self.tp_size
        weight = torch.zeros(channels, 1, WIDTH)
        weight[..., -1] = 1  # changes nothing
        self.conv1d, self.activation = SimpleNamespace(weight=weight, bias=None), None
        self.A_log = torch.linspace(-3, 0, self.num_v_heads // self.tp_size)
        self.dt_bias = torch.randn(self.num_v_heads // self.tp_size)
        _, dtype = self.get_state_dtype()  # vLLM's layer takes two apart
        assert dtype == torch.float32

    def get_state_shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        heads = self.num_v_heads // self.tp_size
        convolution = self.conv1d.weight.shape[0], WIDTH - 1
        return convolution, (heads, self.head_v_dim, self.head_k_dim)

    def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
        return self.model_config.dtype, self.model_config.dtype

    def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        core_attn_out.fill_(7)  # vLLM's own


@dataclass(frozen=True)
class PlainSpec:
    shapes: Any
    dtypes: Any
    block_size: int


def plain_modules(monkeypatch: Any, model: type) -> None:
    """What `size_pages` imports of vLLM."""
    registry = SimpleNamespace(resolve_model_cls=lambda *_, **__: (model, "name"))
    module(monkeypatch, "vllm.model_executor.models", ModelRegistry=registry)
    module(monkeypatch, "vllm.v1.kv_cache_interface", MambaSpec=PlainSpec)


def module(monkeypatch: Any, name: str, **contents: Any) -> None:
    """Makes a module of vLLM importable, with these contents beside those that it has."""
    parent, _, own = name.rpartition(".")
    if parent and parent not in sys.modules:
        module(monkeypatch, parent)
    made = sys.modules.get(name) or ModuleType(name)
    for key, value in contents.items():
        monkeypatch.setattr(made, key, value, raising=False)
    monkeypatch.setitem(sys.modules, name, made)
    if parent:
        monkeypatch.setattr(sys.modules[parent], own, made, raising=False)


def bits_layer(
    monkeypatch: Any, config: Any, batch: Any = None, base: type = OwnLayer, sizes: Any = None
) -> tuple[Any, Engine, type]:
    """Returns our layer on a stand-in for vLLM's, its engine, and the class of the model."""
    model, engine = type("Model", (), {}), Engine(batch)
    plain_modules(monkeypatch, model)
    engine.QwenGatedDeltaNetAttention = base
    layer = vllm_bits.layer_on(engine)(sizes or SIZES, config, prefix="layer")
    return layer, engine, model


def trained(layer: Any, rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Returns o [T, HV, V] of a training forward over one sequence."""
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    q, k, v = torch.split(rows[None], [keys, keys, values], -1)
    q, k = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (q, k))
    o, _ = chunk_gated_delta_rule(
        q, k, v.unflatten(-1, (-1, layer.head_v_dim)), a[None], b[None],
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        A_log=layer.A_log, dt_bias=layer.dt_bias, batch_invariant=True,
    )  # fmt: skip
    return o[0].detach()


@dataclass
class Request:
    """A sequence that vLLM serves: its tokens are drawn as it goes on."""

    prompt: int
    page: int = 0
    done: int = 0  # tokens whose state is in the page
    given: list[Tensor] = field(default_factory=list)  # rows, a and b of all tokens
    got: list[Tensor] = field(default_factory=list)


class Server:
    """vLLM's scheduling on pages of which page 0 is none, in the order that vLLM's batches have.

    Requests arrive, are prefilled in pieces and decode, are preempted and computed again, and end;
    pages are recycled with what others leave in them. After each request its results are compared
    with one call over the whole sequence: bits on a GPU, up to rounding on a CPU.
    """

    def __init__(
        self, seed: int, monkeypatch: Any, sizes: tuple[int, int] = (64, 64),
        heads: tuple[int, int] = (1, 2), dtype: torch.dtype = torch.float32, device: str = "cpu",
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        self.draw, self.device, self.dtype = random.Random(seed), device, dtype
        (self.K, self.V), (self.H, self.HV) = sizes, heads
        if device == "cpu":
            monkeypatch.setattr(vllm_bits, "refused", lambda *_: None)  # of fp32
        config = configuration(dtype=dtype)
        given = *sizes, 2 * self.H, 2 * self.HV  # on two ranks
        self.layer, self.engine, _ = bits_layer(monkeypatch, config, sizes=given)
        self.layer.A_log, self.layer.dt_bias = (
            x.to(device) for x in (self.layer.A_log, self.layer.dt_bias)
        )
        weight = self.layer.conv1d.weight
        self.layer.conv1d = SimpleNamespace(weight=weight.to(device, dtype), bias=None)
        shapes, self.pages = self.layer.get_state_shape(), 9
        self.before, numbers = prod(shapes[0]) * dtype.itemsize // 4, shapes[1][0]
        self.room = torch.full((self.pages, self.before + numbers + 20), torch.nan, device=device)
        self.layer.kv_cache = (
            self.room[:, : self.before].view(dtype).view(self.pages, *shapes[0]),
            self.room[:, self.before : self.before + numbers],
        )
        self.free, self.live = list(range(1, self.pages)), []
        self.seen = dict.fromkeys(("fresh", "decode", "mixed", "preempt", "end", "one"), 0)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of a token: its row, a and b."""
        return 2 * self.H * self.K + self.HV * self.V, self.HV, self.HV

    def draw_tokens(self, count: int) -> list[Tensor]:
        return [torch.randn(count, n).to(self.device, self.dtype) for n in self.widths]

    def tokens(self, request: Request, count: int) -> list[Tensor]:
        """Rows, a and b of the next tokens, the same again after a preemption."""
        have = len(request.given[0]) if request.given else 0
        if (missing := request.done + count - have) > 0:
            new = self.draw_tokens(missing)
            old = request.given or [x[:0] for x in new]
            request.given = [torch.cat(pair) for pair in zip(old, new, strict=True)]
        return [x[request.done : request.done + count] for x in request.given]

    def check(self, request: Request) -> None:
        """The results so far beside one call over the whole sequence."""
        want = trained(self.layer, *(x[: request.done] for x in request.given))
        self.agree(torch.cat(request.got), want)

    def agree(self, got: Tensor, want: Tensor) -> None:
        assert got.shape == want.shape
        if self.device != "cpu":
            other = int((got.view(torch.int16) != want.view(torch.int16)).sum())
            assert other == 0, f"{other} of {got.numel()} numbers have other bits"
        error = (got - want).norm() / want.norm()
        assert error <= LIMIT, f"{error:.2e} after {len(got)} tokens"

    def leave(self, request: Request) -> None:
        self.live.remove(request)
        self.room[request.page] = self.draw.choice((torch.nan, 1e30, 3.0))
        self.free.append(request.page)
        self.draw.shuffle(self.free)

    def arrive(self) -> None:
        if self.free and self.draw.random() < 0.6:
            prompt = self.draw.choice((1, 2, 63, 64, 65, 130, 200))
            self.live.append(Request(prompt, self.free.pop()))

    def preempt(self) -> None:
        """The page goes to somebody else; the sequence is computed again from its first token."""
        if self.live and self.draw.random() < 0.1:
            request = self.draw.choice(self.live)
            if request.done:
                self.check(request)
            self.leave(request)
            if self.draw.random() < 0.7:
                prompt = max(request.prompt, request.done)  # vLLM prefills what it generated, too
                self.live.append(Request(prompt, self.free.pop(0), given=request.given))
                self.seen["preempt"] += 1

    def serve(self, batches: int) -> None:
        """Runs batches, and checks all sequences that are alive then; each kind came twice."""
        for _ in range(batches):
            self.step()
        for request in self.live:
            if request.done:
                self.check(request)
        assert min(self.seen.values()) >= 2, self.seen

    def step(self) -> None:
        self.arrive()
        self.preempt()
        batch = self.draw.sample(self.live, self.draw.randint(0, len(self.live)))
        if not batch:
            return
        # vLLM decodes the last token of a prompt, too, unless it is the first one
        decodes = [x for x in batch if x.done and x.prompt - x.done <= 1]
        prefills = [x for x in batch if x not in decodes]
        counts = [1] * len(decodes)
        for x in prefills:
            whole = x.prompt - x.done
            counts.append(whole if self.draw.random() < 0.5 else self.draw.randint(1, whole))
        order, pads = decodes + prefills, self.draw.randint(0, 2)
        tokens = [self.tokens(x, n) for x, n in zip(order, counts, strict=True)]
        padding = [torch.full_like(x, torch.nan) for x in self.draw_tokens(pads)]
        rows, a, b = (torch.cat(each) for each in zip(*tokens, padding, strict=True))
        out = torch.full((len(rows), self.HV, self.V), 5.0).to(rows)
        self.engine.batch = self.metadata(decodes, prefills, counts, pads)
        before = self.room.view(torch.int32).clone()
        self.layer._forward_core(rows, b, a, out)
        self.compare_pages(before, {x.page for x in order})
        first = 0
        for x, n in zip(order, counts, strict=True):
            self.seen["fresh"] += x.done == 0
            self.seen["one"] += x.done == 0 and n == 1
            x.got.append(out[first : first + n].clone())
            x.done, first = x.done + n, first + n
            last = torch.cat(
                [x.given[0].new_zeros(WIDTH - 1, self.widths[0]), x.given[0][: x.done]]
            )
            kept = self.layer.kv_cache[0][x.page]
            assert torch.equal(kept, last[1 - WIDTH :].T), "the convolution's"
        assert not out[first:].any(), "padding is not 0"
        self.seen["decode"] += not prefills
        self.seen["mixed"] += bool(prefills and decodes)
        for x in [x for x in order if x.done > x.prompt + self.draw.randint(0, 150)]:
            self.check(x)
            self.leave(x)
            self.seen["end"] += 1

    def compare_pages(self, before: Tensor, named: set[int]) -> None:
        now = self.room.view(torch.int32)
        same = [page for page in range(self.pages) if page not in named]
        assert torch.equal(now[same], before[same]), "a page was written that nobody named"
        assert torch.equal(now[:, -20:], before[:, -20:]), "behind a page"

    def table(self, x: list[Any]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=self.device)

    def metadata(self, decodes: Any, prefills: Any, counts: list[int], pads: int) -> Any:
        order, count = decodes + prefills, len(decodes)
        pages = [x.page for x in order]
        common = {
            "num_prefills": len(prefills), "num_decodes": count, "num_decode_tokens": count,
            "num_actual_tokens": sum(counts) + pads, "num_spec_decodes": 0,
        }  # fmt: skip
        if not prefills:  # a graph: tokens and slots of padding
            slots = self.table([*pages, *[0] * pads])
            return metadata_of(**common, non_spec_state_indices_tensor=slots)
        # behind them sequences without tokens, whose pages are those of others
        slots = self.table([*pages, *[pages[0]] * pads])
        bounds = self.table([0, *counts, *[0] * pads]).cumsum(0).int()
        has = self.table([*(x.done > 0 for x in order), *[True] * pads]).bool()
        return metadata_of(
            **common, non_spec_state_indices_tensor=slots, has_initial_state=has,
            non_spec_query_start_loc=bounds, prefill_query_start_loc=bounds[count:] - count,
            prefill_state_indices=slots[count:], prefill_has_initial_state=has[count:],
        )  # fmt: skip
