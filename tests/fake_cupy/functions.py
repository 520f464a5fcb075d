"""The functions of `cupy` that the package calls: their names, parameters and dtypes are those of CuPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bsrgemm.dtypes import BFLOAT16

from .arrays import _array, _compute, _from_host, _operand, _wrap, ndarray, xp

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

#: Functions of `cupy.linalg`, each of an array alone. CuPy does not raise for singular matrices, and leaves open what
#: their inverses hold: here NumPy raises. float16 is refused by both, bfloat16 by the fake alone.
LINALG = ("inv", "slogdet")


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


def _linalg(name: str) -> Callable[[Any], Any]:
    def function(a: Any) -> Any:
        result = _compute(getattr(np.linalg, name), _array(a))
        return tuple(map(_wrap, result)) if isinstance(result, tuple) else _wrap(result)

    return function


def offered() -> dict[str, Callable[..., Any]]:
    """All functions by their names."""
    found = {name: _ufunc(name) for name in UFUNCS}
    return found | {name: _with_cupy_signature(name, _SPECIAL.get(name) or _plain(name)) for name in FUNCTIONS}


def offered_in_linalg() -> dict[str, Callable[..., Any]]:
    """The functions of `cupy.linalg`."""
    return {name: _linalg(name) for name in LINALG}
