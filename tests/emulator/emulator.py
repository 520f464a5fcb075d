"""Kernels on the CPU: their sources, compiled by a C++ compiler with a fiber for each of their threads.

Compiled kernels are kept in a folder that all processes and later runs share, under a digest of all they are made of.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import hashlib
import mmap
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from unittest.mock import patch

import numpy as np

from bsrgemm._kernels import jit, tensor_map
from bsrgemm._kernels.jit import KernelSpec, gather

HERE = Path(__file__).parent
HEADERS = ("emulator.h", "emulated_ptx.h", "emulated_products.h", "emulated_races.h", "emulated_races_on.h")
COMPILER = shutil.which("g++") or shutil.which("clang++")


class Array(np.ndarray[Any, Any]):
    """An array with a pointer, as CuPy has them."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return _Pointer(self)

    def get(self) -> np.ndarray[Any, Any]:
        return np.array(self, subok=False)


class _Pointer:
    """The address of an array, which lives as long."""

    def __init__(self, array: Array) -> None:
        self.array, self.ptr = array, array.ctypes.data

    @property
    def mem(self) -> Any:
        """The allocation, for arrays that captures.Memory has made."""
        found: Any = self.array
        while found is not None and not hasattr(found, "allocation"):
            found = getattr(found, "base", None)
        return getattr(found, "allocation", None)


def put(x: Any) -> Array:
    """An array of its own, at a multiple of 256 bytes as on a card."""
    x = np.asarray(x)
    room = np.empty(x.nbytes + 256, np.uint8)
    skip = -room.ctypes.data % 256
    out = room[skip : skip + x.nbytes].view(x.dtype).reshape(x.shape).view(Array)
    out[...] = x
    return out


