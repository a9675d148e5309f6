"""veRL's FSDP engine with `patch()`: stand-ins of its parts, and one of an installed veRL."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples import dualkv_grpo
from qla_kernels import Unsupported
from qla_kernels.dualkv import PaddedGroup, padded_groups
from qla_kernels.integrations import transformers as swapping
from qla_kernels.integrations import verl
from tests.agent_traces import Row, traces, turn_rows, whole_rows
from tests.compare import assert_close
from tests.tiny_hybrids import VOCABULARY, assert_gradients
from tests.trl_trainers import model_of

PATCHES = "qla_kernels.integrations.verl_patch"


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def data_of(prompts: list[Tensor], responses: list[list[Tensor]], nested: bool) -> dict[str, Any]:
    """Shuffled rows as its engine has them: sequences without padding, the rest with it or not."""
    pairs = [(p, r) for p, rs in zip(prompts, responses, strict=True) for r in rs]
    pairs = [pairs[i] for i in torch.randperm(len(pairs)).tolist()]
    left, right = (max(len(x[i]) for x in pairs) for i in (0, 1))
    ids = torch.zeros(len(pairs), left + right, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(pairs):
        span = slice(left - len(prompt), left + len(response))
        ids[row, span], mask[row, span] = torch.cat([prompt, response]), 1
    sides = {"prompts": slice(left), "responses": slice(left, None)}
    return {
        "input_ids": jagged([torch.cat(pair) for pair in pairs]),
        "attention_mask": mask,
        "temperature": 1.0,
        "max_token_len_per_gpu": 28,
        **{
            name: jagged([x[m] for x, m in zip(ids[:, part], mask[:, part].bool(), strict=True)])
            if nested
            else ids[:, part]
            for name, part in sides.items()
        },
    }


@pytest.fixture(params=["padded", "nested"])
def rows(request):
    torch.manual_seed(0)
    model = dualkv_grpo.Qwen3()
    data = dualkv_grpo.sample(model)
    return model, data_of(data.prompts, data.responses, request.param == "nested")


def whole(model: Any, sequence: Tensor) -> Tensor:
    """Log-probabilities of all tokens but the first."""
    n = len(sequence)
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        logits = model(sequence, torch.arange(n), torch.arange(n - 1))
    return logits.log_softmax(-1).gather(1, sequence[1:, None])[:, 0]


def test_packed_rows_have_the_values_of_whole_ones(rows):
    model, data = rows
    batch = verl.pack(data)
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        logits = model(batch.input_ids, batch.position_ids, batch.src_rows, batch.layout)
    values = batch.gather_logprobs(logits, entropy=True)
    found = verl.unpack(values, batch, data)
    assert set(found) == {"log_probs"}
    lengths = verl.response_lengths(data)
    for values_, x, n in zip(
        found["log_probs"].unbind(), data["input_ids"].unbind(), lengths, strict=True
    ):
        got = values_[len(values_) - n - 1 : -1]  # as its losses take them
        assert_close("log-probabilities", got, whole(model, x)[len(x) - n - 1 :], 1e-6)
    entropy = verl.unpack(values, batch, {**data, "calculate_entropy": True})["entropy"]
    assert torch.equal(entropy.offsets(), data["input_ids"].offsets())


def test_temperatures_of_a_micro_batch():
    for one in (0.7, torch.tensor([[0.7]]).expand(3, 1)):
        assert verl._temperature({"temperature": one}) == pytest.approx(0.7)
    with pytest.raises(Unsupported, match="rows of several temperatures; need one"):
        verl._temperature({"temperature": torch.rand(3)})


@pytest.mark.parametrize(
    "asked", [{"multi_modal_inputs": [{}, {"pixels": 1}]}, {"calculate_sum_pi_squared": True}]
)
def test_batches_that_are_refused(rows, asked):
    with pytest.raises(Unsupported, match=f"a micro-batch with {next(iter(asked))}; need text"):
        verl.pack({**rows[1], **asked})
    verl.pack({**rows[1], "multi_modal_inputs": [{}, {}], "distillation_only": False})


class Policy(torch.nn.Module):
    """A model whose logits are those of a head, of the rows that a call keeps or of all."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(8, dualkv_grpo.VOCABULARY)
        self.config, self.keeps_all = SimpleNamespace(), False

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor, **_: Any) -> Any:
        hidden = self.hidden(input_ids)
        return SimpleNamespace(
            logits=self.lm_head(hidden if self.keeps_all else hidden[:, logits_to_keep])
        )

    def hidden(self, input_ids: Tensor) -> Tensor:
        return torch.sin(input_ids[..., None] * torch.arange(1.0, 9))


