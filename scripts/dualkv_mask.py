"""Draw docs/figures/dualkv-mask.svg: who sees whom, replicated and packed, at one scale.

A test says when the figure is no longer that of the layouts.
"""

from itertools import groupby
from pathlib import Path

from qla_kernels import SharedLayout

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "dualkv-mask.svg"

GROUPS = [(9, [6, 3, 5]), (4, [3, 4])]  # tokens of each prompt, and of each response
CELL, GAP, TOP = 6, 60, 44  # pixels
OWN, SHARED, PROMPT = "#d55e00", "#56b4e9", "#0072b2"  # Okabe and Ito's
LEGEND = ((PROMPT, "a prompt on itself"), (SHARED, "a response on its prompt"),
          (OWN, "a response on itself"))  # fmt: skip
STYLE = """<style>
text { fill: #1f2328 } .page { fill: #f7f7f7 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .page { fill: #21262d } }
</style>
"""


def figure() -> str:
    """Two square panels: every sequence alone, and each prompt once."""
    alone = [(prompt, [response]) for prompt, rs in GROUPS for response in rs]
    panels = [("every sequence alone", alone), ("each prompt once", GROUPS)]
    parts, left = [], 1
    for title, groups in panels:
        layout = SharedLayout.from_lengths(groups)
        tokens = layout.num_tokens
        parts.append(
            f'<g transform="translate({left} {TOP})">\n'
            f'<text y="-22" font-weight="bold">{title}</text>\n'
            f'<text y="-7">{tokens} tokens, {layout.pairs} visible pairs</text>\n'
            f'<rect width="{tokens * CELL}" height="{tokens * CELL}" class="page"/>\n'
            + "\n".join(cells(layout, groups))
            + "\n</g>"
        )
        left += tokens * CELL + GAP
    for i, (colour, text) in enumerate(LEGEND):
        y = TOP + sum(p + sum(rs) for p, rs in GROUPS) * CELL + 30 + 20 * i
        x = left - GAP - SharedLayout.from_lengths(GROUPS).num_tokens * CELL
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{text}</text>')
    height = TOP + SharedLayout.from_lengths(alone).num_tokens * CELL + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left - GAP + 1} {height}" '
        f'width="{left - GAP + 1}" font-family="DejaVu Sans, sans-serif" font-size="12">\n'
        f"<title>Visible (query, key) pairs; rows are queries, columns are keys</title>\n"
        + STYLE
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def cells(layout: SharedLayout, groups: list[tuple[int, list[int]]]) -> list[str]:
    """A rectangle for each run of keys that a query sees and that have one colour."""
    is_prompt = [
        flag for p, rs in groups for flag, n in ((True, p), (False, sum(rs))) for _ in range(n)
    ]
    tout = layout.tout.tolist()

    def colour(query: int, key: int) -> str | None:
        if not key <= query < tout[key]:
            return None
        return (PROMPT if is_prompt[query] else SHARED) if is_prompt[key] else OWN

    drawn = []
    for query in range(layout.num_tokens):
        for fill, run in groupby(range(query + 1), lambda key: colour(query, key)):  # noqa: B023
            keys = list(run)
            if fill is not None:
                x, width = keys[0] * CELL, len(keys) * CELL
                shape = f'x="{x}" y="{query * CELL}" width="{width}" height="{CELL}"'
                drawn.append(f'<rect {shape} fill="{fill}"/>')
    return drawn


if __name__ == "__main__":
    FIGURE.write_text(figure())
