"""The fake CuPy answers as CuPy does, refuses what CuPy refuses, and offers nothing that CuPy lacks."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from bsrgemm._backend.registry import backend_of, by_name
from bsrgemm.dtypes import BFLOAT16

from .. import fake_cupy
from ..fake_cupy import ndarray, xp
from ..fake_cupy.functions import FUNCTIONS, LINALG
from ..fake_cupy.sparse import CLASSES, Foreign

cupy = pytest.importorskip("cupy")
cupyx_sparse = pytest.importorskip("cupyx.scipy.sparse")
pytestmark = pytest.mark.fake


class Senior:
    """A class that outranks arrays by its priority alone, as cupyx's and our matrices do."""

    __array_priority__ = 101
    __hash__ = None  # type: ignore[assignment]

    def __radd__(self, other: Any) -> str:
        return "radd"

    def __rmatmul__(self, other: Any) -> str:
        return "rmatmul"

    def __eq__(self, other: object) -> Any:
        return "eq"

    def __gt__(self, other: Any) -> str:
        return "gt"


def _write(x: Any, key: Any, value: Any) -> Any:
    x[key] = value
    return x


def _names(module: Any) -> dict[str, Any]:
    """What the expressions below may mention."""
    return {
        "xp": module,
        "np": np,
        "operator": operator,
        "write": _write,
        "senior": Senior(),
        "host": np.arange(3),
        "a": module.arange(3),
        "i4": module.arange(3, dtype=np.int32),
        "m": module.arange(4).reshape(2, 2),
        "t": module.arange(8).reshape(2, 2, 2),
        "b": module.asarray([True, False, True]),
        "f4": module.asarray([0.5, 1.5, -0.0], dtype=np.float32),
        "f8": module.asarray([0.5, np.inf, -0.0]),
        "c": module.asarray([1 + 2j, 0, -1j]),
        "h": module.asarray(np.array([1, 0, 2.5]).astype(BFLOAT16)),
    }


_ERRORS = (NotImplementedError, TypeError, IndexError, ValueError, AttributeError)
#: A kernel that CuPy cannot compile; the fake has no compiler to blame.
_NOT_COMPILED = ("CompileException", "RuntimeError")


def _describe(x: Any) -> str:
    if isinstance(x, tuple | list):
        return ", ".join(map(_describe, x))
    if isinstance(x, np.ndarray):
        return f"host {x.dtype} {x.tolist()}"
    if hasattr(x, "get"):
        values = x.get().astype(np.float32) if x.dtype == BFLOAT16 else x.get()
        return f"{x.dtype} {values.tolist()}"
    return f"{type(x).__name__} {x}"


def answer(module: Any, expression: str) -> str:
    """What an expression gives in an array module, or which kind of error."""
    try:
        return _describe(eval(expression, _names(module)))
    except Exception as error:
        if type(error).__name__ in _NOT_COMPILED:
            return "does not compile"
        return next(kind.__name__ for kind in _ERRORS if isinstance(error, kind))


