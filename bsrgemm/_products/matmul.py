"""Products of a BSR matrix: this module checks arguments and allocates results; an engine does the computation."""

from __future__ import annotations

import math
import numbers
import operator
import os
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from .._array.base import BsrBase, kind_of
from .._array.construct import check_block_elements, from_sparse
from .._array.convert import Conversions
from .._backend.base import Array, Backend
from .._backend.registry import backend_of, target
from ..dtypes import BOOL, FLOAT8, FP8_RESULTS, UINT8, accumulator_dtype, check_dtype, is_float, result_dtype
from .call import ProductCall
from .engine import ENGINES

_PRECISIONS = (None, "float32", "tf32")
#: Types of factors that can safely be compared with 0 before they are checked.
_PLAIN = (int, float, complex)


#: What `matmul` is asked for beside its operands: out, out_dtype, alpha, beta, precision, and the product of the scales
#: of fp8 operands, which is None for other operands. A plain tuple, since every call makes one.
_Options = tuple[Any, Any, Any, Any, str | None, float | None]
_PLAIN_PRODUCT: _Options = (None, None, 1, 0, None, None)
#: Names of the matrix and the dense operand in error messages of the operator ``@``.
_SELF_AND_OTHER = ("self", "other")


def matmul(
    A: Any,
    B: Any,
    *,
    out: Array | None = None,
    out_dtype: Any = None,
    alpha: Any = 1,
    beta: Any = 0,
    precision: str | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
) -> Any:
    """Return ``alpha * (A @ B) + beta * out`` for a BSR `A` and a dense `B`, or for a dense `A` and a BSR `B`.

    For two sparse operands, of which at least one is BSR, it returns ``A @ B`` in BSR and takes no options.

    Parameters
    ----------
    A, B : bsr_array or bsr_matrix, and array
        One BSR matrix and one dense array, on the same device. Their dtypes may be bool, integers of 8 to 64 bits,
        float16, bfloat16, float32, float64, complex64 and complex128; on the CPU also NumPy's long double types. The
        dense operand may have any strides and come from any library that supports DLPack or the CUDA array interface.
        It is a vector, a matrix or a batch of matrices. With a BSR `A` of shape (M, K), `B` has shape (K,), (K, N) or
        (batch, K, N), and the result (M,), (M, N) or (batch, M, N). With a BSR `B` of shape (M, K), `A` has shape (M,),
        (N, M) or (batch, N, M), and the result (K,), (N, K) or (batch, N, K).
    out : array, optional
        Array of the shape and dtype of the result, which is written there. It may have any strides, may come from
        another library as the dense operand may, and must not overlap an operand. Its old values are read only if
        `beta` is not 0.
    out_dtype : dtype, optional
        Dtype of the result; by default the dtype of `out`, or without it the dtype to which NumPy promotes those of
        `A` and `B`. Choose float32 for 16-bit floats, or int32 for int8, to get sums that are not rounded or wrapped to
        the narrower dtype.
    alpha, beta : number
        Factors of the product and of the old values of `out`.
    precision : {"float32", "tf32"}, optional
        Precision of products in float32 and complex64. "tf32" allows tensor cores to round the factors to 10 bits of
        mantissa. The default is "float32", or "tf32" if the environment variable CUPY_TF32 is a positive number, as
        in CuPy; the variable is read once. The CPU always computes in float32.
    scale_a, scale_b : number, optional
        Factors of operands in fp8. If at least one of them is given, both operands are e4m3 numbers
        (``ml_dtypes.float8_e4m3fn``) stored as uint8; on the CPU the dense operand may also have the dtype
        ``float8_e4m3fn``. The result is ``scale_a * scale_b * alpha * (A @ B) + beta * out``, summed in float32 and
        returned in float32 or, if `out_dtype` or `out` says so, in float16 or bfloat16. A factor that is not given is
        1.

    Returns
    -------
    array, bsr_array or bsr_matrix
        `out` if it was given, otherwise a new array on the device of the operands; a BSR matrix if both operands are
        sparse.

    Raises
    ------
    TypeError
        If neither operand is a BSR matrix, if the other one is not an array or matrix on the same device, if a dtype is
        not supported, if the result's dtype cannot hold the product (complex to real, float to integer), if `alpha`,
        `beta`, `scale_a` or `scale_b` is not a suitable number, or if a scale is given for operands that are not fp8.
    ValueError
        If the shapes do not agree, if the dense operand does not have 1, 2 or 3 dimensions, if `out` has a wrong shape
        or dtype, is read-only, overlaps an operand or has elements that share memory, if `beta` is not 0 and there is
        no `out`, if `precision` is unknown or is given for other dtypes than float32 and complex64, or if an option
        is given for two sparse operands.
    RuntimeError
        If the GPU is older than compute capability 7.5, or if NVRTC is missing or does not support the GPU.

    Notes
    -----
    16-bit floats are summed in float32 and rounded once. The same call on the same card gives the same bits. On the
    GPU, the work is queued on CuPy's current stream and the call does not wait for it, with one exception: a product of
    integers or booleans that is summed in another dtype must search for duplicate blocks, which waits for the GPU
    unless the matrix is known to be in canonical format. The first call of a kind compiles its kernel, unless the disk
    cache has it. A call whose operands have the shapes, strides and dtypes of an earlier one is not checked again,
    except that `out` must not overlap an operand; on the same arrays it reuses the prepared launch.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.diag([1.0, 2.0, 3.0, 4.0]), blocksize=(2, 2))
    >>> bg.matmul(A, np.ones((4, 2)), alpha=10)
    array([[10., 10.],
           [20., 20.],
           [30., 30.],
           [40., 40.]])
    >>> bg.matmul(A, np.ones((5, 4, 3))).shape
    (5, 4, 3)

    The product is added to 100 times the old values of `out`:

    >>> out = np.ones(4)
    >>> bg.matmul(A, np.ones(4), out=out, beta=100)
    array([101., 102., 103., 104.])

    Two sparse operands give a sparse matrix:

    >>> bg.matmul(A, A).diagonal()
    array([ 1.,  4.,  9., 16.])

    fp8 operands are bytes, and each can have a factor:

    >>> from ml_dtypes import float8_e4m3fn
    >>> X = np.array([[0.5, 1.0], [2.0, 3.0]], np.float32)
    >>> A8 = bg.bsr_array(X.astype(float8_e4m3fn).view(np.uint8), blocksize=(2, 2))
    >>> bg.matmul(A8, X.astype(float8_e4m3fn), scale_a=10)
    array([[ 22.5,  35. ],
           [ 70. , 110. ]], dtype=float32)
    """
    if precision is not None:
        check_precision(precision)
    scale = None
    if scale_a is not None or scale_b is not None:
        scale = _scale(scale_a, "scale_a") * _scale(scale_b, "scale_b")
    options = (out, out_dtype, alpha, beta, precision, scale)
    if isinstance(A, BsrBase):
        if not A._backend.is_dense(B) and _is_sparse(B):
            return _sparse_product(A, B, options)
        return _product(A, B, options, names=("A", "B"))
    if not isinstance(B, BsrBase):
        raise TypeError(f"A, B: wanted a bsr_array or bsr_matrix among the operands, got {kind_of(A)} and {kind_of(B)}")
    if not B._backend.is_dense(A) and _is_sparse(A):
        return _sparse_product(A, B, options)
    return _product(B, A, options, left=True, names=("B", "A"))


