"""A log of what the card is asked to do: every launch of a kernel, free of addresses, the same in every process.

`install` puts the log between `jit.load` and its callers, and between `tensor_map` and the driver. A launch is written
down as digest of the compiled source, compile options, entry, grid, block, shared memory, stream, and the bytes of the
arguments. Words of the arguments that are addresses in device memory are replaced by an operand and an offset: operands
are the allocations, numbered within the launch by first appearance. Tensor maps are replaced by what the driver was
given to encode them.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import itertools
import struct
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bsrgemm._kernels import jit, sources, tensor_map

#: Shared memory that every kernel may use without asking for more.
_USUAL_SHARED_BYTES = 48 << 10
#: No address of device memory is below this one; smaller words are never looked up.
_LOWEST_ADDRESS = 1 << 32
_MAP_BYTES = 128
#: Digits of a launch's name, and of the digests of sources and tests.
DIGITS = 16


# ------------------------------------------------------------------------------------------- allocations
class Allocations:
    """Which allocation an address belongs to. A new allocation replaces those that were at its place."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._entries: list[tuple[int, int]] = []  # end, serial number
        self._count = 0
        self._lock = threading.Lock()

    def note(self, start: int, size: int) -> int:
        """An allocation was made; its serial number."""
        end = start + size
        with self._lock:
            low = bisect.bisect_right(self._starts, start)
            if low and self._entries[low - 1][0] > start:
                low -= 1
            high = bisect.bisect_left(self._starts, end)
            self._count += 1
            self._starts[low:high] = [start]
            self._entries[low:high] = [(end, self._count)]
            return self._count

    def forget(self, start: int, serial: int) -> None:
        """That allocation is gone."""
        with self._lock:
            place = bisect.bisect_left(self._starts, start)
            if place < len(self._starts) and self._starts[place] == start and self._entries[place][1] == serial:
                del self._starts[place], self._entries[place]

    def find(self, address: int) -> tuple[int, int] | None:
        """(serial number, offset) of the allocation that an address is in, if it is in any."""
        with self._lock:
            place = bisect.bisect_right(self._starts, address) - 1
            if place < 0:
                return None
            end, serial = self._entries[place]
            return (serial, address - self._starts[place]) if address < end else None


ALLOCATIONS = Allocations()


