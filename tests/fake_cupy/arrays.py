"""The array of the fake CuPy, in memory of a card, and what NumPy may see of it.

It refuses `__array__` and NumPy operands, and reductions and single elements stay 0-d arrays. Where CuPy is silent
about a mistake (an index out of range wraps around, a NumPy array slips through ``xp.sort`` unchanged) the fake raises:
no code of ours may depend on it.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES

from . import memory, streams
from .memory import MemoryPointer, allocated, room_of

Scalar = bool | int | float | complex | np.generic
#: Every dtype that CuPy has and we use; long double, object, strings and dates are not among them.
_DTYPES = frozenset((*DEVICE_DTYPES, np.dtype("q"), np.dtype("Q")))
#: The module `cupy`; `functions` and `modules` fill it.
xp = types.ModuleType("cupy")


class _Place:
    """The card on which new arrays are made; `fake_cupy.card.Card` sets it."""

    heap: memory.Heap


place = _Place()


# --------------------------------------------------------------------------------- in and out
def _check_dtype(dtype: Any) -> np.dtype[Any]:
    dtype = np.dtype(dtype)
    if dtype not in _DTYPES:
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


def _wrap(x: Any) -> Any:
    """What NumPy returned, as CuPy returns it: arrays and numbers become arrays, of any dimension."""
    if isinstance(x, tuple | list):
        return type(x)(map(_wrap, x))
    if isinstance(x, np.ndarray | Scalar):
        return ndarray(np.asarray(x))
    return x


def _array(x: Any, name: str = "a") -> np.ndarray[Any, Any]:
    """The memory of a fake array; anything else is refused."""
    if not isinstance(x, ndarray):
        raise TypeError(f"Argument {name!r} has incorrect type (expected a device array, got {type(x)})")
    return x._memory


def _operand(x: Any) -> Any:
    """A fake array or a number for an element-wise function; NumPy arrays, 0-d ones too, are refused."""
    if isinstance(x, ndarray):
        return x._memory
    if isinstance(x, Scalar):
        return x
    raise TypeError(f"Unsupported type {type(x)}")


def _compute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call NumPy without its floating-point warnings, which a GPU does not give."""
    with np.errstate(all="ignore"):
        return function(*args, **kwargs)


def _placed(host: np.ndarray[Any, Any], order: str = "K") -> np.ndarray[Any, Any]:
    """A view of memory of the card as it is; anything else is moved to an allocation of its own."""
    if not host.size or room_of(host) is not None:
        return host
    strides = np.empty_like(host, order=order).strides  # type: ignore[call-overload]
    found: np.ndarray[Any, Any] = allocated(place.heap, host.shape, host.dtype, strides)
    found[...] = host
    return found


def _garbage(dtype: np.dtype[Any]) -> Any:
    """An element as it is in memory that nobody has written to."""
    return np.full(dtype.itemsize, memory.POISON, np.uint8).view(dtype)[0]


