"""Sampled products: the blocks of a dense product that a pattern has."""

from __future__ import annotations

from typing import Any

from .._array.base import BsrBase
from .._backend.base import Array
from ..dtypes import check_dtype
from .engine import ENGINES
from .matmul import check_precision, checked_factor, checked_precision, dense_operand, product_dtypes


def sddmm(
    X: Any,
    Y: Any,
    pattern: Any,
    *,
    alpha: Any = 1,
    beta: Any = 0,
    out: Any = None,
    out_dtype: Any = None,
    precision: str | None = None,
) -> Any:
    """``alpha * (X @ Y) + beta * out`` on the blocks of `pattern`, for dense `X` and `Y`.

    Parameters
    ----------
    X, Y : arrays (M, K) and (K, N)
        In the place of `pattern`, of any strides.
    pattern : bsr_array or bsr_matrix of shape (M, N)
        Which blocks are computed. Its values are not read.
    alpha, beta : number
        Factors of the product and of what `out` holds.
    out : bsr_array or bsr_matrix, optional
        A matrix with the blocks of `pattern`, in the same order, whose values are written.
    out_dtype : dtype, optional
        Dtype of the result; by default NumPy's promotion of `X` and `Y`.
    precision : {"float32", "tf32"}, optional
        As in `matmul`, for products in float32.

    Returns
    -------
    bsr_array or bsr_matrix
        `out`, or a new matrix with the structure of `pattern`; blocks that `pattern` holds twice are there once.

    Notes
    -----
    16-bit floats are summed in float32 and rounded once. On the CPU this is BLAS on gathered columns of `Y`. On GPUs
    since Ampere, floats of 16, 32 and 64 bits with blocks of 16 n x 16 n and rows of `X` of a multiple of 16 bytes run
    on the tensor cores; an operand whose lines do not begin at such multiples is copied, and on Hopper a row-major `Y`
    of 16-bit floats if the columns of blocks are no multiple of 32. The rest runs on the plain cores of any GPU, by the
    kernel of ``A @ A2``, which takes room for a copy of `Y`. The call waits for the GPU only to look for duplicates in
    a pattern that is not known to be in canonical format, or to compare the structure of `out` if it has index arrays
    of its own.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> pattern = bg.bsr_array(np.kron([[1, 0], [1, 1]], np.ones((2, 2))), blocksize=(2, 2))
    >>> X, Y = np.arange(8.0).reshape(4, 2), np.ones((2, 4))
    >>> bg.sddmm(X, Y, pattern).toarray()
    array([[ 1.,  1.,  0.,  0.],
           [ 5.,  5.,  0.,  0.],
           [ 9.,  9.,  9.,  9.],
           [13., 13., 13., 13.]])
    """
    if not isinstance(pattern, BsrBase):
        raise TypeError(f"pattern: wanted a bsr_array or bsr_matrix, got {type(pattern).__name__}")
    backend = pattern._backend
    X, Y = (dense_matrix(pattern, x, name) for x, name in ((X, "X"), (Y, "Y")))
    if (X.shape[0], Y.shape[1]) != pattern._shape or X.shape[1] != Y.shape[0]:
        raise ValueError(
            f"sddmm: dimension mismatch: X is {tuple(X.shape)}, Y is {tuple(Y.shape)}, pattern is {pattern._shape}"
        )
    if out is not None and (not isinstance(out, BsrBase) or out._backend is not backend):
        raise TypeError(f"out: wanted a bsr_array or bsr_matrix on {backend.name!r}, got {type(out).__name__}")
    wanted = None if out is None else out.dtype
    if out_dtype is not None:
        wanted = check_dtype(out_dtype, backend.dtypes, "out_dtype")
    check_precision(precision)
    dtype, acc, single = product_dtypes(X.dtype, Y.dtype, wanted)
    precision = checked_precision(precision, single, X.dtype, Y.dtype, acc)
    alpha, beta = checked_factor(alpha, dtype, "alpha"), checked_factor(beta, dtype, "beta")
    if out is None and beta != 0:
        raise ValueError(f"beta: got {beta!r} without an `out` to take it from")
    if out is not None:
        _check_out(out, pattern, dtype)
        if pattern._has_duplicates:
            raise ValueError("pattern: holds a block twice, which `out` cannot; call pattern.sum_duplicates() first")
    elif pattern._origin is not None:  # the transpose of a matrix: its blocks are those of Y.T @ X.T
        source, _ = pattern._source()
        return sddmm(Y.T, X.T, source, alpha=alpha, out_dtype=dtype, precision=precision).T
    elif pattern._has_duplicates:
        pattern = pattern._new(pattern._canonical(), canonical=True)
    plain = alpha == 1 and beta == 0
    _, indices, indptr = pattern._validated
    block = pattern.blocksize
    data = ENGINES.of(backend).sampled(X, Y, indices, indptr, block, dtype if plain else acc, precision == "tf32")
    if not plain:
        data = data * acc.type(alpha)
        if out is not None and beta != 0:
            data += acc.type(beta) * out.data.astype(acc, copy=False)
        data = data.astype(dtype, copy=False)
    if out is None:
        return pattern._with_data(data)
    out._before_writing()
    out.data[...] = data
    return out


def dense_matrix(pattern: BsrBase, x: Any, name: str) -> Array:
    """A dense matrix in the place of the pattern."""
    X = dense_operand(pattern, x, name)
    if X.ndim != 2:
        raise ValueError(f"{name}: wanted 2 dimensions, got {X.ndim} in shape {tuple(X.shape)}")
    return X


def _check_out(out: BsrBase, pattern: BsrBase, dtype: Any) -> None:
    """ValueError unless `out` has the structure of the pattern and this dtype."""
    if out.dtype != dtype:
        raise ValueError(f"out: wanted dtype {dtype}, got {out.dtype}")
    for what, mine, theirs in (("shape", out._shape, pattern._shape), ("blocksize", out.blocksize, pattern.blocksize)):
        if mine != theirs:
            raise ValueError(f"out: wanted the {what} of the pattern, {theirs}, got {mine}")
    if out is pattern:
        return
    for name in ("indices", "indptr"):
        x, y = (getattr(matrix._blocks, name) for matrix in (out, pattern))
        if x is not y and (len(x) != len(y) or not bool((x == y).all())):  # synchronize!
            raise ValueError(f"out: wanted the blocks of the pattern, got other {name}")
