"""A matrix in panels of block rows: ``y_r = A_rr x_r + sum over s of A_rs x_s`` on each rank r.

The blocks of a panel are split once: those in block columns of this rank, and those in ghost columns, which are
numbered anew from 0 on. The first product runs while the ghosts travel, the second is added when they have come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from ..._array.base import BsrBase
from ..._backend import structure
from ..._backend.base import Array, Blocks
from ..._backend.registry import target
from ..._products.matmul import matmul
from ...dtypes import accumulator_dtype
from ...linalg.operators import DistributedOperator, inner_products, snapshot
from ...linalg.smoothers import inverse_blocks
from ..communicator import Communicator, Exchange, same, summed, together
from .multigrid import set_up
from .sparse import Halo

#: Ghost blocks in so large a share of the block rows are multiplied with a matrix of all rows, into the result itself.
_MOST_ROWS = 0.5


class DistributedMatrix(DistributedOperator):
    """A matrix of which each rank has a panel of block rows, on its CPU or its GPU.

    `partition`, `from_local` and `from_file` make instances. Vectors are spread in the same way: a rank has the rows
    ``D.rows`` of each. Products, inner products and solvers are called by all ranks together.

    Attributes
    ----------
    shape, blocksize, dtype, nnz
        Of the whole matrix.
    comm : Communicator
        The ranks.
    rows, columns : range
        The rows of this rank, and its elements of vectors that the matrix is multiplied with.
    local_shape : (int, int)
        How many they are.
    interior : bsr_array
        The blocks of this rank in its own columns, of shape `local_shape`. ``bg.linalg.ilu0(D.interior)`` is a
        preconditioner that needs no messages.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> from bsrgemm.interop import mpi
    >>> A = bg.bsr_array(2 * np.eye(6) - np.eye(6, k=1) - np.eye(6, k=-1), blocksize=(2, 2))
    >>> D = mpi.partition(A)  # with a communicator: mpi.partition(A, MPI.COMM_WORLD)
    >>> D
    <DistributedMatrix of shape (6, 6), blocks of (2, 2), float64: rows 0 to 5 on rank 0 of 1, on 'cpu'>
    >>> b = D.scatter(np.ones(6))
    >>> x, info = bg.linalg.cg(D, b, M=bg.linalg.block_jacobi(D))
    >>> D.gather(x), info
    (array([3., 5., 6., 6., 5., 3.]), 0)
    """

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, panel: Any, row_starts: np.ndarray, column_starts: np.ndarray, comm: Communicator) -> None:
        # The panel has the block rows of this rank and all columns; it was checked by who calls this.
        R, C = panel.blocksize
        rank, backend = comm.rank, panel._backend
        self.comm, self._backend = comm, backend
        self.row_starts, self.column_starts = row_starts, column_starts
        self.blocksize, self.dtype = (R, C), panel.dtype
        self.shape = (int(row_starts[-1]) * R, int(column_starts[-1]) * C)
        self.rows = range(int(row_starts[rank]) * R, int(row_starts[rank + 1]) * R)
        self.columns = range(int(column_starts[rank]) * C, int(column_starts[rank + 1]) * C)
        self.local_shape, self.first_row = (len(self.rows), len(self.columns)), self.rows.start
        self.interior, ghost, columns = _split(panel, self.columns.start // C, self.columns.stop // C)
        self._ghost_columns = columns
        self._halo = Halo.of(comm, backend, C, column_starts, columns)
        self.nnz = int(comm.allreduce(np.array(self.interior.nnz + ghost.nnz, np.int64)))
        self._set_ghost(ghost)

    def _set_ghost(self, ghost: Any) -> None:
        """Keep the ghost blocks; only the block rows that have some, if they are few."""
        xp, R = self._backend.xp, self.blocksize[0]
        data, indices, indptr = ghost._blocks
        filled = xp.flatnonzero(indptr[1:] > indptr[:-1])  # synchronize!
        self._ghost_rows: Array | None = None
        if len(filled) < _MOST_ROWS * (len(indptr) - 1):
            self._ghost_rows = (filled[:, None] * R + xp.arange(R)).reshape(-1)
            pointers = xp.concatenate([indptr[:1], indptr[1:][filled]])
            ghost = ghost._new(Blocks(data, indices, pointers), (len(filled) * R, ghost.shape[1]), canonical=True)
        self._ghost = ghost

    # ------------------------------------------------------------------------------- products
    def multiply(self, x: Array, out: Array | None = None, alpha: Any = 1, beta: Any = 0) -> Array:
        """Return the rows of this rank of ``alpha * A @ x + beta * out``.

        Parameters
        ----------
        x : array (n,) or (n, k)
            The elements ``D.columns`` of a vector, or of several; all ranks pass the same dtype and k.
        out : array, optional
            Where the result is written.
        alpha, beta : number
            Factors of the product, and of the old values of `out`.

        Returns
        -------
        array (m,) or (m, k)
            The elements ``D.rows`` of the result; `out` if it was given.

        Raises
        ------
        TypeError, ValueError
            If `x` does not fit on this rank. Ranks that wait for its numbers raise RuntimeError.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> from bsrgemm.interop import mpi
        >>> D = mpi.partition(2 * bg.eye(4, blocksize=(2, 2)))
        >>> D.multiply(np.arange(4.0), alpha=10)  # D @ x is the same without factors
        array([ 0., 20., 40., 60.])
        """
        given, out = out, self._check(x, self.local_shape[1], out)
        under_way, ghosts = self._halo.fetch(x)
        with _meanwhile(under_way):
            y = matmul(self.interior, x, out=out, alpha=alpha, beta=beta)
        if self._halo.count:
            if self._ghost_rows is None:
                matmul(self._ghost, ghosts, out=y, alpha=alpha, beta=1)
            elif len(self._ghost_rows):
                y[self._ghost_rows] += matmul(self._ghost, ghosts, alpha=alpha)
        return y if given is None else given

    def _transposed(self, x: Array, conjugate: bool) -> Array:
        """The elements of this rank of ``A.T @ x``: what others have for them is added in the order of the ranks.

        With `conjugate`, those of the conjugate of A, for the conjugate of x.
        """
        self._check(x, self.local_shape[0], back=True)
        x = x.conj() if conjugate else x
        halo = self._halo
        boundary = x if self._ghost_rows is None else x[self._ghost_rows]
        under_way, coming = halo.give_back(matmul(self._ghost.T, boundary))
        with _meanwhile(under_way):
            y = matmul(self.interior.T, x)
        blocks = y.reshape(len(y) // halo.width, halo.width, *y.shape[1:])
        for rank in sorted(halo.sends):
            part = halo.sends[rank]
            blocks[halo.index[part]] += coming[part]
        return y

    def _check(self, x: Any, length: int, out: Any = None, back: bool = False) -> Array | None:
        """Check the operand of a product, and return `out` as an array; other ranks are told if that fails."""
        backend = self._backend
        try:
            if not backend.is_dense(x):
                raise TypeError(f"x: wanted a dense array on {backend.name!r}, where D is, got {type(x).__name__}")
            if x.ndim not in (1, 2) or len(x) != length:
                raise ValueError(
                    f"x: wanted the part of rank {self.comm.rank}, ({length},) or ({length}, k), got {tuple(x.shape)}; "
                    "D.scatter makes it of a whole vector"
                )
            if x.dtype not in backend.dtypes:
                raise TypeError(f"x: wanted numbers, got {x.dtype}")
            return None if out is None else target(backend, out, "out", ", where D is")
        except (TypeError, ValueError):
            self._halo.refuse(back)
            raise

    @property
    def T(self) -> Transpose:
        """The transpose, for products ``D.T @ x`` with vectors that have the elements ``D.rows`` here."""
        return Transpose(self, False)

    @property
    def H(self) -> Transpose:
        """The conjugate transpose, for products ``D.H @ x``."""
        return Transpose(self, True)

    def vdot(self, u: Array, v: Array) -> Array:
        """Return the inner products of columns, over all ranks, with `u` conjugated.

        Parameters
        ----------
        u, v : array (n,) or (n, k)
            The parts of this rank.

        Returns
        -------
        array () or (k,)
            The same bits on every rank: in float32 for 16-bit floats, in 64 bits for integers.

        Raises
        ------
        TypeError, ValueError
            If `u` or `v` does not fit on this rank; the others raise RuntimeError. On all ranks, if dtypes or numbers
            of columns differ between them.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> from bsrgemm.interop import mpi
        >>> D = mpi.partition(bg.eye(2, blocksize=(2, 2)))
        >>> float(D.vdot(np.array([1.0, 2.0]), np.array([3.0, 4.0])))
        11.0
        """
        try:
            self._check_parts(u, v)
            part = inner_products(self._backend, *(x.astype(_summed_in(x.dtype), copy=False) for x in (u, v)))
        except (TypeError, ValueError):
            with suppress(RuntimeError):
                summed(self.comm, "u, v", None)
            raise
        if self.comm.size == 1:
            return part
        backend = self._backend
        found = summed(self.comm, "u, v", np.asarray(backend.to_host(part)))  # synchronize!
        return found if backend.xp is np else backend.from_host(np.asarray(found))

    def _check_parts(self, u: Any, v: Any) -> None:
        for name, x in (("u", u), ("v", v)):
            if not self._backend.is_dense(x):
                raise TypeError(f"{name}: wanted a dense array on {self._backend.name!r}, got {type(x).__name__}")
            if x.dtype not in self._backend.dtypes:
                raise TypeError(f"{name}: wanted numbers, got {x.dtype}")
            if x.ndim not in (1, 2) or len(x) not in self.local_shape:
                n = self.local_shape[0]
                raise ValueError(
                    f"{name}: wanted the part of rank {self.comm.rank}, ({n},) or ({n}, k), got {tuple(x.shape)}"
                )
        if u.ndim != v.ndim or len(u) != len(v):
            raise ValueError(f"u, v: wanted parts of one shape, got {tuple(u.shape)} and {tuple(v.shape)}")

    def norm(self, u: Array) -> Array:
        """Return the Euclidean norms of columns, over all ranks: the square roots of ``vdot(u, u)``.

        Parameters
        ----------
        u : array (n,) or (n, k)
            The part of this rank.

        Returns
        -------
        array () or (k,)
            The same bits on every rank.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> from bsrgemm.interop import mpi
        >>> float(mpi.partition(bg.eye(2, blocksize=(2, 2))).norm(np.array([3.0, 4.0])))
        5.0
        """
        return self._backend.xp.sqrt(self.vdot(u, u).real)

    # ---------------------------------------------------------------- whole vectors on rank 0
    def scatter(self, b: Array | None, axis: int = 0) -> Array:
        """Return the part of this rank of a whole vector on rank 0.

        Parameters
        ----------
        b : array (n,) or (n, k), or None
            The vector on rank 0; what other ranks pass is not looked at.
        axis : {0, 1}
            0 for a vector such as ``A @ x``, 1 for one such as x. For a square matrix they are the same.

        Returns
        -------
        array
            The elements ``D.rows``, or ``D.columns`` with axis=1, on the device of the matrix.

        Raises
        ------
        TypeError, ValueError
            If `b` does not fit; on all ranks.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> from bsrgemm.interop import mpi
        >>> mpi.partition(bg.eye(2, blocksize=(2, 2))).scatter(np.array([3.0, 4.0]))
        array([3., 4.])
        """
        comm, backend, n = self.comm, self._backend, self.shape[_axis(axis)]
        with together(comm):
            if comm.rank == 0:
                self._check_vector(b, "b", n)
        dtype, rest = comm.broadcast((b.dtype, tuple(b.shape[1:])) if comm.rank == 0 and b is not None else None)
        parts = [slice(*(int(s) * self.blocksize[axis] for s in pair)) for pair in self._pairs(axis)]
        mine = backend.xp.empty((parts[comm.rank].stop - parts[comm.rank].start, *rest), dtype)
        sends = {}
        if comm.rank == 0:
            assert b is not None
            b = backend.xp.ascontiguousarray(b)
            sends = {rank: b[part] for rank, part in enumerate(parts) if rank}
            mine[...] = b[parts[0]]
        comm.exchange(sends, {0: mine} if comm.rank else {}).wait()
        return mine

    def gather(self, y: Array, axis: int = 0) -> Array | None:
        """Return the whole vector on rank 0, and None on the others.

        Parameters
        ----------
        y : array (n,) or (n, k)
            The part of this rank.
        axis : {0, 1}
            As for `scatter`.

        Returns
        -------
        array or None
            The parts of all ranks, on rank 0.

        Raises
        ------
        TypeError, ValueError
            If `y` does not fit on one of the ranks, or its dtype or number of columns differ between them; on all
            ranks.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> from bsrgemm.interop import mpi
        >>> mpi.partition(bg.eye(2, blocksize=(2, 2))).gather(np.array([3.0, 4.0]))
        array([3., 4.])
        """
        comm, backend, n = self.comm, self._backend, self.local_shape[_axis(axis)]
        with together(comm):
            self._check_vector(y, "y", n)
        self.agree("y", f"{y.dtype} with columns {tuple(y.shape[1:])}")
        y = backend.xp.ascontiguousarray(y)
        if comm.rank:
            comm.exchange({0: y}, {}).wait()
            return None
        whole = backend.xp.empty((self.shape[axis], *y.shape[1:]), y.dtype)
        parts = [slice(*(int(s) * self.blocksize[axis] for s in pair)) for pair in self._pairs(axis)]
        whole[parts[0]] = y
        comm.exchange({}, {rank: whole[part] for rank, part in enumerate(parts) if rank}).wait()
        return whole

    def _check_vector(self, x: Any, name: str, n: int) -> None:
        """Raise TypeError or ValueError unless x holds one vector of n numbers, or several, on this device."""
        if not self._backend.is_dense(x):
            raise TypeError(f"{name}: wanted a dense array on {self._backend.name!r}, got {type(x).__name__}")
        if x.ndim not in (1, 2) or len(x) != n:
            raise ValueError(f"{name}: wanted shape ({n},) or ({n}, k), got {tuple(x.shape)}")
        if x.dtype.hasobject:
            raise TypeError(f"{name}: wanted numbers, got {x.dtype}")

    def _pairs(self, axis: int) -> Any:
        starts = (self.row_starts, self.column_starts)[axis]
        return itertools.pairwise(starts)

    # ------------------------------------------------------------------------- what solvers ask
    def total(self, part: Array) -> Array:
        """Return the sum of `part` over the ranks, in their order.

        Parameters
        ----------
        part : array
            Numbers of the same shape and dtype on all ranks.

        Returns
        -------
        array
            The same bits on every rank.
        """
        return self.comm.allreduce(part)

    @property
    def together(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes a context whose errors are raised by all ranks; nothing in it may communicate."""
        return partial(together, self.comm)

    def agree(self, name: str, value: str) -> None:
        """Raise ValueError on all ranks unless all of them have the same value of the argument `name`."""
        same(self.comm, name, value)

    def inverse_blocks(self, singular: bool = False) -> Any:
        """Return the inverses of the diagonal blocks of this rank as a matrix of shape `local_shape`."""
        with self.together():
            try:
                return inverse_blocks(self.interior, singular)
            except ValueError as error:
                first = self.first_row // self.blocksize[0]
                raise ValueError(f"{error}, counted from block row {first}, the first one of the rank") from None

    def smoothed_aggregation(self, near_nullspace: Any, theta: float, limits: tuple[int, int], options: Any) -> Any:
        """Return multigrid for this matrix; `bg.linalg.smoothed_aggregation` calls it."""
        return set_up(self, near_nullspace, theta, limits, options)

    def panel(self) -> Any:
        """Return the block rows of this rank with all columns of the matrix.

        Returns
        -------
        bsr_array
            A matrix of shape ``(len(D.rows), D.shape[1])``; `from_local` takes it.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import mpi
        >>> mpi.partition(bg.eye(2, blocksize=(2, 2))).panel().shape
        (2, 2)
        """
        backend, xp, C = self._backend, self._backend.xp, self.blocksize[1]
        data, indices, indptr = self.interior._blocks
        others = self.ghost_panel()._blocks
        index = structure.index_dtype(self.shape[1] // C, indices)
        columns = backend.from_host(self._ghost_columns.astype(index))
        place = (
            xp.concatenate([backend.expand(p, len(i)) for i, p in ((indices, indptr), others[1:])]),
            xp.concatenate([indices.astype(index) + index.type(self.columns.start // C), columns[others.indices]]),
        )
        shape = (self.local_shape[0], self.shape[1])
        found = type(self.interior)((xp.concatenate([data, others.data]), place), shape=shape)
        found.sum_duplicates()
        return found

    def ghost_panel(self) -> Any:
        """Return the blocks in columns of other ranks, in all block rows of this one; columns as the halo has them."""
        if self._ghost_rows is None:
            return self._ghost
        xp, R = self._backend.xp, self.blocksize[0]
        data, indices, indptr = self._ghost._blocks
        lengths = xp.zeros(self.local_shape[0] // R + 1, np.int64)
        lengths[self._ghost_rows[::R] // R + 1] = indptr[1:] - indptr[:-1]
        blocks = Blocks(data, indices, xp.cumsum(lengths).astype(indptr.dtype))
        return self._ghost._new(blocks, (self.local_shape[0], self._ghost.shape[1]), canonical=True)

    def with_panel(self, panel: Any, row_starts: np.ndarray, column_starts: np.ndarray) -> DistributedMatrix:
        """Return another matrix over the same ranks; all of them call this together."""
        return DistributedMatrix(panel, row_starts, column_starts, self.comm)

    def with_numbers(self, panel: Any) -> DistributedMatrix:
        """Return a matrix with the pattern of this one, of panels in canonical format, without messages."""
        first, last = (x // self.blocksize[1] for x in (self.columns.start, self.columns.stop))
        data, indices, _ = panel._canonical()
        own = (indices >= first) & (indices < last)
        found = self._copy()
        found.interior = self.interior._with_data(data[own], copy=False)  # synchronize!
        found._ghost = self._ghost._with_data(data[~own], copy=False)
        return found

    def snapshot(self) -> DistributedMatrix:
        """Return this matrix with values of its own and the same index arrays."""
        found = self._copy()
        found.interior, found._ghost = snapshot(self.interior), snapshot(self._ghost)
        return found

    def _copy(self) -> DistributedMatrix:
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    # ------------------------------------------------------------------------------ everything else
    def astype(self, dtype: Any) -> DistributedMatrix:
        """Return the matrix in another dtype, with the same lists of ghosts.

        Parameters
        ----------
        dtype : dtype
            For example float32, for a preconditioner.

        Returns
        -------
        DistributedMatrix
            A new matrix.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> from bsrgemm.interop import mpi
        >>> mpi.partition(bg.eye(2, blocksize=(2, 2))).astype(np.float32).dtype
        dtype('float32')
        """
        found = self._copy()
        found.interior, found._ghost = self.interior.astype(dtype), self._ghost.astype(dtype)
        found.dtype = found.interior.dtype
        return found

    def halo_bytes(self, columns: int = 1) -> int:
        """Return how many bytes this rank receives for a product with so many columns in the dtype of the matrix.

        Parameters
        ----------
        columns : int
            Columns of the dense operand.

        Returns
        -------
        int
            Each block column that the rank needs and does not have comes once.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import mpi
        >>> mpi.partition(bg.eye(2, blocksize=(2, 2))).halo_bytes()
        0
        """
        return self._halo.bytes(self.dtype.itemsize, columns)

    def __repr__(self) -> str:
        held = f"rows {self.rows.start} to {self.rows.stop - 1}" if self.rows else "no rows"
        return (
            f"<DistributedMatrix of shape {self.shape}, blocks of {self.blocksize}, {self.dtype}: {held} on rank "
            f"{self.comm.rank} of {self.comm.size}, on {self._backend.name!r}>"
        )


class Transpose:
    """The transpose of a `DistributedMatrix`, or its conjugate: products only."""

    __array_ufunc__ = None

    def __init__(self, matrix: DistributedMatrix, conjugate: bool) -> None:
        self._matrix, self._conjugate = matrix, conjugate and matrix.dtype.kind == "c"
        self.shape, self.local_shape = matrix.shape[::-1], matrix.local_shape[::-1]
        self.dtype, self.comm = matrix.dtype, matrix.comm

    def __matmul__(self, x: Any) -> Any:
        """Return the elements ``D.columns`` of ``A.T @ x`` for the elements ``D.rows`` of x."""
        found = self._matrix._transposed(x, self._conjugate)
        return found.conj() if self._conjugate else found

    @property
    def T(self) -> DistributedMatrix:
        """The transpose of this one: the matrix itself, for real numbers and for ``D.T``."""
        if self._conjugate:
            raise TypeError("D.H.T: products with the conjugate of a complex matrix are not offered; take D or D.T")
        return self._matrix

    @property
    def H(self) -> DistributedMatrix:
        """The conjugate transpose of this one: the matrix itself, for real numbers and for ``D.H``."""
        if self.dtype.kind == "c" and not self._conjugate:
            raise TypeError("D.T.H: products with the conjugate of a complex matrix are not offered; take D or D.H")
        return self._matrix


@contextmanager
def _meanwhile(under_way: Exchange) -> Iterator[None]:
    """Do the body of the ``with`` statement while messages travel, and wait for them also if it fails."""
    try:
        yield
    except Exception:
        with suppress(RuntimeError):
            under_way.wait()
        raise
    under_way.wait()


def _summed_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which products of such numbers are added up; a sum of NumPy says it for integers."""
    return np.zeros(0, dtype).sum().dtype if dtype.kind in "biu" else accumulator_dtype(dtype)


def _axis(axis: int) -> int:
    if axis not in (0, 1):
        raise ValueError(f"axis: wanted 0 or 1, got {axis!r}")
    return int(axis)


def _split(panel: BsrBase, first: int, last: int) -> tuple[Any, Any, np.ndarray]:
    """The blocks in columns from `first` to ``last - 1``, those in other columns, and the latter columns."""
    backend, xp = panel._backend, panel._backend.xp
    data, indices, indptr = panel._canonical()
    R, C = panel.blocksize
    index, rows = indices.dtype, len(indptr) - 1
    own = (indices >= first) & (indices < last)
    counts = xp.zeros(len(indices) + 1, np.int64)
    xp.cumsum(own, out=counts[1:])
    pointers = counts[indptr]
    inside = panel._new(
        Blocks(data[own], indices[own] - index.type(first), pointers.astype(index)),
        (rows * R, (last - first) * C),
        canonical=True,
    )
    columns = indices[~own]
    ghosts = xp.unique(columns)  # synchronize!
    outside = panel._new(
        Blocks(data[~own], xp.searchsorted(ghosts, columns).astype(index), (indptr - pointers).astype(index)),
        (rows * R, len(ghosts) * C),
        canonical=True,
    )
    return inside, outside, backend.to_host(ghosts)
