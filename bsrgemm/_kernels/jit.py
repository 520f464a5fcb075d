"""Build kernels from their descriptions: gather the sources, hash them, compile with NVRTC, cache on disk, load.

A source includes headers as `#include "name.cuh"`, with names relative to the top of the folder cuda; nothing from
outside that folder is gathered. A launch calls `load`. `build` and `compile_cubin` need no GPU. CuPy is imported only
when something is compiled or loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from . import disk_cache
from .overlapping import OverlappingKernel, can_overlap
from .structs import Struct

#: How to get CuPy and NVRTC, from the published package and from a checkout.
INSTALL = 'pip install "bsrgemm[cuda12]" or "bsrgemm[cuda13]", in a checkout pip install ".[cuda12]" or ".[cuda13]"'

_PACKAGE = Path(__file__).resolve().parents[1]
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_NEWER = "install a newer one (pip install -U nvidia-cuda-nvrtc-cu12, or bsrgemm[cuda13])"

#: A part of every cache key. Raise it when the meaning of a cache entry changes.
_CACHE_FORMAT = 2
_OLDEST = 75
#: The oldest NVRTC that the kernels were compiled with.
OLDEST_NVRTC = (12, 4)
#: The largest number of thread blocks of a grid along x, and along y or z.
MAX_GRID_X, MAX_GRID_YZ = 2**31 - 1, 65535
#: Compute capabilities of integrated (Jetson) chips. Their binaries do not run on discrete cards, nor the reverse.
_INTEGRATED = frozenset({72, 87, 101, 110})


class CompileError(RuntimeError):
    """NVRTC refused a source. The message holds NVRTC's log with file and line numbers."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel to build: a file of the cuda folder, its extern "C" entry, -D definitions, and argument structs."""

    source: str
    entry: str
    defines: tuple[tuple[str, str | int], ...] = ()
    #: structs that the kernel takes as arguments; the compiler asserts that Python and CUDA agree on their layout
    structs: tuple[Struct, ...] = ()
    #: whether launches may begin before the kernels in front of them have ended (see overlapping.py)
    overlaps: bool = False

    def __str__(self) -> str:
        defines = "".join(f" -D{name}={value}" for name, value in self.defines)
        return f"{self.source}:{self.entry}{defines}"

    def all_defines(self) -> tuple[tuple[str, str | int], ...]:
        """Return the definitions of the kernel and those that describe its argument structs."""
        return (*self.defines, *(define for layout in self.structs for define in layout.defines()))


@dataclass(frozen=True)
class Compiled:
    """The result of a compilation: the binary, NVRTC's log (registers, shared memory, spills), the time in seconds."""

    cubin: bytes
    log: str
    seconds: float


@dataclass(frozen=True)
class BuildReport:
    """The path of a kernel's binary. `log` is empty and `seconds` is 0 when the binary came from the cache."""

    path: str
    cached: bool
    #: whether the cache has the binary now; otherwise this process alone can read the path
    stored: bool
    log: str = ""
    seconds: float = 0.0


def cuda_root() -> Path:
    """Return the folder of the CUDA sources: it is inside the package in a wheel, and next to it in a checkout."""
    candidates = (_PACKAGE / "cuda", _PACKAGE.parent / "cuda")
    for folder in candidates:
        # NVIDIA's Python packages install a folder `cuda` next to this package; that folder holds no .cu file.
        if any(folder.glob("*.cu")):
            return folder
    raise FileNotFoundError(
        f"the CUDA sources of bsrgemm are neither in {candidates[0]} (an installed wheel) "
        f"nor in {candidates[1]} (a checkout); reinstall bsrgemm"
    )


