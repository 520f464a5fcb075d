"""From a kernel's description to a loaded kernel: gather, hash, NVRTC to cubin, disk cache, load.

`load` is what a launch calls; `build` and `compile_cubin` need no GPU. CuPy is imported only when
something is compiled or loaded.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from . import disk_cache
from .sources import cuda_root, digest, gather
from .structs import Struct

#: Part of every cache key: raise it when the meaning of an entry changes.
_CACHE_FORMAT = 1
_OLDEST = 75
#: The largest grid along x, and along y and z.
MAX_GRID_X, MAX_GRID_YZ = 2**31 - 1, 65535
#: Integrated (Jetson) chips: their binaries and those of the cards do not run on each other.
_INTEGRATED = frozenset({72, 87, 101, 110})


class CompileError(RuntimeError):
    """NVRTC refused a source; the text holds its log with file and line numbers."""


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to build: a file of the cuda folder, its extern "C" entry, -D definitions, and argument structs."""

    source: str
    entry: str
    defines: tuple[tuple[str, str | int], ...] = ()
    #: what the kernel takes; the compiler asserts that both sides lay it out in the same way
    structs: tuple[Struct, ...] = ()

    def __str__(self) -> str:
        defines = "".join(f" -D{name}={value}" for name, value in self.defines)
        return f"{self.source}:{self.entry}{defines}"

    def all_defines(self) -> tuple[tuple[str, str | int], ...]:
        """The definitions, and those that describe the argument structs."""
        return (*self.defines, *(define for layout in self.structs for define in layout.defines()))


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made: the binary, its log (registers, shared memory, spills), the time it took."""

    cubin: bytes
    log: str
    seconds: float


@dataclass(frozen=True)
class BuildReport:
    """Where a kernel's binary lies; `log` and `seconds` are empty when it came from the cache."""

    path: str
    cached: bool
    log: str = ""
    seconds: float = 0.0


def target(compute_capability: str | int, archs: Iterable[int] | None = None) -> str:
    """The architecture to compile for on a card, given those that NVRTC knows (by default: ask it).

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
        # A card runs binaries of its own major version and a lower minor one.
        older = [a for a in known if a // 10 == capability // 10 and a < capability and a not in _INTEGRATED]
        if older:
            return f"sm_{older[-1]}"
    raise RuntimeError(
        f"compute capability {_dotted(capability)}: the NVRTC installed compiles for "
        f"{', '.join(_dotted(a) for a in known)} only; install a newer one "
        "(pip install -U nvidia-cuda-nvrtc-cu12, or bsrgemm[cuda13]). Matrices on the CPU still work."
    )


def device_target() -> str:
    """The architecture to compile for on CuPy's current device."""
    cuda = _cupy().cuda
    device = cuda.runtime.getDevice()
    if device not in _device_targets:
        _device_targets[device] = target(cuda.Device(device).compute_capability)
    return _device_targets[device]


def load(spec: KernelSpec, arch: str, *, root: Path | None = None) -> Any:
    """The `cupy.RawKernel` of `spec`, compiled or read from the cache once per process."""
    key = (spec, arch, root)
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    with _locks_guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _kernels:
            _kernels[key] = _open(build(spec, arch, root=root), spec.entry)
        return _kernels[key]


def argument(packed: bytes | bytearray) -> np.ndarray[Any, Any]:
    """A struct as a kernel takes it. Opaque: CuPy asks NumPy what it is, which takes 4 us where it has fields."""
    return np.ndarray((), _opaque(len(packed)), packed)


@lru_cache(maxsize=256)
def _opaque(size: int) -> np.dtype[Any]:
    return np.dtype(f"V{size}")


def build(spec: KernelSpec, arch: str, *, root: Path | None = None) -> str:
    """The path of the kernel's cubin, compiled unless the cache has it."""
    return build_report(spec, arch, root=root).path


def build_report(spec: KernelSpec, arch: str, *, root: Path | None = None) -> BuildReport:
    """As `build`, saying also whether the cache had it and what the compiler said."""
    root = cuda_root() if root is None else root
    texts = gather(spec.source, root)
    stem = f"{spec.entry}-{arch}-{_cache_key(spec, arch, texts)[: disk_cache.DIGITS]}"
    where = disk_cache.folder()
    found = disk_cache.lookup(where, stem)
    if found is not None:
        return BuildReport(str(found), cached=True)
    compiled = _compile(spec, arch, texts, root)
    try:
        path = str(disk_cache.store(where, stem, compiled.cubin))
    except OSError as error:
        disk_cache.warn_unusable(where, error)
        path = disk_cache.keep_in_memory(compiled.cubin)
    return BuildReport(path, cached=False, log=compiled.log, seconds=compiled.seconds)


def compile_cubin(spec: KernelSpec, arch: str, *, root: Path | None = None) -> Compiled:
    """Compile without looking at the cache or writing to it."""
    root = cuda_root() if root is None else root
    return _compile(spec, arch, gather(spec.source, root), root)


def options(spec: KernelSpec, arch: str) -> tuple[str, ...]:
    """NVRTC's options for `spec`; `-v` puts registers, shared memory and spills into the log."""
    return ("-std=c++17", f"-arch={arch}", "--ptxas-options=-v", *_define_options(spec))


def nvrtc_version() -> str:
    """NVRTC's version as it tells it: major and minor."""
    return ".".join(map(str, _nvrtc().getVersion()))


def supported_archs() -> tuple[int, ...]:
    """The architectures that NVRTC compiles for, as 75, 80, 90..."""
    return tuple(_nvrtc().getSupportedArchs())


_kernels: dict[tuple[KernelSpec, str, Path | None], Any] = {}
_locks: dict[tuple[KernelSpec, str, Path | None], threading.Lock] = {}
_locks_guard = threading.Lock()
_device_targets: dict[int, str] = {}


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
    """The cubin to the end of its ELF tables: CuPy cuts the last byte, a zero, as if it ended a string."""
    program_table, section_table = struct.unpack_from("<QQ", cubin, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", cubin, 54)
    end = max(program_table + program_size * programs, section_table + section_size * sections)
    return cubin.ljust(end, b"\0")


def _cache_key(spec: KernelSpec, arch: str, texts: Mapping[str, str]) -> str:
    parts = (_CACHE_FORMAT, digest(texts), spec.source, spec.entry, options(spec, arch), nvrtc_version())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _define_options(spec: KernelSpec) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in spec.all_defines())


def _failure(spec: KernelSpec, arch: str, root: Path, reason: str) -> str:
    return f"NVRTC {nvrtc_version()} cannot build {spec} for {arch} from {root}: {reason}"


def _dotted(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(_missing("CuPy", error)) from error
    return cupy


def _nvrtc() -> Any:
    _cupy()
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy's and NVIDIA's loaders raise a class of their own per version
        raise RuntimeError(_missing("NVRTC (libnvrtc)", error)) from error
    return nvrtc


def _missing(what: str, error: Exception) -> str:
    return (
        f"bsrgemm compiles its GPU kernels with CuPy and NVRTC, and {what} cannot be loaded "
        f"({' '.join(str(error).split())}). "
        'Install both with pip install "bsrgemm[cuda12]" or "bsrgemm[cuda13]", or NVRTC alone with '
        "pip install nvidia-cuda-nvrtc-cu12. Matrices on the CPU (NumPy, SciPy) work without them."
    )
