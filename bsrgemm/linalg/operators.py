"""What solvers multiply with, whatever a user passes, and what all of them check and tell in the same way."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from .._array.base import BsrBase, kind_of
from .._backend.base import Array, Backend, named
from .._backend.recording import recorded
from .._backend.registry import backend_of, host
from .._batch import bsr_batch
from .._products.matmul import matmul
from ..dtypes import is_float

#: Parts of long columns that are summed side by side on a GPU, and the fewest rows of a part. CuPy's reduction has a
#: CTA for some columns, whatever their length, and a large card runs hundreds of CTAs at a time.
_PARTS, _LEAST_ROWS = 512, 16
#: How often a solver starts again from the true residual when the recurrence says that it is done and it is not.
RESTARTS = 3
#: A recurrence stalls if so many iterations bring nothing more, and rounding of the first residual explains it.
_WITHOUT_GAIN, _ROUNDING = 5, 64
NOT_FINITE = "NaN or infinity has appeared"
#: Why conjugate gradients cannot go on.
BREAKDOWNS = (None, NOT_FINITE, "M is not positive definite", "A is not positive definite")


def column_sums(x: Array) -> Array:
    """Sum over the first axis of an array (n,) or (n, k): on a GPU, parts of several columns first, then the parts."""
    rows = len(x) // _PARTS
    if isinstance(x, np.ndarray) or x.ndim == 1 or rows < _LEAST_ROWS:
        found: Array = x.sum(axis=0)
        return found
    whole = rows * _PARTS
    parts = x[:whole].reshape(_PARTS, rows, *x.shape[1:]).sum(axis=1).sum(axis=0)
    return parts if whole == len(x) else parts + x[whole:].sum(axis=0)


def inner_products(backend: Backend, u: Array, v: Array, work: Array | None = None) -> Array:
    """Return the inner products of the columns of this process, with `u` conjugated.

    Their products by element go to `work`, if it is given and the backend makes them.
    """
    if u.ndim == v.ndim == 1:
        return backend.inner_product(u, v, work)
    if u.dtype.kind == "c":
        u = backend.xp.conj(u, out=work)
    return column_sums(u * v if work is None else backend.xp.multiply(u, v, out=work))


class DistributedOperator(ABC):
    """A matrix of which each process has some rows, with vectors of which it has the same rows.

    The solvers of this package take one as `A`. All processes call them together, each with its own piece of `b`, and
    get their pieces of `x`. Everything that decides, such as a norm, is summed over the processes, so that all of them
    see the same bits and take the same way.
    """

    #: The numbers of rows and columns of the whole matrix.
    shape: tuple[int, int]
    blocksize: tuple[int, int]
    dtype: np.dtype[Any]
    #: Rows of this process, and how many elements it has of a vector that the matrix is multiplied with.
    local_shape: tuple[int, int]
    #: The first row of this process.
    first_row: int
    #: What the processes are connected by; matrices and preconditioners that are used together have the same.
    comm: Any
    _backend: Backend

    @property
    @abstractmethod
    def H(self) -> Any:
        """The conjugate transpose."""

    @abstractmethod
    def multiply(self, x: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> Array:
        """Return the rows of this process of ``alpha * A @ x + beta * out``, in `out` if it is given."""

    @abstractmethod
    def snapshot(self) -> Any:
        """Return this matrix with values of its own and the same index arrays."""

    @abstractmethod
    def total(self, part: Array) -> Array:
        """Return the sum of `part` over the processes, in a fixed order."""

    @property
    @abstractmethod
    def together(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes a context whose errors are raised by all processes; nothing in it may communicate."""

    @abstractmethod
    def agree(self, name: str, value: str) -> None:
        """Raise ValueError on all processes unless all of them have the same value of the argument `name`."""

    @abstractmethod
    def inverse_blocks(self, singular: bool = False) -> Any:
        """Return the inverses of the diagonal blocks of this process as a BSR matrix; pseudo-inverses if `singular`."""

    @abstractmethod
    def smoothed_aggregation(self, near_nullspace: Any, theta: float, limits: tuple[int, int], options: Any) -> Any:
        """Return multigrid for this matrix; `limits` are the most rows of the coarsest level and the most levels."""

    def __matmul__(self, x: Any) -> Any:
        """Return the rows of this process of ``A @ x``."""
        return self.multiply(x)


