"""Shared prompts in veRL's FSDP engine, for policies trained without a critic, as in GRPO.

    actor_rollout_ref.model.external_lib=qla_kernels.integrations.verl_patch

This option makes veRL's workers call `patch()` before they build a model. Your own programs call it
in every process:

    from qla_kernels import integrations
    integrations.verl.patch()

Engines for language models that are built afterwards compute each prompt of a micro-batch once, for
old log-probabilities, the reference policy and the update. Our head computes log-probabilities and
entropies without storing logits. Micro-batches keep the responses of a prompt, and the turns of an
agent that follow them, together; `ppo_max_token_len_per_gpu` counts packed tokens. Other engines do
not change. This file does not import veRL; it is tested with veRL 0.9.1.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from qla_kernels import SharedBatch, pack_prefix_tree, plan_microbatches
from qla_kernels.dualkv import PaddedGroup
from qla_kernels.dualkv.prefix_tree import tree_of
from qla_kernels.integrations import transformers_dualkv
from qla_kernels.integrations.packed_head import packed_head
from qla_kernels.integrations.trl import FEWEST_SAVED, bare, exchanged, log, log_gain
from qla_kernels.integrations.verl_trainers import patch_trainers
from qla_kernels.runtime.errors import Unsupported, need

OP = "qla_kernels.integrations.verl"
HOME, RELEASES = "verl.workers.engine.fsdp.transformer_impl", "veRL 0.9.1"
NOT_PACKED = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared")
PATCHED, PACKS, SAYS = "qla_kernels_patched", "_qla_kernels_packs", "_qla_kernels_said"
SAYS_CUT, STEP = "_qla_kernels_said_cut", "_qla_kernels_step"


def patch() -> None:
    """Patches veRL to compute each prompt of a micro-batch once, and not once per response.

    Changes veRL's FSDP engines (its wrappers of models) that are built later. Log-probabilities are
    computed without storing logits, which also replaces veRL's fused head of use_fused_kernels. In
    the process of a trainer, the trainer then gives all responses of a prompt to one rank. A second
    call does nothing.

    Building an engine raises Unsupported for models that `transformers_dualkv.check` refuses, and
    for settings that packed batches do not support: Ulysses, and padding to a fixed length. An
    engine warns once if max_token_len_per_gpu splits the responses of a prompt.

    Raises:
        Unsupported: veRL cannot be imported, or lacks a function that is patched. Its version is
            not checked.
    """
    home = _engines()
    patch_trainers()
    engine, heads = home.FSDPEngine, home.FSDPEngineWithLMHead
    if getattr(heads, PATCHED, False):
        return
    build, shard = engine._build_module, engine._build_fsdp_module
    inputs, outputs = heads.prepare_model_inputs, heads.prepare_model_outputs
    run, step = heads.forward_backward_batch, heads.forward_step

    @wraps(build)
    def _build_module(self: Any) -> Any:
        if not isinstance(self, heads) or self.model_config.model_type != "language_model":
            return build(self)
        _check_settings(self)
        with exchanged(home, apply_monkey_patch=_without_fused_head(home.apply_monkey_patch)):
            module = build(self)
        transformers_dualkv.prepare(bare(module))
        setattr(self, PACKS, True)
        return module

    @wraps(shard)
    def _build_fsdp_module(self: Any, module: Any) -> Any:
        if not getattr(self, PACKS, False):
            return shard(self, module)
        offload = partial(_offload_without_head, home.enable_activation_offloading)
        with exchanged(home, enable_activation_offloading=offload):
            return shard(self, module)

    @wraps(inputs)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        if not getattr(self, PACKS, False):
            return inputs(self, micro_batch)
        batch = pack(micro_batch)
        if not getattr(self, SAYS, False):
            log_gain(sum(len(path) for path in batch.paths), batch.num_tokens)
            setattr(self, SAYS, True)
        call = batch.model_inputs()
        del call["use_cache"]  # the engine passes it
        head = packed_head(bare(self.module), batch, temperature=_temperature(micro_batch))
        values = getattr(self, STEP).enter_context(head)
        return call, {"batch": batch, "values": values}

    @wraps(outputs)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        if not getattr(self, PACKS, False):
            return outputs(self, output, output_args, micro_batch, logits_processor_func)
        return unpack(output_args["values"](output), output_args["batch"], micro_batch)

    @wraps(step)
    def forward_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as exchanges:  # prepare_model_inputs adds packed_head to it
            setattr(self, STEP, exchanges)
            return step(self, *args, **kwargs)

    @wraps(run)
    def forward_backward_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, PACKS, False):
            return run(self, *args, **kwargs)
        split = _in_place_of(home.prepare_micro_batches, self)
        with exchanged(home, prepare_micro_batches=split):
            return run(self, *args, **kwargs)

    engine._build_module = _build_module
    engine._build_fsdp_module = _build_fsdp_module
    heads.prepare_model_inputs = prepare_model_inputs
    heads.prepare_model_outputs = prepare_model_outputs
    heads.forward_step = forward_step
    heads.forward_backward_batch = forward_backward_batch
    setattr(heads, PATCHED, True)


def _without_fused_head(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns veRL's function `theirs`, which changes a model, but without its fused head.

    The fused head would replace the model's forward by one that needs labels of unpacked rows.
    """
    return wraps(theirs)(partial(_apply_without, theirs))


