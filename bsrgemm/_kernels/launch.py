"""One launch for all kernels, and one memory of calls.

A `Launch` belongs to a kind of call: everything but the addresses of its operands and its numbers is decided. It can be
started for operands at any addresses that are as aligned, by any thread. `Calls` finds what is known of a kind of call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy
import numpy as np

from . import graphs, jit, workspace
from .card import card
from .kernel import Kernel
from .tensor_map import Layout, aligned_memory
from .workspace import StreamOrdered

#: The most arguments of a launch that are kept filled, and the most kinds of calls that an owner remembers by default.
_MOST_ARGUMENTS, _MOST_CALLS = 64, 128
#: Bytes at multiples of which rooms begin, as CuPy's allocations do.
_ALIGNED = 512


def run(
    kernel: Kernel,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    threads: int | None = None,
    uses: Iterable[Any] = (),
) -> None:
    """Start a kernel once, with arguments that are not kept; `threads` if they are other ones than its own.

    `uses` are the arrays that it reads or writes, or objects that hold them: if a graph is being captured, they live as
    long as the graph. Arrays among `args` need not be named.
    """
    function = loaded(kernel)
    capture = graphs.current()
    if capture is not None:
        capture.keep(*uses, *args)
    function(grid, (threads or kernel.threads,), args, shared_mem=getattr(kernel, "shared_bytes", 0))


def loaded(kernel: Kernel) -> Any:
    """The function of a kernel on the current device, which may have the shared memory that it needs."""
    function = jit.load(kernel.spec(), card().arch)
    shared_bytes = getattr(kernel, "shared_bytes", 0)
    if shared_bytes:
        function.max_dynamic_shared_size_bytes = shared_bytes
    return function


def contiguous(x: Any) -> Any:
    """Return the array if it is C-contiguous, otherwise a C-contiguous copy; kernels read nothing else."""
    return x if x.flags.c_contiguous else cupy.ascontiguousarray(x)


def address(x: Any) -> int:
    """The address of an array; 0 for none."""
    return 0 if x is None else int(x.data.ptr)


class Starter:
    """A kernel on a device that is started with other numbers each time, by any thread.

    Its argument is written over one of an earlier launch, which CuPy has copied when the launch returns.
    """

    __slots__ = ("_free", "_function", "_struct", "_threads", "kernel")

    def __init__(self, kernel: Kernel) -> None:
        (self._struct,), self._function = kernel.structs, loaded(kernel)
        self.kernel: Any = kernel
        self._threads = (kernel.threads,)
        #: arguments that no launch is using
        self._free: list[_Argument] = []

    def start(self, grid: tuple[int, ...], uses: tuple[Any, ...], **values: Any) -> None:
        """Start the kernel on CuPy's current stream with a struct of these values; `uses` are as those of `run`."""
        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():
            graphs.capture_of(stream).keep(*uses)
        try:
            argument = self._free.pop()
        except IndexError:
            argument = _Argument(bytes(self._struct.size), (self._struct.size,))
        self._struct.fill(argument.packed, values)
        self._function(grid, self._threads, argument.parts)
        self._free.append(argument)


class Map(NamedTuple):
    """A tensor map in an argument: of which operand, at which byte, and the map without its address."""

    operand: int
    at: int
    layout: Layout


class Scratch(NamedTuple):
    """Memory that a launch has for itself: so many bytes and counters, and what writes both addresses."""

    bytes: int
    counters: int
    #: called with the argument, the address of the memory, and that of the counters
    write: Callable[[Any, int, int], None]


class _Argument:
    """The bytes of an argument at a fixed place of the host, and for what they were written last."""

    __slots__ = ("address", "addresses", "integers", "numbers", "own", "packed", "parts")

    def __init__(self, template: bytes, sizes: Sequence[int]) -> None:
        self.packed, self.address = aligned_memory(len(template))
        self.packed[:] = template
        bounds = itertools.accumulate(sizes, initial=0)
        self.parts = tuple(jit.argument(self.packed[a:b]) for a, b in itertools.pairwise(bounds))
        #: none yet
        self.addresses: tuple[int, ...] = ()
        self.numbers: Any = None
        #: whether these numbers are integers: equal integers have equal bytes, but 0.0 equals -0.0
        self.integers = False
        self.own: Any = None


