"""`swap`: packed sequences, and `swap` before and after other libraries' calls."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qla_kernels import Unsupported
from qla_kernels.integrations import mixers
from qla_kernels.integrations import transformers as swapping
from tests import swap_ranks
from tests.compare import relative_l2
from tests.ranks import forked
from tests.tiny_hybrids import VOCABULARY, hybrid, of_two_layers

transformers = pytest.importorskip("transformers", minversion="5.15")

pytestmark = pytest.mark.libraries

KIND = "Qwen3.5"
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Models of a kind share their module's functions."""
    yield
    swapping.restore(hybrid(KIND))


def pack(texts: list[Tensor], **options: Any) -> dict[str, Any]:
    made = transformers.DataCollatorWithFlattening(**options)
    return made([{"input_ids": text.tolist()} for text in texts])


def error(model: nn.Module, batch: dict[str, Any], texts: list[Tensor]) -> float:
    """Of a pack's logits beside those of each sequence alone."""
    with torch.no_grad():
        want = torch.cat([model(text[None], use_cache=False).logits[0] for text in texts])
        got = model(**batch).logits[0]
    return ((got - want).abs().max() / want.abs().max()).item()


def test_training_on_packed_sequences():
    model = hybrid(KIND)
    swapping.swap(model)
    texts = [torch.randint(VOCABULARY, (n,)) for n in (50, 20, 130)]
    batch = pack(texts, return_flash_attn_kwargs=True, return_seq_idx=True)
    assert {*batch} == {"input_ids", "labels", "position_ids", "seq_idx", *BOUNDS}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert error(model, batch | {"use_cache": False}, texts) < 1e-4


def test_a_model_is_swapped_and_restored_in_turn():
    model = hybrid(KIND).eval()
    ids = torch.randint(VOCABULARY, (2, 70))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        for _ in range(2):
            assert swapping.swap(model) == 3
            assert not swapping.status(model).others
            got = model(ids, use_cache=False).logits
            assert (got - want).abs().max() < 1e-4 * want.abs().max()
            swapping.restore(model)
            assert torch.equal(model(ids, use_cache=False).logits, want)