def _apply_without(theirs: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return theirs(*args, **{**options, "use_fused_kernels": False})


def _offload_without_head(
    theirs: Callable[..., Any], module: Any, *args: Any, **options: Any
) -> None:
    """Calls veRL's enable_activation_offloading for all parts of a model but its head.

    veRL exchanges the forward of each part that FSDP wraps, and counts the parts that ran; ours
    exchanges the forward of the head.
    """
    head = bare(module).get_output_embeddings()
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if child is head
    ]
    for parent, name in places:
        parent._modules[name] = None
    try:
        theirs(module, *args, **options)
    finally:
        for parent, name in places:
            parent._modules[name] = head


def pack(micro_batch: Any) -> SharedBatch:
    """Packs the sequences of a veRL micro-batch into a batch that stores shared prefixes once.

    The sequences, prompts with responses, are the rows of the micro-batch's nested tensor
    input_ids. Log-probabilities of all tokens of responses will be computed. Raises Unsupported if
    the micro-batch has images, or asks for distillation or sums of squared probabilities.
    """
    images = value(micro_batch, "multi_modal_inputs")
    options = [name for name in NOT_PACKED if value(micro_batch, name)]
    if options or (images is not None and any(map(bool, images))):
        got = f"a micro-batch with {', '.join(options) or 'multi_modal_inputs'}"
        _refuse(got, "text, log-probabilities and entropies")
    sequences, lengths = micro_batch["input_ids"].unbind(), response_lengths(micro_batch)
    chosen = [torch.arange(len(x)) >= len(x) - n for x, n in zip(sequences, lengths, strict=True)]
    return pack_prefix_tree(sequences, loss_mask=chosen, fewest_saved=FEWEST_SAVED)


def unpack(
    values: tuple[Tensor, Tensor], batch: SharedBatch, micro_batch: Any
) -> dict[str, Tensor]:
    """Converts log-probabilities of a packed batch to the form that veRL expects of a model.

    Targets are the tokens whose log-probabilities were computed: all tokens of responses. veRL
    expects nested tensors with one row per sequence and one entry per token, like input_ids. The
    value of a target goes to the entry of the token before it, which predicts it; all other entries
    are 0.

    Args:
        values: (log-probabilities, entropies), each [L]: a number per target, in the order of
            batch.targets.
        batch: the packed batch, from `pack`.
        micro_batch: veRL's micro-batch, from which `batch` was packed.

    Returns:
        A dict with the nested tensor log_probs, and with entropy if the entry calculate_entropy of
        the micro-batch is true.
    """
    with_entropy = bool(value(micro_batch, "calculate_entropy"))
    offsets = micro_batch["input_ids"].offsets()
    place = offsets[batch.row] + batch.column - 1

    def nested(x: Tensor) -> Tensor:
        values = x.new_zeros(micro_batch["input_ids"].values().shape).index_put((place,), x)
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    names = ("log_probs", "entropy") if with_entropy else ("log_probs",)
    return {name: nested(x) for name, x in zip(names, values, strict=False)}


def response_lengths(data: Any) -> list[int]:
    """Returns the number of tokens of each response in veRL's data.

    `data` has an entry "responses": a nested tensor, or a padded one beside "attention_mask" and
    "prompts".
    """
    if data["responses"].is_nested:
        lengths: list[int] = data["responses"].offsets().diff().tolist()
        return lengths
    mask = data["attention_mask"][:, data["prompts"].shape[1] :]
    return [int(n) for n in mask.sum(1).tolist()]


