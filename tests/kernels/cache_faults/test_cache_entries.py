"""Entries of the cache that cannot be trusted, opened or read whole are replaced."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from bsrgemm._kernels import jit

from .planting import (
    ARCH,
    OTHER,
    Built,
    Plant,
    entry,
    give_away,
    kernel,
    number_of,
    plant,
    pretend,
    works_and_is_kept,
    works_and_says_the_way_out,
)

pytest.importorskip("cupy")


# ---------------------------------------------------------------------------------------------- the yardstick
def test_a_foreign_kernel_in_a_folder_of_ones_own_would_be_taken(root: Path, folder: Path) -> None:
    """The planted entry is one that only the checks of owner and permissions keep out."""
    plant(root)
    with pytest.raises(AssertionError, match="a foreign kernel"):
        Built(root)


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
