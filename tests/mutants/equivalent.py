"""Mutants that no test can notice: the file, the changed line, and the reason."""

EQUIVALENT: dict[tuple[str, str], str] = {
    ("gdn/anchored/launch.py", "items = B * HV * (V * tile_v)"): "more CTAs than items: idle ones",
}
