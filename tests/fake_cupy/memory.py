"""The memory of the fake card: pools that give freed memory to whoever asks next, with a guard page at each allocation.

Every allocation lies in pages of its own, beside a page that ends the process when a kernel touches it. Fresh and freed
memory holds 0xFF in every byte: NaN in each type of floats, -1 in each type of integers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

#: What memory holds that nobody has written to, and what it holds once its owner is gone.
POISON = 0xFF
#: What the bytes of a bystander hold.
BYSTANDER = 0x07
#: Kernels read in pieces of so many bytes, so that an allocation begins and ends at a multiple of it.
_UNIT = 16
_PAGE = mmap.PAGESIZE


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class OutOfMemory(MemoryError):
    """The card has no room for an allocation."""


class Memory:
    """An allocation: `ptr`, `size` and `device_id` as those of CuPy's pool."""

    __slots__ = ("device_id", "ptr", "size")

    def __init__(self, ptr: int, size: int, device_id: int) -> None:
        self.ptr, self.size, self.device_id = ptr, size, device_id


class MemoryPointer:
    """An address in an allocation, which lives as long."""

    __slots__ = ("device_id", "mem", "ptr", "room")

    def __init__(self, mem: Memory, ptr: int, room: Any = None) -> None:
        self.mem, self.ptr, self.device_id, self.room = mem, ptr, mem.device_id, room

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr + offset, self.room)


