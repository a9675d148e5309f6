"""Prebuilt kernels: compiled ahead of time, launched from data, without TileLang.

`host_function.py` and `declared.py` read from TIR what a launch needs, an `Entry`, and
`python -m qla_kernels build` writes it with the compiled kernels into a file. When a kernel is
wanted, `prebuilt.py` finds it there, `sources.py` says whether it was built from the sources that
are here, `pack.py` writes its entry as an array of numbers, and `launcher.c` launches from that.

Whole calls are replayed by `programs.c` (tables, replays), `making.c` (what goes into a table) and
`forms.c` (programs for any number of tokens). `trace.py` makes a program by running launch code on
placeholders (`placeholders.py`, `symbols.py`); `recording.py` is how launch code tells it of more
than launches. `plans.c` plans batches whose lengths are new in each call (`gdn/known.py`).
docs/lessons.md has the measurements.
"""
