"""Every state that the disk cache can be found in ends in a cubin to load."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from bsrgemm._kernels import disk_cache, jit
from bsrgemm._kernels.jit import KernelSpec

from ..code_digest import code_digest

SPEC = KernelSpec("fill.cu", "fill", (("VALUE", 7),))
ARCH = "sm_80"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "fill.cu").write_text(
        '#include "value.cuh"\nextern "C" __global__ void fill(int* x) { x[threadIdx.x] = value(); }\n'
    )
    (folder / "value.cuh").write_text("__device__ int value() { return VALUE; }\n")
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test, not yet there; the one warning of a process is due again."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_warned", False)
    monkeypatch.setattr(disk_cache, "_memory", {})
    return tmp_path / "cache" / "bsrgemm"


def cubin(root: Path) -> bytes:
    return jit.compile_cubin(SPEC, ARCH, root=root).cubin


def test_the_folder_is_cupys_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert disk_cache.folder() == tmp_path / "cache" / "bsrgemm"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / ".cupy" / "kernel_cache" / "bsrgemm"


def test_an_entry_is_one_file_named_by_key_and_contents(root: Path, folder: Path) -> None:
    first = jit.build_report(SPEC, ARCH, root=root)
    assert not first.cached and "registers" in first.log and first.seconds > 0
    assert re.fullmatch(r"fill-sm_80-[0-9a-f]{32}-[0-9a-f]{32}\.cubin", Path(first.path).name)
    assert os.listdir(folder) == [Path(first.path).name] and first.stored
    assert Path(first.path).samefile(folder / Path(first.path).name)
    assert Path(first.path).read_bytes() == cubin(root)


def test_a_second_build_reads_the_entry(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jit.build(SPEC, ARCH, root=root)
    monkeypatch.setattr(jit, "_compile", None)
    assert jit.build_report(SPEC, ARCH, root=root) == jit.BuildReport(path, cached=True, stored=True)


def truncate(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-100])


def empty(entry: Path) -> None:
    entry.write_bytes(b"")


def flip_a_bit(entry: Path) -> None:
    contents = bytearray(entry.read_bytes())
    contents[len(contents) // 2] ^= 1
    entry.write_bytes(contents)


def replace_by_garbage(entry: Path) -> None:
    entry.write_bytes(b"not a cubin")


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, replace_by_garbage])
def test_a_damaged_entry_is_rebuilt_in_place(root: Path, folder: Path, damage) -> None:
    path = Path(jit.build(SPEC, ARCH, root=root))
    damage(path)
    again = jit.build_report(SPEC, ARCH, root=root)
    assert again.path == str(path) and not again.cached
    assert path.read_bytes() == cubin(root)
    assert os.listdir(folder) == [path.name]


@pytest.mark.parametrize("ending", ["0" * 32, "garbage", ""])
def test_a_foreign_file_under_the_key_is_removed_and_never_loaded(root: Path, folder: Path, ending: str) -> None:
    path = Path(jit.build(SPEC, ARCH, root=root))
    foreign = path.with_name(f"{path.stem[:-32]}{ending}.cubin")
    for also_valid in (True, False):
        foreign.write_bytes(b"foreign")
        if not also_valid:
            path.unlink()
        assert jit.build(SPEC, ARCH, root=root) == str(path)
        assert path.read_bytes() == cubin(root)
    assert os.listdir(folder) == [path.name]


def test_files_of_other_keys_are_left_alone(root: Path, folder: Path) -> None:
    folder.mkdir(0o700, parents=True)
    (folder / "fill-sm_80-other.cubin").write_bytes(b"x")
    jit.build(SPEC, ARCH, root=root)
    assert (folder / "fill-sm_80-other.cubin").read_bytes() == b"x"


def test_an_entry_that_cannot_be_read_or_removed_leaves_the_kernel_working(root: Path) -> None:
    path = Path(jit.build(SPEC, ARCH, root=root))
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()
    with pytest.warns(RuntimeWarning):
        assert Path(jit.build(SPEC, ARCH, root=root)).read_bytes() == cubin(root)


def key_of(root: Path, spec: KernelSpec = SPEC, arch: str = ARCH) -> str:
    return Path(jit.build(spec, arch, root=root)).name.split("-")[2]


def test_every_input_of_a_build_changes_the_key(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(root)]
    assert key_of(root) == keys[0]
    with (root / "fill.cu").open("a") as file:
        file.write("__device__ int more;\n")
    keys.append(key_of(root))
    with (root / "value.cuh").open("a") as file:
        file.write("__device__ int yet_more;\n")
    keys.append(key_of(root))
    keys.append(key_of(root, KernelSpec("fill.cu", "fill", (("VALUE", 8),))))
    keys.append(key_of(root, arch="sm_86"))
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "99.0")
    keys.append(key_of(root))
    monkeypatch.setattr(jit, "_CACHE_FORMAT", 0)
    keys.append(key_of(root))
    assert len(set(keys)) == len(keys)


def test_an_edited_header_builds_the_new_code(root: Path) -> None:
    old = Path(jit.build(SPEC, ARCH, root=root)).read_bytes()
    (root / "value.cuh").write_text("__device__ int value() { return VALUE + 1; }\n")
    new = Path(jit.build(SPEC, ARCH, root=root)).read_bytes()
    assert new == cubin(root) and new != old


def test_an_edited_comment_changes_the_key_and_not_the_code_digest(root: Path) -> None:
    key, code = key_of(root), code_digest(jit.gather(SPEC.source, root))
    with (root / "value.cuh").open("a") as file:
        file.write("\n// a reason\n")
    assert key_of(root) != key
    assert code_digest(jit.gather(SPEC.source, root)) == code


@pytest.fixture(params=["a file in its place", "a file above it", "full", "read-only"])
def unusable(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that refuses, by what stands there or by the system's answer: root ignores mode bits."""

    def refuse(code: int) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            raise OSError(code, os.strerror(code))

        return call

    if request.param == "a file in its place":
        folder.parent.mkdir()
        folder.write_text("")
    elif request.param == "a file above it":
        folder.parent.write_text("")
    elif request.param == "full":
        monkeypatch.setattr(os, "replace", refuse(errno.ENOSPC))
    else:
        monkeypatch.setattr(tempfile, "mkstemp", refuse(errno.EROFS))
    return folder


