"""Complex products on the tensor cores, which can only multiply real numbers.

If each complex column of B is stored as two real columns, ``A @ B = [Re A, Im A] @ [B; iB]`` is a product of real
matrices. Its blocks are twice as wide and its right-hand side is twice as high. Each complex multiplication becomes
four real ones, which is as many as it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array, Backend
from .._kernels import jit
from .._kernels.element_types import tensor_arch
from . import launch
from .call import ProductCall
from .matrix_cache import MatrixCache, matrix_cache_of

_REAL: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}
#: With fewer columns than this, copying A and B costs more than the tensor cores save.
_LEAST_COLUMNS = 64


@dataclass(slots=True)
class _RealMatrix:
    """The real matrix [Re A, Im A] of a complex matrix A, with only those attributes that a product reads."""

    data: Array
    indices: Array
    indptr: Array
    _shape: tuple[int, int]
    _backend: Backend
    _matrix_cache: MatrixCache | None = None


def serves(call: ProductCall) -> bool:
    """Return whether this is a complex product that real tensor-core kernels can compute faster."""
    A, B, acc = call.matrix, call.B, call.acc
    if acc not in _REAL or not acc == B.dtype == call.out.dtype == A.data.dtype or B.ndim != 2:
        return False
    R, K = A.data.shape[2:0:-1] if call.transposed else A.data.shape[1:]
    return (
        R % 16 == 0
        and K % 8 == 0
        and B.shape[1] >= _LEAST_COLUMNS
        and 0 < 2 * A.data.size < 2**31
        and tensor_arch(jit.device_target())
    )


def product(call: ProductCall) -> None:
    """Carry out the call. It needs memory for a copy of A, which is kept for later calls, and for two copies of B.

    A large product in complex64 on Hopper copies these once more, by columns.
    """
    A, B, out, alpha, beta = call.matrix, call.B, call.out, call.alpha, call.beta
    real = _REAL[B.dtype]
    K = A.data.shape[1] if call.transposed else A.data.shape[2]
    rows, N = B.shape
    panels = cupy.empty((rows // K, 2, K, N, 2), real)  # B and iB for each block column of A
    parts = B.reshape(rows // K, K, N)
    panels[:, 0, :, :, 0] = panels[:, 1, :, :, 1] = parts.real
    panels[:, 0, :, :, 1] = parts.imag
    cupy.negative(parts.imag, out=panels[:, 1, :, :, 0])
    straight = out.flags.c_contiguous and beta == 0 and isinstance(alpha, int | float)
    result = out if straight else cupy.empty(out.shape, out.dtype)
    launch.product(
        ProductCall(
            *(_real_matrix(A, real, call.transposed), panels.reshape(2 * rows, 2 * N), result.view(real), real),
            alpha=alpha if straight else 1,
            transposed=call.transposed,
            tf32=call.tf32,
        )
    )
    if not straight:
        result *= alpha
        out[...] = result if beta == 0 else result + beta * out


def _real_matrix(A: Any, real: np.dtype[Any], transposed: bool) -> _RealMatrix:
    """Return the real matrix whose blocks are [Re, Im] of the blocks of A.

    The matrix and its work list are kept on A. Its values are copied in every call, since those of A may have changed.
    """
    cache = matrix_cache_of(A)
    axis = 1 if transposed else 2
    wide: _RealMatrix | None = cache.wide.get(axis)
    blocks, *sides = A.data.shape
    if wide is None:
        sides[axis - 1] *= 2
        shape = list(A._shape)
        shape[axis - 1] *= 2
        data = cupy.empty((blocks, *sides), real)
        wide = _RealMatrix(data, A.indices, A.indptr, (shape[0], shape[1]), A._backend)
        cache.wide[axis] = wide
    left, right = cupy.split(wide.data, 2, axis=axis)
    left[...] = A.data.real
    right[...] = A.data.imag
    return wide
