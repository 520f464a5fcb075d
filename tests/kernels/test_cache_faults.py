"""No fault of the cache folder makes a foreign kernel run, and every fault ends in a kernel that works.

Foreign files hold a valid kernel that computes something else, under the name that an entry with these contents has:
the strongest that someone can put there who knows how the cache works.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm import _environment
from bsrgemm._backend import registry
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
    before = os.umask(0o022)
    yield tmp_path / "cache" / "bsrgemm"
    os.umask(before)
    for handle in disk_cache._folders.values():
        os.close(handle)


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


# ---------------------------------------------------------------------------------------------- the yardstick
def test_a_foreign_kernel_in_a_folder_of_ones_own_would_be_taken(root: Path, folder: Path) -> None:
    """The planted entry is one that only the checks of owner and permissions keep out."""
    plant(root)
    with pytest.raises(AssertionError, match="a foreign kernel"):
        Built(root)


# ---------------------------------------------------------------------------------------------- the folder
def test_a_folder_of_another_user_is_not_read(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(root)
    give_away(monkeypatch, folder)
    works_and_says_the_way_out(root, folder, f"it belongs to user {STRANGER}")
    assert os.listdir(folder) == [planted.name]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_read(root: Path, folder: Path, mode: int) -> None:
    planted = plant(root)
    folder.chmod(mode)
    works_and_says_the_way_out(root, folder, "other users can write to it until chmod go-w forbids it")
    assert os.listdir(folder) == [planted.name]
    planted.unlink()
    folder.chmod(mode & ~0o022)  # as the warning says
    works_and_is_kept(root, folder)


def test_a_folder_of_root_is_read(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator can compile for everybody."""
    Built(root)
    (path,) = folder.iterdir()
    pretend(monkeypatch, folder, st_uid=0)
    monkeypatch.setattr(os, "geteuid", lambda: 4321 if os.getuid() == 0 else os.getuid())
    pretend(monkeypatch, path, st_uid=0)
    assert Built(root).report.cached


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_in_place_of_the_folder_is_not_followed(root: Path, folder: Path, tmp_path: Path, inside: bool) -> None:
    target = folder.parent / "target" if inside else tmp_path / "target"
    planted = plant(root)
    folder.rename(target)
    folder.symlink_to(target)
    works_and_says_the_way_out(root, folder, "it is a link")
    assert os.listdir(target) == [planted.name]


def test_a_link_that_leads_nowhere_is_not_followed(root: Path, folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "nowhere")
    works_and_says_the_way_out(root, folder, "File exists")
    assert not (tmp_path / "nowhere").exists()