#: What CuPy 14.2 answers, seen on a GPU: `test_cupy_answers_as_recorded` asks it again.
ANSWERS = {
    # One element, and a reduction, stay arrays on the device.
    "a[1]": "int64 1",
    "a[np.int64(1)]": "int64 1",
    "a[xp.asarray(1)]": "int64 1",
    "a.sum()": "int64 3",
    "b.sum()": "int64 2",
    "m.sum(axis=1)": "int64 [1, 5]",
    "f4.sum(dtype=np.float64)": "float64 2.0",
    "a.max()": "int64 2",
    "a[:0].max()": "ValueError",
    "m.all()": "bool False",
    "xp.count_nonzero(a)": "int64 2",
    "list(a[:2])": "int64 0, int64 1",
    "xp.maximum(0, 3)": "int64 3",
    "xp.sqrt(4)": "float64 2.0",
    "int(a[1])": "int 1",
    "bool(a[1])": "bool True",
    "bool(a)": "ValueError",
    "operator.index(a[1])": "TypeError",
    "range(a[2])": "TypeError",
    "xp.zeros(a[2])": "TypeError",
    "a.reshape(xp.asarray(3), 1)": "TypeError",
    "hash(a)": "TypeError",
    # Nothing crosses to the host unasked.
    "np.asarray(a)": "TypeError",
    "np.array([a[0], a[1]])": "TypeError",
    "host[a[1]]": "TypeError",
    "write(np.zeros(3), slice(None), xp.ones(3))": "TypeError",
    "xp.asarray([a[0], 1])": "TypeError",
    "a.get()": "host int64 [0, 1, 2]",
    "a[1].get()": "host int64 1",
    # NumPy arrays are refused as operands, but for 0-d ones in comparisons; NumPy's numbers are taken.
    "a + host": "TypeError",
    "host + a": "TypeError",
    "a == host": "TypeError",
    "a + np.array(2.0)": "TypeError",
    "a == np.array(2)": "bool [False, False, True]",
    "a + [1, 2, 3]": "TypeError",
    "a + np.float64(2)": "float64 [2.0, 3.0, 4.0]",
    "np.float64(2) + a": "float64 [2.0, 3.0, 4.0]",
    "np.add(a, 1)": "int64 [1, 2, 3]",
    "np.add(a, host)": "TypeError",
    "np.add.reduceat(a, [0, 2])": "TypeError",
    "xp.maximum(a, host)": "TypeError",
    "xp.flatnonzero(host)": "TypeError",
    "xp.ascontiguousarray(host)": "TypeError",
    "xp.concatenate([a, host])": "TypeError",
    "xp.where(b, host, 0)": "TypeError",
    "xp.may_share_memory(a, host)": "TypeError",
    "xp.repeat(a, host)": "TypeError",
    "xp.repeat(a, a)": "int64 [1, 2, 2]",
    "xp.searchsorted(a, host)": "NotImplementedError",
    "xp.searchsorted(a, np.int64(3))": "NotImplementedError",
    "xp.searchsorted(a, 3)": "int64 3",
    "xp.searchsorted(i4, a)": "int64 [0, 1, 2]",
    "xp.searchsorted(a[:0], a)": "int64 [0, 0, 0]",
    "xp.stack([a[0], np.int64(1)])": "TypeError",
    "xp.broadcast_to(5, (2,))": "TypeError",
    "xp.asarray(host)": "int64 [0, 1, 2]",
    "xp.asarray([a[0], a[1]])": "int64 [0, 1]",
    # Indices may come from the host; values may not.
    "a[host]": "int64 [0, 1, 2]",
    "a[[0, 2]]": "int64 [0, 2]",
    "a[a[1]:]": "int64 [1, 2]",
    "a[None, ..., 1:]": "int64 [[1, 2]]",
    "a[7]": "IndexError",
    "a[a > 0]": "int64 [1, 2]",
    "m[m > 1]": "int64 [2, 3]",
    "m[a[:2], a[:2]]": "int64 [0, 3]",
    "m[a[:2], 0]": "int64 [0, 2]",
    "t[a[:2], :, a[:2]]": "int64 [[0, 2], [5, 7]]",
    "write(xp.zeros(3), slice(None), np.ones(3))": "ValueError",
    "write(xp.zeros(3), slice(None), [1, 2, 3])": "ValueError",
    "write(xp.zeros(3), ..., np.array(2.0))": "float64 [2.0, 2.0, 2.0]",
    "write(xp.zeros(3), xp.asarray([0, 2]), xp.ones(2))": "float64 [1.0, 0.0, 1.0]",
    "write(xp.zeros(3), xp.asarray([0, 0]), 1)": "float64 [1.0, 0.0, 0.0]",
    "write(xp.zeros(3, np.int32), slice(None), 1.5)": "int32 [1, 1, 1]",
    "xp.zeros(3).set(host)": "TypeError",
    # Dtypes and promotion.
    "i4 + 1.5": "float64 [1.5, 2.5, 3.5]",
    "i4 + np.int64(1)": "int64 [1, 2, 3]",
    "f4 + 1.5": "float32 [2.0, 3.0, 1.5]",
    "f4 + np.float64(1.5)": "float64 [2.0, 3.0, 1.5]",
    "f4 * f8[0]": "float64 [0.25, 0.75, -0.0]",
    "xp.where(b, i4, 0)": "int32 [0, 0, 2]",
    "xp.concatenate([a, i4])": "int64 [0, 1, 2, 0, 1, 2]",
    "b + b": "bool [True, False, True]",
    "b - b": "TypeError",
    "-b": "TypeError",
    "b ** 2": "int64 [1, 0, 1]",
    "xp.sign(b)": "int8 [1, 0, 1]",
    "a ** -1": "int64 [0, 1, 0]",
    "a / 0": "float64 [nan, inf, inf]",
    "c < c": "bool [False, False, False]",
    "xp.zeros(2, 'g')": "ValueError",
    "xp.asarray(np.zeros(2, 'G'))": "ValueError",
    "xp.asarray(np.zeros(2, '>f8'))": "float64 [0.0, 0.0]",
    "a.astype('g')": "ValueError",
    "h + h": "bfloat16 [2.0, 0.0, 5.0]",
    "h * f4": "float32 [0.5, 0.0, -0.0]",
    "h != 0": "bool [True, False, True]",
    "h.sum()": "bfloat16 3.5",
    "h.max()": "bfloat16 2.5",
    "xp.nonzero(h)": "int64 [0, 2]",
    "xp.where(b, h, 0)": "float32 [1.0, 0.0, 2.5]",
    "xp.around(h)": "float32 [1.0, 0.0, 2.0]",
    "xp.sort(h)": "NotImplementedError",
    "xp.cumsum(h)": "does not compile",
    "c.sum(dtype=np.float32)": "float32 1.0",
    "c.sum(dtype=np.uint16)": "does not compile",
    "c.astype(np.uint16)": "uint16 [1, 0, 0]",
    # Keywords and attributes that CuPy lacks.
    "a.sum(where=b)": "TypeError",
    "a.max(initial=0)": "TypeError",
    "a.item(1)": "TypeError",
    "a.astype('f4', casting='unsafe')": "TypeError",
    "a.flags.writeable": "AttributeError",
    "xp.add(a, 1, where=b)": "TypeError",
    "xp.argsort(a, kind='quicksort')": "ValueError",
    "xp.argsort(a, kind='stable')": "int64 [0, 1, 2]",
    # Shapes without elements.
    "xp.zeros((0, 2, 2)).reshape(0, -1)": "ValueError",
    "xp.zeros((0, 2, 2)).reshape(-1)": "float64 []",
    "xp.broadcast_to(a[-1:], (0,))": "int64 []",
    # Who answers an operator.
    "a + senior": "str radd",
    "a @ senior": "str rmatmul",
    "a == senior": "str eq",
    "a < senior": "str gt",
    "operator.iadd(a.copy(), senior)": "TypeError",
    "np.add(a, senior)": "TypeError",
}