def guarded(x: Any, before: bool = False) -> Array:
    """An array that ends, or begins, where reading and writing ends the process."""
    x = np.asarray(x)
    page = mmap.PAGESIZE
    body = -(-max(1, x.nbytes) // page) * page
    room = mmap.mmap(-1, body + page)
    memory = np.frombuffer(room, np.uint8)
    guard = memory.ctypes.data if before else memory.ctypes.data + body
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    first = page if before else body - x.nbytes
    out = memory[first : first + x.nbytes].view(x.dtype).reshape(x.shape).view(Array)
    out[...] = x
    return out


def _unwritten(shape: Any, dtype: Any = float) -> np.ndarray[Any, Any]:
    """A new array of NaN, or of 77 for integers: whoever reads it before it was written gets something wrong."""
    found = np.empty(shape, dtype)
    found.fill(np.nan if found.dtype.kind in "fcV" else 77)
    return found


def as_it_lies(x: Any, put: Callable[[Any], Array]) -> Array:
    """An array put as told with the strides that it has; what lies between its elements is 77."""
    if x.flags.c_contiguous or not x.size:
        return put(x)
    whole = max(n * step for n, step in zip(x.shape, x.strides, strict=True))
    strides = [step if n > 1 else whole for n, step in zip(x.shape, x.strides, strict=True)]
    assert min(strides) > 0
    span = sum((n - 1) * step for n, step in zip(x.shape, strides, strict=True)) // x.itemsize + 1
    room = put(np.full(span, 77).astype(x.dtype))
    out = np.lib.stride_tricks.as_strided(room, x.shape, strides, subok=True)
    out[...] = x
    return out


def laid_out(x: np.ndarray[Any, Any], order: str) -> Array:
    """An array row by row ("C") or column by column."""
    return put(x) if order == "C" else put(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)


class Kernel:
    """What `jit.load` returns: called with a grid, a number of threads and arguments."""

    def __init__(self, library: ctypes.CDLL, entry: str) -> None:
        self._library, self._entry = library, entry

    def __call__(self, grid: tuple[int, ...], threads: tuple[int], args: tuple[Any, ...], shared_mem: int = 0) -> None:
        if self._entry in _WAITING:
            grid = (1,)
        elif _most_ctas and self._entry in _LOOPS:
            grid = tuple(min(n, _most_ctas[-1]) for n in grid)
        held = [self._bytes(x) for x in args]
        places = (ctypes.c_void_p * len(held))(*(x.ctypes.data for x in held))
        whole = (ctypes.c_ulong(x) for x in (_STACK, seed()))
        with _alone:
            _watched()
            signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
            self._library.emulate(places, *(*grid, 1, 1)[:3], threads[0], shared_mem, _stacks(), *whole)
            signal.setitimer(signal.ITIMER_REAL, 0)

    @staticmethod
    def _bytes(x: Any) -> Array:
        """An argument as it is stored in memory: an array is a pointer, a struct or a number itself."""
        is_array = isinstance(x, np.ndarray) and x.ndim > 0 and x.dtype.names is None
        return put(np.frombuffer(np.uint64(x.ctypes.data) if is_array else x.tobytes(), np.uint8))


#: Kernels whose CTAs go on until nothing is left, however few there are.
_LOOPS = {
    *("attention_backward_keys_sm90", "attention_backward_fused", "gemm_few", "kv_append"),
    *("spmm", "spmv", "gemm_simt", "gemm_sm80", "spgemm_simt", "segment", "expand", "attention_simt"),
    *("list_pairs", "pack_columns", "count_pairs", "set_bits", "vector_steps", "rearrange", "fill", "mend"),
    *("diagonal", "check_pattern", "block_elements", "reduce_lines", "merge_patterns", "kept_places", "combine_blocks"),
    *("csr_blocks", "take_blocks"),
}
#: Kernels that go on with any number of CTAs, and whose CTAs wait for each other, which they cannot do here: they have
#: one.
_WAITING = {"list_at_once", "join_rows", "attention_backward_sm90"}
_most_ctas: list[int] = []


@contextmanager
def few_ctas(most: int) -> Iterator[None]:
    """Grids of kernels that go on beyond them have at most so many CTAs along each side."""
    _most_ctas.append(most)
    try:
        yield
    finally:
        _most_ctas.pop()


#: Seconds that a launch may take, and bytes of the stack of a thread.
_PATIENCE, _STACK = 300, 256 << 10
#: One launch at a time.
_alone = threading.Lock()


@cache
def _watched() -> None:
    """Let a kernel that does not end, end the process, which says where. A timer costs a launch next to nothing."""
    faulthandler.register(signal.SIGALRM, file=sys.__stderr__, chain=True)


def seed() -> int:
    """What the order of threads and the first contents of shared memory follow from: BSRGEMM_EMULATOR_SEED."""
    return int(os.environ.get("BSRGEMM_EMULATOR_SEED", "1"))


def can_watch_races() -> bool:
    """Can kernels be compiled so that they watch races? clang++ does not tell volatile accesses from others."""
    return COMPILER is not None and "clang" not in _compiler()[-1]


def watches_races() -> bool:
    """Do kernels end the process at the first race of two threads of a CTA? BSRGEMM_EMULATOR_RACES=1."""
    return os.environ.get("BSRGEMM_EMULATOR_RACES", "") == "1"


@cache
def _stacks() -> ctypes.c_void_p:
    """Stacks of 1024 threads, with a page below each that ends the process."""
    memory = mmap.mmap(-1, 1024 * _STACK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _kept.append(memory)
    first = np.frombuffer(memory, np.uint8).ctypes.data
    protect = ctypes.CDLL(None).mprotect
    assert not any(protect(ctypes.c_void_p(first + i * _STACK), ctypes.c_size_t(4096), 0) for i in range(1024))
    return ctypes.c_void_p(first)


_kept: list[Any] = []


# ---------------------------------------------------------------------------------- sources
#: Headers that are exchanged for one of the emulator, wherever they lie: their assembly is put together by macros.
_OTHERS = {"wgmma.cuh": "emulated_wgmma.h", "wgmma_narrow.cuh": "", "wgmma_odd.cuh": ""}
_ASSEMBLY = re.compile(r"\basm(?: volatile)?\(")
_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
#: Such a parameter is read where it lies. A copy on the stack need not lie at a multiple of more than 16 bytes.
_PARAMETER = re.compile(r"const __grid_constant__ (\w+(?:<\w+>)?) (\w+)")
_MACRO = re.compile(r"^#define (\w+)\(([^)]*)\)((?:[^\n]*\\\n)*[^\n]*)$", flags=re.M)
_REGISTERS = {"pred": "bool", "b16": "unsigned short", "b32": "unsigned"}


def _parts(text: str, separator: str) -> list[str]:
    """A text cut at a separator outside of strings and parentheses."""
    parts, depth, quoted = [""], 0, False
    for i, letter in enumerate(text):
        if letter == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1, "[": 1, "]": -1}.get(letter, 0)
            if letter == separator and depth == 0:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _instruction(text: str, values: list[str]) -> str:
    """An instruction of PTX in C++: a call of the function of that name, with its operands."""
    if text.startswith(".reg"):
        _, kind, names = text.split(None, 2)
        return f"{_REGISTERS[kind[1:]]} {names}"
    condition = ""
    if text.startswith("@"):
        condition, text = text[1:].split(None, 1)
        condition = f"if ({condition}) "
    name, _, rest = text.partition(" ")
    name = re.sub(r"\.L2::(?:\d+B|cache_hint)", "", name).replace("::", "_").replace(".", "_")
    operands = [x.strip().removeprefix("_|") for x in re.sub(r"[\[\]{}]", "", rest).split(",")]
    operands = [re.sub(r"^0d0+$", "0.0", x).replace("%%tid.x", "threadIdx.x") for x in operands if x not in ("", "_")]
    operands = [re.sub(r"%(\d+)", lambda x: f"({values[int(x[1])]})", x) for x in operands]
    return f"{condition}emulator::{name}({', '.join(operands)})"


def _statement(inside: str) -> str:
    """What stands in the parentheses of an assembly statement, in C++; nothing if it says nothing to a CPU."""
    template, *constraints = [*_parts(inside.replace("::", ": :"), ":"), "", ""][:3]
    said = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).replace("\\n", " ").replace(": :", "::")
    values = [
        re.sub(r'^(?:"[=+&a-z]*"\s*)+\((.*)\)$', r"\1", x, flags=re.S)
        for part in constraints
        for x in _parts(part, ",")
        if x
    ]
    lines = [x.strip() for x in re.sub(r"^\s*\{(.*)\}\s*$", r"\1", said, flags=re.S).split(";")]
    called = "; ".join(_instruction(x, values) for x in lines if x)
    return f"do {{ {called}; }} while (false)" if called else ""


