"""A NumPy that behaves like CuPy: the array code that passes on it is the code that runs on a GPU.

`ndarray` refuses `__array__` and NumPy operands, reductions and single elements stay 0-d arrays, and `xp`
offers only names, keywords and dtypes that CuPy has. Where CuPy is silent about a mistake (an index out of
range wraps around, a duplicate index in an assignment leaves the winner open, a NumPy array slips through
``xp.sort`` unchanged) the fake raises: no code of ours may depend on it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import scipy.sparse

from bsrgemm._attention import append_host
from bsrgemm._attention import host as attention_host
from bsrgemm._attention.append import APPEND_ENGINES, AppendCall, AppendEngine
from bsrgemm._attention.call import AttentionCall, BackwardCall, DecodeCall
from bsrgemm._attention.engine import ENGINES as ATTENTION_ENGINES
from bsrgemm._attention.engine import AttentionEngine
from bsrgemm._backend import registry, structure
from bsrgemm._backend.base import Backend, Blocks
from bsrgemm._backend.index_arrays import watched_class
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import host as products_host
from bsrgemm._products.call import ProductCall
from bsrgemm._products.engine import ENGINES as PRODUCT_ENGINES
from bsrgemm._products.engine import ProductEngine
from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES

Scalar = bool | int | float | complex | np.generic
#: Every dtype that CuPy has and we use; long double, object, strings and dates are not among them.
_DTYPES = frozenset((*DEVICE_DTYPES, np.dtype("q"), np.dtype("Q")))


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


class _Flags:
    """CuPy's three flags: there is no `writeable`."""

    def __init__(self, flags: Any) -> None:
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.owndata = flags.owndata


