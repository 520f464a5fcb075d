"""Complex blocks as real ones of twice the width: products of complex numbers on the tensor cores.

A complex matrix in memory is a real one in which real and imaginary parts alternate. If each row of the right factor is
followed by i times this row, ``A @ B`` of the real matrices is the complex product as it lies in memory. Each complex
multiplication becomes four real ones, which is as many as it needs; the left factor is not copied.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from .._backend.base import Array

#: Complex dtypes and those of their parts.
REALS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.complex64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.float64),
}


def left(a: Array) -> Array:
    """Blocks of a left factor, without a copy: (blocks, R, 2 K) for contiguous (blocks, R, K)."""
    return a.view(REALS[a.dtype])


def right(b: Array) -> Array:
    """A copy of the blocks of a right factor: (blocks, 2 K, 2 N) for (blocks, K, N)."""
    blocks, K, N = b.shape
    real = REALS[b.dtype]
    rows = cupy.empty((blocks, K, 2, N, 2), real)
    rows[:, :, 0, :, 0] = rows[:, :, 1, :, 1] = b.real
    rows[:, :, 0, :, 1] = b.imag
    cupy.negative(b.imag, out=rows[:, :, 1, :, 0])
    return rows.reshape(blocks, 2 * K, 2 * N)


def columns(Y: Array) -> Array:
    """A copy of a right factor of two dimensions, column by column: (2 N, 2 K) for (K, N)."""
    (K, N), real = Y.shape, REALS[Y.dtype]
    turned = Y.T
    found = cupy.empty((N, 2, K, 2), real)
    found[:, 0, :, 0] = found[:, 1, :, 1] = turned.real
    found[:, 1, :, 0] = turned.imag
    cupy.negative(turned.imag, out=found[:, 0, :, 1])
    return found.reshape(2 * N, 2 * K)
