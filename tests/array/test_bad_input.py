"""Bad input ends in an error that names the argument, odd but good input in the right answer, on any backend."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg

from ..strategies import PLACES, Place, Sample, assert_values, each_place, quietly

INT64 = np.iinfo(np.int64)


# ---------------------------------------------------------------------------------- a matrix to start with
def sample(dtype: Any = np.float64) -> Sample:
    """4 x 6 in blocks of 2 x 3: blocks at (0, 1), (1, 0), (1, 1); nothing at (0, 0)."""
    data = (np.arange(18).reshape(3, 2, 3) % 7 + 1).astype(dtype)
    return Sample(data, np.array([1, 0, 1], np.int32), np.array([0, 1, 3], np.int32), (4, 6))


def matrix(place: Place, dtype: Any = np.float64) -> Any:
    return place.bsr(sample(dtype))


def built(place: Place, flavour: type = bg.bsr_array, **changes: Any) -> Any:
    """The three-array form with some of its parts replaced."""
    s = sample()
    parts = {"data": s.data, "indices": s.indices, "indptr": s.indptr, "shape": s.shape} | changes
    shape = parts.pop("shape")
    options = {name: parts.pop(name) for name in list(parts) if name not in ("data", "indices", "indptr")}
    arrays = tuple(place.put(np.asarray(parts[name])) for name in ("data", "indices", "indptr"))
    return flavour(arrays, shape=shape, **options)


def elements(place: Place, values: Any, row: Any, col: Any, **options: Any) -> Any:
    """The form (data, (row, col))."""
    return bg.bsr_array(tuple((place.put(values), (place.put(row), place.put(col)))), **options)


def ones(place: Place, *shape: int, dtype: Any = np.float64) -> Any:
    return place.put(np.ones(shape, dtype))


def elsewhere(place: Place) -> Place:
    """Another backend than this one: the host, or the fake device."""
    return Place("fake" if place.is_host else "cpu")


def assign(A: Any, key: Any, value: Any) -> None:
    A[key] = value


def zero_strides(place: Place, shape: tuple[int, ...]) -> Any:
    """A writeable array whose elements share memory."""
    if place.is_host:
        return np.lib.stride_tricks.as_strided(np.zeros(1), shape, (0,) * len(shape), writeable=True)
    return place.xp.broadcast_to(place.put(np.zeros(1)), shape)


def read_only(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x.flags.writeable = False
    return x


def corrupted(S: Any, name: str, at: int, value: int) -> Any:
    """A scipy matrix whose index array was written into after it was built."""
    getattr(S, name)[at] = value
    return S


# ------------------------------------------------------------------------------------ what must be refused
@dataclass(frozen=True)
class Refused:
    """`attempt` raises `error` with `text` in its message; `backends` limits where that makes sense."""

    id: str
    attempt: Callable[[Place], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    text: str
    backends: str = "cpu fake cuda"


WRONG = (ValueError, TypeError)

CONSTRUCTORS = [
    Refused("data that is 2-D", lambda p: built(p, data=np.ones((3, 2))), ValueError, "data"),
    Refused("data that is 4-D", lambda p: built(p, data=np.ones((3, 2, 3, 1))), ValueError, "data"),
    Refused("a block without rows", lambda p: built(p, data=np.ones((3, 0, 3))), ValueError, "block"),
    Refused("a block without columns", lambda p: built(p, data=np.ones((3, 2, 0))), ValueError, "block"),
    Refused("an indptr that starts at 1", lambda p: built(p, indptr=[1, 1, 3]), ValueError, "indptr"),
    Refused("an indptr that starts below 0", lambda p: built(p, indptr=[-1, 1, 3]), ValueError, "indptr"),
    Refused("an indptr that falls", lambda p: built(p, indptr=[0, 3, 2]), ValueError, "indptr"),
    Refused("an indptr that falls below 0", lambda p: built(p, indptr=[0, -1, 3]), ValueError, "indptr"),
    Refused("an indptr too short", lambda p: built(p, indptr=[0, 3]), ValueError, "indptr"),
    Refused("an indptr too long", lambda p: built(p, indptr=[0, 1, 3, 3]), ValueError, "indptr"),
    Refused("an indptr without entries", lambda p: built(p, indptr=np.zeros(0, int)), ValueError, "indptr"),
    Refused(
        "an indptr without entries and no shape",
        lambda p: built(p, indptr=np.zeros(0, int), shape=None),
        ValueError,
        "indptr",
    ),
    Refused("an indptr beyond the blocks", lambda p: built(p, indptr=[0, 1, 4]), ValueError, "indptr"),
    Refused("an indptr far beyond", lambda p: built(p, indptr=[0, 1, 2**40]), ValueError, "indptr"),
    Refused("a 2-D indptr", lambda p: built(p, indptr=[[0, 1, 3]]), ValueError, "indptr"),
    Refused("an indptr of floats", lambda p: built(p, indptr=[0.0, 1.0, 3.0]), WRONG, "indptr"),
    Refused("an index too large", lambda p: built(p, indices=[1, 2, 1]), ValueError, "indices"),
    Refused("an index beyond int32", lambda p: built(p, indices=[1, 2**32, 1]), ValueError, "indices"),
    Refused("a negative index", lambda p: built(p, indices=[1, -1, 1]), ValueError, "indices"),
    Refused(
        "a negative index and no shape",
        lambda p: built(p, indices=[-1, -1, -1], shape=None),
        ValueError,
        "indices",
    ),
    Refused(
        "an index beyond int64",
        lambda p: built(p, indices=np.array([1, 2**64 - 1, 1], np.uint64)),
        ValueError,
        "indices",
    ),
    Refused("fewer indices than blocks", lambda p: built(p, indices=[1, 0]), ValueError, "indices"),
    Refused("more indices than blocks", lambda p: built(p, indices=[1, 0, 1, 0]), ValueError, "indices"),
    Refused("2-D indices", lambda p: built(p, indices=[[1, 0, 1]]), ValueError, "indices"),
    Refused("indices that are floats", lambda p: built(p, indices=[1.0, 0.0, 1.0]), WRONG, "indices"),
    Refused("indices that are booleans", lambda p: built(p, indices=[True, False, True]), WRONG, "indices"),
    Refused("indices that are complex", lambda p: built(p, indices=np.array([1, 0, 1], complex)), WRONG, "indices"),
    Refused(
        "no indices and no shape",
        lambda p: built(p, data=np.ones((0, 2, 3)), indices=np.zeros(0, int), indptr=[0, 0, 0], shape=None),
        ValueError,
        "shape",
    ),
    Refused("a shape that is negative", lambda p: built(p, shape=(-4, 6)), ValueError, "shape"),
    Refused("a shape of one number", lambda p: built(p, shape=(4,)), ValueError, "shape"),
    Refused("a shape of three numbers", lambda p: built(p, shape=(4, 6, 1)), ValueError, "shape"),
    Refused("a shape that is a number", lambda p: built(p, shape=4), ValueError, "shape"),
    Refused("a shape of floats", lambda p: built(p, shape=(4.0, 6.0)), ValueError, "shape"),
    Refused("a shape that is text", lambda p: built(p, shape="ab"), ValueError, "shape"),
    Refused("a shape that is no multiple", lambda p: built(p, shape=(5, 6)), ValueError, "shape"),
    Refused("a shape with too few columns", lambda p: built(p, shape=(4, 3)), ValueError, "indices"),
    Refused("a shape with too many rows", lambda p: built(p, shape=(6, 6)), ValueError, "indptr"),
    Refused("a shape beyond int64", lambda p: built(p, shape=(4, 3 * 2**63)), (ValueError, OverflowError), "shape"),
    Refused(
        "an empty matrix of negative shape",
        lambda p: bg.bsr_array((-1, 4), device=p.backend.name),
        ValueError,
        "shape",
    ),
    Refused(
        "an empty matrix beyond int64",
        lambda p: bg.bsr_array((2, 2**64), blocksize=(2, 2), device=p.backend.name),
        ValueError,
        "shape",
    ),
    Refused(
        "dense input with a wrong shape",
        lambda p: bg.bsr_array(ones(p, 4, 6), shape=(6, 4), blocksize=(2, 2)),
        ValueError,
        "shape",
    ),
    *(
        Refused(
            f"blocksize {blocksize!r}",
            lambda p, blocksize=blocksize: bg.bsr_array(ones(p, 4, 6), blocksize=blocksize),
            WRONG,
            "blocksize",
        )
        for blocksize in (
            (3, 3),
            (2, 4),
            (8, 6),
            (2,),
            (2, 3, 1),
            2,
            (-2, 3),
            (0, 3),
            (2, 0),
            (2.0, 3.0),
            "ab",
        )
    ),
    Refused(
        "an empty matrix whose blocksize does not divide",
        lambda p: bg.bsr_array((4, 6), blocksize=(3, 3), device=p.backend.name),
        ValueError,
        "blocksize",
    ),
    Refused("a blocksize that is not the data's", lambda p: built(p, blocksize=(3, 2)), ValueError, "blocksize"),
    Refused(
        "elements whose blocksize does not divide",
        lambda p: elements(p, [1.0], [0], [0], shape=(4, 6), blocksize=(3, 3)),
        ValueError,
        "blocksize",
    ),
    Refused(
        "a sparse matrix whose blocksize does not divide",
        lambda p: bg.bsr_array(matrix(p), blocksize=(3, 2)),
        ValueError,
        "blocksize",
    ),
    *(
        Refused(
            f"{value} as {dtype}",
            lambda p, value=value, dtype=dtype: bg.bsr_array(p.put(np.array([[1, value]])), dtype=dtype),
            ValueError,
            "dtype",
        )
        for value in (np.nan, np.inf, -np.inf, complex(np.nan, 1))
        for dtype in ("int8", "uint32", "int64")
    ),
    *(
        Refused(
            f"NaN in {name} as int32",
            lambda p, kind=kind: bg.bsr_array(p.put(np.array([[1, np.nan]]).astype(kind)), dtype="int32"),
            ValueError,
            "dtype",
        )
        for name, kind in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16))
    ),
    Refused(
        "NaN in the three arrays as int32",
        lambda p: built(p, data=np.full((3, 2, 3), np.nan), dtype="int32"),
        ValueError,
        "dtype",
    ),
    Refused(
        "NaN in elements as int32",
        lambda p: elements(p, [np.nan], [0], [0], shape=(4, 6), dtype="int32"),
        ValueError,
        "dtype",
    ),
    Refused(
        "NaN in a sparse matrix as int32",
        lambda p: bg.bsr_array(built(p, data=np.full((3, 2, 3), np.nan)), dtype="int32"),
        ValueError,
        "dtype",
    ),
    *(
        Refused(
            f"dtype {dtype}",
            lambda p, dtype=dtype: bg.bsr_array(ones(p, 4, 6), dtype=dtype),
            TypeError,
            "dtype",
        )
        for dtype in ("object", "U3", "S3", "datetime64[s]", "timedelta64[s]", "V8")
    ),
    *(
        Refused(
            f"data of dtype {dtype}",
            lambda p, dtype=dtype: built(p, data=np.ones((3, 2, 3)).astype(dtype)),
            WRONG,
            "data",
            backends="cpu",
        )
        for dtype in ("object", "U3", "datetime64[s]")
    ),
    *(
        Refused(
            f"{dtype} on a device",
            lambda p, dtype=dtype: bg.bsr_array(ones(p, 4, 6), dtype=dtype),
            TypeError,
            "dtype",
            backends="fake cuda",
        )
        for dtype in (np.longdouble, np.clongdouble)
    ),
    Refused(
        "a host matrix of long doubles sent to a device",
        lambda p: matrix(Place("cpu"), np.longdouble).to_device(p.backend.name),
        TypeError,
        "dtype",
        backends="fake cuda",
    ),
    Refused(
        "parts of one matrix in two backends",
        lambda p: bg.bsr_array(
            (
                p.put(sample().data),
                elsewhere(p).put(sample().indices),
                elsewhere(p).put(sample().indptr),
            )
        ),
        TypeError,
        "arg1",
    ),
    Refused(
        "coordinates in another backend than the blocks",
        lambda p: bg.bsr_array((p.put(sample().data), (elsewhere(p).put([0, 1, 1]), elsewhere(p).put([1, 0, 1])))),
        TypeError,
        "arg1",
    ),
    Refused("fewer rows than elements", lambda p: elements(p, [1.0, 2.0], [0], [0, 1]), ValueError, "row"),
    Refused("more elements than places", lambda p: elements(p, [1.0, 2.0], [0], [0]), ValueError, "row"),
    Refused("a negative row", lambda p: elements(p, [1.0], [-1], [0], shape=(4, 6)), ValueError, "row"),
    Refused("a negative column", lambda p: elements(p, [1.0], [0], [-1], shape=(4, 6)), ValueError, "col"),
    Refused("a row outside", lambda p: elements(p, [1.0], [4], [0], shape=(4, 6)), ValueError, "row"),
    Refused("a column outside", lambda p: elements(p, [1.0], [0], [6], shape=(4, 6)), ValueError, "col"),
    Refused("rows that are floats", lambda p: elements(p, [1.0], [0.5], [0], shape=(4, 6)), WRONG, "row"),
    Refused("columns that are floats", lambda p: elements(p, [1.0], [0], [0.5], shape=(4, 6)), WRONG, "col"),
    Refused("2-D elements", lambda p: elements(p, [[1.0]], [0], [0], shape=(4, 6)), ValueError, "data"),
    Refused(
        "no elements and no shape",
        lambda p: elements(p, np.zeros(0), np.zeros(0, int), np.zeros(0, int)),
        ValueError,
        "shape",
    ),
    Refused(
        "a block row outside",
        lambda p: elements(p, np.ones((1, 2, 3)), [2], [0], shape=(4, 6)),
        ValueError,
        "row",
    ),
    Refused(
        "a negative block column",
        lambda p: elements(p, np.ones((1, 2, 3)), [0], [-1], shape=(4, 6)),
        ValueError,
        "col",
    ),
    Refused(
        "block-COO in a shape that is no multiple",
        lambda p: elements(p, np.ones((1, 2, 3)), [0], [0], shape=(4, 7)),
        ValueError,
        "shape",
    ),
    Refused(
        "block-COO with empty blocks",
        lambda p: elements(p, np.ones((1, 0, 3)), [0], [0], shape=(4, 6)),
        ValueError,
        "block",
    ),
    Refused("a tuple of four", lambda p: bg.bsr_array((ones(p, 1),) * 4), ValueError, "arg1"),
    Refused("a tuple of one", lambda p: bg.bsr_array((ones(p, 1),)), ValueError, "arg1"),
    Refused("coordinates that are no pair", lambda p: bg.bsr_array((ones(p, 1), ones(p, 3))), WRONG, "arg1"),
    Refused("a vector", lambda p: bg.bsr_array(ones(p, 4)), ValueError, "1D"),
    Refused("a 3-D array", lambda p: bg.bsr_array(ones(p, 2, 2, 2)), ValueError, "3D"),
    Refused("a number", lambda p: bg.bsr_array(5.0), ValueError, "arg1", backends="cpu"),
    Refused("nothing", lambda p: bg.bsr_array(None), WRONG, "arg1", backends="cpu"),
    Refused("text", lambda p: bg.bsr_array("abc"), WRONG, "arg1", backends="cpu"),
    Refused("an object", lambda p: bg.bsr_array(object()), WRONG, "arg1", backends="cpu"),
    Refused("a ragged list", lambda p: bg.bsr_array([[1.0], [1.0, 2.0]]), ValueError, "", backends="cpu"),
    Refused("an unknown device", lambda p: bg.bsr_array(ones(p, 4, 6), device="tpu"), ValueError, "device"),
    Refused("a device that is no text", lambda p: bg.bsr_array(ones(p, 4, 6), device=3), WRONG, "device"),
    Refused("a move to an unknown device", lambda p: matrix(p).to_device("tpu"), ValueError, "device"),
    Refused(
        "from_dense to an unknown device",
        lambda p: bg.from_dense(ones(p, 4, 6), (2, 3), device="tpu"),
        ValueError,
        "device",
    ),
    Refused("from_dense of a vector", lambda p: bg.from_dense(ones(p, 4), (2, 3)), ValueError, "X"),
    Refused("from_dense of a sparse matrix", lambda p: bg.from_dense(matrix(p), (2, 3)), WRONG, "X"),
    Refused(
        "from_dense with a blocksize that does not divide",
        lambda p: bg.from_dense(ones(p, 4, 6), (3, 3)),
        ValueError,
        "blocksize",
    ),
    Refused(
        "from_dense with a negative threshold",
        lambda p: bg.from_dense(ones(p, 4, 6), (2, 3), threshold=-1),
        ValueError,
        "threshold",
    ),
    Refused(
        "from_dense with NaN as threshold",
        lambda p: bg.from_dense(ones(p, 4, 6), (2, 3), threshold=np.nan),
        ValueError,
        "threshold",
    ),
    Refused(
        "a CSR matrix with a column outside",
        lambda p: bg.bsr_array(
            p.sparse("csr", corrupted(sp.csr_array(np.eye(6)), "indices", 2, 10**6)), blocksize=(2, 3)
        ),
        ValueError,
        "ind",
        backends="cpu fake",
    ),
    Refused(
        "a CSR matrix with a negative column",
        lambda p: bg.bsr_array(p.sparse("csr", corrupted(sp.csr_array(np.eye(6)), "indices", 2, -5)), blocksize=(2, 3)),
        ValueError,
        "ind",
        backends="cpu fake",
    ),
    Refused(
        "a CSR matrix whose pointer falls",
        lambda p: bg.bsr_array(corrupted(sp.csr_array(np.eye(6)), "indptr", 2, 5), blocksize=(2, 3)),
        ValueError,
        "indptr",
        backends="cpu",
    ),
    Refused(
        "a scipy BSR matrix with a column outside",
        lambda p: bg.bsr_array(corrupted(sample().scipy(), "indices", 1, 10**6)),
        ValueError,
        "ind",
        backends="cpu",
    ),
    Refused(
        "a scipy BSR matrix whose pointer falls",
        lambda p: bg.bsr_array(corrupted(sample().scipy(), "indptr", 1, 5)),
        ValueError,
        "indptr",
        backends="cpu",
    ),
]

OPERANDS = [
    Refused("A @ number", lambda p: matrix(p) @ 2, ValueError, "calar"),
    Refused("number @ A", lambda p: 2 @ matrix(p), ValueError, "calar"),
    Refused("A @ 0-d array", lambda p: matrix(p) @ p.put(2.0), ValueError, "calar"),
    Refused("A @ 4-D array", lambda p: matrix(p) @ ones(p, 1, 2, 6, 2), ValueError, "other: wanted 1, 2 or 3"),
    Refused("4-D array @ A", lambda p: ones(p, 1, 2, 2, 4) @ matrix(p), ValueError, "(1, 2, 2, 4)"),
    Refused("A @ batch of other height", lambda p: matrix(p) @ ones(p, 6, 5, 2), ValueError, "(6, 5, 2)"),
    Refused("batch of other width @ A", lambda p: ones(p, 4, 2, 5) @ matrix(p), ValueError, "(4, 2, 5)"),
    Refused("A.T @ array of other height", lambda p: matrix(p).T @ ones(p, 6, 2), ValueError, "(6, 4)"),
    Refused("array of other width @ A.T", lambda p: ones(p, 2, 4) @ matrix(p).T, ValueError, "(6, 4)"),
    Refused("A @ vector too short", lambda p: matrix(p) @ ones(p, 5), ValueError, "mismatch"),
    Refused("A @ vector too long", lambda p: matrix(p) @ ones(p, 7), ValueError, "mismatch"),
    Refused("A @ array of other height", lambda p: matrix(p) @ ones(p, 4, 6), ValueError, "mismatch"),
    Refused("vector @ A of other length", lambda p: ones(p, 6) @ matrix(p), ValueError, "mismatch"),
    Refused("array @ A of other width", lambda p: ones(p, 2, 6) @ matrix(p), ValueError, "mismatch"),
    Refused("A @ A of other height", lambda p: matrix(p) @ matrix(p), ValueError, "mismatch"),
    Refused(
        "A @ CSR of other height",
        lambda p: matrix(p) @ p.sparse("csr", sp.csr_array(np.eye(5))),
        ValueError,
        "mismatch",
    ),
    Refused("A.dot(vector too short)", lambda p: matrix(p).dot(ones(p, 5)), ValueError, "mismatch"),
    Refused("A @ nothing", lambda p: matrix(p) @ None, TypeError, "@"),
    Refused("A @ text", lambda p: matrix(p) @ "ab", WRONG, ""),
    Refused("A @ objects", lambda p: matrix(p) @ np.array([object()] * 6), TypeError, "other", backends="cpu"),
    Refused("A @ dates", lambda p: matrix(p) @ np.zeros(6, "datetime64[s]"), TypeError, "other", backends="cpu"),
    Refused("A + array of other shape", lambda p: matrix(p) + ones(p, 3, 6), ValueError, "shape"),
    Refused("A + A of other shape", lambda p: matrix(p) + matrix(p).T, ValueError, "shape"),
    Refused("A - A of other shape", lambda p: matrix(p) - matrix(p).T, ValueError, "shape"),
    Refused("A < A of other shape", lambda p: matrix(p) < matrix(p).T, ValueError, "shape"),
    Refused("A / A of other shape", lambda p: matrix(p) / matrix(p).T, ValueError, "shape"),
    Refused("A + number", lambda p: matrix(p) + 1, NotImplementedError, "scalar"),
    Refused("multiply by another shape", lambda p: matrix(p).multiply(ones(p, 3, 6)), ValueError, "shape"),
    Refused("multiply by a longer row", lambda p: matrix(p).multiply(ones(p, 7)), ValueError, "shape"),
    Refused(
        "multiply by a sparse matrix of another shape",
        lambda p: matrix(p).multiply(matrix(p).T),
        ValueError,
        "shape",
    ),
    Refused("maximum with another shape", lambda p: matrix(p).maximum(matrix(p).T), ValueError, "shape"),
    *(
        Refused(f"{name} of two backends", attempt, TypeError, text)
        for name, attempt, text in (
            ("A @ vector", lambda p: matrix(p) @ ones(elsewhere(p), 6), "other"),
            ("A @ array", lambda p: matrix(p) @ ones(elsewhere(p), 6, 2), "other"),
            ("A @ A", lambda p: matrix(p) @ matrix(elsewhere(p)).T, "other"),
            ("A @ CSR", lambda p: matrix(p) @ elsewhere(p).sparse("csr", sp.csr_array(np.eye(6))), "other"),
            ("array @ A", lambda p: ones(elsewhere(p), 2, 4) @ matrix(p), ""),
            ("A + array", lambda p: matrix(p) + ones(elsewhere(p), 4, 6), "other"),
            ("A - array", lambda p: matrix(p) - ones(elsewhere(p), 4, 6), "other"),
            ("A + A", lambda p: matrix(p) + matrix(elsewhere(p)), "other"),
            ("A.multiply(array)", lambda p: matrix(p).multiply(ones(elsewhere(p), 4, 6)), "other"),
            ("A.multiply(A)", lambda p: matrix(p).multiply(matrix(elsewhere(p))), "other"),
            ("A / array", lambda p: matrix(p) / ones(elsewhere(p), 4, 6), "other"),
            ("A == array", lambda p: matrix(p) == ones(elsewhere(p), 4, 6), "other"),
            ("A < A", lambda p: matrix(p) < matrix(elsewhere(p)), "other"),
            ("maximum", lambda p: matrix(p).maximum(ones(elsewhere(p), 4, 6)), "other"),
            ("matmul(A, B)", lambda p: bg.matmul(matrix(p), ones(elsewhere(p), 6)), "B"),
            ("matmul(B, A)", lambda p: bg.matmul(ones(elsewhere(p), 4), matrix(p)), "A"),
            (
                "matmul(out=)",
                lambda p: bg.matmul(matrix(p), ones(p, 6), out=ones(elsewhere(p), 4)),
                "out",
            ),
            ("toarray(out=)", lambda p: matrix(p).toarray(out=ones(elsewhere(p), 4, 6)), "out"),
            ("sum(out=)", lambda p: matrix(p).sum(axis=0, out=ones(elsewhere(p), 6)), "out"),
            (
                "assignment",
                lambda p: assign(matrix(p), (slice(2, 4), slice(0, 3)), ones(elsewhere(p), 2, 3)),
                "value",
            ),
        )
    ),
]


def single(place: Place, **options: Any) -> Any:
    return bg.matmul(matrix(place, np.float32), ones(place, 6, dtype=np.float32), **options)


def fp8(place: Place, **options: Any) -> Any:
    return bg.matmul(matrix(place, np.uint8), ones(place, 6, dtype=np.uint8), **options)


def float8(place: Place, **options: Any) -> Any:
    return bg.matmul(matrix(place, np.uint8), np.ones(6, ml_dtypes.float8_e4m3fn), **options)


MATMUL = [
    Refused("no sparse operand", lambda p: bg.matmul(ones(p, 4, 4), ones(p, 4)), TypeError, "A, B"),
    Refused("two numbers", lambda p: bg.matmul(1, 2), TypeError, "A, B"),
    Refused("a B of other height", lambda p: bg.matmul(matrix(p), ones(p, 5)), ValueError, "B"),
    Refused("an A of other width", lambda p: bg.matmul(ones(p, 2, 5), matrix(p)), ValueError, "A"),
    Refused("a B of 4 dimensions", lambda p: bg.matmul(matrix(p), ones(p, 1, 1, 6, 2)), ValueError, "B: wanted 1, 2"),
    Refused("an A of 4 dimensions", lambda p: bg.matmul(ones(p, 1, 1, 2, 4), matrix(p)), ValueError, "A: wanted 1, 2"),
    Refused("a batch of other height", lambda p: bg.matmul(matrix(p), ones(p, 6, 2, 2)), ValueError, "B is (6, 2, 2)"),
    Refused("a batch of other width", lambda p: bg.matmul(ones(p, 4, 2, 2), matrix(p)), ValueError, "A is (4, 2, 2)"),
    *(
        Refused(
            f"out of shape {shape} for a batch", attempt, ValueError, f"shape {wanted}, got float64 of shape {shape}"
        )
        for shape, wanted, attempt in (
            ((2, 4, 5), (3, 4, 5), lambda p: bg.matmul(matrix(p), ones(p, 3, 6, 5), out=ones(p, 2, 4, 5))),
            ((4, 5), (1, 4, 5), lambda p: bg.matmul(matrix(p), ones(p, 1, 6, 5), out=ones(p, 4, 5))),
            ((3, 6, 5), (3, 5, 6), lambda p: bg.matmul(ones(p, 3, 5, 4), matrix(p), out=ones(p, 3, 6, 5))),
        )
    ),
    Refused(
        "a precision there is not", lambda p: single(p, precision="tf16"), ValueError, "precision: wanted 'float32'"
    ),
    Refused("a precision that is a number", lambda p: single(p, precision=32), TypeError, "got 32"),
    Refused("a precision that is a dtype", lambda p: single(p, precision=np.float32), TypeError, "precision"),
    *(
        Refused(
            f"precision for {dtype} in {out_dtype}",
            lambda p, dtype=dtype, out_dtype=out_dtype: bg.matmul(
                matrix(p, dtype), ones(p, 6, dtype=dtype), precision="tf32", out_dtype=out_dtype
            ),
            ValueError,
            f"precision: 'tf32' is for products in float32 and complex64, got {dtype}",
        )
        for dtype, out_dtype in (
            ("float64", None),
            ("float16", None),
            ("float16", "float32"),
            ("int32", None),
            ("complex128", None),
            ("float32", "float64"),
        )
    ),
    Refused("precision for fp8", lambda p: fp8(p, scale_a=1, precision="tf32"), ValueError, "precision: 'tf32'"),
    *(
        Refused(f"{name} = {value!r}", lambda p, name=name, value=value: fp8(p, **{name: value}), TypeError, f"{name}:")
        for name in ("scale_a", "scale_b")
        for value in ("1", 1j, [1.0], np.ones(1), np.complex64(1))
    ),
    Refused(
        "a scale on a device", lambda p: fp8(p, scale_a=p.put(np.ones(()))), TypeError, "scale_a", backends="fake cuda"
    ),
    Refused(
        "a scale for an A of floats",
        lambda p: bg.matmul(matrix(p), ones(p, 6, dtype=np.uint8), scale_a=2),
        TypeError,
        "A: wanted fp8 numbers as uint8, since a scale is given, got float64",
    ),
    Refused(
        "a scale for a B of floats",
        lambda p: bg.matmul(matrix(p, np.uint8), ones(p, 6), scale_b=2),
        TypeError,
        "B: wanted fp8 numbers as uint8, since a scale is given, got float64",
    ),
    *(
        Refused(
            f"fp8 into {dtype}",
            lambda p, dtype=dtype: fp8(p, scale_a=2, out_dtype=dtype),
            TypeError,
            f"out_dtype: wanted float32, float16, bfloat16 for a product of fp8, got {dtype}",
        )
        for dtype in ("float64", "uint8", "complex64", "bool")
    ),
    Refused("fp8 without a scale", lambda p: float8(p), TypeError, "B: does not support dtype float8", backends="cpu"),
    Refused("a number as B", lambda p: bg.matmul(matrix(p), 3.0), WRONG, "B"),
    Refused(
        "out of other shape",
        lambda p: bg.matmul(matrix(p), ones(p, 6, 2), out=ones(p, 4, 3)),
        ValueError,
        "out",
    ),
    Refused("out of other rank", lambda p: bg.matmul(matrix(p), ones(p, 6, 1), out=ones(p, 4)), ValueError, "out"),
    Refused(
        "integer out for floats",
        lambda p: bg.matmul(matrix(p), ones(p, 6), out=ones(p, 4, dtype=int)),
        WRONG,
        "out",
    ),
    Refused(
        "out and out_dtype that disagree",
        lambda p: bg.matmul(matrix(p), ones(p, 6), out=ones(p, 4), out_dtype="complex128"),
        ValueError,
        "out",
    ),
    Refused("a list as out", lambda p: bg.matmul(matrix(p), ones(p, 6), out=[0.0] * 4), TypeError, "out"),
    Refused(
        "out that is read-only",
        lambda p: bg.matmul(matrix(p), ones(p, 6), out=read_only(np.ones(4))),
        ValueError,
        "out",
        backends="cpu",
    ),
    Refused(
        "out whose elements share memory",
        lambda p: bg.matmul(matrix(p), ones(p, 6, 2), out=zero_strides(p, (4, 2))),
        ValueError,
        "out",
    ),
    Refused("alpha that is complex", lambda p: bg.matmul(matrix(p), ones(p, 6), alpha=1j), TypeError, "alpha"),
    Refused(
        "alpha that is a fraction for integers",
        lambda p: bg.matmul(matrix(p, np.int32), ones(p, 6, dtype=np.int32), alpha=0.5),
        TypeError,
        "alpha",
    ),
    *(
        Refused(
            f"alpha = {value} for integers",
            lambda p, value=value: bg.matmul(matrix(p, np.int32), ones(p, 6, dtype=np.int32), alpha=value),
            WRONG,
            "alpha",
        )
        for value in (np.nan, np.inf, -np.inf)
    ),
    Refused(
        "alpha = 2 for booleans",
        lambda p: bg.matmul(matrix(p, bool), ones(p, 6, dtype=bool), alpha=2),
        TypeError,
        "alpha",
    ),
    Refused("alpha that is text", lambda p: bg.matmul(matrix(p), ones(p, 6), alpha="2"), TypeError, "alpha"),
    Refused("alpha that is nothing", lambda p: bg.matmul(matrix(p), ones(p, 6), alpha=None), TypeError, "alpha"),
    Refused(
        "alpha that is a vector",
        lambda p: bg.matmul(matrix(p), ones(p, 6), alpha=np.ones(2)),
        TypeError,
        "alpha",
    ),
    Refused("beta without out", lambda p: bg.matmul(matrix(p), ones(p, 6), beta=1), ValueError, "beta"),
    Refused(
        "beta that is complex",
        lambda p: bg.matmul(matrix(p), ones(p, 6), beta=1j, out=ones(p, 4)),
        TypeError,
        "beta",
    ),
    Refused(
        "beta that is a fraction for integers",
        lambda p: bg.matmul(matrix(p, np.int32), ones(p, 6, dtype=np.int32), beta=0.5, out=ones(p, 4, dtype=np.int32)),
        TypeError,
        "beta",
    ),
    *(
        Refused(
            f"{out_dtype} for a product of {dtype}",
            lambda p, dtype=dtype, out_dtype=out_dtype: bg.matmul(
                matrix(p, dtype), ones(p, 6, dtype=dtype), out_dtype=out_dtype
            ),
            TypeError,
            "out_dtype",
        )
        for dtype, out_dtype in (
            ("complex64", "float64"),
            ("float32", "int64"),
            ("int32", "bool"),
            ("int8", "uint8"),
            ("uint64", "int64"),
            ("float64", "object"),
            ("float64", "U3"),
        )
    ),
    Refused("an unknown out_dtype", lambda p: bg.matmul(matrix(p), ones(p, 6), out_dtype="no"), TypeError, "no"),
]


def overlapping(place: Place, shared: str, product: str) -> Any:
    """A product whose out shares memory with an operand."""
    square = Sample(np.ones((1, 4, 4)), np.zeros(1, np.int32), np.array([0, 1], np.int32), (4, 4))
    A = place.bsr(square)
    X = ones(place, 1, 4, 4) if "batch" in product else ones(place, 4, 4)
    out = {"X": X, "part of X": X[..., ::-1, :], "A.data": A.data[0]}[shared]
    out = out[None] if out.ndim < X.ndim else out
    T = A.T if "A.T" in product else A
    return bg.matmul(X, T, out=out) if product.startswith("X") else bg.matmul(T, X, out=out)


MATMUL += [
    Refused(
        f"out that overlaps {shared} in {product}",
        lambda p, shared=shared, product=product: overlapping(p, shared, product),
        ValueError,
        f"out: overlaps {name}",
    )
    for product, names in (
        *((product, ("B", "A.data")) for product in ("A @ X", "A.T @ X", "A @ batch X")),
        *((product, ("A", "B.data")) for product in ("X @ A", "X @ A.T", "X @ A, X a batch")),
    )
    for shared, name in (("X", names[0]), ("part of X", names[0]), ("A.data", names[1]))
]

WINDOW = (slice(0, 2), slice(0, 3))  # where no block is stored
STORED = (slice(2, 4), slice(0, 3))

METHODS = [
    Refused("rows off the block boundary", lambda p: matrix(p)[1:3], NotImplementedError, "index"),
    Refused("columns off the block boundary", lambda p: matrix(p)[:, 0:2], NotImplementedError, "index"),
    Refused("a slice with steps", lambda p: matrix(p)[::2], NotImplementedError, "index"),
    Refused("a slice backwards", lambda p: matrix(p)[::-1], NotImplementedError, "index"),
    Refused("a single row", lambda p: matrix(p)[0], NotImplementedError, "index"),
    Refused("a single element", lambda p: matrix(p)[0, 0], NotImplementedError, "index"),
    Refused("a list of rows", lambda p: matrix(p)[[1, 2]], NotImplementedError, "index"),
    Refused("three slices", lambda p: matrix(p)[:, :, :], IndexError, "index"),
    Refused("two ellipses", lambda p: matrix(p)[..., ...], IndexError, "index"),
    Refused("text as an index", lambda p: matrix(p)["a"], (NotImplementedError, *WRONG), "index"),
    Refused("a value where no block is stored", lambda p: assign(matrix(p), WINDOW, 1.0), ValueError, "value"),
    Refused(
        "an array where no block is stored",
        lambda p: assign(matrix(p), (slice(0, 2), slice(None)), ones(p, 2, 6)),
        ValueError,
        "value",
    ),
    Refused("NaN where no block is stored", lambda p: assign(matrix(p), WINDOW, np.nan), ValueError, "value"),
    Refused("assignment off the blocks", lambda p: assign(matrix(p), 1, 1.0), NotImplementedError, "index"),
    Refused("an array of another shape", lambda p: assign(matrix(p), STORED, ones(p, 3, 3)), ValueError, "value"),
    Refused("a 3-D value", lambda p: assign(matrix(p), STORED, ones(p, 1, 2, 3)), ValueError, "value"),
    Refused(
        "a sparse value of another shape",
        lambda p: assign(matrix(p), STORED, matrix(p)),
        ValueError,
        "value",
    ),
    Refused("text as a value", lambda p: assign(matrix(p), STORED, "a"), WRONG, "value"),
    Refused("NaN into integers", lambda p: assign(matrix(p, np.int32), STORED, np.nan), WRONG, "value"),
    Refused(
        "NaN in an array into integers",
        lambda p: assign(matrix(p, np.int32), STORED, p.put(np.full((2, 3), np.nan))),
        WRONG,
        "value",
    ),
    Refused("a complex value into reals", lambda p: assign(matrix(p), STORED, 1j), WRONG, "value"),
    Refused("iteration", lambda p: list(matrix(p)), NotImplementedError, "iteration"),
    Refused("the length", lambda p: len(matrix(p)), TypeError, "length"),
    Refused("the truth", lambda p: bool(matrix(p)), ValueError, "truth"),
    Refused("setdiag beyond the matrix", lambda p: matrix(p).setdiag(1, k=6), ValueError, "k"),
    Refused("setdiag of a 2-D array", lambda p: matrix(p).setdiag(ones(p, 2, 2)), ValueError, "values"),
    Refused("setdiag of NaN in integers", lambda p: matrix(p, int).setdiag(np.nan), WRONG, "values"),
    Refused("setdiag of text", lambda p: matrix(p).setdiag("a"), WRONG, "values"),
    Refused("resize to no multiple", lambda p: matrix(p).resize(5, 6), ValueError, "shape"),
    Refused("resize to a negative shape", lambda p: matrix(p).resize(-4, 6), ValueError, "shape"),
    Refused("resize to three sides", lambda p: matrix(p).resize(4, 6, 1), ValueError, "shape"),
    Refused("resize to fractions", lambda p: matrix(p).resize(4.5, 6), ValueError, "shape"),
    Refused("reshape to another size", lambda p: matrix(p).reshape(5, 6), ValueError, "shape"),
    Refused("reshape with two unknowns", lambda p: matrix(p).reshape(-1, -1), ValueError, "unknown"),
    Refused("reshape in order X", lambda p: matrix(p).reshape(6, 4, order="X"), ValueError, "order"),
    Refused("reshape to text", lambda p: matrix(p).reshape("ab"), WRONG, "shape"),
    Refused("transpose with other axes", lambda p: matrix(p).transpose(axes=(0, 1)), ValueError, "axes"),
    Refused("an unknown format", lambda p: matrix(p).asformat("xyz"), ValueError, "format"),
    Refused("a format that is a method", lambda p: matrix(p).asformat("_device"), ValueError, "format"),
    Refused("tobsr that does not divide", lambda p: matrix(p).tobsr((3, 3)), ValueError, "blocksize"),
    Refused("tobsr of no pair", lambda p: matrix(p).tobsr(2), WRONG, "blocksize"),
    Refused("sum over axis 2", lambda p: matrix(p).sum(axis=2), ValueError, "axis"),
    Refused("sum over axis 1.0", lambda p: matrix(p).sum(axis=1.0), TypeError, "axis"),
    Refused("sum over axis (0, 0)", lambda p: matrix(p).sum(axis=(0, 0)), ValueError, "axis"),
    Refused("sum into another shape", lambda p: matrix(p).sum(axis=0, out=ones(p, 4)), ValueError, "out"),
    Refused("mean over axis -3", lambda p: matrix(p).mean(axis=-3), ValueError, "axis"),
    Refused("max over axis 2", lambda p: matrix(p).max(axis=2), ValueError, "axis"),
    Refused("max into out", lambda p: matrix(p).max(axis=0, out=ones(p, 6)), ValueError, "out"),
    Refused("argmax into out", lambda p: matrix(p).argmax(axis=0, out=ones(p, 6)), ValueError, "out"),
    Refused("max of nothing", lambda p: bg.bsr_array((0, 6), device=p.backend.name).max(), ValueError, "zero-size"),
    Refused("argmax of nothing", lambda p: bg.bsr_array((0, 6), device=p.backend.name).argmax(), ValueError, "empty"),
    Refused("power by an array", lambda p: matrix(p).power(ones(p, 2)), NotImplementedError, "scalar"),
    Refused("the zeroth power", lambda p: matrix(p).power(0), NotImplementedError, "zero power"),
    Refused(
        "the power of a matrix that is not square",
        lambda p: p.bsr(sample(), bg.bsr_matrix) ** 2,
        TypeError,
        "square",
    ),
    Refused("astype of objects", lambda p: matrix(p).astype(object), TypeError, "dtype"),
    Refused("astype against the casting", lambda p: matrix(p).astype("f4", casting="safe"), TypeError, "dtype"),
    *(
        Refused(
            f"astype({dtype}) of {value}",
            lambda p, value=value, dtype=dtype: built(p, data=np.full((3, 2, 3), value)).astype(dtype),
            ValueError,
            "dtype",
        )
        for value in (np.nan, np.inf)
        for dtype in ("int32", "uint8")
    ),
    Refused(
        "astype(int32) of NaN in bfloat16",
        lambda p: built(p, data=np.full((3, 2, 3), np.nan).astype(ml_dtypes.bfloat16)).astype("int32"),
        ValueError,
        "dtype",
    ),
    Refused("toarray into another shape", lambda p: matrix(p).toarray(out=ones(p, 6, 4)), ValueError, "out"),
    Refused(
        "toarray into another dtype",
        lambda p: matrix(p).toarray(out=ones(p, 4, 6, dtype=np.float32)),
        ValueError,
        "out",
    ),
    Refused(
        "toarray with order and out",
        lambda p: matrix(p).toarray(order="C", out=ones(p, 4, 6)),
        ValueError,
        "order",
    ),
    Refused("a dtype setter that does not fit", lambda p: setattr(matrix(p), "dtype", object), WRONG, ""),
    Refused(
        "integers in CSR on a device",
        lambda p: matrix(p, np.int32).tocsr(),
        TypeError,
        "astype('float64')",
        backends="fake cuda",
    ),
    Refused("float16 in CSR", lambda p: matrix(p, np.float16).tocsr(), TypeError, "astype('float32')"),
    Refused("bfloat16 in COO", lambda p: matrix(p, ml_dtypes.bfloat16).tocoo(), TypeError, "astype('float32')"),
]

TABLE = CONSTRUCTORS + OPERANDS + MATMUL + METHODS


def tables() -> list[Any]:
    """Every case in every backend where it makes sense."""
    return [
        pytest.param(case, param.values[0], id=f"{param.id}-{case.id}", marks=param.marks)
        for param in PLACES
        for case in TABLE
        if param.values[0].name in case.backends  # type: ignore[union-attr]
    ]


@pytest.mark.parametrize("case, place", tables())
def test_bad_input_is_refused_by_name(case: Refused, place: Place) -> None:
    with quietly(), pytest.raises(case.error) as refused:
        case.attempt(place)
    assert case.text in str(refused.value), f"the message does not name {case.text!r}: {refused.value}"


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.id for case in TABLE]
    assert len(names) == len(set(names))


@each_place
def test_a_refused_product_leaves_out_as_it_was(place: Place) -> None:
    out = ones(place, 4)
    for options in ({"alpha": 1j}, {"beta": 1j}, {"out_dtype": "complex64"}):
        with pytest.raises((ValueError, TypeError)):
            bg.matmul(matrix(place), ones(place, 6), out=out, **options)
    assert_values(place.dense(out), np.ones(4))


@each_place
def test_a_refused_assignment_leaves_the_matrix_as_it_was(place: Place) -> None:
    A = matrix(place)
    with pytest.raises(ValueError, match="value"):
        A[:2, :] = 5.0
    assert_values(place.blocks(A).dense, sample().dense)


# ------------------------------------------------------------------------- what must give the right answer
@each_place
def test_arrays_with_any_strides_make_the_same_matrix(place: Place) -> None:
    s = sample()
    data = place.put(np.repeat(np.repeat(s.data[:, ::-1], 2, axis=2), 2, axis=0))[::2, ::-1, ::2]
    indices = place.put(np.repeat(s.indices, 3))[::3]
    indptr = place.put(s.indptr[::-1].copy())[::-1]
    assert not data.flags.c_contiguous and not indices.flags.c_contiguous
    A = bg.bsr_array((data, indices, indptr), shape=s.shape)
    assert_values(place.blocks(A).dense, s.dense)
    x = np.arange(6.0)
    assert_values(place.dense(A @ place.put(x)), s.dense @ x)
    assert_values(place.dense(A.toarray()), s.dense)
    assert_values(place.foreign(A.tocsr(), "csr").toarray(), s.dense)
    assert_values(place.blocks(A.T).dense, s.dense.T)
    assert_values(place.blocks(A + A).dense, 2 * s.dense)
    assert_values(place.blocks(A @ A.T).dense, s.dense @ s.dense.T)


@each_place
def test_arrays_replaced_by_strided_ones_are_read_right(place: Place) -> None:
    s = sample()
    A = place.bsr(s)
    A.data = place.put(np.repeat(s.data, 2, axis=2))[:, :, ::2]
    A.indices = place.put(np.repeat(s.indices, 2))[::2]
    x = np.arange(12.0).reshape(6, 2)
    assert_values(place.dense(A @ place.put(x)), s.dense @ x)
    assert_values(place.dense(A.toarray()), s.dense)
    assert_values(place.blocks(A.T).dense, s.dense.T)
    assert_values(place.foreign(A.tocsr(), "csr").toarray(), s.dense)
    assert_values(place.foreign(A.tocoo(), "coo").toarray(), s.dense)


@each_place
def test_b_and_out_may_have_any_strides(place: Place) -> None:
    s = sample()
    x = np.arange(12.0).reshape(6, 2)
    X = place.put(np.repeat(x[::-1], 2, axis=1))[::-1, ::2]
    whole = place.put(np.full((8, 6), -1.0))
    out = whole[::-2, 1::3]
    assert bg.matmul(place.bsr(s), X, out=out) is out
    expected = np.full((8, 6), -1.0)
    expected[::-2, 1::3] = s.dense @ x
    assert_values(place.dense(whole), expected)


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">i4", ">c16", ">u2"])
def test_big_endian_arrays_are_read_right_on_the_host(dtype: str) -> None:
    s = sample()
    big = np.dtype(dtype)
    index = np.dtype(">i4")
    place = Place("cpu")
    A = bg.bsr_array((s.data.astype(big), s.indices.astype(index), s.indptr.astype(index)), shape=s.shape)
    blocks = place.blocks(A)
    assert blocks.dtype == big.newbyteorder("=") and blocks.dtype.isnative and blocks.indices.dtype.isnative
    assert_values(blocks.dense, s.dense.astype(blocks.dtype))
    x = np.arange(6).astype(big)
    y = A @ x
    assert y.dtype.isnative and y.dtype == blocks.dtype
    assert_values(y, s.dense.astype(blocks.dtype) @ x.astype(blocks.dtype))
    assert_values(place.dense(place.bsr(s) @ np.arange(6).astype(big)), s.dense @ np.arange(6))
    assert_values(place.blocks(bg.bsr_array(s.dense.astype(big), blocksize=(2, 3))).dense, s.dense)
    assert_values(place.dense(A + s.dense.astype(big)), 2 * s.dense)


@each_place
@pytest.mark.parametrize("index", ["i1", "u1", "i2", "u2", "u4", "u8", "i4", "i8"])
def test_any_integer_dtype_serves_as_index(place: Place, index: str) -> None:
    s = sample()
    A = built(place, indices=s.indices.astype(index), indptr=s.indptr.astype(index))
    assert_values(place.blocks(A).dense, s.dense)
    B = elements(place, s.data, s.block_rows.astype(index), s.indices.astype(index), shape=s.shape)
    assert_values(place.blocks(B).dense, s.dense)
    C = elements(place, [3.0], np.array([3], index), np.array([5], index), shape=s.shape)
    assert float(place.number(C.sum())) == 3.0


@each_place
@pytest.mark.parametrize("wide", [np.int64, np.int32])
def test_index_arrays_of_two_widths_become_one(place: Place, wide: Any) -> None:
    s = sample()
    other = np.int32 if wide is np.int64 else np.int64
    A = built(place, indices=s.indices.astype(wide), indptr=s.indptr.astype(other))
    assert place.blocks(A).indices.dtype == np.int64
    assert_values(place.dense(A @ ones(place, 6)), s.dense.sum(axis=1))
    assert place.blocks(built(place, bg.bsr_matrix, indices=s.indices.astype(wide))).indices.dtype == np.int32


def test_read_only_arrays_serve_as_operands_on_the_host() -> None:
    s = sample()
    place = Place("cpu")
    arrays = tuple(read_only(x.copy()) for x in (s.data, s.indices, s.indptr))
    A = bg.bsr_array(arrays, shape=s.shape)
    X = read_only(np.arange(12.0).reshape(6, 2))
    assert_values(A @ X, s.dense @ X)
    assert_values(A @ X[:, 0], s.dense @ X[:, 0])
    assert_values(X.T @ A.T, X.T @ s.dense.T)
    assert_values(A.toarray(), s.dense)
    assert_values(place.blocks(A.T).dense, s.dense.T)
    assert_values(place.blocks(A + A).dense, 2 * s.dense)
    assert_values(place.blocks(A @ A.T).dense, s.dense @ s.dense.T)
    assert_values(A.tocsr().toarray(), s.dense)
    assert_values(A.sum(axis=0), s.dense.sum(axis=0))
    assert_values(A[:2].toarray(), s.dense[:2])
    assert_values(A.max(axis=1).toarray(), s.dense.max(axis=1))
    assert_values(bg.bsr_array(read_only(s.dense.copy()), blocksize=(2, 3)).toarray(), s.dense)


@each_place
@pytest.mark.parametrize("flavour", [bg.bsr_array, bg.bsr_matrix])
@pytest.mark.parametrize("blocksize", [(1, 1), (2, 3)])
@pytest.mark.parametrize("shape", [(0, 0), (0, 6), (4, 0), (4, 6)])
def test_a_matrix_without_elements_can_do_everything(
    place: Place, shape: tuple[int, int], blocksize: tuple[int, int], flavour: type
) -> None:
    M, N = shape
    A = flavour(shape, blocksize=blocksize, device=place.backend.name)
    zero = np.zeros(shape)
    matrix = flavour is bg.bsr_matrix
    assert A.nnz == 0 and A.dtype == np.float64 and A.density == 0
    assert_values(place.dense(A.toarray()), zero)
    for result, expected in (
        (A.T, zero.T),
        (A + A, zero),
        (A - A, zero),
        (A.multiply(A), zero),
        (A * 2, zero),
        (A @ A.T, zero @ zero.T),
        (A.T @ A, zero.T @ zero),
        (A.copy(), zero),
        (abs(A), zero),
        (A.power(2), zero),
        (A.astype("float32"), zero),
        (A.tobsr((1, 1)), zero),
        (A[:0], zero[:0]),
        (A[:, :0], zero[:, :0]),
        (A.sin(), zero),
        (flavour(place.put(zero)), zero),
        (flavour(place.put(zero), blocksize=blocksize), zero),
    ):
        assert_values(place.blocks(result, flavour).dense, expected)
    for width in (0, 3):
        assert_values(place.dense(A @ ones(place, N, width)), np.zeros((M, width)))
        assert_values(place.dense(ones(place, width, M) @ A), np.zeros((width, N)))
    assert_values(place.dense(A @ ones(place, N)), np.zeros(M))
    out = ones(place, M, 2)
    bg.matmul(A, ones(place, N, 2), out=out, beta=3)
    assert_values(place.dense(out), np.full((M, 2), 3.0))
    bg.matmul(A, ones(place, N, 2), out=out)
    assert_values(place.dense(out), np.zeros((M, 2)))
    assert float(place.number(A.sum())) == 0
    assert_values(place.dense(A.sum(axis=0), matrix=matrix).reshape(-1), np.zeros(N))
    assert_values(place.dense(A.sum(axis=1), matrix=matrix).reshape(-1), np.zeros(M))
    for format in ("csr", "coo", "csc"):
        S = place.foreign(A.asformat(format), format, flavour)
        assert S.nnz == 0 and S.shape == shape
    assert A.count_nonzero() == 0 and [len(x) for x in A.nonzero()] == [0, 0]
    assert_values(place.dense(A.diagonal()), np.zeros(min(shape)))
    A.sum_duplicates()
    A.sort_indices()
    A.eliminate_zeros()
    A.prune()
    A.check_format()
    place.blocks(A, flavour)


@each_place
def test_elements_without_entries_make_an_empty_matrix(place: Place) -> None:
    nothing = np.zeros(0)
    for values in (nothing, np.zeros((0, 2, 3))):
        A = elements(place, values, nothing.astype(int), nothing.astype(int), shape=(4, 6))
        assert A.nnz == 0 and A.shape == (4, 6)
        place.blocks(A)


@each_place
def test_an_unequal_shape_is_simply_not_equal(place: Place) -> None:
    A = matrix(place)
    assert (A == A.T) is False and (A != A.T) is True


@each_place
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_a_negative_alpha_wraps_unsigned_results(place: Place, dtype: str) -> None:
    A = matrix(place, dtype)
    y = bg.matmul(A, ones(place, 6, dtype=dtype), alpha=-1)
    expected = -(sample(dtype).dense @ np.ones(6, dtype))
    assert_values(place.dense(y), expected)
    out = ones(place, 4, dtype=dtype)
    bg.matmul(A, ones(place, 6, dtype=dtype), out=out, alpha=0, beta=-2)
    assert_values(place.dense(out), -np.full(4, 2, dtype))


@each_place
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_an_alpha_beyond_the_dtype_is_refused_or_wraps(place: Place, dtype: str) -> None:
    A = matrix(place, dtype)
    try:
        y = bg.matmul(A, ones(place, 6, dtype=dtype), alpha=2**70 + 3)
    except (TypeError, ValueError) as refused:
        assert "alpha" in str(refused)
    else:
        assert_values(place.dense(y), 3 * (sample(dtype).dense @ np.ones(6, dtype)))


@each_place
def test_an_out_of_another_dtype_that_holds_the_product_is_filled(place: Place) -> None:
    s = sample()
    for dtype in (np.float32, np.complex64, np.float16):
        out = ones(place, 4, dtype=dtype)
        assert bg.matmul(place.bsr(s), ones(place, 6), out=out) is out
        assert_values(place.dense(out), s.dense.sum(axis=1))


# ------------------------------------------------------------------------------------- very large shapes
WIDE = 2**33


def wide_matrix(place: Place) -> Any:
    """4 x 2**33 in blocks of 2 x 2, three of them stored: column indices need 64 bits."""
    data = np.arange(1.0, 13.0).reshape(3, 2, 2)
    return elements(place, data, [0, 1, 1], [WIDE // 2 - 1, 5, WIDE // 2 - 2], shape=(4, WIDE))


@each_place
def test_indices_are_64_bit_where_the_shape_needs_it(place: Place) -> None:
    A = wide_matrix(place)
    blocks = place.blocks(A)
    assert blocks.indices.dtype == np.int64
    np.testing.assert_array_equal(blocks.indices, [WIDE // 2 - 1, 5, WIDE // 2 - 2])
    assert A.shape == (4, WIDE) and A.nnz == 12 and 0 < A.density < 1e-9
    assert bg.bsr_array((4, WIDE), blocksize=(2, 2), device=place.backend.name).indices.dtype == np.int64
    kept = np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8]), np.array([9, 10, 11, 12])
    for B in (A.copy(), A + A - A, A * 1.0, A.astype("float64"), A.get().to_device(place.backend.name)):
        blocks = place.blocks(B)
        assert blocks.indices.dtype == np.int64
        assert sorted(blocks.data.reshape(-1, 4).tolist()) == [x.tolist() for x in kept]


@each_place
def test_wide_matrices_reduce_slice_and_reshape(place: Place) -> None:
    A = wide_matrix(place)
    rows = np.array([1 + 2, 3 + 4, 5 + 6 + 9 + 10, 7 + 8 + 11 + 12], float)
    assert_values(place.dense(A.sum(axis=1)), rows)
    assert float(place.number(A.sum())) == 78 and float(place.number(A.max())) == 12
    assert A.count_nonzero() == 12
    row, col = (place.dense(x) for x in A.nonzero())
    assert_values(row, np.repeat([0, 1, 2, 3], [2, 2, 4, 4]))
    assert_values(col[:4], [WIDE - 2, WIDE - 1, WIDE - 2, WIDE - 1])
    assert_values(place.dense(A.argmax(axis=1)), [WIDE - 1, WIDE - 1, WIDE - 3, WIDE - 3])
    assert int(A.argmax()) == 3 * WIDE + WIDE - 3
    assert_values(place.dense(A[:, WIDE - 4 :].toarray()), [[0, 0, 1, 2], [0, 0, 3, 4], [9, 10, 0, 0], [11, 12, 0, 0]])
    assert_values(place.dense(A[2:, 10:12].toarray()), [[5, 6], [7, 8]])
    A[2:, 10:12] = 0
    assert float(place.number(A.sum())) == 52
    B = A.tobsr((1, 2))
    assert B.blocksize == (1, 2) and float(place.number(B.sum())) == 52
    assert_values(place.dense(A.diagonal(k=WIDE - 2)), [1, 4])
    A.setdiag([7.0], k=WIDE - 1)
    assert float(place.number(A.sum())) == 52 - 2 + 7
    A.resize(2, 20)
    assert A.shape == (2, 20) and A.nnz == 0


@each_place
def test_wide_matrices_convert(place: Place) -> None:
    A = wide_matrix(place)
    S = place.foreign(A.tocoo(), "coo")
    assert S.shape == (4, WIDE) and int(S.col.max()) == WIDE - 1 and S.nnz == 12
    assert float(S.sum()) == 78
    S = place.foreign(A.tocsr(), "csr")
    assert int(S.indices.max()) == WIDE - 1 and S.indptr.tolist() == [0, 2, 4, 8, 12]
    B = bg.bsr_array(A.tocsr(), blocksize=(2, 2))
    assert sorted(place.blocks(B).indices.tolist()) == [5, WIDE // 2 - 2, WIDE // 2 - 1]
    T = place.foreign(A.reshape(2, 2 * WIDE), "coo")
    assert int(T.col.max()) == 2 * WIDE - 1


@each_place
def test_a_matrix_of_two_to_the_62_elements_transposes(place: Place) -> None:
    side, block = 2**31, 2**10
    data = np.zeros((2, block, block), np.int8)
    data[0, 3, 5], data[1, 7, 9] = 1, 2
    last = side // block - 1
    A = elements(place, data, [0, last], [last, 0], shape=(side, side))
    assert place.dense(A.indices).dtype == np.int64 and A.shape == (side, side)
    T = A.T
    assert_values(place.dense(T.indices), [last, 0])
    B = T.astype("float32")
    S = place.foreign(B.tocoo(), "coo")
    at = np.flatnonzero(S.data)
    assert_values(S.row[at], [9, side - block + 5])
    assert_values(S.col[at], [side - block + 7, 3])
    assert int(place.number(A.trace(offset=side - block + 2))) == 1
    C = A + T
    assert int(place.number(C.sum())) == 6 and C.blocksize == (block, block)


@each_place
def test_more_elements_than_int64_counts_are_refused_or_kept_apart(place: Place) -> None:
    shape = (8, INT64.max)
    # Flat positions 2 * N + 5 and 3 agree modulo 2**64.
    try:
        A = elements(place, [1.0, 2.0], [0, 2], [3, 5], shape=shape, blocksize=(2, 1))
    except (ValueError, OverflowError) as refused:
        assert "shape" in str(refused)
    else:
        blocks = place.blocks(A)
        assert_values(blocks.indices, [3, 5])
        assert_values(blocks.indptr, [0, 1, 2, 2, 2])
        assert_values(blocks.data.reshape(2, 2), [[1.0, 0.0], [2.0, 0.0]])
        assert_values(place.dense(A.sum(axis=1)), [1.0, 0, 2.0, 0, 0, 0, 0, 0])


@each_place
def test_more_blocks_than_int64_counts_are_refused_or_kept_apart(place: Place) -> None:
    columns = INT64.max
    try:
        A = elements(place, np.ones((2, 1, 1)), [0, 2], [3, 5], shape=(8, columns))
        A = A + A
    except (ValueError, OverflowError) as refused:
        assert "shape" in str(refused)
    else:
        blocks = place.blocks(A)
        assert_values(blocks.indices, [3, 5])
        assert_values(blocks.indptr, [0, 1, 1, 2, 2, 2, 2, 2, 2])
        assert_values(blocks.data.reshape(2), [2.0, 2.0])


# ------------------------------------------------------------------- index arrays written to by the user
CORRUPTIONS = {
    "an index far outside": "A.indices[1] = 10**8",
    "an index just outside": "A.indices[1] = 2",
    "a negative index": "A.indices[1] = -1",
    "a very negative index": "A.indices[1] = -(10**8)",
    "a pointer far outside": "A.indptr[-1] = 10**6",
    "a pointer just outside": "A.indptr[-1] = 4",
    "a pointer that falls": "A.indptr[1] = 3; A.indptr[2] = 1",
    "a pointer in the middle far outside": "A.indptr[1] = 10**6",
    "a negative pointer": "A.indptr[1] = -5",
    "a first pointer that is not 0": "A.indptr[0] = 1",
    "fewer indices": "A.indices = A.indices[:1].copy()",
    "fewer blocks": "A.data = A.data[:1].copy()",
    "fewer pointers": "A.indptr = A.indptr[:2].copy()",
}
#: Operations whose result depends on every index and pointer.
READERS = {
    "A @ x": "A @ np.ones(6)",
    "A @ X": "A @ np.ones((6, 3))",
    "X @ A": "np.ones((3, 4)) @ A",
    "A.T @ x": "A.T @ np.ones(4)",
    "A.T @ X": "A.T @ np.ones((4, 3))",
    "X @ A.T": "np.ones((3, 6)) @ A.T",
    "A @ batch": "A @ np.ones((2, 6, 3))",
    "A.T.data": "A.T.data",
    "a copied A.T": "A.transpose(copy=True)",
    "A @ B.T": "A @ B.T",
    "B.T @ A": "B.T @ A",
    "A + B": "A + B",
    "A.multiply(B)": "A.multiply(B)",
    "toarray": "A.toarray()",
    "tocsr": "A.tocsr()",
    "tocoo": "A.tocoo()",
    "tocsc": "A.tocsc()",
    "tobsr": "A.tobsr((1, 1))",
    "check_format": "A.check_format()",
}
#: Operations that may do without some of them.
OTHERS = {
    "sum over rows": "A.sum(axis=1)",
    "sum over columns": "A.sum(axis=0)",
    "max": "A.max(axis=0)",
    "argmax": "A.argmax(axis=1)",
    "nonzero": "A.nonzero()",
    "diagonal": "A.diagonal()",
    "setdiag": "A.setdiag(1.0)",
    "slice": "A[2:, :3]",
    "assignment": "A[2:, :3] = 0.0",
    "sort_indices": "A.sort_indices()",
    "sum_duplicates": "A.sum_duplicates()",
    "eliminate_zeros": "A.eliminate_zeros()",
    "resize": "A.resize(2, 3)",
    "print": "str(A)",
}
SCRIPT = """
import json, sys
import numpy as np
import bsrgemm as bg