class Engine:
    """The parts of FSDPEngine that are patched, and what they call."""

    ulysses, fused, liger = 1, False, False

    def __init__(self, kind: str = "language_model") -> None:
        self.model_config = SimpleNamespace(
            model_type=kind, use_fused_kernels=self.fused, use_liger=self.liger
        )
        self.engine_config = SimpleNamespace(ulysses_sequence_parallel_size=self.ulysses)

    def _build_module(self) -> Any:
        home = sys.modules[verl.HOME]
        self.module = Policy()
        home.apply_monkey_patch(
            model=self.module, use_fused_kernels=self.model_config.use_fused_kernels
        )
        return self.module

    def _build_fsdp_module(self, module: Any) -> Any:
        sys.modules[verl.HOME].enable_activation_offloading(module, "fsdp2", True)
        return module

    def forward_backward_batch(self, data: Any) -> Any:
        home = sys.modules[verl.HOME]
        return home.prepare_micro_batches(data=data, dp_group=None, same_micro_num_in_dp=True)


@pytest.fixture
def home(monkeypatch):
    """A module like veRL's."""

    class WithHead(Engine):
        def prepare_model_inputs(self, micro_batch: Any) -> Any:
            return "theirs"

        def prepare_model_outputs(self, *_: Any, **__: Any) -> Any:
            return "theirs"

        def forward_step(self, micro_batch: Any) -> Any:
            call, kept = self.prepare_model_inputs(micro_batch)
            out = self.module(**call, use_cache=False)
            return call, self.prepare_model_outputs(out, kept, micro_batch, None)

    class FSDPEngine(Engine):
        pass

    made = SimpleNamespace(
        FSDPEngine=Engine, FSDPEngineWithLMHead=WithHead, fused=[],
        prepare_micro_batches=lambda data, dp_group, **_: "theirs",
        apply_monkey_patch=lambda model, use_fused_kernels: made.fused.append(use_fused_kernels),
        offloaded=[], enable_activation_offloading=lambda module, *_: made.offloaded.append(
            [name for name, _ in module.named_modules()]
        ),
    )  # fmt: skip
    tools = SimpleNamespace(
        get_device_name=lambda: "cpu", index_select_tensor_dict=lambda data, rows: rows
    )
    for name in ("_build_module", "_build_fsdp_module"):
        monkeypatch.setattr(Engine, name, getattr(Engine, name))  # undone afterwards
    monkeypatch.setattr(dist, "all_reduce", lambda x, *_, **__: x.clamp_(min=made.most))
    for name in ("verl.utils.device", "verl.utils.tensordict_utils"):
        monkeypatch.setitem(sys.modules, name, tools)
    monkeypatch.setitem(sys.modules, verl.HOME, made)
    monkeypatch.setattr(verl.transformers_dualkv, "prepare", lambda model: None)
    made.most = 0
    verl.patch()
    return made


@pytest.mark.parametrize("most", [0, 5])
def test_an_engine_of_a_policy_packs(home, rows, most, caplog):
    """Another rank has `most` micro-batches."""
    home.most, before = most, home.prepare_micro_batches
    verl.patch()  # again
    engine, (_, data) = home.FSDPEngineWithLMHead(), rows
    assert engine.prepare_model_inputs(data) == "theirs"
    engine._build_module()
    taken, found = engine.forward_backward_batch(data)
    assert home.prepare_micro_batches is before
    assert taken == found
    assert sorted(row for micro_batch in found for row in micro_batch) == list(range(7))
    assert all(found)
    assert len(found) == max(3, most)  # of 60 tokens, with prompts
    for _ in range(2):
        call, out = engine.forward_step(data)
        assert set(call) == {"input_ids", "position_ids", "shared_prefix", "logits_to_keep"}
        assert set(out) == {"log_probs"}
    assert sum("times fewer" in message for message in caplog.messages) == 1
    assert engine.forward_backward_batch({**data, "use_dynamic_bsz": False}) == "theirs"


