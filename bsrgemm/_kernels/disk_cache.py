"""The disk cache of compiled kernels: one file per entry, its name ending in a digest of its contents.

It lives in CuPy's cache folder. A damaged entry is removed; a folder that cannot be used is no
error: the cubin is then kept in memory under a path of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import tempfile
import threading
import warnings
from pathlib import Path

#: Hex digits of SHA-256 kept in a file name: 128 bits.
DIGITS = 32

_lock = threading.Lock()
_warned = False
_memory: dict[str, str] = {}


def folder() -> Path:
    """`$CUPY_CACHE_DIR/bsrgemm`, by default `~/.cupy/kernel_cache/bsrgemm`; it need not exist."""
    base = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    return Path(base, "bsrgemm").absolute()


def lookup(where: Path, stem: str) -> Path | None:
    """The entry of `stem` whose contents match the digest in its name; one met that does not is removed."""
    for path in sorted(where.glob(f"{stem}-*.cubin")):
        with contextlib.suppress(OSError):
            if path == entry_path(where, stem, path.read_bytes()):
                return path
        _remove(path)
    return None


def store(where: Path, stem: str, contents: bytes) -> Path:
    """Write an entry so that other processes see all of it or nothing; OSError where that fails."""
    path = entry_path(where, stem, contents)
    where.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=where, prefix=".", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(contents)
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise
    return path


def entry_path(where: Path, stem: str, contents: bytes) -> Path:
    """Where `contents` belong as an entry of `stem`."""
    return where / f"{stem}-{_digest(contents)}.cubin"


def keep_in_memory(contents: bytes) -> str:
    """A path from which this process can read `contents` as long as it lives, without the cache."""
    key = _digest(contents)
    with _lock:
        if key not in _memory:
            _memory[key] = _memory_file(contents)
        return _memory[key]


def warn_unusable(where: Path, reason: OSError) -> None:
    """Say once per process that kernels will be compiled again in every process, and why."""
    global _warned
    with _lock:
        if _warned:
            return
        _warned = True
    warnings.warn(
        f"bsrgemm cannot keep compiled kernels in {where} ({reason}): every new process compiles them again. "
        "Set CUPY_CACHE_DIR to a folder that can be written.",
        RuntimeWarning,
        stacklevel=2,
    )


def _memory_file(contents: bytes) -> str:
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("bsrgemm")
        path = f"/proc/self/fd/{handle}"
    else:
        handle, path = tempfile.mkstemp(prefix="bsrgemm-", suffix=".cubin")
        atexit.register(_remove, path)
    # The handle stays open until the process ends: the path of a memfd lives as long as it.
    with open(handle, "wb", closefd=False) as file:
        file.write(contents)
    return path


def _remove(path: str | Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:DIGITS]
