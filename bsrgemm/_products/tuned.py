"""Kernels that `tune` found to be the fastest. They are stored on disk per card, and override the rule of choice.py."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from dataclasses import asdict, astuple
from functools import cache
from pathlib import Path
from typing import Any

from .._kernels import disk_cache
from .call import Problem
from .choice import variants
from .dense import Dense

_lock = threading.Lock()
_loaded: dict[Path, Table] = {}


class Table(dict[str, Any]):
    """What `tune` has stored for a card, by the signature of a problem, and the kernels that were chosen beside it."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        #: of a process; another table begins anew
        self.chosen: dict[Any, Any] = {}


def stored(problem: Problem) -> Dense | None:
    """Return the kernel that `tune` found to be the fastest for this problem, or None."""
    entries = table()
    found = entries.get(signature(problem)) if entries else None
    if found is None:
        return None
    # An entry that another version wrote, or that is damaged, equals no kernel.
    return next((kernel for kernel in variants(problem) if _described(kernel) == found), None)


def keep(problem: Problem, kernel: Dense | None) -> Path:
    """Store the kernel of a problem in this process and on disk; raise OSError if the file cannot be written.

    None removes what was stored, so that the rules choose.
    """
    where = path()
    with _lock:
        _loaded.pop(where, None)
        entries = Table(_read(where))
        entries.pop(signature(problem), None)
        if kernel is not None:
            entries[signature(problem)] = _described(kernel)
        disk_cache.write(where.parent, where.name, json.dumps(entries, indent=1, sort_keys=True).encode())
        _loaded[where] = entries
    return where


def table() -> Table:
    """Return what is stored for CuPy's current device: the same table until something is stored."""
    return _read(path())


def path() -> Path:
    """Return the path of the file for CuPy's current device."""
    return disk_cache.folder() / f"tuned-{_card()}.json"


def signature(problem: Problem) -> str:
    """Return a problem as text. Problems that differ in any size, even in the number of blocks, are different.

    B in several parts is a copy of another B, for which `tune` measures; no kernel is stored for it.
    """
    *rest, parts = astuple(problem)
    return " ".join(map(str, rest if parts == 1 else (*rest, parts)))


def _described(kernel: Dense) -> dict[str, Any]:
    described: Any = kernel
    return {"kernel": type(kernel).__name__, **json.loads(json.dumps(asdict(described)))}


def _read(where: Path) -> Table:
    found = _loaded.get(where)
    if found is None:
        entries = {}
        with contextlib.suppress(OSError, ValueError):
            read = json.loads(disk_cache.read(where.parent, where.name))
            entries = read if isinstance(read, dict) else {}
        found = _loaded[where] = Table(entries)
    return found


def _card() -> str:
    """Return the name of CuPy's current device in a form that can be part of a file name."""
    import cupy

    return _card_name(cupy.cuda.runtime.getDevice())


@cache
def _card_name(device: int) -> str:
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