@pytest.mark.parametrize("room", [28, 1000])
def test_groups_that_are_cut_are_named_once(home, rows, room, caplog):
    engine, data = home.FSDPEngineWithLMHead(), {**rows[1], "max_token_len_per_gpu": room}
    engine._build_module()
    sizes = [group.prompt + sum(group.responses) for group in verl.groups_of(data)]
    cut = sum(size > room for size in sizes)
    for _ in range(2):
        engine.forward_backward_batch(data)
    said = [message for message in caplog.messages if " cuts " in message]
    assert bool(cut) == (room == 28) == bool(said)
    for message in said:
        assert f"max_token_len_per_gpu=28 cuts {cut} of {len(sizes)} groups" in message
        assert message.endswith(f"log_prob_max_token_len_per_gpu to {max(sizes)} or more")
    assert len(said) <= 1
    data["max_token_len_per_gpu"] = max(sizes)  # what it says is enough
    found, _ = engine.forward_backward_batch(data)
    for group in verl.groups_of(data):
        assert any(set(group.rows) <= set(micro_batch) for micro_batch in found)


@pytest.mark.parametrize(
    ("room", "rows"),
    [(12288, [4] * 4), (16384, [6, 6, 4]), (20480, [8, 8]), (36864, [16])],
)
def test_a_group_is_cut_into_few_and_even_micro_batches(room, rows):
    """A prompt of 4096 tokens and 16 responses of 2048."""
    group = PaddedGroup(list(range(16)), 4096, [2048] * 16)
    assert [len(micro_batch) for micro_batch in verl.micro_batches([group], room)] == rows


