"""The public surface, and which of it the cases call: functions of `bsrgemm`, and methods of its classes.

A name counts as called if code outside the package calls it; calls of the package by itself do not count.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import bsrgemm as bg

from ..strategies import Place, quietly
from .case import KINDS, Case

_PACKAGE = str(Path(bg.__file__).parent)
CLASSES = (bg.bsr_array, bg.bsr_matrix, bg.BlockMask, bg.KVCache, bg.ProductPlan)

#: Names that no case calls, and why.
EXPLAINED = {
    "tune": "measures kernels on a card, and computes nothing",
    "info": "describes the machine",
    "bsr_array.spy": "draws a picture",
    "BlockMask.plot": "draws a picture",
    "bsr_array.__iter__": "is always refused",
    "BlockMask.__rand__": "is always refused",
    "BlockMask.__ror__": "is always refused",
}
#: Rounds in which every kind of case takes part.
_FEW = 4
#: Methods by which Python itself makes and destroys objects and classes.
_OF_PYTHON = frozenset(("__init_subclass__", "__subclasshook__", "__new__", "__init__", "__getstate__", "__setstate__"))


def _code(x: Any) -> CodeType | None:
    """The code that runs when a function is called or a property is read; None for plain values."""
    if isinstance(x, property):
        x = x.fget
    if isinstance(x, classmethod | staticmethod):
        x = x.__func__
    x = inspect.unwrap(x) if callable(x) else x
    return getattr(x, "__code__", None)


def public() -> dict[str, CodeType]:
    """The code of every public function, method and property."""
    found = {}
    for name in bg.__all__:
        if inspect.isfunction(getattr(bg, name)):
            found[name] = _code(getattr(bg, name))
    for cls in CLASSES:
        for name in dir(cls):
            hidden = name.startswith("_") and not name.endswith("__")
            value = inspect.getattr_static(cls, name)
            if hidden or name in _OF_PYTHON or _code(value) is None:
                continue
            if cls is not bg.bsr_matrix or not hasattr(bg.bsr_array, name):
                found[f"{cls.__name__}.{name}"] = _code(value)
    return {name: code for name, code in found.items() if code is not None}


@contextmanager
def watching() -> Iterator[set[str]]:
    """Inside, the names that are called from outside of the package are collected."""
    called: set[str] = set()
    names: dict[CodeType, list[str]] = {}
    for name, code in public().items():
        names.setdefault(code, []).append(name)

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names:
            back = frame.f_back
            if back is not None and not back.f_code.co_filename.startswith(_PACKAGE):
                called.update(names[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(look)
    threading.setprofile(look)
    try:
        yield called
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def uncalled(place: Place, seed: int, rounds: int) -> list[str]:
    """The public names that no case has called after so many cases of each kind, apart from those explained.

    Kinds of cases that choose among many functions, on arrays, masks and dense operands, go on for all rounds.
    """
    wanted = set(public()) - set(EXPLAINED)
    with watching() as called, quietly():
        for number in range(rounds):
            for name, kind in sorted(KINDS.items()):
                if number < _FEW or name.startswith(("array.", "mask.", "product.dense")):
                    if not (kind.card and place.is_host):
                        kind.run(Case(seed, number, place))
                    if wanted <= called:
                        return []
    return sorted(wanted - called)
