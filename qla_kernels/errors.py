"""What this package raises when it refuses, and how a refusal reads."""


class Unsupported(ValueError):
    """The call is well formed, but this version cannot run it on this device or layout."""


def need(op: str, got: str, needs: str, fix: str) -> str:
    """The text of every refusal: what we got, what we need, and how to get there."""
    return f"{op}: {got}; need {needs}; {fix}"
