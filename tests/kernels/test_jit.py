"""Sources, targets and compilation: what the loader promises without a GPU."""

from __future__ import annotations

import ctypes
import gc
import struct
import subprocess
import sys
import threading
import time
import timeit
from pathlib import Path
from types import SimpleNamespace

import pytest

from bsrgemm._kernels import jit
from bsrgemm._kernels.jit import CompileError, KernelSpec

from ..code_digest import code_digest, strip

ADD = KernelSpec("add.cu", "add", (("ELEMENT", "float"), ("AMOUNT", 3)))
ADD_CU = """#include "detail/amount.cuh"
extern "C" __global__ void add(ELEMENT* x) { x[threadIdx.x] += amount<ELEMENT>(); }
"""
AMOUNT_CUH = """#pragma once
#include "cast.cuh"
template <class T> __device__ T amount() { return cast<T>(AMOUNT); }
"""
CAST_CUH = """#pragma once
#include "detail/amount.cuh"
template <class T> __device__ T cast(int x) { return T(x); }
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "cuda"
    (folder / "detail").mkdir(parents=True)
    (folder / "add.cu").write_text(ADD_CU)
    (folder / "detail" / "amount.cuh").write_text(AMOUNT_CUH)
    (folder / "cast.cuh").write_text(CAST_CUH)
    return folder


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bsrgemm"


# sources


def test_gather_takes_the_source_first_and_each_header_once(root: Path) -> None:
    texts = jit.gather("add.cu", root)
    assert list(texts) == ["add.cu", "detail/amount.cuh", "cast.cuh"]
    assert texts["cast.cuh"] == CAST_CUH


def test_gather_leaves_out_includes_inside_comments(root: Path) -> None:
    (root / "add.cu").write_text('// #include "a.cuh"\n/*\n#include "b.cuh"\n*/\n  #  include  "cast.cuh" // c\n')
    (root / "cast.cuh").write_text("")
    assert list(jit.gather("add.cu", root)) == ["add.cu", "cast.cuh"]


def test_a_missing_header_names_itself_its_includer_and_the_folder(root: Path) -> None:
    (root / "cast.cuh").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        jit.gather("add.cu", root)
    for part in ("'cast.cuh'", "'detail/amount.cuh'", str(root)):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["../outside.cuh", "/etc/hostname"])
def test_gather_does_not_leave_the_folder(root: Path, name: str) -> None:
    (root / "add.cu").write_text(f'#include "{name}"\n')
    with pytest.raises(ValueError, match="inside"):
        jit.gather("add.cu", root)


def test_a_wheel_finds_its_own_sources_before_those_beside_it(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "bsrgemm"
    inside, beside = package / "cuda", tmp_path / "cuda"
    monkeypatch.setattr(jit, "_PACKAGE", package)
    beside.mkdir()
    (beside / "pathfinder.py").write_text("")  # NVIDIA's namespace beside an installed package is not ours
    with pytest.raises(FileNotFoundError) as caught:
        jit.cuda_root()
    assert str(inside) in str(caught.value) and str(beside) in str(caught.value)
    (beside / "a.cu").write_text("")
    assert jit.cuda_root() == beside
    inside.mkdir(parents=True)
    (inside / "a.cu").write_text("")
    assert jit.cuda_root() == inside


CODE = 'int f(int a) {\n  return a + 1;\n}\n#define TEXT "a  // b"\nint g;\n'


@pytest.mark.parametrize(
    "same",
    [
        '// why\nint f(int a) { /* 1 */\n\n\treturn a + 1; // more\n}\n#define TEXT "a  // b"\nint g;',
        'int f(int a) { return a + 1; }\n#define  TEXT \\\n  "a  // b" /* c */\nint g; // \\\nnot code\n',
        CODE.replace("\n", "\r\n"),
    ],
)
def test_comments_and_blanks_do_not_count_as_code(same: str) -> None:
    assert code_digest({"a": same}) == code_digest({"a": CODE})
    assert jit.digest({"a": same}) != jit.digest({"a": CODE})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a + 1", "a + 2"),
        ("int f", "intf"),
        ('"a  // b"', '"a // b"'),
        ('"a  // b"', '"a  // c"'),
        ('b"\nint g;', 'b" int g;\n'),  # a directive ends at its line
        ("TEXT ", "TEXT() "),
    ],
)
def test_code_digest_sees_every_change_of_code(old: str, new: str) -> None:
    assert old in CODE
    assert code_digest({"a": CODE.replace(old, new)}) != code_digest({"a": CODE})


@pytest.mark.parametrize(
    "literal",
    [r'"quote \" // not a comment"', "'\"' /*x*/ + '\"'", 'R"x(/* )" */ // )x"', "1'000 + 2'000 // c"],
)
def test_literals_survive_stripping(literal: str) -> None:
    stripped = strip(f"auto x = {literal};\n")
    kept = literal.split(" // c")[0].replace(" /*x*/", "")
    assert stripped.removeprefix("auto x = ").removesuffix(";") == kept


def test_digests_keep_name_and_text_apart() -> None:
    assert jit.digest({"a": "bc"}) != jit.digest({"ab": "c"})
    assert jit.digest({"a": "", "b": "c"}) != jit.digest({"a": "c", "b": ""})
    assert jit.digest({"a": "1", "b": "2"}) == jit.digest({"b": "2", "a": "1"})


# targets

NVRTC_12_0 = (50, 60, 70, 75, 80, 86, 87, 89, 90)
NVRTC_12_8 = (*NVRTC_12_0, 100, 101, 120)
NVRTC_13_0 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.mark.parametrize(
    ("capability", "archs", "expected"),
    [
        ("75", NVRTC_12_0, "sm_75"),
        (80, NVRTC_12_0, "sm_80"),
        ("86", NVRTC_12_0, "sm_86"),
        ("87", NVRTC_12_0, "sm_87"),
        ("89", NVRTC_12_0, "sm_89"),
        ("90", NVRTC_12_0, "sm_90a"),
        ("100", NVRTC_12_8, "sm_100"),
        ("103", NVRTC_12_8, "sm_100"),  # not sm_101: an integrated chip
        ("103", NVRTC_13_0, "sm_103"),
        ("121", NVRTC_12_8, "sm_120"),
        ("120", NVRTC_13_0, "sm_120"),
    ],
)
def test_target_is_the_cards_own_or_a_compatible_architecture(capability, archs, expected) -> None:
    assert jit.target(capability, archs) == expected
    assert jit.target(capability, reversed(archs)) == expected


@pytest.mark.parametrize("capability", [70, "61"])
def test_target_says_what_still_works_on_a_card_too_old(capability) -> None:
    with pytest.raises(RuntimeError, match=r"7\.5 or newer.*CPU.*still work"):
        jit.target(capability, NVRTC_12_0)


@pytest.mark.parametrize("capability", ["100", "120", "130", "110"])
def test_target_asks_for_a_newer_nvrtc_for_a_card_it_does_not_know(capability) -> None:
    with pytest.raises(RuntimeError, match=rf"{int(capability) // 10}\.0.*install a newer"):
        jit.target(capability, NVRTC_12_0)


def test_an_architecture_that_the_nvrtc_is_too_old_for_asks_for_a_newer_one(monkeypatch) -> None:
    monkeypatch.setattr(jit, "supported_archs", lambda: NVRTC_12_0)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "12.4")
    for arch in ("sm_75", "sm_80", "sm_90a", "sm_90"):
        jit.check_arch(arch)
    for arch in ("sm_100", "sm_120", "sm_120a"):
        with pytest.raises(ValueError, match=rf"got '{arch}', which NVRTC 12\.4 does not know.*sm_90; install a newer"):
            jit.check_arch(arch)


def test_an_architecture_without_kernels_or_without_sense_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(jit, "supported_archs", lambda: NVRTC_12_0)
    with pytest.raises(ValueError, match="got 'sm_60', wanted sm_75 or newer"):
        jit.check_arch("sm_60")
    for arch in ("sm_88", "hopper", "90"):
        with pytest.raises(ValueError, match=rf"got '{arch}', wanted one of sm_75, sm_80"):
            jit.check_arch(arch)


@pytest.mark.parametrize(("version", "told"), [((12, 3), True), ((12, 4), False), ((13, 0), False)])
def test_a_failure_of_an_old_nvrtc_names_the_oldest_that_is_supported(version, told, monkeypatch) -> None:
    monkeypatch.setattr(jit, "_nvrtc", lambda: SimpleNamespace(getVersion=lambda: version))
    message = jit._failure(KernelSpec("add.cu", "add"), "sm_80", Path("cuda"), "no reason")
    assert ("need NVRTC 12.4 or newer; install a newer one" in message) == told
    assert message.startswith(f"NVRTC {version[0]}.{version[1]} cannot build add.cu:add for sm_80")


def test_target_asks_the_nvrtc_installed() -> None:
    assert jit.target(90) == "sm_90a"
    assert 90 in jit.supported_archs()


# compilation


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_compile_gives_a_whole_cubin_and_the_register_count(root: Path, arch: str) -> None:
    compiled = jit.compile_cubin(ADD, arch, root=root)
    assert "registers" in compiled.log and f"'add' for '{arch}'" in compiled.log
    assert compiled.seconds > 0
    sections, size, count = (
        struct.unpack_from("<Q", compiled.cubin, 40)[0],
        *struct.unpack_from("<HH", compiled.cubin, 58),
    )
    programs, program_size, program_count = (
        struct.unpack_from("<Q", compiled.cubin, 32)[0],
        *struct.unpack_from("<HH", compiled.cubin, 54),
    )
    assert compiled.cubin[:4] == b"\x7fELF"
    assert len(compiled.cubin) == max(sections + size * count, programs + program_size * program_count)


def test_compiling_twice_gives_the_same_bytes(root: Path) -> None:
    assert jit.compile_cubin(ADD, "sm_80", root=root).cubin == jit.compile_cubin(ADD, "sm_80", root=root).cubin


def test_a_define_may_hold_blanks(root: Path) -> None:
    spec = KernelSpec("add.cu", "add", (("ELEMENT", "unsigned char"), ("AMOUNT", -1)))
    assert jit.options(spec, "sm_80")[-2:] == ("-DELEMENT=unsigned char", "-DAMOUNT=-1")
    assert jit.compile_cubin(spec, "sm_80", root=root).cubin


@pytest.mark.parametrize(("name", "line"), [("add.cu", 3), ("cast.cuh", 4)])
def test_a_compile_error_shows_spec_arch_version_file_and_line(root: Path, name: str, line: int) -> None:
    with (root / name).open("a") as file:
        file.write("int wrong() { return undeclared; }\n")
    with pytest.raises(CompileError) as caught:
        jit.compile_cubin(ADD, "sm_80", root=root)
    text = str(caught.value)
    for part in (f"{name}({line}): error", "undeclared", "add.cu:add -DELEMENT=float -DAMOUNT=3", "sm_80"):
        assert part in text
    assert f"NVRTC {jit.nvrtc_version()}" in text and str(root) in text


def test_an_entry_that_the_source_lacks_is_told_before_loading(root: Path) -> None:
    with pytest.raises(CompileError, match="no extern \"C\" kernel 'ad'"):
        jit.compile_cubin(KernelSpec("add.cu", "ad", ADD.defines), "sm_80", root=root)


def test_nothing_from_outside_the_folder_is_found(root: Path) -> None:
    (root / "add.cu").write_text("#include <cuda_fp16.h>\n" + ADD_CU)
    with pytest.raises(CompileError, match=r"add\.cu\(1\)"):
        jit.compile_cubin(ADD, "sm_80", root=root)


# what is missing


def test_without_nvrtc_the_error_says_how_to_install_it(root: Path, monkeypatch) -> None:
    def refuse() -> None:
        raise OSError("libnvrtc.so.12: cannot open shared object file")

    monkeypatch.setattr("cupy.cuda.nvrtc.getVersion", refuse)
    for attempt in (
        lambda: jit.compile_cubin(ADD, "sm_80", root=root),
        lambda: jit.build(ADD, "sm_80", root=root),
        lambda: jit.target(90),
    ):
        with pytest.raises(RuntimeError) as caught:
            attempt()
        for part in (
            "NVRTC",
            "libnvrtc.so.12",
            "bsrgemm[cuda12]",
            "[cuda13]",
            "nvidia-cuda-nvrtc-cu12",
            "CPU",
        ):
            assert part in str(caught.value)


WITHOUT_CUPY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cupy", "cupyx", "cupy_backends"):
            raise ImportError(f"No module named {name!r}")

sys.meta_path.insert(0, Refuse())
import bsrgemm._kernels.jit, bsrgemm._kernels.tensor_map
try:
    bsrgemm._kernels.jit.nvrtc_version()
except RuntimeError as error:
    print(error)
"""


