"""Sampled products: the product of two dense matrices, computed only at the blocks of a pattern."""

from __future__ import annotations

from typing import Any

from .._array.base import BsrBase, kind_of, no_bsr
from .._backend.base import Array
from ..dtypes import check_dtype, number_of
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
    """Return ``alpha * (X @ Y) + beta * out`` at the blocks of `pattern`, for dense `X` and `Y`.

    Parameters
    ----------
    X, Y : arrays of shape (M, K) and (K, N)
        The dense operands, on the same device as `pattern`. They may have any strides and any dtype that `matmul`
        accepts.
    pattern : bsr_array or bsr_matrix of shape (M, N)
        A matrix whose blocks are the ones to compute. Its values are not read.
    alpha, beta : number
        Factors of the product and of the old values of `out`.
    out : bsr_array or bsr_matrix, optional
        A matrix with the blocks of `pattern` in the same order. Its values are overwritten by the result.
    out_dtype : dtype, optional
        Dtype of the result; by default the dtype of `out`, or without it the dtype to which NumPy promotes those of
        `X` and `Y`.
    precision : {"float32", "tf32"}, optional
        Precision of products in float32, as in `matmul`.

    Returns
    -------
    bsr_array or bsr_matrix
        `out` if it was given, otherwise a new matrix with the structure of `pattern`. A block that `pattern` stores
        twice appears once in the new matrix. On a GPU new matrices for one pattern share copies of its index arrays,
        until `indices` or `indptr` of one of them is read.

    Raises
    ------
    TypeError
        If `pattern` or `out` is not a BSR matrix, if an operand is not a dense array on the same device as `pattern`,
        if a dtype is not supported, if `out_dtype` cannot hold the product, or if `alpha` or `beta` is not a number
        that the result's dtype can represent.
    ValueError
        If the shapes do not agree, if `X` or `Y` does not have two dimensions, if `out` has another structure or dtype
        than the result, if `out` is given and `pattern` stores a block twice, if `beta` is not 0 and there is no `out`,
        or if `precision` is unknown or is given for other dtypes than float32 and complex64.

    Notes
    -----
    16-bit floats are summed in float32 and rounded once. The CPU multiplies gathered columns of `Y` by BLAS. GPUs since
    Ampere use their tensor cores for floats of 16, 32 and 64 bits and for complex numbers, whose products are real ones
    of twice the width. Both operands may be row-major or column-major, as they are or transposed: ``sddmm(dY.T, X,
    W)``, the gradient of weights, reads both as they lie. These are copied in each call, with up to 4 GiB of temporary
    memory: an operand whose rows or columns do not start at multiples of 16 bytes, or whose blocks have a side that is
    no multiple of 16; the result of such blocks; a complex `Y`; on Hopper, in large products of 16-bit floats, a
    row-major `Y` in blocks of 16 or 32 columns and a column-major `X` in blocks of 16 rows, where the product gains
    more than the copy takes; elsewhere, a column-major `X` unless the rows of a block are a multiple of 128 bytes.
    Other dtypes, and products that are small, run on the CUDA cores of any GPU, with the kernel of the product of two
    BSR matrices, and need temporary memory for a copy of `Y`. Where it is predicted to be faster, all of ``X @ Y`` is
    computed and the blocks are copied from it, with up to 4 GiB of temporary memory.

    On Hopper, products of 16-bit floats in blocks of 16, 32 or 64 rows and 16, 32, 64 or 128 columns are computed in
    tiles of blocks that need not be neighbours, from the second product with a pattern on, unless the pattern is small
    or has few blocks, or `alpha`, `beta` or `out_dtype` is given. Results have the same bits. The second product makes
    a list of these tiles, which is kept with the pattern: about 16, 24 or 39 bytes for each stored block of 64 x 64,
    32 x 32 or 16 x 16. For blocks of R x N the list has at most ``blocks // wide + windows * 64 // group`` tiles of
    ``1 + group + wide + group * wide`` int32 numbers, where ``group = 128 // R``, ``wide = 256 // N``, and `windows` is
    the number of windows of 64 block rows and ``32 * wide`` block columns that cover the pattern.

    The call waits for the GPU only in two cases: to search for duplicate blocks in a pattern that is not known to be in
    canonical format, and to compare the structure of `out` with that of `pattern` if they do not share their index
    arrays and `out` is not an earlier result for `pattern`. Later calls with operands of the same shapes, strides and
    dtypes start without these checks, wherever the operands are, until somebody writes into the index arrays.

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
        raise TypeError(f"pattern: wanted a bsr_array or bsr_matrix, got {no_bsr(pattern, 'pattern')}")
    backend, ready = pattern._backend, getattr(pattern, "_memo", None)
    if not (backend.is_dense(X) and backend.is_dense(Y)):
        X, Y = (x if backend.is_dense(x) else dense_matrix(pattern, x, name) for x, name in ((X, "X"), (Y, "Y")))
    simple = _is_simple(alpha, beta, out_dtype)
    if ready is not None and simple and (precision is None or type(precision) is str):
        found = _again(ready, pattern, (X, Y), out, precision)
        if found is not None:
            return found
    with backend.recording(X, Y, pattern, out):
        return _checked(X, Y, pattern, alpha, beta, out, out_dtype, precision)


def _checked(
    X: Any, Y: Any, pattern: Any, alpha: Any, beta: Any, out: Any, out_dtype: Any, precision: str | None
) -> Any:
    """Check the arguments of `sddmm`, and carry it out."""
    backend, simple = pattern._backend, _is_simple(alpha, beta, out_dtype)
    X, Y = (dense_matrix(pattern, x, name) for x, name in ((X, "X"), (Y, "Y")))
    if (X.shape[0], Y.shape[1]) != pattern._shape or X.shape[1] != Y.shape[0]:
        raise ValueError(
            f"sddmm: dimension mismatch: X is {tuple(X.shape)}, Y is {tuple(Y.shape)}, pattern is {pattern._shape}"
        )
    if out is not None and (not isinstance(out, BsrBase) or out._backend is not backend):
        raise TypeError(f"out: wanted a bsr_array or bsr_matrix on {backend.name!r}, got {kind_of(out)}")
    wanted = None if out is None else out.dtype
    if out_dtype is not None:
        wanted = check_dtype(out_dtype, backend.dtypes, "out_dtype")
    check_precision(precision)
    dtype, acc, single = product_dtypes(X.dtype, Y.dtype, wanted)
    asked, precision = precision, checked_precision(precision, single, X.dtype, Y.dtype, acc)
    alpha, beta = checked_factor(alpha, dtype, "alpha"), checked_factor(beta, dtype, "beta")
    if out is None and beta != 0:
        raise ValueError(f"beta: got {beta!r} without an `out` whose values it scales; pass `out`, or leave beta at 0")
    if out is not None:
        _check_out(out, pattern, dtype)
        if pattern._has_duplicates:
            raise ValueError("pattern: holds a block twice, which `out` cannot; call pattern.sum_duplicates() first")
    elif pattern._origin is not None:  # a transpose that is not built yet: compute Y.T @ X.T on the original matrix
        source, _ = pattern._source()
        return sddmm(Y.T, X.T, source, alpha=alpha, out_dtype=dtype, precision=precision).T
    elif pattern._has_duplicates:
        pattern = pattern._new(pattern._canonical(), canonical=True)
    engine = ENGINES.of(backend)
    launch = engine.sampled_launch(X, Y, pattern, dtype, precision == "tf32") if simple else None
    if launch is not None:
        operand: Any = getattr(pattern, "_memo", None)
        key = operand.sampled_key(pattern, X, Y, None if out is None else dtype, asked)
        if key is not None and launch.lasting:
            operand.calls.remember(key, launch)
        return _result(pattern, launch.start(), out)
    plain = alpha == 1 and beta == 0
    _, indices, indptr = pattern._validated
    block = pattern.blocksize
    data = engine.sampled(X, Y, indices, indptr, block, dtype if plain else acc, precision == "tf32")
    if not plain:
        data = data * number_of(acc, alpha)
        if out is not None and beta != 0:
            data += number_of(acc, beta) * out.data.astype(acc, copy=False)
        data = data.astype(dtype, copy=False)
    if out is None:
        return pattern._with_data(data)
    out._before_writing()
    out.data[...] = data
    return out


def _is_simple(alpha: Any, beta: Any, out_dtype: Any) -> bool:
    """Tell whether a product is asked for as it is, in the dtype to which those of its operands are promoted."""
    return out_dtype is None and type(alpha) is type(beta) is int and (alpha, beta) == (1, 0)


def _again(ready: Any, pattern: BsrBase, operands: tuple[Any, Any], out: Any, precision: str | None) -> Any:
    """Start a product whose arguments were checked before, except for addresses and the structure of `out`.

    None means that the product has to go the usual way, which raises the error if there is one.
    """
    X, Y = operands
    if out is not None and type(out) is not type(pattern):
        return None
    key = ready.sampled_key(pattern, X, Y, None if out is None else out.dtype, precision)
    launch = None if key is None else ready.calls.get(key)
    if launch is None:
        return None
    if out is not None:
        _check_out(out, pattern, launch.dtype)
    return _result(pattern, launch.start((X, Y)), out)


def _result(pattern: BsrBase, data: Array, out: BsrBase | None) -> Any:
    """Return `out` with these values, or a new matrix with the pattern."""
    if out is None:
        return pattern._with_data(data)
    out._before_writing()
    out.data[...] = data
    return out


def dense_matrix(pattern: BsrBase, x: Any, name: str) -> Array:
    """Return a dense operand as a matrix on the device of the pattern, after checking that it has two dimensions."""
    X = dense_operand(pattern, x, name)
    if X.ndim != 2:
        raise ValueError(f"{name}: wanted 2 dimensions, got {X.ndim} in shape {tuple(X.shape)}")
    return X


def _check_out(out: BsrBase, pattern: BsrBase, dtype: Any) -> None:
    """Raise ValueError unless `out` has the structure of the pattern and this dtype."""
    if out.dtype != dtype:
        raise ValueError(f"out: wanted dtype {dtype}, got {out.dtype}")
    if out is not pattern:
        check_structure(out, pattern, "out")


def check_structure(
    matrix: BsrBase, pattern: BsrBase, name: str, owner: str = "the pattern", way_out: str = ""
) -> None:
    """Raise ValueError unless a matrix has the shape, the block size and the blocks of a pattern, in the same order.

    Messages call the pattern `owner`, and end with `way_out`.
    """
    theirs: Any
    for what in ("_shape", "blocksize"):
        mine, theirs = getattr(matrix, what), getattr(pattern, what)
        if mine != theirs:
            raise ValueError(f"{name}: wanted the {what.lstrip('_')} of {owner}, {theirs}, got {mine}{way_out}")
    unread = matrix._was_unread
    if unread is not None and (unread is pattern._was_unread or unread is pattern._unread_copies()):
        return
    for array in ("indices", "indptr"):
        x, y = (getattr(A._blocks, array) for A in (matrix, pattern))
        if x is not y and (len(x) != len(y) or not bool((x == y).all())):  # synchronize!
            raise ValueError(f"{name}: wanted the blocks of {owner}, got other {array}{way_out}")
