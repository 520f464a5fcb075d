"""``out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j]`` over the keys j that query i sees: the public function.

It checks the arguments, computes the band of keys that each query sees and allocates the output. The engine of the
backend (`host` or `cuda`) does the work.
"""

from __future__ import annotations

import itertools
import math
import numbers
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array, Backend
from .._backend.registry import adopted, backend_of, foreign_backend
from ..dtypes import BFLOAT16, FLOAT8, FLOAT16, FP8_RESULTS, UINT8, accumulator_dtype, check_dtype, result_dtype
from . import repeats
from .call import AttentionCall
from .engine import ENGINES
from .mask import BlockMask

#: Dtypes of q, k, v and the result.
_DTYPES = (FLOAT16, BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
#: Order of the dimensions for each layout.
_LAYOUTS = {
    "bhsd": "(batch, heads, length, head dim) for layout 'bhsd'",
    "bshd": "(batch, length, heads, head dim) for layout 'bshd'",
}
_VARIABLE = "(total length, heads, head dim)"
_ALIGNMENTS = ("bottom-right", "top-left")
#: A side of a window without a bound: more than any length, and half of the range of an int32.
UNBOUNDED = 2**30


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
        Array for the result, of any strides; it must not overlap an operand.
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
    operands and the result the computation takes a few MB, whatever the lengths. Keys that no query sees cost no time.

    The work is done on the device of the arrays. On a GPU it runs on CuPy's current stream, and the call does not wait
    for it. float16 and bfloat16 run on the tensor cores of Ampere and newer if a head has up to 256 columns, these are
    contiguous, and all other strides are multiples of 16 bytes; everything else runs on the plain cores, slowly. fp8
    runs on the tensor cores of Hopper, where the weights of keys are rounded to fp8 too. It needs memory for a
    transposed copy of `v`, and for copies of operands whose strides do not suit; on other cards fp8 runs on the plain
    cores. Bounds of sequences on the GPU are not checked, since that would wait for the GPU; the kernel stays inside
    the arrays whatever they contain. The lists that a mask is converted to for the kernel are cached on the mask.

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
    calls = None
    plain = cu_seqlens_q is cu_seqlens_k is q_scale is k_scale is v_scale is out_dtype is None
    if plain and (mask is None or type(mask) is BlockMask):
        options = (causal, scale, softcap, layout, align, return_lse)
        calls = repeats.lookup((q, k, v), mask, window, options)
        if calls.repeat is not None and (found := calls.repeat.again(out)) is not None:
            return found
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ValueError(f"layout: wanted 'bhsd' or 'bshd', got {layout!r}")
    if not isinstance(align, str) or align not in _ALIGNMENTS:
        raise ValueError(f"align: wanted 'bottom-right' or 'top-left', got {align!r}")
    causal, return_lse = checked_flag(causal, "causal"), checked_flag(return_lse, "return_lse")
    left, right = check_window(window)
    if causal:
        right = 0
    variable = cu_seqlens_q is not None or cu_seqlens_k is not None
    backend, q, k, v = _operands(q, k, v, *((3, _VARIABLE) if variable else (4, _LAYOUTS[layout])))
    fp8 = q_scale is not None or k_scale is not None or v_scale is not None
    if fp8:
        q, k, v = (_fp8_bytes(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if out is not None and not backend.is_dense(out):
        raise TypeError(f"out: wanted a dense array on {backend.name!r}, where q is, got {_named(out)}")
    wanted_dtype = None if out_dtype is None else np.dtype(out_dtype)
    dtypes = (q.dtype, k.dtype, v.dtype, None if out is None else out.dtype, wanted_dtype)
    dtype, acc = _fp8_dtypes(*dtypes) if fp8 else _dtypes(*dtypes)
    if variable:
        q4, k4, v4 = _sequences_view(q), _sequences_view(k), _sequences_view(v)
    else:
        q4, k4, v4 = (q, k, v) if layout == "bhsd" else (_swapped(q), _swapped(k), _swapped(v))
    sizes = _sizes(q4.shape, k4.shape, v4.shape)
    bounds = None
    if variable:
        if mask is not None:
            raise ValueError("mask: got one together with cu_seqlens_q, cu_seqlens_k; wanted None")
        q_bounds = _bounds(backend, cu_seqlens_q, "cu_seqlens_q", sizes.queries, "q")
        k_bounds = _bounds(backend, cu_seqlens_k, "cu_seqlens_k", sizes.keys, "k")
        if len(q_bounds) != len(k_bounds):
            raise ValueError(
                f"cu_seqlens_k: wanted {len(q_bounds)} numbers, as many as cu_seqlens_q has, got {len(k_bounds)}"
            )
        bounds = (q_bounds, k_bounds)
    else:
        _check_mask(backend, mask, sizes)
    factor = sizes.scale if scale is None else checked_number(scale, "scale", acc)
    cap = None if softcap is None else checked_number(softcap, "softcap", acc, positive=True)
    scales: tuple[Any, Any, Any] = (None, None, None)
    value_scale = 1.0
    if fp8:
        (by_q, q_scales), (by_k, k_scales), (value_scale, v_scales) = (
            _head_scales(backend, x, name, sizes.batch, heads)
            for x, name, heads in (
                (q_scale, "q_scale", sizes.heads),
                (k_scale, "k_scale", sizes.kv_heads),
                (v_scale, "v_scale", sizes.kv_heads),
            )
        )
        factor, scales = factor * by_q * by_k, (q_scales, k_scales, v_scales)
    shape = (*q.shape[:-1], v.shape[-1])
    if out is None:
        result = backend.xp.empty(shape, dtype)
    else:
        result = out
        _check_out(backend, out, shape, dtype, {"q": q, "k": k, "v": v})
    lse = backend.xp.empty((sizes.batch, sizes.heads, sizes.queries), acc) if return_lse else None
    left = UNBOUNDED if left < 0 else min(left, UNBOUNDED)
    right = UNBOUNDED if right < 0 else min(right, UNBOUNDED)
    result4 = _sequences_view(result) if variable else result if layout == "bhsd" else _swapped(result)
    what = (q4, k4, v4, result4, lse, acc, factor, cap, left, right, align == "bottom-right", mask, bounds)
    launch = ENGINES.of(backend).forward(AttentionCall(*what, fp8, scales, value_scale))
    if launch is not None and calls is not None:
        sums = None if lse is None else (lse.shape, lse.dtype)
        calls.remember(repeats.Repeat(backend, shape, dtype, sums), (result, lse), launch)
    if lse is None:
        return result
    return result, lse[0] if variable else lse


def _swapped(x: Array) -> Array:
    return x.swapaxes(1, 2)


def _sequences_view(x: Array) -> Array:
    return x[None].swapaxes(1, 2)


# ------------------------------------------------------------------------------------------------- checks
class _Sizes(NamedTuple):
    """Sizes of a problem whose operands fit together."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    #: factor of the scores by default
    scale: float


def _operands(q: Any, k: Any, v: Any, ndim: int, wanted: str) -> tuple[Backend, Array, Array, Array]:
    """The backend of q, and q, k and v as arrays of it; TypeError if k or v is in another backend."""
    backend = backend_of(q) or foreign_backend(q)
    if backend is None:
        raise TypeError(f"q: wanted a NumPy or CuPy array, got {_named(q)}")

    def array(x: Any, name: str) -> Array:
        found = x if backend.is_dense(x) else _adopted(backend, x, name)
        if found.ndim != ndim:
            raise ValueError(f"{name}: wanted {ndim} dimensions, {wanted}, got shape {tuple(found.shape)}")
        return found.view(np.ndarray) if isinstance(found, np.ndarray) else found

    return backend, array(q, "q"), array(k, "k"), array(v, "v")


def _named(x: Any) -> str:
    return f"{type(x).__module__.partition('.')[0]} {type(x).__name__}"


def _adopted(backend: Backend, x: Any, name: str) -> Array:
    """An array of another library as one of `backend`, without a copy."""
    found = backend_of(x) or foreign_backend(x)
    array = adopted(backend, x, name) if found is backend and not backend.is_sparse(x) else None
    if array is None:
        raise TypeError(
            f"{name}: wanted a dense array on {backend.name!r}, where q is, got {_named(x)}: nothing is moved silently"
        )
    return array


_Dtype = np.dtype[Any]


@lru_cache(maxsize=256)
def _dtypes(q: _Dtype, k: _Dtype, v: _Dtype, out: _Dtype | None, wanted: _Dtype | None) -> tuple[_Dtype, _Dtype]:
    """The dtype of the result, and the dtype of the sums."""
    own = check_dtype(q, _DTYPES, "q")
    for name, other in (("k", k), ("v", v)):
        if check_dtype(other, _DTYPES, name) != own:
            raise TypeError(f"{name}: wanted {own} as q has, got {other}")
    if wanted is not None:
        dtype = check_dtype(wanted, _DTYPES, "out_dtype")
    else:
        dtype = own if out is None else check_dtype(out, _DTYPES, "out")
    return dtype, accumulator_dtype(result_dtype(own, dtype))


def _fp8_bytes(x: Array, name: str) -> Array:
    if x.dtype == FLOAT8:
        return x.view(UINT8)
    if x.dtype != UINT8:
        raise TypeError(f"{name}: wanted fp8 numbers as uint8, since a scale is given, got {x.dtype}")
    return x


@lru_cache(maxsize=256)
def _fp8_dtypes(q: _Dtype, k: _Dtype, v: _Dtype, out: _Dtype | None, wanted: _Dtype | None) -> tuple[_Dtype, _Dtype]:
    """The dtype of the result, and the dtype of the sums, for operands in fp8."""
    acc = np.dtype(np.float32)
    if wanted is not None:
        return check_dtype(wanted, FP8_RESULTS, "out_dtype"), acc
    return acc if out is None else check_dtype(out, FP8_RESULTS, "out"), acc


def _head_scales(backend: Backend, x: Any, name: str, batch: int, heads: int) -> tuple[float, Array | None]:
    """A scale as (the number, None), or as (1, an array of (batch, heads))."""
    if x is None:
        return 1.0, None
    if not backend.is_dense(x) or x.ndim == 0:
        if hasattr(x, "__cuda_array_interface__") or (hasattr(x, "shape") and x.shape):
            raise TypeError(
                f"{name}: wanted a number or a dense array on {backend.name!r}, where q is, got {_named(x)}"
            )
        return checked_number(x, name, np.dtype(np.float32), positive=True), None
    if x.dtype != np.float32 or tuple(x.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{name}: wanted a number or float32 of shape ({heads},) or ({batch}, {heads}), "
            f"got {x.dtype} of shape {tuple(x.shape)}"
        )
    if isinstance(x, np.ndarray) and not (np.isfinite(x) & (x > 0)).all():
        raise ValueError(f"{name}: wanted finite numbers above 0, got {x!r}")
    return 1.0, backend.xp.ascontiguousarray(backend.xp.broadcast_to(x, (batch, heads)))


_Shape = tuple[int, ...]


@lru_cache(maxsize=1024)
def _sizes(q: _Shape, k: _Shape, v: _Shape) -> _Sizes:
    """The sizes of operands of these shapes in layout "bhsd"; ValueError if they do not fit together."""
    B, H_q, S_q, D = q
    for name, shape in (("k", k), ("v", v)):
        if shape[0] != B:
            raise ValueError(f"{name}: wanted a batch of {B} as q has, got {shape[0]}")
    _, H_kv, S_k, _ = k
    if v[1] != H_kv:
        raise ValueError(f"v: wanted {H_kv} heads as k has, got {v[1]}")
    if v[2] != S_k:
        raise ValueError(f"v: wanted length {S_k} as k has, got {v[2]}")
    if k[3] != D:
        raise ValueError(f"k: wanted head dim {D} as q has, got {k[3]}")
    if H_q % H_kv if H_kv else H_q:
        raise ValueError(f"k: wanted a number of heads that divides the {H_q} of q, got {H_kv}")
    return _Sizes(B, H_q, H_kv, S_q, S_k, 1 / math.sqrt(D) if D else 1.0)


def _check_mask(backend: Backend, mask: Any, sizes: _Sizes) -> None:
    if mask is None:
        return
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"mask: wanted a BlockMask, got {type(mask).__name__}; BlockMask.from_dense makes one of booleans, "
            "BlockMask.from_bsr of a BSR matrix"
        )
    if mask._backend is not backend:
        raise TypeError(
            f"mask: wanted a mask on {backend.name!r}, where q is, got one on {mask._backend.name!r}; "
            f"mask.to_device({backend.name!r}) brings it there"
        )
    shape = (sizes.queries, sizes.keys)
    if mask.shape != shape:
        raise ValueError(f"mask: wanted shape {shape}, queries and keys, got {mask.shape}")
    B, H = mask.heads
    if B not in (1, sizes.batch):
        raise ValueError(f"mask: wanted one pattern or {sizes.batch} along the batch, got {B}")
    if H not in (1, sizes.kv_heads, sizes.heads):
        counts = " or ".join(map(str, sorted({1, sizes.kv_heads, sizes.heads})))
        raise ValueError(f"mask: wanted {counts} patterns along the heads, got {H}")


def check_window(window: Any) -> tuple[int, int]:
    """(left, right), -1 where there is no bound."""
    if window is None:
        return -1, -1
    if not isinstance(window, tuple | list):
        raise TypeError(f"window: wanted two integers (left, right) from -1 on, got {window!r}")
    sides = tuple(window)
    if any(isinstance(side, bool) or not isinstance(side, int | np.integer) for side in sides):
        raise TypeError(f"window: wanted two integers (left, right) from -1 on, got {window!r}")
    if len(sides) != 2 or min(sides) < -1:
        raise ValueError(f"window: wanted two integers (left, right) from -1 on, got {window!r}")
    return int(sides[0]), int(sides[1])


def _bounds(backend: Backend, given: Any, name: str, total: int, of: str) -> Array:
    """cu_seqlens_q or cu_seqlens_k as an array of int32 in `backend`; the values are checked only if they are on the
    host.
    """
    if given is None:
        raise ValueError(f"{name}: wanted together with the other one, got None")
    bounds = np.asarray(given) if isinstance(given, np.ndarray | list | tuple) else given
    if not isinstance(bounds, np.ndarray) and not backend.is_dense(bounds):
        bounds = _adopted(backend, bounds, name)
    if bounds.ndim != 1 or not len(bounds):
        raise ValueError(f"{name}: wanted the bounds of sequences in one dimension, got shape {tuple(bounds.shape)}")
    if bounds.dtype.kind not in "iu":
        raise TypeError(f"{name}: wanted integers, got dtype {bounds.dtype}")
    if len(bounds) == 1 and total:
        raise ValueError(f"{name}: wanted {total}, the length of {of}, at the end, got one number only")
    if not isinstance(bounds, np.ndarray):
        return bounds.astype(np.int32, copy=False)
    numbers = bounds.tolist()
    if numbers[0] != 0 or any(a > b for a, b in itertools.pairwise(numbers)):
        raise ValueError(f"{name}: wanted bounds that climb from 0, got {given!r}")
    if numbers[-1] != total:
        raise ValueError(f"{name}: wanted {total}, the length of {of}, at the end, got {numbers[-1]}")
    return backend.from_host(bounds.astype(np.int32))


def checked_flag(x: Any, name: str) -> bool:
    if x is True or x is False:
        return x
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name}: wanted True or False, got {x!r}")
    return bool(x)


def checked_number(x: Any, name: str, acc: np.dtype[Any], *, positive: bool = False) -> float:
    """scale or softcap rounded to `acc`, the dtype of the sums; ValueError if `acc` cannot hold it."""
    wanted = f"a finite number{' above 0' if positive else ''} that {acc} can hold"
    if isinstance(x, np.generic) or (isinstance(x, np.ndarray) and x.ndim == 0):
        x = x.item()
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name}: wanted {wanted}, got {x!r}")
    try:
        with np.errstate(over="ignore", under="ignore"):
            rounded = float(acc.type(float(x)))
    except OverflowError:
        rounded = math.inf
    if not math.isfinite(rounded) or (positive and not rounded > 0):
        raise ValueError(f"{name}: wanted {wanted}, got {x!r}")
    return rounded


def _check_out(
    backend: Backend, out: Array, shape: tuple[int, ...], dtype: np.dtype[Any], operands: dict[str, Array]
) -> None:
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"out: wanted {dtype} of shape {shape}, got {out.dtype} of shape {tuple(out.shape)}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out: array is read-only")
    if out.size and any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
        raise ValueError("out: elements share memory (a stride is 0)")
    first, last = backend.extent(out)
    for name, x in operands.items():
        start, stop = backend.extent(x)
        if start < last and first < stop:
            raise ValueError(f"out: overlaps {name}")