def _expanded(text: str) -> str:
    """A source in which macros with parameters that stand for assembly are written out."""
    for found in list(_MACRO.finditer(text)):
        name, parameters, body = found[1], [x.strip() for x in found[2].split(",")], found[3].replace("\\\n", " ")
        if not _ASSEMBLY.search(body):
            continue
        text = text.replace(found[0], "", 1)
        while use := re.search(rf"^{name}\(", text, flags=re.M):
            end, depth = use.end(), 1
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            values = dict(zip(parameters, _parts(text[use.end() : end - 1], ","), strict=True))
            pieces = re.split(r'("(?:[^"\\]|\\.)*")', body)  # strings stay as they are
            words = [
                x if x[:1] == '"' else re.sub(r"\b\w+\b", lambda w, values=values: values.get(w[0], w[0]), x)
                for x in pieces
            ]
            text = text[: use.start()] + "".join(words) + text[end:]
    return text


def _translated(text: str) -> str:
    """A source with its assembly in C++ and its shared memory at the place that the emulator gives it."""
    text = _SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(emulator::shared);", _expanded(text))
    text = _PARAMETER.sub(r"const \1& \2", text)
    out, at = "", 0
    for found in _ASSEMBLY.finditer(text):
        end, depth, quoted = found.end(), 1, False
        while depth:
            if text[end] == '"':
                quoted = not quoted
            depth += 0 if quoted else {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        out += text[at : found.start()] + _statement(text[found.end() : end - 1])
        at = end
    return out + text[at:]


@cache
def _sources(source: str) -> dict[str, str]:
    """A kernel and its headers by name, as the emulator wants them."""
    texts = {name: (HERE / name).read_text() for name in HEADERS}
    for name, text in gather(source).items():
        other = _OTHERS.get(PurePosixPath(name).name)
        if other is not None:  # what the header includes is included all the same
            included = re.findall(r'^#include ".*"$', text, flags=re.M)
            texts[name] = "\n".join(["#pragma once", *included, (HERE / other).read_text() if other else ""])
        else:
            texts[name] = _translated(text)
    return texts


# ---------------------------------------------------------------------------------- builds
_MAIN = """#include "emulator.h"
#include "{source}"
extern "C" __attribute__((visibility("default"))) void emulate(
    void** arguments, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned bytes, unsigned char* stacks,
    unsigned long stack_bytes, unsigned long seed) {{
  emulator::launch({entry}, arguments, {{x, y, z}}, threads, bytes, stacks, stack_bytes, seed);
}}
"""

#: Reads of all lanes in which only that of lane 0 counts: a shuffle hands it to the others. Those may come too late.
_LOOKED_AT_IN_LANE_0 = {"gemm_sm90.cu": ("__shfl_sync(0xffffffffu, ", "shared.present[ring.at]")}


def builds() -> Path:
    """Where compiled kernels are kept for all processes and runs: BSRGEMM_EMULATOR_FOLDER, or with other caches."""
    chosen = os.environ.get("BSRGEMM_EMULATOR_FOLDER")
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(chosen) if chosen else Path(cache_home, "bsrgemm-emulator")


#: Not the library of C++, of which nothing is used; that of C is there.
_LINKED = ["-nostdlib", "-lgcc"]
#: How the functions that all kernels call are compiled, once for all of them.
_RUNTIME = ["-DEMULATED_RUNTIME", "-O2", "-c"]
#: The compiler calls a function before each access; lines and frames are for the report.
_WATCHING = ["-DEMULATED_RACES", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1"]
_WATCHING += ["-fno-omit-frame-pointer", "-g1"]


@cache
def _compiler() -> tuple[str, ...]:
    """The compiler, how it is called and which one it is."""
    assert COMPILER is not None
    said = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    flags = [
        "-std=c++17",
        "-w",
        "-Wno-psabi",
        "-fPIC",
        "-shared",
        "-pipe",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-threadsafe-statics",
        "-fvisibility=hidden",
    ]
    flags += ["-U_FORTIFY_SOURCE", "-fno-stack-protector"]  # jumps from stack to stack are what they look for
    # Vectors that do not lie at a multiple of their size end the process, as they end a kernel on a card. So do places
    # outside of arrays of a known size, which may be registers; g++ also looks at arrays at the end of a struct.
    if "clang" not in said:
        flags += ["-fsanitize=alignment,bounds-strict", "-fsanitize-undefined-trap-on-error"]
        flags.append("-fno-gnu-unique")  # or variables of kernels are those of all
    else:
        flags += ["-fsanitize=alignment,bounds", "-fsanitize-trap=alignment,bounds"]
    return (COMPILER, *flags, platform.machine(), said)


def _command(races: bool) -> list[str]:
    """How the compiler is called, for kernels that end the process at a race or that do not."""
    command = list(_compiler()[:-2])
    return [x for x in command if "-fsanitize" not in x] + _WATCHING if races else command


def _with_plain_stores(text: str) -> str:
    """A source in which a structure that `Store::from` returns is assigned, not returned to memory (`races::plain`)."""
    out, at = "", 0
    for found in re.finditer(r"(?<== )Store<\w+>::from\(", text):
        end, depth = found.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        out += f"{text[at : found.start()]}emulator::races::plain({text[found.start() : end]})"
        at = end
    return out + text[at:]


def compiled(spec: KernelSpec, folder: Path, calls: tuple[str, ...] = (), races: bool = False) -> Kernel:
    """The kernel of a spec, compiled into that folder unless it is there.

    It ends the process at some calls, or at the first race of two threads, if told to.
    """
    command, texts = _command(races), dict(_sources(spec.source))
    if races:
        texts = {name: _with_plain_stores(text) for name, text in texts.items()}
        if spec.source in _LOOKED_AT_IN_LANE_0:
            before, read = _LOOKED_AT_IN_LANE_0[spec.source]
            text = texts[spec.source].replace(before + read, f"{before}emulator::races::of_lane_0({read})")
            texts[spec.source] = text
    for call in calls:
        texts[spec.source] = texts[spec.source].replace(call, f'emulator::fail("{call}");')
    texts |= {"main.cpp": _MAIN.format(source=spec.source, entry=spec.entry)}
    runtime = _runtime(folder, races)
    definitions = [f"-D{key}={value}" for key, value in spec.all_defines()]
    command += [*definitions, "-I.", "main.cpp", str(runtime), *_LINKED]
    library = _built(command, texts, folder, spec.entry, ".so")
    return Kernel(ctypes.CDLL(str(library)), spec.entry)


@cache
def _runtime(folder: Path, races: bool) -> Path:
    """What all kernels call, compiled into that folder unless it is there."""
    texts = {name: (HERE / name).read_text() for name in (*HEADERS, "emulated_runtime.cpp")}
    return _built([*_command(races), *_RUNTIME, "emulated_runtime.cpp"], texts, folder, "runtime", ".o")


def _built(command: list[str], texts: dict[str, str], folder: Path, name: str, suffix: str) -> Path:
    """What a command makes of some files: it lies in `folder` under a digest of both, the compiler and the machine."""
    key = hashlib.sha256(repr((sorted(texts.items()), command, _compiler()[-2:])).encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}-{key}{suffix}"
    if not made.is_file():
        with open(made.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.is_file():
                _build(command, texts, made)
        _forget_old(folder)
    os.utime(made)
    return made


load = cache(compiled)


@contextmanager
def forbidden(folder: Path, *calls: str) -> Iterator[None]:
    """Kernels end the process where they would make one of these calls, within `emulated`."""
    loaded: set[str] = set()

    def forbidding(spec: KernelSpec, arch: str) -> Kernel:
        loaded.add(spec.source)
        return load(spec, folder, calls)

    with patch.object(jit, "load", forbidding):
        yield
    missing = [call for call in calls if all(call not in _sources(source)[source] for source in loaded)]
    assert not missing, f"no kernel that was loaded has {missing}"


def _build(command: list[str], texts: dict[str, str], made: Path) -> None:
    """Compile in a folder of its own; others see the whole result or none."""
    with tempfile.TemporaryDirectory(dir=made.parent, prefix=".build-") as name:
        where = Path(name)
        for path, text in texts.items():
            (where / path).parent.mkdir(parents=True, exist_ok=True)
            (where / path).write_text(text)
        subprocess.run([*command, "-o", "built"], cwd=where, check=True)
        os.replace(where / "built", made)


def _forget_old(folder: Path, days: int = 14) -> None:
    """Remove what no run has asked for in some days."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.is_file() and time.time() - path.stat().st_mtime > days * 86400:
                path.unlink()


def write_map(layout: tensor_map.Layout, target: int, pointer: int) -> None:
    """What the driver does for `tensor_map.Layout.write`."""
    ctypes.memmove(target, encode(pointer, *layout.arguments), 128)


def encode(
    pointer: int,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: str,
    l2: str,
) -> bytes:
    """A tensor map as emulated_ptx.h reads it."""
    tensor_map._check_address(pointer)
    tensor_map._check(dtype, dims, strides, box, swizzle, l2)
    item = tensor_map.DTYPES[dtype][1]
    more = 4 - len(dims)
    words = [item, {"none": 0, "32B": 32, "64B": 64, "128B": 128}[swizzle]]
    words += [*dims, *[1] * more, *box, *[1] * more]
    packed = np.uint64(pointer).tobytes() + np.array(words, np.uint32).tobytes()
    packed += np.array([*strides, *[0] * more], np.uint64).tobytes()
    return packed.ljust(128, b"\0")