LAYERS = {"gated delta nets": "linear_attention", "softmax attention": "full_attention"}
CALLS: dict[str, tuple[tuple[str, ...], dict[str, Any], str | None]] = {  # left out, more, mixed
    "as above": ((), {}, None),
    "no bounds": ((*BOUNDS, "seq_idx"), {}, "gated delta nets"),
    "no seq_idx": (("seq_idx",), {}, None),
    "no position_ids": (("position_ids",), {}, "softmax attention"),
    "a mask": ((), {"attention_mask": torch.ones(1, 137).long()}, "softmax attention"),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("call", CALLS)
def test_what_runs_packed_sequences_into_each_other(call, layers, attention):
    left_out, more, mixed = CALLS[call]
    model = hybrid(KIND, layer_types=[LAYERS[layers]] * 4).eval()
    model.set_attn_implementation(attention)
    swapping.swap(model)
    texts = [torch.randint(VOCABULARY, (n,)) for n in (5, 2, 130)]
    batch = pack(texts, return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = {name: x for name, x in batch.items() if name not in (*left_out, "labels")}
    found = error(model, {"use_cache": False} | batch | more, texts)
    assert found > 0.1 if mixed == layers else found < 1e-4


def test_a_cache_beside_a_pack_is_refused():
    """Its softmax attention ran sequences into each other; of one, the convolution was wrong."""
    model = hybrid(KIND).eval()
    swapping.swap(model)
    texts = [torch.randint(VOCABULARY, (n,)) for n in (5, 2, 130)]
    for chosen in (texts, texts[2:]):
        batch = pack(chosen, return_flash_attn_kwargs=True, return_seq_idx=True)
        model.config.get_text_config().use_cache = True
        with pytest.raises(Unsupported, match="cu_seq_lens_q beside a cache; need no cache"):
            model(**batch)
        model.config.get_text_config().use_cache = False
        assert error(model, batch, chosen) < 1e-4


def test_the_trainer_makes_the_same_calls(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    model = hybrid(KIND)
    swapping.swap(model)
    texts = [torch.randint(VOCABULARY, (n,)) for n in (5, 2, 130)]
    with torch.no_grad():
        losses = [model(x[None], labels=x[None]).loss * (len(x) - 1) for x in texts]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, logging_steps=1, per_device_train_batch_size=3,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=[{"input_ids": x} for x in texts],
        data_collator=transformers.DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_seq_idx=True
        ),
    )  # fmt: skip
    trainer.train()
    want = sum(losses) / (137 - 3)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(want.item(), rel=1e-5)


# Before or after swap.


class Graphs:
    """A backend of torch.compile that counts our operators."""

    def __init__(self) -> None:
        self.graphs = self.ours = 0

    def __call__(self, made: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs += 1
        nodes = [n for m in made.modules() if hasattr(m, "graph") for n in m.graph.nodes]
        self.ours += sum("qla_kernels.gdn_fwd" in str(n.target) for n in nodes)
        return made


def loss_of(model: nn.Module) -> Tensor:
    ids = torch.randint(VOCABULARY, (2, 70), generator=torch.manual_seed(0))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def step(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    found = {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters()}
    return {"loss": loss.detach(), **{n: x for n, x in found.items() if x is not None}}


def assert_agree(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    largest = max(x.norm() for x in want.values())
    for name, x in want.items():
        assert (got[name] - x).norm() < 1e-4 * x.norm() + 1e-7 * largest, name


def checkpointed(model: nn.Module, reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def lora(model: nn.Module, targets: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


WAYS = {
    "checkpointing": lambda model: checkpointed(model, False),
    "checkpointing, reentrant": lambda model: checkpointed(model, True),
    "LoRA": lambda model: lora(model, "all-linear"),
    "LoRA of some": lambda model: lora(model, ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]),
}


@pytest.mark.parametrize("first", ["swap", "the other"])
@pytest.mark.parametrize("way", WAYS)
def test_swap_in_either_order(way, first, monkeypatch):
    want = step(WAYS[way](hybrid(KIND)))
    calls, ours = [], mixers.gated_delta_net
    counted = lambda *args, **more: (calls.append(1), ours(*args, **more))[1]  # noqa: E731
    monkeypatch.setattr(mixers, "gated_delta_net", counted)
    model = hybrid(KIND)
    if first == "swap":
        swapping.swap(model)
    model = WAYS[way](model)
    if first != "swap":
        swapping.swap(model)
    assert_agree(step(model), want)
    assert len(calls) == (6 if way.startswith("checkpointing") else 3)
    if way.startswith("LoRA"):
        merged = model.merge_and_unload()
        assert not swapping.status(merged).others
        with torch.no_grad():
            assert relative_l2(loss_of(merged), want["loss"]) < 1e-5


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("order", ["swap, compile", "compile, swap", "compile, call, swap"])
def test_swap_and_compile_in_either_order(order, in_place):
    torch.compiler.reset()
    want, model, graphs = step(of_two_layers(KIND)), of_two_layers(KIND), Graphs()
    if order == "swap, compile":
        swapping.swap(model)
    if in_place:
        model.compile(backend=graphs)
    compiled = model if in_place else torch.compile(model, backend=graphs)
    if "call" in order:
        step(compiled)
        assert (graphs.graphs > 0, graphs.ours) == (True, 0)
    swapping.swap(compiled)
    assert_agree(step(compiled), want)
    assert graphs.ours == 1
    swapping.restore(compiled)
    assert_agree(step(compiled), want)
    assert graphs.ours == 1


ON_DISK = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu"}
ON_DISK |= {"lm_head": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
ON_DISK |= {"model.layers.2": "cpu", "model.layers.3": "disk"}


@pytest.mark.parametrize("where", ["cpu", "auto", ON_DISK], ids=["cpu", "auto", "disk"])
def test_swap_after_a_device_map(where, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs it")
    plain, ids = hybrid(KIND).eval(), torch.randint(VOCABULARY, (2, 70))
    plain.save_pretrained(tmp_path / "model")
    model = type(plain).from_pretrained(
        tmp_path / "model", device_map=where, offload_folder=tmp_path / "disk", dtype=torch.float32
    )
    with torch.no_grad():
        want = plain(ids, use_cache=False).logits
        assert swapping.swap(model) == 3
        got = model(ids, use_cache=False).logits
    assert any(x.is_meta for x in model.parameters()) == (where is ON_DISK)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    told, codes = forked("tests.swap_ranks", tmp_path_factory.mktemp("ranks"), 2)
    assert codes == [0, 0], told[0].get("no end", told[1].get("no end"))
    return told


@pytest.mark.parametrize("order", swap_ranks.ORDERS)
@pytest.mark.parametrize("way", swap_ranks.WAYS)
def test_swap_in_either_order_over_two_ranks(said, way, order):
    for rank in said:
        swapped, worst = rank[f"{way}, {order}"]
        assert swapped == 1
        assert worst < 1e-4
