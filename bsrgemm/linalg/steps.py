"""One iteration of each method that needs few vectors; all that stays from one to the next are arrays, in their places.

A step can therefore be captured as a CUDA graph, and its arrays can serve the next system of the same shape.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np

from .._backend.base import Array, ConjugateVectors
from .operators import NOT_FINITE, breakdown

#: A step has the arrays that its classes annotate with one of these: like b, or with a number for each column, in the
#: dtype of b or in the real dtype of it.
Vector: TypeAlias = Array
Factor: TypeAlias = Array
Real: TypeAlias = Array
#: Why the stabilised method of biconjugate gradients starts again.
FACTOR_IS_ZERO = "a factor of the recurrence is 0"


class Step(ABC):
    """The arrays of a method, and one iteration with them: ``step()`` changes `x` and leaves its numbers in `numbers`.

    Parameters
    ----------
    s : System
        The system. Its x becomes the array of the step.
    arrays : dict of arrays, optional
        Those of an earlier step of the same kind, for a system of the same shape and dtype.
    """

    #: Breakdowns after which the method may start again from the true residual.
    curable: tuple[str, ...] = ()
    #: Whether an x that is solved stays as it is in iterations that are made in vain.
    stays = False
    x: Array
    #: by column: the norm of the residual, and two numbers that tell of a breakdown
    numbers: Array
    _r: Vector
    #: what the norm of the residual of each column must come down to
    _enough: Real

    def __init__(self, s: Any, arrays: dict[str, Array] | None = None) -> None:
        self._s = s
        if arrays is not None:
            vars(self).update(arrays)
            self.x[...] = s.x
            s.x = self.x
            return
        shape, dtype = s.b.shape, s.b.dtype
        columns = (*shape[: s.axis], *shape[s.axis + 1 :])
        real = np.empty(0, dtype).real.dtype
        self.x, self.numbers = s.x, s.xp.zeros((3, *columns), real)
        likes = {"Vector": (shape, dtype), "Factor": (columns, dtype), "Real": (columns, real)}
        for cls in type(self).__mro__:
            for name, kind in inspect.get_annotations(cls).items():
                if kind in likes:
                    setattr(self, name, s.xp.zeros(*likes[kind]))

    @abstractmethod
    def restart(self, r: Array) -> None:
        """Begin with this residual."""

    def watch(self, size: Any, enough: Any) -> None:
        """Tell the norms of the residuals, and what is enough: one of several columns stays as it is once it is solved.

        Its recurrence would go on with rounding errors, and grow. Bounds are rounded down, so that a column that stays
        is one that the host finds solved too.
        """
        if self.x.ndim == 1:
            return
        real, host = self.numbers.dtype, self._s.backend.from_host
        self._enough[...] = host(np.nextafter(np.asarray(enough, real), real.type(0)))
        self.numbers[0] = host(np.asarray(size, real))

    def _unsolved(self, x: Array) -> Array:
        """Factors of columns, or vectors, with zeros for columns that were solved by the iteration before."""
        if self.x.ndim == 1:
            return x
        return self._s.xp.where(self.numbers[0] > self._enough, x, self._s.xp.zeros_like(x))

    @abstractmethod
    def __call__(self) -> None:
        """Make one iteration."""

    @staticmethod
    @abstractmethod
    def verdict(numbers: Any, enough: Any) -> tuple[str | None, bool]:
        """Return what has broken down, or None, and whether all columns are solved, by the numbers on the host."""


class Conjugate(Step):
    """Conjugate gradients with a preconditioner. Its numbers are ``p A p`` and ``r M r``.

    This is algorithm 9.1 of Saad, "Iterative methods for sparse linear systems", second edition, whose lines have
    numbers below: the last three come first, and the first direction is z, since the ratio is 0 where `_before` is.
    """

    _p: Vector
    _work: Vector
    _before: Factor

    def restart(self, r: Array) -> None:
        """Begin with this residual. A previous ``r M r`` of 0 leaves the first direction without an earlier one."""
        self._r[...] = r
        self._p.fill(0)
        self._before.fill(0)

    def __call__(self) -> None:
        s, r, p = self._s, self._r, self._p
        z = s.precondition(r)  # 6
        rz = s.dot(r, z)
        s.backend.multiply_by_ratio_and_add(p, rz, self._before, z)  # 7 and 8: p = z + rz / before * p
        q = s.multiply(p)
        pq = s.dot(p, q)
        if self.x.ndim == 1 and not s.is_spread:
            s.backend.advance(  # 3 to 5, and the norm of r
                ConjugateVectors(self.x, r, p, q), rz, pq, before=self._before, numbers=self.numbers, work=self._work
            )
            return
        alpha = self._unsolved(s.safe_ratio(rz, pq))  # 3
        s.backend.add_multiple(self.x, alpha, p, self._work)  # 4
        s.backend.subtract_multiple(r, alpha, q, self._work)  # 5
        self._before[...] = rz
        s.xp.sqrt(s.dot(r, r).real, out=self.numbers[0, ...])
        self.numbers[1], self.numbers[2] = pq.real, rz.real

    @staticmethod
    def verdict(numbers: Any, enough: Any) -> tuple[str | None, bool]:
        return breakdown(numbers, enough), bool((numbers[0] <= enough).all())


class BatchConjugate(Conjugate):
    """Conjugate gradients for all systems. A system that has ended stays as it is; its recurrence goes on in vain.

    Its numbers are those of `Conjugate`, for each system.
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


