"""Preconditioners that work on the blocks of the diagonal: block Jacobi, and polynomials in it."""

from __future__ import annotations

import copy
import math
import re
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import numpy as np

from .._array.base import kind_of
from .._backend.base import Array
from .._batch import bsr_batch
from .._products.matmul import matmul
from .aggregation import hashed
from .operators import (
    DistributedOperator,
    Preconditioner,
    adjoint,
    check_matrix,
    inner_products,
    is_integer,
    is_real,
    multiply,
    snapshot,
    total,
)

#: Steps of conjugate gradients by which the largest eigenvalue of D A is estimated.
_STEPS = 20
#: The share of first residuals for which the bound of the spectrum may be too small.
_MISSED = 1e-6
#: Steps of bisection, after which the bound is known to 1e-9 of what it is above the estimate.
_HALVINGS = 30
#: Eigenvalues of a diagonal block that count as zero, over the largest.
_CUT = 1e-13


def inverse_blocks(A: Any, singular: bool = False) -> Any:
    """Return the inverses of the diagonal blocks as a block-diagonal matrix; pseudo-inverses if `singular` is allowed.

    A coarse level has singular blocks: an aggregate of few nodes does not carry all modes, and has rows of zeros. A
    block with NaN or infinity raises ValueError in both cases.
    """
    if isinstance(A, DistributedOperator):
        return A.inverse_blocks(singular)
    try:
        return A._inverse_of_diagonal("A", finite=True)
    except np.linalg.LinAlgError as error:
        if not singular:
            raise ValueError(str(error)) from None
    blocks = A.block_diagonal()
    xp = A._backend.xp
    # The pseudo-inverse of infinity is 0 or NaN, and that of NaN raises on the host alone.
    spoiled = A._first(~xp.isfinite(blocks).all(axis=(1, 2)))
    if spoiled is not None:
        raise ValueError(f"A: wanted finite numbers, got NaN or infinity in diagonal block {spoiled}")
    with np.errstate(all="ignore"):
        inverse = xp.linalg.pinv(blocks, _CUT) if xp is np else xp.stack([xp.linalg.pinv(b, _CUT) for b in blocks])
    wrong = A._first(~xp.isfinite(inverse).all(axis=(1, 2)))
    if wrong is not None:
        raise ValueError(f"A: the inverse of diagonal block {wrong} is not finite in {A.dtype}; scale A up")
    place = xp.arange(len(inverse))
    return type(A)((inverse.astype(A.dtype, copy=False), (place, place)), shape=A.shape)


class Spectrum(NamedTuple):
    """The largest eigenvalue of D A for a Hermitian positive definite A."""

    #: an estimate from below
    largest: float
    #: what the eigenvalue does not exceed
    bound: float


def spectrum(A: Any, D: Any, steps: int = _STEPS) -> Spectrum:
    """Return an estimate of the largest eigenvalue of D A from below, and a bound from above. One read on the host.

    Both come from conjugate gradients for A with the preconditioner D, whose numbers are those of Lanczos' method: the
    eigenvalues of a small tridiagonal matrix T are below those of D A. Above them, the characteristic polynomial of T
    grows fast, and the residual of the last step tells how large it is at an eigenvalue of D A whose eigenvector has a
    known share in the first residual. That share is larger than what is assumed here for all but `_MISSED` of all first
    residuals, whatever A is. The first residual follows from the indices of its elements alone.
    """
    backend, xp = A._backend, A._backend.xp
    with np.errstate(all="ignore"):
        diagonal = D.data.diagonal(axis1=1, axis2=2).reshape(-1)  # the scale of each unknown does not matter
        r = A @ (xp.sqrt(abs(diagonal)) * _mixed_vector(A)).astype(A.dtype, copy=False)
        p, work = xp.zeros_like(r), xp.empty_like(r)
        sizes, products = [xp.zeros((), r.dtype)], []
        for step in range(steps):  # those of `steps.Conjugate`, without x and the norm of r
            z = D @ r
            sizes.append(total(A, inner_products(backend, r, z, work)))
            if step == steps - 1:
                break
            backend.multiply_by_ratio_and_add(p, sizes[-1], sizes[-2], z)
            q = A @ p
            products.append(total(A, inner_products(backend, p, q, work)))
            backend.subtract_multiple(r, backend.safe_ratio(sizes[-1], products[-1]), q, work)
        numbers = backend.to_host(xp.stack([*sizes[1:], *products]).real).astype(np.float64)  # synchronize!
        return _spectrum_of(numbers[:steps], numbers[steps:], float(np.finfo(A.dtype).eps), A.blocksize[0])


