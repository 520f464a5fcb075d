"""Krylov methods: one or several right-hand sides at a time, each with its own step lengths, one product for all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .._backend.base import Array
from .._batch import bsr_batch
from .graphs import Iterations, capturable
from .operators import RESTARTS, check_callback, failures, is_real, stalled, worst_ratio
from .restarted import restarted
from .steps import BatchConjugate, Biconjugate, Conjugate, MinimalResidual, Step
from .systems import BatchSystem, System

#: What overflows or becomes NaN is told by `info`, not by NumPy.
_quietly = np.errstate(all="ignore")


_Method = TypeVar("_Method", bound=Callable[..., Any])
#: Entries of docstrings that several methods share, by the name that stands for them in angle brackets.
_ENTRIES = {
    "system": """A : bsr_array, bsr_matrix, sparse matrix or linear operator of shape (n, n)
        The matrix.
    b : array (n,) or (n, k)
        One right-hand side, or several that are solved together.
    x0 : array like `b`, optional
        Where to start; 0 by default.""",
    "tolerances": """rtol, atol : float
        A column is solved when ``norm(b - A x) <= max(rtol * norm(b), atol)``.""",
    "limit": """maxiter : int, optional
        The most iterations, 10 n by default.""",
    "callback": """callback : callable, optional
        Called as ``callback(x)`` after each iteration.""",
    "result": """x : array like `b`
        The solution, or the last approximation.
    info : int
        0 if all columns are solved, by their true residuals; the number of iterations if the worst column is not;""",
    "warning": """Warns
    -----
    SolverWarning
        If `info` is not 0; the message says why, and how large the residual is.""",
}


def _described(method: _Method) -> _Method:
    """Write the entries into the docstring of a method."""
    for name, entry in _ENTRIES.items():
        method.__doc__ = (method.__doc__ or "").replace(f"<{name}>", entry)
    return method


@_quietly
@_described
def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable[[Array], object] | None = None,
) -> tuple[Array, Any]:
    """Solve ``A x = b`` by conjugate gradients, for a Hermitian positive definite A.

    Parameters
    ----------
    A : bsr_array, bsr_matrix, bsr_batch, sparse matrix or linear operator of shape (n, n)
        The matrix, or a batch of matrices. For an `interop.mpi.DistributedMatrix`, all ranks call the solver together,
        each with its rows of `b` and `x0`, and get their rows of `x`.
    b : array (n,) or (n, k)
        One right-hand side, or several that are solved together: one product for all, and each with its own steps. For
        a batch (batch, n) or (batch, n, k). On the CPU a list will do.
    x0 : array like `b`, optional
        Where to start; 0 by default.
    <tolerances>
    <limit>
    M : Preconditioner, sparse matrix or linear operator, optional
        An approximation of the inverse of A, Hermitian positive definite. It may compute in float32 under float64. For
        a batch, a `bsr_batch` such as `block_jacobi` makes, or one preconditioner for all its matrices.
    <callback>

    Returns
    -------
    <result>
        -1 after a breakdown: A or M is not positive definite, or NaN has appeared. For a batch a NumPy array of
        integers, (batch,) or (batch, k): each system converges and breaks down for itself.

    Raises
    ------
    TypeError
        If A, M, x0 and b are not on one device, or have dtypes that are not supported.
    ValueError
        If shapes do not agree, b holds NaN or infinity, or a tolerance is out of range.

    <warning>

    See Also
    --------
    smoothed_aggregation, block_jacobi : preconditioners.

    Notes
    -----
    When the recurrence says that all columns are solved, the true residual is computed. If it is too large, the method
    starts again from it, three times at most. A is not checked before: for a matrix that is not Hermitian the method
    does not converge as a rule, which `info` tells, and the warning names the reason after a breakdown and where x is
    worse than 0.

    On a GPU, iterations are replayed as a CUDA graph if A is a matrix of this package, M is None, such a matrix or a
    preconditioner of this package, there is no callback, and at least four more iterations are expected. Up to four
    iterations are made then before the host reads the norms of their residuals; x is that of the iteration after which
    the method ends. The result has the same bits as without a graph. Otherwise the host reads three numbers for each
    column after each iteration. The graph is kept for the next solve with the same A and M, a right-hand side of the
    same shape and dtype, and the same stream, until M, or A if M is None, is deleted.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.kron([[2.0, -1], [-1, 2]], np.eye(2)), blocksize=(2, 2))
    >>> x, info = bg.linalg.cg(A, np.ones(4), M=bg.linalg.block_jacobi(A))
    >>> x, info
    (array([1., 1., 1., 1.]), 0)
    """
    if isinstance(A, bsr_batch):
        return _batch_of_systems(BatchSystem("cg", A, b, x0, rtol, atol, maxiter, M), (A, M), callback)
    return _iterated(Conjugate, System("cg", A, b, x0, rtol, atol, maxiter, M), (A, M), callback)


def _iterated(
    kind: type[Step],
    s: System,
    operands: tuple[Any, Any],
    callback: Callable[[Array], object] | None,
    *,
    graph: bool = True,
    show: bool = False,
) -> tuple[Array, int]:
    """Solve by steps of this kind; the operands are A and M. A graph may be captured if `graph` allows it."""
    check_callback(callback)
    some = Iterations(kind, s, operands, graph and callback is None and capturable(s.backend, *operands))
    unit = np.finfo(s.b.dtype).eps
    steps, broken, known = 0, None, None
    for attempt in range(RESTARTS + 1):
        # the residual of line 1 of Saad's algorithms, of which a step has the other lines
        r, size = (s.b, s.size) if attempt == 0 and s.from_zero else s.residual_and_norm()
        if (size <= s.enough).all() or steps >= s.maxiter:
            broken, known = None, (r, size)
            break
        some.step.restart(r)
        some.step.watch(size, s.enough)
        left, over = [float(np.max(size / s.enough))], [worst_ratio(size, s.enough)]
        broken, ended = None, False
        while steps < s.maxiter and not ended:
            made = some.make(left, s.maxiter - steps)
            for k, found in enumerate(made):
                steps += 1
                if callback is not None:
                    callback(s.x)
                broken, solved = kind.verdict(found, s.enough)
                left.append(float(np.max(found[0] / s.enough)))
                if show:
                    print(f"{s.method}: iteration {steps}, norm of the residual {float(np.max(found[0])):.3e}")
                over.append(worst_ratio(found[0], s.enough))
                ended = broken is not None or solved or stalled(over, unit)
                if ended:
                    some.take(k, len(made))
                    break
        if broken is not None and broken not in kind.curable:
            break
    s.x = some.end()
    return s.finish(steps, broken, known=known)


@_quietly
@_described
def minres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    shift: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable[[Array], object] | None = None,
    show: bool = False,
    check: bool = False,
) -> tuple[Array, int]:
    """Solve ``(A - shift I) x = b`` by the minimal residual method, for a Hermitian A that may be indefinite.

    Parameters
    ----------
    <system>
    rtol, atol : float
        A column is solved when ``norm(b - A x + shift x) <= max(rtol * norm(b), atol)``.
    shift : float
        A real number that is subtracted from the diagonal of A.
    <limit>
    M : Preconditioner, sparse matrix or linear operator, optional
        An approximation of the inverse of A; it must be Hermitian positive definite although A need not be.
    <callback>
    show : bool
        If True, print the norm of the worst residual after each iteration.
    check : bool
        If True, raise ValueError if A or M turns out not to be Hermitian, by one product more with each.

    Returns
    -------
    <result>
        -1 after a breakdown: M is not positive definite, or NaN has appeared.

    <warning>

    See Also
    --------
    cg : for positive definite matrices.
    gmres : for matrices that are not Hermitian.

    Notes
    -----
    Arguments are checked as those of `cg` are, and iterations are replayed as a CUDA graph where those of `cg` are and
    `shift` is 0. Unlike in scipy's function of that name, `rtol` is relative to b, as in `cg`.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.diag([1.0, -1, 2, -2]), blocksize=(2, 2))
    >>> x, info = bg.linalg.minres(A, np.array([1.0, 1, 1, 1]), rtol=1e-12)
    >>> x, info
    (array([ 1. , -1. ,  0.5, -0.5]), 0)
    """
    if not is_real(shift) or not math.isfinite(shift):
        raise ValueError(f"shift: wanted a finite real number, got {shift!r}")
    s = System("minres", A, b, x0, rtol, atol, maxiter, M)
    if shift:
        product, amount = s.multiply, s.b.dtype.type(shift)
        s.multiply = lambda x: product(x) - amount * x
    if check:
        _check_hermitian(s, s.multiply, "A")
        _check_hermitian(s, s.precondition, "M")
    return _iterated(MinimalResidual, s, (A, M), callback, graph=not shift, show=show)


def _check_hermitian(s: System, product: Callable[[Array], Array], name: str) -> None:
    """Raise ValueError if ``|F b|^2`` and ``b F F b`` differ by more than rounding does: F is not Hermitian then."""
    once = product(s.b)
    size, other = s.host(s.norm(once)) ** 2, s.host(s.dot(s.b, product(once)))
    if not (abs(size - other) <= np.cbrt(np.finfo(s.b.dtype).eps) * size).all():
        raise ValueError(f"{name}: wanted a Hermitian matrix, got one that is not")


@_quietly
@_described
def bicgstab(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable[[Array], object] | None = None,
) -> tuple[Array, int]:
    """Solve ``A x = b`` by the stabilised method of biconjugate gradients, for any A.

    Parameters
    ----------
    <system>
    <tolerances>
    <limit>
    M : Preconditioner, sparse matrix or linear operator, optional
        An approximation of the inverse of A, applied on the right.
    <callback>

    Returns
    -------
    <result>
        -1 if NaN has appeared, or a factor of the recurrence is 0 and starting again has not helped.

    <warning>

    See Also
    --------
    gmres : needs more memory, and its residuals never grow.

    Notes
    -----
    Arguments are checked as those of `cg` are, and iterations are replayed as a CUDA graph where those of `cg` are. An
    iteration multiplies twice with A and twice with M.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[4.0, 1, 0, 0], [0, 3, 1, 0], [0, 0, 2, 1], [1, 0, 0, 5]]), blocksize=(2, 2))
    >>> x, info = bg.linalg.bicgstab(A, np.array([5.0, 4, 3, 6]), rtol=1e-10)
    >>> np.round(x, 6), info
    (array([1., 1., 1., 1.]), 0)
    """
    return _iterated(Biconjugate, System("bicgstab", A, b, x0, rtol, atol, maxiter, M), (A, M), callback)


@_quietly
@_described
def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    restart: int | None = None,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable[[Any], object] | None = None,
    callback_type: str | None = None,
) -> tuple[Array, int]:
    """Solve ``A x = b`` by the generalised minimal residual method with restarts, for any A.

    Parameters
    ----------
    <system>
    <tolerances>
    restart : int, optional
        Iterations between restarts, 20 by default. So many vectors (n, k) are kept.
    maxiter : int, optional
        The most restarts, 10 n by default.
    M : Preconditioner, sparse matrix or linear operator, optional
        An approximation of the inverse of A, applied on the right; it has to be the same in each iteration.
    callback : callable, optional
        Called after each iteration with the estimated norm of the residual relative to b (the worst column's), or after
        each restart with x.
    callback_type : {"pr_norm", "x"}, optional
        Which of the two; "pr_norm" by default.

    Returns
    -------
    <result>
        -1 if NaN has appeared.

    <warning>

    See Also
    --------
    fgmres : for a preconditioner that changes from iteration to iteration.

    Notes
    -----
    Arguments are checked as those of `cg` are. The method ends if four restarts in a row bring nothing, as for a
    singular A without a solution for b: all others would do the same.

    On a GPU, iterations are replayed as CUDA graphs where those of `cg` are and `restart` is at most 64: one for the
    products with M and A, and one for each vector of the basis, which is captured when a second restart or a second
    solve comes to it. The vectors stay allocated with the graphs.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[4.0, 1, 0, 0], [0, 3, 1, 0], [0, 0, 2, 1], [1, 0, 0, 5]]), blocksize=(2, 2))
    >>> x, info = bg.linalg.gmres(A, np.array([5.0, 4, 3, 6]), rtol=1e-10)
    >>> np.round(x, 6), info
    (array([1., 1., 1., 1.]), 0)
    """
    s = System("gmres", A, b, x0, rtol, atol, maxiter, M)
    # A preconditioner in a narrower dtype is not linear to the last digit: its results have to be kept.
    narrow = np.dtype(getattr(M, "dtype", None) or s.b.dtype).itemsize < s.b.dtype.itemsize
    return restarted(s, (A, M), restart, narrow, _told(callback, callback_type))


@_quietly
@_described
def fgmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    restart: int | None = None,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable[[Any], object] | None = None,
    callback_type: str | None = None,
) -> tuple[Array, int]:
    """Solve ``A x = b`` by flexible GMRES: the preconditioner may change from iteration to iteration.

    Parameters
    ----------
    A, b, x0, rtol, atol, restart, maxiter, callback, callback_type
        As for `gmres`. Twice as many vectors are kept.
    M : Preconditioner, sparse matrix or linear operator, optional
        An approximation of the inverse of A, such as another iterative solver.

    Returns
    -------
    x : array like `b`
        The solution, or the last approximation.
    info : int
        As for `gmres`.

    <warning>

    See Also
    --------
    gmres : keeps half as many vectors.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[4.0, 1, 0, 0], [0, 3, 1, 0], [0, 0, 2, 1], [1, 0, 0, 5]]), blocksize=(2, 2))
    >>> x, info = bg.linalg.fgmres(A, np.array([5.0, 4, 3, 6]), rtol=1e-10, M=bg.linalg.block_jacobi(A))
    >>> np.round(x, 6), info
    (array([1., 1., 1., 1.]), 0)
    """
    s = System("fgmres", A, b, x0, rtol, atol, maxiter, M)
    return restarted(s, (A, M), restart, True, _told(callback, callback_type))


def _told(callback: Callable[[Any], object] | None, kind: str | None) -> Callable[[str, Any], None] | None:
    """A function that calls the callback if it is of this kind; None without a callback."""
    check_callback(callback)
    if kind is not None and (not isinstance(kind, str) or kind not in ("pr_norm", "x")):
        raise ValueError(f"callback_type: wanted 'pr_norm' or 'x', got {kind!r}")
    wanted = kind or "pr_norm"
    if callback is None:
        return None

    def tell(what: str, value: Any) -> None:
        if what == wanted:
            callback(value)

    return tell


def _batch_of_systems(
    s: BatchSystem, operands: tuple[Any, Any], callback: Callable[[Array], object] | None
) -> tuple[Array, Any]:
    """Solve ``A[s] x[s] = b[s]``; x, and for each system 0, its number of iterations, or -1 after a breakdown.

    A system that is solved, or that has broken down, stays as it is while others go on. The operands are A and M.
    """
    check_callback(callback)
    some = Iterations(BatchConjugate, s, operands, callback is None and capturable(s.backend, *operands))
    steps = np.zeros(s.enough.shape, np.int64)
    #: what has ended a system before it was solved, by its place in `BREAKDOWNS`
    failed = np.zeros(steps.shape, np.int64)
    for _ in range(RESTARTS + 1):
        r, size = s.residual_and_norm()
        going = ~(size <= s.enough) & (failed == 0) & (steps < s.maxiter)
        if not going.any():
            break
        some.step.restart(r)
        some.step.watch(going, s.enough)
        left = [float(np.max((size / s.enough)[going]))]
        while going.any():
            for numbers in some.make(left, int(s.maxiter - steps[going].max())):
                steps += going
                if callback is not None:
                    callback(s.x)
                failed = np.where(going, failures(numbers, s.enough), failed)
                left.append(float(np.max((numbers[0] / s.enough)[going])))
                going = going & ~(numbers[0] <= s.enough) & (failed == 0)
                if not going.any():
                    break
            if (going & (steps >= s.maxiter)).any():
                going &= steps < s.maxiter
                some.step.watch(going, s.enough)
    s.x = some.end()
    return s.x, s.told(steps, failed)
