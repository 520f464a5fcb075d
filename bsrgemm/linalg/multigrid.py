"""Algebraic multigrid by smoothed aggregation: set-up, cycles, and new numbers for a known pattern."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._backend.base import Array, Blocks, named
from .._products.sddmm import check_structure
from .._products.spgemm import FactorPlan, ProductPlan, plan
from ..bsr import bsr_array
from . import aggregation
from .operators import (
    DistributedOperator,
    Preconditioner,
    adjoint,
    as_array,
    check_matrix,
    holds_numbers,
    is_integer,
    is_real,
    multiply,
    plain,
    snapshot,
)
from .smoothers import Chebyshev, Jacobi, Smoother, inverse_blocks

#: Eigenvalues of the coarsest matrix that count as zero, over the largest.
_CUT = 1e-13
#: Coarsening stalls if so large a share of the nodes is left.
STALLED = 0.9
#: The largest blocks of the inverse of the coarsest matrix on a GPU: about those that occur in coarse matrices.
_COARSE_BLOCK = 8
#: The largest coarsest level that is inverted as a dense matrix.
_MOST_DENSE = 4096
#: Factor of the step that smooths the prolongator, over the largest eigenvalue of D A.
_OMEGA = 4 / 3
#: What messages of `refresh` call the matrix that a hierarchy was made of, and the way out for another one.
OWNER, ANOTHER = "the matrix of the hierarchy", "; smoothed_aggregation(A) makes a new hierarchy"
_SMOOTHERS = ("chebyshev", "jacobi")


@dataclass
class Level:
    """A level above the coarsest one."""

    A: Any
    P: Any
    R: Any
    smoother: Smoother
    #: ``plans(A, D, options)`` makes the level of other numbers, and the next coarser matrix
    plans: Any = None


@dataclass(frozen=True)
class Options:
    smoother: str
    degree: int
    cycle: str

    def smoothing(self, A: Any, D: Any) -> Smoother:
        if self.smoother == "jacobi":
            return Jacobi(A, D, 4 / 3, self.degree)
        return Chebyshev(A, D, self.degree, 0.15, 1.1)


class Multigrid(Preconditioner):
    """A hierarchy of ever smaller matrices; ``M @ r`` is one cycle through them from x = 0.

    `smoothed_aggregation` and `from_pyamg` make instances. They are accepted as `M` by the solvers of this package, of
    scipy and of cupyx, and are Hermitian if the matrix is.

    Parameters
    ----------
    levels, coarsest, options
        What those functions pass; the constructor checks nothing.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(2 * np.eye(800) - np.eye(800, k=1) - np.eye(800, k=-1), blocksize=(1, 1))
    >>> M = bg.linalg.smoothed_aggregation(A, max_coarse=100)
    >>> M
    <Multigrid on 'cpu', float64, levels of 800, 261, 79 rows>
    >>> [level.shape for level in M.levels], round(M.operator_complexity, 2)
    ([(800, 800), (261, 261), (79, 79)], 1.48)
    """

    _capturable = True
    _another = ANOTHER
    #: Whether the finest matrix is a coarse level of another hierarchy.
    _coarse = False
    #: Whether it came from elsewhere, with a finest matrix of any kind.
    _given = False

    def __init__(self, levels: list[Level], coarsest: Any, options: Options) -> None:
        self._levels, self._coarsest, self._options = levels, coarsest, options
        finest = levels[0].A if levels else coarsest
        self._made_of(finest)
        self._inverse = _pseudo_inverse(coarsest)

    def _apply(self, r: Array) -> Array:
        return self._cycle(0, r)

    def _apply_adjoint(self, r: Array) -> Array:
        """A cycle for the conjugate transposes of all matrices."""
        turned = copy.copy(self)
        turned._inverse = self._inverse_adjoint()
        turned._levels = [
            Level(adjoint(level.A), adjoint(level.R), adjoint(level.P), level.smoother.adjoint())
            for level in self._levels
        ]
        return turned._cycle(0, r)

    def _inverse_adjoint(self) -> Any:
        """The conjugate transpose of the inverse of the coarsest matrix, which is Hermitian."""
        return self._inverse

    def _cycle(self, depth: int, b: Array) -> Array:
        if depth == len(self._levels):
            found: Array = self._inverse @ b
            return found
        level = self._levels[depth]
        x = level.smoother.improve(b, None)
        r = level.R @ multiply(level.A, x, out=b.copy(), alpha=-1, beta=1)
        e = self._cycle(depth + 1, r)
        if self._options.cycle == "W" and depth + 1 < len(self._levels):
            below = self._levels[depth + 1].A
            e = e + self._cycle(depth + 1, multiply(below, e, out=r, alpha=-1, beta=1))
        multiply(level.P, e, out=x, beta=1)
        return level.smoother.improve(b, x)

    @property
    def levels(self) -> list[Any]:
        """The matrices from the finest to the coarsest."""
        return [*(level.A for level in self._levels), self._coarsest]

    @property
    def operator_complexity(self) -> float:
        """Stored elements of all matrices over those of the finest."""
        stored = [A.nnz for A in self.levels]
        return sum(stored) / max(1, stored[0])

    def _check_pattern(self, A: Any) -> None:
        check_structure(A, self.levels[0], "A", OWNER, ANOTHER)

    def _set_up(self, A: Any) -> None:
        if not self._coarse and not self._given:
            check_diagonal(A)
        A, levels = snapshot(A), []
        for k, level in enumerate(self._levels):
            made, A = level.plans(A, inverse_blocks(A, singular=self._coarse or k > 0), self._options)
            levels.append(made)
        inverse = _pseudo_inverse(A)
        self._levels, self._coarsest, self._inverse = levels, A, inverse

    def report(self) -> str:
        """Return a table of the levels: rows, blocks, elements a row, and the operator complexity.

        Returns
        -------
        str

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(2 * np.eye(800) - np.eye(800, k=1) - np.eye(800, k=-1), blocksize=(1, 1))
        >>> print(bg.linalg.smoothed_aggregation(A, max_coarse=100).report())
        level         rows       blocks  block size  elements a row
            0          800        2,398       1 x 1             3.0
            1          261          869       1 x 1             3.3
            2           79          279       1 x 1             3.5
        operator complexity 1.48, V-cycle, chebyshev of degree 2
        """
        lines = [f"{'level':<5}{'rows':>13}{'blocks':>13}{'block size':>12}{'elements a row':>16}"]
        for k, A in enumerate(self.levels):
            size = " x ".join(map(str, A.blocksize))
            lines.append(f"{k:>5}{A.shape[0]:>13,}{len(A.indices):>13,}{size:>12}{A.nnz / A.shape[0]:>16.1f}")
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        """The last line of the report."""
        o = self._options
        return f"operator complexity {self.operator_complexity:.2f}, {o.cycle}-cycle, {o.smoother} of degree {o.degree}"

    def __repr__(self) -> str:
        rows = ", ".join(f"{A.shape[0]:,}" for A in self.levels)
        return f"<Multigrid on {self._backend.name!r}, {self.dtype}, levels of {rows} rows>"

    def plot(self, ax: Any = None) -> Any:
        """Draw the rows and the stored elements of each level.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new figure by default.

        Returns
        -------
        matplotlib Axes
        """
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots()[1]
        place = np.arange(len(self.levels))
        ax.bar(place - 0.2, [A.shape[0] for A in self.levels], 0.4, label="rows")
        ax.bar(place + 0.2, [A.nnz for A in self.levels], 0.4, label="stored elements")
        ax.set_yscale("log")
        ax.set_xticks(place)
        ax.set_xlabel("level")
        ax.set_title(f"operator complexity {self.operator_complexity:.2f}")
        ax.legend()
        return ax


def smoothed_aggregation(
    A: Any,
    near_nullspace: Any = None,
    *,
    theta: float = 0.0,
    max_coarse: int = 500,
    max_levels: int = 20,
    smoother: str = "chebyshev",
    degree: int = 2,
    cycle: str = "V",
) -> Multigrid:
    """Set up algebraic multigrid by smoothed aggregation, as a preconditioner for Hermitian positive definite matrices.

    Parameters
    ----------
    A : bsr_array, bsr_matrix or interop.mpi.DistributedMatrix
        The matrix, with square blocks: one for each node. The set-up is done where it is. In float32 it makes a
        preconditioner that may be used under a solver in float64.
    near_nullspace : array (n, m), optional
        Vectors that A nearly maps to 0, such as `rigid_body_modes`; by default one constant for each row of a block.
    theta : float
        Nodes i and j are strongly connected if ``norm(A_ij) > theta * sqrt(norm(A_ii) * norm(A_jj))``.
    max_coarse : int
        A level with at most so many rows is the coarsest one, which is solved as a dense matrix.
    max_levels : int
        The most levels.
    smoother : {"chebyshev", "jacobi"}
        What smooths before and after the coarser levels.
    degree : int
        Degree of the polynomial, or sweeps of Jacobi.
    cycle : {"V", "W"}
        How often each coarser level is visited: once or twice.

    Returns
    -------
    Multigrid
        The preconditioner; ``print(M.report())`` shows its levels. It keeps a copy of the values of A until `refresh`,
        which keeps aggregates, tentative prolongators and the patterns of all products, and computes numbers only.

    Raises
    ------
    TypeError
        If A is not a BSR matrix of floats, or `near_nullspace` is on another device.
    ValueError
        If A or its blocks are not square, a diagonal block is missing or singular (its index is told), an element of
        the diagonal is 0 or negative, a shape or an option is wrong, or coarsening stalls.

    See Also
    --------
    cg : the solver for it.
    from_pyamg : a hierarchy that pyamg has set up.

    Notes
    -----
    Aggregates are a node and its neighbours, around nodes of which no two have a common neighbour. The choice depends
    on the pattern alone: the CPU and the GPU make the same aggregates, and the same call gives the same hierarchy.
    Nodes that are not connected with others, such as those that `constrain` has fixed, are left to the smoother.

    Of A only the signs of its diagonal are checked. If it is not Hermitian, such as a complex symmetric matrix, the
    hierarchy is made of it all the same, with the Hermitian part of the coarsest matrix. It is no preconditioner for
    `cg` then. It may be one for `gmres`, if the Hermitian part of A is positive definite and outweighs the rest. A
    solver tells by `info` and by the true residual if it is not.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(2 * np.eye(800) - np.eye(800, k=1) - np.eye(800, k=-1), blocksize=(1, 1))
    >>> M = bg.linalg.smoothed_aggregation(A, max_coarse=100)
    >>> x, info = bg.linalg.cg(A, np.ones(800), M=M, rtol=1e-8)
    >>> info, bool(np.allclose(A @ x, 1, atol=1e-6))
    (0, True)
    """
    check_matrix(A, spread=True)
    options = _checked(theta, max_coarse, max_levels, smoother, degree, cycle)
    if isinstance(A, DistributedOperator):
        found: Multigrid = A.smoothed_aggregation(near_nullspace, theta, (max_coarse, max_levels), options)
        return found
    modes = near_nullspace_of(A, near_nullspace)
    return set_up(snapshot(A), modes, theta, (max_coarse, max_levels), options)


def set_up(
    A: Any, modes: Array, theta: float, limits: tuple[int, int], options: Options, coarse: bool = False
) -> Multigrid:
    """Return the hierarchy of a checked matrix; `limits` are the most rows of the coarsest level and the most levels.

    If A is a coarse level of another hierarchy, its diagonal blocks may be singular.
    """
    max_coarse, max_levels = limits
    levels: list[Level] = []
    if not coarse:
        check_diagonal(A)
    while A.shape[0] > max_coarse and len(levels) + 1 < max_levels:
        D = inverse_blocks(A, singular=coarse or bool(levels))
        number, count = aggregation.aggregates(A._backend, *aggregation.strong_connections(A, theta))
        if not count or count * modes.shape[1] > STALLED * A.shape[0] or count > STALLED * A._block_shape[0]:
            if A.shape[0] <= _MOST_DENSE:
                break
            if not count:
                raise ValueError(
                    f"A: no node of level {len(levels)} is connected with another one, so that there is nothing to "
                    "coarsen; take block_jacobi(A), which solves for such nodes"
                )
            raise ValueError(
                f"A: coarsening stalls at level {len(levels)}: {A.shape[0]:,} rows become {count * modes.shape[1]:,}. "
                f"Try a smaller theta (now {theta}), fewer vectors in near_nullspace (now {modes.shape[1]}), or "
                "another preconditioner, such as chebyshev(A)"
            )
        T, modes = aggregation.tentative(A, number, count, modes)
        level, A = _Plans(A, T)(A, D, options)
        levels.append(level)
    if A.shape[0] > max(_MOST_DENSE, max_coarse):
        raise ValueError(
            f"max_levels: {max_levels} levels leave {A.shape[0]:,} rows, too many for a dense matrix; allow more"
        )
    found = Multigrid(levels, A, options)
    found._coarse = coarse
    return found


def check_diagonal(A: Any) -> None:
    """Raise ValueError unless all blocks on the diagonal are stored, and no element of it is 0 or negative."""
    blocks, stored = A._diagonal_blocks("A")
    diagonal = blocks.diagonal(axis1=1, axis2=2)
    wrong = (diagonal.real <= 0) & A._backend.xp.isfinite(diagonal)
    first = A._first(~stored | wrong.any(axis=1))
    if first is None:
        return
    if not bool(blocks[first].any()):  # synchronize!
        state = "singular" if bool(stored[first]) else "missing: no block is stored there"
        raise ValueError(f"A: diagonal block {first} is {state}")
    row = int(wrong[first].argmax())
    got = f"{blocks[first, row, row].item():.3g} in row {first * len(blocks[first]) + row}"
    raise ValueError(
        f"A: wanted a positive diagonal, as a positive definite matrix has, got {got}; for a negative definite matrix "
        "take -A"
    )


def _checked(theta: Any, max_coarse: Any, max_levels: Any, smoother: Any, degree: Any, cycle: Any) -> Options:
    if not is_real(theta) or not 0 <= float(theta) < 1:
        raise ValueError(f"theta: wanted a number from 0 to 1, got {theta!r}")
    for name, value in (("max_coarse", max_coarse), ("max_levels", max_levels), ("degree", degree)):
        if not is_integer(value, 1):
            raise ValueError(f"{name}: wanted an integer from 1 on, got {value!r}")
    if not isinstance(smoother, str) or smoother not in _SMOOTHERS:
        raise ValueError(f"smoother: wanted 'chebyshev' or 'jacobi', got {smoother!r}")
    if not isinstance(cycle, str) or cycle not in ("V", "W"):
        raise ValueError(f"cycle: wanted 'V' or 'W', got {cycle!r}")
    return Options(smoother, int(degree), cycle)


def near_nullspace_of(A: Any, given: Any) -> Array:
    """The vectors that A nearly maps to 0, (n, m) in the dtype of A."""
    xp, n, R = A._backend.xp, A.shape[0], A.blocksize[0]
    if given is None:
        constants = xp.zeros((n // R, R, R), A.dtype)
        for i in range(R):
            constants[:, i, i] = 1
        return constants.reshape(n, R)
    given = as_array(given, "near_nullspace") if xp is np else plain(given, "near_nullspace")
    if not A._backend.is_dense(given):
        raise TypeError(f"near_nullspace: wanted a dense array on {A._backend.name!r}, where A is, got {named(given)}")
    if given.ndim == 1:
        given = given[:, None]
    if given.ndim != 2 or given.shape[0] != n or not given.shape[1]:
        raise ValueError(f"near_nullspace: wanted shape ({n}, m), got {tuple(given.shape)}")
    if not holds_numbers(given):
        raise TypeError(f"near_nullspace: wanted numbers, got {given.dtype}")
    if given.dtype.kind == "c" and A.dtype.kind != "c":
        raise TypeError(f"near_nullspace: wanted real numbers, as A has, got {given.dtype}")
    if not bool(xp.isfinite(given).all()):  # synchronize!
        raise ValueError("near_nullspace: wanted finite numbers, got NaN or infinity")
    return given.astype(A.dtype)


class _Plans:
    """The tentative prolongator T of a level, and the patterns of its products, which are found once.

    The smoothed prolongator P has the blocks of ``A T``, also where their numbers are zeros: other numbers may not be.
    Since A has all blocks of its diagonal, those of T are among them. R has the blocks of P in another order.
    """

    def __init__(self, A: Any, T: Any) -> None:
        self._T, self._first = T, plan(A, T)
        self._second: ProductPlan | None = None
        self._third: ProductPlan | None = None
        #: P and R as they were first, for their patterns; where the blocks of T are in P; the order of those of R
        self._P: Any = None
        self._R: Any = None
        self._place: Any = None
        self._order: Any = None

    def __call__(self, A: Any, D: Any, options: Options) -> tuple[Level, Any]:
        """The level of A, and the matrix of the next coarser one; D has the inverses of the diagonal blocks."""
        smoothing = options.smoothing(A, D)
        P = self._prolongator(A, D, smoothing.rho)
        R = self._restriction(P)
        if self._second is None:
            self._second = FactorPlan(A, P)
        AP = self._second(A, P)
        if self._third is None:
            self._third = plan(R, AP)
        return Level(A, P, R, smoothing, self), self._third(R, AP)

    def _prolongator(self, A: Any, D: Any, rho: float) -> Any:
        """``T - omega / rho * D A T``"""
        found = prolongator_step(self._first(A, self._T), D, -rho)
        if self._P is None:
            self._P, self._place = found, _places(found, self._T)
        found.data[self._place] += self._T.data
        return self._P._with_data(found.data, copy=False)

    def _restriction(self, P: Any) -> Any:
        """The conjugate transpose of P, in arrays of its own."""
        xp = P._backend.xp
        if self._R is None:
            self._order = _order_of_transpose(P)
            self._R = P.conj().T.copy()
            return self._R
        turned = xp.ascontiguousarray(P.data[self._order].transpose(0, 2, 1))
        return self._R._with_data(turned.conj() if turned.dtype.kind == "c" else turned, copy=False)


def _order_of_transpose(P: Any) -> Array:
    """The blocks of P by block column, and in each by block row."""
    _, indices, indptr = P._blocks
    if P._backend.loops is not None:
        order: Array = P._backend.loops.by_column(indices, indptr, P._block_shape[1])[0]
        return order
    return P._backend.xp.argsort(indices, kind="stable")


def _places(P: Any, T: Any) -> Array:
    """Where in P the blocks of T are stored, of which there is one in each block row, or none."""
    if len(T.indices) == T._block_shape[0]:
        return _place_of_columns(P, T.indices)
    backend, width = P._backend, np.int64(P._block_shape[1])
    keys = [backend.expand(X.indptr, len(X.indices)) * width + X.indices for X in (P, T)]
    found: Array = backend.xp.searchsorted(*keys)
    return found


def _place_of_columns(P: Any, columns: Array) -> Array:
    """Where the block in column ``columns[i]`` of each block row i is stored; all rows have it, and are sorted."""
    backend = P._backend
    _, indices, indptr = P._blocks
    before = indices < columns[backend.expand(indptr, len(indices))]
    starts = indptr[:-1].astype(np.int64)
    return starts + backend.segment_reduce("add", before.astype(np.int64), None, starts)


def prolongator_step(AT: Any, D: Any, rho: float) -> Any:
    """``omega / rho * D A T``."""
    return AT.scale_block_rows(D.data * D.dtype.type(_OMEGA / rho))


def _pseudo_inverse(A: Any) -> Any:
    """The pseudo-inverse of the coarsest matrix; LAPACK on the host decomposes so small a matrix sooner.

    On a GPU it is a matrix of this package with all blocks: CuPy captures no product of cuBLAS.
    """
    dense = A._backend.to_host(A.toarray())  # synchronize!
    if not np.isfinite(dense).all():
        raise ValueError("A: wanted finite numbers, got NaN or infinity")
    dense = (dense + dense.conj().T) / 2
    cut = max(_CUT, 4 * np.finfo(A.dtype).eps)
    found = _definite_inverse(dense, cut)
    if found is None:
        values, vectors = np.linalg.eigh(dense)
        kept = abs(values) > cut * abs(values).max(initial=0)
        with np.errstate(all="ignore"):
            inverse = np.where(kept, 1 / np.where(kept, values, 1), 0)
            found = ((vectors * inverse) @ vectors.conj().T).astype(A.dtype)
    if not np.isfinite(found).all():
        raise ValueError(f"A: the inverse of the coarsest matrix is not finite in {A.dtype}; scale A up")
    if A._backend.xp is np:
        return found
    side = next(n for n in range(_COARSE_BLOCK, 0, -1) if len(found) % n == 0)
    count, index = len(found) // side, A.indices.dtype
    tiles = found.reshape(count, side, count, side).transpose(0, 2, 1, 3).reshape(-1, side, side)
    every = Blocks(
        tiles, np.tile(np.arange(count, dtype=index), count), np.arange(0, count * count + 1, count, dtype=index)
    )
    return A._new(Blocks(*map(A._backend.from_host, every)), canonical=True)


def _definite_inverse(dense: Any, cut: float) -> Any:
    """The inverse by Cholesky's factor, a tenth of the time of all eigenvalues; None if the matrix is not definite.

    Rows of zeros, those of modes that an aggregate of few nodes does not carry, stay zeros.
    """
    from scipy.linalg import get_lapack_funcs  # its import takes as long as that of the rest of this room

    there = np.flatnonzero(np.diagonal(dense))
    factorize, invert = get_lapack_funcs(("potrf", "potri"), (dense,))
    lower, failed = factorize(dense[np.ix_(there, there)], lower=True)
    pivots = abs(np.diagonal(lower)) ** 2
    if failed or not len(there) or not pivots.min() > cut * pivots.max():  # NaN is not larger
        return None
    lower, _ = invert(lower, lower=True)
    half = np.tril(lower, -1)
    found = np.zeros_like(dense)
    found[np.ix_(there, there)] = half + half.conj().T + np.diag(np.diagonal(lower))
    return found


def from_pyamg(
    ml: Any, *, device: str | None = None, smoother: str = "chebyshev", degree: int = 2, cycle: str = "V"
) -> Multigrid:
    """Return the hierarchy of a multilevel solver of pyamg as a preconditioner.

    Parameters
    ----------
    ml : pyamg.MultilevelSolver
        A hierarchy for a Hermitian positive definite matrix. Its own smoothers and coarse solver are not used.
    device : {"cpu", "cuda"}, optional
        Where the preconditioner is to work; "cpu" by default.
    smoother, degree, cycle
        As for `smoothed_aggregation`.

    Returns
    -------
    Multigrid
        The preconditioner. It keeps copies of all matrices, and of prolongators and restrictions beyond `refresh`.

    Raises
    ------
    TypeError
        If `ml` has no levels.
    ValueError
        If an option is wrong.

    Examples
    --------
    >>> import bsrgemm as bg, numpy as np, pyamg
    >>> A = pyamg.gallery.poisson((30, 30), format="csr")
    >>> M = bg.linalg.from_pyamg(pyamg.smoothed_aggregation_solver(A))
    >>> x, info = bg.linalg.cg(bg.bsr_array(A, blocksize=(1, 1)), np.ones(900), M=M)
    >>> info
    0
    """
    options = _checked(0.0, 1, 1, smoother, degree, cycle)
    given = getattr(ml, "levels", None)
    if not given or not hasattr(given[0], "A"):
        raise TypeError(f"ml: wanted a MultilevelSolver of pyamg, got {type(ml).__name__}")
    sizes = [getattr(level.A, "blocksize", (1, 1))[0] for level in given]
    matrices = [_taken(level.A, (size, size), device) for level, size in zip(given, sizes, strict=True)]
    levels = []
    for k, (level, (fine, coarse)) in enumerate(zip(given[:-1], itertools.pairwise(sizes), strict=True)):
        A = matrices[k]
        P, R = _taken(level.P, (fine, coarse), device), _taken(level.R, (coarse, fine), device)
        plans = _Galerkin(P, R)
        levels.append(plans.level(A, inverse_blocks(A, singular=k > 0), options))
    found = Multigrid(levels, matrices[-1], options)
    found._given = True
    return found


class _Galerkin:
    """A prolongator and a restriction from elsewhere, which other numbers of the matrix do not change."""

    def __init__(self, P: Any, R: Any) -> None:
        self._P, self._R = P, R

    def level(self, A: Any, D: Any, options: Options) -> Level:
        return Level(A, self._P, self._R, options.smoothing(A, D), self)

    def __call__(self, A: Any, D: Any, options: Options) -> tuple[Level, Any]:
        return self.level(A, D, options), self._R @ (A @ self._P)


def _taken(S: Any, blocksize: tuple[int, int], device: str | None) -> Any:
    found = bsr_array(S, blocksize=blocksize, copy=True)
    return found if device is None else found.to_device(device)