class Launch:
    """A kernel that is ready for a kind of call.

    Parameters
    ----------
    kernel : Kernel
        The kernel, which is loaded here.
    grid : tuple of int
        CTAs.
    template : bytes
        The structs that the kernel takes, one behind the other, without addresses of operands, numbers and scratch
        memory.
    pointers, numbers : callable, optional
        ``pointers(to, *addresses)`` writes the addresses of the operands into an argument, of those that it has as
        pointers; ``numbers(to, *numbers)`` the numbers of a call.
    maps : sequence of Map
        The tensor maps of operands.
    scratch : Scratch, optional
        Memory of the launch's own.
    holds : object
        The arrays to which the template points; `StreamOrdered` ones have been waited for by who made this.
    """

    __slots__ = (
        *("_arguments", "_maps", "_numbers", "_pointers", "_scratch", "_sizes", "_template"),
        *("function", "grid", "holds", "kernel", "shared_bytes", "threads"),
    )  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        template: bytes | bytearray,
        *,
        pointers: Callable[..., None] | None = None,
        numbers: Callable[..., None] | None = None,
        maps: Sequence[Map] = (),
        scratch: Scratch | None = None,
        holds: Any = (),
    ) -> None:
        self.kernel, self.function, self.grid, self.holds = kernel, loaded(kernel), grid, holds
        self.threads, self.shared_bytes = (kernel.threads,), getattr(kernel, "shared_bytes", 0)
        self._template, self._sizes = bytes(template), [struct.size for struct in kernel.structs]
        self._pointers, self._numbers, self._maps, self._scratch = pointers, numbers, tuple(maps), scratch
        self._arguments: dict[tuple[int, ...], _Argument] = {}

    def start(self, operands: Sequence[Any], *numbers: Any, may_overlap: Callable[[], Any] | None = None) -> bool:
        """Start the kernel on CuPy's current stream. What its argument points to lives as long as a graph.

        False, and nothing is started, if the addresses are new and `may_overlap`, which is asked then, says that the
        result overlaps an operand.
        """
        addresses = tuple([x.data.ptr for x in operands])
        argument = self._arguments.pop(addresses, None)  # no other thread has it meanwhile
        if argument is None:
            if may_overlap is not None and may_overlap():
                return False
            argument = self._any()
        stream = cupy.cuda.get_current_stream()
        capture = graphs.capture_of(stream) if stream.is_capturing() else None
        if capture is not None:
            capture.keep(self, *operands)
        _memory, own = None, None  # the memory is held until the launch has returned
        if self._scratch is not None:
            _memory, *own = workspace.scratch_of(stream, capture, self._scratch.bytes, self._scratch.counters)
        if (
            argument.addresses != addresses
            or argument.own != own
            or argument.numbers != numbers
            or (numbers and not (argument.integers and type(numbers[0]) is type(numbers[-1]) is int))
        ):
            self._write(argument, addresses, numbers, own)
        self.function(self.grid, self.threads, argument.parts, shared_mem=self.shared_bytes)
        self._arguments[addresses] = argument
        return True

    def _any(self) -> _Argument:
        """An argument that nobody uses: a new one, or the oldest one of those that are kept."""
        if len(self._arguments) >= _MOST_ARGUMENTS:
            try:  # `contextlib.suppress` would take as long as the rest of this
                return self._arguments.pop(next(iter(self._arguments)))
            except (KeyError, RuntimeError, StopIteration):
                pass  # another thread was faster
        return _Argument(self._template, self._sizes)

    def _write(self, to: _Argument, addresses: tuple[int, ...], numbers: tuple[Any, ...], own: Any) -> None:
        before, to.addresses = to.addresses or (0,) * len(addresses), ()  # after an error nothing is known of it
        for operand, at, layout in self._maps:
            if before[operand] != addresses[operand]:
                if before[operand]:
                    layout.move(to.address + at, addresses[operand])
                else:
                    layout.write(to.address + at, addresses[operand])
        if self._pointers is not None:
            self._pointers(to.packed, *addresses)
        if self._numbers is not None:
            self._numbers(to.packed, *numbers)
        if self._scratch is not None:
            self._scratch.write(to.packed, *own)
        to.addresses, to.numbers, to.own = addresses, numbers, own
        to.integers = all([type(x) is int for x in numbers])


