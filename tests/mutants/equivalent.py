"""Mutants that no test can notice: the file, the changed line, and the reason."""

EQUIVALENT: dict[tuple[str, str], str] = {}
