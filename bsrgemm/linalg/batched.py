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
    failures,
    holds_numbers,
    plain,
)
from .steps import Conjugate
from .systems import System


class BatchSystem(System):
    """Systems with the matrices of a batch, b[s] or the columns of b[s] for each: vectors are (batch, n[, k])."""

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


class BatchConjugate(Conjugate):
    """Conjugate gradients for all systems. A system that has ended stays as it is; its recurrence goes on in vain.

    Its numbers are those of `steps.Conjugate`, for each system.
    """

    stays = True
    #: which systems go on
    _going: Array

    def __init__(self, s: Any, arrays: dict[str, Array] | None = None) -> None:
        super().__init__(s, arrays)
        if arrays is None:
            self._going = s.xp.zeros(self._before.shape, bool)

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
        q = s.multiply(p)
        pq = s.dot(p, q)
        alpha = s.ratio(rz, pq)
        # a system that has broken down may have NaN in p
        self.x += s.xp.where(self._going[:, None], s.xp.multiply(p, alpha, out=self._work), 0)
        s.backend.subtract_multiple(r, alpha, q, self._work)
        self._before[...] = rz
        size = s.norm(r)
        self.numbers[0], self.numbers[1], self.numbers[2] = size, pq.real, rz.real
        # as `failures` says on the host
        self._going &= (size > self._enough) & s.xp.isfinite(size) & ~(rz.real <= 0) & ~(pq.real <= 0)


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
    s: BatchSystem, operands: tuple[Any, Any], callback: Callable[[Array], object] | None
) -> tuple[Array, Any]:
    """Solve ``A[s] x[s] = b[s]``; x, and for each system 0, its number of iterations, or -1 after a breakdown.

    A system that is solved, or that has broken down, stays as it is while others go on. The operands are A and M.
    """
    check_callback(callback)
    some = Iterations(BatchConjugate, s, operands, callback is None and capturable(s.backend, *operands))
    steps = np.zeros(s.enough.shape, np.int64)
    #: what has ended a system before it was solved, by its place in `BREAKDOWNS`
    failed = np.zeros(steps.shape, np.int64)
    for _ in range(RESTARTS + 1):
        r, size = s.residual_and_norm()
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


def _told(s: BatchSystem, steps: Any, failed: Any) -> Any:
    """`info` by the true residuals; a warning if a system is not solved."""
    _, size = s.residual_and_norm()
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
