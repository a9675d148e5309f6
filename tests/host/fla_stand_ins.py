"""The backend registries of flash-linear-attention 0.6 and 0.5.2, as far as a backend meets them.

fla needs Triton and its kernels a GPU, so neither is a dependency of the tests. Where fla is
installed, test_integrations_fla.py runs on the real one as well.
"""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

OPERATION = "gated_delta_rule"


class BaseBackend:
    backend_type = "base"
    package_name: str | None = None
    env_var: str | None = None
    default_enable = True
    priority = 5

    @classmethod
    def is_available(cls) -> bool:
        return True

    def is_enabled(self) -> bool:
        return self.env_var is None or os.environ.get(self.env_var, "1") != "0"

    def verify(self, function: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        verifier = getattr(self, f"{function}_verifier", None)
        if verifier is None:
            return True, None
        try:
            return verifier(*args, **kwargs)
        except Exception as error:
            return False, str(error)


class Registry:
    def __init__(self) -> None:
        self.backends: dict[str, BaseBackend] = {}
        self.said: list[str | None] = []  # why backends declined

    def register(self, backend: BaseBackend) -> None:
        self.backends[backend.backend_type] = backend

    def dispatch(self, default: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for backend in sorted(self.backends.values(), key=lambda b: b.priority):
                if not (backend.is_available() and backend.is_enabled()):
                    continue
                accepted, reason = backend.verify(default.__name__, *args, **kwargs)
                function = getattr(backend, default.__name__, None)
                if accepted and function is not None:
                    return function(*args, **kwargs)
                self.said.append(reason)
            return default(*args, **kwargs)

        return wrapper


class FlashQLA(BaseBackend):
    backend_type = "flash_qla"
    env_var = "FLA_FLASH_QLA"
    priority = 3

    def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> str:
        return "FlashQLA"


def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> str:
    return "FLA"


def fused_recurrent_gated_delta_rule(*args: Any, **kwargs: Any) -> str:
    return "FLA, recurrent"


def build(version: str, disabled: bool = False) -> tuple[dict[str, ModuleType], Registry]:
    """The modules to import, and the registry behind them, in which FlashQLA is."""
    names = ["fla", "fla.ops", f"fla.ops.{OPERATION}", f"fla.ops.{OPERATION}.backends"]
    names.append("fla.backends" if version == "0.6" else "fla.ops.backends")
    modules = {name: ModuleType(name) for name in names}
    for module in modules.values():
        module.__path__ = []
    registry = Registry()
    registry.register(FlashQLA())
    home = modules[names[-1]]

    class OfThisFla(BaseBackend):
        pass

    OfThisFla.__module__ = names[-1]
    home.BaseBackend, home._DISPATCH_DISABLED = OfThisFla, disabled
    if version == "0.6":

        def register(operation: str) -> Callable[[type], type]:
            assert operation == OPERATION

            def decorator(backend: type) -> type:
                registry.register(backend())
                return backend

            return decorator

        home.register = register
    else:
        modules[f"fla.ops.{OPERATION}.backends"].gdr_registry = registry
    functions = modules[f"fla.ops.{OPERATION}"]
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        dispatched = function if disabled else registry.dispatch(function)
        setattr(functions, function.__name__, dispatched)
    return modules, registry
