"""Small wrong changes of the sources, to see whether tests notice: `python -m tests.mutants`."""