def gather(source: str, root: Path | None = None) -> dict[str, str]:
    """Return the text of `source` and, recursively, of every header it includes, by name, with `source` first."""
    root = cuda_root() if root is None else root
    texts: dict[str, str] = {}
    pending = [(source, "")]
    while pending:
        name, includer = pending.pop()
        if name in texts:
            continue
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"source {name!r}{includer}: expected a name relative to, and inside, {root}")
        try:
            texts[name] = (root / path).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"CUDA source {name!r}{includer} is not in {root}") from error
        included = _INCLUDE.findall(_COMMENT.sub("", texts[name]))
        pending += [(header, f" (included by {name!r})") for header in reversed(included)]
    return texts


def digest(texts: Mapping[str, str]) -> str:
    """Return the SHA-256 digest of names and texts. Any edit changes it."""
    sha = hashlib.sha256()
    for name in sorted(texts):
        for part in (name.encode(), texts[name].encode()):
            sha.update(len(part).to_bytes(8, "little"))
            sha.update(part)
    return sha.hexdigest()


def target(compute_capability: str | int, archs: Iterable[int] | None = None) -> str:
    """Return the architecture to compile for on a card of this compute capability.

    `archs` are the architectures that NVRTC can compile for; by default NVRTC is asked for them.

    >>> target(90, [80, 90]), target("89", [80, 86, 89]), target(103, [100, 101, 120])
    ('sm_90a', 'sm_89', 'sm_100')
    """
    capability = int(compute_capability)
    if capability < _OLDEST:
        raise RuntimeError(
            f"compute capability {_dotted(capability)}: bsrgemm's kernels need {_dotted(_OLDEST)} or newer; "
            "matrices on the CPU (NumPy, SciPy) still work here"
        )
    known = sorted(supported_archs() if archs is None else archs)
    if capability in known:
        return "sm_90a" if capability == 90 else f"sm_{capability}"
    if capability not in _INTEGRATED:
        # A card also runs binaries for a lower minor version of its own major version.
        older = [a for a in known if a // 10 == capability // 10 and a < capability and a not in _INTEGRATED]
        if older:
            return f"sm_{older[-1]}"
    raise RuntimeError(
        f"compute capability {_dotted(capability)}: the NVRTC installed compiles for "
        f"{', '.join(_dotted(a) for a in known)} only; {_NEWER}. Matrices on the CPU still work."
    )


def check_arch(arch: str) -> None:
    """Raise ValueError unless the kernels and the NVRTC installed can be compiled for `arch`, such as "sm_90a"."""
    known = supported_archs()
    targets = ", ".join(f"sm_{number}" for number in known if number >= _OLDEST)
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None or (int(match[1]) not in known and int(match[1]) < max(known)):
        raise ValueError(f"got {arch!r}, wanted one of {targets}, or one of these with an a")
    number = int(match[1])
    if number < _OLDEST:
        raise ValueError(f"got {arch!r}, wanted sm_{_OLDEST} or newer: bsrgemm has no kernels for older cards")
    if number not in known:
        raise ValueError(
            f"got {arch!r}, which NVRTC {nvrtc_version()} does not know: it compiles for {targets}; {_NEWER}"
        )


def device_target() -> str:
    """Return the architecture to compile for on CuPy's current device."""
    cuda = _cupy().cuda
    device = cuda.runtime.getDevice()
    if device not in _device_targets:
        _device_targets[device] = target(cuda.Device(device).compute_capability)
    return _device_targets[device]


def load(spec: KernelSpec, arch: str, *, root: Path | None = None) -> Any:
    """Return the `cupy.RawKernel` of `spec`, compiled or read from the disk cache once per process and device."""
    # CuPy reads the file again for every device, and it may be gone by then: each device has a kernel of its own.
    key = (spec, arch, root, _current_device())
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    with _locks_guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _kernels:
            opened = _build_and_open(spec, arch, root)
            _kernels[key] = OverlappingKernel(opened) if spec.overlaps and can_overlap(arch) else opened
        return _kernels[key]


def argument(packed: bytearray | memoryview) -> Any:
    """Return a packed struct in the form in which CuPy passes it to a kernel; nobody may change the struct afterwards.

    CuPy asks NumPy for the address of an array at every launch, which takes the host 2 to 4 us. What this function
    returns has its address already, so that a launch with an argument of an earlier one costs nothing.
    """
    kind = _argument_class()
    if kind is None:
        return np.ndarray((), np.dtype(f"V{len(packed)}"), packed)
    memory = ctypes.c_char.from_buffer(packed)  # the struct is not moved as long as this is there
    address = ctypes.addressof(memory)
    found = kind(address)
    found.packed, found.memory, found.address = packed, memory, address
    return found


@lru_cache(maxsize=1)
def _argument_class() -> Any:
    """Return the class of arguments: a subclass of the class whose objects CuPy's launches take as they are.

    The result is None for a CuPy without that class. It takes arrays of one element, whose dtype should have no fields.
    """
    try:
        from cupy.cuda.function import CPointer
    except ImportError:
        return None

    class Argument(CPointer):
        """The address of a struct in memory of the host, with the struct."""

        __slots__ = ("address", "memory", "packed")

        def tobytes(self) -> bytes:
            return bytes(self.packed)

    return Argument


def build(spec: KernelSpec, arch: str, *, root: Path | None = None) -> str:
    """Return the path of the kernel's cubin, and compile it first unless the cache has it."""
    return build_report(spec, arch, root=root).path


def build_report(spec: KernelSpec, arch: str, *, root: Path | None = None) -> BuildReport:
    """Do what `build` does, and also report whether the cache had the binary and what the compiler printed."""
    root = cuda_root() if root is None else root
    texts = gather(spec.source, root)
    stem = f"{spec.entry}-{arch}-{_cache_key(spec, arch, texts)[: disk_cache.DIGITS]}"
    where = disk_cache.folder()
    found = disk_cache.lookup(where, stem)
    if found is not None:
        return BuildReport(str(found), cached=True, stored=True)
    compiled = _compile(spec, arch, texts, root)
    stored = True
    try:
        path = str(disk_cache.store(where, stem, compiled.cubin))
    except OSError as error:
        disk_cache.warn_unusable(where, error)
        path, stored = disk_cache.keep_in_memory(compiled.cubin), False
    return BuildReport(path, cached=False, stored=stored, log=compiled.log, seconds=compiled.seconds)


def compile_cubin(spec: KernelSpec, arch: str, *, root: Path | None = None) -> Compiled:
    """Compile a kernel without reading the cache or writing to it."""
    root = cuda_root() if root is None else root
    return _compile(spec, arch, gather(spec.source, root), root)


def options(spec: KernelSpec, arch: str) -> tuple[str, ...]:
    """Return NVRTC's options for `spec`; `-v` puts registers, shared memory and spills into the log."""
    defines = (f"-D{name}={value}" for name, value in spec.all_defines())
    return ("-std=c++17", f"-arch={arch}", "--ptxas-options=-v", *defines)


def nvrtc_version() -> str:
    """Return NVRTC's version as "major.minor"."""
    return ".".join(map(str, _nvrtc().getVersion()))


def supported_archs() -> tuple[int, ...]:
    """Return the architectures that NVRTC compiles for, as the numbers 75, 80, 90, ..."""
    return tuple(_nvrtc().getSupportedArchs())


_kernels: dict[tuple[KernelSpec, str, Path | None, int], Any] = {}
_locks: dict[tuple[KernelSpec, str, Path | None, int], threading.Lock] = {}
_locks_guard = threading.Lock()
_device_targets: dict[int, str] = {}


def _build_and_open(spec: KernelSpec, arch: str, root: Path | None) -> Any:
    path = build(spec, arch, root=root)
    try:
        return _open(path, spec.entry)
    except Exception as error:
        if os.path.exists(path) and "FILE_NOT_FOUND" not in str(error):
            raise
    with contextlib.suppress(OSError):  # the driver does not find a file that is there
        return _open(disk_cache.keep_in_memory(Path(path).read_bytes()), spec.entry)
    # Another process has removed the entry since it was found, or has cleared the whole cache.
    return _open(disk_cache.keep_in_memory(compile_cubin(spec, arch, root=root).cubin), spec.entry)


def _current_device() -> int:
    return int(_cupy().cuda.runtime.getDevice())


def _open(path: str, entry: str) -> Any:
    return _cupy().RawModule(path=path).get_function(entry)


def _compile(spec: KernelSpec, arch: str, texts: Mapping[str, str], root: Path) -> Compiled:
    nvrtc = _nvrtc()
    headers = [name for name in texts if name != spec.source]
    start = time.perf_counter()
    program = nvrtc.createProgram(
        texts[spec.source],
        spec.source,
        [texts[name].encode() for name in headers],
        [name.encode() for name in headers],
    )
    try:
        try:
            nvrtc.compileProgram(program, options(spec, arch))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompileError(_failure(spec, arch, root, f"{error}\n{log}")) from error
        cubin = _whole(nvrtc.getCUBIN(program))
        log = nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)
    if b".text." + spec.entry.encode() + b"\0" not in cubin:
        raise CompileError(_failure(spec, arch, root, f'it defines no extern "C" kernel {spec.entry!r}'))
    return Compiled(cubin, log, time.perf_counter() - start)


