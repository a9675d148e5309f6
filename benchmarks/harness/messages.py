"""What the harness and its worker say to each other."""

from typing import Any, NamedTuple

from .workload import Ceilings, Work


class Options(NamedTuple):
    rounds: int = 5
    burst_s: float = 0.02
    idle_s: float = 0.06  # between bursts, so that the chip stays cool


class Machine(NamedTuple):
    device: str
    kind: str
    environment: dict[str, Any]
    versions: dict[str, str]
    labels: dict[str, str]
    missing: dict[str, str]
    ceilings: Ceilings


class Begin(NamedTuple):
    """`implementation` ("" is none) starts `phase`; a silence from here on is its fault."""

    implementation: str
    phase: str


class RowFacts(NamedTuple):
    work: Work
    input_sets: int


class RowFailed(NamedTuple):
    """Inputs or truth could not be made; nobody is to blame."""

    detail: str


class Done(NamedTuple):
    spoiled: bool  # the device context is broken: ask for another worker
    kernels: dict[str, str]  # digests of what this package has launched so far, by label
