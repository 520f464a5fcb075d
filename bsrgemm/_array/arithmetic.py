"""Element-wise operations: sums, products, quotients, comparisons, and functions that map zero to zero."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from scipy.sparse import SparseEfficiencyWarning

from .._backend import structure
from .._backend.base import Array, Csr
from .._backend.registry import host_scalar
from ..dtypes import BFLOAT16, BOOL, check_dtype, scalar_result_dtype
from .base import BsrBase
from .construct import dense_of, from_sparse
from .convert import Conversions

_INT8_MAX = np.iinfo(np.int8).max
#: Types of numbers with which all dtypes of a matrix give such a dtype.
_PLAIN = (int, float, complex)
#: For each comparison, its symbol and the symbol of the opposite comparison.
_SYMBOLS = {
    operator.eq: ("==", "!="),
    operator.ne: ("!=", "=="),
    operator.le: ("<=", ">"),
    operator.gt: (">", "<="),
    operator.ge: (">=", "<"),
    operator.lt: ("<", ">="),
}


class Arithmetic(Conversions):
    """Element-wise arithmetic."""

    def _scaled(self, values: Array, op: Callable[[Any, Any], Any], scalar: Any) -> Array:
        """Compute ``op(values, scalar)``; a Python number does not widen the dtype, not even bfloat16 (NEP 50)."""
        if isinstance(scalar, np.ndarray):
            scalar = scalar[()]
        own = values.dtype
        if own != BFLOAT16 and type(scalar) in _PLAIN:
            return op(values, scalar)
        if own != BFLOAT16 and getattr(scalar, "dtype", own) != BFLOAT16:
            result = op(values, scalar)
            if result.dtype.kind not in "biufc":
                raise _no_number(own, scalar, result.dtype)
            return result
        dtype = scalar_result_dtype(own, scalar)
        if dtype.kind not in "biufc" and dtype != BFLOAT16:
            raise _no_number(own, scalar, dtype)
        wide = np.result_type(np.float32, dtype) if dtype != BFLOAT16 else np.dtype(np.float32)
        number = scalar.astype(wide) if self._backend.is_dense(scalar) else wide.type(scalar)
        return op(values.astype(wide), number).astype(dtype)

    # --------------------------------------------------------------------------------- sums
    def _blockwise(
        self, other: Any, op: Callable[[Array, Array], Array], *, swapped: bool = False, zeros: bool = False
    ) -> Self:
        """Apply ``op`` on the union of two patterns and return BSR without blocks in which all elements are zero.

        With `swapped`, `other` is the left operand; with `zeros`, blocks of zeros may stay.
        """
        B = self._coerce(other)
        left, right, same = self._canonical(), B._canonical(), self._has_pattern_of(B)
        if swapped:
            left, right = right, left
        blocks = self._backend.combine(op, left, right, self._block_shape[1], same, zeros)
        found = self._new_own(blocks, canonical=True)
        if same and len(found.data) == len(left.data):
            found._note_pattern_of(self)
        return found

    def _sum(self, other: Any, op: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
        if self._is_scalar(other):
            if other == 0:
                return -self if swapped and op is operator.sub else self.copy()
            raise NotImplementedError("adding a nonzero scalar to a sparse array is not supported")
        other = self._operand(other)
        if other is None:
            return NotImplemented
        if self._backend.is_sparse(other):
            if tuple(other.shape) != self._shape:
                raise ValueError(f"inconsistent shapes: {self._shape} and {tuple(other.shape)}")
            return self._blockwise(other, op, swapped=swapped)
        _check_numbers(other)
        wide = self._backend.xp.broadcast_to(other, self._shape)
        if self._backend.loops is not None and op is operator.add and BFLOAT16 not in (self.dtype, wide.dtype):
            return self._container(self._added_to(wide))
        a, b = self._promoted(self.toarray(), wide)
        return self._container(op(b, a) if swapped else op(a, b))

    def _added_to(self, dense: Array) -> Array:
        """Return ``self + dense`` on the host: the stored blocks are added to a copy, and nothing else is read."""
        dtype = np.result_type(self.dtype, dense.dtype)
        out = np.asarray(dense).astype(dtype, order="C", copy=True)
        blocks = self._canonical()
        data, indices, indptr = blocks = blocks._replace(data=blocks.data.astype(dtype, copy=False))
        if not self._backend.loops.add_to_dense(blocks, out) and len(data):
            R, C = self.blocksize
            rows = self._backend.expand(indptr, len(indices))
            for row, col, block in zip(rows.tolist(), indices.tolist(), data, strict=True):
                out[row * R : (row + 1) * R, col * C : (col + 1) * C] += block
        return out

    def __add__(self, other: Any) -> Any:
        return self._sum(other, operator.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._sum(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._sum(other, operator.sub, swapped=True)

    _add_sparse, _sub_sparse = __add__, __sub__  # the DIA format of scipy calls these methods of the other operand

    def __iadd__(self, other: Any) -> Any:
        return NotImplemented

    __isub__ = __iadd__

    def __neg__(self) -> Self:
        if self.dtype == BOOL:
            raise NotImplementedError("negating a boolean sparse array is not supported")
        return self._with_data(-self.data)

    def __abs__(self) -> Self:
        self._make_canonical()
        return self._with_data(abs(self.data))

    def __round__(self, ndigits: int = 0) -> Self:
        self._make_canonical()
        wide = self.data.astype(np.float32) if self.dtype == BFLOAT16 else self.data
        return self._with_data(self._backend.xp.around(wide, decimals=ndigits).astype(self.dtype, copy=False))

    # ---------------------------------------------------------------------------------- products
    def _sum_integers(self) -> None:
        """Add up duplicates of booleans and integers in their own dtype, before the values change to another one.

        Two stored values True add up to True, and a sum of int8 wraps around; in a wider dtype the sum would differ.
        """
        if self.dtype.kind in "biu" and self._has_duplicates:
            self._make_canonical()

    def _mul_scalar(self, other: Any) -> Self:
        self._sum_integers()
        return self._with_data(self._scaled(self.data, operator.mul, other))

    def multiply(self, other: Any) -> Any:
        """Multiply element by element.

        Parameters
        ----------
        other : number, sparse matrix or dense array
            An operand on the same device, of the same shape or of one that broadcasts to it, such as a row of shape
            (1, N) or a column of shape (M, 1).

        Returns
        -------
        sparse matrix
            The format depends on `other`, as in scipy:

            - number, or sparse matrix of the same shape: BSR in the blocks of this matrix;
            - sparse row: BSR in blocks of (R, 1);
            - sparse column: CSR;
            - dense array of one or two dimensions: COO. An array of one element counts as a number, and an array of
              more than two dimensions gives a dense array.

        Raises
        ------
        ValueError
            If the shapes do not fit.
        TypeError
            If `other` is on another device, or if COO or CSR is needed and does not support the dtype; see `tocoo`.

        Notes
        -----
        On the GPU every product waits, except that with a number. Even that one waits if the elements are booleans or
        integers and the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.multiply(A).toarray()
        array([[ 1.,  4.,  0.,  0.],
               [ 0.,  0.,  9., 16.]])
        >>> A.multiply(np.array([[10], [1]])).format
        'coo'
        """
        found = Arithmetic.__mul__(self, other)
        if found is NotImplemented:
            raise TypeError(f"other: wanted a number, an array or a sparse matrix, got {type(other).__name__}")
        return found

    def __mul__(self, other: Any) -> Any:
        if self._is_scalar(other):
            return self._mul_scalar(other)
        other = self._operand(other)
        if other is None:
            return NotImplemented
        if self._backend.is_sparse(other):
            return self._multiply_sparse(other)
        return self._multiply_dense(other)

    __rmul__ = __mul__

    def __imul__(self, other: Any) -> Any:
        if not self._is_scalar(other):
            return NotImplemented
        self._before_writing()
        self.data[...] = self._in_place(self._scaled(self.data, operator.mul, other))
        return self

    def __itruediv__(self, other: Any) -> Any:
        if not self._is_scalar(other):
            return NotImplemented
        self._before_writing()
        self.data[...] = self._in_place(self._scaled(self.data, operator.truediv, other))
        return self

    def _in_place(self, values: Array) -> Array:
        loses_imaginary = values.dtype.kind == "c" and self.dtype.kind != "c"  # NumPy would let bfloat16 lose it
        castable = np.can_cast(values.dtype, self.dtype, "same_kind") and not loses_imaginary
        if not castable and values.dtype != self.dtype:
            raise np.exceptions.DTypePromotionError(f"cannot keep {values.dtype} values in a matrix of {self.dtype}")
        return values

    def _multiply_sparse(self, other: Any) -> Any:
        M, N = self._shape
        oM, oN = other.shape
        if (oM, oN) == (M, N):
            return self._blockwise(other, operator.mul)
        if (oM, oN) == (1, 1):
            return self._mul_scalar(dense_of(self._backend, other)[0, 0])
        if (M, N) == (1, 1):
            return other * self.toarray()[0, 0]
        if N == 1 and oM == 1:
            return operator.matmul(self, other)
        if M == 1 and oN == 1:
            return operator.matmul(self._coerce_columns(other), self)
        if oM == 1 and oN == N:
            self._sum_integers()
            narrow = self.tobsr((self.blocksize[0], 1))
            row = dense_of(self._backend, other).reshape(-1)[narrow._blocks.indices]
            data, row = self._promoted(narrow.data, row)
            return narrow._with_data(data * row[:, None, None])
        if oN == 1 and oM == M:
            values, columns, indptr = self._elements()
            rows = self._backend.expand(indptr, len(values))
            values, factor = self._promoted(values, dense_of(self._backend, other).reshape(-1)[rows])
            values = values * factor
            return self._foreign("csr", (values, columns, indptr), self._shape, values.dtype)
        if (M == 1 and oN == N) or (N == 1 and oM == M):
            return other.multiply(self)
        raise ValueError(f"inconsistent shapes {self._shape} and {tuple(other.shape)}")

    def _coerce_columns(self, other: Any) -> Self:
        """Convert another sparse matrix to this class; BSR keeps its blocks, other formats get blocks of 1 x 1."""
        if isinstance(other, BsrBase):
            return self._new(other._blocks, other._shape)
        parts = from_sparse(self._backend, other, None, False, (1, 1))
        return self._new(parts.blocks, parts.shape, canonical=True)

    def _multiply_dense(self, other: Array) -> Any:
        xp = self._backend.xp
        _check_numbers(other)
        self._sum_integers()
        if isinstance(other, np.ndarray):
            other = other.view(np.ndarray)
        if other.ndim > 2:
            return self.toarray() * other
        M, N = self._shape
        if other.size == 1:
            shape = np.broadcast_shapes(self._shape, other.shape)
            return self._mul_scalar(other.reshape(-1)[0]).reshape(shape)
        if self._shape == (1, 1):
            return self.data.sum() * self._backend.xp.atleast_2d(other)
        wide = other if other.ndim == 2 else other.reshape(1, -1)
        oM, oN = wide.shape
        if not (oM in (1, M) or M == 1) or not (oN in (1, N) or N == 1):
            raise ValueError(f"inconsistent shapes {self._shape} and {tuple(other.shape)}")
        shape = np.broadcast_shapes(self._shape, wide.shape)
        index = structure.index_dtype(max(shape))
        values, row, col = self._backend.to_coo(self._blocks, self._block_shape[1], index)
        if shape != self._shape:  # this matrix is a single row or column, which is repeated
            times = shape[0] if M == 1 else shape[1]
            spread = xp.arange(times, dtype=row.dtype)
            n = len(values)
            values = xp.broadcast_to(values, (times, n)).reshape(-1)
            along = xp.broadcast_to(spread[:, None], (times, n)).reshape(-1)
            row, col = (xp.broadcast_to(x, (times, n)).reshape(-1) for x in (row, col))
            row, col = (along, col) if M == 1 else (row, along)
            factor = xp.broadcast_to(wide, shape)[row, col]
        else:
            factor = self._backend.take_blocks(self._blocks, xp.broadcast_to(wide, shape))
        values, factor = self._promoted(values, factor)
        values = values * factor
        return self._foreign("coo", (values, (row, col)), shape, values.dtype)

    # ------------------------------------------------------------------------------- quotients
    def __truediv__(self, other: Any) -> Any:
        if self._is_scalar(other):
            self._sum_integers()
            inverse = _exact_inverse(self.dtype, other) if self._backend.loops is not None else None
            if inverse is not None:
                return self._with_data(self.data * inverse)
            return self._with_data(self._scaled(self.data, operator.truediv, other))
        other = self._operand(other)
        if other is None:
            return NotImplemented
        if not self._backend.is_sparse(other):
            return self.multiply(1 / other)
        if tuple(other.shape) != self._shape:
            raise ValueError(f"inconsistent shapes {self._shape} and {tuple(other.shape)}")
        with np.errstate(divide="ignore", invalid="ignore"):
            return self._container(operator.truediv(*self._promoted(self.toarray(), dense_of(self._backend, other))))

    def __rtruediv__(self, other: Any) -> Any:
        return NotImplemented

    def power(self, n: Any, dtype: Any = None) -> Self:
        """Raise each element to a power.

        Parameters
        ----------
        n : number
            The exponent, which must not be zero.
        dtype : dtype, optional
            The dtype to which the elements are cast first.

        Returns
        -------
        bsr_array or bsr_matrix
            A matrix with the same pattern. Booleans are cast to int8 first, or to int64 for an exponent above 127; the
            dtype is that of ``elements ** n``.

        Raises
        ------
        NotImplementedError
            If `n` is not a number, or if it is zero, which would turn all elements into 1.
        ValueError
            If integers would be raised to a negative integer power.

        Notes
        -----
        Duplicates of this matrix are added up first, in place. On the GPU this waits if the matrix is not yet known to
        be in canonical format. Elements that are not stored stay zero, even for a negative exponent.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.power(2).toarray()
        array([[ 1.,  4.,  0.,  0.],
               [ 0.,  0.,  9., 16.]])
        """
        if not self._is_scalar(n) or isinstance(n, str | bytes):
            raise NotImplementedError(f"n: input is not scalar, wanted a number, got {type(n).__name__}")
        if not n:
            raise NotImplementedError(
                "zero power is not supported as it would densify the matrix.\n"
                "Use `np.ones(A.shape, dtype=A.dtype)` for this case."
            )
        self._make_canonical()
        data = self.data if dtype is None else self.data.astype(check_dtype(dtype, self._backend.dtypes))
        if data.dtype == BOOL:
            data = data.astype(np.int64 if isinstance(n, int) and abs(n) > _INT8_MAX else np.int8)
        whole = isinstance(n, int | np.integer) or (hasattr(n, "dtype") and n.dtype.kind in "iu")
        if data.dtype.kind in "iu" and whole and n < 0:
            raise ValueError(f"n: integers to negative integer powers are not allowed, got {n!r}")
        return self._with_data(self._scaled(data, operator.pow, n))

    def __pow__(self, n: Any) -> Any:
        return self.power(n)

    # ------------------------------------------------------------------------------ comparisons
    def _compare(self, other: Any, op: Callable[[Any, Any], Any]) -> Any:
        if self._is_scalar(other):
            return self._compare_scalar(other, op)
        other = self._operand(other)
        if other is None:
            return NotImplemented
        if not self._backend.is_sparse(other):
            return op(*self._promoted(self.todense(), other))
        if tuple(other.shape) != self._shape:
            if op in (operator.eq, operator.ne):
                return op is operator.ne
            raise ValueError(f"inconsistent shape: {self._shape} and {tuple(other.shape)}")
        if not op(0, 0):
            return self._blockwise(other, op, zeros=True)._csr_of_true()
        _warn_dense(op, "two sparse matrices")
        if op is operator.eq:
            return self._blockwise(other, operator.ne, zeros=True)._csr_of_false()
        return self._blockwise(other, lambda a, b: ~op(a, b))._csr_of_false()

    def _compare_scalar(self, other: Any, op: Callable[[Any, Any], Any]) -> Any:
        xp = self._backend.xp
        nan = other != other
        zero_passes = bool(op(0, other))
        if nan:
            filled = (xp.ones if zero_passes else xp.zeros)(self._shape, np.bool_)
            return self._from_full(filled, (1, 1))
        self._make_canonical()
        if not zero_passes:
            return self._with_data(self._scaled_test(op, other))._csr_of_true()
        _warn_dense(op, f"a sparse matrix with {other}")
        return self._with_data(~self._scaled_test(op, other))._csr_of_false()

    def _scaled_test(self, op: Callable[[Any, Any], Any], other: Any) -> Array:
        data = self.data.astype(np.float32) if self.dtype == BFLOAT16 else self.data
        return op(data, other)

    def _csr_of_true(self) -> Any:
        """Return a CSR matrix of the true elements of a boolean matrix."""
        return self._csr_without_zeros()

    def _csr_of_false(self) -> Any:
        """Return a CSR matrix that is True where this boolean matrix is False."""
        xp = self._backend.xp
        places = self._backend.flatnonzero(~self.toarray())  # synchronize!
        row = places // max(self._shape[1], 1)
        col = places - row * self._shape[1]
        index = self._element_index(len(row))
        indptr = xp.searchsorted(row, xp.arange(self._shape[0] + 1)).astype(index, copy=False)
        arrays = (xp.ones(len(row), np.bool_), col.astype(index, copy=False), indptr)
        return self._foreign("csr", arrays, self._shape, BOOL)

    def __eq__(self, other: object) -> Any:
        return self._compare(other, operator.eq)

    def __ne__(self, other: object) -> Any:
        return self._compare(other, operator.ne)

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._compare(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, operator.ge)

    def _extreme(self, other: Any, name: str) -> Any:
        op = getattr(self._backend.xp, name)
        if isinstance(other, np.ndarray) and other.ndim == 0:
            other = other[()]
        if self._is_scalar(other):
            zero = 0.0 if isinstance(other, int) else 0  # an integer of Python may have more than 64 bits
            keeps_zero = not bool(op(zero, other) if host_scalar(other) else op(other * 0, other))
            if keeps_zero:
                self._make_canonical()
                return self._with_data(self._scaled(self.data, op, other))._csr_without_zeros()
            sign = "positive" if name == "maximum" else "negative"
            warnings.warn(
                f"Taking {name} with a {sign} number results in a dense matrix.",
                SparseEfficiencyWarning,
                stacklevel=3,
            )
            return self._from_full(self._scaled(self.toarray(), op, other), (1, 1))
        other = self._operand(other)
        if other is None:
            raise NotImplementedError(f"{name} with an unrecognized array type is not supported")
        if not self._backend.is_sparse(other):
            _check_numbers(other)
            return op(*self._promoted(self.todense(), other))
        if tuple(other.shape) != self._shape:
            raise ValueError(f"inconsistent shapes {self._shape} and {tuple(other.shape)}")
        return self._blockwise(other, op, zeros=True)._csr_without_zeros()

    def _csr_without_zeros(self) -> Any:
        """Return a CSR matrix of the elements that are not zero."""
        values, columns, indptr = self._elements()
        if self._backend.loops is not None and values.dtype in self._backend.foreign_dtypes:
            csr = self._backend.loops.without_zeros(Csr(values, columns, indptr), self._shape[1])
            return self._foreign("csr", tuple(csr), self._shape, values.dtype)
        return self._csr_where(values, values, columns, indptr)

    def maximum(self, other: Any) -> Any:
        """Compute the element-wise maximum with a number or a matrix.

        Parameters
        ----------
        other : number, sparse matrix or dense array
            An operand on the same device. A sparse matrix must have the same shape, a dense array one that NumPy can
            broadcast.

        Returns
        -------
        sparse or dense matrix
            - number that is not positive, or sparse operand: CSR of `scipy.sparse` or `cupyx.scipy.sparse`;
            - positive number: BSR in blocks of 1 x 1, and a SparseEfficiencyWarning, because no element stays zero;
            - dense operand: a dense array.

        Raises
        ------
        ValueError
            If the shapes do not fit.
        TypeError
            If `other` is on another device, or CSR does not support the dtype; see `tocsr`.
        NotImplementedError
            If `other` is not a number or an array.

        Notes
        -----
        Duplicates are added up first. With a number or a sparse operand the call waits for the GPU, with a dense
        operand only if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, -2, 0, 0], [0, 0, -3, 4]]), blocksize=(1, 2))
        >>> A.maximum(0).toarray()
        array([[1., 0., 0., 0.],
               [0., 0., 0., 4.]])
        """
        return self._extreme(other, "maximum")

    def minimum(self, other: Any) -> Any:
        """Compute the element-wise minimum with a number or a matrix.

        Parameters
        ----------
        other : number, sparse matrix or dense array
            An operand on the same device. A sparse matrix must have the same shape, a dense array one that NumPy can
            broadcast.

        Returns
        -------
        sparse or dense matrix
            - number that is not negative, or sparse operand: CSR of `scipy.sparse` or `cupyx.scipy.sparse`;
            - negative number: BSR in blocks of 1 x 1, and a SparseEfficiencyWarning, because no element stays zero;
            - dense operand: a dense array.

        Raises
        ------
        ValueError
            If the shapes do not fit.
        TypeError
            If `other` is on another device, or CSR does not support the dtype; see `tocsr`.
        NotImplementedError
            If `other` is not a number or an array.

        Notes
        -----
        Duplicates are added up first. With a number or a sparse operand the call waits for the GPU, with a dense
        operand only if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, -2, 0, 0], [0, 0, -3, 4]]), blocksize=(1, 2))
        >>> A.minimum(0).toarray()
        array([[ 0., -2.,  0.,  0.],
               [ 0.,  0., -3.,  0.]])
        """
        return self._extreme(other, "minimum")


def _no_number(dtype: np.dtype[Any], scalar: Any, result: np.dtype[Any]) -> TypeError:
    return TypeError(
        f"other: {dtype} with {type(scalar).__name__} gives {result}, which a matrix cannot have; pass a float, or "
        "another number of Python or NumPy"
    )


def _check_numbers(other: Array) -> None:
    """Raise TypeError for a dense operand of objects, strings or times, which no matrix holds."""
    if other.dtype.kind in "OSUTMm":
        raise TypeError(f"other: wanted numbers, got dtype {other.dtype}; cast it first, for example to float64")


def _exact_inverse(dtype: np.dtype[Any], divisor: Any) -> Any:
    """Return 1 / divisor if it is a power of two, by which products are as exact as quotients, and faster."""
    if dtype.char not in "fd" or type(divisor) not in (int, float) or not 2**-64 <= abs(divisor) <= 2**64:
        return None
    return 1.0 / divisor if math.frexp(divisor)[0] in (0.5, -0.5) else None


def _warn_dense(op: Callable[[Any, Any], Any], what: str) -> None:
    symbol, opposite = _SYMBOLS[op]
    warnings.warn(
        f"Comparing {what} using {symbol} is inefficient. Try using {opposite} instead.",
        SparseEfficiencyWarning,
        stacklevel=5,
    )


def _keep_zero(name: str) -> Callable[[Arithmetic], Arithmetic]:
    def method(self: Arithmetic) -> Arithmetic:
        self._make_canonical()
        function = getattr(self._backend.xp, name)
        if self.dtype == BOOL and name == "sign":
            raise TypeError("sign: not defined for booleans")
        if self.dtype == BFLOAT16:
            return self._with_data(function(self.data.astype(np.float32)).astype(BFLOAT16))
        return self._with_data(function(self.data))

    method.__name__ = name
    method.__qualname__ = f"Arithmetic.{name}"
    method.__doc__ = f"Element-wise {name}. See `numpy.{name}`."
    return method


#: Functions that map zero to zero, so that the result has the same pattern.
FIXED_POINT_FUNCTIONS = [
    "sin",
    "tan",
    "arcsin",
    "arctan",
    "sinh",
    "tanh",
    "arcsinh",
    "arctanh",
    "rint",
    "sign",
    "expm1",
    "log1p",
    "deg2rad",
    "rad2deg",
    "floor",
    "ceil",
    "trunc",
    "sqrt",
]

for _name in FIXED_POINT_FUNCTIONS:
    setattr(Arithmetic, _name, _keep_zero(_name))