def _new(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray[Any, Any]:
    """New memory of the card, whose elements are not set."""
    shape = tuple(map(operator.index, shape)) if isinstance(shape, tuple | list) else (operator.index(shape),)
    dtype = _check_dtype(dtype)
    strides = None
    if order == "F":
        strides = tuple(int(x) for x in dtype.itemsize * np.cumprod([1, *shape[:-1]])) if shape else ()
    found: np.ndarray[Any, Any] = allocated(place.heap, shape, dtype, strides)
    return found


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that brings numbers to the host."""

    @functools.wraps(method)
    def waits(self: Any) -> Any:
        streams.wait(f"ndarray.{method.__name__}")
        return method(self)

    return waits


class _Flags:
    """CuPy's three flags: there is no `writeable`."""

    def __init__(self, flags: Any) -> None:
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.owndata = flags.owndata


# ------------------------------------------------------------------------------------ the array
class ndarray:
    """An array at an address of the card, whose memory NumPy may not look at."""

    __slots__ = ("__weakref__", "_memory")
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"):
        if not isinstance(shape, np.ndarray):  # as CuPy's own constructor has it
            if memptr is not None:
                raise NotImplementedError("an array around memory from elsewhere")
            shape = _new(shape, dtype, order)
        _check_dtype(shape.dtype)
        self._memory = _placed(shape)

    def __array_finalize__(self, source: Any) -> None:
        pass

    def _as(self, kind: type[ndarray], memory: Any) -> ndarray:
        """A view of this array of another class, which is told about it."""
        found = object.__new__(kind)
        found._memory = memory
        found.__array_finalize__(self)
        return found

    def _derived(self, memory: Any) -> ndarray:
        """What a method returns: of the class of this array if it is a view of it, otherwise a plain array."""
        if type(self) is ndarray or not np.may_share_memory(memory, self._memory):
            return ndarray(memory)
        return self._as(type(self), memory)

    # ------------------------------------------------------------------------ the border to NumPy
    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(getattr(x, "__array_priority__", 0) > self.__array_priority__ for x in inputs):
            return NotImplemented
        function = getattr(xp, ufunc.__name__, None)
        if method != "__call__" or function is None or any(isinstance(x, list | tuple | str) for x in inputs):
            return NotImplemented
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        return function(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        function = getattr(xp, func.__name__, None)
        return NotImplemented if function is None else function(*args, **kwargs)

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        streams.wait("ndarray.get")
        if out is None:
            return self._memory.copy(order=order)  # type: ignore[call-overload]
        out[...] = self._memory
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        self._memory[...] = arr

    @_waiting
    def item(self) -> Any:
        return self._memory.item()

    @_waiting
    def tolist(self) -> Any:
        return self._memory.tolist()

    @_waiting
    def __bool__(self) -> bool:
        return bool(self._memory)

    @_waiting
    def __int__(self) -> int:
        return int(self._memory)

    @_waiting
    def __float__(self) -> float:
        return float(self._memory)

    @_waiting
    def __complex__(self) -> complex:
        return complex(self._memory)

    def __len__(self) -> int:
        return len(self._memory)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[k] for k in range(len(self)))

    def __repr__(self) -> str:
        return repr(self._memory)

    def __str__(self) -> str:
        return str(self._memory)

    def __format__(self, spec: str) -> str:
        return format(self._memory, spec)

    def __reduce__(self) -> Any:
        return _from_host, (self.get(),)

    # ------------------------------------------------------------------------------- description
    @property
    def dtype(self) -> np.dtype[Any]:
        return self._memory.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._memory.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self._memory.strides

    @property
    def ndim(self) -> int:
        return self._memory.ndim

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def itemsize(self) -> int:
        return self._memory.itemsize

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

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

    @property
    def flags(self) -> _Flags:
        return _Flags(self._memory.flags)

    @property
    def T(self) -> ndarray:
        return self._derived(self._memory.T)

    @property
    def real(self) -> ndarray:
        return ndarray(self._memory.real) if self.dtype.kind == "c" else self

    @property
    def imag(self) -> ndarray:
        return ndarray(self._memory.imag)

    # ---------------------------------------------------------------------------------- indexing
    def __getitem__(self, key: Any) -> Any:
        parts = _key(key)
        lists = [part for part in parts if isinstance(part, np.ndarray | list)]
        if any(np.asarray(part).dtype == np.bool_ for part in lists):
            streams.wait("an index of booleans")
        found = self._memory[parts]
        if lists:
            found = np.array(found, order="C")  # gathered elements come row by row
        return self._derived(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Elements that an index names twice are garbage afterwards: which value stays is undefined on a card."""
        key = _key(key)
        if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if not self._memory.flags.writeable:  # a broadcast view, which CuPy would write through
            raise ValueError("elements of a broadcast array share memory: writing one writes others")
        value = value._memory if isinstance(value, ndarray) else value
        with np.errstate(all="ignore"):
            self._memory[key] = value
        if np.size(value) > 1 and any(isinstance(k, np.ndarray | list) for k in key):
            written, times = np.unique(np.arange(self.size).reshape(self.shape)[key], return_counts=True)
            if (times > 1).any():
                self._memory[np.unravel_index(written[times > 1], self.shape)] = _garbage(self.dtype)

    # ----------------------------------------------------------------------------------- methods
    def astype(
        self, dtype: Any, order: str = "K", casting: None = None, subok: None = None, copy: bool = True
    ) -> ndarray:
        if casting is not None or subok is not None:
            raise TypeError("casting is not supported yet")
        if not copy and self.dtype == dtype:
            return self
        return ndarray(_compute(self._memory.astype, _check_dtype(dtype), order=order, copy=copy))

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        if isinstance(dtype, _TYPE) and issubclass(dtype, np.ndarray):
            raise TypeError("CuPy crashes when a device array is viewed as a NumPy class")
        memory = self._memory.view() if dtype is None else self._memory.view(_check_dtype(dtype))
        return self._derived(memory) if type is None else self._as(type, memory)

    def copy(self, order: str = "C") -> ndarray:
        return ndarray(self._memory.copy(order=order))

    def fill(self, value: Any) -> None:
        self._memory.fill(_operand(value))

    def put(self, indices: Any, values: Any, mode: str = "wrap") -> None:
        self._memory.put(_operand(indices), _operand(values), mode)

    def sort(self, axis: int = -1) -> None:
        self._memory.sort(axis)

    def partition(self, kth: int, axis: int = -1) -> None:
        self._memory.partition(kth, axis)

    def scatter_add(self, slices: Any, value: Any) -> None:
        np.add.at(self._memory, _key(slices), _operand(value))

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        return self._derived(self._memory.reshape(*shape, order=order))

    def transpose(self, *axes: Any) -> ndarray:
        return self._derived(self._memory.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return self._derived(self._memory.swapaxes(axis1, axis2))

    def ravel(self, order: str = "C") -> ndarray:
        return self._derived(self._memory.ravel(order))

    def flatten(self, order: str = "C") -> ndarray:
        return ndarray(self._memory.flatten(order))

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._derived(self._memory.squeeze(axis))

    def conj(self) -> ndarray:
        return ndarray(self._memory.conj())

    conjugate = conj

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return xp.sum(self, axis, dtype, out, keepdims)

    def prod(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return xp.prod(self, axis, dtype, out, keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return xp.mean(self, axis, dtype, out, keepdims)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return xp.any(self, axis, out, keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return xp.all(self, axis, out, keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return xp.max(self, axis, out, keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return xp.min(self, axis, out, keepdims)

    def cumsum(self, axis: Any = None, dtype: Any = None, out: Any = None) -> ndarray:
        return xp.cumsum(self, axis, dtype, out)

    def nonzero(self) -> tuple[ndarray, ...]:
        return xp.nonzero(self)

    def argmax(self, axis: Any = None) -> Any:
        return xp.argmax(self, axis)

    def argsort(self, axis: int = -1, kind: str | None = None) -> ndarray:
        return xp.argsort(self, axis, kind)

    def take(self, indices: Any, axis: Any = None, out: Any = None) -> ndarray:
        return xp.take(self, indices, axis, out)

    def repeat(self, repeats: Any, axis: Any = None) -> ndarray:
        return xp.repeat(self, repeats, axis)

    def round(self, decimals: int = 0, out: Any = None) -> ndarray:
        return xp.around(self, decimals, out)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> ndarray:
        return ndarray(self._memory.diagonal(offset, axis1, axis2).copy())

    def dot(self, b: Any, out: Any = None) -> ndarray:
        return _wrap(self._memory.dot(_array(b, "b")))


_TYPE = type


def _key(key: Any) -> tuple[Any, ...]:
    """An index for NumPy that always gives an array, a view where CuPy gives one."""
    parts = tuple(_key_part(part) for part in (key if isinstance(key, tuple) else (key,)))
    return parts if any(part is Ellipsis for part in parts) else (*parts, ...)


def _key_part(part: Any) -> Any:
    if isinstance(part, ndarray):
        return part._memory
    if isinstance(part, slice):
        bounds = (part.start, part.stop, part.step)
        return slice(*(int(x) if isinstance(x, ndarray) else x for x in bounds))
    return part


def untouched(shape: tuple[int, ...], dtype: Any) -> ndarray:
    """Zeros in memory that is only there where it is written to."""
    room = place.heap.untouched(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return ndarray(np.ndarray(shape, dtype, room))


def unwrapped(x: Any) -> Any:
    """The memory of an array, and of those in lists and tuples."""
    if isinstance(x, ndarray):
        return x._memory
    if isinstance(x, tuple | list):
        return type(x)(map(unwrapped, x))
    return x


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A NumPy function on memory of the card."""
    with np.errstate(all="ignore"):
        result = function(*map(unwrapped, args), **{name: unwrapped(x) for name, x in kwargs.items()})
    return kwargs["out"] if kwargs.get("out") is not None else _wrap(result)


def _from_host(x: Any, dtype: Any = None) -> ndarray:
    """Copy to the device, in native byte order."""
    host = np.array(x, dtype=dtype)
    return ndarray(host if host.dtype == BFLOAT16 else host.astype(host.dtype.newbyteorder("="), copy=False))
