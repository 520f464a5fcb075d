"""Direct solution and eigenvalues, by the libraries that have them."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from .._array.base import BsrBase, kind_of
from .._array.convert import Conversions
from .._backend import structure
from .._backend.base import Array, Backend, Blocks
from .._backend.registry import backend_of, host
from .operators import (
    check_limits,
    check_right_hand_side,
    column_sums,
    is_integer,
    is_real,
    product_with,
    refuse_several,
    solution_dtype,
    way_out,
)

_MISSING = (
    'A: spsolve on the GPU needs cuDSS through nvmath-python: pip install "bsrgemm[cudss12]" for CUDA 12, '
    '"bsrgemm[cudss13]" for CUDA 13. Or take cg with smoothed_aggregation(A); nothing is moved to the CPU'
)
#: The error of nvmath-python that was installed without the libraries of NVIDIA; its class has moved between packages.
_NOT_FOUND = "DynamicLibNotFoundError"
#: From here on 2 to this power is not a float64, which scipy computes for `restartControl`.
_MOST_COUNT = 1024


def spsolve(A: Any, b: Any) -> Array:
    """Solve ``A x = b`` by a sparse LU decomposition where A is: by SuperLU on the CPU, by cuDSS on the GPU.

    Parameters
    ----------
    A : bsr_array or bsr_matrix of shape (n, n)
        The matrix.
    b : array (n,) or (n, k)
        One right-hand side or several, on the device of A.

    Returns
    -------
    array like `b`
        The solution, in the dtype to which those of A and b are promoted, float32 at least.

    Raises
    ------
    TypeError
        If A is not a BSR matrix, has a dtype that the library does not support, or b is not a dense array where A is.
    ValueError
        If A is not square, or b does not fit, or one of them holds NaN or infinity.
    RuntimeError
        If A is singular, or so badly conditioned that the solution overflows; on the GPU also if the residual is not
        small.
    ImportError
        If A is on the GPU and nvmath-python or cuDSS is not installed; ``pip install "bsrgemm[cudss12]"`` installs both
        for CUDA 12, and ``"bsrgemm[cudss13]"`` for CUDA 13.

    See Also
    --------
    cg, smoothed_aggregation : for large systems.

    Notes
    -----
    SuperLU is called through scipy, and cuDSS through nvmath-python. Both read a copy of A in another format. Nothing
    is moved between the CPU and the GPU. cuDSS replaces pivots that are too small. The residual is computed for that
    reason, and the call waits for the GPU. cuDSS plans on several threads of the CPU if its library for that lies
    beside it, as in the wheels.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[4.0, 1], [2, 3]]), blocksize=(2, 2))
    >>> bg.linalg.spsolve(A, np.array([6.0, 8.0]))
    array([1., 2.])
    """
    if not isinstance(A, BsrBase):
        raise TypeError(f"A: wanted a bsr_array or bsr_matrix, got {kind_of(A)}{way_out(A, 'A')}")
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"A: wanted a square matrix, got shape {A.shape}")
    if host().is_dense(b) and A._backend is not host():
        raise TypeError(
            "A: spsolve works on the CPU, and nothing is moved, if b is there: "
            f"got A on {A._backend.name!r}; take A.get(), or b on {A._backend.name!r}"
        )
    b = check_right_hand_side(b, A)
    assert isinstance(A, Conversions)
    dtype = solution_dtype(A.dtype, b.dtype)
    if dtype.char not in "fdFD":
        raise TypeError(f"A, b: wanted float32, float64, complex64 or complex128, got {dtype}")
    A = A.astype(dtype, copy=False)
    if A._backend is not host():
        return _on_the_card(A, b)
    from scipy.sparse.linalg import splu

    for name, given in (("b", b), ("A", A.data)):
        if not np.isfinite(given).all():
            raise ValueError(f"{name}: wanted finite numbers, got NaN or infinity")
    try:
        found: Array = splu(A.tocsc()).solve(b.astype(dtype, copy=False))
    except RuntimeError as error:
        raise RuntimeError(f"A: wanted a matrix that is not singular; SuperLU: {error}") from None
    if not np.isfinite(found).all():
        raise RuntimeError(f"A: singular, or too badly conditioned for {dtype}: the solution overflows")
    return found


def _on_the_card(A: Any, b: Array) -> Array:
    """Solve by cuDSS, which wants sorted int32 indices without duplicates, and right-hand sides by columns."""
    try:
        from nvmath.sparse.advanced import direct_solver
    except ImportError as error:
        raise ImportError(_MISSING) from error
    xp = A._backend.xp
    columns = xp.empty(b.shape, A.dtype, order="F")
    columns[...] = b
    if not b.size:
        return columns
    data, *pattern = A._canonical()
    index = structure.index_dtype(A.nnz)
    A = A._new(Blocks(data, *(i.astype(index, copy=False) for i in pattern)), canonical=True)
    try:
        x: Array = direct_solver(A.tocsr(), columns, options={"multithreading_lib": _threading_layer()})
    except Exception as error:
        if type(error).__name__ != _NOT_FOUND:
            raise
        raise ImportError(_MISSING) from error
    left, size = (A._backend.to_host(_norms(xp, v)) for v in (columns - A @ x, columns))  # synchronize!
    if not np.isfinite(size).all():
        raise ValueError("b: wanted finite numbers, got NaN or infinity")
    if not (left <= np.sqrt(np.finfo(A.dtype).eps) * size).all():
        raise RuntimeError(
            f"A: singular, or too badly conditioned for {A.dtype}: the norm of the residual is {np.max(left):.3g}, and "
            f"that of b {np.max(size):.3g}"
        )
    return x


def _threading_layer() -> str | None:
    """The library beside cuDSS by which it plans on several threads, or None for that of the environment, if any."""
    if "CUDSS_THREADING_LIB" in os.environ:
        return None
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        folder = Path(load_nvidia_dynamic_lib("cudss").abs_path).parent
    except (ImportError, RuntimeError):  # an old nvmath-python, or no cuDSS: then the solver says so
        return None
    for found in sorted(folder.glob("libcudss_mtlayer_gomp.so*")):
        try:
            ctypes.CDLL(str(found))
        except OSError:  # a machine without the library of OpenMP
            continue
        return str(found)
    return None


def _norms(xp: Any, v: Array) -> Array:
    return xp.sqrt(column_sums(abs(v) ** 2))


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
    if tol is not None and (not is_real(tol) or not 0 <= tol < math.inf):
        raise ValueError(f"tol: wanted a finite number from 0 on, or None, got {tol!r}")
    check_limits(0.0, 0.0, maxiter)
    for name, count in {"verbosityLevel": verbosityLevel, "restartControl": restartControl}.items():
        if not is_integer(count, 0) or count >= _MOST_COUNT:
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
