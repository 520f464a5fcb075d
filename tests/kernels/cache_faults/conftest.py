"""A cache folder of its own for each test of its faults, and the source of the kernel that is built."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bsrgemm._kernels import disk_cache, jit

from .planting import OTHER, SPEC, kernel, write_source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_source(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder of this test, not yet there; the one warning of a process is due again."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_warned", False)
    monkeypatch.setattr(disk_cache, "_memory", {})
    monkeypatch.setattr(disk_cache, "_folders", {})
    monkeypatch.setattr(jit, "_compile", lambda spec, *rest: kernel(spec))
    for spec in (SPEC, OTHER):  # before the disk fails
        kernel(spec)
    before = os.umask(0o022)
    yield tmp_path / "cache" / "bsrgemm"
    os.umask(before)
    for handle in disk_cache._folders.values():
        os.close(handle)
