"""The disk cache of compiled kernels: one file per entry, whose name ends in a digest of its contents.

The cache is a subfolder of CuPy's cache folder. A damaged entry is removed. A folder that cannot be used is not an
error: the compiled kernel (cubin) is then kept in memory, under a path that this process can read.
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

#: Number of hex digits of a SHA-256 digest that a file name holds: 128 bits.
DIGITS = 32

_lock = threading.Lock()
_warned = False
_memory: dict[str, str] = {}


def folder() -> Path:
    """Return `$CUPY_CACHE_DIR/bsrgemm`, or `~/.cupy/kernel_cache/bsrgemm` by default. The folder need not exist."""
    base = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    return Path(base, "bsrgemm").absolute()


def lookup(where: Path, stem: str) -> Path | None:
    """Return the entry of `stem` whose contents match the digest in its name, and remove entries that do not match."""
    for path in sorted(where.glob(f"{stem}-*.cubin")):
        with contextlib.suppress(OSError):
            if path == entry_path(where, stem, path.read_bytes()):
                return path
        _remove(path)
    return None


def store(where: Path, stem: str, contents: bytes) -> Path:
    """Write an entry so that other processes see all of it or nothing; raise OSError if that fails."""
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
    """Return the path of the entry of `stem` that holds `contents`."""
    return where / f"{stem}-{_digest(contents)}.cubin"


def keep_in_memory(contents: bytes) -> str:
    """Return a path outside the cache from which this process can read `contents` until it ends."""
    key = _digest(contents)
    with _lock:
        if key not in _memory:
            _memory[key] = _memory_file(contents)
        return _memory[key]


def warn_unusable(where: Path, reason: OSError) -> None:
    """Warn once per process that every process will compile its kernels again, and give the reason."""
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
    # The handle stays open until the process ends, because the path of a memfd is valid only while it is open.
    with open(handle, "wb", closefd=False) as file:
        file.write(contents)
    return path


def _remove(path: str | Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:DIGITS]