def turns_of(data: Any) -> dict[int, list[int]]:
    """Finds rows that are turns of one dialogue; returns {first row: [first row, later turns]}.

    A row is a later turn of another row if its prompt begins with all tokens of that row, as when
    the prompt of an agent's next turn is the dialogue so far. A row that is no later turn is a
    first row, often the only one in its list.

    Args:
        data: veRL's batch, with the nested tensor input_ids and an entry "responses".
    """
    sequences, lengths = data["input_ids"].unbind(), response_lengths(data)
    texts = [x.cpu().numpy().astype(">i8").tobytes() for x in sequences]  # sorted by tokens
    size = 8  # bytes of a token
    turns: dict[int, list[int]] = {}
    first: dict[int, int] = {}
    open_rows: list[int] = []  # each begins with the tokens of those before it
    for row in sorted(range(len(texts)), key=texts.__getitem__):
        while open_rows and not texts[row].startswith(texts[open_rows[-1]]):
            open_rows.pop()
        prompt = len(texts[row]) - size * lengths[row]
        before = (other for other in reversed(open_rows) if len(texts[other]) <= prompt)
        first[row] = first.get(next(before, row), row)
        turns.setdefault(first[row], []).append(row)
        open_rows.append(row)
    return {row: turns[row] for row in sorted(turns)}


def groups_of(data: Any, turns: Mapping[int, list[int]] | None = None) -> list[PaddedGroup]:
    """Groups the rows of a veRL batch that have the same prompt; groups are in the order of rows.

    Args:
        data: veRL's batch, with the nested tensor input_ids and an entry "responses".
        turns: {first row: [first row, later turns]} from `turns_of`, or None. If passed, only first
            rows are in groups. The tokens that later turns add are counted as part of the first
            row's response, those that several turns share once.

    Returns:
        A `PaddedGroup` per prompt: row numbers, length of the prompt, and length of each response.
    """
    sequences, lengths = data["input_ids"].unbind(), response_lengths(data)
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(sequences)) if turns is None else turns:
        prompt = sequences[row][: len(sequences[row]) - lengths[row]]
        rows_of.setdefault(tuple(prompt.tolist()), []).append(row)

    def tokens(row: int, prompt: int) -> int:
        together = [sequences[turn].cpu() for turn in turns[row]] if turns else []
        if len(together) < 2:
            return lengths[row]
        nodes, _ = tree_of(together, [0] * len(together), 1, [0] * len(together))
        return sum(node.length for node in nodes) - prompt

    return [
        PaddedGroup(rows, len(prompt), [tokens(row, len(prompt)) for row in rows])
        for prompt, rows in rows_of.items()
    ]


def _turns_that_fit(data: Any, room: int) -> tuple[dict[int, list[int]], list[PaddedGroup]]:
    """Returns `turns_of` and `groups_of`; turns that have more than `room` tokens are separate."""
    turns = turns_of(data)
    groups = groups_of(data, turns)
    long = {
        row
        for group in groups
        for row, n in zip(group.rows, group.responses, strict=True)
        if len(turns[row]) > 1 and group.prompt + n > room
    }
    if not long:
        return turns, groups
    apart = {row: [row] for first in long for row in turns[first]}
    turns = {first: rows for first, rows in turns.items() if first not in long} | apart
    return turns, groups_of(data, turns)


def micro_batches(
    groups: list[PaddedGroup],
    max_tokens: int,
    at_least: int = 1,
    turns: Mapping[int, list[int]] | None = None,
) -> list[list[int]]:
    """Splits groups of rows into micro-batches of at most max_tokens packed tokens.

    A packed micro-batch stores the prompt of a group once. A group with more tokens is split: each
    of its micro-batches repeats the prompt, and results stay exact.

    Args:
        groups: the rows with the same prompt, and their lengths, from `groups_of`.
        max_tokens: the most tokens of a micro-batch.
        at_least: the least number of micro-batches; if there are fewer rows, each row is one.
        turns: {first row: [first row, later turns]}, if `groups_of` got it; later turns of a
            dialogue then go where its first row goes.

    Returns:
        The row numbers of each micro-batch.

    Raises:
        ValueError: a prompt and a response together have more than max_tokens tokens.
    """
    (plan,) = plan_microbatches([(g.prompt, g.responses) for g in groups], max_tokens)
    batches = [[groups[g].rows[i] for g, chosen in pieces for i in chosen] for pieces in plan]
    if turns is not None:
        batches = [[turn for row in batch for turn in turns[row]] for batch in batches]
    while len(batches) < min(at_least, sum(map(len, batches))):
        widest = max(batches, key=len)
        batches.remove(widest)
        batches += [widest[::2], widest[1::2]]
    return batches