def multiply(A: Any, x: Array, *, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> Array:
    """Return ``alpha * A @ x + beta * out`` for a matrix of this package, of one process or of several."""
    if isinstance(A, DistributedOperator):
        return A.multiply(x, out, alpha, beta)
    if isinstance(A, BsrBase):
        found: Array = matmul(A, x, out=out, alpha=alpha, beta=beta)
        return found
    product: Array = alpha * (A @ x)  # the transpose of a matrix of several processes
    if out is None:
        return product
    out *= beta
    out += product
    return out


def total(A: Any, part: Array) -> Array:
    """Return the sum of `part` over the processes that have rows of A; `part` itself if only this one has."""
    return A.total(part) if isinstance(A, DistributedOperator) else part


def together(A: Any) -> AbstractContextManager[None]:
    """Return a context in which the processes that have rows of A agree whether one of them has failed."""
    return A.together() if isinstance(A, DistributedOperator) else nullcontext()


def adjoint(A: Any) -> Any:
    """Return the conjugate transpose of a matrix of this package; real data are shared."""
    if isinstance(A, BsrBase):
        matrix: Any = A
        return matrix.T if A.dtype.kind != "c" else matrix.conj().T
    return A.H


def snapshot(A: Any) -> Any:
    """Return a matrix with values of its own: what is written into those of A does not change it."""
    return A.snapshot() if isinstance(A, DistributedOperator) else A._with_data(A.data.copy(), copy=False)


def local_shape(A: Any) -> tuple[int, int]:
    """The shape that a product with A has on this process."""
    return A.local_shape if isinstance(A, DistributedOperator) else A.shape


class Preconditioner(ABC):
    """An approximation of the inverse of a matrix: ``M @ r`` for a vector (n,) or several of them, (n, k).

    Instances are also accepted as `M` by the solvers of `scipy.sparse.linalg` and `cupyx.scipy.sparse.linalg`. The
    result has the dtype of `r`; a preconditioner in float32 may be used under a solver in float64, and a real one for
    complex vectors. The functions of `linalg` make instances.

    The numbers of a preconditioner are its own: what is written into its matrix changes none of them until `refresh`.

    Attributes
    ----------
    shape : (int, int)
        That of the matrix; over several processes, the rows of this one.
    dtype : dtype
        The dtype in which it computes.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> M = bg.linalg.block_jacobi(bg.bsr_array(np.diag([1.0, 2.0, 4.0, 8.0]), blocksize=(2, 2)))
    >>> M @ np.ones(4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """

    #: (n, n); for a matrix over several processes, n is the number of rows of this one.
    shape: tuple[int, int]
    #: The dtype in which it computes.
    dtype: np.dtype[Any]
    _backend: Backend
    #: What the processes are connected by if the matrix is spread over several.
    _comm: Any = None
    _together: Callable[[], AbstractContextManager[None]] = nullcontext
    _blocksize: tuple[int, int]
    #: Whether a CUDA graph may hold ``M @ r``: it starts the same kernels each time, and nothing that CuPy refuses.
    _capturable = False

    def _made_of(self, A: Any) -> None:
        """Set what a preconditioner has in common with its matrix."""
        self._backend, self.shape, self.dtype = A._backend, local_shape(A), A.dtype
        if isinstance(A, DistributedOperator):
            self._comm, self._together = A.comm, A.together
        self._blocksize = A.blocksize

    #: What makes such preconditioners, for `repr`; the name of the class by default.
    _kind: str | None = None

    def _detail(self) -> str:
        """The number that matters, as the end of `repr`."""
        return ""

    def __repr__(self) -> str:
        """What it is, where, in which dtype, of which shape, and the number that matters, in one line."""
        if not all(hasattr(self, name) for name in ("_backend", "shape", "dtype")):  # a class of a user, half made
            return object.__repr__(self)
        detail = self._detail()
        sides = " x ".join(f"{n:,}" for n in self.shape)
        where = f"on {self._backend.name!r}, {self.dtype}, {sides}"
        return f"<{self._kind or type(self).__name__} {where}{', ' if detail else ''}{detail}>"

    @abstractmethod
    def _apply(self, r: Array) -> Array:
        """Apply the preconditioner to `r`, which has its dtype; the result may be overwritten by the next call."""

    def _apply_adjoint(self, r: Array) -> Array:
        """Apply the conjugate transpose of the preconditioner to `r`, which has its dtype."""
        raise NotImplementedError(f"rmatvec: {type(self).__name__} has no conjugate transpose; define _apply_adjoint")

    def refresh(self, A: Any) -> None:
        """Take the numbers of a matrix with the pattern of the one that this was made of, in place.

        Parameters
        ----------
        A : bsr_array, bsr_matrix or interop.mpi.DistributedMatrix
            That matrix with other numbers, or another one with the same blocks; over several ranks also with the same
            rows, and all of them call this together.

        Returns
        -------
        None

        Raises
        ------
        TypeError
            If A is on another device or has another dtype.
        ValueError
            If A has another shape or other blocks, or numbers that the preconditioner cannot be made of.

        Notes
        -----
        All that depends on the pattern alone is kept: the order of `ilu0`, `ic0` and `block_ssor`, and the aggregates,
        tentative prolongators and patterns of products of `smoothed_aggregation`. That is right as long as the same
        couplings are strong. A hierarchy of pyamg keeps its prolongators. After an error it is as before.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.diag([1.0, 2.0, 4.0, 8.0]), blocksize=(2, 2))
        >>> M = bg.linalg.block_jacobi(A)
        >>> A.data *= 2
        >>> M @ np.ones(4)
        array([1.   , 0.5  , 0.25 , 0.125])
        >>> M.refresh(A)
        >>> M @ np.ones(4)
        array([0.5   , 0.25  , 0.125 , 0.0625])
        """
        with self._together():
            self._check(A)
        self._set_up(A)

    def _set_up(self, A: Any) -> None:
        """Take the numbers of a checked matrix; nothing has changed if that raises."""
        raise NotImplementedError(f"refresh: {type(self).__name__} has no numbers of a matrix; define _set_up")

    def _check(self, A: Any) -> None:
        """Raise TypeError or ValueError unless the numbers of A can be taken."""
        if self._comm is None:
            check_matrix(A)
        elif not isinstance(A, DistributedOperator):
            raise TypeError(f"A: wanted a DistributedMatrix, got {kind_of(A)}{self._another}")
        elif A.comm is not self._comm:
            raise ValueError(f"A: wanted a matrix with the communicator of the one before, got another{self._another}")
        if A._backend is not self._backend or A.dtype != self.dtype:
            raise TypeError(
                f"A: wanted {self.dtype} on {self._backend.name!r}, got {A.dtype} on {A._backend.name!r}{self._another}"
            )
        self._check_pattern(A)

    def _check_pattern(self, A: Any) -> None:
        """Raise ValueError unless A has the shape, and the blocks as far as they matter, of the matrix before."""
        wanted, got = (self.shape, self._blocksize), (local_shape(A), A.blocksize)
        if wanted != got:
            raise ValueError(
                f"A: wanted shape {wanted[0]} in blocks of {wanted[1]}, got {got[0]} of {got[1]}{self._another}"
            )

    @property
    def _another(self) -> str:
        """The way out for another matrix, as the end of a message."""
        return f"; {self._kind or type(self).__name__}(A) makes another one"

    def __matmul__(self, r: Any) -> Any:
        """Return ``M @ r``.

        Parameters
        ----------
        r : array (n,) or (n, k)
            The residual of one system or of several, on the device of the preconditioner.

        Returns
        -------
        array
            A new array of the shape and dtype of `r`; for integers, and for real vectors if the preconditioner is
            complex, in the dtype of the preconditioner.
        """
        return self._through(self._apply, r)

    @recorded
    def _through(self, apply: Callable[[Array], Array], r: Any) -> Any:
        """``apply(r)`` in the dtype of the preconditioner; the result has that of `r` if it can hold it."""
        r = as_array(r, "r") if self._backend is host() else plain(r, "r")
        if not self._backend.is_dense(r):
            raise TypeError(f"r: wanted a dense array on {self._backend.name!r}, got {named(r)}")
        if r.ndim not in (1, 2) or r.shape[0] != self.shape[1]:
            raise ValueError(f"r: wanted shape ({self.shape[1]},) or ({self.shape[1]}, k), got {tuple(r.shape)}")
        if r.dtype.kind in "OSUmM":
            raise TypeError(f"r: wanted numbers, got {r.dtype}")
        if r.dtype.kind == "c" and self.dtype.kind != "c":
            return (self._through(apply, r.real) + 1j * self._through(apply, r.imag)).astype(r.dtype, copy=False)
        found = apply(r.astype(self.dtype, copy=False))
        held = r.dtype.kind == self.dtype.kind or r.dtype.kind == "c"
        return found.astype(r.dtype if held else self.dtype)

    def matvec(self, x: Any) -> Any:
        """Return ``M @ x``; scipy and CuPy call it.

        Parameters
        ----------
        x : array (n,)
            A vector, on the device of the preconditioner.

        Returns
        -------
        array (n,)
        """
        return self @ x

    def matmat(self, X: Any) -> Any:
        """Return ``M @ X`` for several vectors; scipy and CuPy call it.

        Parameters
        ----------
        X : array (n, k)
            The vectors, as columns.

        Returns
        -------
        array (n, k)
        """
        return self @ X

    def rmatvec(self, x: Any) -> Any:
        """Return ``M.conj().T @ x``; solvers such as `scipy.sparse.linalg.bicg` call it.

        Parameters
        ----------
        x : array (n,)
            A vector, on the device of the preconditioner.

        Returns
        -------
        array (n,)
        """
        return self._through(self._apply_adjoint, x)

    def rmatmat(self, X: Any) -> Any:
        """Return ``M.conj().T @ X`` for several vectors.

        Parameters
        ----------
        X : array (n, k)
            The vectors, as columns.

        Returns
        -------
        array (n, k)
        """
        return self._through(self._apply_adjoint, X)

    def __call__(self, r: Any) -> Any:
        """Return ``M @ r``.

        Parameters
        ----------
        r : array (n,) or (n, k)
            The residual of one system or of several.

        Returns
        -------
        array like `r`
        """
        return self @ r


def check_matrix(A: Any, *, spread: bool = False) -> Any:
    """Return a square BSR matrix with square blocks of floats; raise TypeError or ValueError for anything else.

    With `spread` it may be one of which each process has some rows.
    """
    if not isinstance(A, BsrBase) and not (spread and isinstance(A, DistributedOperator)):
        raise TypeError(f"A: wanted a bsr_array or bsr_matrix, got {kind_of(A)}{way_out(A, 'A')}")
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"A: wanted a square matrix, got shape {A.shape}")
    if A.blocksize[0] != A.blocksize[1]:
        raise ValueError(f"A: wanted square blocks, got blocksize={A.blocksize}; A.tobsr has others")
    if A.dtype.char not in "fdFD":
        raise TypeError(f"A: wanted float32, float64, complex64 or complex128, got {A.dtype}; cast with astype")
    return A