# ------------------------------------------------------------------------------------ the array
class ndarray:
    """An array whose memory NumPy may not look at."""

    __slots__ = ("_memory",)
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        _check_dtype(memory.dtype)
        # Views of a broadcast array are writeable in CuPy; the memory itself is never shared with the host.
        self._memory = memory

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

    def get(self, stream: Any = None, order: str = "C") -> np.ndarray[Any, Any]:
        return self._memory.copy(order=order)

    def set(self, arr: Any, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        self._memory[...] = arr

    def item(self) -> Any:
        return self._memory.item()

    def tolist(self) -> Any:
        return self._memory.tolist()

    def __bool__(self) -> bool:
        return bool(self._memory)

    def __int__(self) -> int:
        return int(self._memory)

    def __float__(self) -> float:
        return float(self._memory)

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
    def __getitem__(self, key: Any) -> ndarray:
        return self._derived(self._memory[_key(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        key = _key(key)
        if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        value = value._memory if isinstance(value, ndarray) else value
        if np.size(value) > 1 and any(isinstance(k, np.ndarray | list) for k in key):
            written = np.arange(self.size).reshape(self.shape)[key]
            if len(np.unique(written)) != written.size:
                raise IndexError("an index occurs twice: which value stays is undefined on a device")
        if not self._memory.flags.writeable:  # a broadcast view, which CuPy would write through
            raise ValueError("elements of a broadcast array share memory: writing one writes others")
        with np.errstate(all="ignore"):
            self._memory[key] = value

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


def _comparison(ufunc: str) -> Callable[[Any, Any], Any]:
    """Alone among the operators it takes a 0-d NumPy array as the other operand."""
    compare = _binary(ufunc, swapped=False)

    def method(self: ndarray, other: Any) -> Any:
        return compare(self, other[()] if isinstance(other, np.ndarray) and not other.ndim else other)

    return method


def _binary(ufunc: str, swapped: bool) -> Callable[[Any, Any], Any]:
    def method(self: ndarray, other: Any) -> Any:
        if getattr(other, "__array_priority__", 0) > self.__array_priority__:
            return NotImplemented
        function = getattr(xp, ufunc)
        return function(other, self) if swapped else function(self, other)

    return method


def _inplace(ufunc: str) -> Callable[[Any, Any], Any]:
    def method(self: ndarray, other: Any) -> Any:
        _compute(getattr(np, ufunc), self._memory, _operand(other), out=self._memory)
        return self

    return method


_OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
}
for _name, _ufunc in _OPERATORS.items():
    setattr(ndarray, f"__{_name}__", _binary(_ufunc, swapped=False))
    setattr(ndarray, f"__r{_name}__", _binary(_ufunc, swapped=True))
    setattr(ndarray, f"__i{_name}__", _inplace(_ufunc))
for _name, _ufunc in {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}.items():
    setattr(ndarray, f"__{_name}__", _comparison(_ufunc))
for _name, _ufunc in {"neg": "negative", "abs": "absolute", "invert": "invert"}.items():
    setattr(ndarray, f"__{_name}__", (lambda ufunc: lambda self: getattr(xp, ufunc)(self))(_ufunc))


# ----------------------------------------------------------------------------------- the module
class _Module(types.ModuleType):
    """An array module with a submodule."""

    linalg = types.ModuleType("fake.linalg", "The part of cupy.linalg that the package may use.")


xp = _Module("fake", "The part of CuPy's interface that the package may use, over `ndarray`.")
xp.ndarray = ndarray  # type: ignore[attr-defined]

#: Element-wise functions: ``f(*operands, out=None, dtype=None)``; no `where`, `at`, `reduceat`.
UFUNCS = tuple(
    name
    for names in (
        "add subtract multiply true_divide divide floor_divide remainder power matmul negative absolute abs",
        "bitwise_and bitwise_or bitwise_xor left_shift right_shift invert logical_and logical_or logical_not",
        "equal not_equal less less_equal greater greater_equal maximum minimum fmax fmin",
        "isfinite isnan isinf conjugate conj sin cos tan arcsin arctan sinh tanh arcsinh arctanh exp expm1",
        "log log1p deg2rad rad2deg rint floor ceil trunc sign sqrt square",
    )
    for name in names.split()
)

#: CuPy's parameters of the other functions, in order; the first is an array unless `_SPECIAL` says otherwise.
FUNCTIONS = {
    "all": "a axis out keepdims",
    "any": "a axis out keepdims",
    "arange": "start stop step dtype",
    "argmax": "a axis dtype out keepdims",
    "argmin": "a axis dtype out keepdims",
    "argsort": "a axis kind",
    "around": "a decimals out",
    "array": "obj dtype copy order subok ndmin",
    "asarray": "a dtype order copy",
    "ascontiguousarray": "a dtype",
    "atleast_2d": "ary",
    "bincount": "x weights minlength",
    "broadcast_to": "array shape",
    "can_cast": "from_ to casting",
    "concatenate": "tup axis out dtype casting",
    "count_nonzero": "a axis",
    "cumsum": "a axis dtype out",
    "diff": "a n axis prepend append",
    "empty": "shape dtype order",
    "empty_like": "prototype dtype order subok shape",
    "flatnonzero": "a",
    "full": "shape fill_value dtype order",
    "isscalar": "element",
    "max": "a axis out keepdims",
    "may_share_memory": "a b max_work",
    "mean": "a axis dtype out keepdims",
    "min": "a axis out keepdims",
    "nanmax": "a axis out keepdims",
    "nanmin": "a axis out keepdims",
    "ndim": "a",
    "nonzero": "a",
    "ones": "shape dtype order",
    "prod": "a axis dtype out keepdims",
    "ravel": "a order",
    "repeat": "a repeats axis",
    "reshape": "a newshape order",
    "result_type": "arrays_and_dtypes",
    "searchsorted": "a v side sorter",
    "shape": "a",
    "size": "a",
    "sort": "a axis kind",
    "stack": "tup axis out dtype casting",
    "sum": "a axis dtype out keepdims",
    "take": "a indices axis out",
    "transpose": "a axes",
    "unique": "ar return_index return_inverse return_counts axis equal_nan",
    "where": "condition x y",
    "zeros": "shape dtype order",
    "zeros_like": "a dtype order subok shape",
}

#: Functions of `xp.linalg`, each of an array alone. CuPy does not raise for singular matrices, and leaves open what
#: their inverses hold: here NumPy raises. float16 is refused by both, bfloat16 by the fake alone.
LINALG = ("inv", "slogdet")


def _from_host(x: Any, dtype: Any = None) -> ndarray:
    """Copy to the device, in native byte order."""
    host = np.array(x, dtype=dtype)
    return ndarray(host if host.dtype == BFLOAT16 else host.astype(host.dtype.newbyteorder("="), copy=False))


def _asarray(a: Any, dtype: Any = None, order: Any = None, copy: bool | None = None) -> ndarray:
    if isinstance(a, ndarray):
        same = dtype is None or np.dtype(dtype) == a.dtype
        return (a.copy() if copy else a) if same else a.astype(dtype)
    if isinstance(a, list | tuple) and a and all(isinstance(x, ndarray) for x in a):
        return _from_host(np.stack([x._memory for x in a]), dtype)
    return _from_host(a, dtype)


def _ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    _array(a)
    return a if a.flags.c_contiguous and dtype is None else ndarray(np.ascontiguousarray(a._memory, dtype))


def _created(name: str) -> Callable[..., ndarray]:
    def create(shape: Any, *args: Any, **kwargs: Any) -> ndarray:
        return ndarray(getattr(np, name)(shape, *args, **kwargs))

    return create


def _full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    return ndarray(np.full(shape, _operand(fill_value), dtype, order))


def _sorting(name: str) -> Callable[..., ndarray]:
    def sort(a: Any, axis: int = -1, kind: str | None = None) -> ndarray:
        if kind not in (None, "stable"):
            raise ValueError("kind can only be None or 'stable'")
        if _array(a).dtype == BFLOAT16:
            raise NotImplementedError("Sorting arrays with dtype 'bfloat16' is not supported")
        return ndarray(getattr(np, name)(_array(a), axis=axis, kind="stable"))

    return sort


def _searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> ndarray:
    if not isinstance(a, ndarray):
        raise NotImplementedError("Only int or ndarray are supported for a")
    if not isinstance(v, ndarray) and (isinstance(v, np.generic) or not isinstance(v, int | float | complex)):
        raise NotImplementedError("Only python scalars or ndarrays are supported for v")
    return _wrap(np.searchsorted(a._memory, _operand(v), side, None if sorter is None else _array(sorter)))


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None and y is None:
        return xp.nonzero(condition)
    picked = np.where(_array(condition).astype(bool), _operand(x), _operand(y))
    return ndarray(_not_bfloat16(picked))


def _around(a: Any, decimals: int = 0, out: Any = None) -> ndarray:
    rounded = np.around(_not_bfloat16(_operand(a)), decimals)
    return _into(out, rounded)


def _not_bfloat16(x: Any) -> Any:
    """CuPy has no bfloat16 loop here and answers in float32."""
    return x.astype(np.float32) if getattr(x, "dtype", None) == BFLOAT16 else x


def _cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> ndarray:
    if BFLOAT16 in (_array(a).dtype, dtype):
        raise RuntimeError("CuPy does not compile cumsum in bfloat16")
    return _into(out, np.cumsum(_array(a), axis, dtype))


def _total(name: str) -> Callable[..., ndarray]:
    def reduce(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        if _array(a).dtype.kind == "c" and dtype is not None and np.dtype(dtype).kind not in "fc":
            raise RuntimeError(f"CuPy does not compile {name} of complex numbers in {np.dtype(dtype)}")
        return _into(out, getattr(np, name)(_array(a), axis=axis, dtype=dtype, keepdims=keepdims))

    return reduce


def _into(out: Any, result: Any) -> ndarray:
    if out is None:
        return _wrap(result)
    _array(out, "out")[...] = result
    return out


def _joined(name: str) -> Callable[..., ndarray]:
    def join(tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> ndarray:
        arrays = [_operand(x) for x in tup]
        if not all(isinstance(x, ndarray) for x in tup):
            raise TypeError("Argument 'a' has incorrect type (expected a device array)")
        return _into(out, getattr(np, name)(arrays, axis=axis, dtype=dtype, casting=casting))

    return join


def _repeat(a: Any, repeats: Any, axis: Any = None) -> ndarray:
    if isinstance(repeats, np.ndarray):
        raise TypeError("'repeats' does not accept numpy.ndarray; convert with cupy.array() first")
    return ndarray(np.repeat(_array(a), repeats._memory if isinstance(repeats, ndarray) else repeats, axis))


def _take(a: Any, indices: Any, axis: Any = None, out: Any = None) -> ndarray:
    where = indices._memory if isinstance(indices, ndarray) else indices
    return _into(out, np.take(_array(a), where, axis))


def _diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> ndarray:
    ends = {"prepend": prepend, "append": append}
    ends = {name: _operand(x) for name, x in ends.items() if x is not None}
    return ndarray(np.diff(_array(a), n, axis, **ends))


def _may_share_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    return np.may_share_memory(_array(a, "a"), _array(b, "b"), max_work)


def _result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    return np.result_type(*(x._memory if isinstance(x, ndarray) else x for x in arrays_and_dtypes))


def _arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    if stop is None:
        start, stop = 0, start
    if any(isinstance(x, np.ndarray) for x in (start, stop, step)):
        raise TypeError("arange: wanted numbers")
    return ndarray(np.arange(*(x.item() if isinstance(x, ndarray) else x for x in (start, stop, step)), dtype=dtype))


def _nan_extreme(name: str) -> Callable[..., ndarray]:
    def extreme(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return _into(out, getattr(np, name)(_array(a), axis=axis, keepdims=keepdims))

    return extreme


#: Functions that take something else than an array first, or that CuPy restricts.
_SPECIAL: dict[str, Callable[..., Any]] = {
    "arange": _arange,
    "argsort": _sorting("argsort"),
    "around": _around,
    "array": lambda obj, dtype=None, copy=True, order="K", subok=False, ndmin=0: _asarray(obj, dtype, copy=copy),
    "asarray": _asarray,
    "ascontiguousarray": _ascontiguousarray,
    "atleast_2d": lambda ary: _wrap(np.atleast_2d(_asarray(ary)._memory)),
    "can_cast": lambda from_, to, casting="safe": np.can_cast(getattr(from_, "dtype", from_), to, casting),
    "concatenate": _joined("concatenate"),
    "cumsum": _cumsum,
    "diff": _diff,
    "empty": _created("empty"),
    "full": _full,
    "isscalar": np.isscalar,
    "may_share_memory": _may_share_memory,
    "mean": _total("mean"),
    "nanmax": _nan_extreme("nanmax"),
    "nanmin": _nan_extreme("nanmin"),
    "ndim": lambda a: a.ndim if isinstance(a, ndarray) else np.ndim(a),
    "ones": _created("ones"),
    "prod": _total("prod"),
    "repeat": _repeat,
    "result_type": _result_type,
    "searchsorted": _searchsorted,
    "shape": lambda a: a.shape if isinstance(a, ndarray) else np.shape(a),
    "size": lambda a: a.size if isinstance(a, ndarray) else np.size(a),
    "sort": _sorting("sort"),
    "stack": _joined("stack"),
    "sum": _total("sum"),
    "take": _take,
    "where": _where,
    "zeros": _created("zeros"),
}


def _plain(name: str) -> Callable[..., Any]:
    """NumPy's function of an array first; the other arguments are numbers, tuples and dtypes."""

    def function(a: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(FUNCTIONS[name].split()[1:], args, strict=False)) | kwargs
        out = given.pop("out", None)
        given = {key: value for key, value in given.items() if value is not None}
        if any(isinstance(value, ndarray | np.ndarray) for value in given.values()):
            raise TypeError(f"{name}: an array among the options")
        result = getattr(np, name)(_array(a), **given)
        return a._derived(result) if out is None and isinstance(result, np.ndarray) else _into(out, result)

    return function


def _with_cupy_signature(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = FUNCTIONS[name].split()

    def offered(*args: Any, **kwargs: Any) -> Any:
        unknown = set(kwargs) - set(parameters)
        if unknown:
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown.pop()!r}")
        return _compute(function, *args, **kwargs)

    offered.__name__ = name
    return offered


def _ufunc(name: str) -> Callable[..., Any]:
    numpy_ufunc = getattr(np, name)

    def function(*operands: Any, out: Any = None, dtype: Any = None) -> Any:
        for x in operands:
            if hasattr(x, "__cupy_override_elementwise_kernel__"):
                return x.__cupy_override_elementwise_kernel__(function, *operands, out=out, dtype=dtype)
        if len(operands) > numpy_ufunc.nin:
            *operands, out = operands  # type: ignore[assignment]
        values = [_operand(x) for x in operands]
        if name == "sign" and values[0].dtype == np.bool_:
            values = [values[0].astype(np.int8)]
        if name == "power":
            values = _power_operands(*values)
        options = {} if dtype is None else {"dtype": dtype}
        result = _compute(numpy_ufunc, *values, **options)
        if name == "matmul" and all(getattr(x, "dtype", None) == BFLOAT16 for x in values):
            result = result.astype(BFLOAT16)
        return _into(out, result)

    function.__name__ = name
    function.nin = numpy_ufunc.nin  # type: ignore[attr-defined]
    return function


def _power_operands(base: Any, exponent: Any) -> list[Any]:
    """bool ** int is int64 in CuPy; an integer to a negative power is 0, 1 or -1 there, an error in NumPy."""
    if isinstance(base, np.ndarray) and base.dtype == np.bool_ and type(exponent) is int:
        base = base.astype(np.int64)
    integers = all(np.asarray(x).dtype.kind in "iu" for x in (base, exponent))
    if integers and isinstance(exponent, int | np.integer) and exponent < 0:
        unit = np.abs(base) == 1
        return [np.where(unit, base, 0), int(exponent) % 2 or 2]
    return [base, exponent]


for _name in UFUNCS:
    setattr(xp, _name, _ufunc(_name))
for _name in FUNCTIONS:
    setattr(xp, _name, _with_cupy_signature(_name, _SPECIAL.get(_name) or _plain(_name)))


def _linalg(name: str) -> Callable[[Any], Any]:
    def function(a: Any) -> Any:
        result = _compute(getattr(np.linalg, name), _array(a))
        return tuple(map(_wrap, result)) if isinstance(result, tuple) else _wrap(result)

    return function


for _name in LINALG:
    setattr(xp.linalg, _name, _linalg(_name))


# --------------------------------------------------------------------------- the sparse formats
class _spbase:
    """What `sparse.issparse` recognises."""

    __array_priority__ = 101


class sparray:
    """Marks the array flavour."""


class spmatrix:
    """Marks the matrix flavour."""


sparse = types.ModuleType("fake.sparse", "COO, CSR, CSC and DIA as cupyx.scipy.sparse has them.")


def _issparse(x: Any) -> bool:
    return isinstance(x, _spbase)


class _Foreign(_spbase):
    """A scipy matrix on the device: its arrays are fake arrays over its own memory."""

    format: str
    _host_class: type

    def __init__(self, arg1: Any, shape: Any = None, dtype: Any = None, copy: bool = False) -> None:
        if isinstance(arg1, _spbase):
            if self.format == "dia" and not isinstance(arg1, _Foreign):
                raise ValueError("unrecognized form for dia_matrix constructor")
            arg1 = arg1.asformat(self.format)._host
        elif scipy.sparse.issparse(arg1):
            arg1 = arg1.copy()
        elif isinstance(arg1, ndarray):
            arg1 = arg1._memory
        elif isinstance(arg1, tuple) and not all(isinstance(n, int | np.integer) for n in arg1):
            arg1 = tuple(_device_tuple(part) for part in arg1)
        elif not isinstance(arg1, tuple):
            raise TypeError("invalid input format")
        self._host = self._host_class(arg1, shape=shape, dtype=dtype, copy=copy)
        if self.format != "dia" and self._host.dtype not in FakeBackend.foreign_dtypes:
            raise ValueError("Only bool, float32, float64, complex64 and complex128 are supported")

    @classmethod
    def _around(cls, host: Any) -> _Foreign:
        new = object.__new__(_CLASSES[type(host).__name__])
        new._host = host
        return new

    def get(self, stream: Any = None) -> Any:
        return self._host.copy()

    # ------------------------------------------------------------------------------- description
    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    nnz = property(lambda self: self._host.nnz)
    data = property(lambda self: ndarray(self._host.data))
    indices = property(lambda self: ndarray(self._host.indices))
    indptr = property(lambda self: ndarray(self._host.indptr))
    row = property(lambda self: ndarray(self._host.row))
    col = property(lambda self: ndarray(self._host.col))
    offsets = property(lambda self: ndarray(self._host.offsets))
    has_canonical_format = property(lambda self: bool(self._host.has_canonical_format))
    has_sorted_indices = property(lambda self: bool(self._host.has_sorted_indices))

    # ------------------------------------------------------------------------------- conversions
    def asformat(self, format: str | None) -> _Foreign:
        return self if format in (None, self.format) else getattr(self, f"to{format}")()

    def tocsr(self, copy: bool = False) -> _Foreign:
        return self._around(self._host.tocsr(copy=copy))

    def tocsc(self, copy: bool = False) -> _Foreign:
        return self._around(self._host.tocsc(copy=copy))

    def tocoo(self, copy: bool = False) -> _Foreign:
        return self._around(self._host.tocoo(copy=copy))

    def todia(self, copy: bool = False) -> _Foreign:
        if self.format != "dia":
            raise NotImplementedError
        return self

    def tolil(self, copy: bool = False) -> NoReturn:
        raise NotImplementedError

    tobsr = todok = tolil

    def toarray(self, order: Any = None, out: Any = None) -> ndarray:
        return ndarray(np.asarray(self._host.toarray(order=order)))

    def transpose(self, axes: Any = None, copy: bool = False) -> _Foreign:
        return self._around(self._host.transpose(axes, copy=copy))

    T = property(lambda self: self.transpose())

    def copy(self) -> _Foreign:
        return self._around(self._host.copy())

    def astype(self, dtype: Any, copy: bool = True) -> _Foreign:
        return self._around(self._host.astype(dtype, copy=copy))

    # -------------------------------------------------------------------------------- arithmetic
    def multiply(self, other: Any) -> _Foreign:
        if isinstance(other, _spbase):
            other = other.tocsr()._host
        elif isinstance(other, ndarray):
            other = other._memory if other.ndim else other.item()
        else:
            other = _operand(other)
        product = self._host.multiply(other).tocsr()
        if product.dtype not in FakeBackend.foreign_dtypes:
            product = product.astype(np.float64)
        return self._around(product)

    def __mul__(self, other: Any) -> _Foreign:
        if isinstance(self, spmatrix) and np.ndim(other):  # a matrix product there, which no code of ours asks for
            return NotImplemented
        return self.multiply(other)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> _Foreign:
        return self._around(self._host[key])


def _device_tuple(part: Any) -> Any:
    """Device arrays of a constructor's tuple as memory; NumPy arrays and lists are refused."""
    if isinstance(part, tuple | list):
        return tuple(_device_tuple(x) for x in part)
    if not isinstance(part, ndarray):
        raise ValueError("data, indices, and indptr must be 1-D cupy arrays")
    return part._memory


_CLASSES: dict[str, type[_Foreign]] = {}
for _format in ("coo", "csr", "csc", "dia"):
    for _flavour, _mark in (("array", sparray), ("matrix", spmatrix)):
        _name = f"{_format}_{_flavour}"
        _body = {"format": _format, "_host_class": getattr(scipy.sparse, _name), "__module__": __name__}
        _CLASSES[_name] = type(_name, (_Foreign, _mark), _body)
        setattr(sparse, _name, _CLASSES[_name])
sparse.issparse = _issparse  # type: ignore[attr-defined]
sparse.sparray, sparse.spmatrix = sparray, spmatrix  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------- the backend
class FakeBackend(Backend):
    """A device whose memory is NumPy's; the work that has a code of its own is done by the host's."""

    name = "fake"
    bring = "Bring it to the fake device with from_host."
    dtypes = DEVICE_DTYPES
    foreign_dtypes = tuple(np.dtype(c) for c in "?fdFD")
    array_priority = 101

    @property
    def xp(self) -> types.ModuleType:
        return xp

    @property
    def sparse(self) -> types.ModuleType:
        return sparse

    def bases(self, is_array: bool) -> tuple[type, ...]:
        return (_spbase, sparray if is_array else spmatrix)

    def is_dense(self, x: Any) -> bool:
        return isinstance(x, ndarray)

    def is_sparse(self, x: Any) -> bool:
        return isinstance(x, _spbase)

    def adopt(self, x: Any) -> ndarray | None:
        return x if isinstance(x, ndarray) else None

    def from_host(self, x: np.ndarray[Any, Any]) -> ndarray:
        return _from_host(x)

    def to_host(self, x: Any) -> np.ndarray[Any, Any]:
        _array(x)
        return x.get()

    def address(self, x: Any) -> int:
        return HOST.address(_array(x))

    def device_of(self, x: Any) -> str:
        return f"{self.name}:0"

    def expand(self, indptr: Any, n: int) -> ndarray:
        return ndarray(HOST.expand(_array(indptr), n))

    def segment_reduce(self, op: str, values: Any, order: Any, starts: Any) -> ndarray:
        order = None if order is None else _array(order)
        return ndarray(_compute(HOST.segment_reduce, op, _array(values), order, _array(starts)))

    def validated(self, blocks: Blocks, block_rows: int, block_cols: int) -> Blocks:
        return blocks

    def transpose(self, blocks: Blocks, block_cols: int) -> Blocks:
        return structure.transpose(self, blocks, block_cols)

    def to_csr(self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Any, Any, Any]:
        return structure.to_csr(self, blocks, dtype)


class FakeProducts(ProductEngine):
    """The products of the host on the memory of the fake device; what is generic runs on the fake device itself."""

    def multiply_dense(self, call: ProductCall) -> None:
        arrays = {"matrix": call.matrix.get(), "B": _array(call.B), "out": _array(call.out)}
        _compute(products_host.ENGINE.multiply_dense, replace(call, **arrays))

    def pair_products(
        self, a: Any, ia: Any, b: Any, ib: Any, starts: Any, dtype: np.dtype[Any], rows: int = 0
    ) -> ndarray:
        arrays = (_array(x) for x in (a, ia, b, ib, starts))
        return ndarray(_compute(products_host.ENGINE.pair_products, *arrays, dtype))


class FakeAttention(AttentionEngine):
    """The attention of the host on the memory of the fake device."""

    def forward(self, call: AttentionCall) -> None:
        def on_host(x: Any) -> Any:
            return None if x is None else _array(x)

        arrays = {name: on_host(getattr(call, name)) for name in ("q", "k", "v", "out", "lse")}
        mask = None if call.mask is None else call.mask.get()
        bounds = None if call.bounds is None else tuple(map(on_host, call.bounds))
        scales = tuple(map(on_host, call.scales))
        _compute(attention_host.ENGINE.forward, replace(call, **arrays, mask=mask, bounds=bounds, scales=scales))

    def backward(self, call: BackwardCall) -> NoReturn:
        raise TypeError("attention_backward: wanted arrays on 'cpu', got 'fake'")

    def decode(self, call: DecodeCall) -> NoReturn:
        raise TypeError("cache: wanted one on 'cpu' or 'cuda', got 'fake'")


class FakeAppend(AppendEngine):
    """Appends to a cache as the host does, in the memory of the fake device."""

    def __init__(self) -> None:
        self.capturing = False

    def is_capturing(self) -> bool:
        return self.capturing

    def append(self, call: AppendCall) -> None:
        names = ("k", "v", "to_k", "to_v", "lengths", "refused", "table", "new_table", "takes")
        arrays = {name: getattr(call, name) for name in names}
        on_host = replace(call, **{name: None if x is None else _array(x) for name, x in arrays.items()})
        append_host.ENGINE.append(on_host)


def _allocation(x: ndarray) -> int:
    """What the memory of an array is known by: the array of NumPy that owns it."""
    memory: Any = x._memory
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return id(memory)


_installed: FakeBackend | None = None


def install() -> FakeBackend:
    """The one fake backend, registered so that its arrays are recognised."""
    global _installed
    if _installed is None:
        FakeBackend.index_class = watched_class(ndarray, _allocation)
        _installed = FakeBackend()
        registry.register(_installed)
        PRODUCT_ENGINES.register(_installed.name, FakeProducts(_installed))
        ATTENTION_ENGINES.register(_installed.name, FakeAttention(_installed))
        APPEND_ENGINES.register(_installed.name, FakeAppend())
    return _installed
