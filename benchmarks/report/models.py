"""What the records say about layers of models in training."""

from collections.abc import Sequence

from ..harness.records import Row, Run
from . import tables
from .names import gpu, shape_of
from .select import Digests, aside, headline
from .spread import beside, spread
from .texts import NO_MODELS


def gain(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """For the front page: a few words, and what they are of."""
    run = headline(runs, "model", digests)
    rows = [row for row in run.rows if row.kind == "layers"] if run else []
    fla, torch = (beside(rows, name) for name in ("fla", "torch"))
    alone = spread([_over(row, "fla", "ours_rule") for row in rows])
    if run is None or fla is None:
        return "layers: not measured yet", NO_MODELS
    labels = dict.fromkeys(row.what.removeprefix("4 layers of ") for row in rows)
    few = f"layers of {' and '.join(labels)} in training **{fla.worst:.2f} to {fla.best:.2f} x** "
    few += "as fast as with FLA where causal-conv1d is not installed"
    said = f"Four layers of {' or '.join(labels)} in transformers, forward + backward, no "
    said += f"embedding, head or optimizer ({gpu(run)}, eager calls). FLA runs beside PyTorch's "
    said += "convolution, which is what transformers has without causal-conv1d"
    if alone is not None:
        few += f" (the rule's part: {alone.worst:.2f} to {alone.best:.2f} x)"
        said += f"; with our rule alone {alone.worst:.2f} to {alone.best:.2f} x"
    if torch is not None:
        few += f", **{torch.worst:.1f} to {torch.best:.1f} x** as fast as without FLA"
    said += ". Beside causal-conv1d nothing was timed: the rule's part is what is known. Most of a "
    return few, f"{said}step is matrix products, as before. Longer rows were not timed."


def layer(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """Of FLA's own layer, likewise."""
    run = aside(runs, "model", "fla", digests)
    rows = run.rows if run else ()
    of_all = beside(rows, "fla")
    if run is None or of_all is None:
        return "no step of its layer timed yet (the rule in layers of transformers: row above)", ""
    times = f"{of_all.worst:.2f} to {of_all.best:.2f} x"
    whole = f"A step of FLA's layer, of 256/512, {times} ({gpu(run)}, eager calls)."
    return f"a step of its layer **{times}**", whole


def lines(run: Run | None) -> list[list[str]]:
    """A line for each row: ours, and how many times as long a step takes with others."""
    found = []
    for row in run.rows if run else ():
        if (mine := row.time_ms("ours")) is not None:
            cells = [tables.marked(_over(row, name, "ours")) for name in ("fla", "torch")]
            cells.insert(1, tables.marked(_over(row, "fla", "ours_rule")))
            found.append([row.what, shape_of(row), tables.number(mine), *cells])
    return found


def _over(row: Row, name: str, mine: str) -> float | None:
    """One implementation's time over that of one of ours."""
    time, own = row.time_ms(name), row.time_ms(mine)
    return time / own if time and own else None
