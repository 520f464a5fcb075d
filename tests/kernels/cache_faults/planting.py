"""Foreign kernels in the cache folder, folders and files of strangers, and what a build must do in spite of them."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bsrgemm._kernels import disk_cache, jit
from bsrgemm._kernels.jit import KernelSpec

SPEC = KernelSpec("fill.cu", "fill", (("VALUE", 7),))
OTHER = KernelSpec("fill.cu", "fill", (("VALUE", 8),))
ARCH = "sm_80"
STRANGER = 12345
Plant = Callable[[Path], None]


@cache
def kernel(spec: KernelSpec) -> jit.Compiled:
    """Compiled once for all tests; the compiler gives the same bytes each time."""
    with tempfile.TemporaryDirectory() as folder:
        write_source(Path(folder))
        return real_compile(spec, ARCH, jit.gather(spec.source, Path(folder)), Path(folder))


real_compile = jit._compile


def write_source(root: Path) -> None:
    (root / "fill.cu").write_text('extern "C" __global__ void fill(int* x) { x[threadIdx.x] = VALUE; }\n')


class Built:
    """What a build gave and said."""

    def __init__(self, root: Path) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.report = jit.build_report(SPEC, ARCH, root=root)
        self.said = [str(warning.message) for warning in caught]
        assert Path(self.report.path).read_bytes() == kernel(SPEC).cubin, "a foreign kernel"


def works_and_says_the_way_out(root: Path, folder: Path, reason: str) -> None:
    """The kernel is in memory; the first build warns, the next ones do not."""
    built = Built(root)
    (said,) = built.said
    assert not built.report.stored and not built.report.cached
    assert str(folder) in said and re.search(reason, said) and "CUPY_CACHE_DIR" in said
    again = Built(root)
    assert again.report.path == built.report.path and again.said == []


def works_and_is_kept(root: Path, folder: Path) -> None:
    """The kernel was compiled again without a word, and is the only entry; the next build finds it."""
    built = Built(root)
    assert built.report.stored and not built.report.cached and built.said == []
    assert os.listdir(folder) == [Path(built.report.path).name]
    assert Built(root).report.cached


def entry(root: Path, spec: KernelSpec = SPEC, contents: bytes | None = None) -> Path:
    """Where the entry of a kernel is, if it holds these contents."""
    where = disk_cache.folder()
    stem = f"{spec.entry}-{ARCH}-{jit._cache_key(spec, ARCH, jit.gather(spec.source, root))[: disk_cache.DIGITS]}"
    return disk_cache.entry_path(where, stem, kernel(spec).cubin if contents is None else contents)


def foreign_entry(root: Path) -> Path:
    """Where a kernel that computes something else lies under the key, with a digest that is right."""
    return entry(root, contents=kernel(OTHER).cubin)


def plant(root: Path) -> Path:
    """Put a foreign kernel into the cache folder, in a way that only owners and permissions can tell."""
    path = foreign_entry(root)
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    path.write_bytes(kernel(OTHER).cubin)
    return path


def number_of(path: Path) -> int:
    """The number of a file on its disk, which no later file of the test gets."""
    if path.is_file():
        os.link(path, disk_cache.folder().parent / f"held {path.name}")
    return path.stat().st_ino


def pretend(monkeypatch: pytest.MonkeyPatch, path: Path, **changes: int) -> None:
    """Make a descriptor of `path` look otherwise (`st_uid`, `st_mode`)."""
    number, real = number_of(path), os.fstat

    def fstat(handle: int) -> os.stat_result:
        found = real(handle)
        if found.st_ino != number:
            return found
        names = ("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size")
        return os.stat_result([changes.get(name, getattr(found, name)) for name in names] + [0, 0, 0])

    monkeypatch.setattr(os, "fstat", fstat)


def give_away(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make another user the owner: truly where that is allowed."""
    try:
        os.chown(path, STRANGER, -1)
    except PermissionError:
        pretend(monkeypatch, path, st_uid=STRANGER)


def refuse(code: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call