def _spectrum_of(sizes: Any, products: Any, unit: float, side: int) -> Spectrum:
    """The estimate and the bound by ``r D r`` and, but for the last step, ``p A p``; blocks have `side` rows."""
    if sizes[0] == 0:  # a matrix of zeros, or without rows, is left as it is
        return Spectrum(1.0, 1.0)
    rates, shrunk = products / sizes[:-1], sizes[1:] / sizes[:-1]
    diagonal = rates + np.append(0, shrunk[:-1] * rates[:-1])
    beside = np.sqrt(abs(shrunk)) * abs(rates)
    # What comes after a residual of rounding errors tells nothing.
    small = np.flatnonzero(~(beside > math.sqrt(unit) * np.maximum.accumulate(abs(diagonal))))
    m = int(small[0]) + 1 if len(small) else len(beside)
    diagonal, beside = diagonal[:m], beside[:m]
    if not (np.isfinite(diagonal).all() and np.isfinite(beside).all()):
        raise ValueError("A: wanted finite numbers, got NaN or infinity, or numbers whose squares overflow")
    values = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))
    largest = float(abs(values).max()) or 1.0
    share = 0.5 * _MISSED * largest / math.sqrt(side * abs(sizes[0]))
    limit = np.log(np.maximum(beside, np.finfo(np.float64).tiny)).sum() - math.log(share)
    low, high = largest, largest + math.exp(limit / m)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.log(middle - values).sum() < limit else (low, middle)
    return Spectrum(largest, high)


def _mixed_vector(A: Any) -> Array:
    """The rows of this process of a vector of numbers from -1 to 1 without an order, the same on all devices.

    A number follows from its index alone: it is the same for any number of processes, and nothing goes to the GPU.
    """
    first, rows = (A.first_row, A.local_shape[0]) if isinstance(A, DistributedOperator) else (0, A.shape[0])
    mixed = hashed(A._backend.xp, rows, first) >> 32
    return (mixed / (1 << 28) - 1).astype(A.dtype)


class BlockJacobi(Preconditioner):
    _capturable, _kind = True, "block_jacobi"

    def __init__(self, A: Any) -> None:
        self._made_of(A)
        self._set_up(A)

    def _set_up(self, A: Any) -> None:
        self._inverse = inverse_blocks(A)

    def _detail(self) -> str:
        return "blocks of {} x {}".format(*self._inverse.blocksize)

    def _apply(self, r: Array) -> Array:
        found: Array = self._inverse @ r
        return found

    def _apply_adjoint(self, r: Array) -> Array:
        found: Array = adjoint(self._inverse) @ r
        return found


def block_jacobi(A: Any) -> Any:
    """Return the block-Jacobi preconditioner: the inverses of the blocks on the diagonal.

    Parameters
    ----------
    A : bsr_array, bsr_matrix, bsr_batch or interop.mpi.DistributedMatrix
        A square matrix with square blocks of float32, float64, complex64 or complex128, or a batch of them.

    Returns
    -------
    Preconditioner or bsr_batch
        ``M @ r`` multiplies each block of r with the inverse of its diagonal block. For a batch, the batch of the
        block-diagonal matrices. Both have a method `refresh`; no part of A is kept.

    Raises
    ------
    TypeError
        If A is not such a matrix.
    ValueError
        If A or its blocks are not square, or a diagonal block is missing, singular or not finite; the message has its
        index.

    See Also
    --------
    chebyshev, smoothed_aggregation : stronger preconditioners.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.diag([1.0, 2, 4, 8]), blocksize=(2, 2))
    >>> bg.linalg.block_jacobi(A) @ np.ones(4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """
    if isinstance(A, bsr_batch):
        return _inverse_batch(A)
    return BlockJacobi(check_matrix(A, spread=True))


class BatchJacobi(bsr_batch):
    """The inverses of the diagonal blocks of a batch."""

    def refresh(self, A: Any) -> None:
        """Take the numbers of another batch of the same shape, in place; see `Preconditioner.refresh`."""
        again = "; block_jacobi(A) makes another one"
        if not isinstance(A, bsr_batch) or A._backend is not self._backend or A.dtype != self.dtype:
            got = f"{A.dtype} on {A._backend.name!r}" if isinstance(A, bsr_batch) else kind_of(A)
            raise TypeError(f"A: wanted a bsr_batch of {self.dtype} on {self._backend.name!r}, got {got}{again}")
        if (A.shape, A.blocksize) != (self.shape, self.blocksize):
            raise ValueError(
                f"A: wanted shape {self.shape} in blocks of {self.blocksize}, got {A.shape} of {A.blocksize}{again}"
            )
        self._data[...] = _inverse_batch(A)._data


def _inverse_batch(A: bsr_batch) -> BatchJacobi:
    """The inverses of the diagonal blocks of all matrices; a block that has none is named with its matrix."""
    batch, n, _ = A.shape
    whole = check_matrix(A.tobsr())
    count = n // A.blocksize[0]
    try:
        inverse = whole._inverse_of_diagonal("A", finite=True)
    except (np.linalg.LinAlgError, ValueError) as error:
        found = re.search(r"(.*diagonal block )(\d+)(.*)", str(error))
        assert found is not None
        system, block = divmod(int(found[2]), count)
        raise ValueError(f"{found[1]}{block} of matrix {system}{found[3]}") from None
    place = A._backend.xp.arange(count + 1, dtype=inverse.indices.dtype)
    return BatchJacobi((inverse.data.reshape(batch, count, *A.blocksize), place[:-1], place), shape=(n, n))


