"""Products: checks, result dtype and output, then the home of the data does the work."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from ._construct import from_sparse
from ._reduce import Reductions
from .dtypes import BOOL, accumulator_dtype, check_dtype, is_float, result_dtype
from .home import Array
from .homes import home_of
from .structure import Blocks


def matmul(A: Any, B: Any, *, out: Array | None = None, out_dtype: Any = None, alpha: Any = 1, beta: Any = 0) -> Any:
    """``alpha * (A @ B) + beta * out`` for a BSR `A` and a dense `B`, or a dense `A` and a BSR `B`.

    Parameters
    ----------
    A, B : bsr_array or bsr_matrix, and a dense array in the same place
        The dense operand may be 1-D or 2-D, have any strides and belong to any library that speaks DLPack
        or the CUDA array interface.
    out : array, optional
        Where to write, of any strides; must not overlap an operand. Read only when `beta` is not 0.
    out_dtype : dtype, optional
        Dtype of the result; by default NumPy's promotion of the two. Ask for float32 from 16-bit floats or
        int32 from int8 to keep what they were summed in.
    alpha, beta : number
        Factors of the product and of what `out` holds.

    Returns
    -------
    array
        `out`, or a new array.

    Notes
    -----
    16-bit floats are summed in float32 and rounded once. The same call on the same card gives the same bits.
    The work goes to CuPy's current stream; the call does not wait for it.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.diag([1.0, 2.0, 3.0, 4.0]), blocksize=(2, 2))
    >>> bg.matmul(A, np.ones((4, 2)), alpha=10)
    array([[10., 10.],
           [20., 20.],
           [30., 30.],
           [40., 40.]])
    """
    if isinstance(A, Products):
        return _times_dense(A, B, out, out_dtype, alpha, beta)
    if not isinstance(B, Products):
        raise TypeError(
            f"A, B: wanted a bsr_array or bsr_matrix among the operands, got {type(A).__name__} and {type(B).__name__}"
        )
    X = _dense_operand(B, A, "A")
    result = _times_dense(B.transpose(), X.T, None if out is None else out.T, out_dtype, alpha, beta, names=("B", "A"))
    return result.T if out is None else out


def _dense_operand(A: Products, x: Any, name: str) -> Array:
    X = A._operand(x, name)
    if X is None or A._home.is_sparse(X):
        raise TypeError(f"{name}: wanted a dense array on {A._home.name!r}, got {type(x).__name__}")
    check_dtype(X.dtype, A._home.dtypes, name)
    if X.ndim not in (1, 2):
        raise ValueError(f"{name}: wanted 1 or 2 dimensions, got {X.ndim}")
    return X


def _times_dense(
    A: Products, B: Any, out: Any, out_dtype: Any, alpha: Any, beta: Any, names: tuple[str, str] = ("A", "B")
) -> Array:
    X = _dense_operand(A, B, names[1])
    M, K = A._shape
    if X.shape[0] != K:
        raise ValueError(f"matmul: dimension mismatch: {names[0]} is {A._shape}, {names[1]} is {tuple(X.shape)}")
    shape = (M, *X.shape[1:])
    promoted = result_dtype(A.dtype, X.dtype)
    if out is not None and not A._home.is_dense(out):
        raise TypeError(f"out: wanted an array on {A._home.name!r}, got {type(out).__name__}")
    dtype = promoted if out is None else out.dtype
    if out_dtype is not None:
        dtype = check_dtype(out_dtype, A._home.dtypes, "out_dtype")
    if dtype != promoted and not _can_hold(promoted, dtype):
        raise TypeError(f"out_dtype: {dtype} cannot hold a product of {A.dtype} and {X.dtype} ({promoted})")
    alpha, beta = _factor(alpha, dtype, "alpha"), _factor(beta, dtype, "beta")
    if out is None:
        if beta != 0:
            raise ValueError(f"beta: got {beta!r} without an `out` to take it from")
        out = A._home.xp.empty(shape, dtype)
    else:
        _check_out(A, X, out, shape, dtype)
    if out.size:
        acc = accumulator_dtype(result_dtype(promoted, dtype))
        A = A._for_product(acc)
        X2, out2 = (X, out) if X.ndim == 2 else (X[:, None], out[:, None])
        A._home.spmm(A, X2, out2, acc, alpha, beta)
    return out


def _can_hold(promoted: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """May a product of dtype `promoted` be delivered as `dtype`? Not from complex to real, float to integer..."""
    order = "biufc"
    kinds = ["f" if is_float(d) else d.kind for d in (promoted, dtype)]
    if "u" in kinds and kinds[0] != kinds[1] and set(kinds) <= {"i", "u"}:
        return np.can_cast(promoted, dtype)
    return order.index(kinds[0]) <= order.index(kinds[1])


def _factor(x: Any, dtype: np.dtype[Any], name: str) -> Any:
    """alpha or beta as a Python number that the result's dtype can carry."""
    if type(x) is int and dtype != BOOL:
        return x
    if isinstance(x, np.generic) or (isinstance(x, np.ndarray) and x.ndim == 0):
        x = x.item()
    if not isinstance(x, numbers.Number):
        raise TypeError(f"{name}: wanted a number, got {type(x).__name__}")
    if isinstance(x, complex) and dtype.kind != "c":
        raise TypeError(f"{name}: got the complex {x!r} for a result of dtype {dtype}")
    if dtype.kind in "iu" and not (isinstance(x, int) or float(x).is_integer()):  # type: ignore[arg-type]
        raise TypeError(f"{name}: got {x!r} for a result of dtype {dtype}, wanted an integer")
    if dtype == BOOL and x not in (0, 1):
        raise TypeError(f"{name}: got {x!r} for a boolean result, wanted 0 or 1")
    return x