def way_out(A: Any, name: str) -> str:
    """What to pass in place of an operand that is no BSR matrix, as the end of a message."""
    if isinstance(A, DistributedOperator):
        return f" with rows on several processes; {name}.interior is what this process has of its own rows and columns"
    if isinstance(A, bsr_batch):
        return (
            f"; cg and block_jacobi take a batch, {name}[k] is one of its matrices, and {name}.tobsr() has all of them "
            "on its diagonal"
        )
    return f"; bsrgemm.bsr_array({name}) makes one" if getattr(A, "ndim", 2 * isinstance(A, list)) == 2 else ""


def refuse_several(A: Any, name: str, function: str, *, spread: bool = False) -> None:
    """Raise TypeError for a batch, and, unless `spread` is allowed, for a matrix with rows on several processes."""
    if isinstance(A, bsr_batch) or (isinstance(A, DistributedOperator) and not spread):
        kind = "bsr_batch" if isinstance(A, bsr_batch) else type(A).__name__
        raise TypeError(f"{name}: wanted a matrix or a linear operator for {function}, got {kind}{way_out(A, name)}")


def as_array(x: Any, name: str) -> Any:
    """Return a list or a tuple of numbers as an array of NumPy, as scipy takes it; see `plain` for anything else."""
    if not isinstance(x, list | tuple):
        return plain(x, name)
    try:
        return np.asarray(x)
    except ValueError:
        raise ValueError(f"{name}: wanted numbers in rows of one length, got a {type(x).__name__} of others") from None


