"""The exception `Unsupported`, and `need`, which builds the text of refusals and errors."""


class Unsupported(ValueError):
    """The call is well formed, but this version cannot run it, or not on this machine."""


def need(op: str, got: str, needs: str, fix: str) -> str:
    """Returns the text of an error: operation, what it got, what it needs, and how to fix it."""
    return f"{op}: {got}; need {needs}; {fix}"