def test_links_above_the_folder_are_followed(root: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    folder.parent.symlink_to(tmp_path / "large disk")
    works_and_is_kept(root, folder)


@pytest.mark.parametrize("thing", ["file", "pipe", "socket"])
@pytest.mark.parametrize("above", [True, False])
def test_something_else_in_place_of_the_folder(root: Path, folder: Path, thing: str, above: bool) -> None:
    place = folder.parent if above else folder
    place.parent.mkdir(exist_ok=True)
    kinds = {"file": stat.S_IFREG, "pipe": stat.S_IFIFO, "socket": stat.S_IFSOCK}
    os.mknod(place, kinds[thing] | 0o600)
    works_and_says_the_way_out(root, folder, "Not a directory|File exists")


def test_a_new_folder_is_private_whatever_the_umask(root: Path, folder: Path) -> None:
    os.umask(0o002)
    Built(root)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Built(root).report.cached


def test_a_folder_below_one_that_everybody_can_write_to_serves(root: Path, folder: Path) -> None:
    folder.parent.mkdir()
    folder.parent.chmod(0o777)
    works_and_is_kept(root, folder)


def test_the_folder_that_was_checked_is_the_one_that_the_driver_reads(root: Path, folder: Path) -> None:
    """Someone who can write to a folder above puts another folder in its place, before the kernel is loaded."""
    built = Built(root)
    folder.rename(folder.with_name("moved"))
    folder.mkdir(0o700)
    (folder / Path(built.report.path).name).write_bytes(kernel(OTHER).cubin)
    assert Path(built.report.path).read_bytes() == kernel(SPEC).cubin


def test_builds_share_one_descriptor(root: Path, folder: Path) -> None:
    Built(root)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Built(root)
    assert len(os.listdir("/proc/self/fd")) == before and len(disk_cache._folders) == 1


@pytest.mark.parametrize("taken", [True, False])
def test_a_descriptor_that_the_program_closed_is_made_again(
    root: Path, folder: Path, tmp_path: Path, taken: bool
) -> None:
    """Daemons close every descriptor when they start, and the number may by now belong to another folder."""
    Built(root)
    (handle,) = disk_cache._folders.values()
    if taken:
        (tmp_path / "another").mkdir()
        another = os.open(tmp_path / "another", os.O_RDONLY)
        os.dup2(another, handle)
        os.close(another)
    else:
        os.close(handle)
    assert Built(root).report.cached
    if taken:
        os.close(handle)


@pytest.mark.parametrize("call", ["open", "listdir"])
def test_a_folder_that_cannot_be_read(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    plant(root)
    monkeypatch.setattr(os, call, refuse(errno.EACCES))
    path = disk_cache.lookup(folder, foreign_entry(root).name.rpartition("-")[0])
    assert path is None


# ------------------------------------------------------------------------------------- where the folder is
def test_a_relative_folder_is_below_the_current_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPY_CACHE_DIR", "here")
    works_and_is_kept(root, tmp_path / "here" / "bsrgemm")


def test_an_empty_variable_means_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / ".cupy" / "kernel_cache" / "bsrgemm"


def test_without_a_home_nothing_is_written_to_the_current_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)  # as for a number that a container was started with
    works_and_says_the_way_out(root, Path("~/.cupy/kernel_cache/bsrgemm"), "the home folder is not known")
    assert os.listdir(tmp_path / "current") == []
    assert _environment.info()["cache"]["entries"] == 0


# ------------------------------------------------------------------------------------------------ entries
def link_to_outside(path: Path) -> None:
    outside = path.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def link_to_inside(path: Path) -> None:
    path.rename(path.with_name("inside"))
    path.symlink_to("inside")


def link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def empty_link_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def writable_by_group(path: Path) -> None:
    path.chmod(0o660)


def writable_by_all(path: Path) -> None:
    path.chmod(0o602)


def socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize(
    "fault",
    [
        link_to_outside,
        link_to_inside,
        link_to_nowhere,
        empty_link_loop,
        writable_by_group,
        writable_by_all,
        socket,
    ],
)
def test_an_entry_that_cannot_be_trusted_is_replaced(root: Path, folder: Path, fault: Plant) -> None:
    fault(plant(root))
    others = {"inside"} & set(os.listdir(folder))
    built = Built(root)
    assert built.report.stored and not built.report.cached and built.said == []
    assert set(os.listdir(folder)) == {Path(built.report.path).name} | others
    assert all((folder / name).read_bytes() == kernel(OTHER).cubin for name in others)  # a link goes, not its target
    assert Built(root).report.cached


def test_an_entry_of_another_user_is_replaced(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(monkeypatch, plant(root))
    works_and_is_kept(root, folder)


def test_a_hard_link_to_a_file_of_another_user_is_replaced(
    root: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant(root)
    planted.rename(tmp_path / "theirs")
    give_away(monkeypatch, tmp_path / "theirs")
    os.link(tmp_path / "theirs", planted)
    works_and_is_kept(root, folder)
    assert (tmp_path / "theirs").read_bytes() == kernel(OTHER).cubin


def test_a_hard_link_to_ones_own_entry_is_an_entry(root: Path, folder: Path, tmp_path: Path) -> None:
    """Backups make such links."""
    os.link(Built(root).report.path, tmp_path / "backup")
    assert Built(root).report.cached


def test_a_device_is_never_read(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, plant(root), st_mode=stat.S_IFCHR | 0o600)
    works_and_is_kept(root, folder)


@pytest.mark.parametrize("written", [True, False])
def test_a_named_pipe_is_not_waited_for(root: Path, folder: Path, written: bool) -> None:
    planted = plant(root)
    planted.unlink()
    os.mkfifo(planted)
    writers = []

    def write() -> None:
        with contextlib.suppress(OSError):  # the pipe is gone, as it should be
            writers.append(os.open(planted, os.O_RDWR))
            os.write(writers[0], kernel(OTHER).cubin)

    def end() -> None:
        if not writers:
            write()
        if writers:
            os.close(writers[0])

    # Whoever reads the pipe gets the foreign kernel, at once or after some seconds, and waits for its end.
    if written:
        write()
    timer = threading.Timer(5, end)
    timer.start()
    try:
        works_and_is_kept(root, folder)
    finally:
        waited = not timer.is_alive()
        timer.cancel()
        timer.join()
    assert not waited
    end()


@pytest.mark.parametrize("full", [True, False])
def test_a_folder_in_place_of_an_entry(root: Path, folder: Path, full: bool) -> None:
    path = entry(root)
    path.mkdir(0o700, parents=True)
    if full:
        (path / "file").touch()
        works_and_says_the_way_out(root, folder, "Is a directory|Directory not empty|File exists")
    else:
        works_and_says_the_way_out(root, folder, "Is a directory|File exists")


def test_an_entry_that_cannot_be_opened_is_replaced(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a mode of 000, which root ignores."""
    Built(root)
    real = os.open

    def opened(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(name).endswith(".cubin") and os.path.lexists(name) and number == os.stat(name).st_ino:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return real(name, flags, *args, **kwargs)

    number = number_of(entry(root))
    monkeypatch.setattr(os, "open", opened)
    works_and_is_kept(root, folder)


def test_a_kernel_that_was_moved_under_another_key_is_replaced(root: Path, folder: Path) -> None:
    """Its contents still match a digest of the contents alone."""
    jit.build(OTHER, ARCH, root=root)
    moved = entry(root, OTHER)
    moved.rename(folder / f"{entry(root).stem[:-32]}{moved.stem[-32:]}.cubin")
    works_and_is_kept(root, folder)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, -1])
def test_a_part_of_an_entry_is_replaced(root: Path, folder: Path, size: int) -> None:
    path = Path(Built(root).report.path)
    path.write_bytes(path.read_bytes()[:size])
    works_and_is_kept(root, folder)


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


# --------------------------------------------------------------------------------------------- CuPy's folder
def test_a_folder_that_cupy_cannot_make_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy 14.2 makes its cache folder while it is imported."""
    imported = builtins.__import__

    def refused(name: str, *args: Any, **how: Any) -> Any:
        if name == "cupy":
            raise PermissionError(errno.EACCES, "Permission denied", "/nonexistent/.cupy")
        return imported(name, *args, **how)

    monkeypatch.setattr(registry, "_CUDA", None)
    monkeypatch.setattr(builtins, "__import__", refused)
    said = list(_environment.info()["missing"])
    for call, kind in ((jit.nvrtc_version, RuntimeError), (registry.cuda, ImportError)):
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))
    assert len(said) == 3
    for line in said:
        assert "/nonexistent/.cupy" in line and "et CUPY_CACHE_DIR to a folder that can be written" in line
        assert "pip install" not in line
