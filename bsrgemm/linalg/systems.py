"""The systems that iterative methods solve, with everything about them checked once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from .._backend.base import Array, Backend, named
from .._backend.registry import adopted, backend_of, foreign_backend, host
from .._batch import bsr_batch
from .operators import (
    BREAKDOWNS,
    DistributedOperator,
    Preconditioner,
    SolverWarning,
    as_array,
    check_limits,
    holds_numbers,
    inner_products,
    plain,
    product_with,
    refuse_several,
    solution_dtype,
    together,
)

#: Methods for Hermitian matrices.
_HERMITIAN = ("cg", "minres")


class System:
    """The checked arguments that all methods have: the matrix, the preconditioner, b, x0 and the tolerances.

    What belongs to a right-hand side, such as its norm, has the shape of b without the axis of its elements.
    """

    #: the axis of b, of x and of all vectors like them along which their elements lie
    axis = 0
    backend: Backend
    #: ``A @ x`` and ``M @ r``
    multiply: Callable[[Array], Array]
    precondition: Callable[[Array], Array]

    def __init__(self, method: str, A: Any, b: Any, x0: Any, rtol: Any, atol: Any, maxiter: Any, M: Any) -> None:
        self.method = method
        #: the matrix if its rows are on several processes; inner products are summed over them
        self._spread = A if isinstance(A, DistributedOperator) else None
        with together(A):
            b = self._take(A, b, M)
            self.xp = self.backend.xp
            dtype = system_dtype(b, A, M)
            self.b, self.x = b.astype(dtype, copy=False), first_guess(x0, b, self.backend, dtype)
            check_limits(rtol, atol, maxiter)
        if self._spread is not None:
            given = f"columns {self.b.shape[1:]} of {dtype}, rtol={rtol!r}, atol={atol!r}, maxiter={maxiter!r}"
            self._spread.agree("b, rtol, atol, maxiter", given)
        #: rows on all processes
        self.rows = b.shape[self.axis] if self._spread is None else self._spread.shape[0]
        self.maxiter = 10 * self.rows if maxiter is None else int(maxiter)
        size = self.host(self.norm(self.b))
        check_norms(size, self.b, float(atol), self._counts)
        #: the norm of each right-hand side, and what that of its residual must come down to
        self.size, self.enough = size, np.maximum(float(rtol) * size, float(atol))
        #: whether the first residual is b
        self.from_zero = x0 is None
        zero = np.asarray(size) == 0
        if x0 is not None and zero.any():  # the solution for zeros is 0, as in scipy
            zero = self.backend.from_host(np.expand_dims(zero, self.axis))
            self.x = self.xp.where(zero, self.b, self.x)

    def _take(self, A: Any, b: Any, M: Any) -> Array:
        """Set the backend and both products; return the right-hand sides."""
        for name, given in (("A", A), ("M", M)):
            refuse_several(given, name, self.method, spread=True)
        self.backend, b = _right_hand_side(b)
        self.multiply = product_with(A, "A", self.backend, len(b))
        self.precondition = (lambda r: r) if M is None else product_with(M, "M", self.backend, len(b))
        if self._spread is not None and getattr(M, "_comm", None) not in (None, self._spread.comm):
            raise ValueError("M: wanted one that was made with the communicator of A, got one of another")
        return b

    def _counts(self, chosen: Array) -> Any:
        """How many elements of each right-hand side are chosen, on all processes."""
        return self.host(self._total(chosen.sum(axis=self.axis).astype(np.float64)))

    def _total(self, part: Array) -> Array:
        return part if self._spread is None else self._spread.total(part)

    @property
    def is_spread(self) -> bool:
        """Whether the rows are on several processes, so that inner products have to be summed over them."""
        return self._spread is not None

    def dot(self, u: Array, v: Array, work: Array | None = None) -> Array:
        """The inner products of the columns; their products by element go to `work`, if it is given."""
        return self._total(inner_products(self.backend, u, v, work))

    def norm(self, u: Array, work: Array | None = None) -> Array:
        return self.xp.sqrt(self.dot(u, u, work).real)

    def host(self, x: Array) -> Any:
        """Numbers on the host, for a test; this waits for the GPU."""
        return self.backend.to_host(x) if self.backend.is_dense(x) else np.asarray(x)  # synchronize!

    def residual(self) -> Array:
        return self.b - self.multiply(self.x)

    def residual_and_norm(self) -> tuple[Array, Any]:
        """The residual, and its norm for each column on the host."""
        r = self.residual()
        return r, self.host(self.norm(r))

    def safe_ratio(self, a: Array, b: Array) -> Array:
        """``a / b``, and 0 where b is 0: a column that is solved stays as it is."""
        return self.backend.safe_ratio(a, b)

    def finish(
        self, steps: int, broken: str | None = None, more: str = "", known: tuple[Array, Any] | None = None
    ) -> tuple[Array, int]:
        """x and info by the true residual: 0, the number of iterations, or -1 after a breakdown; `more` is told too.

        `known` is the residual of x with its norm, if it was computed before.
        """
        r, size = known or self.residual_and_norm()
        if (size <= self.enough).all():
            return self.x, 0
        worst = int(np.argmax(np.where(np.isfinite(size), size - self.enough, math.inf)))
        left = f"the norm of the residual is {np.ravel(size)[worst]:.3g}, wanted {np.ravel(self.enough)[worst]:.3g}"
        where = f" in column {worst}" if size.ndim else ""
        if broken is None:
            message = f"{self.method}: not converged after {steps} iterations{more}{where}: {left}"
        else:
            message = f"{self.method}: {broken}; stopped after {steps} iterations{where}: {left}"
        if self.method in _HERMITIAN and steps and (broken in BREAKDOWNS[2:] or (size > self.size).any()):
            message += self._hint(r)
        warnings.warn(message, SolverWarning, stacklevel=5)  # the line that called the solver
        return self.x, max(1, steps) if broken is None else -1

    def _hint(self, r: Array) -> str:
        """What to say of A, after a failure that is not for lack of iterations, by two products more.

        For a Hermitian F, ``|F r|^2`` and ``r F F r`` differ by rounding alone, which ``|r| |F F r|`` bounds also
        where F nearly maps r to 0.
        """
        once = self.multiply(r)
        twice = self.multiply(once)
        scale = self.host(self.norm(r) * self.norm(twice))
        apart = abs(self.host(self.norm(once)) ** 2 - self.host(self.dot(r, twice)))
        if not (apart > np.cbrt(np.finfo(self.b.dtype).eps) * scale).any():  # NaN tells nothing
            return ""
        return f". A is not Hermitian, and {self.method} is for matrices that are; try gmres or bicgstab"


class BatchSystem(System):
    """Systems with the matrices of a batch, b[s] or the columns of b[s] for each.

    Vectors are (batch, n) or (batch, n, k); what belongs to a system, such as a step length, is (batch,) or (batch, k).
    """

    axis = 1

    def _take(self, A: bsr_batch, b: Any, M: Any) -> Array:
        batch, rows, columns = A.shape
        self.backend, self.multiply = A._backend, lambda x: A @ x
        if rows != columns:
            raise ValueError(f"A: wanted square matrices, got shape {A.shape}")
        b = (as_array if self.backend is host() else plain)(b, "b")
        if not self.backend.is_dense(b):
            raise TypeError(f"b: wanted a dense array on {self.backend.name!r}, where A is, got {named(b)}")
        if b.ndim not in (2, 3) or b.shape[:2] != (batch, rows):
            raise ValueError(f"b: wanted shape ({batch}, {rows}) or ({batch}, {rows}, k), got {tuple(b.shape)}")
        if not holds_numbers(b):
            raise TypeError(f"b: wanted numbers, got {b.dtype}")
        self.precondition = _preconditioner(M, A)
        return b

    def dot(self, u: Array, v: Array, work: Array | None = None) -> Array:
        return ((u.conj() if u.dtype.kind == "c" else u) * v).sum(axis=1)

    def ratio(self, a: Array, b: Array) -> Array:
        """``a / b`` for vectors, and 0 where b is 0."""
        return self.safe_ratio(a, b)[:, None]

    def told(self, steps: Any, failed: Any) -> Any:
        """`info` by the true residuals; a warning if a system is not solved."""
        _, size = self.residual_and_norm()
        solved = size <= self.enough
        info = np.where(solved, 0, np.where(failed > 0, -1, np.maximum(steps, 1)))
        if not solved.all():
            over = np.where(np.isfinite(size), size - self.enough, math.inf)
            worst = np.unravel_index(np.argmax(np.where(solved, -math.inf, over)), size.shape)
            why = BREAKDOWNS[failed[worst]] or f"not converged after {steps[worst]} iterations"
            where = f"system {worst[0]}" + (f", column {worst[1]}" if len(worst) > 1 else "")
            warnings.warn(
                f"cg: {(~solved).sum()} of {solved.size} systems are not solved; {where}: {why}: the norm of the "
                f"residual is {size[worst]:.3g}, wanted {self.enough[worst]:.3g}",
                SolverWarning,
                stacklevel=5,
            )
        return info


def _right_hand_side(b: Any) -> tuple[Backend, Array]:
    """The backend of b, and b as an array; a list is one on the CPU."""
    b = as_array(b, "b")
    backend = backend_of(b) or foreign_backend(b)
    if backend is None:
        raise TypeError(f"b: wanted a NumPy or CuPy array, got {type(b).__name__}")
    found = b if backend.is_dense(b) else adopted(backend, b, "b")
    if backend.is_sparse(b) or found is None:
        raise TypeError(f"b: wanted a dense array, got {type(b).__name__}")
    if found.ndim not in (1, 2):
        raise ValueError(f"b: wanted shape (n,) or (n, k), got {tuple(found.shape)}")
    if not holds_numbers(found):
        raise TypeError(f"b: wanted numbers, got {found.dtype}")
    return backend, found


def _preconditioner(M: Any, A: bsr_batch) -> Callable[[Array], Array]:
    """The function ``r -> M r`` for all systems."""
    batch, n, _ = A.shape
    if M is None:
        return lambda r: r
    shape = getattr(M, "shape", None)
    if shape is None or tuple(shape) not in ((batch, n, n), (n, n)):
        got = tuple(shape) if shape is not None else type(M).__name__
        raise ValueError(f"M: wanted shape {(batch, n, n)}, or {(n, n)} for all systems, got {got}")
    found = M._backend if isinstance(M, bsr_batch | Preconditioner) else backend_of(M)
    if found is not None and found is not A._backend:
        raise TypeError(f"M: wanted it on {A._backend.name!r}, where A is, got one on {found.name!r}: nothing is moved")
    if len(shape) == 3:
        return lambda r: M @ r

    def one_for_all(r: Array) -> Array:
        """The vectors of all systems become columns of one matrix."""
        order = (1, 0, 2)[: r.ndim]
        turned = r.transpose(order)
        product = M @ turned.reshape(n, -1)
        return product.reshape(turned.shape).transpose(order)

    return one_for_all


def system_dtype(b: Array, A: Any, M: Any) -> np.dtype[Any]:
    """Return the dtype in which a system is solved: complex if M is."""
    dtype = solution_dtype(b.dtype, getattr(A, "dtype", None) or np.float64)
    if np.dtype(getattr(M, "dtype", None) or dtype).kind == "c":
        dtype = np.result_type(dtype, np.complex64)
    if dtype.char not in "fdFD":
        raise TypeError(f"A, b: wanted float32, float64, complex64 or complex128, got {dtype}")
    return dtype


def first_guess(x0: Any, b: Array, backend: Backend, dtype: np.dtype[Any]) -> Array:
    """Return a copy of x0 in this dtype, zeros for None; raise TypeError or ValueError unless it is an array like b."""
    if x0 is None:
        return backend.xp.zeros(b.shape, dtype)
    x0 = (as_array if backend is host() else plain)(x0, "x0")
    if not backend.is_dense(x0) or tuple(x0.shape) != tuple(b.shape):
        got = tuple(x0.shape) if hasattr(x0, "shape") else type(x0).__name__
        raise ValueError(f"x0: wanted an array of shape {tuple(b.shape)} on {backend.name!r}, got {got}")
    if not holds_numbers(x0):
        raise TypeError(f"x0: wanted numbers, got {x0.dtype}")
    return x0.astype(dtype, copy=True)


def check_norms(size: Any, b: Any, atol: float, counts: Callable[[Any], Any]) -> None:
    """Raise ValueError if the norms of b are no measure: not finite, or as good as 0 although b is not.

    Parameters
    ----------
    size : array
        The norms of the right-hand sides, on the host.
    b : array
        The right-hand sides.
    atol : float
        What residuals may be in any case: smaller norms need not be exact.
    counts : callable
        ``counts(chosen)`` is the number of chosen elements of each right-hand side, on the host.
    """
    if not np.isfinite(size).all():
        if not counts(~(abs(b) < math.inf)).any():
            raise ValueError(f"b: its squares overflow in {b.dtype}; scale b down, and x up")
        raise ValueError("b: wanted finite numbers, got NaN or infinity")
    least = math.sqrt(np.finfo(b.dtype).tiny)
    small = np.asarray(size) < least
    if atol < least and small.any() and (small & (counts(b != 0) > 0)).any():
        raise ValueError(f"b: its squares underflow in {b.dtype}; scale b up, and x down")
