"""Direct solution, by the libraries that have it."""

from __future__ import annotations

from typing import Any

from .._array.base import BsrBase
from .._array.convert import Conversions
from .._backend.base import Array
from .._backend.registry import host
from .operators import check_right_hand_side


def spsolve(A: Any, b: Any) -> Array:
    """Solve ``A x = b`` by a sparse LU decomposition on the host: SuperLU, by scipy.

    Parameters
    ----------
    A : bsr_array or bsr_matrix of shape (n, n)
        The matrix, on the CPU.
    b : array (n,) or (n, k)
        One right-hand side or several.

    Returns
    -------
    array like `b`
        The solution.

    Raises
    ------
    TypeError
        If A is not a BSR matrix, or is on the GPU: nothing is moved.
    ValueError
        If A is not square, or b does not fit.
    RuntimeError
        If A is singular.

    See Also
    --------
    cg, smoothed_aggregation : for large systems, and on the GPU.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[4.0, 1], [2, 3]]), blocksize=(2, 2))
    >>> bg.linalg.spsolve(A, np.array([6.0, 8.0]))
    array([1., 2.])
    """
    from scipy.sparse.linalg import splu

    if not isinstance(A, BsrBase):
        raise TypeError(f"A: wanted a bsr_array or bsr_matrix, got {type(A).__name__}")
    if A._backend is not host():
        raise TypeError(
            "A: spsolve works on the CPU, and nothing is moved; take A.get() and cupy.asnumpy(b), "
            "cupyx.scipy.sparse.linalg.spsolve(A.tocsr(), b), or cg with smoothed_aggregation(A)"
        )
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"A: wanted a square matrix, got shape {A.shape}")
    check_right_hand_side(b, A)
    assert isinstance(A, Conversions)
    found: Array = splu(A.tocsc()).solve(b.astype(A.dtype, copy=False))
    return found