#: Mistakes that CuPy lets pass and the fake does not.
REFUSED = {
    "a[xp.asarray([0, 7])]": "IndexError",
    "write(xp.zeros(3), xp.asarray([0, 2]), np.ones(2))": "ValueError",
    "write(xp.broadcast_to(a, (1, 3)), 0, 1)": "ValueError",
    "xp.sort(host)": "TypeError",
    "xp.diff(host)": "TypeError",
    "a.view(np.ndarray)": "TypeError",
}


@pytest.mark.parametrize("expression", ANSWERS)
def test_the_fake_answers_as_cupy_does(expression: str) -> None:
    assert answer(xp, expression) == ANSWERS[expression]


@pytest.mark.gpu
def test_cupy_answers_as_recorded() -> None:
    assert {expression: answer(cupy, expression) for expression in ANSWERS} == ANSWERS


@pytest.mark.parametrize("expression", REFUSED)
def test_the_fake_refuses_what_cupy_silently_gets_wrong(expression: str) -> None:
    assert answer(xp, expression) == REFUSED[expression]


def test_only_names_and_keywords_of_cupy_are_offered() -> None:
    assert [name for name in vars(xp) if not name.startswith("_") and not hasattr(cupy, name)] == []
    assert {name for name in vars(xp.linalg) if not name.startswith("_")} == {*LINALG, "norm"}
    assert all(list(inspect.signature(getattr(cupy.linalg, name)).parameters) == ["a"] for name in LINALG)
    for name, parameters in FUNCTIONS.items():
        function = getattr(cupy, name)
        if inspect.isbuiltin(function):  # NumPy's own, without a signature
            continue
        known = inspect.signature(function).parameters
        variadic = any(p.kind is p.VAR_POSITIONAL for p in known.values())
        assert variadic or set(parameters.split()) <= set(known), name
    attributes = {name for name in vars(ndarray) if not name.startswith("_")}
    assert [name for name in attributes if not hasattr(cupy.ndarray, name)] == []


def test_an_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'like'"):
        xp.zeros(3, like=None)


def test_the_sparse_classes_have_what_cupyx_has() -> None:
    for name, ours in CLASSES.items():
        theirs = getattr(cupyx_sparse, name)
        methods = {m for m in vars(Foreign) if not m.startswith("_") and callable(getattr(ours, m))}
        assert [m for m in methods if not hasattr(theirs, m)] == []


def test_the_sparse_classes_hold_the_dtypes_of_cusparse_only() -> None:
    for char in "?fdFD":
        assert CLASSES["csr_array"](scipy.sparse.eye_array(3, dtype=char, format="csr")).dtype == char
    for char in "bBhHiIlLg":
        with pytest.raises(ValueError, match="Only bool, float32"):
            CLASSES["csr_array"](scipy.sparse.eye_array(3, dtype=char, format="csr"))


def test_the_sparse_classes_take_and_give_device_arrays() -> None:
    host = scipy.sparse.csr_array(np.eye(3))
    device = CLASSES["csr_array"]((xp.ones(3), xp.arange(3), xp.arange(4)), shape=(3, 3))
    assert all(isinstance(x, ndarray) for x in (device.data, device.indices, device.indptr, device.toarray()))
    assert type(device.get()) is scipy.sparse.csr_array and (device.get() != host).nnz == 0
    with pytest.raises(ValueError, match="cupy arrays"):
        CLASSES["csr_array"]((host.data, host.indices, host.indptr), shape=(3, 3))
    for lacking in ("todia", "tolil", "todok", "tobsr"):
        with pytest.raises(NotImplementedError):
            getattr(device, lacking)()


def test_its_arrays_and_matrices_are_recognised() -> None:
    backend = fake_cupy.backend()
    assert fake_cupy.backend() is backend is by_name("cuda")
    assert backend_of(xp.ones(3)) is backend is backend_of(CLASSES["csr_array"]((3, 3)))
    back = backend.to_host(backend.from_host(np.arange(3)))
    assert isinstance(back, np.ndarray) and back.tolist() == [0, 1, 2]