class Room:
    """Memory between launches, at `data` as an array has it. An array around it would take the host 2 us."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


class Chain:
    """Launches and copies one after the other, with memory between them.

    Parameters
    ----------
    steps : sequence of callables
        ``step(arrays, *numbers)`` starts a part of the work; the arrays are the operands and then the rooms.
    rooms : sequence of (shape, dtype)
        What each `Room` is for; they live until the last step is started.
    otherwise : callable, optional
        Makes what is started where there is no memory for the rooms. In a capture the error is raised instead: what was
        not prepared would be prepared whenever the graph runs.
    """

    __slots__ = ("_apart", "_bytes", "_otherwise", "_places", "_steps")

    def __init__(
        self, steps: Sequence[Callable[..., Any]], rooms: Sequence[tuple[Any, Any]], otherwise: Any = None
    ) -> None:
        self._steps, self._otherwise = tuple(steps), otherwise
        sizes = (int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in rooms)
        lengths = (-(-size // _ALIGNED) * _ALIGNED for size in sizes)
        #: where the rooms lie in their memory, and where it ends
        *self._places, self._bytes = itertools.accumulate(lengths, initial=0)
        #: addresses of operands of which none overlaps the result
        self._apart: set[tuple[int, ...]] = set()

    def start(self, operands: Sequence[Any], *numbers: Any, may_overlap: Callable[[], Any] | None = None) -> bool:
        """Start all of it on CuPy's current stream; False as `Launch.start` says."""
        if may_overlap is not None:
            addresses = tuple([x.data.ptr for x in operands])
            if addresses not in self._apart:
                if may_overlap():
                    return False
                if len(self._apart) >= _MOST_ARGUMENTS:
                    self._apart.clear()
                self._apart.add(addresses)
        if graphs.is_capturing():
            with graphs.memory(*operands):
                return self._started(operands, numbers)
        return self._started(operands, numbers)

    def _started(self, operands: Sequence[Any], numbers: tuple[Any, ...]) -> bool:
        arrays = tuple(operands)
        if self._places:
            try:
                memory = cupy.cuda.alloc(self._bytes)
            except MemoryError:
                if self._otherwise is None or graphs.is_capturing():
                    raise
                return bool(self._otherwise().start(operands, *numbers))
            arrays += tuple([Room(memory + at) for at in self._places])
        for step in self._steps:
            step(arrays, *numbers)
        return True


@dataclass(frozen=True, slots=True)
class Step:
    """The step of a chain that starts a launch for some of the arrays."""

    launch: Launch
    places: Sequence[int]

    def __call__(self, arrays: Any) -> None:
        self.launch.start([arrays[n] for n in self.places])


class Calls:
    """What is known of kinds of calls, by everything that it depends on. It belongs to a matrix, a mask, or a room."""

    __slots__ = ("_found", "_most", "cleared")

    def __init__(self, most: int = _MOST_CALLS) -> None:
        self._most = most
        self._found: dict[Any, Any] = {}
        #: how often everything was forgotten because the choice of kernels has changed
        self.cleared = 0

    def get(self, key: Any) -> Any:
        """Return what is known of this kind, or None; also for a key that cannot be one."""
        try:
            found = self._found.get(key)
        except TypeError:  # an option is an array or a list
            return None
        return None if found is None else found.get()

    def made(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what is known of this kind, which is made if it is new.

        While a graph is captured it is made for the graph alone, since lists are computed only when the graph runs.
        """
        found = self.get(key)
        if found is None:
            with graphs.memory():
                found = make()
            self.remember(key, found)
        return found

    def remember(self, key: Any, known: Any) -> None:
        """Keep what is known of a kind for the next call, unless a graph is being captured."""
        if not graphs.is_capturing():
            if len(self._found) >= self._most:
                self._found.clear()
            with contextlib.suppress(TypeError):  # an option cannot be looked up
                self._found[key] = StreamOrdered(known)

    def clear(self) -> None:
        """Forget everything at once, so that nobody starts what another choice has replaced."""
        self._found.clear()
        self.cleared += 1