@pytest.mark.parametrize("fused", [False, True], ids=["", "use_fused_kernels"])
@pytest.mark.parametrize("keeps_all", [False, True], ids=["rows of targets", "all rows"])
def test_our_head_takes_the_place_of_theirs(home, rows, keeps_all, fused, monkeypatch):
    """With models whose forward veRL replaces, too; afterwards the head gives logits again."""
    monkeypatch.setattr(Engine, "fused", fused)
    data = {**rows[1], "calculate_entropy": True, "temperature": 0.7}
    engine, batch = home.FSDPEngineWithLMHead(), verl.pack(data)
    model = engine._build_module()
    model.keeps_all = keeps_all
    assert home.fused == [False]  # veRL's function was asked for no fused head
    _, found = engine.forward_step(data)
    hidden = model.hidden(batch.input_ids)[batch.src_rows]
    logits = model.lm_head(hidden)
    assert logits.shape == (len(hidden), dualkv_grpo.VOCABULARY)
    values = batch.gather_logprobs(logits, temperature=0.7, entropy=True)
    for name, want in verl.unpack(values, batch, data).items():
        assert_close(name, found[name].values().detach(), want.values().detach(), 1e-6)
    (got,), (want,) = (
        torch.autograd.grad(x.sum(), model.lm_head.weight)
        for x in (found["log_probs"].values(), values[0])
    )
    assert_close("dweight", got, want, 1e-5)
    monkeypatch.setattr(model, "hidden", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.forward_step(data)
    assert "forward" not in vars(model.lm_head)


def test_activations_are_offloaded_but_for_the_head(home):
    """veRL exchanges forwards and counts those that ran; the head's is exchanged by ours."""
    for packs in (False, True):
        engine = home.FSDPEngineWithLMHead("language_model" if packs else "value_model")
        module = engine._build_module()
        assert engine._build_fsdp_module(module) is module
        assert module.lm_head is module.get_output_embeddings()
    assert home.offloaded == [["", "lm_head"], [""]]


def test_importing_the_module_that_the_option_names_patches(home, monkeypatch):
    """As veRL does with `external_lib`, in each worker."""
    for once in (True, False):  # a second worker class in a process changes nothing
        if once:
            delattr(home.FSDPEngineWithLMHead, verl.PATCHED)
        monkeypatch.delitem(sys.modules, PATCHES, raising=False)
        importlib.import_module(PATCHES)
        before = home.FSDPEngineWithLMHead.prepare_model_inputs
        assert getattr(home.FSDPEngineWithLMHead, verl.PATCHED)
    assert home.FSDPEngineWithLMHead.prepare_model_inputs is before
    monkeypatch.delitem(sys.modules, PATCHES)
    monkeypatch.setitem(sys.modules, verl.HOME, None)
    with pytest.raises(Unsupported, match="veRL cannot be used") as raised:
        importlib.import_module(PATCHES)
    assert raised.value.__suppress_context__  # the sentence has the cause


@pytest.mark.libraries
def test_an_installed_verl_imports_the_module_that_the_option_names(monkeypatch):
    pytest.importorskip("verl")
    config = importlib.import_module("verl.workers.config").HFModelConfig
    assert "external_lib" in config.__dataclass_fields__
    called = []
    monkeypatch.setattr(verl, "patch", lambda: called.append(True))
    monkeypatch.delitem(sys.modules, PATCHES, raising=False)
    importlib.import_module("verl.utils.import_utils").import_external_libs(PATCHES)
    assert called == [True]


def test_other_engines_are_left_alone(home, rows):
    engine = home.FSDPEngineWithLMHead("value_model")
    engine._build_module()
    assert home.fused == [False]
    assert engine.prepare_model_inputs(rows[1]) == "theirs"
    assert engine.prepare_model_outputs(None, None, None, None) == "theirs"
    assert engine.forward_backward_batch(rows[1]) == "theirs"


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("ulysses", 2, "ulysses_sequence_parallel_size > 1"),
    ],
)
def test_settings_that_are_refused(home, name, given, text, monkeypatch):
    monkeypatch.setattr(Engine, name, given)
    with pytest.raises(Unsupported, match=f"{text}.*; need .*; change veRL's configuration"):
        home.FSDPEngineWithLMHead()._build_module()


def test_another_verl_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, verl.HOME, SimpleNamespace(FSDPEngine=Engine))
    with pytest.raises(Unsupported, match=r"veRL cannot be used \(.*\); need veRL 0\.9\.1"):
        verl.patch()


@pytest.mark.parametrize("by_label", [False, True])
def test_micro_batches_of_padded_rows(by_label):
    ids = torch.tensor([[0, 5, 6, 1], [5, 5, 7, 1], [0, 5, 8, 1], [5, 5, 9, 0], [0, 4, 9, 2]])
    uid = [7, 8, 7, 8, 9]
    groups = padded_groups(ids, ids != 0, 2, group_ids=uid if by_label else None)
    for room, number in ((100, 1), (6, 2), (4, 4)):
        found = verl.micro_batches(groups, room)
        assert sorted(row for micro_batch in found for row in micro_batch) == list(range(5))
        assert len(found) >= number
    for most in (3, 5, 9):  # ranks run as many; a micro-batch without rows would fail in the model
        assert len(verl.micro_batches(groups, 100, at_least=most)) == min(most, 5)
        assert all(verl.micro_batches(groups, 100, at_least=most))


def data_of_rows(rows: list[Row], room: int = 60) -> dict[str, Any]:
    """Shuffled sequences of an agent, as veRL's engine has them."""
    rows = [rows[i] for i in torch.randperm(len(rows)).tolist()]
    whole = [torch.cat([row.prompt, row.response]) for row in rows]
    return {
        "input_ids": jagged(whole),
        "prompts": jagged([row.prompt for row in rows]),
        "responses": jagged([row.response for row in rows]),
        "temperature": 1.0,
        "max_token_len_per_gpu": room,
    }


