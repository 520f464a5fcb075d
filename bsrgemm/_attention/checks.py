"""The checks of the arguments of attention and of its gradients."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array, Backend, named
from .._backend.registry import adopted, backend_of, foreign_backend, target
from ..dtypes import BFLOAT16, FLOAT8, FLOAT16, FP8_RESULTS, UINT8, accumulator_dtype, check_dtype, result_dtype
from .mask_base import MaskBase

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
#: Positions of queries and keys, with `UNBOUNDED` and a tile added, stay below 2**31; so do tiles of at least 32 rows
#: of all heads, with those that CTAs claim in vain, and 16 gaps for each sequence.
_MOST_LENGTH, _MOST_TILES, _LEAST_TILE, _MOST_SEQUENCES = 2**30 - 1024, 2**31 - 2**20, 32, 2**26


class Sizes(NamedTuple):
    """Sizes of a problem whose operands fit together."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    #: factor of the scores by default
    scale: float


def host_array(name: str, numbers: Any, wanted: str) -> np.ndarray[Any, Any]:
    """Numbers that a caller gives as lists, or in an array of the host, as an array of NumPy.

    ValueError, which says what was `wanted`, for nested lists of different lengths.
    """
    try:
        return np.asarray(numbers)
    except ValueError:
        raise ValueError(f"{name}: wanted {wanted}, got {numbers!r}") from None


def check_layout(layout: Any, align: Any) -> None:
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ValueError(f"layout: wanted 'bhsd' or 'bshd', got {layout!r}")
    if not isinstance(align, str) or align not in _ALIGNMENTS:
        raise ValueError(f"align: wanted 'bottom-right' or 'top-left', got {align!r}")


def by_heads(x: Array, layout: str, variable: bool) -> Array:
    """A view of an operand as (batch, heads, length, columns); with `variable` it is (total length, heads, columns)."""
    if variable:
        return x[None].swapaxes(1, 2)
    return x if layout == "bhsd" else x.swapaxes(1, 2)


def operands(q: Any, k: Any, v: Any, layout: str, variable: bool) -> tuple[Backend, Array, Array, Array]:
    """The backend of q, and q, k and v as arrays of it; TypeError if k or v is in another backend."""
    ndim, wanted = (3, _VARIABLE) if variable else (4, _LAYOUTS[layout])
    backend = backend_of(q) or foreign_backend(q)
    if backend is None:
        raise TypeError(f"q: wanted a NumPy or CuPy array, got {named(q)}")

    def array(x: Any, name: str) -> Array:
        found = x if backend.is_dense(x) else adopted_array(backend, x, name)
        if found.ndim != ndim:
            raise ValueError(f"{name}: wanted {ndim} dimensions, {wanted}, got shape {tuple(found.shape)}")
        return found.view(np.ndarray) if isinstance(found, np.ndarray) else found

    return backend, array(q, "q"), array(k, "k"), array(v, "v")


def arrays(read: dict[str, Any], results: dict[str, Any]) -> list[Any]:
    """Operands, of which q is one, and results: tensors of other libraries become arrays where q is, without a copy.

    Their layouts are not looked at, and what q may not be is left as it is; None stays.
    """
    backend = backend_of(read["q"]) or foreign_backend(read["q"])
    if backend is None:
        return [*read.values(), *results.values()]
    found = [x if x is None or backend.is_dense(x) else adopted_array(backend, x, name) for name, x in read.items()]
    return found + [x if x is None else target(backend, x, name, ", where q is") for name, x in results.items()]


def adopted_array(backend: Backend, x: Any, name: str, first: str = "q") -> Array:
    """An array of another library as one of `backend`, where the operand `first` is, without a copy."""
    found = backend_of(x) or foreign_backend(x)
    array = adopted(backend, x, name) if found is backend and not backend.is_sparse(x) else None
    if array is None:
        raise TypeError(
            f"{name}: wanted a dense array on {backend.name!r}, where {first} is, got {named(x)}: nothing is moved "
            "silently"
        )
    return array


_Dtype = np.dtype[Any]


@lru_cache(maxsize=256)
def dtypes_of(q: _Dtype, k: _Dtype, v: _Dtype, out: _Dtype | None, wanted: _Dtype | None) -> tuple[_Dtype, _Dtype]:
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


def fp8_bytes(x: Array, name: str) -> Array:
    if x.dtype == FLOAT8:
        return x.view(UINT8)
    if x.dtype != UINT8:
        raise TypeError(f"{name}: wanted fp8 numbers as uint8, since a scale is given, got {x.dtype}")
    return x


@lru_cache(maxsize=256)
def fp8_dtypes(q: _Dtype, k: _Dtype, v: _Dtype, out: _Dtype | None, wanted: _Dtype | None) -> tuple[_Dtype, _Dtype]:
    """The dtype of the result, and the dtype of the sums, for operands in fp8."""
    acc = np.dtype(np.float32)
    if wanted is not None:
        return check_dtype(wanted, FP8_RESULTS, "out_dtype"), acc
    return acc if out is None else check_dtype(out, FP8_RESULTS, "out"), acc