def _is_sparse(x: Any) -> bool:
    backend = backend_of(x)
    return backend is not None and backend.is_sparse(x)


def _sparse_product(A: Any, B: Any, options: _Options) -> Any:
    """Return ``A @ B`` in BSR for two sparse operands; raise ValueError for an option, since there are none."""
    names = ("out", "out_dtype", "alpha", "beta", "precision", "scale_a or scale_b")
    for name, given, default in zip(names, options, _PLAIN_PRODUCT, strict=True):
        if given is not default and (default is None or given != default):
            raise ValueError(
                f"{name}: is for a product with a dense array, and both operands are sparse; cast or scale the "
                "matrices, or use plan(A, B) to compute values of the same pattern again"
            )
    return A @ B if isinstance(A, BsrBase) else B.__rmatmul__(A)


def _product(
    A: Any,
    x: Any,
    options: _Options = _PLAIN_PRODUCT,
    *,
    left: bool = False,
    names: tuple[str, str] = _SELF_AND_OTHER,
) -> Array:
    """Return ``A @ x``, or ``x @ A`` if the dense operand is on the `left`."""
    given, out_dtype, alpha, beta, precision, scale = options
    backend, out = A._backend, given
    if not backend.is_dense(x):
        x = dense_operand(A, x, names[1], scale is not None)
    if out is not None and not backend.is_dense(out):
        out = target(backend, out, "out")
        options = (out, *options[1:])
    source, lazy = (A, False) if A._origin is None else A._source()
    ready, key = source._memo, None
    if ready is not None and type(beta) in _PLAIN:
        key = ready.call_key(source, x, out, (left, lazy, out_dtype, precision, scale is None, beta == 0))
        known = None if key is None else ready.calls.get(key)
        if known is not None and (found := known.again(source, x, options)) is not None:
            return found if given is None else given
    X = dense_operand(A, x, names[1], scale is not None)
    M, K = A._shape[::-1] if left else A._shape
    sides = X.shape
    ndim = len(sides)
    if sides[-1 if left or ndim == 1 else -2] != K:
        shapes = f"{names[0]} is {A._shape}", f"{names[1]} is {tuple(sides)}"
        raise ValueError("matmul: dimension mismatch: " + ", ".join(shapes[::-1] if left else shapes))
    A, transposed = source, left ^ lazy
    wanted = None if out is None else out.dtype
    if out_dtype is not None:
        wanted = check_dtype(out_dtype, backend.dtypes, "out_dtype")
    if scale is None:
        dtype, acc, single = product_dtypes(A.data.dtype, X.dtype, wanted)
        precision = checked_precision(precision, single, A.data.dtype, X.dtype, acc)
    else:
        dtype, acc = _fp8_dtypes(A, names[0], wanted, precision)
    alpha, beta = checked_factor(alpha, dtype, "alpha"), checked_factor(beta, dtype, "beta")
    if left and ndim > 1:  # x @ A is computed as the transpose of A.T @ x.T
        X = X.T if ndim == 2 else X.swapaxes(1, 2)
        sides = X.shape
    shape = (M, *sides[1:]) if ndim < 3 else (sides[0], M, sides[2])
    if out is None:
        if beta != 0:
            raise ValueError(
                f"beta: got {beta!r} without an `out` whose values it scales; pass `out`, or leave beta at 0"
            )
        inner = backend.xp.empty(shape, dtype)
    else:
        inner = target(backend, out, "out")
        _check_out(A, X, out, shape if not left or ndim < 2 else (*shape[:-2], shape[-1], M), dtype, names)
        if left and ndim > 1:
            inner = out.T if ndim == 2 else out.swapaxes(1, 2)
    if inner.size:
        X2, out2 = (X, inner) if ndim > 1 else (X[:, None], inner[:, None])
        matrix = for_product(A, acc) if scale is None else A
        if scale is not None:
            alpha = scale * alpha
        launch = ENGINES.of(backend).multiply_dense(
            ProductCall(matrix, X2, out2, acc, alpha, beta, transposed, precision == "tf32", scale is not None)
        )
        if key is not None and launch is not None and (scale is not None or adds_duplicates(A, acc)):
            ready.calls.remember(key, _Known(shape, dtype, left and ndim > 1, launch))
    if given is not None:
        return given
    if left and ndim > 1:
        return inner.T if ndim == 2 else inner.swapaxes(1, 2)
    return inner


