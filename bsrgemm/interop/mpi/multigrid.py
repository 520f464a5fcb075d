"""Smoothed aggregation over ranks: aggregates within a rank, Galerkin products across them, small levels on every rank.

As soon as a level has few rows, every rank gathers it and sets up the rest of the hierarchy for itself: messages would
take longer than its cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._backend.base import Array, Blocks
from ..._products.sddmm import check_structure
from ...linalg import aggregation
from ...linalg import multigrid as linalg_multigrid
from ...linalg.multigrid import (
    ANOTHER,
    OWNER,
    STALLED,
    Level,
    Multigrid,
    Options,
    near_nullspace_of,
    prolongator_step,
)
from ...linalg.operators import snapshot
from ..communicator import Communicator
from .sparse import Gathering, Product, Sum, TransposedProduct, keys_of

#: A level with at most so many rows for each rank is gathered; a cycle on so few takes about as long as its messages.
GATHERED_ROWS = 1000


class _Gathered:
    """The rest of a hierarchy, on every rank: ``G @ r`` gathers r, makes a cycle and keeps the part of this rank."""

    def __init__(self, rest: Multigrid, rows: range, comm: Communicator, gathering: Gathering) -> None:
        self.rest, self._rows, self._comm, self._gathering = rest, rows, comm, gathering

    def refresh(self, panel: Any) -> None:
        """Set the rest up again for a panel with the same pattern and other numbers."""
        self.rest.refresh(self._gathering(panel, self._comm))

    def __matmul__(self, r: Array) -> Array:
        return self._part(self.rest.matvec, r)

    def _part(self, cycle: Callable[[Array], Array], r: Array) -> Array:
        whole = cycle(self.rest._backend.xp.concatenate(self._comm.allgather(r)))
        return whole[self._rows.start : self._rows.stop]

    @property
    def H(self) -> _GatheredAdjoint:
        """The conjugate transpose."""
        return _GatheredAdjoint(self)


class _GatheredAdjoint:
    def __init__(self, gathered: _Gathered) -> None:
        self._gathered = gathered

    def __matmul__(self, r: Array) -> Array:
        return self._gathered._part(self._gathered.rest.rmatvec, r)


class DistributedMultigrid(Multigrid):
    """A hierarchy whose fine levels are spread over the ranks; `bg.linalg.smoothed_aggregation` makes it."""

    _capturable = False  # ranks exchange messages

    def __init__(self, levels: list[Level], finest: Any, last: _Gathered, options: Options) -> None:
        self._levels, self._finest, self._inverse, self._options = levels, finest, last, options
        self._made_of(finest)

    def _inverse_adjoint(self) -> Any:
        return self._inverse.H

    @property
    def levels(self) -> list[Any]:
        """The matrices from the finest to the coarsest: spread ones first, then those that every rank has."""
        return [*(level.A for level in self._levels), *self._inverse.rest.levels]

    def _set_up(self, A: Any) -> None:
        """Aggregates, lists of ghosts and the patterns of all products are kept: only numbers are computed and sent."""
        levels: list[Level] = []
        finest, panel = snapshot(A), None
        for k, old in enumerate(self._levels):
            A = finest if panel is None else old.A.with_numbers(panel)
            level, panel = _set_up_level(A, A.inverse_blocks(singular=k > 0), old.plans, self._options, old.P)
            levels.append(level)
        self._inverse.refresh(finest.panel() if panel is None else panel)
        self._levels, self._finest = levels, finest

    def _check_pattern(self, A: Any) -> None:
        old = self._finest
        if A.shape != old.shape or A.rows != old.rows:
            raise ValueError(
                f"A: wanted rows {old.rows} of {old.shape} on this rank, got {A.rows} of {A.shape}{ANOTHER}"
            )
        check_structure(A.interior, old.interior, "A", OWNER, ANOTHER)
        linalg_multigrid.check_diagonal(A.interior)
        if not np.array_equal(A._ghost_columns, old._ghost_columns):
            raise ValueError(f"A: wanted the blocks of {OWNER}, got others in columns of other ranks{ANOTHER}")
        check_structure(A.ghost_panel(), old.ghost_panel(), "A", OWNER, ANOTHER)

    def report(self) -> str:
        """Return a table of the levels, as `Multigrid.report`, with the ranks of each."""
        spread = len(self._levels)
        lines = [f"{'level':<5}{'rows':>13}{'block size':>12}{'elements a row':>16}  where"]
        for k, A in enumerate(self.levels):
            size = " x ".join(map(str, A.blocksize))
            where = f"{self._comm.size} ranks" if k < spread else "every rank"
            lines.append(f"{k:>5}{A.shape[0]:>13,}{size:>12}{A.nnz / max(1, A.shape[0]):>16.1f}  {where}")
        return "\n".join([*lines, self._summary()])


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
    A = snapshot(A)
    comm, finest = A.comm, A
    with A.together():
        linalg_multigrid.check_diagonal(A.interior)
        modes = near_nullspace_of(A.interior, near_nullspace)
    A.agree("near_nullspace", f"{modes.shape[1]} vectors")
    panel = A.panel()
    levels: list[Level] = []
    few = max(max_coarse, GATHERED_ROWS * comm.size)
    while A.shape[0] > few and len(levels) + 1 < max_levels:
        D = A.inverse_blocks(singular=bool(levels))
        T, coarse_modes = _tentative(A, modes, theta)
        counts = [int(n[0]) for n in comm.allgather(np.array([T.shape[1] // modes.shape[1]], np.int64))]
        starts = np.cumsum([0, *counts])
        if not starts[-1] or int(starts[-1]) * modes.shape[1] > STALLED * A.shape[0]:
            break
        T = _shifted(T, int(starts[comm.rank]), int(starts[-1]))
        level, panel = _set_up_level(A, D, _Plans(T, starts), options)
        levels.append(level)
        A, modes = A.with_panel(panel, starts, starts), coarse_modes
    gathering = Gathering()
    rest = linalg_multigrid.set_up(
        gathering(panel, comm),
        A._backend.xp.concatenate(comm.allgather(modes)),
        theta,
        (max_coarse, max_levels - len(levels)),
        options,
        coarse=bool(levels),
    )
    return DistributedMultigrid(levels, finest, _Gathered(rest, A.rows, comm, gathering), options)


class _Plans:
    """The patterns of the products of a level: those of A T, A P and P^H (A P), and of ``T - omega / rho * D A T``."""

    def __init__(self, T: Any, starts: np.ndarray) -> None:
        #: the tentative prolongator; the aggregates of rank r are those from ``starts[r]`` to ``starts[r + 1] - 1``
        self.T, self.starts = T, starts
        self.first, self.second, self.third = Product(), Product(), TransposedProduct()
        self._sum: Sum | None = None

    def prolongator(self, A: Any, D: Any, rho: float) -> Any:
        """The panel of the smoothed prolongator; blocks whose numbers cancel are kept, as other numbers may not."""
        step = prolongator_step(self.first(A, self.T), D, rho)
        if self._sum is None:
            self._sum = Sum(step, [keys_of(step), keys_of(self.T)])
        return self._sum(step, [-step.data, self.T.data])


def _set_up_level(A: Any, D: Any, plans: _Plans, options: Options, before: Any = None) -> tuple[Level, Any]:
    """The level of A, and the panel of the next coarser matrix.

    D has the inverses of the diagonal blocks of A, and `before` is a prolongator with the same pattern, if there is
    one: no lists of ghosts are made then.
    """
    smoothing = options.smoothing(A, D)
    prolongator = plans.prolongator(A, D, smoothing.rho)
    P = (
        before.with_numbers(prolongator)
        if before is not None
        else A.with_panel(prolongator, A.row_starts, plans.starts)
    )
    panel = plans.third(P, plans.second(A, prolongator))
    return Level(A, P, P.H, smoothing, plans), panel


def _tentative(A: Any, modes: Array, theta: float) -> tuple[Any, Array]:
    """The tentative prolongator of the rows of this rank, and the coarse modes; aggregates do not cross ranks."""
    interior = A.interior
    xp, R, m = interior._backend.xp, interior.blocksize[0], modes.shape[1]
    if interior.shape[0]:
        indices, indptr, coupled = aggregation.strong_connections(interior, theta)
        data, _, pointers = A.ghost_panel()._blocks
        if len(data):
            coupled |= aggregation.rows_with(xp, (data != 0).any(axis=(1, 2)), pointers)
        number, count = aggregation.aggregates(interior._backend, indices, indptr, coupled)
        return aggregation.tentative(interior, number, count, modes)
    index = interior.indices.dtype
    empty = Blocks(xp.zeros((0, R, m), interior.dtype), xp.zeros(0, index), xp.zeros(1, index))
    return interior._new(empty, (0, 0), canonical=True), xp.zeros((0, m), interior.dtype)


def _shifted(T: Any, first: int, count: int) -> Any:
    """The panel of a block-diagonal matrix: its columns begin at block column `first` of `count`."""
    data, indices, indptr = T._canonical()
    shape = (T.shape[0], count * T.blocksize[1])
    return T._new(Blocks(data, indices + indices.dtype.type(first), indptr.copy()), shape, canonical=True)
