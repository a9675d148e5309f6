"""What verification of drafts takes."""

from ..harness.records import Run


def drafts(run: Run) -> str:
    """How long verification takes beside a decode step of the same batch, by number of drafts."""
    found: dict[str, list[float]] = {}
    for row in run.rows:
        mine, step = row.time_ms("ours"), row.time_ms("ours_step")
        if row.kind == "drafts" and mine and step:
            found.setdefault(row.layout.rpartition(" ")[2], []).append(mine / step)
    ends = {n: dict.fromkeys(f"{end(x):.2f}" for end in (min, max)) for n, x in found.items()}
    said = [f"{n} drafts {' to '.join(x)} times" for n, x in ends.items()]
    return f"Verification takes, of a decode step of the batch: {', '.join(said)}." if said else ""
