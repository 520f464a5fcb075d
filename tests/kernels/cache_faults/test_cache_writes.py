"""Writing to the cache: disks that fail, processes that are killed, and several processes and versions at once."""

from __future__ import annotations

import builtins
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import bsrgemm as bg
from bsrgemm._kernels import disk_cache, jit

from .planting import ARCH, SPEC, Built, kernel, refuse, works_and_is_kept, works_and_says_the_way_out

pytest.importorskip("cupy")


# ------------------------------------------------------------------------------------------ writing fails
class Failing:
    """A file whose disk fails, while it is written or when it is closed."""

    def __init__(self, handle: int, step: str, code: int) -> None:
        self.handle, self.step, self.code = handle, step, code

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.handle)
        if self.step == "close":
            refuse(self.code)()

    def write(self, contents: bytes) -> None:
        os.write(self.handle, contents if self.step == "close" else contents[: len(contents) // 2])
        if self.step == "write":
            refuse(self.code)()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("step", ["mkdir", "open", "mkstemp", "write", "close", "replace", "remove"])
def test_a_disk_that_fails_in_the_middle(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    with monkeypatch.context() as patch:
        if step == "mkdir":
            patch.setattr(os, "mkdir", refuse(code))
        elif step == "open":
            patch.setattr(os, "open", refuse(code))
        elif step == "mkstemp":
            patch.setattr(tempfile, "mkstemp", refuse(code))
        elif step in ("write", "close"):
            file = builtins.open
            patch.setattr(
                disk_cache,
                "open",
                lambda handle, mode, **how: file(handle, mode, **how) if how else Failing(handle, step, code),
                raising=False,
            )
        else:
            patch.setattr(os, "replace", refuse(code))
            if step == "remove":
                patch.setattr(os, "unlink", refuse(code))
        works_and_says_the_way_out(root, folder, re.escape(os.strerror(code)))
    left = os.listdir(folder) if folder.exists() else []
    assert len(left) == (2 if step == "remove" else 0)  # each of the two builds tried
    assert Built(root).report.stored  # the disk works again


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_in_the_middle_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def stop(*args: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(error):
        disk_cache.store(folder, "stem", b"contents")
    assert os.listdir(folder) == []


def test_memory_that_the_system_does_not_give_is_a_file_of_ones_own(
    root: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(os, "memfd_create", refuse(errno.EPERM))
    folder.parent.write_text("")
    path = Path(Built(root).report.path)
    assert path.parent == tmp_path / "temporary" and stat.S_IMODE(path.stat().st_mode) == 0o600


# -------------------------------------------------------------------------------------------------- killed
KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
from bsrgemm._kernels import disk_cache

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dies(function, before):
    def call(*args, **kwargs):
        if before:
            die()
        result = function(*args, **kwargs)
        die()
        return result
    return call

class Half:
    def __init__(self, handle, mode):
        self.handle = handle
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def write(self, contents):
        os.write(self.handle, contents[: len(contents) // 2])
        die()

where, step = Path(sys.argv[1]), sys.argv[2]
if step == "write":
    disk_cache.open = Half
else:
    module = tempfile if "mkstemp" in step else os
    name = step.split()[1]
    setattr(module, name, dies(getattr(module, name), step.startswith("before")))
disk_cache.store(where, "stem", b"contents" * 1000)
"""
STEPS = ["before mkdir", "after mkdir", "before mkstemp", "after mkstemp", "write", "before replace", "after replace"]


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_is_killed_in_the_middle_leaves_nothing_that_is_read(folder: Path, step: str) -> None:
    contents = b"contents" * 1000
    folder.parent.mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder), step], cwd=Path(bg.__file__).parents[1])
    assert killed.returncode == -signal.SIGKILL
    found = disk_cache.lookup(folder, "stem")
    assert (found is not None) == (step == "after replace")
    path = disk_cache.store(folder, "stem", contents)
    assert path.read_bytes() == contents and disk_cache.lookup(folder, "stem") == path
    left = [name for name in os.listdir(folder) if name != path.name]
    assert len(left) == (step in ("after mkstemp", "write", "before replace"))
    for name in left:
        os.utime(folder / name, (0, 0))  # long ago
    disk_cache.store(folder, "stem", contents)
    assert os.listdir(folder) == [path.name]


# ----------------------------------------------------------------------------------------- several at once
def test_versions_leave_each_others_entries_alone(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version, form = jit.nvrtc_version(), jit._CACHE_FORMAT
    text = (root / "fill.cu").read_text()
    states = [(version, form, text), ("11.8", form, text), (version, form - 1, text), (version, form, text + "\n")]
    cached = []
    for _ in range(2):
        for compiler, version_of_entries, source in states:
            monkeypatch.setattr(jit, "nvrtc_version", lambda compiler=compiler: compiler)
            monkeypatch.setattr(jit, "_CACHE_FORMAT", version_of_entries)
            (root / "fill.cu").write_text(source)
            cached.append(Built(root).report.cached)
    assert cached == [False] * 4 + [True] * 4
    assert len(os.listdir(folder)) == 4


WRITER = """
import sys
from pathlib import Path
from bsrgemm._kernels import disk_cache

where, number = Path(sys.argv[1]), int(sys.argv[2])
contents = b"contents" * 10000
for turn in range(60):
    if number == 0 and turn % 10 == 0:
        for path in where.glob("*.cubin"):
            path.unlink(missing_ok=True)  # clears the cache
    disk_cache.store(where, "stem", contents)
    found = disk_cache.lookup(where, "stem")
    if found is not None:
        try:
            assert found.read_bytes() == contents
        except FileNotFoundError:
            pass
"""


def test_processes_that_write_read_and_clear_at_once_see_whole_entries(folder: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(folder)]
    root = Path(bg.__file__).parents[1]
    writers = [subprocess.Popen([*command, str(n)], cwd=root, stderr=subprocess.PIPE, text=True) for n in range(3)]
    said = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], said
    (path,) = folder.iterdir()
    assert path.read_bytes() == b"contents" * 10000


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Stands in for the driver, which reads a file when a kernel is loaded; does what is in the list before that."""
    first: list[Callable[[], None]] = []

    def load(path: str, entry: str) -> bytes:
        while first:
            first.pop()()
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise RuntimeError("CUDA_ERROR_FILE_NOT_FOUND") from error

    monkeypatch.setattr(jit, "_open", load)
    monkeypatch.setattr(jit, "_current_device", lambda: 0)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "_locks", {})
    return first


def clear(folder: Path, whole: bool) -> None:
    for path in folder.iterdir():
        path.unlink()
    if whole:
        folder.rmdir()


@pytest.mark.parametrize("whole", [True, False])
def test_a_cache_that_is_cleared_before_the_driver_reads_it(root: Path, folder: Path, driver, whole: bool) -> None:
    jit.build(SPEC, ARCH, root=root)
    driver.append(lambda: clear(folder, whole))
    assert jit.load(SPEC, ARCH, root=root) == kernel(SPEC).cubin
    assert driver == []
    works_and_is_kept(root, folder)


def test_a_cache_that_is_cleared_before_a_second_device_reads_it(
    root: Path, folder: Path, driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jit.load(SPEC, ARCH, root=root) == kernel(SPEC).cubin
    clear(folder, whole=True)
    read: list[str] = []
    driver.append(lambda: read.append("again"))
    assert jit.load(SPEC, ARCH, root=root) == kernel(SPEC).cubin and read == []
    monkeypatch.setattr(jit, "_current_device", lambda: 1)
    assert jit.load(SPEC, ARCH, root=root) == kernel(SPEC).cubin and read == ["again"]


def test_a_path_that_the_driver_does_not_find_is_given_to_it_from_memory(
    root: Path, folder: Path, driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = jit._open

    def particular(path: str, entry: str) -> bytes:
        tried.append(path)
        if path.endswith(".cubin"):
            raise RuntimeError("CUDA_ERROR_FILE_NOT_FOUND: file not found")
        return read(path, entry)

    tried: list[str] = []
    monkeypatch.setattr(jit, "_open", particular)
    monkeypatch.setattr(jit, "_compile", Mock(wraps=jit._compile))
    assert jit.load(SPEC, ARCH, root=root) == kernel(SPEC).cubin
    assert len(tried) == 2 and jit._compile.call_count == 1
    assert len(list(folder.iterdir())) == 1


def test_what_the_driver_refuses_for_another_reason_is_said(root: Path, driver, monkeypatch) -> None:
    def refused(path: str, entry: str) -> None:
        tried.append(path)
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")

    tried: list[str] = []
    monkeypatch.setattr(jit, "_open", refused)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        jit.load(SPEC, ARCH, root=root)
    assert len(tried) == 1
