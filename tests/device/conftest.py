"""What device tests beside another library share."""

from typing import Any

import pytest


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
