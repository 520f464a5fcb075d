"""Constructors with bad input."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import scipy.sparse as sp

import bsrgemm as bg

from ...strategies import Place
from . import WRONG, Refused, built, corrupted, elements, elsewhere, matrix, ones, sample

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
