"""Preconditioners and solutions by block triangles: SSOR, ILU(0), IC(0) and `spsolve_triangular`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._backend.base import Array, Backend, Blocks
from . import ordering
from .operators import Preconditioner, check_matrix, check_right_hand_side, is_real
from .smoothers import inverse_blocks

#: The largest condition of diagonal blocks by which a triangle is divided before its solution.
_MOST_AHEAD = 100.0


#: From a matrix and the order of its nodes: what a sweep multiplies with, and the inverses of its pivots.
Factors = Callable[[Any, Array, int], tuple[Any, Array]]


class Sweeps(Preconditioner):
    """A sweep over groups of nodes forwards, and one backwards: ``w (2 - w) (D + w U)^-1 D (D + w L)^-1``.

    Nodes are in the order of their groups, and the rows of a group are multiplied by the inverses of its diagonal
    blocks: a step of a sweep is one product.
    """

    _capturable = True

    def __init__(self, kind: str, A: Any, order: tuple[Array, int], factors: Factors, weight: float = 1.0) -> None:
        self._made_of(A)
        self._kind, self._order, self._factors, self._weight = kind, order, factors, weight
        self._pattern = [x.copy() for x in A._canonical()[1:]]
        #: how many groups of nodes are solved for one after the other
        self.groups = order[1]
        self._set_up(A)

    def _set_up(self, A: Any) -> None:
        factored, inverse = self._factors(A, *self._order)
        with np.errstate(all="ignore"):
            found = ordering.groups(factored, *self._order, inverse * A.dtype.type(self._weight))
        finite = A._backend.xp.isfinite
        fine = finite(found.inverse.data).all()
        for side in (side for group in found.several for side in (group.before, group.after) if side is not None):
            fine = fine & finite(side.data).all()
        if not bool(fine):  # synchronize!
            raise ValueError(f"A: its rows overflow in {A.dtype}, divided by their pivot blocks; shift the diagonal")
        self._groups = found

    def _check_pattern(self, A: Any) -> None:
        super()._check_pattern(A)
        for mine, theirs in zip(self._pattern, A._canonical()[1:], strict=True):
            if len(mine) != len(theirs) or not bool((mine == theirs).all()):  # synchronize!
                raise ValueError(f"A: wanted the blocks of the matrix that this was made of, got others{self._another}")

    def _detail(self) -> str:
        return f"{self.groups:,} group{'' if self.groups == 1 else 's'}"

    def _apply(self, r: Array) -> Array:
        x = self._groups.inverse @ r
        self._groups.forwards(x)
        self._groups.backwards(x)
        return self._times_factor(x[self._groups.place])

    def _apply_adjoint(self, r: Array) -> Array:
        """The factors of `_apply` in reverse, transposed."""
        x = self._backend.xp.empty_like(r)
        x[self._groups.place] = r
        self._groups.adjoint_backwards(x)
        self._groups.adjoint_forwards(x)
        inverse = self._groups.inverse.T
        return self._times_factor(inverse @ x if x.dtype.kind != "c" else (inverse @ x.conj()).conj())

    def _times_factor(self, x: Array) -> Array:
        if self._weight != 1:
            x *= self.dtype.type(2 - self._weight)
        return x


def block_ssor(A: Any, omega: float = 1.0, *, order: str = "colours") -> Preconditioner:
    """Return symmetric block over-relaxation as a preconditioner: a sweep over the nodes forwards, and one backwards.

    Parameters
    ----------
    A : bsr_array or bsr_matrix
        A square matrix with square blocks of float32, float64, complex64 or complex128.
    omega : float
        The factor of relaxation, above 0 and below 2; 1 is symmetric block Gauss-Seidel.
    order : {"colours", "natural"}
        The order of the nodes, as for `ilu0`.

    Returns
    -------
    Preconditioner
        It is Hermitian positive definite if A is. `groups` is the number of steps of a sweep. It keeps the blocks of A
        beside those on the diagonal, multiplied by the inverses of the latter, until `refresh`.

    Raises
    ------
    TypeError
        If A is not such a matrix.
    ValueError
        If A or its blocks are not square, a diagonal block is missing or singular (its index is told), or `omega` is
        out of range.

    See Also
    --------
    ic0, ilu0 : need fewer iterations, and a factorisation.

    Notes
    -----
    Nodes are coloured, so that those of a colour do not depend on each other, and are solved for one colour after the
    other. The colours depend on the pattern alone and are the same on every device.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(2 * np.eye(64) - np.eye(64, k=1) - np.eye(64, k=-1), blocksize=(2, 2))
    >>> x, info = bg.linalg.cg(A, np.ones(64), M=bg.linalg.block_ssor(A, 1.4))
    >>> info
    0
    """
    check_matrix(A)
    if not is_real(omega) or not 0 < float(omega) < 2:
        raise ValueError(f"omega: wanted a number above 0 and below 2, got {omega!r}")
    return Sweeps("block_ssor", A, _ordered(A, order), _not_factored, float(omega))


def _not_factored(A: Any, number: Array, count: int) -> tuple[Any, Array]:
    inverse = inverse_blocks(A).data
    _check_finite(A, A._source()[0].data)
    return A, inverse


def ilu0(A: Any, *, order: str = "colours") -> Preconditioner:
    """Return the incomplete LU decomposition on the blocks of A, without fill, as a preconditioner.

    Parameters
    ----------
    A : bsr_array or bsr_matrix
        A square matrix with square blocks of float32, float64, complex64 or complex128.
    order : {"colours", "natural"}
        The order in which nodes are solved for. "natural" is that of their indices, which takes fewer iterations where
        neighbours have near indices; nodes that do not depend on each other are still solved for together. For a block
        tridiagonal matrix it makes ``M @ r`` the solution. "colours" takes fewer and larger steps, which suits a GPU.

    Returns
    -------
    Preconditioner
        ``M @ r`` solves with both triangles. `groups` is the number of steps of a sweep. Of A it keeps the pattern.

    Raises
    ------
    TypeError
        If A is not such a matrix.
    ValueError
        If A or its blocks are not square, or a pivot block is missing or singular; the message has its index.

    See Also
    --------
    ic0 : for Hermitian positive definite matrices.
    bicgstab, gmres : solvers for it.

    Notes
    -----
    Nodes of a colour do not depend on each other: they are factorised and solved for together, as a product. The
    colours depend on the pattern alone and are the same on every device.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(3 * np.eye(64) - 2 * np.eye(64, k=1) - 0.5 * np.eye(64, k=-1), blocksize=(2, 2))
    >>> x, info = bg.linalg.bicgstab(A, np.ones(64), M=bg.linalg.ilu0(A))
    >>> info
    0
    """
    check_matrix(A)
    return Sweeps("ilu0", A, _ordered(A, order), _factored)


def ic0(A: Any, *, order: str = "colours") -> Preconditioner:
    """Return the incomplete Cholesky decomposition on the blocks of A, without fill, as a preconditioner.

    Parameters
    ----------
    A : bsr_array or bsr_matrix
        A Hermitian positive definite matrix with square blocks of float32, float64, complex64 or complex128.
    order : {"colours", "natural"}
        The order of the nodes, as for `ilu0`.

    Returns
    -------
    Preconditioner
        It is Hermitian positive definite. `groups` is the number of steps of a sweep.

    Raises
    ------
    TypeError
        If A is not such a matrix.
    ValueError
        If A or its blocks are not square, A is not Hermitian, or a pivot block is missing or not positive definite; the
        message has its index.

    See Also
    --------
    ilu0 : for other matrices.
    cg : the solver for it.

    Notes
    -----
    The factors are ``L D L^H`` with whole blocks D, so that no roots are taken. For a Hermitian matrix they are those
    of `ilu0`.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(2 * np.eye(64) - np.eye(64, k=1) - np.eye(64, k=-1), blocksize=(2, 2))
    >>> x, info = bg.linalg.cg(A, np.ones(64), M=bg.linalg.ic0(A))
    >>> info
    0
    """
    check_matrix(A)
    return Sweeps("ic0", A, _ordered(A, order), _factored_definite)


def _factored_definite(A: Any, number: Array, count: int) -> tuple[Any, Array]:
    """`_factored` for a Hermitian positive definite matrix; ValueError for another one."""
    _check_finite(A, A._source()[0].data)
    apart = abs(A - A.conj().T).max() if A.shape[0] else 0
    if A.shape[0] and not float(apart) <= 64 * np.finfo(A.dtype).eps * float(abs(A).max()):  # synchronize!
        raise ValueError(f"A: wanted a Hermitian matrix, got one that differs from its transpose by {float(apart):.3g}")
    factored, inverse = _factored(A, number, count)
    xp = A._backend.xp
    positive = xp.ones(len(inverse), bool)
    for k in range(A.blocksize[0]):  # a matrix is positive definite if all minors in its corner are positive
        positive &= xp.linalg.slogdet(inverse[:, : k + 1, : k + 1])[0].real > 0
    wrong = xp.flatnonzero(~positive)  # synchronize!
    if len(wrong):
        raise ValueError(f"A: pivot block {int(wrong[0])} is not positive definite; shift the diagonal, or try ilu0")
    return factored, inverse


def _check_finite(A: Any, data: Array) -> None:
    """Raise ValueError if blocks of A hold NaN or infinity, which would spread through all that depends on them."""
    if not bool(A._backend.xp.isfinite(data).all()):  # synchronize!
        raise ValueError("A: wanted finite numbers, got NaN or infinity")


def _ordered(A: Any, order: str) -> tuple[Array, int]:
    if not isinstance(order, str) or order not in ("colours", "natural"):
        raise ValueError(f"order: wanted 'colours' or 'natural', got {order!r}")
    return ordering.colours(A) if order == "colours" else ordering.levels(A)


def _factored(A: Any, number: Array, count: int) -> tuple[Any, Array]:
    """Return a matrix with the blocks of U above the diagonal and L D below it, and the inverses of its pivots D."""
    _check_finite(A, A._source()[0].data)
    backend: Backend = A._backend
    xp = backend.xp
    data, indices, indptr = A._canonical()
    data = data.copy()
    n, width = len(indptr) - 1, A._block_shape[1]
    row = backend.expand(indptr, len(indices))
    diagonal = xp.full(n, -1, np.int64)
    own = xp.flatnonzero(row == indices)
    diagonal[indices[own]] = own
    if bool((diagonal < 0).any()):  # synchronize!
        first = int(xp.flatnonzero(diagonal < 0)[0])
        raise ValueError(f"A: diagonal block {first} is missing: no block is stored there")
    keys = row * np.int64(width) + indices
    inverse = xp.empty((n, *data.shape[1:]), A.dtype)
    blocks_of = ordering.by_number(backend, number[indices], count)
    for colour, nodes in enumerate(ordering.by_number(backend, number, count)):
        inverse[nodes] = _inverted(backend, data[diagonal[nodes]], nodes)
        left = blocks_of[colour]
        left = left[number[row[left]] > colour]  # synchronize!
        if not len(left):
            continue
        # All pairs of a block (i, k) with k of this colour and a block (k, j).
        begin, length = indptr[indices[left]].astype(np.int64), (indptr[1:] - indptr[:-1])[indices[left]]
        pair, right = ordering.entries_of(xp, begin, length)  # synchronize!
        wanted = row[left][pair] * np.int64(width) + indices[right]
        place = xp.minimum(xp.searchsorted(keys, wanted), len(keys) - 1)
        kept = xp.flatnonzero((keys[place] == wanted) & (number[indices[right]] > colour))  # synchronize!
        if not len(kept):
            continue
        pair, right, place = pair[kept], right[kept], place[kept]
        with np.errstate(all="ignore"):  # what overflows is found in the pivots
            scaled = data[left] @ inverse[indices[left]]
        order = xp.argsort(place)
        targets = place[order]
        first = xp.flatnonzero(xp.concatenate([xp.ones(1, bool), targets[1:] != targets[:-1]]))  # synchronize!
        with np.errstate(all="ignore"):
            products = scaled[pair] @ data[right]
            data[targets[first]] -= backend.segment_reduce("add", products, order, first)
    blocks = Blocks(data, indices.copy(), indptr.copy())
    return A._new(blocks, canonical=True), inverse


def _inverted(backend: Backend, pivots: Array, nodes: Array) -> Array:
    """The inverses of pivot blocks; ValueError with the index of the first that has none, or none that is finite."""
    xp = backend.xp
    with np.errstate(all="ignore"):
        singular = xp.linalg.slogdet(pivots)[0] == 0
        one = backend.from_host(np.eye(pivots.shape[1], dtype=pivots.dtype))
        inverse: Array = xp.linalg.inv(xp.where(singular[:, None, None], one, pivots))
    finite = (xp.isfinite(pivots) & xp.isfinite(inverse)).all(axis=(1, 2))
    wrong = xp.flatnonzero(singular | ~finite)  # synchronize!
    if len(wrong):
        first = wrong[0]
        state = "singular" if bool(singular[first]) else f"singular in {pivots.dtype}: it or its inverse is not finite"
        raise ValueError(f"A: pivot block {int(nodes[first])} is {state}; try a shift of the diagonal")
    return inverse


def spsolve_triangular(A: Any, b: Any, lower: bool = True, unit_diagonal: bool = False) -> Array:
    """Solve ``A x = b`` for a block-triangular matrix.

    Parameters
    ----------
    A : bsr_array or bsr_matrix of shape (n, n)
        A matrix with square blocks, none of them above the diagonal (below it if `lower` is False). The blocks on the
        diagonal need not be triangular.
    b : array (n,) or (n, k)
        One right-hand side or several, on the device of A.
    lower : bool
        Whether the blocks are below the diagonal, or above it.
    unit_diagonal : bool
        If True, the blocks on the diagonal count as identities, and are not read.

    Returns
    -------
    array like `b`
        The solution.

    Raises
    ------
    TypeError
        If A is not a BSR matrix of floats, or b is not a dense array on its device.
    ValueError
        If A has blocks on the other side, NaN or infinity, a diagonal block is missing or singular (its index is told),
        or shapes do not agree.

    See Also
    --------
    ilu0 : a preconditioner that solves with two triangles.

    Notes
    -----
    Block rows that do not depend on each other are solved for together. Finding them takes longer than solving: for
    many solutions with a decomposition use `ilu0` or `ic0`, which keep their groups.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> L = bg.bsr_array(np.array([[2.0, 0, 0, 0], [1, 2, 0, 0], [1, 0, 4, 0], [0, 1, 1, 4]]), blocksize=(2, 2))
    >>> bg.linalg.spsolve_triangular(L, np.array([2.0, 3, 5, 6]))
    array([1., 1., 1., 1.])
    """
    check_matrix(A)
    backend: Backend = A._backend
    xp = backend.xp
    b = check_right_hand_side(b, A)
    data, indices, indptr = A._canonical()
    _check_finite(A, data)
    row = backend.expand(indptr, len(indices))
    if bool((indices > row).any() if lower else (indices < row).any()):  # synchronize!
        side = "above" if lower else "below"
        raise ValueError(f"A: wanted no blocks {side} the diagonal for lower={lower}, got some")
    n, R = A._block_shape[0], A.blocksize[0]
    if unit_diagonal:
        inverse = xp.zeros((n, R, R), A.dtype)
        for i in range(R):
            inverse[:, i, i] = 1
    else:
        inverse = inverse_blocks(A).data
    number, count = ordering.levels(A, lower)
    wide = b.astype(np.result_type(A.dtype, b.dtype), copy=False)
    ahead = wide.dtype == A.dtype and (unit_diagonal or _may_divide_ahead(A, data, inverse, row == indices))
    return ordering.groups(A, number, count, inverse, ahead).solve(wide)


def _may_divide_ahead(A: Any, data: Array, inverse: Array, own: Array) -> bool:
    """Whether rows may be multiplied by the inverses of their diagonal blocks before anything is subtracted from b.

    Errors of rounding grow with the condition of these blocks then, and numbers may overflow; `own` tells which blocks
    are on the diagonal.
    """
    xp = A._backend.xp
    if not len(inverse):
        return True
    sizes = [abs(x).sum(axis=2).max(axis=1) for x in (data[own], inverse)]
    with np.errstate(over="ignore"):
        condition, largest = (sizes[0] * sizes[1]).max(), sizes[1].max() * abs(data).max() * A.blocksize[0]
    return bool((condition <= _MOST_AHEAD) & xp.isfinite(largest))  # synchronize!