def test_import_needs_no_cupy_and_a_compile_without_it_says_so() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_CUPY],
        capture_output=True,
        text=True,
        cwd=Path(jit.__file__).parents[1],
    )
    assert result.returncode == 0, result.stderr
    assert "CuPy cannot be loaded (No module named 'cupy')" in result.stdout
    assert "bsrgemm[cuda12]" in result.stdout and "CPU" in result.stdout


# load


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for CuPy's module loader, which needs a device; lists the paths it was given. Device 0 is current."""
    paths: list[str] = []

    def record(path: str, entry: str) -> object:
        paths.append(path)
        return object()

    monkeypatch.setattr(jit, "_open", record)
    monkeypatch.setattr(jit, "_current_device", lambda: 0)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "_locks", {})
    return paths


def test_threads_asking_for_one_kernel_compile_and_load_it_once(root: Path, opened, monkeypatch) -> None:
    compiled: list[str] = []
    real = jit._compile

    def slowly(spec, *args):
        compiled.append(spec.entry)
        time.sleep(0.05)  # long enough for every thread to arrive
        return real(spec, *args)

    monkeypatch.setattr(jit, "_compile", slowly)
    barrier = threading.Barrier(8)
    kernels: list[object] = []

    def ask() -> None:
        barrier.wait()
        kernels.append(jit.load(ADD, "sm_80", root=root))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == ["add"] and len(opened) == 1
    assert len(kernels) == 8 and len(set(map(id, kernels))) == 1


