"""GMRES: the basis is made on the device, vector by vector; its Hessenberg matrix is rotated to a triangle on the host.

``A M v[j]`` minus its parts along ``v[0] ... v[j]`` is ``v[j + 1]``. This is algorithm 6.9 of Saad, "Iterative methods
for sparse linear systems", second edition, whose lines have numbers below, or 9.6 if preconditioned vectors are kept.
All arrays stay in their places from one restart, and from one solve, to the next, so that these steps can be replayed
as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .._backend.base import Array
from .graphs import WORTHWHILE, Place, Replay, ahead, capturable
from .operators import NOT_FINITE, is_integer

#: Columns of the basis by default.
_BASIS = 20
#: GMRES ends if so many restarts bring nothing: less than so many rounding units of the residual.
_IN_VAIN, _ROUNDING = 4, 64
#: The longest basis that is worth graphs: beyond it, the vectors themselves take longer than their launches.
_LONGEST = 64


class Space:
    """The basis of a Krylov space and what its next vector is made of.

    Parameters
    ----------
    s : System
        The system.
    flexible : bool
        Whether the preconditioned vectors are kept too.
    arrays : dict, optional
        Those that an earlier space has had, for a system of the same shape and dtype.
    """

    def __init__(self, s: Any, flexible: bool, arrays: dict[str, Any] | None = None) -> None:
        self._s, self._flexible = s, flexible
        if arrays is not None:
            vars(self).update(arrays)
            return
        #: the last vector of the basis, M times it, A times that, and room for products
        self._v, self._z, self._w, self._work = (self._vector() for _ in range(4))
        self.basis: list[Array] = [self._vector()]
        #: M times the vectors of the basis, if it is flexible
        self.turned: list[Array] = []
        #: by vector, a column of the Hessenberg matrix: its parts along the vectors before, and what is left of it
        self.columns: list[Array] = []

    def arrays(self) -> dict[str, Any]:
        """Return everything that the next space can use."""
        return {name: part for name, part in vars(self).items() if name not in ("_s", "_flexible")}

    def _vector(self) -> Array:
        found: Array = self._s.xp.empty(self._s.b.shape, self._s.b.dtype)
        return found

    def begin(self, r: Array, norm: Array) -> None:
        """Let this residual be the first vector."""
        self._v[...] = self.basis[0][...] = self._s.safe_ratio(r, norm)

    def grow(self) -> None:
        """Make room for one vector more."""
        self.columns.append(self._s.xp.empty((len(self.basis) + 1, *self._s.b.shape[1:]), self._s.b.dtype))
        self.basis.append(self._vector())
        if self._flexible:
            self.turned.append(self._vector())

    def multiply(self) -> None:
        """Multiply the last vector with M and A."""
        z = self._s.precondition(self._v)
        if self._flexible:
            self._z[...] = z
        self._w[...] = self._s.multiply(z)  # 3

    def orthogonalise(self, j: int) -> None:
        """Take the parts along the first ``j + 1`` vectors from the product; what is left becomes the next vector."""
        s, w, work, column, following = self._s, self._w, self._work, self.columns[j], self.basis[j + 1]
        if self._flexible:
            self.turned[j][...] = self._z
        for i, v in enumerate(self.basis[: j + 1]):
            h = s.dot(v, w, work)  # 5
            s.backend.subtract_multiple(w, h, v, work)  # 6
            column[i] = h
        last = s.norm(w, work)  # 8
        column[j + 1] = last
        zero = last == 0
        s.xp.divide(w, s.xp.where(zero, 1, last), out=following)  # 9
        following *= ~zero  # a direction that adds nothing is 0
        self._v[...] = following

    def combined(self, factors: Array) -> Array:
        """Return the sum of the vectors times these factors, preconditioned if it is flexible."""
        vectors = self.turned if self._flexible else self.basis
        return sum((factors[i] * vectors[i] for i in range(1, len(factors))), factors[0] * vectors[0])


class _Arnoldi:
    """Makes vectors of a space, by graphs if they are allowed: some before the host looks at their numbers."""

    def __init__(self, s: Any, operands: tuple[Any, Any], flexible: bool, graph: bool) -> None:
        self._s, self._graph = s, graph
        self._place = Place((Space, flexible), s, operands, graph)
        kept = self._place.kept
        self.space = Space(s, flexible, None if kept is None else kept.arrays)
        #: by place in the basis; those of the products with M and A are at -1
        self._captured: dict[int, Any] = {} if kept is None else kept.captured
        self._multiply = Replay(self.space.multiply, s.xp, graph, self._captured.get(-1))
        self._orthogonalise = [self._replay(j, True) for j in range(len(self.space.columns))]

    def _replay(self, j: int, called: bool) -> Replay:
        function = partial(self.space.orthogonalise, j)
        return Replay(function, self._s.xp, self._graph, self._captured.get(j), called)

    def extend(self, first: int, end: int, left: list[float], most: int) -> list[Any]:
        """Make some vectors of the basis; return their columns of the Hessenberg matrix on the host. One read.

        Parameters
        ----------
        first, end : int
            The place of the first one, and that before which the last one is.
        left : list of float
            By iteration, from before the first one on: how many times as large as wanted the residual is.
        most : int
            The most iterations until the method ends, restarts included.
        """
        s, space = self._s, self.space
        coming = self._place.expected(left, most)
        count = min(ahead(self._multiply, coming), end - first)
        for j in range(first, first + count):
            if j == len(space.columns):
                space.grow()
                self._orthogonalise.append(self._replay(j, False))
            self._multiply(coming >= WORTHWHILE)
            self._orthogonalise[j]()
        self._place.made += count
        columns = space.columns[first : first + count]
        if count == 1:
            return [s.host(columns[0])]
        found = s.host(s.xp.concatenate(columns))
        return np.split(found, np.cumsum([len(column) for column in columns])[:-1])

    def end(self) -> None:
        """Keep the graphs, if there are any, for the next solve."""
        if self._multiply.graph is None:
            return
        captured = {-1: self._multiply.graph}
        captured.update((j, x.graph) for j, x in enumerate(self._orthogonalise) if x.graph is not None)
        self._place.leave(captured, self.space.arrays())


def restarted(
    s: Any, operands: tuple[Any, Any], restart: int | None, flexible: bool, tell: Callable[[str, Any], None] | None
) -> tuple[Array, int]:
    """Solve a system by GMRES; the operands are A and M."""
    if restart is not None and not is_integer(restart, 1):
        raise ValueError(f"restart: wanted an integer from 1 on, or None, got {restart!r}")
    most = min(_BASIS if restart is None else int(restart), s.rows)
    graph = tell is None and most <= _LONGEST and capturable(s.backend, *operands)
    some = _Arnoldi(s, operands, flexible, graph)
    steps, broken, more = 0, None, ""
    sizes: list[Any] = []
    size_of_b = np.maximum(s.size, np.finfo(s.b.dtype).tiny)
    for cycle in range(s.maxiter):
        r = s.residual()
        norm = s.norm(r)
        size = s.host(norm)
        if not np.isfinite(size).all():
            broken = NOT_FINITE
        sizes = [*sizes[-_IN_VAIN:], size]
        if broken or (size <= s.enough).all():
            break
        if len(sizes) > _IN_VAIN and _stands_still(sizes, s.enough, np.finfo(s.b.dtype).eps):
            more = f", of which the last {_IN_VAIN} restarts brought nothing"
            break
        some.space.begin(r, norm)
        triangle, over, ended = _Triangle(size, most, s.b.dtype), [float(np.max(size / s.enough))], False
        while len(triangle.columns) < most and not ended:
            first = len(triangle.columns)
            for column in some.extend(first, most, over, (s.maxiter - cycle) * most - first):
                left = triangle.add(column)
                steps += 1
                over.append(float(np.max(left / s.enough)))
                if tell is not None:
                    tell("pr_norm", float(np.max(left / size_of_b)))
                ended = not np.isfinite(left).all() or bool((left <= s.enough).all())
                if ended:
                    break
        change = some.space.combined(s.backend.from_host(triangle.solved()))  # 12
        s.x += change if flexible else s.precondition(change)
        if tell is not None:
            tell("x", s.x)
    some.end()
    return s.finish(steps, broken, more)


def _stands_still(sizes: list[Any], enough: Any, unit: float) -> bool:
    """Whether no column that is not solved has a smaller residual than some restarts ago, beyond rounding."""
    left = sizes[-1] > enough
    return bool((sizes[-1] >= (1 - _ROUNDING * unit) * sizes[0])[left].all())


class _Triangle:
    """The least-squares problems of GMRES on the host: one for each column, rotated to triangles step by step."""

    def __init__(self, size: Any, most: int, dtype: np.dtype[Any]) -> None:
        self.columns: list[Any] = []
        self.rotations: list[tuple[Any, Any]] = []
        #: right-hand sides (most + 1, ...)
        self.g = np.zeros((most + 1, *size.shape), dtype)
        self.g[0] = size

    def add(self, column: Any) -> Any:
        """Add a column of the Hessenberg matrices, (steps + 1, ...); return the norms of the residuals."""
        column, k = column.copy(), len(self.columns)
        for i, (c, sine) in enumerate(self.rotations):
            column[i], column[i + 1] = (
                c * column[i] + sine * column[i + 1],
                -sine.conj() * column[i] + c * column[i + 1],
            )
        top, below = column[k], column[k + 1]
        length = np.sqrt(np.abs(top) ** 2 + np.abs(below) ** 2)
        safe = np.where(length == 0, 1, length)
        phase = np.where(top == 0, 1, top / np.where(top == 0, 1, np.abs(top)))
        c, sine = np.where(length == 0, 1, np.abs(top) / safe), phase * np.conj(below) / safe
        column[k] = c * top + sine * below
        self.rotations.append((c, sine))
        self.columns.append(column[: k + 1])
        self.g[k + 1] = -sine.conj() * self.g[k]
        self.g[k] = c * self.g[k]
        return np.abs(self.g[k + 1])

    def solved(self) -> Any:
        """The factors of the basis, (steps, ...); 0 for a direction that adds nothing."""
        n = len(self.columns)
        y = self.g[:n].copy()
        for i in reversed(range(n)):
            for j in range(i + 1, n):
                y[i] -= self.columns[j][i] * y[j]
            pivot = self.columns[i][i]
            y[i] = np.where(pivot == 0, 0, y[i] / np.where(pivot == 0, 1, pivot))
        return y