def plain(x: Any, name: str) -> Any:
    """Return a `numpy.matrix` or a masked array as a plain one; ValueError if elements are masked.

    Sums and norms would leave masked elements out, so that a solver would call its x a solution.
    """
    if isinstance(x, np.ma.MaskedArray):
        if np.ma.is_masked(x):
            raise ValueError(
                f"{name}: wanted a number everywhere, got masked elements; {name}.filled(0) has zeros there"
            )
        return np.asarray(x.data)
    return np.asarray(x) if isinstance(x, np.matrix) else x


def holds_numbers(x: Any) -> bool:
    """Whether the dtype of an array is one of numbers or booleans."""
    return x.dtype.kind in "fciub" or is_float(x.dtype)


def solution_dtype(*dtypes: Any) -> np.dtype[Any]:
    """Return what dtypes are promoted to, float32 at least; NumPy has no promotion of float16 with bfloat16."""
    return np.result_type(*(np.result_type(dtype, np.float32) for dtype in dtypes))


def check_right_hand_side(b: Any, A: Any) -> Any:
    """Return b as a plain array on the device of A, of shape (n,) or (n, k); raise TypeError or ValueError otherwise.

    On the CPU, b may be a list.
    """
    backend, n = A._backend, A.shape[0]
    b = as_array(b, "b") if backend is host() else b
    wanted = f"b: wanted a dense array ({n},) or ({n}, k) on {backend.name!r}"
    if not backend.is_dense(b):
        raise TypeError(f"{wanted}, where A is, got {named(b)}")
    if b.ndim not in (1, 2) or b.shape[0] != n:
        raise ValueError(f"{wanted}, got {tuple(b.shape)}")
    if not holds_numbers(b):
        raise TypeError(f"b: wanted numbers, got {b.dtype}")
    return b


