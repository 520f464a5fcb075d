"""The one dispatch: which engine does a family of operations (products, attention) for the arrays of a backend."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from .base import Backend

Engine = TypeVar("Engine")


class EngineTable(Generic[Engine]):
    """The engines of one family, by the name of a backend.

    Parameters
    ----------
    **modules : str
        For each backend the module of the same room whose `ENGINE` serves it. It is imported when it is first asked
        for, so that nothing of CuPy is imported for work on the CPU.
    """

    def __init__(self, package: str, **modules: str) -> None:
        self._package = package
        self._modules = modules
        self._engines: dict[str, Engine] = {}

    def of(self, backend: Backend) -> Engine:
        """The engine that works on arrays of this backend."""
        engine = self._engines.get(backend.name)
        return self._load(backend.name) if engine is None else engine

    def register(self, name: str, engine: Engine) -> None:
        """Serve the arrays of a further backend."""
        self._engines[name] = engine

    def _load(self, name: str) -> Engine:
        module: Any = import_module(f"{self._package}.{self._modules[name]}")
        return self._engines.setdefault(name, cast(Engine, module.ENGINE))