def _whole(cubin: bytes) -> bytes:
    """Return the cubin up to the end of its ELF tables. CuPy drops the last byte, a zero, as if it ended a string."""
    program_table, section_table = struct.unpack_from("<QQ", cubin, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", cubin, 54)
    end = max(program_table + program_size * programs, section_table + section_size * sections)
    return cubin.ljust(end, b"\0")


def _cache_key(spec: KernelSpec, arch: str, texts: Mapping[str, str]) -> str:
    parts = (_CACHE_FORMAT, digest(texts), spec.source, spec.entry, options(spec, arch), nvrtc_version())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _failure(spec: KernelSpec, arch: str, root: Path, reason: str) -> str:
    message = f"NVRTC {nvrtc_version()} cannot build {spec} for {arch} from {root}: {reason}"
    if tuple(_nvrtc().getVersion()) < OLDEST_NVRTC:
        message += f"\nbsrgemm's kernels need NVRTC {'.'.join(map(str, OLDEST_NVRTC))} or newer; {_NEWER}."
    return message


def _dotted(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


def _cupy() -> Any:
    try:
        import cupy
    except (ImportError, OSError) as error:  # OSError: a library or folder that CuPy needs is missing
        raise RuntimeError(_missing("CuPy", error)) from error
    return cupy


def _nvrtc() -> Any:
    _cupy()
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # the class of the error depends on the versions of CuPy and of NVIDIA's loader
        raise RuntimeError(_missing("NVRTC (libnvrtc)", error)) from error
    return nvrtc


def remedy(error: Exception) -> str:
    """What to do where the import of CuPy has failed: it makes its cache folder while it is imported.

    >>> remedy(PermissionError(13, "Permission denied", "/nonexistent/.cupy"))
    'set CUPY_CACHE_DIR to a folder that can be written'
    """
    if isinstance(error, OSError) and error.filename:
        return "set CUPY_CACHE_DIR to a folder that can be written"
    return INSTALL


def _missing(what: str, error: Exception) -> str:
    way = remedy(error)
    if way == INSTALL:
        way = f"Install both with {way}, or NVRTC alone with pip install nvidia-cuda-nvrtc-cu12"
    return (
        f"bsrgemm compiles its GPU kernels with CuPy and NVRTC, and {what} cannot be loaded "
        f"({' '.join(str(error).split())}). {way[0].upper()}{way[1:]}. "
        "Matrices on the CPU (NumPy, SciPy) work without them."
    )
