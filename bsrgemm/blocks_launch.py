"""Products whose result is blocks, on the tensor cores: from operands to a launch of blocks_sm90."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from . import configs, jit, tensormap, tuning
from .home import Array
from .launch import _counters, _multiprocessors, _order
from .prepared import flat

#: `Problem` of cuda/blocks_sm90.cu behind its two maps.
_PROBLEM = struct.Struct("@5P4q4i")
_ARGUMENT = np.dtype([("opaque", "<u8", (-(-(2 * 128 + _PROBLEM.size) // 64) * 8,))])
_PADDING = bytes(_ARGUMENT.itemsize - 2 * 128 - _PROBLEM.size)
#: Tiles are counted in 31 bits, and so are rows and columns.
_MOST = 2**31


def pair_products(a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any]) -> Array | None:
    """``out[s] = sum of a[ia[k]] @ b[ib[k]]`` over the pairs of block s, or None if the tensor cores cannot do it."""
    R, K = a.shape[1:]
    N = b.shape[2]
    config = tuning.blocks_sm90(jit.device_target(), a.dtype, b.dtype, dtype, R, K, N)
    a, b = flat(a), flat(b)
    if (
        config is None
        or not 0 < len(ia) < _MOST
        or max(len(a) * R, len(b) * K) >= _MOST
        or (a.data.ptr | b.data.ptr) % 16
    ):
        return None
    left = _map(a, (K, R, len(a)), (K, R * K), (64, config.tile_m))
    right = _map(b, (N, K, len(b)), (N, K * N), (64, 64))
    out = cupy.empty((len(starts), R, N), dtype)
    counts = (len(starts), len(ia), len(a), len(b))
    return _launch(config, left + right, out, flat(ia), flat(ib), flat(starts), counts, K)


def sampled(
    X: Array, Y: Array, indices: Array, indptr: Array, block: tuple[int, int], dtype: np.dtype[Any]
) -> Array | None:
    """``out[p] = X[rows of block p] @ Y[:, columns of block p]``, or None if the tensor cores cannot do it.

    An operand that the copy engine cannot read is copied; so is a row-major Y, if blocks have less than 64 columns.
    """
    R, N = block
    M, K = X.shape
    per_row = len(indices) // max(1, M // R)

    def choice(order: str) -> configs.BlocksSm90 | None:
        return tuning.blocks_sm90(jit.device_target(), X.dtype, Y.dtype, dtype, R, K, N, order, per_row)

    if choice("F") is None or max(*X.shape, *Y.shape) >= _MOST:
        return None
    if _order(X) != "C":
        X = cupy.ascontiguousarray(X)
    order = _order(Y)
    config = choice(order) if order else None
    if config is None:
        Y = cupy.asfortranarray(Y)
        config = choice("F")
    assert config is not None
    size = X.itemsize
    pitch = X.strides[0] // size
    left = _map(X, (K, M, 1), (pitch, pitch), (64, config.tile_m // config.cluster))
    pitch = Y.strides[1 if config.b_transposed else 0] // size
    dims, box = ((K, Y.shape[1]), (64, config.part_n)) if config.b_transposed else ((Y.shape[1], K), (64, 64))
    right = _map(Y, (*dims, 1), (pitch, pitch), box)
    out = cupy.empty((len(indices), R, N), dtype)
    counts = (len(indices), len(indices), M // R, Y.shape[1] // N)
    indptr = indptr.astype(indices.dtype, copy=False)
    return _launch(config, left + right, out, None, flat(indices), flat(indptr), counts, K)


def _map(x: Array, dims: tuple[int, int, int], pitches: tuple[int, int], box: tuple[int, int]) -> bytes:
    """Matrices one behind the other, fastest dimension first."""
    strides = [p * x.itemsize for p in (*pitches, pitches[-1])]
    return tensormap.encode(x.data.ptr, str(x.dtype), (*dims, 1), strides, (*box, 1, 1), swizzle="128B").tobytes()


def _launch(
    config: configs.BlocksSm90,
    maps: bytes,
    out: Array,
    left: Array | None,
    right: Array,
    starts: Array,
    counts: tuple[int, ...],
    K: int,
) -> Array | None:
    blocks, R, N = out.shape
    tiles = blocks * -(-R // config.tile_m) * -(-N // config.part_n)
    if tiles >= _MOST - 2**20:
        return None
    config = replace(config, index=configs.element(right.dtype))
    kernel = jit.load(config.spec(), jit.device_target())
    kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    pointers = (out, left, right, starts, _counters(2))
    ctas = max(1, min(tiles, _multiprocessors()) // config.cluster) * config.cluster
    # As many wide tiles as occupy all CTAs equally often.
    narrow = tiles // (config.parts * ctas) * (config.parts * ctas) // -(-R // config.tile_m)
    packed = (
        maps + _PROBLEM.pack(*(0 if x is None else x.data.ptr for x in pointers), *counts, R, N, K, narrow) + _PADDING
    )
    kernel((ctas,), (config.threads,), (np.frombuffer(packed, _ARGUMENT),), shared_mem=config.shared_bytes)
    return out
