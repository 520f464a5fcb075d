"""Eigenvalues, by the libraries that have them."""

from __future__ import annotations

from typing import Any

from .._backend.registry import backend_of, host
from .operators import refuse_several


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
        Iterations restart if the residuals have grown so many times; scipy's alone.

    Returns
    -------
    values : array (k,)
        The eigenvalues; the largest ones unless ``largest=False``.
    vectors : array (n, k)
        The eigenvectors.

    Raises
    ------
    TypeError
        If X is not an array.

    See Also
    --------
    smoothed_aggregation : a preconditioner for the smallest eigenvalues.

    Notes
    -----
    `scipy.sparse.linalg.eigsh` and `svds`, and those of cupyx, take a BSR matrix as it is.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.diag(np.arange(1.0, 101)), blocksize=(2, 2))
    >>> X = np.random.default_rng(0).standard_normal((100, 3))
    >>> values, _ = bg.linalg.lobpcg(A, X, M=bg.linalg.block_jacobi(A), largest=False, maxiter=60, tol=1e-8)
    >>> np.round(values, 6)
    array([1., 2., 3.])
    """
    for name, operand in {"A": A, "B": B, "M": M}.items():
        refuse_several(operand, name, "lobpcg")
    backend = backend_of(X)
    if backend is None or not backend.is_dense(X):
        raise TypeError(f"X: wanted a NumPy or CuPy array, got {type(X).__name__}")
    if backend is host():
        from scipy.sparse import linalg
    else:
        from cupyx.scipy.sparse import linalg
    options: dict[str, Any] = {} if restartControl == 20 else {"restartControl": restartControl}
    return linalg.lobpcg(
        A, X, B, M, Y, tol, maxiter, largest, verbosityLevel, retLambdaHistory, retResidualNormsHistory, **options
    )