# --------------------------------------------------------------------------------------------- launches
class _Thread(threading.local):
    """A number for each thread; those that the system has are used again."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)


_thread = _Thread()


class TestLog:
    """The launches of one test. Threads have lists of their own, which are ordered by what they hold."""

    __test__ = False

    def __init__(self) -> None:
        self._threads: dict[int, tuple[list[str], list[str], dict[int, int], dict[int, int]]] = {}
        self._main = _thread.number
        #: name of a launch -> its description
        self.table: dict[str, dict[str, Any]] = {}

    def add(self, description: dict[str, Any], operands: list[int], stream: int) -> None:
        thread = _thread.number
        names, links, numbers, streams = self._threads.setdefault(thread, ([], [], {}, {0: 0}))
        name = launch_name(description)
        self.table.setdefault(name, description)
        names.append(name)
        # Operands by first appearance in the test: which launches share their memory.
        shared = ",".join(str(numbers.setdefault(serial, len(numbers))) for serial in operands)
        links.append(f"{shared}/{streams.setdefault(stream, len(streams))}")

    def launches(self) -> list[str]:
        """Names of the launches in order, those of the main thread first."""
        return [name for names, _ in self._ordered() for name in names]

    def links(self) -> list[str]:
        """For every launch the numbers of its operands within the test, and of its stream."""
        return [link for _, links in self._ordered() for link in links]

    def digest(self) -> str:
        """A digest of all launches; empty where there are none."""
        return _digest(" ".join(self.launches())) if self._threads else ""

    def sharing(self) -> str:
        """A digest of which launches share their operands and streams; empty where there are none."""
        return _digest(" ".join(self.links())) if self._threads else ""

    def entries(self) -> list[str]:
        """Names of the kernels."""
        return sorted({launch["entry"] for launch in self.table.values()})

    def _ordered(self) -> list[tuple[list[str], list[str]]]:
        main = self._threads.get(self._main)
        others = sorted((names, links) for t, (names, links, *_) in self._threads.items() if t != self._main)
        return [] if main is None and not others else [*([main[:2]] if main else []), *others]


_current: TestLog | None = None


def begin() -> TestLog:
    """The log of a test that starts now."""
    global _current
    _current = TestLog()
    return _current


def end() -> None:
    global _current
    _current = None


def launch_name(description: dict[str, Any]) -> str:
    """A launch's name: equal launches have equal names. The fields are in the order in which `Kernel` has them."""
    return _digest(repr(tuple(description.values())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


@cache
def source_digest(source: str, root: Path | None) -> str:
    """A digest of a source and all that it includes, comments and blanks left out."""
    return sources.code_digest(sources.gather(source, root))[:DIGITS]


class Kernel:
    """A loaded kernel whose launches are logged. Everything else is that of the kernel."""

    def __init__(self, kernel: Any, spec: jit.KernelSpec, arch: str, root: Path | None) -> None:
        self.__dict__.update(kernel=kernel, shared_bytes=0)
        digest = source_digest(spec.source, root) if root is None else source_digest.__wrapped__(spec.source, root)
        options = " ".join(jit.options(spec, arch)) + (" overlapping" if spec.overlaps else "")
        self.__dict__["about"] = {"entry": spec.entry, "source": digest, "options": options}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_dynamic_shared_size_bytes":
            self.__dict__["shared_bytes"] = max(self.shared_bytes, value)
        setattr(self.kernel, name, value)

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> Any:
        if _current is not None:
            self._log(_current, grid, block, args, shared_mem)
        return self.kernel(grid, block, args, shared_mem=shared_mem)

    def _log(self, log: TestLog, grid: Any, block: Any, args: Any, shared_mem: int) -> None:
        operands: list[int] = []
        texts = [_written(argument, operands) for argument in args]
        stream = _current_stream()
        description = self.about | {
            "grid": tuple(int(n) for n in grid),
            "block": tuple(int(n) for n in block),
            "shared": int(shared_mem),
            "shared_allowed": shared_mem <= max(self.shared_bytes, _USUAL_SHARED_BYTES),
            "captured": bool(stream.is_capturing()),
            "args": " ; ".join(texts),
        }
        log.add(description, operands, stream.ptr)


def _current_stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()


# --------------------------------------------------------------------------------------------- arguments
def _written(argument: Any, operands: list[int]) -> str:
    """An argument as text; `operands` collects the allocations that it points into."""
    if hasattr(argument, "data") and hasattr(argument.data, "ptr"):  # an array of the device
        return _pointer(argument.data.ptr, operands)
    if isinstance(argument, np.ndarray | np.generic) or hasattr(argument, "packed"):
        return _bytes(argument.tobytes(), operands)
    if isinstance(argument, bool | int | float | complex):
        return f"{type(argument).__name__} {argument!r}"
    return type(argument).__name__


def _pointer(address: int, operands: list[int]) -> str:
    if not address:
        return "0"
    found = ALLOCATIONS.find(address)
    return "?" if found is None else _operand(*found, operands)  # "?": memory that CuPy did not allocate


def _operand(serial: int, offset: int, operands: list[int]) -> str:
    if serial not in operands:
        operands.append(serial)
    return f"@{operands.index(serial)}+{offset}"


def _bytes(packed: bytes, operands: list[int]) -> str:
    """Bytes as text: tensor maps, addresses, runs of equal words, other words as numbers in base 16."""
    size = len(packed)
    tokens: list[str] = []
    place = 0
    while place + _MAP_BYTES <= size:  # maps come first, in a struct that is aligned for them
        about = _maps.get(packed[place : place + _MAP_BYTES])
        if about is not None:
            tokens.append(f"map({_pointer(about[0], operands)} {about[1]})")
        elif any(packed[place : place + _MAP_BYTES]):
            break
        else:
            tokens += ["0"] * (_MAP_BYTES // 8)  # a map that is not used
        place += _MAP_BYTES
    for word in struct.unpack_from(f"<{(size - place) // 8}Q", packed, place):
        found = ALLOCATIONS.find(word) if word >= _LOWEST_ADDRESS else None
        tokens.append(f"{word:x}" if found is None else _operand(*found, operands))
    if size % 8:
        tokens.append(packed[size - size % 8 :].hex())
    return f"{size}: {' '.join(_runs(tokens))}"


def _runs(tokens: Iterable[str]) -> Iterable[str]:
    """Equal neighbours as one, with their number."""
    last, count = "", 0
    for token in [*tokens, ""]:
        if token == last:
            count += 1
            continue
        if count:
            yield last if count == 1 else f"{last}*{count}"
        last, count = token, 1


# ------------------------------------------------------------------------------------------- tensor maps
#: The 128 bytes of a map -> its address, and what else the driver was given.
_maps: dict[bytes, tuple[int, str]] = {}


def noting(function: Callable[..., int]) -> Callable[..., int]:
    """cuTensorMapEncodeTiled, or a stand-in for it, remembering what each map was made from."""

    def encode(
        result: int, dtype: int, rank: int, pointer: int, dims: Any, strides: Any, box: Any, steps: Any, *how: int
    ) -> int:
        status = function(result, dtype, rank, pointer, dims, strides, box, steps, *how)
        if status == 0:
            lists = (list(dims)[:rank], list(strides)[: rank - 1], list(box)[:rank], list(steps)[:rank], list(how))
            about = f"{dtype} " + " ".join(",".join(map(str, x)) for x in lists)
            _maps[ctypes.string_at(result, _MAP_BYTES)] = (pointer, about)
        return status

    return encode


# ---------------------------------------------------------------------------------------- putting it there
def install(load: Callable[..., Any] | None = None, encode: Callable[[], Callable[..., int]] | None = None) -> None:
    """Log what `jit.load` loads and what `tensor_map` encodes from now on; a stand-in brings its own of both."""
    load_kernel, driver = load or jit.load, encode or tensor_map._driver_function
    kernels: dict[Any, Kernel] = {}
    making = threading.Lock()

    def logged(spec: jit.KernelSpec, arch: str, *, root: Path | None = None) -> Any:
        kernel = load_kernel(spec, arch, root=root)
        with making:  # threads that load the same kernel get the same one
            found = kernels.get((spec, arch, root))
            if found is None or found.kernel is not kernel:
                found = kernels[spec, arch, root] = Kernel(kernel, spec, arch, root)
        return found

    @cache
    def noted() -> Callable[..., int]:
        return noting(driver())

    jit.load = logged
    tensor_map._driver_function = noted


def track_cupy() -> None:
    """Notice every allocation that CuPy makes from now on, in its own pool and in pools that others open."""
    import cupy

    def noticed(pointer: Any) -> Any:
        if pointer.ptr:
            ALLOCATIONS.note(pointer.mem.ptr, pointer.mem.size)
        return pointer

    class MemoryPool(cupy.cuda.MemoryPool):  # type: ignore[misc]
        def malloc(self, size: int) -> Any:
            return noticed(super().malloc(size))

    usual = cupy.get_default_memory_pool()
    cupy.cuda.set_allocator(lambda size: noticed(usual.malloc(size)))
    cupy.cuda.MemoryPool = MemoryPool
