"""The exception `Unsupported`, and `need`, which builds the text of refusals and errors."""


class Unsupported(ValueError):
    """Raised if a call is well formed, but this version cannot run it, or not on this machine."""


def need(op: str, got: str, needs: str, fix: str) -> str:
    """Returns the text of an error, "{op}: {got}; need {needs}; {fix}".

    For example `need("f", "x is 3", "an even number", "pass 2")` is
    "f: x is 3; need an even number; pass 2".
    """
    return f"{op}: {got}; need {needs}; {fix}"
