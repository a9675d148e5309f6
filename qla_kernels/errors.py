"""The exception `Unsupported`, and `need`, which builds the text of refusals and errors."""


class Unsupported(ValueError):
    """The call is well formed, but this version cannot run it on this machine or in this form."""


def need(op: str, got: str, needs: str, fix: str) -> str:
    """Returns an error's text: operation, what was passed, what is needed, and how to fix it."""
    return f"{op}: {got}; need {needs}; {fix}"
