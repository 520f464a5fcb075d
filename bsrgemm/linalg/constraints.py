"""Boundary conditions: unknowns with known values."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._backend.base import Array, Blocks
from .operators import check_matrix, check_right_hand_side


def constrain(A: Any, b: Any, dofs: Any, values: Any = 0) -> tuple[Any, Array]:
    """Fix some unknowns of ``A x = b`` at known values; the pattern of blocks and the symmetry of A stay.

    Parameters
    ----------
    A : bsr_array or bsr_matrix of shape (n, n)
        The matrix.
    b : array (n,) or (n, k)
        The right-hand side, or several.
    dofs : array of int or of bool
        Indices of the unknowns that are fixed, single components of a block or whole blocks; or n booleans.
    values : number or array
        Their values: one for all, or one for each, in the order of `dofs`. They are cast to the dtype of A and b, which
        is complex if they are.

    Returns
    -------
    A : bsr_array or bsr_matrix
        A new matrix: the rows and columns of fixed unknowns hold zeros, and their diagonal elements are kept (1 where
        they are 0), so that the condition of the matrix does not suffer.
    b : array
        A new right-hand side.

    Raises
    ------
    TypeError
        If A is not a BSR matrix of floats, b is not a dense array on its device, `dofs` holds no integers, or `values`
        no numbers.
    ValueError
        If shapes do not agree, an index is out of range or occurs twice with different values, a value is not finite,
        or the diagonal block of a fixed unknown is not stored.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[2.0, -1, 0, 0], [-1, 2, -1, 0], [0, -1, 2, -1], [0, 0, -1, 2]]), blocksize=(2, 2))
    >>> C, f = bg.linalg.constrain(A, np.zeros(4), [0, 3], [1.0, 4.0])
    >>> C.toarray()
    array([[ 2.,  0.,  0.,  0.],
           [ 0.,  2., -1.,  0.],
           [ 0., -1.,  2.,  0.],
           [ 0.,  0.,  0.,  2.]])
    >>> np.linalg.solve(C.toarray(), f)
    array([1., 2., 3., 4.])
    """
    check_matrix(A)
    backend = A._backend
    xp, n, R = backend.xp, A.shape[0], A.blocksize[0]
    b = check_right_hand_side(b, A)
    places = _places(A, dofs)
    given = values if backend.is_dense(values) else backend.from_host(np.asarray(values))
    if given.dtype.kind not in "fciub":
        raise TypeError(f"values: wanted numbers, got {given.dtype}")
    dtype = np.result_type(A.dtype, b.dtype, *(np.complex64,) * (given.dtype.kind == "c"))
    known = xp.zeros(b.shape, dtype)
    given = (given[:, None] if given.ndim == 1 and b.ndim == 2 else given).astype(dtype)
    try:
        known[places] = given
    except ValueError:
        raise ValueError(f"values: wanted one number, or {len(places)}, got shape {tuple(given.shape)}") from None
    if not bool(xp.isfinite(given).all()):  # synchronize!
        raise ValueError("values: wanted finite numbers, got NaN or infinity")
    if not bool((known[places] == given).all()):  # synchronize!
        raise ValueError("dofs: wanted one value for each unknown, got an unknown twice with different values")
    data, indices, indptr = A._canonical()
    row = backend.expand(indptr, len(indices))
    free = xp.ones(n, bool)
    free[places] = False
    own = xp.flatnonzero(row == indices)
    stored = xp.zeros(n // R, bool)
    stored[indices[own]] = True
    if bool((~free & ~xp.repeat(stored, R)).any()):  # synchronize!
        raise ValueError("dofs: the diagonal block of a fixed unknown is not stored in A; store it, zeros will do")
    by_block = free.reshape(-1, R)
    diagonal = xp.zeros(n, A.dtype)
    line = xp.arange(R)
    diagonal.reshape(-1, R)[indices[own]] = data[own][:, line, line]
    diagonal = xp.where(diagonal == 0, A.dtype.type(1), diagonal)
    data = xp.where(by_block[row][:, :, None] & by_block[indices][:, None, :], data, A.dtype.type(0))
    data[own[:, None], line, line] += xp.where(by_block, 0, diagonal.reshape(-1, R))[indices[own]].astype(A.dtype)
    fixed = A._new(Blocks(data, indices.copy(), indptr.copy()), canonical=True)
    load = b.astype(dtype) - A @ known
    load[places] = diagonal[places].reshape(-1, *(1,) * (b.ndim - 1)) * known[places]
    return fixed, load


def _places(A: Any, dofs: Any) -> Array:
    """The indices of the unknowns that are fixed, on the device of A."""
    backend, n = A._backend, A.shape[0]
    places = dofs if backend.is_dense(dofs) else backend.from_host(np.atleast_1d(np.asarray(dofs)))
    if places.dtype == bool:
        if tuple(places.shape) != (n,):
            raise ValueError(f"dofs: wanted {n} booleans, got shape {tuple(places.shape)}")
        return backend.xp.flatnonzero(places)  # synchronize!
    if not places.size:
        return places.astype(np.int64)
    if places.ndim != 1 or places.dtype.kind not in "iu":
        raise TypeError(
            f"dofs: wanted integers or booleans in one dimension, got {places.dtype} of shape {tuple(places.shape)}"
        )
    low, high = int(places.min()), int(places.max())  # synchronize!
    if low < 0 or high >= n:
        raise ValueError(f"dofs: wanted indices from 0 to {n - 1}, got {low if low < 0 else high}")
    return places.astype(np.int64)