class MinimalResidual(Step):
    """The minimal residual method. Its numbers are ``v M v`` of the next Lanczos vector, and the root of its size."""

    _v_old: Vector
    _v: Vector
    _z: Vector
    _w_old: Vector
    _w: Vector
    _Aw_old: Vector
    _Aw: Vector
    _gamma_old: Real
    _gamma: Real
    _eta: Real
    _sine_old: Real
    _sine: Real
    _cosine_old: Real
    _cosine: Real

    def restart(self, r: Array) -> None:
        """Begin with this residual as the first Lanczos vector."""
        s = self._s
        for x in (self._v_old, self._w_old, self._w, self._Aw_old, self._Aw, self._sine_old, self._sine):
            x.fill(0)
        for x in (self._gamma_old, self._cosine_old, self._cosine):
            x.fill(1)
        self._r[...] = self._v[...] = r
        self._z[...] = s.precondition(r)
        self._gamma[...] = s.xp.sqrt(abs(s.dot(r, self._z).real))
        self._eta[...] = self._gamma

    def __call__(self) -> None:
        s, v, gamma, eta = self._s, self._v, self._gamma, self._eta
        cosine_old, cosine, sine_old, sine = self._cosine_old, self._cosine, self._sine_old, self._sine
        z = s.safe_ratio(self._z, gamma)
        Az = s.multiply(z)
        delta = s.dot(z, Az).real
        v_new = Az - s.safe_ratio(delta, gamma) * v - s.safe_ratio(gamma, self._gamma_old) * self._v_old
        z_new = s.precondition(v_new)
        energy = s.dot(v_new, z_new).real
        gamma_new = s.xp.sqrt(abs(energy))
        a0 = cosine * delta - cosine_old * sine * gamma
        a1 = s.xp.sqrt(a0 * a0 + gamma_new * gamma_new)
        a2, a3 = sine * delta + cosine_old * cosine * gamma, sine_old * gamma
        w_new = s.safe_ratio(z - a3 * self._w_old - a2 * self._w, a1)
        Aw_new = s.safe_ratio(Az - a3 * self._Aw_old - a2 * self._Aw, a1)
        moved = (
            (cosine_old, cosine, s.safe_ratio(a0, a1)),
            (sine_old, sine, s.safe_ratio(gamma_new, a1)),
            (self._w_old, self._w, w_new),
            (self._Aw_old, self._Aw, Aw_new),
            (self._v_old, v, v_new),
            (self._gamma_old, gamma, gamma_new),
        )
        for old, now, new in moved:
            old[...] = now
            now[...] = new
        self._z[...] = z_new
        self.x += self._unsolved(cosine * eta * w_new)
        self._r -= self._unsolved(cosine * eta * Aw_new)
        eta[...] = -sine * eta
        self.numbers[0], self.numbers[1], self.numbers[2] = s.norm(self._r), energy, gamma_new

    @staticmethod
    def verdict(numbers: Any, enough: Any) -> tuple[str | None, bool]:
        size, energies, turns = numbers
        broken = None
        if not np.isfinite(size).all():
            broken = NOT_FINITE
        elif ((energies < 0) & (size > enough)).any():
            broken = "M is not positive definite"
        return broken, bool(((size <= enough) | (turns == 0)).all())


class Biconjugate(Step):
    """The stabilised method of biconjugate gradients. Its numbers are the sizes of two factors of the recurrence.

    This is algorithm 7.7 of Saad with a preconditioner on the right; the last two lines come first, as in `Conjugate`.
    """

    curable = (FACTOR_IS_ZERO,)
    _shadow: Vector
    _p: Vector
    _v: Vector
    _rho: Factor
    _alpha: Factor
    _omega: Factor

    def restart(self, r: Array) -> None:
        """Begin with this residual, which is also the vector that others are made orthogonal to."""
        self._r[...] = self._shadow[...] = r
        for x in (self._p, self._v):
            x.fill(0)
        for x in (self._rho, self._alpha, self._omega):
            x.fill(1)

    def __call__(self) -> None:
        s = self._s
        rho = s.dot(self._shadow, self._r)
        beta = s.safe_ratio(rho, self._rho) * s.safe_ratio(self._alpha, self._omega)  # 9
        p = self._r + beta * (self._p - self._omega * self._v)  # 10
        y = s.precondition(p)
        v = s.multiply(y)
        alpha = self._unsolved(s.safe_ratio(rho, s.dot(self._shadow, v)))  # 4
        r = self._r - alpha * v  # 5
        z = s.precondition(r)
        t = s.multiply(z)
        omega = self._unsolved(s.safe_ratio(s.dot(t, r), s.dot(t, t)))  # 6
        self.x += alpha * y + omega * z  # 7
        s.xp.subtract(r, omega * t, out=self._r)  # 8
        self._p[...], self._v[...] = p, v
        self._rho[...], self._alpha[...], self._omega[...] = rho, alpha, omega
        self.numbers[0], self.numbers[1], self.numbers[2] = s.norm(self._r), abs(rho), abs(omega)

    @staticmethod
    def verdict(numbers: Any, enough: Any) -> tuple[str | None, bool]:
        size, factor, step = numbers
        broken = None
        if not np.isfinite(size).all():
            broken = NOT_FINITE
        elif (((factor == 0) | (step == 0)) & (size > enough)).any():
            broken = FACTOR_IS_ZERO
        return broken, bool((size <= enough).all())