class _Known(NamedTuple):
    """What is known of a kind of product after its arguments were checked: what its result is, and its launch."""

    #: shape and dtype of the array that is allocated for the result, and whether the result is its transpose
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    turned: bool
    launch: Any

    def again(self, A: BsrBase, x: Array, options: _Options) -> Array | None:
        """Start the product; None if `out` may overlap an operand, which the usual way has to check."""
        out, _, alpha, beta, _, scale = options
        if options is not _PLAIN_PRODUCT:
            alpha, beta = checked_factor(alpha, self.dtype, "alpha"), checked_factor(beta, self.dtype, "beta")
            if scale is not None:
                alpha = scale * alpha
        if out is None:
            result = A._backend.empty(self.shape, self.dtype)
            self.launch.start((x, result), alpha, beta)
            return result.swapaxes(-2, -1) if self.turned else result
        started = self.launch.start(
            (x, out), alpha, beta, may_overlap=lambda: ENGINES.of(A._backend).overlapping(out, x, A) is not None
        )
        return out if started else None


def dense_operand(A: BsrBase, x: Any, name: str, fp8: bool = False) -> Array:
    """Return a dense operand as an array of the backend of `A`, after checking its dtype and its 1 to 3 dimensions."""
    X = A._operand(x, name)
    if X is None or A._backend.is_sparse(X):
        raise TypeError(f"{name}: wanted a dense array on {A._backend.name!r}, got {type(x).__name__}")
    if not fp8:
        _check_held(X.dtype, A._backend, name)
    elif X.dtype == FLOAT8:
        X = X.view(UINT8)
    elif X.dtype != UINT8:
        raise TypeError(f"{name}: wanted fp8 numbers as uint8, since a scale is given, got {X.dtype}")
    if not 1 <= X.ndim <= 3:
        raise ValueError(f"{name}: wanted 1, 2 or 3 dimensions, got {X.ndim} in shape {tuple(X.shape)}")
    return X