class Smoother(ABC):
    """A polynomial in D A that makes residuals smaller."""

    def __init__(self, A: Any, D: Any) -> None:
        self.A, self.D = A, D
        #: an estimate of the largest eigenvalue of D A, and what it does not exceed
        self.rho, self.bound = spectrum(A, D)

    @abstractmethod
    def improve(self, b: Array, x: Array | None) -> Array:
        """Return a better x for ``A x = b``; None counts as 0. The given x is overwritten."""

    def adjoint(self) -> Self:
        """The conjugate transpose: the same for that of A."""
        found = copy.copy(self)
        found.A, found.D = adjoint(self.A), adjoint(self.D)
        return found


class Chebyshev(Smoother):
    """The polynomial in D A of a degree that is smallest on eigenvalues from `low` to `high` times the largest one."""

    def __init__(self, A: Any, D: Any, degree: int, low: float, high: float) -> None:
        super().__init__(A, D)
        self.degree = degree
        # The polynomial leaves less of a residual than there was below low + high: all eigenvalues have to be there.
        self.low, self.high = low, max(high, self.bound / self.rho - low)

    def improve(self, b: Array, x: Array | None) -> Array:
        middle, half = ((self.high + sign * self.low) / 2 * self.rho for sign in (1, -1))
        r = b.copy() if x is None else multiply(self.A, x, out=b.copy(), alpha=-1, beta=1)
        d = matmul(self.D, r, alpha=1 / middle)
        if x is None:
            x = d.copy()
        else:
            x += d
        step = half / middle
        for _ in range(self.degree - 1):
            multiply(self.A, d, out=r, alpha=-1, beta=1)
            step, before = 1 / (2 * middle / half - step), step
            matmul(self.D, r, out=d, alpha=2 * step / half, beta=step * before)
            x += d
        return x


class Jacobi(Smoother):
    """``x += omega / rho * D (b - A x)``, some sweeps."""

    def __init__(self, A: Any, D: Any, omega: float, sweeps: int) -> None:
        super().__init__(A, D)
        self.sweeps = sweeps
        self.weight = min(omega / self.rho, 2 / self.bound)  # a larger one would let residuals grow

    def improve(self, b: Array, x: Array | None) -> Array:
        for _ in range(self.sweeps):
            if x is None:
                x = matmul(self.D, b, alpha=self.weight)
                continue
            r = multiply(self.A, x, out=b.copy(), alpha=-1, beta=1)
            matmul(self.D, r, out=x, alpha=self.weight, beta=1)
        assert x is not None
        return x


class Polynomial(Preconditioner):
    _capturable, _kind = True, "chebyshev"

    def __init__(self, A: Any, degree: int, low: float, high: float) -> None:
        self._made_of(A)
        self._options = degree, low, high
        self._set_up(A)

    def _set_up(self, A: Any) -> None:
        found = Chebyshev(snapshot(A), inverse_blocks(A), *self._options)
        if found.degree % 2:  # positive wherever eigenvalues are
            found.high = self._options[2]
        self._chebyshev = found

    def _detail(self) -> str:
        return f"degree {self._chebyshev.degree}"

    def _apply(self, r: Array) -> Array:
        return self._chebyshev.improve(r, None)

    def _apply_adjoint(self, r: Array) -> Array:
        return self._chebyshev.adjoint().improve(r, None)


def chebyshev(A: Any, degree: int = 3, *, low: float = 0.05, high: float = 1.1) -> Preconditioner:
    """Return a Chebyshev polynomial in the block-Jacobi preconditioned matrix, as a preconditioner.

    Parameters
    ----------
    A : bsr_array, bsr_matrix or interop.mpi.DistributedMatrix
        A Hermitian positive definite matrix with square blocks.
    degree : int
        Products with A in each application, plus one.
    low, high : float
        The polynomial is small on eigenvalues from `low` to `high` times the largest one, which is estimated. For an
        even degree, `high` is raised where the polynomial would be negative below a bound of the largest eigenvalue.

    Returns
    -------
    Preconditioner
        It is Hermitian positive definite if A is, which is not checked; for other matrices the estimate of the largest
        eigenvalue, and with it the polynomial, may be of no use. It keeps a copy of the values of A until `refresh`.

    Raises
    ------
    TypeError
        If A is not such a matrix.
    ValueError
        If A or its blocks are not square, a diagonal block is missing or singular, or an option is out of range.

    See Also
    --------
    block_jacobi : the polynomial of degree 1.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(2 * np.eye(64) - np.eye(64, k=1) - np.eye(64, k=-1), blocksize=(2, 2))
    >>> x, info = bg.linalg.cg(A, np.ones(64), M=bg.linalg.chebyshev(A, 4))
    >>> info, bool(np.allclose(A @ x, 1, atol=1e-3))
    (0, True)
    """
    check_matrix(A, spread=True)
    if not is_integer(degree, 1):
        raise ValueError(f"degree: wanted an integer from 1 on, got {degree!r}")
    if not (is_real(low) and is_real(high)) or not 0 < low < high < math.inf:
        raise ValueError(f"low, high: wanted 0 < low < high, both finite, got {low!r} and {high!r}")
    return Polynomial(A, int(degree), float(low), float(high))
