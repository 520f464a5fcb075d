"""Attention over several parts of the keys as attention over all of them, by the logarithms of the sums:

    lse[i] = log(sum_p exp(lse_p[i]))        w_p[i] = exp(lse_p[i] - lse[i])        out[i] = sum_p w_p[i] out_p[i]

and the gradients of both results. The code is written over ``backend.xp``; nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array, Backend, named
from .._backend.registry import backend_of, foreign_backend, target
from ..dtypes import BFLOAT16, FLOAT16, accumulator_dtype, check_dtype, result_dtype
from . import checks

_WIDE = (np.dtype(np.float32), np.dtype(np.float64))
_DTYPES = (FLOAT16, BFLOAT16, *_WIDE)


def merge_states(
    outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bhsd", out: Array | None = None, out_dtype: Any = None
) -> tuple[Array, Array]:
    """Join attention over several parts of the keys to attention over all of them, exactly.

    Parameters
    ----------
    outs : sequence of array
        The results of `attention` for the same queries with different keys, which no two parts share: float16,
        bfloat16, float32 or float64 of the same shape, in any number. One array with the parts along its first
        dimension is such a sequence.
    lses : sequence of array
        The logarithms that `attention` returned for these parts with ``return_lse=True``.
    layout : {"bhsd", "bshd"}
        Order of the dimensions of `outs`, as for `attention`. Results for sequences of different lengths, with three
        dimensions, have their own order whatever `layout` says.
    out : array, optional
        Array for the result, of any strides and any library; it must not overlap an operand.
    out_dtype : dtype, optional
        Dtype of the result. The default is the dtype of `outs`, or the one to which they are promoted.

    Returns
    -------
    out : array like one of `outs`
        What `attention` returns for all keys together.
    lse : array like one of `lses`
        Its logarithms, in float32, or in float64 if an operand or the result is float64.

    Raises
    ------
    TypeError
        If a part is on another device than the first, or has a dtype that is not supported.
    ValueError
        If there is no part, the numbers of parts differ, shapes do not fit together, or `out` overlaps an operand.

    See Also
    --------
    attention : the function whose results are merged.
    merge_states_backward : the gradients.

    Notes
    -----
    A part whose logarithm is -inf for a query contributes nothing to it, whatever its `out` holds there. A query that
    sees nothing in any part gets 0, and -inf in `lse`. Parts may be merged in several steps; then ``out_dtype``
    float32 keeps the steps in between from rounding to 16 bits.

    The weights and sums are computed in the dtype of the result `lse`, in the order of the parts, and the result is
    rounded once: the same call returns the same bits. A single part is returned unchanged. On a GPU the call runs on
    CuPy's current stream and does not wait for it.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> import numpy as np
    >>> q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 64, 8)) for i in range(3))
    >>> halves = [bg.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in np.s_[:32, 32:]]
    >>> out, lse = bg.merge_states(*zip(*halves))
    >>> np.allclose(out, bg.attention(q, k, v))
    True
    """
    parts = _parts(outs, lses, layout)
    backend, xp = parts.backend, parts.backend.xp
    answer = out
    if out is not None:
        out = target(backend, out, "out", ", where outs are")
    own = reduce(result_dtype, (x.dtype for x in parts.outs))
    wanted = own if out is None else out.dtype
    dtype = check_dtype(
        wanted if out_dtype is None else out_dtype, _DTYPES, "out" if out_dtype is None else "out_dtype"
    )
    acc = np.result_type(parts.acc, accumulator_dtype(dtype))
    shape = tuple(parts.outs[0].shape)
    if out is not None:
        given = [(f"{name}[{i}]", x) for name in ("outs", "lses") for i, x in enumerate(getattr(parts, name))]
        checks.check_out(backend, out, shape, dtype, dict(given))
    with np.errstate(all="ignore"), backend.recording(parts, out):
        weights, lse = _weights(xp, parts.lses, acc)
        total = None
        for x, own_lse, weight in zip(parts.outs, parts.lses, weights, strict=True):
            term = x.astype(acc, copy=False) * parts.by_column(weight)
            term = xp.where(parts.by_column(own_lse == -np.inf), acc.type(0), term)  # 0 x NaN is NaN
            if total is None:
                total = term
            else:
                total += term
        assert total is not None
        if out is None:
            return total.astype(dtype, copy=False), lse
        out[...] = total
    return answer, lse


def merge_states_backward(
    dout: Any, dlse: Any, outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bhsd"
) -> tuple[list[Array], list[Array]]:
    """Return the gradients of ``out, lse = merge_states(outs, lses)`` with respect to the parts.

    Parameters
    ----------
    dout : array like `out`
        The gradient of a scalar with respect to `out`: float16, bfloat16, float32 or float64.
    dlse : array like `lse`, or None
        The gradient of the scalar with respect to `lse`; None is 0.
    outs, lses : sequence of array
        The operands of `merge_states`.
    layout : {"bhsd", "bshd"}
        As it was given to `merge_states`.

    Returns
    -------
    douts, dlses : list of array
        The gradients of each part, of the shape and dtype of `outs` and `lses`.

    Raises
    ------
    TypeError
        If an array is on another device than the first part, or has a dtype that is not supported.
    ValueError
        If there is no part, the numbers of parts differ, or shapes do not fit together.

    See Also
    --------
    merge_states : the forward pass.
    attention_backward : takes `douts` and `dlses` of a part as `dout` and `dlse`.

    Notes
    -----
    A part that contributes nothing to a query, because its logarithm is -inf, gets 0 there. On a GPU the call does not
    wait for it.

    The gradients of q, k and v of a part need no more than the merged `out` and `lse`, which `attention_backward` takes
    directly. These gradients are for a loss that depends on the parts in other ways too.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> import numpy as np
    >>> outs, lses = [np.full((1, 1, 1, 2), float(p)) for p in range(2)], [np.zeros((1, 1, 1))] * 2
    >>> douts, dlses = bg.merge_states_backward(np.ones((1, 1, 1, 2)), None, outs, lses)
    >>> douts[0].ravel(), [float(x[0, 0, 0]) for x in dlses]
    (array([0.5, 0.5]), [-0.5, 0.5])
    """
    parts = _parts(outs, lses, layout)
    xp = parts.backend.xp
    dout = parts.like_first(dout, "dout", parts.outs[0])
    if dlse is not None:
        dlse = parts.like_first(dlse, "dlse", parts.lses[0])
    acc = np.result_type(parts.acc, *(accumulator_dtype(x.dtype) for x in (dout, dlse) if x is not None))
    with np.errstate(all="ignore"), parts.backend.recording(parts, dout, dlse):
        wide, zero = dout.astype(acc, copy=False), acc.type(0)
        unseen = [x == -np.inf for x in parts.lses]
        weights, _ = _weights(xp, parts.lses, acc)
        # dout . out_p, and their mean, which is dout . out
        along = [parts.by_row((wide * x.astype(acc, copy=False)).sum(axis=-1)) for x in parts.outs]
        along = [xp.where(hidden, zero, x) for hidden, x in zip(unseen, along, strict=True)]
        shift = -sum(w * x for w, x in zip(weights, along, strict=True))
        if dlse is not None:
            shift = shift + dlse
        douts, dlses = [], []
        for weight, hidden, x, own, own_lse in zip(weights, unseen, along, parts.outs, parts.lses, strict=True):
            share = xp.where(parts.by_column(hidden), zero, wide * parts.by_column(weight))
            douts.append(share.astype(own.dtype, copy=False))
            dlses.append(xp.where(hidden, zero, weight * (x + shift)).astype(own_lse.dtype, copy=False))
    return douts, dlses


class _Parts(NamedTuple):
    """Checked operands of a merge."""

    backend: Backend
    outs: list[Array]
    lses: list[Array]
    #: the widest dtype of `lses`, and of the sums of `outs`
    acc: np.dtype[Any]
    #: whether the heads of `outs` are after the queries
    heads_last: bool

    def by_column(self, row: Array) -> Array:
        """Numbers of the shape of `lses` in the order of `outs`, with a dimension for the columns."""
        return (row.swapaxes(-1, -2) if self.heads_last else row)[..., None]

    def by_row(self, x: Array) -> Array:
        """Numbers in the order of `outs`, without columns, in the order of `lses`."""
        return x.swapaxes(-1, -2) if self.heads_last else x

    def like_first(self, x: Any, name: str, first: Array) -> Array:
        """An array on the same device and of the same shape as `first`."""
        found = x if self.backend.is_dense(x) else checks.adopted_array(self.backend, x, name, "outs[0]")
        check_dtype(found.dtype, _DTYPES, name)
        if found.shape != first.shape:
            raise ValueError(f"{name}: wanted shape {tuple(first.shape)}, got {tuple(found.shape)}")
        return found


def _parts(outs: Sequence[Any], lses: Sequence[Any], layout: str) -> _Parts:
    """The operands after their checks."""
    checks.check_layout(layout, "top-left")
    for name, given in (("outs", outs), ("lses", lses)):
        listed = hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping)
        if not listed or not getattr(given, "ndim", 1):
            raise TypeError(f"{name}: wanted a sequence of arrays, got {named(given)}")
    if not len(outs):
        raise ValueError("outs: wanted at least one part, got none")
    if len(outs) != len(lses):
        raise ValueError(f"lses: wanted {len(outs)} arrays, one for each of outs, got {len(lses)}")
    backend = backend_of(outs[0]) or foreign_backend(outs[0])
    if backend is None:
        raise TypeError(f"outs[0]: wanted a NumPy or CuPy array, got {named(outs[0])}")
    found = _Parts(backend, [], [], _WIDE[0], False)
    for i in range(len(outs)):
        x = outs[i] if backend.is_dense(outs[i]) else checks.adopted_array(backend, outs[i], f"outs[{i}]", "outs[0]")
        x = found.like_first(x, f"outs[{i}]", found.outs[0] if i else x)
        if x.ndim not in (3, 4):
            raise ValueError(
                f"outs[{i}]: wanted 4 dimensions, or 3 for sequences of different lengths, got shape {tuple(x.shape)}"
            )
        found.outs.append(x)
    first = found.outs[0].shape
    heads_last = len(first) == 3 or layout == "bshd"
    rows = (*first[:-3], first[-2], first[-3]) if heads_last else tuple(first[:-1])
    for i in range(len(lses)):
        x = lses[i] if backend.is_dense(lses[i]) else checks.adopted_array(backend, lses[i], f"lses[{i}]", "outs[0]")
        check_dtype(x.dtype, _WIDE, f"lses[{i}]")
        if tuple(x.shape) != rows:
            raise ValueError(
                f"lses[{i}]: wanted shape {rows}, a number for each query and head of outs in layout {layout!r}, "
                f"got {tuple(x.shape)}"
            )
        found.lses.append(x)
    acc = np.result_type(*(accumulator_dtype(x.dtype) for x in (*found.outs, *found.lses)))
    return found._replace(acc=acc, heads_last=heads_last)


def _weights(xp: Any, lses: list[Array], acc: np.dtype[Any]) -> tuple[Array, Array]:
    """The weight of each part in each query, and the logarithms of the sums over all parts."""
    stacked = xp.stack([x.astype(acc, copy=False) for x in lses])
    top = stacked.max(axis=0)
    top = xp.where(top == -np.inf, acc.type(0), top)  # -inf - -inf is NaN
    weights = xp.exp(stacked - top)
    total = weights.sum(axis=0)
    lse = top + xp.log(total)
    # Divided by their own sum, the weights add up to 1 however coarse the logarithms are. They are NaN where a query
    # sees nothing in any part, and not used there.
    weights /= total
    return weights, lse
