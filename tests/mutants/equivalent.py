"""Mutants that no test can notice: the file, the changed line, and the reason."""

EQUIVALENT: dict[tuple[str, str], str] = {
    ("gdn/anchored/launch.py", "items = B * HV * (V * tile_v)"): "more CTAs than items: idle ones",
    (
        "native/programs.c",
        "recording = list == Py_None ? NULL : list, noting = recording ? gpu : -2;",
    ): "any negative number means none",
    (
        "native/launcher.c",
        "unsigned box[RANK], steps[RANK]; Expression dims[RANK], strides[RANK + 1];",
    ): "more room than is used",
}
