"""Smoothed aggregation over ranks: aggregates within a rank, Galerkin products across them, small levels on every rank.

As soon as a level has few rows, every rank gathers it and sets up the rest of the hierarchy for itself: messages would
take longer than its cycles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._backend.base import Array, Blocks
from ...linalg import aggregation
from ...linalg.multigrid import (
    STALLED,
    Level,
    Multigrid,
    Options,
    near_nullspace_of,
    smoothed_aggregation,
    smoothed_prolongator,
)
from ..communicator import Communicator
from .sparse import gathered, product, transposed_product

#: A level with at most so many rows for each rank is gathered; a cycle on so few takes about as long as its messages.
GATHERED_ROWS = 1000


class _Gathered:
    """The rest of a hierarchy, on every rank: ``G @ r`` gathers r, makes a cycle and keeps the part of this rank."""

    def __init__(self, rest: Multigrid, rows: range, comm: Communicator) -> None:
        self.rest, self._rows, self._comm = rest, rows, comm

    def __matmul__(self, r: Array) -> Array:
        xp = self.rest._backend.xp
        whole = self.rest @ xp.concatenate(self._comm.allgather(r))
        return whole[self._rows.start : self._rows.stop]


class DistributedMultigrid(Multigrid):
    """A hierarchy whose fine levels are spread over the ranks; `bg.linalg.smoothed_aggregation` makes it."""

    def __init__(self, levels: list[Level], finest: Any, last: _Gathered, options: Options) -> None:
        self._levels, self._options, self._inverse = levels, options, last
        self._made_of(finest)

    @property
    def levels(self) -> list[Any]:
        """The matrices from the finest to the coarsest: spread ones first, then those that every rank has."""
        return [*(level.A for level in self._levels), *self._inverse.rest.levels]

    def refresh(self, A: Any) -> None:
        """Raise NotImplementedError: a hierarchy over several ranks is set up anew.

        Parameters
        ----------
        A : DistributedMatrix
            The matrix.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError("refresh: wanted a hierarchy of one process; call smoothed_aggregation(D) again")

    def report(self) -> str:
        """Return a table of the levels, as `Multigrid.report`, with the ranks of each."""
        spread, o = len(self._levels), self._options
        lines = [f"{'level':<5}{'rows':>13}{'block size':>12}{'elements a row':>16}  where"]
        for k, A in enumerate(self.levels):
            size = " x ".join(map(str, A.blocksize))
            where = f"{self._comm.size} ranks" if k < spread else "every rank"
            lines.append(f"{k:>5}{A.shape[0]:>13,}{size:>12}{A.nnz / max(1, A.shape[0]):>16.1f}  {where}")
        lines.append(
            f"operator complexity {self.operator_complexity:.2f}, {o.cycle}-cycle, {o.smoother} of degree {o.degree}"
        )
        return "\n".join(lines)


def set_up(A: Any, near_nullspace: Any, theta: float, limits: tuple[int, int], options: Options) -> Multigrid:
    """Return multigrid for a `DistributedMatrix`.

    Parameters
    ----------
    A : DistributedMatrix
        The matrix.
    near_nullspace : array (rows of this rank, m), optional
        The part of this rank of vectors that A nearly maps to 0.
    theta : float
        Which couplings are strong.
    limits : (int, int)
        The most rows of the coarsest level, and the most levels.
    options : Options
        The smoother and the cycle.
    """
    max_coarse, max_levels = limits
    comm, finest = A.comm, A
    with A.together():
        modes = near_nullspace_of(A.interior, near_nullspace)
    A.agree("near_nullspace", f"{modes.shape[1]} vectors")
    panel = A.panel()
    levels: list[Level] = []
    few = max(max_coarse, GATHERED_ROWS * comm.size)
    while A.shape[0] > few and len(levels) + 1 < max_levels:
        D = A.inverse_blocks(singular=bool(levels))
        T, coarse_modes = _tentative(A.interior, modes, theta)
        counts = [int(n[0]) for n in comm.allgather(np.array([T.shape[1] // modes.shape[1]], np.int64))]
        starts = np.cumsum([0, *counts])
        if int(starts[-1]) * modes.shape[1] > STALLED * A.shape[0]:
            break
        smoothing = options.smoothing(A, D)
        tentative = _shifted(T, int(starts[comm.rank]), int(starts[-1]))
        prolongator = smoothed_prolongator(product(A, tentative), tentative, D, smoothing.rho)
        P = A.with_panel(prolongator, A.row_starts, starts)
        levels.append(Level(A, P, P.H, smoothing))
        panel = transposed_product(P, product(A, prolongator))
        A, modes = A.with_panel(panel, starts, starts), coarse_modes
    whole, all_modes = gathered(panel, comm), A._backend.xp.concatenate(comm.allgather(modes))
    rest = smoothed_aggregation(
        whole,
        all_modes,
        theta=theta,
        max_coarse=max_coarse,
        max_levels=max_levels - len(levels),
        smoother=options.smoother,
        degree=options.degree,
        cycle=options.cycle,
    )
    return DistributedMultigrid(levels, finest, _Gathered(rest, A.rows, comm), options)


def _tentative(interior: Any, modes: Array, theta: float) -> tuple[Any, Array]:
    """The tentative prolongator of the rows of this rank, and the coarse modes; aggregates do not cross ranks."""
    xp, R, m = interior._backend.xp, interior.blocksize[0], modes.shape[1]
    if interior.shape[0]:
        number, count = aggregation.aggregates(interior._backend, *aggregation.strong_connections(interior, theta))
        return aggregation.tentative(interior, number, count, modes)
    index = interior.indices.dtype
    empty = Blocks(xp.zeros((0, R, m), interior.dtype), xp.zeros(0, index), xp.zeros(1, index))
    return interior._new(empty, (0, 0), canonical=True), xp.zeros((0, m), interior.dtype)


def _shifted(T: Any, first: int, count: int) -> Any:
    """The panel of a block-diagonal matrix: its columns begin at block column `first` of `count`."""
    data, indices, indptr = T._canonical()
    shape = (T.shape[0], count * T.blocksize[1])
    return T._new(Blocks(data, indices + indices.dtype.type(first), indptr.copy()), shape, canonical=True)