@lru_cache(maxsize=256)
def _check_held(dtype: np.dtype[Any], backend: Backend, name: str) -> None:
    """Do what `check_dtype` does, with a cache; its key is the backend, which is hashed faster than all its dtypes."""
    check_dtype(dtype, backend.dtypes, name)


@lru_cache(maxsize=1024)
def product_dtypes(
    a: np.dtype[Any], x: np.dtype[Any], wanted: np.dtype[Any] | None
) -> tuple[np.dtype[Any], np.dtype[Any], bool]:
    """Return the dtype of a product, the dtype of its sums, and whether the product may be computed in tf32."""
    promoted = result_dtype(a, x)
    dtype = promoted if wanted is None else wanted
    if dtype != promoted and not _can_hold(promoted, dtype):
        raise TypeError(f"out_dtype: {dtype} cannot hold a product of {a} and {x} ({promoted})")
    acc = accumulator_dtype(result_dtype(promoted, dtype))
    return dtype, acc, promoted.char in "fF" and acc.char in "fF"


def check_precision(precision: Any) -> None:
    """Raise ValueError or TypeError unless `precision` is a value that `matmul` accepts."""
    if not isinstance(precision, str | None) or precision not in _PRECISIONS:
        wrong = ValueError if isinstance(precision, str) else TypeError
        raise wrong(f"precision: wanted 'float32', 'tf32' or None, got {precision!r}")


def checked_precision(
    precision: str | None, single: bool, a: np.dtype[Any], b: np.dtype[Any], acc: np.dtype[Any]
) -> str | None:
    """Return the precision of a product, which defaults to the environment's choice.

    Raise ValueError if a precision is given for a product that is not computed in `single` precision.
    """
    if single:
        return precision or _default_precision()
    if precision is not None:
        raise ValueError(
            f"precision: {precision!r} is for products in float32 and complex64, got {a} and {b}, summed in {acc}"
        )
    return None


