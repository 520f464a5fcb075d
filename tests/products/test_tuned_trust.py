"""The file of measured choices is read only if no other user could have written it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bsrgemm._kernels import disk_cache, element_types
from bsrgemm._products import tuned
from bsrgemm._products.call import Problem
from bsrgemm._products.costs import H200
from bsrgemm._products.prepared import fastest

FLOAT16 = np.dtype(np.float16)
PROBLEM = Problem(
    "sm_90a",
    element_types.types(FLOAT16, FLOAT16, FLOAT16, np.dtype(np.float32), np.dtype(np.int32)),
    *(64, 64, 512, 1, 100, 100, 2000, False, "C", "C", True, True),
)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file, which holds a choice."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "_card", lambda: "some-card")
    monkeypatch.setattr(disk_cache, "_folders", {})
    monkeypatch.setattr(tuned, "_loaded", {})
    before = os.umask(0o002)
    yield tuned.keep(PROBLEM, fastest(PROBLEM, H200, True))
    os.umask(before)
    for handle in disk_cache._folders.values():
        os.close(handle)


def read_again() -> object:
    """What another process would choose."""
    tuned._loaded.clear()
    return tuned.stored(PROBLEM)


def test_a_file_of_ones_own_is_read_and_private(path: Path) -> None:
    assert read_again() == fastest(PROBLEM, H200, True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_can_write_to_is_as_good_as_none(path: Path) -> None:
    path.chmod(0o666)
    assert read_again() is None


def test_a_link_is_as_good_as_none(path: Path, tmp_path: Path) -> None:
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read_again() is None


def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(path: Path) -> None:
    path.parent.chmod(0o777)
    assert read_again() is None
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"other users can write to it until chmod go-w forbids it.*bsrgemm"):
        tuned.keep(PROBLEM, fastest(PROBLEM, H200, True))
    assert path.read_bytes() == before
    path.parent.chmod(0o755)
    assert read_again() == fastest(PROBLEM, H200, True)