@pytest.mark.parametrize("form", [whole_rows, turn_rows])
def test_an_agent_s_turns_and_branches_are_computed_once(form, monkeypatch):
    monkeypatch.setattr(verl, "FEWEST_SAVED", 4)
    torch.manual_seed(0)
    model = dualkv_grpo.Qwen3()
    data = data_of_rows(form(traces(dualkv_grpo.VOCABULARY)))
    batch = verl.pack(data)
    lengths = [len(x) for x in data["input_ids"].unbind()]
    prompts = {tuple(x.tolist()) for x in data["prompts"].unbind()}
    assert batch.num_tokens < sum(map(len, prompts)) + sum(verl.response_lengths(data))
    assert batch.rho == sum(lengths) / batch.num_tokens > 1.7
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        logits = model(batch.input_ids, batch.position_ids, batch.src_rows, batch.layout)
    found = verl.unpack(batch.gather_logprobs(logits, entropy=True), batch, data)
    for values, x, n in zip(
        found["log_probs"].unbind(), data["input_ids"].unbind(), verl.response_lengths(data),
        strict=True,
    ):  # fmt: skip
        want = whole(model, x)[len(x) - n - 1 :]
        assert_close("log-probabilities", values[len(values) - n - 1 : -1], want, 1e-6)


@pytest.mark.parametrize("room", [60, 150, 1000])
def test_turns_stay_with_the_turns_before_them(home, room):
    torch.manual_seed(0)
    trajectories = traces(50, tasks=3)
    data = data_of_rows(turn_rows(trajectories), room)
    turns = verl.turns_of(data)
    rows = data["input_ids"].unbind()
    assert len(turns) == 3  # of a task's first turn, which all trajectories share
    assert sorted(row for together in turns.values() for row in together) == [*range(len(rows))]
    engine = home.FSDPEngineWithLMHead()
    engine._build_module()
    found, _ = engine.forward_backward_batch(data)
    assert sorted(row for micro_batch in found for row in micro_batch) == [*range(len(rows))]
    packed = [
        verl.pack_prefix_tree([rows[i] for i in micro_batch]).num_tokens for micro_batch in found
    ]
    assert max(packed) <= room
    if room > 60:  # the turns of each task fit
        assert all(
            any(set(together) <= set(micro_batch) for micro_batch in found)
            for together in turns.values()
        )


def test_turns_of_a_task_that_was_sampled_often():
    """A later turn follows its own first turn, and equal prompts are one group."""
    prompt, calls, answer = [1, 2, 3], [[4, 5], [4, 5, 6], [7]], [8, 8]
    rows = [Row(*map(torch.tensor, (prompt, call, [1] * len(call)))) for call in calls]
    rows += [Row(*map(torch.tensor, (prompt + call + answer, [9, i], [1, 1])))
             for i, call in enumerate(calls)]  # fmt: skip
    data = data_of_rows(rows)
    sequences = [x.tolist() for x in data["input_ids"].unbind()]
    turns = verl.turns_of(data)
    assert {(*sequences[first],): sorted(sequences[row] for row in together if row != first)
            for first, together in turns.items()} == {
        (*prompt, *call): [prompt + call + answer + [9, i]] for i, call in enumerate(calls)
    }  # fmt: skip
    (group,) = verl.groups_of(data, turns)
    assert group.prompt == 3
    assert sorted(group.responses) == sorted(len(call) + 4 for call in calls)


# The engine of an installed veRL.


class OnCpu:
    """veRL's engine without its constructor: one process, and no FSDP around the model."""

    def build(self, home: Any, model: Any) -> Any:
        engine = object.__new__(home.FSDPEngineWithLMHead)
        engine.model_config = SimpleNamespace(model_type="language_model", use_fused_kernels=False)
        engine.engine_config = SimpleNamespace(
            ulysses_sequence_parallel_size=1, pad_to_length=False, entropy_checkpointing=False,
            entropy_from_logits_with_chunking=False,
        )  # fmt: skip
        engine.pad_to_length, engine.use_ulysses_sp = False, False
        engine.ulysses_sequence_parallel_size, engine._autocast_dtype = 1, torch.float32
        engine.compute_entropy_from_logits = home.verl_F.entropy_from_logits
        engine.get_data_parallel_group, engine.get_data_parallel_size = lambda: None, lambda: 1
        engine.module = model
        return engine


