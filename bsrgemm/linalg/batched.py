"""Conjugate gradients for a batch of systems: one product for all, and each system ends for itself.

Vectors are (batch, n) or (batch, n, k); what belongs to a system, such as a step length, is (batch,) or (batch, k).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from .._backend.base import Array, named
from .._backend.registry import backend_of, host
from .._batch import bsr_batch
from .graphs import Iterations, capturable
from .operators import (
    BREAKDOWNS,
    RESTARTS,
    Preconditioner,
    SolverWarning,
    as_array,
    check_callback,
    check_limits,
    check_norms,
    failures,
    first_guess,
    holds_numbers,
    plain,
    system_dtype,
)
from .steps import Step


class _Systems:
    """The checked arguments."""

    def __init__(self, A: bsr_batch, b: Any, x0: Any, limits: tuple[Any, Any], maxiter: Any, M: Any) -> None:
        batch, rows, columns = A.shape
        self.A, self.backend, self.xp = A, A._backend, A._backend.xp
        if rows != columns:
            raise ValueError(f"A: wanted square matrices, got shape {A.shape}")
        b = (as_array if self.backend is host() else plain)(b, "b")
        if not self.backend.is_dense(b):
            raise TypeError(f"b: wanted a dense array on {self.backend.name!r}, where A is, got {named(b)}")
        if b.ndim not in (2, 3) or b.shape[:2] != (batch, rows):
            raise ValueError(f"b: wanted shape ({batch}, {rows}) or ({batch}, {rows}, k), got {tuple(b.shape)}")
        if not holds_numbers(b):
            raise TypeError(f"b: wanted numbers, got {b.dtype}")
        dtype = system_dtype(b, A, M)
        check_limits(*limits, maxiter)
        self.maxiter = 10 * rows if maxiter is None else int(maxiter)
        self.b = b.astype(dtype, copy=False)
        self.precondition = _preconditioner(M, A)
        self.x = first_guess(x0, b, self.backend, dtype)
        size = self.sizes(self.b)
        check_norms(size, self.b, float(limits[1]), lambda chosen: self.backend.to_host(chosen.sum(axis=1)))
        #: what the norm of the residual of each system must come down to
        self.enough = np.maximum(float(limits[0]) * size, float(limits[1]))
        if x0 is not None and (size == 0).any():  # the solution for zeros is 0, as in scipy
            self.x = self.xp.where(self.backend.from_host(size == 0)[:, None], self.b, self.x)

    def dot(self, u: Array, v: Array) -> Array:
        return ((u.conj() if u.dtype.kind == "c" else u) * v).sum(axis=1)

    def sizes(self, u: Array) -> Any:
        """The norms of the vectors, on the host."""
        return self.backend.to_host(self.xp.sqrt(self.dot(u, u).real))  # synchronize!

    def residual(self) -> Array:
        return self.b - self.A @ self.x

    def ratio(self, a: Array, b: Array) -> Array:
        """``a / b`` for vectors, and 0 where b is 0."""
        return self.backend.safe_ratio(a, b)[:, None]


class BatchConjugate(Step):
    """Conjugate gradients for all systems. A system that has ended stays as it is; its recurrence goes on in vain.

    Its numbers are those of `steps.Conjugate`, for each system.
    """

    vectors, factors = ("_p", "_work"), ("_before",)
    stays = True
    _p: Array
    _work: Array
    _before: Array
    #: which systems go on
    _going: Array

    def __init__(self, s: Any, arrays: dict[str, Array] | None = None) -> None:
        super().__init__(s, arrays)
        if arrays is None:
            self._going = s.xp.zeros(self._before.shape, bool)

    @staticmethod
    def columns_of(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[0], *shape[2:]

    def restart(self, r: Array) -> None:
        """Begin with these residuals."""
        self._r[...] = r
        self._p.fill(0)
        self._before.fill(0)

    def watch(self, going: Any, enough: Any) -> None:
        """Tell which systems go on, and what is enough: the device has to end a system as the host does."""
        host = self._s.backend.from_host
        self._going[...] = host(going)
        self._enough[...] = host(np.asarray(enough, self._enough.dtype))

    def __call__(self) -> None:
        s, r, p = self._s, self._r, self._p
        z = s.precondition(r)
        rz = s.dot(r, z)
        s.backend.multiply_and_add(p, s.ratio(rz, self._before), z)
        q = s.A @ p
        pq = s.dot(p, q)
        alpha = s.ratio(rz, pq)
        # a system that has broken down may have NaN in p
        self.x += s.xp.where(self._going[:, None], s.xp.multiply(p, alpha, out=self._work), 0)
        s.backend.subtract_multiple(r, alpha, q, self._work)
        self._before[...] = rz
        size = s.xp.sqrt(s.dot(r, r).real)
        self.numbers[0], self.numbers[1], self.numbers[2] = size, pq.real, rz.real
        # as `failures` says on the host
        self._going &= (size > self._enough) & s.xp.isfinite(size) & ~(rz.real <= 0) & ~(pq.real <= 0)

    @staticmethod
    def verdict(numbers: Any, enough: Any) -> tuple[str | None, bool]:
        return None, bool((numbers[0] <= enough).all())


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


def conjugate_gradients(
    A: bsr_batch,
    b: Any,
    x0: Any,
    limits: tuple[Any, Any],
    maxiter: Any,
    M: Any,
    callback: Callable[[Array], object] | None,
) -> tuple[Array, Any]:
    """Solve ``A[s] x[s] = b[s]``; x, and for each system 0, its number of iterations, or -1 after a breakdown.

    A system that is solved, or that has broken down, stays as it is while others go on.
    """
    check_callback(callback)
    s = _Systems(A, b, x0, limits, maxiter, M)
    some = Iterations(BatchConjugate, s, (A, M), callback is None and capturable(s.backend, A, M))
    steps = np.zeros(s.enough.shape, np.int64)
    #: what has ended a system before it was solved, by its place in `BREAKDOWNS`
    failed = np.zeros(steps.shape, np.int64)
    for _ in range(RESTARTS + 1):
        r = s.residual()
        size = s.sizes(r)
        going = ~(size <= s.enough) & (failed == 0) & (steps < s.maxiter)
        if not going.any():
            break
        some.step.restart(r)
        some.step.watch(going, s.enough)
        left = [float(np.max((size / s.enough)[going]))]
        while going.any():
            for numbers in some.make(left, int(s.maxiter - steps[going].max())):
                steps += going
                if callback is not None:
                    callback(s.x)
                failed = np.where(going, failures(numbers, s.enough), failed)
                left.append(float(np.max((numbers[0] / s.enough)[going])))
                going = going & ~(numbers[0] <= s.enough) & (failed == 0)
                if not going.any():
                    break
            if (going & (steps >= s.maxiter)).any():
                going &= steps < s.maxiter
                some.step.watch(going, s.enough)
    s.x = some.end()
    return s.x, _told(s, steps, failed)


def _told(s: _Systems, steps: Any, failed: Any) -> Any:
    """`info` by the true residuals; a warning if a system is not solved."""
    size = s.sizes(s.residual())
    solved = size <= s.enough
    info = np.where(solved, 0, np.where(failed > 0, -1, np.maximum(steps, 1)))
    if not solved.all():
        over = np.where(np.isfinite(size), size - s.enough, math.inf)
        worst = np.unravel_index(np.argmax(np.where(solved, -math.inf, over)), size.shape)
        why = BREAKDOWNS[failed[worst]] or f"not converged after {steps[worst]} iterations"
        where = f"system {worst[0]}" + (f", column {worst[1]}" if len(worst) > 1 else "")
        warnings.warn(
            f"cg: {(~solved).sum()} of {solved.size} systems are not solved; {where}: {why}: the norm of the residual "
            f"is {size[worst]:.3g}, wanted {s.enough[worst]:.3g}",
            SolverWarning,
            stacklevel=5,
        )
    return info
