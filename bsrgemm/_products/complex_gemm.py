"""Complex products on the tensor cores, which multiply real numbers only.

With B's columns seen as pairs of real ones, ``A @ B = [Re A, Im A] @ [B; iB]`` in real numbers: blocks twice as wide
and a right-hand side twice as high, four real products for each complex one and nothing more.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array, Backend
from .._kernels import jit
from . import configs, launch
from .matrix_cache import MatrixCache, prepare

_REAL: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}
#: Fewer columns do not pay for the copies.
_LEAST_COLUMNS = 64


def serves(A: Any, B: Array, out: Array, acc: np.dtype[Any], transposed: bool) -> bool:
    """Is this a complex product that is worth it?"""
    if acc not in _REAL or not acc == B.dtype == out.dtype == A.data.dtype or B.ndim != 2:
        return False
    R, K = A.data.shape[2:0:-1] if transposed else A.data.shape[1:]
    return (
        R % 16 == 0
        and K % 8 == 0
        and B.shape[1] >= _LEAST_COLUMNS
        and 0 < 2 * A.data.size < 2**31
        and configs.tensor_arch(jit.device_target())
    )


def product(
    backend: Backend, A: Any, B: Array, out: Array, alpha: Any, beta: Any, *, transposed: bool, tf32: bool
) -> None:
    """``out = alpha * A @ B + beta * out``, in room for a copy of A (kept with it) and two of B."""
    real = _REAL[B.dtype]
    wide = _wide(backend, prepare(backend, A), A, real, transposed)
    K = A.data.shape[1] if transposed else A.data.shape[2]
    rows, N = B.shape
    panels = cupy.empty((rows // K, 2, K, N, 2), real)  # B and iB, block column by block column
    parts = B.reshape(rows // K, K, N)
    panels[:, 0, :, :, 0] = panels[:, 1, :, :, 1] = parts.real
    panels[:, 0, :, :, 1] = parts.imag
    cupy.negative(parts.imag, out=panels[:, 1, :, :, 0])
    straight = out.flags.c_contiguous and beta == 0 and isinstance(alpha, int | float)
    result = out if straight else cupy.empty(out.shape, out.dtype)
    launch.product(
        *(prepare(backend, wide), wide._shape, panels.reshape(2 * rows, 2 * N), result.view(real), real),
        *(alpha if straight else 1, 0),
        transposed=transposed,
        tf32=tf32,
    )
    if not straight:
        result *= alpha
        out[...] = result if beta == 0 else result + beta * out


def _wide(backend: Backend, prepared: MatrixCache, A: Any, real: np.dtype[Any], transposed: bool) -> Any:
    """A real matrix with blocks [Re, Im], its work list kept; its values are taken anew, for they may have changed."""
    axis = 1 if transposed else 2
    wide = prepared.wide.get(axis)
    blocks, *sides = A.data.shape
    if wide is None:
        sides[axis - 1] *= 2
        shape = list(A._shape)
        shape[axis - 1] *= 2
        data = cupy.empty((blocks, *sides), real)
        wide = SimpleNamespace(data=data, indices=A.indices, indptr=A.indptr, _shape=tuple(shape))
        prepared.wide[axis] = wide
    left, right = cupy.split(wide.data, 2, axis=axis)
    left[...] = A.data.real
    right[...] = A.data.imag
    return wide