def product_with(A: Any, name: str, backend: Backend, n: int, beside: str = "b") -> Callable[[Array], Array]:
    """Return the function ``x -> A @ x`` for a matrix or an operator of shape (n, n), where the array `beside` is."""
    shape = local_shape(A) if isinstance(A, DistributedOperator) else getattr(A, "shape", None)
    if shape is None:
        made = f"; bsr_array({name}) makes one" if isinstance(A, list | tuple) else ""
        made = "; scipy.sparse.linalg.LinearOperator makes one of a function" if callable(A) else made
        raise TypeError(f"{name}: wanted a matrix or a linear operator, got {type(A).__name__}{made}")
    if hasattr(A, "__dask_graph__"):
        raise TypeError(
            f"{name}: wanted a matrix or a linear operator whose products are arrays, got {type(A).__name__}: its "
            f"products wait for compute(); {name}.compute() is a matrix"
        )
    if tuple(shape) != (n, n):
        raise ValueError(f"{name}: wanted shape {(n, n)}, as {beside} has {n} rows, got {tuple(shape)}")
    found = backend_of(A)
    if found is None and isinstance(A, Preconditioner | DistributedOperator):
        found = A._backend
    if found is not None and found is not backend:
        raise TypeError(
            f"{name}: wanted it on {backend.name!r}, where {beside} is, got one on {found.name!r}: nothing is moved"
        )
    if isinstance(A, np.matrix):  # its product with a vector is a row
        A = np.asarray(A)
    if hasattr(A, "__matmul__"):
        return lambda x: A @ x
    if hasattr(A, "matvec"):  # an operator of CuPy has no operator @
        return lambda x: A.matvec(x) if x.ndim == 1 else A.matmat(x)
    raise TypeError(f"{name}: wanted a matrix or a linear operator, got {type(A).__name__}")