class Heap:
    """All memory of one card. `before`: the guard page lies before an allocation, not after it."""

    def __init__(self, device_id: int, before: bool = False) -> None:
        self.device_id, self.before, self.closed = device_id, before, False
        self.pool = Pool(self)
        self._replays = Pool(self)
        #: no allocation may have more
        self.most_bytes = 1 << 30
        #: by address: the pages of an allocation and their number of bytes
        self._pages: dict[int, tuple[int, int]] = {}
        self._live: set[int] = set()

    def mapped(self, size: int) -> int:
        """The address of new memory of `size` bytes beside a guard page."""
        body = -(-size // _PAGE) * _PAGE
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        first = _libc.mmap(None, body + _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, anonymous, -1, 0)
        if first in (None, ctypes.c_void_p(-1).value):
            raise OutOfMemory(f"{size} bytes")
        guard = first if self.before else first + body
        if _libc.mprotect(guard, _PAGE, 0):  # a process has a limited number of mappings
            _libc.munmap(first, body + _PAGE)
            raise OutOfMemory(f"{size} bytes: mprotect ends with errno {ctypes.get_errno()}")
        address: int = first + _PAGE if self.before else first + body - size
        self._pages[address] = (first, body + _PAGE)
        return address

    def room(self, size: int, pool: Pool) -> Any:
        """New memory of the pool: an object that gives it back when nobody holds it any more."""
        if self.closed:  # its free memory is no longer mapped
            raise RuntimeError(f"{size} bytes are wanted of card {self.device_id}, which is closed")
        if size > self.most_bytes:
            raise OutOfMemory(f"{size} bytes")
        rounded = -(-size // _UNIT) * _UNIT
        address = pool.take(rounded)
        self._live.add(address)
        found = (ctypes.c_char * rounded).from_address(address)
        found.memory = Memory(address, rounded, self.device_id)
        weakref.finalize(found, self._freed, address, rounded, pool).atexit = False
        return found

    def untouched(self, size: int) -> Any:
        """Zeros in pages that the machine provides when they are first written to; they are there until the end."""
        room: Any = (ctypes.c_char * size).from_address(self.mapped(size))
        room.memory = Memory(ctypes.addressof(room), size, self.device_id)
        return room

    def of_replays(self, size: int) -> MemoryPointer:
        """Memory for what a graph computes before it goes to its place."""
        room = self.room(size, self._replays)
        return MemoryPointer(room.memory, room.memory.ptr, room)

    def _freed(self, address: int, size: int, pool: Pool) -> None:
        self._live.discard(address)
        if self.closed:
            self._unmap(address)
        else:
            pool.give(address, size)

    def _unmap(self, address: int) -> None:
        pages = self._pages.pop(address, None)
        if pages is not None:  # the garbage collector may have come first, while the card is closed
            _libc.munmap(*pages)

    def close(self) -> None:
        """Give all memory back to the machine; what is still held loses its contents."""
        self.closed = True
        for address, (first, size) in list(self._pages.items()):
            if address in self._live:
                _libc.madvise(first, size, mmap.MADV_DONTNEED)
            else:
                self._unmap(address)


class Pool:
    """Freed memory by its size, the last one freed first, as CuPy's pool hands it out again."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self._free: dict[int, list[int]] = {}
        self.used = 0

    def take(self, size: int) -> int:
        same = self._free.get(size)
        address = same.pop() if same else self.heap.mapped(size)
        ctypes.memset(address, POISON, size)
        self.used += size
        return address

    def give(self, address: int, size: int) -> None:
        ctypes.memset(address, POISON, size)
        self._free.setdefault(size, []).append(address)
        self.used -= size

    def free(self) -> list[tuple[int, int]]:
        """Address and size of all that this pool has and nobody uses."""
        return [(address, size) for size, same in self._free.items() for address in same]

    def given_up(self) -> None:
        """The pool is gone: its memory goes to whoever asks next."""
        if self is self.heap.pool:
            return
        for address, size in self.free():
            self.heap.pool._free.setdefault(size, []).append(address)
        self._free.clear()


class Bystanders:
    """Arrays of others in all memory that is free now: a graph that still uses such memory writes into them."""

    def __init__(self, heap: Heap) -> None:
        self._rooms = [heap.room(size, heap.pool) for _, size in heap.pool.free()]
        for room in self._rooms:
            ctypes.memset(ctypes.addressof(room), BYSTANDER, len(room))

    def intact(self) -> bool:
        """Has nobody written to them?"""
        return all(bytes(room) == bytes([BYSTANDER]) * len(room) for room in self._rooms)


class _Current(threading.local):
    """In each thread, what allocates memory; None for the pool of the card."""

    allocator: Callable[[int], MemoryPointer] | None = None


_current = _Current()


class UnownedMemory(Memory):
    """`cupy.cuda.UnownedMemory`: memory that an object owns, which lives as long."""

    __slots__ = ("owner",)

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        super().__init__(ptr, size, device_id)
        self.owner = owner


def pointing(mem: Memory, offset: int) -> MemoryPointer:
    """`cupy.cuda.MemoryPointer`: a place in memory; whoever has it keeps the memory."""
    room = (ctypes.c_char * (mem.size - offset)).from_address(mem.ptr + offset)
    room.memory = mem
    return MemoryPointer(mem, mem.ptr + offset, room)


class MemoryPool:
    """`cupy.cuda.MemoryPool`: memory that it has is used by its own arrays alone, as long as the pool is there."""

    def __init__(self, heap: Heap, of_card: bool = False) -> None:
        self.pool = heap.pool if of_card else Pool(heap)
        if not of_card:
            weakref.finalize(self, self.pool.given_up).atexit = False

    def malloc(self, size: int) -> MemoryPointer:
        room = self.pool.heap.room(size, self.pool)
        return MemoryPointer(room.memory, room.memory.ptr, room)

    def free_all_blocks(self, *_: Any, **__: Any) -> None:
        self.pool.given_up()

    def used_bytes(self) -> int:
        return self.pool.used

    def total_bytes(self) -> int:
        return self.pool.used + sum(size for _, size in self.pool.free())


@contextlib.contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> Iterator[None]:
    """`cupy.cuda.using_allocator`: inside, this thread's memory comes from there."""
    before, _current.allocator = _current.allocator, allocator
    try:
        yield
    finally:
        _current.allocator = before


def pointer(heap: Heap, size: int) -> MemoryPointer:
    """`cupy.cuda.alloc`: memory without an array around it."""
    if _current.allocator is not None:
        return _current.allocator(size)
    room = heap.room(max(1, size), heap.pool)
    return MemoryPointer(room.memory, room.memory.ptr, room)


def pinned(size: int) -> Any:
    """`cupy.cuda.alloc_pinned_memory`: memory of the host that kernels can write into."""
    room = (ctypes.c_char * size)()
    room.ptr = ctypes.addressof(room)
    return room


def allocated(heap: Heap, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> Any:
    """A NumPy array in new memory of the card, whose elements are not set."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.ndarray(shape, dtype, pointer(heap, size).room, 0, strides) if size else np.empty(shape, dtype)


def room_of(memory: Any) -> Any:
    """The room in which a NumPy array lies; None if it is not in memory of a card."""
    while isinstance(memory, np.ndarray):
        memory = memory.base
    return memory if hasattr(memory, "memory") else None


def foreign(memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elements that another library has on the card, where they are."""
    address = memory.ctypes.data
    room: Any = (ctypes.c_char * memory.nbytes).from_address(address)
    room.memory = UnownedMemory(address, memory.nbytes, memory)
    return np.ndarray(memory.shape, memory.dtype, room, 0, memory.strides)


def unowned(memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same elements of the card, which may be freed: what a captured graph knows of them."""
    room = room_of(memory)
    if room is None:
        return memory.copy()
    again = type(room).from_address(ctypes.addressof(room))
    again.memory = room.memory
    offset = memory.__array_interface__["data"][0] - room.memory.ptr
    return np.ndarray(memory.shape, memory.dtype, again, offset, memory.strides)
