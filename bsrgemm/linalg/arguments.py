"""What all iterative methods check and tell in the same way."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: How often a solver starts again from the true residual when the recurrence says that it is done and it is not.
RESTARTS = 3
#: A recurrence stalls if so many iterations bring nothing more, and rounding of the first residual explains it.
_WITHOUT_GAIN, _ROUNDING = 5, 64
NOT_FINITE = "NaN or infinity has appeared"
#: Why conjugate gradients cannot go on.
BREAKDOWNS = (None, NOT_FINITE, "M is not positive definite", "A is not positive definite")


class SolverWarning(UserWarning):
    """A solver has ended without a solution; `info` is not 0."""


def check_limits(rtol: Any, atol: Any, maxiter: Any) -> None:
    """Raise ValueError unless tolerances and the number of iterations are in range."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
            raise ValueError(f"{name}: wanted a finite number from 0 on, got {value!r}")
    if maxiter is not None and (isinstance(maxiter, bool) or not isinstance(maxiter, numbers.Integral) or maxiter < 0):
        raise ValueError(f"maxiter: wanted an integer from 0 on, or None, got {maxiter!r}")


def check_callback(callback: Any) -> None:
    """Raise TypeError unless a callback can be called, before anything is computed."""
    if callback is not None and not callable(callback):
        raise TypeError(f"callback: wanted a function or None, got {type(callback).__name__}")


def check_norms(size: Any, b: Any, atol: float, counts: Callable[[Any], Any]) -> None:
    """Raise ValueError if the norms of b are no measure: not finite, or as good as 0 although b is not.

    Parameters
    ----------
    size : array
        The norms of the right-hand sides, on the host.
    b : array
        The right-hand sides.
    atol : float
        What residuals may be in any case: smaller norms need not be exact.
    counts : callable
        ``counts(chosen)`` is the number of chosen elements of each right-hand side, on the host.
    """
    if not np.isfinite(size).all():
        if not counts(~(abs(b) < math.inf)).any():
            raise ValueError(f"b: its squares overflow in {b.dtype}; scale b down, and x up")
        raise ValueError("b: wanted finite numbers, got NaN or infinity")
    least = math.sqrt(np.finfo(b.dtype).tiny)
    small = np.asarray(size) < least
    if atol < least and small.any() and (small & (counts(b != 0) > 0)).any():
        raise ValueError(f"b: its squares underflow in {b.dtype}; scale b up, and x down")


def worst_ratio(size: Any, enough: Any) -> float:
    """How many times as large as wanted the residual of the worst column is; a residual of 0 is never too large."""
    return float(np.max(np.where(size == 0, 0, size / enough), initial=0))


def stalled(left: Sequence[float], unit: float) -> bool:
    """Whether a recurrence has come down to its rounding errors, so that it has to start again from the true residual.

    Parameters
    ----------
    left : sequence of float
        By iteration, from before the first one on: how many times as large as wanted the residual is.
    unit : float
        The rounding unit of the dtype.
    """
    if len(left) <= _WITHOUT_GAIN or not 1 < left[-1] <= _ROUNDING * unit * left[0]:
        return False
    return left[-1] > 0.9 * left[-1 - _WITHOUT_GAIN]


def failures(numbers: Any, enough: Any) -> Any:
    """What keeps conjugate gradients from going on after an iteration: for each column its place in `BREAKDOWNS`.

    `numbers` are the norm of the residual, ``p A p`` and ``r M r``; `enough` is what the norm must come down to.
    """
    size, by_matrix, by_preconditioner = numbers
    left = size > enough
    return np.select([~np.isfinite(size), (by_preconditioner <= 0) & left, (by_matrix <= 0) & left], [1, 2, 3], 0)


def breakdown(numbers: Any, enough: Any) -> str | None:
    """The first of the failures of all columns, in the order of `BREAKDOWNS`, or None."""
    found = np.atleast_1d(failures(numbers, enough))
    found = found[found > 0]
    return BREAKDOWNS[int(found.min())] if found.size else None