def test_a_slow_compile_holds_up_no_other_kernel(root: Path, opened, monkeypatch) -> None:
    release, started = threading.Event(), threading.Event()
    real = jit._compile

    def wait_for_one(spec, *args):
        if spec == ADD:
            started.set()
            assert release.wait(60)
        return real(spec, *args)

    monkeypatch.setattr(jit, "_compile", wait_for_one)
    thread = threading.Thread(target=jit.load, args=(ADD, "sm_80"), kwargs={"root": root})
    thread.start()
    assert started.wait(60)
    try:
        jit.load(KernelSpec("add.cu", "add", (("ELEMENT", "int"), ("AMOUNT", 1))), "sm_80", root=root)
        assert len(opened) == 1
    finally:
        release.set()
        thread.join()
    assert len(opened) == 2


def test_a_failed_build_is_tried_again(root: Path, opened) -> None:
    (root / "add.cu").write_text("wrong")
    with pytest.raises(CompileError):
        jit.load(ADD, "sm_80", root=root)
    (root / "add.cu").write_text(ADD_CU)
    assert jit.load(ADD, "sm_80", root=root) is jit.load(ADD, "sm_80", root=root)


def test_architectures_do_not_share_a_kernel(root: Path, opened) -> None:
    assert jit.load(ADD, "sm_80", root=root) is not jit.load(ADD, "sm_90a", root=root)
    assert len(set(opened)) == 2