class SolverWarning(UserWarning):
    """A solver has ended without a solution; `info` is not 0."""


def is_real(x: Any) -> bool:
    """Whether an argument is a real number, and no boolean."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def is_integer(x: Any, least: int) -> bool:
    """Whether an argument is an integer from `least` on, and no boolean."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool) and int(x) >= least


def check_limits(rtol: Any, atol: Any, maxiter: Any) -> None:
    """Raise ValueError unless tolerances and the number of iterations are in range."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not is_real(value) or not 0 <= float(value) < math.inf:
            raise ValueError(f"{name}: wanted a finite number from 0 on, got {value!r}")
    if maxiter is not None and not is_integer(maxiter, 0):
        raise ValueError(f"maxiter: wanted an integer from 0 on, or None, got {maxiter!r}")


def check_callback(callback: Any) -> None:
    """Raise TypeError unless a callback can be called, before anything is computed."""
    if callback is not None and not callable(callback):
        raise TypeError(f"callback: wanted a function or None, got {type(callback).__name__}")


def worst_ratio(size: Any, enough: Any) -> float:
    """How many times as large as wanted the residual of the worst column is; a residual of 0 is never too large."""
    return float(np.max(np.where(size == 0, 0, size / enough), initial=0))


def stalled(left: Sequence[float], unit: float) -> bool:
    """Whether a recurrence has come down to its rounding errors, so that it has to start again from the true residual.

    Parameters
    ----------
    left : sequence of float
        By iteration, from before the first one on: how many times as large as wanted the residual is.
    unit : float
        The rounding unit of the dtype.
    """
    if len(left) <= _WITHOUT_GAIN or not 1 < left[-1] <= _ROUNDING * unit * left[0]:
        return False
    return left[-1] > 0.9 * left[-1 - _WITHOUT_GAIN]


def failures(numbers: Any, enough: Any) -> Any:
    """What keeps conjugate gradients from going on after an iteration: for each column its place in `BREAKDOWNS`.

    `numbers` are the norm of the residual, ``p A p`` and ``r M r``; `enough` is what the norm must come down to.
    """
    size, by_matrix, by_preconditioner = numbers
    left = size > enough
    return np.select([~np.isfinite(size), (by_preconditioner <= 0) & left, (by_matrix <= 0) & left], [1, 2, 3], 0)


def breakdown(numbers: Any, enough: Any) -> str | None:
    """The first of the failures of all columns, in the order of `BREAKDOWNS`, or None."""
    found = np.atleast_1d(failures(numbers, enough))
    found = found[found > 0]
    return BREAKDOWNS[int(found.min())] if found.size else None
