"""The gradients of attention: the public function checks its arguments, the engine of the backend does the work."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array, Backend
from .._backend.registry import backend_of, target
from . import checks
from .call import BackwardCall, key_of_gradients
from .engine import ENGINES
from .mask import BlockMask

#: Operands that have one number for each query and head.
_SUMS = ("lse", "dlse", "delta")


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    mask: BlockMask | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bhsd",
    align: str = "bottom-right",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    dlse: Any = None,
    delta: Any = None,
    deterministic: bool = True,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return the gradients of ``out, lse = attention(q, k, v, ..., return_lse=True)`` with respect to q, k and v.

    Parameters
    ----------
    dout : array like `out`
        The gradient of a scalar with respect to `out`.
    q, k, v : array
        The operands of `attention`: float16, bfloat16, float32 or float64. fp8 has no gradients.
    out : array, or None if `delta` is given
        The result of `attention`, in the dtype of `q` or in that of `lse`.
    lse : array (B, H_q, S_q), or (H_q, total length) for sequences of different lengths
        The logarithms that `attention` returned, in float32, or in float64 for operands in float64. `out` and `lse` may
        also come from a merge of several parts of the keys: then `k` and `v` of one part give the gradients that this
        part contributes to `dq`, and its own `dk` and `dv`.
    mask, causal, window, scale, softcap, layout, align, cu_seqlens_q, cu_seqlens_k
        As they were given to `attention`.
    dlse : array like `lse`, optional
        The gradient of the scalar with respect to `lse`; 0 by default.
    delta : array like `lse`, optional
        The sums of ``dout * out`` over the columns, if they are known already.
    deterministic : bool
        By default the same call returns the same bits. If False, sums may be made in an order that changes from call
        to call, which is faster on Hopper with up to 128 columns, and for heads of 97 to 128 columns on cards with 163
        KB of shared memory (A100). The CPU and the other kernels always keep one order.
    dq, dk, dv : array, optional
        Arrays for the results, of the shape and dtype of `q`, `k` and `v`, from any library. They must not overlap each
        other or an operand.

    Returns
    -------
    dq, dk, dv : array
        The gradients, of the shape and dtype of `q`, `k` and `v`. With fewer heads of keys than of queries, the
        gradients of the query heads that read the same keys are added up.

    Raises
    ------
    TypeError
        If an operand is on another device than `q`, or an argument has a dtype or a type that is not supported.
    ValueError
        If shapes do not fit together, an option is out of range, or a result overlaps an operand.

    See Also
    --------
    attention : the forward pass.
    vjp : the result of attention together with the function that returns its gradients.

    Notes
    -----
    Keys that no query sees get 0, and so do queries that see no key. NaN and infinity in a query, a key or a gradient
    reach those with which it is combined and no others. On a GPU, a call whose arrays have the shapes, strides and
    dtypes of an earlier one is not checked again, except for results at addresses that are new.

    The weights are computed again from `lse`, a tile at a time. On the CPU the computation takes a few MB beside the
    operands and results, and sums in float32 (float64 for float64) of the gradients of one head of keys for each
    thread; scores, weights and sums are not rounded to the dtype of the operands.

    On the GPU, float16 and bfloat16 with up to 256 columns run on the tensor cores: weights and their gradients are
    rounded to the dtype of the operands before they are multiplied, sums are float32. On Hopper, up to 128 columns
    are computed in one pass, unless there is a `softcap` below 0.5; this takes memory for dq in float32, and up to
    70 MB for sums of dk and dv where heads of keys are few or CTAs would have nothing to do. So are 97 to 128
    columns on an A100 with ``deterministic=False`` and without `softcap`, unless a window hides more than half of
    the keys. Operands whose rows are no multiples of 16 bytes are copied first. Everything else runs on the plain
    cores, much more slowly: float32, float64, `dout` in another dtype than `q`, and more than 256 columns.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> q, k, v = np.zeros((1, 1, 3, 8)), np.ones((1, 1, 3, 8)), np.arange(3.0).reshape(1, 1, 3, 1)
    >>> out, lse = bg.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = bg.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dv[0, 0, :, 0]  # the first key has all of the first query, half of the second, a third of the third
    array([1.83333333, 0.83333333, 0.33333333])
    """
    key, given = None, (dq, dk, dv)
    if backend_of(q) is None:
        tensors = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "out": out, "dlse": dlse, "delta": delta}
        q, k, v, dout, lse, out, dlse, delta, dq, dk, dv = checks.arrays(tensors, {"dq": dq, "dk": dk, "dv": dv})
    own = backend_of(q)
    variable = cu_seqlens_q is not None or cu_seqlens_k is not None
    plain = not variable and (mask is None or type(mask) is BlockMask)
    if plain and own is not None and own.records and own.is_dense(q):
        read, results = (q, k, v, dout, lse, out, dlse, delta), (dq, dk, dv)
        key = key_of_gradients(read, results, window, (causal, scale, softcap, layout, align, deterministic))
        known: _Known | None = None if key is None else ENGINES.of(own).known(mask, key)
        if known is not None and (repeated := known.again(read, results)) is not None:
            return _delivered(repeated, given)
    checks.check_layout(layout, align)
    causal, ordered = checks.checked_flag(causal, "causal"), checks.checked_flag(deterministic, "deterministic")
    left, right = checks.band(window, causal)
    backend, q, k, v = checks.operands(q, k, v, layout, variable)
    dtype, acc = checks.dtypes_of(q.dtype, k.dtype, v.dtype, None, None)
    sizes = checks.sizes_of(*(checks.by_heads(x, layout, variable).shape for x in (q, k, v)))
    bounds = checks.checked_bounds(backend, cu_seqlens_q, cu_seqlens_k, sizes, mask) if variable else None
    if bounds is None:
        checks.check_mask(backend, mask, sizes)
    # Equal scales have equal bytes: -0.0 becomes 0.0.
    factor = sizes.scale if scale is None else checks.checked_number(scale, "scale", acc) + 0.0
    cap = None if softcap is None else checks.checked_number(softcap, "softcap", acc, positive=True)
    rows = (sizes.batch, sizes.heads, sizes.queries)
    checked = _Checked(backend, rows[1:] if variable else rows, (*q.shape[:-1], v.shape[-1]), dtype, acc)
    dout, lse = checked.gradient(dout, "dout"), checked.sums(lse, "lse")
    delta, dlse = (None if x is None else checked.sums(x, name) for x, name in ((delta, "delta"), (dlse, "dlse")))
    if out is not None:
        out = checked.gradient(out, "out")
    elif delta is None:
        raise ValueError("out: wanted the result of attention, or delta instead, got None for both")
    inputs = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "delta": delta, "dlse": dlse}
    arrays = {name: x for name, x in inputs.items() if x is not None}
    for name, into, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        arrays[name] = checked.result(into, name, tuple(like.shape), arrays)
    by_heads = {name: checks.by_heads(x, layout, variable) for name, x in arrays.items() if name not in _SUMS}
    sums = {name: arrays[name][None] if variable else arrays[name] for name in _SUMS if name in arrays}
    launch = ENGINES.of(backend).backward(
        BackwardCall(
            **{"out": None, "dlse": None, "delta": None, **by_heads, **sums},
            acc=acc,
            scale=factor,
            softcap=cap,
            left=left,
            right=right,
            bottom_right=align == "bottom-right",
            mask=mask,
            bounds=bounds,
            deterministic=ordered,
        )
    )
    if launch is not None and key is not None:
        ENGINES.of(backend).remember(mask, key, _Known(backend, tuple((x.shape, dtype) for x in (q, k, v)), launch))
    return _delivered((arrays["dq"], arrays["dk"], arrays["dv"]), given)