def _check_out(A: Products, X: Array, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"out: wanted {dtype} of shape {shape}, got {out.dtype} of shape {tuple(out.shape)}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out: array is read-only")
    if out.size and 0 in out.strides and any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
        raise ValueError("out: elements share memory (a stride is 0)")
    first, last = A._home.extent(out)
    operands = (A._home.extent(X), *A._home.operand_extents(A))
    for name, (start, stop) in zip(("B", "A.data", "A.indices", "A.indptr"), operands, strict=True):
        if start < last and first < stop:
            raise ValueError(f"out: overlaps {name}")


class Products(Reductions):
    """``@`` on the layer of `Reductions`."""

    def __matmul__(self, other: Any) -> Any:
        if self._is_scalar(other):
            raise ValueError("Scalar operands are not allowed, use '*' instead")
        return self._matmul(other)

    def _matmul(self, other: Any) -> Any:
        if type(other) is not np.ndarray:
            operand = self._operand(other)
            if operand is None:
                return NotImplemented
            if self._home.is_sparse(operand):
                return self._matmul_sparse(operand)
            if isinstance(operand, np.matrix):
                return self._container(self._matmul_dense(operand.view(np.ndarray)))
            other = operand
        return self._matmul_dense(other)

    def _matmul_dense(self, other: Array) -> Array:
        return _times_dense(self, other, None, None, 1, 0, names=("self", "other"))

    def __rmatmul__(self, other: Any) -> Any:
        if self._is_scalar(other):
            raise ValueError("Scalar operands are not allowed, use '*' instead")
        operand = self._operand(other)
        if operand is None:
            return NotImplemented
        result = self.transpose()._matmul(operand.transpose())
        return NotImplemented if result is NotImplemented else result.transpose()

    def dot(self, other: Any) -> Any:
        """``A * other`` for a number, ``A @ other`` for anything else."""
        return self * other if self._is_scalar(other) else self @ other

    def _for_product(self, dtype: np.dtype[Any]) -> Products:
        """This matrix, with duplicates of integers and booleans added up in their own dtype first.

        True and True is True, int8 wraps: in a wider `dtype` their sum would be another.
        """
        if self.dtype.kind not in "biu" or dtype == self.dtype or not self._has_duplicates:
            return self
        return self._new(self._canonical(), canonical=True)

    def _matmul_sparse(self, other: Any) -> Any:
        """BSR with blocks (R of self, C of other); other formats count as blocks of one column."""
        inner = self.blocksize[1]
        if other.ndim != 2 or self._shape[1] != other.shape[0]:
            raise ValueError(f"matmul: dimension mismatch: {self._shape} and {tuple(other.shape)}")
        C = other.blocksize[1] if other.format == "bsr" else 1
        B = _reblocked(self, other, (inner, C))
        M, N = self._shape[0], other.shape[1]
        dtype = result_dtype(self.dtype, B.data.dtype)
        A = self._for_product(dtype)
        B = self._new(B, tuple(other.shape))._for_product(dtype)._blocks
        return self._new(self._home.multiply(A._sound, B, N // C, dtype), (M, N))


def _reblocked(A: Products, other: Any, blocksize: tuple[int, int]) -> Blocks:
    """Blocks of another sparse matrix of the same home in the size asked for."""
    assert home_of(other) is A._home
    return from_sparse(A._home, other, None, False, blocksize).blocks