corruptions, operations = json.load(sys.stdin)
np.seterr(all="ignore")

def matrix():
    data = (np.arange(18.0).reshape(3, 2, 3) % 7) + 1
    return bg.bsr_array((data, np.array([1, 0, 1]), np.array([0, 1, 3])), shape=(4, 6))

for kind, corruption in corruptions.items():
    for name, code in operations.items():
        print(f"{kind}: {name}", end=": ", flush=True)  # the last line says what crashed
        scope = {"A": matrix(), "B": matrix(), "np": np}
        exec(corruption, scope)
        try:
            exec(code, scope)
            print("no error")
        except Exception as error:
            print(type(error).__name__)
"""


def test_index_arrays_spoiled_by_the_user_end_in_an_error_on_the_host() -> None:
    """In a process of its own: what is tested is that it does not crash."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        input=json.dumps([CORRUPTIONS, READERS | OTHERS]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"exit status {done.returncode} after {lines[-1:]}: {done.stderr[-2000:]}"
    assert len(lines) == len(CORRUPTIONS) * len(READERS | OTHERS)
    outcomes = [tuple(line.rsplit(": ", 2)) for line in lines]
    errors = ("ValueError", "IndexError")
    assert [x for x in outcomes if x[1] in READERS and x[2] not in errors] == []
    assert [x for x in outcomes if x[1] in OTHERS and x[2] not in ("no error", *errors)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("corruption", list(CORRUPTIONS.values())[:10], ids=list(CORRUPTIONS)[:10])
def test_kernels_clamp_index_arrays_spoiled_by_the_user(corruption: str) -> None:
    place = Place("cuda")
    A = matrix(place)
    exec(corruption, {"A": A})
    X = ones(place, 6, 5)
    for result in (A @ X, A @ X[:, 0]):
        assert result.shape[0] == 4
    for result in (A.T @ X[:4], A.T @ X[:4, 0]):
        assert result.shape[0] == 6
    good = matrix(place) @ X  # the device still works
    assert_values(place.dense(good), sample().dense @ np.ones((6, 5)))