def test_devices_do_not_share_a_kernel(root: Path, opened, monkeypatch) -> None:
    first = jit.load(ADD, "sm_80", root=root)
    monkeypatch.setattr(jit, "_current_device", lambda: 1)
    assert jit.load(ADD, "sm_80", root=root) is not first
    assert len(opened) == 2


def test_looking_up_a_loaded_kernel_takes_about_a_microsecond(root: Path, opened) -> None:
    spec = KernelSpec("add.cu", "add", (*ADD.defines, *((f"UNUSED{i}", i) for i in range(6))))
    jit.load(spec, "sm_80", root=root)
    best = min(timeit.repeat(lambda: jit.load(spec, "sm_80", root=root), number=2000, repeat=7)) / 2000
    assert best < 5e-6  # about 0.8 us alone; the margin is for a busy machine


def test_an_argument_has_the_address_of_its_struct_and_keeps_it() -> None:
    """CuPy's launches take it as it is: they ask nobody for the address."""
    function = pytest.importorskip("cupy.cuda.function")
    packed = bytearray(range(200))
    argument = jit.argument(packed)
    assert isinstance(argument, function.CPointer) and argument.tobytes() == packed
    assert ctypes.string_at(argument.ptr, len(packed)) == packed
    with pytest.raises(BufferError):
        packed.append(0)
    del packed
    gc.collect()
    assert ctypes.string_at(argument.ptr, 200) == argument.tobytes() == bytes(range(200))


def test_a_cupy_without_such_arguments_takes_an_array_without_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda.function", None)
    monkeypatch.setattr(jit, "_argument_class", jit._argument_class.__wrapped__)
    argument = jit.argument(bytearray(b"abc"))
    assert argument.shape == () and argument.tobytes() == b"abc" and argument.dtype.names is None