@cache
def _default_precision() -> str | None:
    """Return "tf32" if the environment variable CUPY_TF32 asks for it, as CuPy interprets it, otherwise None."""
    text = os.environ.get("CUPY_TF32", "0")
    try:
        return "tf32" if int(text) > 0 else None
    except ValueError:
        raise ValueError(f"CUPY_TF32: wanted an integer in this environment variable, got {text!r}") from None


def _fp8_dtypes(
    A: BsrBase, name: str, wanted: np.dtype[Any] | None, precision: str | None
) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the dtype of an fp8 product and the dtype of its sums."""
    if A.data.dtype != UINT8:
        raise TypeError(f"{name}: wanted fp8 numbers as uint8, since a scale is given, got {A.data.dtype}")
    if precision is not None:
        raise ValueError(f"precision: {precision!r} is for products in float32 and complex64, got fp8")
    acc = np.dtype(np.float32)
    dtype = acc if wanted is None else wanted
    if dtype not in FP8_RESULTS:
        raise TypeError(f"out_dtype: wanted {', '.join(map(str, FP8_RESULTS))} for a product of fp8, got {dtype}")
    return dtype, acc


def _scale(x: Any, name: str) -> float:
    """Return scale_a or scale_b as a float; 1 if it is None."""
    if x is None:
        return 1.0
    if isinstance(x, np.generic) or (isinstance(x, np.ndarray) and x.ndim == 0):
        x = x.item()
    if not isinstance(x, numbers.Real):
        raise TypeError(f"{name}: wanted a real number, got {type(x).__name__}")
    if not math.isfinite(x):
        raise ValueError(f"{name}: wanted a finite number, got {x!r}")
    return float(x)


def _can_hold(promoted: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return whether a product of dtype `promoted` may become `dtype`; complex to real, for example, is not allowed."""
    order = "biufc"
    kinds = ["f" if is_float(d) else d.kind for d in (promoted, dtype)]
    if "u" in kinds and kinds[0] != kinds[1] and set(kinds) <= {"i", "u"}:
        return np.can_cast(promoted, dtype)
    return order.index(kinds[0]) <= order.index(kinds[1])


def checked_factor(x: Any, dtype: np.dtype[Any], name: str) -> Any:
    """Return alpha or beta as a Python number, after checking that the dtype of the result can represent it."""
    kind = dtype.kind
    if (type(x) is int and kind != "b") or (type(x) is float and kind in "fcV"):  # "V": bfloat16
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


def _check_out(
    A: BsrBase, X: Array, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], names: tuple[str, str]
) -> None:
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"out: wanted {dtype} of shape {shape}, got {out.dtype} of shape {tuple(out.shape)}")
    k = ENGINES.of(A._backend).overlapping(out, X, A)
    if k is not None:
        array = ("", ".data", ".indices", ".indptr")[k]
        raise ValueError(f"out: overlaps {names[0 if k else 1]}{array}")


def adds_duplicates(A: BsrBase, dtype: np.dtype[Any]) -> bool:
    """Return whether a product that is summed in `dtype` gives the right result if A has duplicate blocks.

    Duplicates are summed in the dtype of A: True plus True is True, and int8 wraps around. Both are different in a
    wider dtype, in which duplicates must therefore be summed before the product.
    """
    own = A.data.dtype
    return own.kind not in "biu" or dtype == own


def for_product(A: Any, dtype: np.dtype[Any]) -> Any:
    """Return the matrix, or a copy whose duplicates are summed if a product in `dtype` needs that.

    The search for duplicates waits for the GPU, unless the matrix is known to be in canonical format.
    """
    if adds_duplicates(A, dtype) or not A._has_duplicates:
        return A
    return A._new(A._canonical(), canonical=True)


def check_result_blocks(backend: Backend, a: Array, b: Array) -> None:
    """Raise ValueError if the product of two matrices with these blocks has blocks that are too large for a device."""
    shape = (min(len(a), len(b)), a.shape[1], b.shape[2])
    way_out = "smaller blocks have the same product: convert A, or B, with tobsr(blocksize=...)"
    check_block_elements(backend, shape, "blocksize of the product", way_out)


