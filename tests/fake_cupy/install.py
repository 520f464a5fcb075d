"""The fake CuPy in place of CuPy: for as long as a test runs, and everywhere in the library."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import bsrgemm
from bsrgemm._backend import registry
from bsrgemm._kernels import driver as library_driver
from bsrgemm._kernels import jit

from . import arrays, driver, streams
from .card import Card
from .modules import Modules

#: Numbers of fake cards, above those of real ones.
_numbers = itertools.count(1000)
_IMPORTS = re.compile(r"^(?:import|from) cupy", re.M)


@cache
def _modules() -> Modules:
    """The fake modules; there is one set of them, so that a type of arrays belongs to one backend."""
    return Modules()


@cache
def _users() -> tuple[ModuleType, ...]:
    """The modules of the library that import CuPy at their head; they are imported with the real one first."""
    root = Path(bsrgemm.__file__).parent
    names = (
        ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for path in sorted(root.rglob("*.py"))
        if _IMPORTS.search(path.read_text())
    )
    return tuple(map(importlib.import_module, names))


@cache
def backend() -> Any:
    """The backend of the library, made once more around the fake CuPy; for use where that is in place."""
    _users()
    name = "bsrgemm._backend.cupy_backend"
    real = sys.modules.pop(name)
    try:
        with patch.object(registry, "_CUDA", None):
            return registry.cuda()
    finally:
        sys.modules[name] = real
        sys.modules[name.rpartition(".")[0]].cupy_backend = real  # type: ignore[attr-defined]


def renumbered(card: Card) -> None:
    """Give a card a number that no other had: whatever is remembered of a device is not of this one."""
    card.number = card.heap.device_id = next(_numbers)


@contextmanager
def installed(card: Card) -> Iterator[ModuleType]:
    """The module `cupy` of a new card, where the library has imported CuPy; afterwards the card is closed."""
    renumbered(card)
    try:
        with in_place(card) as cupy:
            yield cupy
    finally:
        card.close()


@contextmanager
def in_place(card: Card) -> Iterator[ModuleType]:
    """The module `cupy` of a card, whose memory stays for the next time."""
    users, modules = _users(), _modules()
    fakes = modules.by_name
    with ExitStack() as stack:
        stack.enter_context(patch.dict(sys.modules, fakes))
        stack.enter_context(patch.object(arrays.place, "heap", card.heap, create=True))
        stack.enter_context(patch.object(modules, "card", card))
        stack.enter_context(streams.fresh())
        of_library = backend()
        for module in users:
            for name, value in list(vars(module).items()):
                if isinstance(value, ModuleType) and value.__name__ in fakes and value is not fakes[value.__name__]:
                    stack.enter_context(patch.object(module, name, fakes[value.__name__]))
        stack.enter_context(patch.object(registry, "_CUDA", of_library))
        stack.enter_context(patch.dict(registry._BACKENDS))
        stack.enter_context(patch.object(jit, "load", card.load))
        stack.enter_context(patch.object(jit, "_argument_class", lambda: None))
        stack.enter_context(patch.object(library_driver, "_library", lambda: driver))
        yield modules.cupy
