"""A cache folder that others own or can write to, that is a link, a file or nowhere, and CuPy's own folder."""

from __future__ import annotations

import builtins
import errno
import os
import pwd
import stat
from pathlib import Path
from typing import Any

import pytest

from bsrgemm import _environment
from bsrgemm._backend import registry
from bsrgemm._kernels import disk_cache, jit

from .planting import (
    OTHER,
    SPEC,
    STRANGER,
    Built,
    foreign_entry,
    give_away,
    kernel,
    plant,
    pretend,
    refuse,
    works_and_is_kept,
    works_and_says_the_way_out,
)

pytest.importorskip("cupy")


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
