"""What device tests share: the GPU among processes, and another library's tuning."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

KEPT = 2**30  # bytes that a process may keep between tests


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    """Gives memory back: eight processes share a GPU, and allocators keep what tests freed."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


@pytest.fixture
def untuned(monkeypatch) -> None:
    """Triton takes the first configuration that fits: tuning takes minutes, and changes times."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    errors = pytest.importorskip("triton.runtime.errors")
    tuned = autotuner.Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        candidates = self.configs
        try:
            for i, config in enumerate(candidates):
                self.configs = [config]
                try:
                    return tuned(self, *args, **kwargs)
                except errors.OutOfResources:
                    if i == len(candidates) - 1:
                        raise
        finally:
            self.configs = candidates

    monkeypatch.setattr(autotuner.Autotuner, "run", run)