class Products(Conversions):
    """The operator ``@`` and the method `dot` of BSR matrices."""

    #: what a matrix on the GPU keeps (`Operand`); a class attribute, since access to __dict__ slows all attributes down
    _memo: Any = None

    def __matmul__(self, other: Any) -> Any:
        ready = self._memo
        if ready is not None and type(other) is ready.array_type and other.ndim:  # an array on the GPU, and no scalar
            return _product(self, other)
        if self._is_scalar(other):
            raise ValueError("Scalar operands are not allowed, use '*' instead")
        return self._matmul(other)

    def _matmul(self, other: Any) -> Any:
        if type(other) is not np.ndarray:
            operand = self._operand(other)
            if operand is None:
                return NotImplemented
            if self._backend.is_sparse(operand):
                return self._matmul_sparse(operand)
            if isinstance(operand, np.matrix):
                return self._container(_product(self, operand.view(np.ndarray)))
            other = operand
        elif self._origin is None:
            found = ENGINES.of(self._backend).quick(self, other)
            if found is not None:
                return found
        return _product(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        if self._is_scalar(other):
            raise ValueError("Scalar operands are not allowed, use '*' instead")
        operand = self._operand(other)
        if operand is None:
            return NotImplemented
        if self._backend.is_sparse(operand):
            result = self._transposed()._matmul(operand.transpose())
            return NotImplemented if result is NotImplemented else result.transpose()
        if isinstance(operand, np.matrix):
            return self._container(_product(self, operand.view(np.ndarray), left=True))
        return _product(self, operand, left=True)

    def dot(self, other: Any) -> Any:
        """Return ``A * other`` for a number, and ``A @ other`` for anything else.

        Parameters
        ----------
        other : number, array or sparse matrix
            A number, or the right operand of shape (K,), (K, N) or (batch, K, N), on the same device as this matrix of
            shape (M, K). A sparse operand has shape (K, N).

        Returns
        -------
        array, bsr_array or bsr_matrix
            A BSR matrix if `other` is a number or sparse, otherwise a dense array.

        Raises
        ------
        TypeError
            If `other` is on another device, or has a type or dtype that is not supported.
        ValueError
            If the shapes do not agree.

        Notes
        -----
        On the GPU, a product with a dense operand does not wait, as in `matmul`; one with a sparse operand waits.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.diag([1.0, 2.0, 3.0, 4.0]), blocksize=(2, 2))
        >>> A.dot(np.ones(4))
        array([1., 2., 3., 4.])
        >>> A.dot(10).diagonal()
        array([10., 20., 30., 40.])
        """
        return operator.mul(self, other) if self._is_scalar(other) else self @ other

    def _matmul_sparse(self, other: Any) -> Any:
        """Return the product with a sparse matrix as BSR with blocks of (R of self, C of other).

        Other formats than BSR count as blocks of one column.
        """
        inner = self.blocksize[1]
        if other.ndim != 2 or self._shape[1] != other.shape[0]:
            raise ValueError(f"matmul: dimension mismatch: {self._shape} and {tuple(other.shape)}")
        C = other.blocksize[1] if other.format == "bsr" else 1
        B = from_sparse(self._backend, other, None, False, (inner, C)).blocks
        check_result_blocks(self._backend, self._blocks.data, B.data)
        M, N = self._shape[0], other.shape[1]
        dtype = result_dtype(self.dtype, B.data.dtype)
        A = for_product(self, dtype)
        is_it = isinstance(other, BsrBase) and B.data is other.data
        right = for_product(other if is_it else self._new(B, tuple(other.shape)), dtype)
        engine = ENGINES.of(self._backend)
        return self._new(engine.multiply_sparse(A._validated, right._blocks, N // C, dtype, (A, right)), (M, N))