def _in_place_of(theirs: Callable[..., Any], engine: Any) -> Callable[..., Any]:
    """Returns a function that makes micro-batches and keeps the responses of a prompt together.

    It replaces veRL's function `theirs`, which it calls if micro-batches have a fixed number of
    rows.
    """

    @wraps(theirs)
    def prepare_micro_batches(data: Any, dp_group: Any = None, **others: Any) -> Any:
        if value(data, "use_dynamic_bsz") is False:
            return theirs(data=data, dp_group=dp_group, **others)
        room = int(value(data, "max_token_len_per_gpu"))
        turns, groups = _turns_that_fit(data, room)
        _say_cut(engine, groups, room)
        name = importlib.import_module("verl.utils.device").get_device_name()
        most = torch.tensor(len(micro_batches(groups, room, 1, turns)), device=name)
        # FSDP needs the same number of micro-batches on every rank
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=dp_group)
        batches = micro_batches(groups, room, int(most), turns)
        take = importlib.import_module("verl.utils.tensordict_utils").index_select_tensor_dict
        return [take(data, rows) for rows in batches], batches

    return prepare_micro_batches


def _say_cut(engine: Any, groups: list[PaddedGroup], room: int) -> None:
    """Logs a warning, once per engine, if groups have more than `room` packed tokens."""
    sizes = [group.prompt + sum(group.responses) for group in groups]
    cut = sum(size > room for size in sizes)
    if cut and not getattr(engine, SAYS_CUT, False):
        log.warning(
            "shared prompts: max_token_len_per_gpu=%d cuts %d of %d groups, which share less: set "
            "ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu to %d or more",
            room, cut, len(groups), max(sizes),
        )  # fmt: skip
        setattr(engine, SAYS_CUT, True)


def value(data: Any, name: str) -> Any:
    """Returns the entry `name` of a TensorDict of veRL, or None if there is no such entry."""
    return data[name] if name in data.keys() else None  # noqa: SIM118 (a TensorDict)


def _temperature(micro_batch: Any) -> float:
    """Returns the temperature of a micro-batch; raises Unsupported if its rows differ in it."""
    temperature = value(micro_batch, "temperature")
    if not isinstance(temperature, Tensor):
        return float(temperature)
    numbers = set(temperature.flatten().tolist())
    if len(numbers) != 1:
        _refuse("rows of several temperatures", "one")
    return float(numbers.pop())


def _check_settings(engine: Any) -> None:
    """Raises Unsupported if an engine has settings that packed batches do not support."""
    if engine.engine_config.ulysses_sequence_parallel_size > 1:
        _refuse("ulysses_sequence_parallel_size > 1", "1")
    if getattr(engine.engine_config, "pad_to_length", False):
        _refuse("pad_to_length", "none")


def _engines() -> Any:
    """Returns veRL's module of FSDP engines; raises Unsupported if it lacks what we patch."""
    try:
        home = importlib.import_module(HOME)
        for name in ("_build_module", "_build_fsdp_module", "forward_backward_batch"):
            getattr(home.FSDPEngine, name)
        for name in ("prepare_model_inputs", "prepare_model_outputs", "forward_step"):
            getattr(home.FSDPEngineWithLMHead, name)
        for name in ("prepare_micro_batches", "apply_monkey_patch", "enable_activation_offloading"):
            getattr(home, name)
    except (ImportError, AttributeError) as error:
        got, fix = f"veRL cannot be used ({error})", "pip install 'verl==0.9.1'"
        raise Unsupported(need(OP, got, RELEASES, fix)) from error
    return home


def _refuse(got: str, needs: str) -> None:
    """Raises Unsupported with a text that says what veRL passed and what packing needs."""
    raise Unsupported(need(OP, got, needs, "change veRL's configuration, or do not call patch()"))
