"""The array of the fake CuPy: that of tests/fake_device in memory of a card, whose work a captured graph repeats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from .. import fake_device
from . import memory, streams
from .memory import MemoryPointer, allocated, room_of, unowned


class _Place:
    """The card on which new arrays are made; `fake_cupy.card.Card` sets it."""

    heap: memory.Heap


place = _Place()


def _placed(host: np.ndarray[Any, Any], order: str = "K") -> np.ndarray[Any, Any]:
    """A view of memory of the card as it is; anything else is moved to an allocation of its own."""
    if not host.size or room_of(host) is not None:
        return host
    strides = np.empty_like(host, order=order).strides  # type: ignore[call-overload]
    found: np.ndarray[Any, Any] = allocated(place.heap, host.shape, host.dtype, strides)
    found[...] = host
    return found


def _waits(name: str) -> Callable[..., Any]:
    """A method that brings numbers to the host."""
    plain = getattr(fake_device.ndarray, name)

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        streams.wait(f"ndarray.{name}")
        return plain(self, *args, **kwargs)

    return method


class ndarray(fake_device.ndarray):
    """An array at an address of the card."""

    __slots__ = ("__weakref__",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"):
        if not isinstance(shape, np.ndarray):  # as CuPy's own constructor has it
            if memptr is not None:
                raise NotImplementedError("an array around memory from elsewhere")
            shape = _new(shape, dtype, order)
        super().__init__(_placed(shape))

    @property
    def data(self) -> MemoryPointer:
        room = room_of(self._memory)
        if room is None:  # without elements
            return MemoryPointer(memory.Memory(0, 0, place.heap.device_id), 0)
        return MemoryPointer(room.memory, self._memory.__array_interface__["data"][0], room)

    @property
    def base(self) -> Any:
        return None if self._memory.base is room_of(self._memory) else self

    @property
    def device(self) -> Any:
        import cupy

        return cupy.cuda.Device(place.heap.device_id)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "version": 3,
        }

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("DLPack of device memory")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __getitem__(self, key: Any) -> Any:
        parts = fake_device.arrays._key(key)
        lists = [part for part in parts if isinstance(part, np.ndarray | list)]
        if any(np.asarray(part).dtype == np.bool_ for part in lists):
            streams.wait("an index of booleans")
        found = self._memory[parts]
        if lists:
            found = np.array(found, order="C")  # gathered elements come row by row
        return self._derived(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Elements that an index names twice are garbage afterwards: which value stays is undefined on a card."""
        parts = fake_device.arrays._key(key)
        if getattr(value, "size", 1) == 1 or not any(isinstance(part, np.ndarray | list) for part in parts):
            super().__setitem__(key, value)
            return
        written, times = np.unique(np.arange(self.size).reshape(self.shape)[parts], return_counts=True)
        if (times == 1).all():
            super().__setitem__(key, value)
            return
        self._memory[parts] = fake_device.arrays._array(value, "value")
        self._memory[np.unravel_index(written[times > 1], self.shape)] = _garbage(self.dtype)

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        streams.wait("ndarray.get")
        if out is None:
            return super().get(stream, order)
        out[...] = self._memory
        return out

    def argmax(self, axis: Any = None) -> Any:
        return fake_device.arrays.xp.argmax(self, axis)

    for _name in ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__"):
        locals()[_name] = _waits(_name)


def _garbage(dtype: np.dtype[Any]) -> Any:
    """An element as it is in memory that nobody has written to."""
    return np.full(dtype.itemsize, memory.POISON, np.uint8).view(dtype)[0]


def _new(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray[Any, Any]:
    """New memory of the card, whose elements are not set."""
    shape = tuple(int(n) for n in shape) if isinstance(shape, tuple | list) else (int(shape),)
    dtype = fake_device.arrays._check_dtype(dtype)
    strides = None
    if order == "F":
        strides = tuple(int(x) for x in dtype.itemsize * np.cumprod([1, *shape[:-1]])) if shape else ()
    found: np.ndarray[Any, Any] = allocated(place.heap, shape, dtype, strides)
    return found


def unwrapped(x: Any) -> Any:
    """The memory of an array, and of those in lists and tuples."""
    if isinstance(x, fake_device.ndarray):
        return x._memory
    if isinstance(x, tuple | list):
        return type(x)(map(unwrapped, x))
    return x


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A NumPy function on memory of the card."""
    with np.errstate(all="ignore"):
        result = function(*map(unwrapped, args), **{name: unwrapped(x) for name, x in kwargs.items()})
    return kwargs["out"] if kwargs.get("out") is not None else fake_device.arrays._wrap(result)


# ------------------------------------------------------------------------------------- work of a captured graph
def _arrays(x: Any) -> Iterator[Any]:
    if isinstance(x, fake_device.ndarray):
        yield x
    elif isinstance(x, tuple | list):
        for part in x:
            yield from _arrays(part)


def _repeated(x: Any) -> Any:
    """An argument as a graph keeps it: where an array lies, not the array."""
    if isinstance(x, fake_device.ndarray):
        found = object.__new__(ndarray)
        found._memory = unowned(x._memory)
        return found
    if isinstance(x, tuple | list):
        return type(x)(map(_repeated, x))
    return x


def recorded(function: Callable[..., Any], writes: bool = False) -> Callable[..., Any]:
    """A function of arrays that does its work at once, or each time when the graph runs that is being captured.

    In a capture it is called once to see what it returns; then its operands are as they were, and its result is not
    set. `writes`: it changes an operand.
    """

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        steps = streams.captured_steps()
        if steps is None:
            return function(*args, **kwargs)
        operands = list(_arrays((*args, *kwargs.values())))
        before = [x._memory.copy() for x in operands]
        with streams.at_once():
            result = function(*args, **kwargs)
        for x, old in zip(operands, before, strict=True):
            if x._memory.flags.writeable:
                x._memory[...] = old
        made = list(_arrays(result))
        fresh = [x for x in made if not any(room_of(x._memory) is room_of(y._memory) for y in operands)]
        if fresh or writes or kwargs.get("out") is not None or len(args) > getattr(function, "nin", len(args)):
            again = [_repeated(x) for x in args], {name: _repeated(x) for name, x in kwargs.items()}
            targets = [unowned(x._memory) for x in fresh]
            places = [k for k, x in enumerate(made) if any(x is y for y in fresh)]

            def step() -> None:
                with memory.using_allocator(place.heap.of_replays):  # not where the graph has its own arrays
                    found = list(_arrays(function(*again[0], **again[1])))
                for k, target in zip(places, targets, strict=True):
                    target[...] = found[k]._memory

            steps.append(step)
            for x in fresh:
                x._memory[...] = _garbage(x.dtype)
        return result

    return method


#: Methods that change the array, and methods that return another one; both are steps of a graph.
_WRITING = (
    *("__setitem__", "fill", "put", "sort", "partition", "scatter_add", "set"),
    *(f"__i{name}__" for name in fake_device.arrays._OPERATORS),
)
_MAKING = (
    *("__getitem__", "astype", "copy", "flatten", "ravel", "reshape", "conj", "conjugate", "diagonal", "dot"),
    *("real", "imag"),
)
for _name in _WRITING:
    if hasattr(ndarray, _name):
        setattr(ndarray, _name, recorded(getattr(ndarray, _name), writes=True))
for _name in _MAKING:
    _found = getattr(ndarray, _name)
    if isinstance(_found, property):
        continue  # views
    setattr(ndarray, _name, recorded(_found))
