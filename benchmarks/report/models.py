"""What the records say about layers of models in training."""

from collections.abc import Sequence

from ..harness.records import Row, Run
from . import tables
from .names import gpu, shape_of
from .select import Digests, aside, headline
from .spread import Spread, beside, spread
from .texts import NO_MODELS


def gain(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """For the front page: a few words, and what they are of."""
    run = headline(runs, "model", digests)
    rows = [row for row in run.rows if row.kind == "layers"] if run else []
    fla, both, torch = (beside(rows, name) for name in ("fla", "fla_conv", "torch"))
    alone = spread([_over(row, "fla", "ours_rule") for row in rows])
    if run is None or fla is None:
        return "layers: not measured yet", NO_MODELS
    labels = dict.fromkeys(row.what.removeprefix("4 layers of ") for row in rows)
    few = f"layers of {' and '.join(labels)} in training **"
    said = f"Four layers of {' or '.join(labels)} in transformers, forward + backward, no "
    said += f"embedding, head or optimizer ({gpu(run)}, eager calls). "
    if both is None:
        few += f"{_ends(fla)} x** as fast as with FLA where causal-conv1d is not installed"
        said += "FLA runs beside PyTorch's convolution, which is what transformers has without "
        said += "causal-conv1d; beside causal-conv1d nothing was timed"
    else:
        few += f"{_ends(both)} x** as fast as with FLA, its own kernels, and causal-conv1d, "
        few += f"**{_ends(fla)} x** as "
        few += "fast as with FLA alone"
        said += f"Beside FLA and causal-conv1d {_ends(both)} x; beside FLA alone, where PyTorch "
        said += f"convolves, {_ends(fla)} x"
    if alone is not None:
        few += f" (the rule's part: {_ends(alone)} x)"
        said += f"; with our rule alone, and PyTorch's convolution on both sides, {_ends(alone)} x"
    if torch is not None:
        few += f", **{_ends(torch, 1)} x** as fast as without {'either' if both else 'FLA'}"
    return few, f"{said}. Most of a step is matrix products, as before. Longer rows were not timed."


def _ends(found: Spread, digits: int = 2) -> str:
    return f"{found.worst:.{digits}f} to {found.best:.{digits}f}"


def layer(runs: Sequence[Run], digests: Digests) -> tuple[str, str]:
    """Of FLA's own layer, likewise."""
    run = aside(runs, "model", "fla", digests)
    rows = run.rows if run else ()
    of_all = beside(rows, "fla")
    if run is None or of_all is None:
        return "no step of its layer timed yet (the rule in layers of transformers: row above)", ""
    times = f"{of_all.worst:.2f} to {of_all.best:.2f} x"
    whole = f"A step of FLA's layer, of 256/512, {times} ({gpu(run)}, eager calls)."
    return f"a step of its layer **{times}** ({gpu(run)})", whole


def lines(run: Run | None) -> list[list[str]]:
    """A line for each row: ours, and how many times as long a step takes with others."""
    found = []
    for row in run.rows if run else ():
        if (mine := row.time_ms("ours")) is not None:
            pairs = (("fla_conv", "ours"), ("fla", "ours"), ("fla", "ours_rule"), ("torch", "ours"))
            cells = [tables.marked(_over(row, *pair)) for pair in pairs]
            found.append([row.what, shape_of(row), tables.number(mine), *cells])
    return found


def _over(row: Row, name: str, mine: str) -> float | None:
    """One implementation's time over that of one of ours."""
    time, own = row.time_ms(name), row.time_ms(mine)
    return time / own if time and own else None
