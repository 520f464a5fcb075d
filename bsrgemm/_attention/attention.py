"""``out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j]`` over the keys j that query i sees: the public function.

It checks the arguments, computes the band of keys that each query sees and allocates the output. The engine of the
backend (`host` or `cuda`) does the work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array, Backend
from .._backend.registry import backend_of, target
from ..dtypes import FLOAT8, as_dtype
from .call import AttentionCall, key_of
from .checks import (
    arrays,
    band,
    by_heads,
    check_layout,
    check_mask,
    check_out,
    checked_bounds,
    checked_flag,
    checked_number,
    delivered,
    dtypes_of,
    fp8_bytes,
    fp8_dtypes,
    head_scales,
    operands,
    sizes_of,
)
from .engine import ENGINES
from .mask import BlockMask


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: BlockMask | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "bhsd",
    align: str = "bottom-right",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    return_lse: bool = False,
    out: Array | None = None,
    out_dtype: Any = None,
) -> Any:
    """``softmax(scale * q @ k.T) @ v`` for every batch and head, over the keys that each query may see.

    Parameters
    ----------
    q : array (B, H_q, S_q, D)
        Queries: float16, bfloat16, float32 or float64, of any strides, in NumPy or CuPy (or by DLPack).
    k, v : array (B, H_kv, S_k, D), (B, H_kv, S_k, D_v)
        Keys and values of the same dtype. `H_q` is a multiple of `H_kv`: query head h reads head ``h // (H_q // H_kv)``
        of them.
    mask : BlockMask, optional
        Which keys a query may see, of shape (S_q, S_k). It has one or B patterns along the batch, and one, H_kv or H_q
        along the heads. If `mask`, `causal` and `window` are combined, a key has to be allowed by each of them.
    causal : bool
        If True, the query at position i does not see the keys after position i.
    window : (left, right), optional
        The query at position i sees keys ``i - left`` to ``i + right``, both ends included; -1 means no bound.
    scale : float, optional
        Factor of the scores; ``1 / sqrt(D)`` by default.
    softcap : float, optional
        Scores s become ``softcap * tanh(s / softcap)``.
    q_scale, k_scale, v_scale : float or array (H,) or (B, H) of float32, optional
        If one of them is given, `q`, `k` and `v` are fp8: e4m3 numbers (``ml_dtypes.float8_e4m3fn``), which may be
        viewed as uint8. The numbers of a head are multiplied by its scale, which is above 0; a scale that is not given
        is 1. Arrays of scales are on the device of `q`.
    layout : {"bhsd", "bshd"}
        Order of the dimensions of `q`, `k`, `v` and the result: as above, or with the length before the heads.
    align : {"bottom-right", "top-left"}
        Position of query i among the keys, for `causal` and `window`: ``i + S_k - S_q``, so that the last query is at
        the last key, or i.
    cu_seqlens_q, cu_seqlens_k : sequence of int, optional
        Bounds of sequences of different lengths that are stored one after the other: where each begins, from 0, and the
        end of the last. Then `q`, `k` and `v` are (total length, heads, head dim) whatever `layout` says, and each
        sequence sees its own keys; `causal`, `window` and `align` count within it. They cannot be combined with `mask`.
        For CuPy arrays the bounds may be on the GPU too.
    return_lse : bool
        If True, also return the natural logarithms of the sums of ``exp(score)``.
    out : array, optional
        Array for the result, of any strides and any library; it must not overlap an operand.
    out_dtype : dtype, optional
        Dtype of the result. The default is the dtype of `q`; for fp8 it is float32, and float16 and bfloat16 are
        possible.

    Returns
    -------
    out : array
        An array like `q` with `D_v` instead of `D`.
    lse : array (B, H_q, S_q), or (H_q, total length) for sequences of different lengths
        float32, or float64 if the operands or the result are float64. Returned only with `return_lse`.

    Raises
    ------
    TypeError
        If an operand is on another device than `q`, or an argument has a dtype or a type that is not supported.
    ValueError
        If shapes do not fit together, an option is out of range, `out` overlaps an operand, or bounds on the host do
        not climb from 0 to the total length.

    Notes
    -----
    A query that sees no key gets 0, and -inf in `lse`. NaN and infinity in a key or value reach the queries that see
    it and no others.

    The sums are in float32, or in float64 if the operands or the result are float64. Online softmax is used: beside the
    operands and the result the computation takes a few MB, whatever the lengths, unless operands are copied. Keys that
    no query sees cost no time.

    The work is done on the device of the arrays. On a GPU it runs on CuPy's current stream, and the call does not wait
    for it. float16 and bfloat16 run on the tensor cores of Ampere and newer if a head has up to 256 columns; operands
    whose columns are not contiguous, or that have other strides that are no multiples of 16 bytes, are copied first if
    they have at most 1 GiB. Everything else runs on the plain cores, slowly. fp8 runs on the tensor cores of Hopper,
    where the weights of keys are rounded to fp8 too. It needs memory for a transposed copy of `v`, and for copies of
    operands whose strides do not suit; on other cards fp8 runs on the plain cores. Bounds of sequences on the GPU are
    not checked, since that would wait for the GPU; the kernel stays inside the arrays whatever they contain. The lists
    that a mask is converted to for the kernel are cached on the mask. On Hopper, `k` and `v` in 16 bits with 72, 88,
    104 or 120 columns are copied to longer lines where that is faster, if the copies have at most 1 GiB. On a GPU, a
    call whose operands have the shapes, strides and dtypes of an earlier one is not checked again, except for an `out`
    at an address that is new.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> import numpy as np
    >>> q, k = np.zeros((1, 4, 3, 8)), np.ones((1, 2, 3, 8))
    >>> v = np.arange(6.0).reshape(1, 2, 3, 1)
    >>> bg.attention(q, k, v)[0, :, :, 0]  # all scores are equal, so all keys have the same weight
    array([[1., 1., 1.],
           [1., 1., 1.],
           [4., 4., 4.],
           [4., 4., 4.]])
    >>> bg.attention(q, k, v, causal=True)[0, 0, :, 0]
    array([0. , 0.5, 1. ])
    >>> bg.attention(q, k, v, window=(1, 0))[0, 0, :, 0]
    array([0. , 0.5, 1.5])

    With a mask:

    >>> mask = bg.BlockMask.from_dense(np.array([[True, False, False], [True, True, False], [False, False, False]]))
    >>> out, lse = bg.attention(q, k, v, mask=mask, return_lse=True)
    >>> out[0, 0, :, 0], lse[0, 0]
    (array([0. , 0.5, 0. ]), array([0.        , 0.69314718,       -inf]))

    Two sequences, of one and two tokens, one after the other:

    >>> q, v = np.zeros((3, 1, 8)), np.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    >>> bg.attention(q, q, v, cu_seqlens_q=[0, 1, 3], cu_seqlens_k=[0, 1, 3])[:, 0, 0]
    array([1., 3., 3.])
    """
    key, given = None, out
    own = backend_of(q)
    if own is None or (out is not None and backend_of(out) is None):
        q, k, v, out = arrays({"q": q, "k": k, "v": v}, {"out": out})
        own = backend_of(q)
    plain = cu_seqlens_q is cu_seqlens_k is q_scale is k_scale is v_scale is out_dtype is None
    if plain and (mask is None or type(mask) is BlockMask) and own is not None and own.records and own.is_dense(q):
        key = key_of((q, k, v), out, window, (causal, scale, softcap, layout, align, return_lse))
        known = None if key is None else ENGINES.of(own).known(mask, key)
        if known is not None and (found := known.again(q, k, v, out)) is not None:
            return delivered(found, given)
    check_layout(layout, align)
    causal, return_lse = checked_flag(causal, "causal"), checked_flag(return_lse, "return_lse")
    left, right = band(window, causal)
    variable = cu_seqlens_q is not None or cu_seqlens_k is not None
    backend, q, k, v = operands(q, k, v, layout, variable)
    fp8 = q_scale is not None or k_scale is not None or v_scale is not None
    if fp8:
        q, k, v = (fp8_bytes(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    elif q.dtype == FLOAT8:
        raise TypeError(f"q: does not support dtype {q.dtype} without a scale; q_scale=1.0 says that q, k, v are fp8")
    if out is not None:
        out = target(backend, out, "out", ", where q is")
    wanted_dtype = None if out_dtype is None else as_dtype(out_dtype, "out_dtype")
    dtypes = (q.dtype, k.dtype, v.dtype, None if out is None else out.dtype, wanted_dtype)
    dtype, acc = fp8_dtypes(*dtypes) if fp8 else dtypes_of(*dtypes)
    q4, k4, v4 = by_heads(q, layout, variable), by_heads(k, layout, variable), by_heads(v, layout, variable)
    sizes = sizes_of(q4.shape, k4.shape, v4.shape)
    bounds = checked_bounds(backend, cu_seqlens_q, cu_seqlens_k, sizes, mask) if variable else None
    if bounds is None:
        check_mask(backend, mask, sizes)
    factor = sizes.scale if scale is None else checked_number(scale, "scale", acc)
    cap = None if softcap is None else checked_number(softcap, "softcap", acc, positive=True)
    scales: tuple[Any, Any, Any] = (None, None, None)
    value_scale = 1.0
    if fp8:
        (by_q, q_scales), (by_k, k_scales), (value_scale, v_scales) = (
            head_scales(backend, x, name, sizes.batch, heads)
            for x, name, heads in (
                (q_scale, "q_scale", sizes.heads),
                (k_scale, "k_scale", sizes.kv_heads),
                (v_scale, "v_scale", sizes.kv_heads),
            )
        )
        factor, scales = factor * by_q * by_k, (q_scales, k_scales, v_scales)
    shape = (*q.shape[:-1], v.shape[-1])
    result = backend.xp.empty(shape, dtype) if out is None else out
    if out is not None:
        check_out(backend, out, shape, dtype, {"q": q, "k": k, "v": v})
    lse = backend.xp.empty((sizes.batch, sizes.heads, sizes.queries), acc) if return_lse else None
    result4 = by_heads(result, layout, variable)
    what = (q4, k4, v4, result4, lse, acc, factor, cap, left, right, align == "bottom-right", mask, bounds)
    launch = ENGINES.of(backend).forward(AttentionCall(*what, fp8, scales, value_scale))
    if launch is not None and key is not None:
        sums = None if lse is None else (lse.shape, lse.dtype)
        ENGINES.of(backend).remember(mask, key, _Known(backend, shape, dtype, sums, launch))
    if lse is not None and variable:
        lse = lse[0]
    return delivered(result if lse is None else (result, lse), given)


class _Known(NamedTuple):
    """What is known of a kind of call after its arguments were checked: what its results are, and its launch."""

    backend: Backend
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    #: shape of the logarithms of the sums, and their dtype; None if they are not wanted
    lse: tuple[tuple[int, ...], np.dtype[Any]] | None
    launch: Any

    def again(self, q: Array, k: Array, v: Array, out: Array | None) -> Any:
        """Start the call; None if `out` may overlap an operand, which the usual way has to check."""
        backend, may_overlap = self.backend, None
        if out is None:
            result = backend.empty(self.shape, self.dtype)
        else:
            result, may_overlap = out, lambda: any(backend.overlap(out, x) for x in (q, k, v))
        if self.lse is None:
            return result if self.launch.start((q, k, v, result), may_overlap=may_overlap) else None
        lse = backend.empty(*self.lse)
        return (result, lse) if self.launch.start((q, k, v, result, lse), may_overlap=may_overlap) else None
