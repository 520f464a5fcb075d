"""Eigenvalues, by the libraries that have them."""

from __future__ import annotations

import math
import numbers
from typing import Any

from .._backend.base import Backend
from .._backend.registry import backend_of, host
from .arguments import check_limits
from .operators import product_with, refuse_several

#: From here on 2 to this power is not a float64, which scipy computes for `restartControl`.
_MOST_COUNT = 1024


def lobpcg(
    A: Any,
    X: Any,
    B: Any = None,
    M: Any = None,
    Y: Any = None,
    tol: float | None = None,
    maxiter: int | None = None,
    largest: bool = True,
    verbosityLevel: int = 0,
    retLambdaHistory: bool = False,
    retResidualNormsHistory: bool = False,
    restartControl: int = 20,
) -> Any:
    """Return eigenvalues and eigenvectors of a Hermitian matrix by LOBPCG: scipy's on the CPU, cupyx's on the GPU.

    Parameters
    ----------
    A, B : bsr_array, bsr_matrix or linear operator
        The matrix and, for a generalised problem, the positive definite matrix on its right side.
    X : array (n, k)
        Where to start: k vectors.
    M : Preconditioner or linear operator, optional
        An approximation of the inverse of A.
    Y : array (n, j), optional
        Vectors that the results are to be orthogonal to.
    tol : float, optional
        The largest norm of a residual, ``n * sqrt(eps)`` by default.
    maxiter : int, optional
        The most iterations, 20 by default.
    largest : bool
        Whether the largest eigenvalues are sought, or the smallest.
    verbosityLevel : int
        How much is printed: nothing by default.
    retLambdaHistory, retResidualNormsHistory : bool
        Whether the eigenvalues and the norms of the residuals of all iterations are returned too.
    restartControl : int
        Iterations restart if the residuals have grown ``2**restartControl`` times; scipy's alone.

    Returns
    -------
    values : array (k,)
        The eigenvalues; the largest ones unless ``largest=False``.
    vectors : array (n, k)
        The eigenvectors.

    Raises
    ------
    TypeError
        If X is not an array, or A, B or M is no matrix or operator on its device.
    ValueError
        If shapes do not fit, or a number is out of range.

    See Also
    --------
    smoothed_aggregation : a preconditioner for the smallest eigenvalues.

    Notes
    -----
    `scipy.sparse.linalg.eigsh` and `svds`, and those of cupyx, take a BSR matrix as it is.

    Whether A is Hermitian is not checked; for another matrix no iteration reaches the tolerance, of which scipy warns.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.diag(np.arange(1.0, 101)), blocksize=(2, 2))
    >>> X = np.random.default_rng(0).standard_normal((100, 3))
    >>> values, _ = bg.linalg.lobpcg(A, X, M=bg.linalg.block_jacobi(A), largest=False, maxiter=60, tol=1e-8)
    >>> np.round(values, 6)
    array([1., 2., 3.])
    """
    backend = _checked(A, X, B, M, Y)
    if tol is not None and (isinstance(tol, bool) or not isinstance(tol, numbers.Real) or not 0 <= tol < math.inf):
        raise ValueError(f"tol: wanted a finite number from 0 on, or None, got {tol!r}")
    check_limits(0.0, 0.0, maxiter)
    for name, count in {"verbosityLevel": verbosityLevel, "restartControl": restartControl}.items():
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or not 0 <= count < _MOST_COUNT:
            raise ValueError(f"{name}: wanted an integer from 0 to {_MOST_COUNT - 1}, got {count!r}")
    if backend is host():
        from scipy.sparse import linalg
    else:
        from cupyx.scipy.sparse import linalg
    options: dict[str, Any] = {} if restartControl == 20 else {"restartControl": restartControl}
    return linalg.lobpcg(
        A, X, B, M, Y, tol, maxiter, largest, verbosityLevel, retLambdaHistory, retResidualNormsHistory, **options
    )


def _checked(A: Any, X: Any, B: Any, M: Any, Y: Any) -> Backend:
    """Return the backend of X; raise TypeError or ValueError unless the operands fit it."""
    operands = {"A": A, "B": B, "M": M}
    for name, operand in operands.items():
        refuse_several(operand, name, "lobpcg")
    backend = backend_of(X)
    if backend is None or not backend.is_dense(X):
        raise TypeError(f"X: wanted a NumPy or CuPy array, got {type(X).__name__}")
    if X.ndim != 2 or not X.shape[1] or X.dtype.kind not in "fciub":
        raise ValueError(f"X: wanted an array (n, k) of numbers, got {X.dtype} of shape {tuple(X.shape)}")
    n = len(X)
    for name, operand in operands.items():
        function = callable(operand) and not hasattr(operand, "shape")  # scipy takes functions, too
        if not function and (operand is not None or name == "A"):
            product_with(operand, name, backend, n, "X")
    if Y is not None and (not backend.is_dense(Y) or Y.ndim != 2 or len(Y) != n or Y.dtype.kind not in "fciub"):
        got = f"{Y.dtype} of shape {tuple(Y.shape)}" if backend.is_dense(Y) else type(Y).__name__
        raise ValueError(f"Y: wanted an array ({n}, j) of numbers on {backend.name!r}, got {got}")
    return backend
