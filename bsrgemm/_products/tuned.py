"""Kernels that `tune` found to be the fastest. They are stored per card, and come before predicted times."""

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
_loaded: dict[Path, dict[str, Any]] = {}


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

    None removes what was stored, so that predicted times choose.
    """
    where = path()
    with _lock:
        _loaded.pop(where, None)
        entries = dict(_read(where))
        entries.pop(signature(problem), None)
        if kernel is not None:
            entries[signature(problem)] = _described(kernel)
        disk_cache.write(where.parent, where.name, json.dumps(entries, indent=1, sort_keys=True).encode())
        _loaded[where] = entries
    return where


def table() -> dict[str, Any]:
    """Return what is stored for CuPy's current device."""
    return _read(path())


def path() -> Path:
    """Return the path of the file for CuPy's current device."""
    return disk_cache.folder() / f"tuned-{_card()}.json"


def signature(problem: Problem) -> str:
    """Return a problem as text. Problems that differ in any size, even in the number of blocks, are different.

    Copies of operands are others, for which `tune` does not measure: no kernel is stored for them.
    """
    *rest, parts, line, turned, uneven = astuple(problem)
    unusual = (parts, line, turned, uneven)
    return " ".join(map(str, rest if unusual == (1, 0, False, 1) else (*rest, *unusual)))


def _described(kernel: Dense) -> dict[str, Any]:
    described: Any = kernel
    return {"kernel": type(kernel).__name__, **json.loads(json.dumps(asdict(described)))}


def _read(where: Path) -> dict[str, Any]:
    found = _loaded.get(where)
    if found is None:
        entries = {}
        with contextlib.suppress(OSError, ValueError):
            read = json.loads(disk_cache.read(where.parent, where.name))
            entries = read if isinstance(read, dict) else {}
        found = _loaded[where] = entries
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
