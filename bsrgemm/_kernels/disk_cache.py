"""The disk cache of compiled kernels: one file per entry, whose name ends in a digest of its key and its contents.

The cache is a subfolder of CuPy's cache folder. What another user could have written is never read: neither a folder
nor an entry is used unless only this user and root can write to it. A damaged entry is removed. A folder that cannot be
used is not an error: the compiled kernel (cubin) is then kept in memory, under a path that this process can read.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import stat
import tempfile
import threading
import time
import warnings
from pathlib import Path

#: Number of hex digits of a SHA-256 digest that a file name holds: 128 bits.
DIGITS = 32
#: Seconds after which a file that is still being written belongs to a process that was killed.
_ABANDONED = 3600

_lock = threading.Lock()
_warned = False
_memory: dict[str, str] = {}
_folders: dict[tuple[int, int], int] = {}


def folder() -> Path:
    """Return `$CUPY_CACHE_DIR/bsrgemm`, or `~/.cupy/kernel_cache/bsrgemm` by default. The folder need not exist.

    The default is a relative path where nobody knows the home folder; such a path is never used.
    """
    base = os.environ.get("CUPY_CACHE_DIR")
    return Path(base, "bsrgemm").absolute() if base else Path(os.path.expanduser("~/.cupy/kernel_cache/bsrgemm"))


def lookup(where: Path, stem: str) -> Path | None:
    """Return the entry of `stem` that matches the digest in its name, and remove entries that do not match.

    There is none in a folder that cannot be used; `store` says why.
    """
    try:
        inside = _trusted(where)
        names = sorted(os.listdir(inside))
    except OSError:
        return None
    for name in names:
        if name.startswith(f"{stem}-") and name.endswith(".cubin"):
            path = inside / name
            with contextlib.suppress(OSError):
                if path == entry_path(inside, stem, _contents(path)):
                    return path
            _remove(path)
    return None


def store(where: Path, stem: str, contents: bytes) -> Path:
    """Write an entry, as `write` does."""
    return write(where, entry_path(where, stem, contents).name, contents)


def read(where: Path, name: str) -> bytes:
    """Return the contents of a file of the folder; raise OSError if it is missing or cannot be trusted."""
    return _contents(_trusted(where) / name)


def write(where: Path, name: str, contents: bytes) -> Path:
    """Write a file so that other processes see all of it or nothing; raise OSError if that fails."""
    inside = _trusted(where, make=True)
    _remove_abandoned(inside)
    handle, temporary = tempfile.mkstemp(dir=inside, prefix=".", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(contents)
        os.replace(temporary, inside / name)
    except BaseException:
        _remove(temporary)
        raise
    return inside / name


def entry_path(where: Path, stem: str, contents: bytes) -> Path:
    """Return the path of the entry of `stem` that holds `contents`."""
    return where / f"{stem}-{_digest(stem.encode() + contents)}.cubin"


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
        f"bsrgemm cannot keep compiled kernels in {where} ({reason.strerror or reason}): every new process compiles "
        "them again. Set CUPY_CACHE_DIR to a folder of your own that can be written.",
        RuntimeWarning,
        stacklevel=2,
    )


def _trusted(where: Path, make: bool = False) -> Path:
    """Return a path that leads to the folder `where`; raise OSError if another user can write to the folder.

    The path goes through a descriptor that stays open until the process ends. It leads to the folder that was checked,
    even if someone who can write to a folder above it has put another one in its place.
    """
    if not where.is_absolute():
        raise FileNotFoundError(errno.ENOENT, "the home folder is not known", str(where))
    if make:
        where.mkdir(0o700, parents=True, exist_ok=True)
    if where.is_symlink():
        raise _refusal(where, "it is a link, and only links above it are followed")
    handle = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(handle)
        _refuse_foreign(where, found)
    except BaseException:
        os.close(handle)
        raise
    with _lock:
        kept = _folders.get((found.st_dev, found.st_ino))
        # A number that the program has closed may be that of the descriptor just opened.
        if kept is not None and kept != handle and _leads_to(kept, found):
            os.close(handle)
        else:
            kept = _folders[found.st_dev, found.st_ino] = handle
    return Path(f"/proc/self/fd/{kept}")


def _leads_to(handle: int, found: os.stat_result) -> bool:
    """Tell whether a descriptor is still the one of the folder; a program may have closed all that it did not open."""
    try:
        return os.path.samestat(os.fstat(handle), found)
    except OSError:
        return False


def _contents(path: Path) -> bytes:
    """Return the contents of a file; raise OSError for a link, a pipe and the like, and if others can write to it."""
    # An open that may block would wait for the writer of a named pipe.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(path, "it is not a file")
        _refuse_foreign(path, found)
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def _refuse_foreign(path: Path, found: os.stat_result) -> None:
    """Raise PermissionError if a user other than this one and root has written, or can write, what was found."""
    if found.st_uid not in (0, os.geteuid()):
        raise _refusal(path, f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(path, "other users can write to it until chmod go-w forbids it")


def _refusal(path: Path, reason: str) -> PermissionError:
    return PermissionError(errno.EPERM, reason, str(path))


def _memory_file(contents: bytes) -> str:
    try:
        handle = os.memfd_create("bsrgemm")
        path = f"/proc/self/fd/{handle}"
    except (AttributeError, OSError):  # the system has no such files, or does not allow them
        handle, path = tempfile.mkstemp(prefix="bsrgemm-", suffix=".cubin")
        atexit.register(_remove, path)
    # The handle stays open until the process ends, because the path of a memfd is valid only while it is open.
    with open(handle, "wb", closefd=False) as file:
        file.write(contents)
    return path


def _remove_abandoned(where: Path) -> None:
    """Remove files that processes were writing when they were killed."""
    for path in where.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED:
                _remove(path)


def _remove(path: str | Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:DIGITS]
