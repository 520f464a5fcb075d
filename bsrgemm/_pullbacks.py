"""The result of a function together with its pullback, the function from the gradient of the result to the gradients
of the operands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ._attention.attention import attention
from ._attention.checks import checked_flag
from ._attention.gradients import attention_backward
from ._attention.merge import merge_states, merge_states_backward
from ._products.gradients import matmul_backward, sddmm_backward
from ._products.matmul import matmul
from ._products.sddmm import sddmm

Pullback = Callable[..., tuple[Any, ...]]


def vjp(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, Pullback]:
    """Return ``function(*args, **kwargs)`` and its pullback, which returns the gradients of the operands.

    Parameters
    ----------
    function : matmul, sddmm, attention or merge_states
        The function of this package.
    *args, **kwargs
        What it is called with. Options that have no gradient are refused: `out` with `beta`, fp8 scales, and
        `out_dtype`.

    Returns
    -------
    result
        What the function returns.
    pullback : callable
        Takes the gradient of a scalar with respect to the result, and returns a tuple of gradients: of A and B for
        `matmul`, of X and Y for `sddmm`, of q, k and v for `attention`. The pullback of `attention` takes the gradient
        of `lse` as a second argument, if `return_lse` was given. That of `merge_states` takes the gradients of `out`
        and of `lse`, which may be None, and returns two lists: the gradients of `outs` and those of `lses`.

    Raises
    ------
    TypeError
        If `function` is another one, or an option has no gradient.

    See Also
    --------
    matmul_backward, sddmm_backward, attention_backward, merge_states_backward : the gradients that pullbacks return.

    Notes
    -----
    The pullback keeps the operands and, for `attention`, the result and its `lse`. It reads them when it is called:
    they must not be changed before. It may be called several times.

    Examples
    --------
    Ten steps of gradient descent on a BSR matrix, such that ``A @ x`` becomes y:

    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.eye(4, blocksize=(2, 2))
    >>> x, y = np.ones((4, 1)), np.array([[1.0], [2], [3], [4]])
    >>> for step in range(10):
    ...     z, pullback = bg.vjp(bg.matmul, A, x)
    ...     dA, dx = pullback(z - y)
    ...     A = A - 0.25 * dA
    >>> np.round(A @ x, 2).ravel()
    array([1., 2., 3., 4.])
    """
    for known, make in _PULLBACKS.items():
        if function is known:
            try:
                result, pullback = make(*args, **kwargs)
            except TypeError:
                _check_operands(known.__name__, make, args, kwargs)
                raise
            pullback.__name__ = pullback.__qualname__ = "pullback"  # the name in messages of Python
            return result, pullback
    name = getattr(function, "__name__", type(function).__name__)
    raise TypeError(f"function: wanted matmul, sddmm, attention or merge_states of bsrgemm, got {name}")


def _matmul(A: Any, B: Any, *, alpha: Any = 1, precision: str | None = None, **options: Any) -> tuple[Any, Pullback]:
    _refuse(matmul, options)
    return matmul(A, B, alpha=alpha, precision=precision), lambda dC: matmul_backward(dC, A, B, alpha=alpha)


def _sddmm(
    X: Any, Y: Any, pattern: Any, *, alpha: Any = 1, precision: str | None = None, **options: Any
) -> tuple[Any, Pullback]:
    _refuse(sddmm, options)
    S = sddmm(X, Y, pattern, alpha=alpha, precision=precision)
    return S, lambda dS: sddmm_backward(dS, X, Y, pattern, alpha=alpha)


def _attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> tuple[Any, Pullback]:
    _refuse(attention, {name: options[name] for name in _WITHOUT_GRADIENT & options.keys()})
    return_lse = checked_flag(return_lse, "return_lse")
    out, lse = attention(q, k, v, return_lse=True, **options)

    def pullback(dout: Any, dlse: Any = None) -> tuple[Any, ...]:
        if dlse is not None and not return_lse:
            raise TypeError("dlse: wanted None, since attention was called without return_lse")
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)

    return ((out, lse) if return_lse else out), pullback


def _merge_states(outs: Any, lses: Any, *, layout: str = "bhsd", **options: Any) -> tuple[Any, Pullback]:
    _refuse(merge_states, options)
    found = merge_states(outs, lses, layout=layout)
    return found, lambda dout, dlse=None: merge_states_backward(dout, dlse, outs, lses, layout=layout)


#: Options of attention that `attention_backward` does not take.
_WITHOUT_GRADIENT = frozenset({"q_scale", "k_scale", "v_scale", "out", "out_dtype"})
_PULLBACKS: dict[Callable[..., Any], Callable[..., tuple[Any, Pullback]]] = {
    matmul: _matmul,
    sddmm: _sddmm,
    attention: _attention,
    merge_states: _merge_states,
}


def _check_operands(name: str, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError unless the function of this name can be called with these arguments."""
    taken = inspect.signature(make)
    try:
        taken.bind(*args, **kwargs)
    except TypeError as error:
        operands = ", ".join(x.name for x in taken.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD)
        raise TypeError(f"{name}: {error}; wanted vjp({name}, {operands}), and options by their names") from None


def _refuse(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raise TypeError for options that a function does not have, and for those that have no gradient."""
    parameters = inspect.signature(function).parameters
    for name, value in sorted(options.items()):
        if name not in parameters:
            raise TypeError(f"{name}: {function.__name__} has no such argument")
        default = parameters[name].default
        if value is not default and not (isinstance(value, int | float) and value == default):
            raise TypeError(f"{name}: has no gradient; call {function.__name__} without it in vjp")
