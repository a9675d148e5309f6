"""TRL's AsyncGRPOTrainer on our kernels, for models with gated delta nets as well.

    from qla_kernels.integrations.trl_async import shared_prefix_async_trainer
    trainer = shared_prefix_async_trainer(AsyncGRPOTrainer)("Qwen/...", reward_funcs=..., ...)

TRL's trainer packs rollouts into a tree, in which shared prefixes are stored once. But its
attention copies the keys and values of every path through the tree, and it refuses models with
layers other than attention. Here the tree becomes a `SharedLayout`, which attention, gated delta
nets and their convolutions follow. TRL's trainer is experimental, so this file works with TRL 1.16
only. It does not import TRL.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import nn

from qla_kernels.dualkv import SharedLayout
from qla_kernels.integrations import transformers_dualkv
from qla_kernels.integrations.full_attention import LINEAR, layer_kinds, text_config
from qla_kernels.integrations.trl import NAME, bare, exchanged, log_gain
from qla_kernels.runtime.errors import Unsupported, need

OP, RELEASE = "shared_prefix_async_trainer", "1.16."
HOME = "trl.experimental.async_grpo.async_grpo_trainer"


def shared_prefix_async_trainer(base: type) -> type:
    """Returns a subclass of TRL's AsyncGRPOTrainer whose model runs on this package's kernels.

    TRL packs sequences into a tree that stores shared prefixes once. During `train`, attention and
    gated-delta-net layers compute each node of this tree once. The constructor prepares the model
    by `transformers_dualkv.prepare`; after `train` the model has its own attention again. In the
    load-balancing loss of MoE models a packed token counts once, as in TRL. The first step logs how
    many times fewer tokens the model runs.

    Args:
        base: AsyncGRPOTrainer or a subclass. The constructor of the new class has the same
            arguments.

    Raises:
        Unsupported: the installed TRL is not 1.16. The constructor of the new class raises it for
            models that `transformers_dualkv.check` refuses.
    """
    home = _trainer_module()

    class SharedPrefixAsyncTrainer(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _layer_types_hidden(home):
                super().__init__(*args, **kwargs)
            model = self.accelerator.unwrap_model(self.model)
            transformers_dualkv.prepare(bare(model), NAME)  # in place of TRL's attention
            model.register_forward_pre_hook(TreeToLayout(), with_kwargs=True)
            self._counts_flops = LINEAR not in layer_kinds(bare(model))
            if not self._counts_flops:
                self._peak_flops_per_device = None  # no rate without a count

        def train(self, *args: Any, **kwargs: Any) -> Any:
            """Trains with our attention, and then selects the model's own attention again."""
            model = bare(self.accelerator.unwrap_model(self.model))
            transformers_dualkv.select(model, NAME)
            try:
                return super().train(*args, **kwargs)
            finally:
                model.set_attn_implementation(None)

        def _log_step_metrics(self) -> None:
            """Logs metrics, without the number of operations if TRL cannot count the model's."""
            uncounted = {} if self._counts_flops else {"compute_flops_per_token": lambda *_: 0}
            with exchanged(home, **uncounted):
                super()._log_step_metrics()

    return SharedPrefixAsyncTrainer


class TreeToLayout:
    """Forward pre-hook of a model: turns TRL's keywords of a packed batch into a `SharedLayout`.

    TRL packs sequences into a tree, which stores shared prefixes once, and passes it to the model
    in keywords `tree_...`. The hook replaces these by the keyword `shared_prefix`, which this
    package's attention and gated-delta-net layers read. Calls without `tree_...` keywords do not
    change. The first call with a tree logs how many times fewer tokens it has than the sequences.
    """

    def __init__(self) -> None:
        self.says_gain = True

    def __call__(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        tree = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("tree_")}
        if not tree:
            return None
        q, k = tree["tree_cu_seqlens_q"], tree["tree_cu_seqlens_k"]
        lengths, parents = forest(q.tolist(), k.tolist())
        if self.says_gain:
            paths = k.diff().tolist()
            leaves = set(range(len(lengths))) - set(parents)
            log_gain(sum(paths[leaf] for leaf in leaves), sum(lengths))
            self.says_gain = False
        layout = SharedLayout.from_forest(lengths, parents, device=q.device)
        return args, {**kwargs, "shared_prefix": layout}


def forest(cu_seqlens_q: list[int], cu_seqlens_k: list[int]) -> tuple[list[int], list[int]]:
    """Computes the tree into which TRL packed sequences, from TRL's two tensors of bounds.

    A segment of the tree is a run of tokens that the same sequences contain, such as a prompt; its
    path is everything from the first token of these sequences to its end. TRL gives the lengths of
    segments and of their paths, in depth-first order. The parent of a segment is found on the path
    of the segment before: it ends where its child begins.

    Args:
        cu_seqlens_q: [segments + 1] bounds; their differences are the lengths of the segments.
        cu_seqlens_k: [segments + 1] bounds; their differences are the lengths of the paths.

    Returns:
        (lengths, parents), for `SharedLayout.from_forest`: the number of tokens of each segment,
        and the index of its parent, -1 for a segment that begins its sequences.

    Raises:
        ValueError: a segment begins at a depth at which no path before it ends.
    """
    lengths = [b - a for a, b in pairwise(cu_seqlens_q)]
    ends = [b - a for a, b in pairwise(cu_seqlens_k)]
    parents: list[int] = []
    path: list[int] = []
    for node, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        begin = end - length
        while path and ends[path[-1]] > begin:
            path.pop()
        if (ends[path[-1]] if path else 0) != begin:
            got, fix = f"segment {node} begins at depth {begin}", "pass both tensors of one row"
            raise ValueError(need(OP, got, "a depth at which a path before it ends", fix))
        parents.append(path[-1] if path else -1)
        path.append(node)
    return lengths, parents


@contextmanager
def _layer_types_hidden(home: Any) -> Iterator[None]:
    """Makes the constructor of TRL's trainer accept models with gated-delta-net layers.

    TRL checks `layer_types` in the model's config, after one function of its module made the model
    and before another adds a head to it. Both are wrapped here, while a `with` block runs: the
    first hides `layer_types`, and the second restores it.
    """
    create, add_head = home.create_model_from_path, home.add_fused_lm_head
    hidden_types: list[tuple[Any, Any]] = []

    def created(*args: Any, **kwargs: Any) -> Any:
        model = create(*args, **kwargs)
        config = text_config(model)
        if LINEAR in (kinds := getattr(config, "layer_types", None) or ()):
            hidden_types.append((config, kinds))
            config.layer_types = None
        return model

    def put_back() -> None:
        while hidden_types:
            config, kinds = hidden_types.pop()
            config.layer_types = kinds

    def headed(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return add_head(*args, **kwargs)

    try:
        with exchanged(home, create_model_from_path=created, add_fused_lm_head=headed):
            yield
    finally:
        put_back()


def _trainer_module() -> Any:
    """Returns TRL's module of the trainer; raises Unsupported if the installed TRL is not 1.16."""
    try:
        release = str(importlib.import_module("trl").__version__)
        home = importlib.import_module(HOME)
    except ImportError as error:
        release, home = f"that cannot be imported ({error})", None
    if home is None or not f"{release}.".startswith(RELEASE):
        got, fix = f"TRL {release}", f"pip install 'trl=={RELEASE}*'"
        raise Unsupported(need(OP, got, "TRL 1.16, on whose private parts it relies", fix))
    return home