def test_an_unusable_folder_warns_once_and_the_cubin_comes_from_memory(root: Path, unusable: Path) -> None:
    with pytest.warns(RuntimeWarning, match=re.escape(str(unusable))) as caught:
        report = jit.build_report(SPEC, ARCH, root=root)
    assert len(caught) == 1
    assert not report.stored
    path = report.path
    assert Path(path).read_bytes() == cubin(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.build(SPEC, ARCH, root=root) == path
    if unusable.is_dir():
        assert os.listdir(unusable) == []


def test_a_disk_that_fills_up_while_writing_leaves_no_part_behind(root: Path, folder: Path, monkeypatch) -> None:
    class Full:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *exc: object) -> None:
            os.close(self.handle)

        def write(self, contents: bytes) -> None:
            os.write(self.handle, contents[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "open", lambda handle, mode: Full(handle), raising=False)
        with pytest.raises(OSError, match="No space left"):
            disk_cache.store(folder, "stem", b"x" * 100)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("memfd", [True, False])
def test_a_cubin_in_memory_has_a_path_that_lasts(memfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not memfd:
        monkeypatch.delattr(os, "memfd_create")
    paths = [disk_cache.keep_in_memory(contents) for contents in (b"one", b"two", b"one")]
    assert paths[0] == paths[2] != paths[1]
    assert [Path(path).read_bytes() for path in paths[:2]] == [b"one", b"two"]


RACER = """
import sys, time
from pathlib import Path
from bsrgemm._kernels import jit
jit.nvrtc_version()  # CuPy and NVRTC are loaded before the start
Path(sys.argv[2]).touch()
while not Path(sys.argv[3]).exists():
    time.sleep(0.001)
report = jit.build_report(jit.KernelSpec("fill.cu", "fill", (("VALUE", 7),)), "sm_80", root=Path(sys.argv[1]))
print(Path(report.path).name, report.stored)
"""


def test_two_processes_racing_end_with_one_valid_entry(root: Path, folder: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    ready = [tmp_path / f"ready{i}" for i in range(2)]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(root), str(flag), str(start)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(jit.__file__).parents[1],
        )
        for flag in ready
    ]
    while not all(flag.exists() for flag in ready) and all(racer.poll() is None for racer in racers):
        time.sleep(0.001)
    start.touch()
    outputs = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], outputs
    said = {tuple(out.split()) for out, _ in outputs}
    assert len(said) == 1
    ((name, stored),) = said
    assert os.listdir(folder) == [name] and stored == "True"
    assert (folder / name).read_bytes() == cubin(root)
