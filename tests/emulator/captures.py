"""Captures of graphs in the emulator, in memory of which it is known who holds it.

What nobody holds any more is overwritten, as by the next array that CuPy's pool gives this memory to. In a capture,
kernels are recorded with their arguments instead of being run. A replay runs them in a process of its own, which an
error may end.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from cupy.cuda import MemoryPointer, UnownedMemory

from bsrgemm._kernels import graphs, jit

from . import emulator
from .emulator import Array

#: What memory is overwritten with that nobody holds.
OF_OTHERS = 0x77


class Room:
    """A piece of memory; whoever needs it holds this object."""

    def __init__(self, address: int) -> None:
        self.address = address


class Pool:
    """A pool of CuPy's: memory that is in use belongs to others as soon as nobody holds the pool."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._rooms: list[Room] = []
        self._free: dict[int, list[int]] = {}

    def malloc(self, size: int) -> Any:
        free = self._free.setdefault(size, [])
        if not free:
            self._rooms.append(self._memory.room(size))
            free.append(self._rooms[-1].address)
        piece = Room(free.pop())
        weakref.finalize(piece, free.append, piece.address)
        return MemoryPointer(UnownedMemory(piece.address, size, piece, 0), 0)


class _Allocated(np.ndarray[Any, Any]):
    """Bytes that hold the allocation they are in."""

    allocation: Any


class Memory:
    """The memory of a card; `cuda` is what `cupy.cuda` has for it."""

    def __init__(self, size: int = 1 << 26) -> None:
        self._bytes = np.zeros(size, np.uint8)
        self._used = -self._bytes.ctypes.data % 256
        #: sizes of what nobody holds any more, by address
        self.freed: dict[int, int] = {}
        self._allocator = self._usual
        self.cuda = SimpleNamespace(
            MemoryPool=lambda: Pool(self),
            MemoryPointer=MemoryPointer,
            UnownedMemory=UnownedMemory,
            using_allocator=self._using,
            alloc=lambda size: self._allocator(size),
        )

    def room(self, size: int) -> Room:
        first, self._used = self._used, self._used + -(-max(1, size) // 256) * 256
        assert self._used <= len(self._bytes), "the memory of this card is too small for the test"
        found = Room(self._bytes.ctypes.data + first)
        weakref.finalize(found, self._freed, found.address, size)
        return found

    def put(self, x: Any) -> Array:
        """An array with these elements, in memory that is allocated as an array of CuPy is now."""
        x = np.asarray(x)
        memory = self._allocator(x.nbytes)
        room = self._at(memory.ptr, x.nbytes).view(_Allocated)
        room.allocation = memory.mem
        out = room.view(x.dtype).reshape(x.shape).view(Array)
        out[...] = x
        return out

    def of_others(self) -> bool:
        """Whether what nobody holds is still as it was left."""
        return all((self._at(address, size) == OF_OTHERS).all() for address, size in self.freed.items())

    def _usual(self, size: int) -> Any:
        room = self.room(size)
        return MemoryPointer(UnownedMemory(room.address, size, room, 0), 0)

    @contextmanager
    def _using(self, allocator: Any) -> Iterator[None]:
        before, self._allocator = self._allocator, allocator
        try:
            yield
        finally:
            self._allocator = before

    def _freed(self, address: int, size: int) -> None:
        self._at(address, size)[...] = OF_OTHERS
        self.freed[address] = size

    def _at(self, address: int, size: int) -> Any:
        first = address - self._bytes.ctypes.data
        return self._bytes[first : first + size]


class Card:
    """A card in the emulator whose stream can be captured."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.put = self.memory.put
        self._capturing = False
        self._recorded: list[tuple[str, Any, tuple[Any, ...], list[bytes], dict[str, Any]]] = []

    @contextmanager
    def emulated(self, arch: str) -> Iterator[Card]:
        with emulator.emulated(emulator.builds(), put=self.put, arch=arch):
            load = jit.load
            cuda = graphs.cupy.cuda
            vars(cuda).update(vars(self.memory.cuda))
            vars(graphs.cupy).update(negative=np.negative, split=np.split)  # these are done at once, also in a capture
            cuda.get_current_stream().is_capturing = lambda: self._capturing
            with patch.object(jit, "load", lambda spec, arch: self._recording(spec.entry, load(spec, arch))):
                yield self

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def dangling(self) -> list[str]:
        """The recorded kernels with an argument that points to memory nobody holds."""
        gc.collect()
        starts = np.array(sorted(self.memory.freed), np.uint64)
        ends = starts + np.array([self.memory.freed[int(x)] for x in starts], np.uint64)

        def points_there(argument: bytes) -> bool:
            words = np.frombuffer(argument[: len(argument) // 8 * 8], np.uint64)
            return bool(((words[:, None] >= starts) & (words[:, None] < ends)).any())

        return [entry for entry, _, _, arguments, _ in self._recorded if any(map(points_there, arguments))]

    def replays(self, check: Callable[[], bool]) -> bool:
        """Whether a replay ends, nobody's memory is written to, and `check` is then true."""
        gc.collect()
        child = os.fork()
        if not child:
            done = False
            try:
                for _, kernel, places, arguments, options in self._recorded:
                    kernel(*places, tuple(np.frombuffer(x, f"V{len(x)}")[0] for x in arguments), **options)
                done = check() and self.memory.of_others()
            finally:
                os._exit(not done)
        return os.waitpid(child, 0)[1] == 0

    def _recording(self, entry: str, kernel: Any) -> Any:
        def start(grid: Any, threads: Any, args: tuple[Any, ...], **options: Any) -> None:
            if self._capturing:
                arguments = [np.array(emulator.Kernel._bytes(x)).tobytes() for x in args]
                self._recorded.append((entry, kernel, (grid, threads), arguments, options))
            else:
                kernel(grid, threads, args, **options)

        return start
