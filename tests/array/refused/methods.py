"""Indices, assignments, reductions and other methods with bad arguments."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import bsrgemm as bg

from . import WRONG, Refused, assign, built, matrix, ones, sample

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