def loss_of(model_output: Any, data: Any, dp_group: Any) -> Any:
    """Weighs each token of a response; columns of a sequence's values are those of its targets."""
    total = 0.0
    for values, x, n in zip(
        model_output["log_probs"].unbind(), data["input_ids"].unbind(),
        verl.response_lengths(data), strict=True,
    ):  # fmt: skip
        total = total + (values[len(x) - n - 1 : -1] * x[len(x) - n :].float().cos()).sum()
    return total, {}


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.libraries
@pytest.mark.parametrize(
    ("name", "of_agent"), [("Qwen3", False), ("Qwen3Next", False), ("Qwen3Next", True)]
)
def test_a_batch_of_an_installed_verl(name, of_agent, tmp_path, one_process, monkeypatch):
    pytest.importorskip("verl")
    home = importlib.import_module(verl.HOME)
    tools = importlib.import_module("verl.utils.tensordict_utils")
    for place in (home, importlib.import_module("verl.utils.device")):
        for asked in ("get_device_id", "get_device_name"):
            monkeypatch.setattr(place, asked, lambda: "cpu")
    torch.manual_seed(2)
    draw = lambda n: torch.randint(2, VOCABULARY, (n,))  # noqa: E731
    responses = [[draw(n) for n in group] for group in ((5, 1, 9), (4, 4), (3, 8))]
    data = data_of([draw(12), draw(1), draw(6)], responses, nested=True)
    if of_agent:
        monkeypatch.setattr(verl, "FEWEST_SAVED", 4)
        data = data_of_rows(turn_rows(traces(VOCABULARY)))
    loss_mask = jagged([torch.ones(n) for n in verl.response_lengths(data)])
    position_ids = jagged([torch.arange(len(x)) for x in data["input_ids"].unbind()])
    notes = {
        "max_token_len_per_gpu": 60, "use_dynamic_bsz": True, "use_remove_padding": False,
        "calculate_entropy": True, "return_model_output": True, "temperature": 0.7,
    }  # fmt: skip
    tensors = {k: v for k, v in data.items() if isinstance(v, Tensor) and v.is_nested}
    tensors |= {"loss_mask": loss_mask, "position_ids": position_ids}

    def run(model: Any) -> Any:
        engine = OnCpu().build(home, model)
        if hasattr(home.FSDPEngineWithLMHead, verl.PATCHED):
            verl.transformers_dualkv.prepare(model)
            setattr(engine, verl.PACKS, True)
        out = engine.forward_backward_batch(
            tools.get_tensordict(dict(tensors), dict(notes)), loss_of
        )
        return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    model = model_of(name, VOCABULARY, tmp_path / "model")
    wanted, want = run(model)
    model = model_of(name, VOCABULARY, tmp_path / "model")
    for kind, names in (
        (home.FSDPEngine, ["_build_module", "_build_fsdp_module"]),
        (home.FSDPEngineWithLMHead, ["prepare_model_inputs", "prepare_model_outputs"]),
    ):
        for patched in names:
            monkeypatch.setattr(kind, patched, getattr(kind, patched))
    step = home.FSDPEngineWithLMHead.forward_step
    verl.patch()
    try:
        found, got = run(model)
    finally:
        delattr(home.FSDPEngineWithLMHead, verl.PATCHED)
        del home.FSDPEngineWithLMHead.forward_backward_batch
        home.FSDPEngineWithLMHead.forward_step = step
        swapping.restore(model) if name != "Qwen3" else None
    lengths = verl.response_lengths(data)
    for key in ("log_probs", "entropy"):
        a, b = (x["model_output"][key].unbind() for x in (found, wanted))
        for x, y, n in zip(a, b, lengths, strict=True):
            assert_close(
                key, x[len(x) - n - 1 : -1].detach(), y[len(y) - n - 1 : -1].detach(), 1e-5
            )
    assert_gradients(got, want, 1e-4)
