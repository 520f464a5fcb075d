"""Products whose result is blocks, on the tensor cores: from operands to a launch."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import jit, tensor_map
from .._kernels.workspace import counters
from . import configs, heuristics
from .launch import _multiprocessors, _order
from .matrix_cache import flat

#: `Problem` of cuda/block_products_sm90.cu behind its two maps.
_PROBLEM = struct.Struct("@5P4q5i")
_PADDING = bytes(-_PROBLEM.size % 64)
#: `Problem` of cuda/block_products_sm80.cu.
_PROBLEM_SM80 = struct.Struct("@6P8q3i4x")
#: Which blocks meet: left, right, and where those of a block of the result or of a block row start.
_Lists = tuple[Array | None, Array, Array]
#: kStrip of cuda/block_products_sm90.cu: rows of the result that are computed together
_STRIP = 16
#: Tiles are counted in 31 bits, and so are rows and columns.
_MOST = 2**31


def pair_products(
    a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
) -> Array | None:
    """``out[s] = sum of a[ia[k]] @ b[ib[k]]`` over the pairs of block s, or None if the tensor cores cannot do it.

    If the blocks of the result are those of so many block rows, in order, and B is larger than the L2, Hopper takes
    them in an order that reads less from memory.
    """
    R, K = a.shape[1:]
    N = b.shape[2]
    a, b = flat(a), flat(b)
    if not 0 < len(ia) < _MOST or max(len(a) * R, len(b) * K) >= _MOST or (a.data.ptr | b.data.ptr) % 16:
        return None
    problem = (jit.device_target(), a.dtype, b.dtype, dtype, R, K, N)
    out = (len(starts), R, N)
    lists = (flat(ia), flat(ib), flat(starts))
    counts = (len(starts), len(ia), len(a), len(b))
    wide = heuristics.block_products_sm90(*problem)
    if wide is not None:
        left = _map(a, (K, R, len(a)), (K, R * K), (64, wide.tile_m))
        right = _map(b, (N, K, len(b)), (N, K * N), (64, 64))
        in_strips = rows >= _STRIP and b.nbytes > _l2_bytes()
        row_blocks = round(len(starts) / rows) if in_strips else 0
        return _launch_sm90(wide, left + right, cupy.empty(out, dtype), lists, counts, K, row_blocks)
    config = heuristics.block_products_sm80(*problem)
    if config is None:
        return None
    return _launch_sm80(config, (a, b), cupy.empty(out, dtype), lists, counts, (K, N, R * K, K * N), K)


def sampled(
    X: Array,
    Y: Array,
    indices: Array,
    indptr: Array,
    block: tuple[int, int],
    dtype: np.dtype[Any],
    tf32: bool = False,
) -> Array | None:
    """``out[p] = X[rows of block p] @ Y[:, columns of block p]``, or None if the tensor cores cannot do it.

    An operand whose rows or columns cannot be read 16 bytes at a time is copied; on Hopper so is a row-major Y of
    16-bit floats, if blocks do not divide into parts of 32 columns.
    """
    R, N = block
    M, K = X.shape
    problem = (jit.device_target(), X.dtype, Y.dtype, dtype, R, K, N)
    if max(*X.shape, *Y.shape) >= _MOST or heuristics.block_products_sm80(*problem, "F") is None:
        return None
    if _order(X) != "C":
        X = cupy.ascontiguousarray(X)
    wide = heuristics.block_products_sm90(*problem, "F") is not None
    order = _order(Y)
    if not order or (wide and heuristics.block_products_sm90(*problem, order) is None):
        Y, order = cupy.asfortranarray(Y), "F"
    out = cupy.empty((len(indices), R, N), dtype)
    lists = (None, flat(indices), flat(indptr.astype(indices.dtype, copy=False)))
    counts = (len(indices), len(indices), M // R, Y.shape[1] // N)
    lines = tuple(x.strides[0 if o == "C" else 1] // x.itemsize for x, o in ((X, "C"), (Y, order)))
    config = heuristics.block_products_sm90(*problem, order)
    if config is None:
        other = heuristics.block_products_sm80(*problem, order, tf32)
        assert other is not None
        steps = (*lines, R * lines[0], N * (lines[1] if order == "F" else 1))
        return _launch_sm80(other, (X, Y), out, lists, counts, steps, K)
    left = _map(X, (K, M, 1), (lines[0], lines[0]), (64, config.tile_m))
    slab = min(config.part_n, 64)
    dims, box = ((K, Y.shape[1]), (64, config.part_n)) if config.b_transposed else ((Y.shape[1], K), (slab, 64))
    right = _map(Y, (*dims, 1), (lines[1], lines[1]), box)
    return _launch_sm90(config, left + right, out, lists, counts, K)


def _map(x: Array, dims: tuple[int, int, int], pitches: tuple[int, int], box: tuple[int, int]) -> bytes:
    """Matrices one behind the other, fastest dimension first; a line of the box is a row of the swizzle."""
    strides = [p * x.itemsize for p in (*pitches, pitches[-1])]
    how = f"{box[0] * x.itemsize}B"
    return tensor_map.encode(x.data.ptr, str(x.dtype), (*dims, 1), strides, (*box, 1, 1), swizzle=how).tobytes()


def _pointers(*arrays: Array | None) -> tuple[int, ...]:
    return tuple(0 if x is None else x.data.ptr for x in arrays)


def _launch_sm90(
    config: configs.BlockProductsSm90,
    maps: bytes,
    out: Array,
    lists: _Lists,
    counts: tuple[int, ...],
    K: int,
    row_blocks: int = 0,
) -> Array | None:
    blocks, R, N = out.shape
    heights, parts = -(-R // config.tile_m), blocks * -(-N // config.part_n)
    tiles = heights * parts
    if tiles + heights * counts[2] >= _MOST - 2**20:
        return None
    kernel = _kernel(replace(config, index=configs.element(lists[1].dtype)))
    ctas = min(tiles, _multiprocessors())
    # As many wide tiles as occupy all CTAs equally often.
    narrow = tiles // (config.parts * ctas) * ctas // heights * config.parts
    packed = _PROBLEM.pack(*_pointers(out, *lists, counters(2)), *counts, R, N, K, narrow, row_blocks)
    kernel((ctas,), (config.threads,), (jit.argument(maps + packed + _PADDING),), shared_mem=config.shared_bytes)
    return out


def _launch_sm80(
    config: configs.BlockProductsSm80,
    operands: tuple[Array, Array],
    out: Array,
    lists: _Lists,
    counts: tuple[int, ...],
    steps: tuple[int, ...],
    K: int,
) -> Array | None:
    blocks, R, N = out.shape
    tiles = blocks * (R // config.tile_m) * -(-N // config.part_n)
    if tiles >= _MOST:
        return None
    kernel = _kernel(replace(config, index=configs.element(lists[1].dtype)))
    packed = _PROBLEM_SM80.pack(*_pointers(*operands, out, *lists), *counts, *steps, R, N, K)
    kernel((tiles,), (config.threads,), (jit.argument(packed),), shared_mem=config.shared_bytes)
    return out


def _l2_bytes() -> int:
    return int(cupy.cuda.Device().attributes["L2CacheSize"])


def _kernel(config: configs.BlockProductsSm90 | configs.BlockProductsSm80) -> Any:
    kernel = jit.load(config.spec(), jit.device_target())
    kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    return kernel