def head_scales(backend: Backend, x: Any, name: str, batch: int, heads: int) -> tuple[float, Array | None]:
    """A scale as (the number, None), or as (1, an array of (batch, heads))."""
    if x is None:
        return 1.0, None
    if backend_of(x) is None and foreign_backend(x) is not None:
        x = adopted_array(backend, x, name)
    if not backend.is_dense(x) or x.ndim == 0:
        if hasattr(x, "__cuda_array_interface__") or (hasattr(x, "shape") and x.shape):
            raise TypeError(f"{name}: wanted a number or a dense array on {backend.name!r}, where q is, got {named(x)}")
        return checked_number(x, name, np.dtype(np.float32), positive=True), None
    if x.dtype != np.float32 or tuple(x.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{name}: wanted a number or float32 of shape ({heads},) or ({batch}, {heads}), "
            f"got {x.dtype} of shape {tuple(x.shape)}"
        )
    if isinstance(x, np.ndarray) and not (np.isfinite(x) & (x > 0)).all():
        raise ValueError(f"{name}: wanted finite numbers above 0, got {x!r}")
    with backend.recording(x):
        return 1.0, backend.xp.ascontiguousarray(backend.xp.broadcast_to(x, (batch, heads)))


_Shape = tuple[int, ...]


@lru_cache(maxsize=1024)
def sizes_of(q: _Shape, k: _Shape, v: _Shape) -> Sizes:
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
    for name, heads, length in (("q", H_q, S_q), ("k", H_kv, S_k)):
        if length > _MOST_LENGTH:
            raise ValueError(
                f"{name}: wanted at most {_MOST_LENGTH} positions, got {length}; attend to a part of the queries, or "
                "of the keys, at a time (merge_states joins the results)"
            )
        _check_tiles(name, B * heads * -(-length // _LEAST_TILE), "a part of the batch at a time")
    return Sizes(B, H_q, H_kv, S_q, S_k, 1 / math.sqrt(D) if D else 1.0)


def _check_tiles(name: str, tiles: int, way_out: str) -> None:
    """Raise ValueError if 31 bits cannot number so many tiles."""
    if tiles >= _MOST_TILES:
        raise ValueError(
            f"{name}: {tiles} tiles of {_LEAST_TILE} rows in all heads and batches, wanted less than {_MOST_TILES}; "
            f"attend to {way_out}"
        )


def check_mask(backend: Backend, mask: Any, sizes: Sizes) -> None:
    if mask is None:
        return
    if not isinstance(mask, MaskBase):  # nobody but BlockMask is one
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


def band(window: Any, causal: bool) -> tuple[int, int]:
    """How many keys before and after its own position a query sees; `UNBOUNDED` is more than any length."""
    left, right = check_window(window)
    if causal:
        right = 0
    return UNBOUNDED if left < 0 else min(left, UNBOUNDED), UNBOUNDED if right < 0 else min(right, UNBOUNDED)


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


def checked_bounds(
    backend: Backend, cu_seqlens_q: Any, cu_seqlens_k: Any, sizes: Sizes, mask: Any
) -> tuple[Array, Array]:
    """The bounds of sequences of different lengths among queries and keys, as arrays of int32 in `backend`."""
    if mask is not None:
        raise ValueError("mask: got one together with cu_seqlens_q, cu_seqlens_k; wanted None")
    q_bounds = _bounds(backend, cu_seqlens_q, "cu_seqlens_q", sizes.queries, "q")
    k_bounds = _bounds(backend, cu_seqlens_k, "cu_seqlens_k", sizes.keys, "k")
    if len(q_bounds) != len(k_bounds):
        raise ValueError(
            f"cu_seqlens_k: wanted {len(q_bounds)} numbers, as many as cu_seqlens_q has, got {len(k_bounds)}"
        )
    if len(q_bounds) > _MOST_SEQUENCES or sizes.queries + sizes.keys > _MOST_LENGTH:
        raise ValueError(
            f"cu_seqlens_q: wanted at most {_MOST_SEQUENCES} bounds and {_MOST_LENGTH} queries and keys together, got "
            f"{len(q_bounds)} and {sizes.queries + sizes.keys}; attend to some of the sequences at a time"
        )
    tiles = max(sizes.queries, sizes.keys) // _LEAST_TILE + len(q_bounds)
    _check_tiles("cu_seqlens_q", max(sizes.heads, sizes.kv_heads) * tiles, "some of the sequences at a time")
    return q_bounds, k_bounds


def _bounds(backend: Backend, given: Any, name: str, total: int, of: str) -> Array:
    """cu_seqlens_q or cu_seqlens_k as an array of int32 in `backend`; the values are checked only if they are on the
    host.
    """
    if given is None:
        raise ValueError(f"{name}: wanted together with the other one, got None")
    bounds = given
    if isinstance(given, np.ndarray | Sequence):
        bounds = host_array(name, given, "the bounds of sequences in one dimension")
    if not isinstance(bounds, np.ndarray) and not backend.is_dense(bounds):
        bounds = adopted_array(backend, bounds, name)
    if bounds.ndim != 1 or not len(bounds):
        raise ValueError(f"{name}: wanted the bounds of sequences in one dimension, got shape {tuple(bounds.shape)}")
    if bounds.dtype.kind not in "iu":
        raise TypeError(f"{name}: wanted integers, got dtype {bounds.dtype}")
    if len(bounds) == 1 and total:
        raise ValueError(f"{name}: wanted {total}, the length of {of}, at the end, got one number only")
    if not isinstance(bounds, np.ndarray):
        with backend.recording(bounds):
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


def check_out(
    backend: Backend,
    out: Array,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    operands: dict[str, Array],
    name: str = "out",
) -> None:
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"{name}: wanted {dtype} of shape {shape}, got {out.dtype} of shape {tuple(out.shape)}")
    for other, x in operands.items():
        if backend.overlap(out, x):
            raise ValueError(f"{name}: overlaps {other}")


def delivered(found: Any, given: Any) -> Any:
    """The result, or the result and its logarithms, with the `out` that was given instead of the array behind it."""
    if given is None:
        return found
    return (given, found[1]) if isinstance(found, tuple) else given
