"""Dispatch: find the engine that runs a family of operations (products, attention) on the arrays of a backend."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from .base import Backend

Engine = TypeVar("Engine")


class EngineTable(Generic[Engine]):
    """The engines of one family of operations, by the name of the backend.

    Parameters
    ----------
    package : str
        The package that contains the modules.
    **modules : str
        For each backend, the module of `package` whose `ENGINE` serves it. The module is imported when its engine is
        first needed, so that work on the CPU never imports CuPy.
    """

    def __init__(self, package: str, **modules: str) -> None:
        self._package = package
        self._modules = modules
        self._engines: dict[str, Engine] = {}

    def of(self, backend: Backend) -> Engine:
        """Return the engine that works on arrays of this backend."""
        engine = self._engines.get(backend.name)
        return self._load(backend.name) if engine is None else engine

    def register(self, name: str, engine: Engine) -> None:
        """Add the engine for a further backend, by the name of that backend."""
        self._engines[name] = engine

    def _load(self, name: str) -> Engine:
        module: Any = import_module(f"{self._package}.{self._modules[name]}")
        return self._engines.setdefault(name, cast(Engine, module.ENGINE))