def _delivered(found: tuple[Array, Array, Array], given: tuple[Any, Any, Any]) -> tuple[Array, Array, Array]:
    """The results, with those that were given instead of the arrays behind them."""
    dq, dk, dv = given
    return found[0] if dq is None else dq, found[1] if dk is None else dk, found[2] if dv is None else dv


class _Known(NamedTuple):
    """What is known of a kind of call after its arguments were checked: shapes and dtypes of results, and launches."""

    backend: Backend
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    launch: Any

    def again(self, read: tuple[Any, ...], given: tuple[Any, Any, Any]) -> tuple[Array, Array, Array] | None:
        """Start the call; None if a result that was given may overlap another array, which the usual way checks."""
        empty, may_overlap = self.backend.empty, None
        dq, dk, dv = [empty(*kind) if x is None else x for x, kind in zip(given, self.results, strict=True)]
        there = [x for x in read[5:] if x is not None]
        if given[0] is not None or given[1] is not None or given[2] is not None:
            may_overlap = lambda: self._overlap((dq, dk, dv), (*read[:5], *there))  # noqa: E731
        if not self.launch.start((*read[:5], dq, dk, dv, *there), may_overlap=may_overlap):
            return None
        return dq, dk, dv

    def _overlap(self, results: tuple[Array, ...], read: tuple[Array, ...]) -> bool:
        """Whether a result overlaps another one or what is read."""
        overlap = self.backend.overlap
        return any(overlap(x, y) for n, x in enumerate(results) for y in (*read, *results[:n]))


class _Checked:
    """The checks of what a gradient needs beside the operands of attention."""

    def __init__(
        self, backend: Backend, rows: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype[Any], acc: np.dtype[Any]
    ) -> None:
        self.backend, self.rows, self.shape, self.dtype, self.acc = backend, rows, shape, dtype, acc

    def gradient(self, x: Any, name: str) -> Array:
        """The result of attention or its gradient, in the dtype of q or in that of the sums."""
        found = self._array(x, name)
        if tuple(found.shape) != self.shape or found.dtype not in (self.dtype, self.acc):
            wanted = " or ".join(dict.fromkeys((str(self.dtype), str(self.acc))))
            raise self._error(found, name, f"{wanted} of shape {self.shape}", found.dtype in (self.dtype, self.acc))
        return found

    def sums(self, x: Any, name: str) -> Array:
        """One number for each query and head, in the dtype of the sums."""
        found = self._array(x, name)
        if tuple(found.shape) != self.rows or found.dtype != self.acc:
            raise self._error(found, name, f"{self.acc} of shape {self.rows}", found.dtype == self.acc)
        return found

    def result(self, given: Any, name: str, shape: tuple[int, ...], read: dict[str, Array]) -> Array:
        """An array for a result: the given one after its checks, or a new one."""
        if given is None:
            return self.backend.xp.empty(shape, self.dtype)
        found = target(self.backend, given, name, ", where q is")
        checks.check_out(self.backend, found, shape, self.dtype, read, name)
        return found

    def _array(self, x: Any, name: str) -> Array:
        if x is None:
            raise TypeError(f"{name}: wanted an array on {self.backend.name!r}, where q is, got None")
        return x if self.backend.is_dense(x) else checks.adopted_array(self.backend, x, name)

    def _error(self, x: Array, name: str, wanted: str, shape_only: bool) -> Exception:
        kind = ValueError if shape_only else TypeError
        return kind(f"{name}: wanted {wanted}, got {x.dtype} of shape {tuple(x.shape)}")
