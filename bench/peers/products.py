"""C = A B by others, on an NVIDIA GPU: cuBLAS with a dense A; cuSPARSE, torch and warp with the blocks of a bsr_array.

Each function prepares one product and returns the call to be timed, which writes `out`. It raises where the peer is not
installed or does not serve the case. B and out are row-major and have the dtype of A.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bsrgemm import bsr_array
from bsrgemm._kernels.timing import Call, time_gpu

from ..data import module_of
from .attention import tensor

#: cudaDataType_t of <library_types.h>
_CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
#: cusparseIndexType_t and cusparseSpMMAlg_t of <cusparse.h>; CuPy's bindings lack these two algorithms.
_INDEX_32I, _BLOCKED_ELL_ALG1, _BSR_ALG1 = 2, 13, 14
#: The sides of a block that Triton multiplies
_TRITON_LEAST = 16
#: tile_size of warp: so many threads for a row of blocks or a block of the result, or one for -1. Its default is one of
#: the first two. Each is timed so often for the best.
_WARP_TILES, _WARP_TRIES = (-1, 64, 32, 128), 3


def _cuda_type(dtype: np.dtype[Any]) -> int:
    if dtype.name not in _CUDA_TYPES:
        raise NotImplementedError(f"this peer does not support {dtype.name}")
    return _CUDA_TYPES[dtype.name]


def _one_and_zero(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """alpha and beta in host memory, in the dtype that sums of `dtype` are kept in."""
    return np.array([1, 0], np.float64 if dtype == np.float64 else np.float32)


# ------------------------------------------------------------------------------------------ dense
def dense(A: Any, B: Any, out: Any, tf32: bool = False) -> Call:
    """out = A B by the BLAS of the place where A is."""
    if isinstance(A, np.ndarray):
        return lambda: np.matmul(A, B, out=out)
    return dense_cublas(A, B, out, tf32)


def dense_cublas(A: Any, B: Any, out: Any, tf32: bool = False) -> Call:
    """cublasGemmEx: 16-bit floats summed in float32, float32 as it is or as tf32, float64."""
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas

    kind, factors = _cuda_type(A.dtype), _one_and_zero(A.dtype)
    compute = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if tf32 else cublas.CUBLAS_COMPUTE_32F
    if A.dtype == np.float64:
        compute = cublas.CUBLAS_COMPUTE_64F
    (M, K), N = A.shape, B.shape[1]
    handle = device.get_cublas_handle()

    def call() -> Any:
        # Row-major C = A B is column-major C^T = B^T A^T.
        cublas.gemmEx(
            handle, 0, 0, N, M, K, factors[:1].ctypes.data, B.data.ptr, kind, N, A.data.ptr, kind, K,
            factors[1:].ctypes.data, out.data.ptr, kind, N, compute, cublas.CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )  # fmt: skip
        return out

    return call


# -------------------------------------------------------------------------------------- cuSPARSE
@cache
def _libcusparse() -> ctypes.CDLL:
    """The libcusparse that CuPy has loaded, with the two functions that CuPy does not bind."""
    import cupy_backends.cuda.libs.cusparse  # noqa: F401

    lines = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(line.split(maxsplit=5)[5] for line in lines if "/libcusparse.so" in line))
    pointer, int64, enum = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    handle = ctypes.POINTER(pointer)
    library.cusparseCreateBsr.argtypes = [handle, *[int64] * 5, *[pointer] * 3, *[enum] * 5]
    library.cusparseCreateBlockedEll.argtypes = [handle, *[int64] * 4, *[pointer] * 2, *[enum] * 3]
    return library


def _describe(function: str, *arguments: int) -> int:
    """The descriptor that a cusparseCreate... function makes."""
    descriptor = ctypes.c_void_p()
    status = getattr(_libcusparse(), function)(ctypes.byref(descriptor), *arguments)
    if status or descriptor.value is None:
        raise RuntimeError(f"{function}: status {status}")
    return descriptor.value


class _SpMM:
    """cusparseSpMM with a described A; owns the descriptors and whatever memory they point to."""

    def __init__(self, algorithm: int, A: int, B: Any, out: Any, *memory: Any) -> None:
        import cupy
        from cupy.cuda import device
        from cupy_backends.cuda.libs import cusparse

        self._cusparse, self._sparse, self._out = cusparse, A, out
        kind, factors, row_major = _cuda_type(B.dtype), _one_and_zero(B.dtype), cusparse.CUSPARSE_ORDER_ROW
        self._dense = [cusparse.createDnMat(*X.shape, X.shape[1], X.data.ptr, kind, row_major) for X in (B, out)]
        arguments = (
            device.get_cusparse_handle(), 0, 0, factors[:1].ctypes.data, A, self._dense[0],
            factors[1:].ctypes.data, self._dense[1], _CUDA_TYPES[factors.dtype.name], algorithm,
        )  # fmt: skip
        buffer = cupy.empty(max(1, cusparse.spMM_bufferSize(*arguments)), np.uint8)
        self._arguments = (*arguments, buffer.data.ptr)
        self._memory = (B, factors, buffer, *memory)

    def __call__(self) -> Any:
        self._cusparse.spMM(*self._arguments)
        return self._out

    def __del__(self) -> None:
        self._cusparse.destroySpMat(self._sparse)
        for matrix in getattr(self, "_dense", ()):
            self._cusparse.destroyDnMat(matrix)


def _index(A: Any) -> tuple[Any, Any]:
    """Copies of `indptr` and `indices`: a matrix whose own arrays others have makes its lists again at each product."""
    return A.indptr.astype(np.int32), A.indices.astype(np.int32)


def _described_bsr(A: Any) -> tuple[Any, ...]:
    """The descriptor of a matrix of ours, and the arrays that have to live as long."""
    (R, C), kind = A.blocksize, _cuda_type(A.dtype)
    indptr, indices = _index(A)
    matrix = _describe(
        "cusparseCreateBsr", A.shape[0] // R, A.shape[1] // C, len(A.data), R, C, indptr.data.ptr, indices.data.ptr,
        A.data.data.ptr, _INDEX_32I, _INDEX_32I, 0, kind, 2,
    )  # fmt: skip
    return matrix, A, indptr, indices


def cusparse_bsr(A: Any, B: Any, out: Any) -> Call:
    """cusparseSpMM on the blocks as they are."""
    matrix, *memory = _described_bsr(A)
    return _SpMM(_BSR_ALG1, matrix, B, out, *memory)


def cusparse_bsr_vector(A: Any, x: Any, out: Any) -> Call:
    """cusparseSpMV on the blocks as they are, where this cuSPARSE has it."""
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cusparse

    kind, factors = _cuda_type(A.dtype), _one_and_zero(A.dtype)
    matrix, *memory = _described_bsr(A)
    vectors = [cusparse.createDnVec(v.size, v.data.ptr, kind) for v in (x, out)]
    arguments = (
        device.get_cusparse_handle(), 0, factors[:1].ctypes.data, matrix, vectors[0], factors[1:].ctypes.data,
        vectors[1], _CUDA_TYPES[factors.dtype.name], 0,
    )  # fmt: skip
    buffer = cupy.empty(max(1, cusparse.spMV_bufferSize(*arguments)), np.uint8)

    def call(_: Any = (x, factors, memory)) -> Any:
        cusparse.spMV(*arguments, buffer.data.ptr)
        return out

    return call


def blocked_ell(blocks: Any, rows: int) -> Any:
    """Blocks (rows * width, R, C), `width` to a block row, as the row-major matrix of rows R by width C."""
    _, R, C = blocks.shape
    return blocks.reshape(rows, -1, R, C).transpose(0, 2, 1, 3).reshape(rows * R, -1)


def cusparse_ell(A: Any, B: Any, out: Any) -> Call:
    """cusparseSpMM on Blocked-ELL, for square blocks and the same number of them in every block row."""
    import cupy

    (R, C), kind = A.blocksize, _cuda_type(A.dtype)
    rows = A.shape[0] // R
    if R != C:
        raise NotImplementedError("Blocked-ELL supports square blocks only")
    if len(A.data) == 0 or int(cupy.ptp(cupy.diff(A.indptr))) != 0:
        raise NotImplementedError("Blocked-ELL needs the same number of blocks in every block row")
    values, indices = cupy.ascontiguousarray(blocked_ell(A.data, rows)), _index(A)[1]
    matrix = _describe(
        "cusparseCreateBlockedEll", *A.shape, R, values.shape[1], indices.data.ptr, values.data.ptr, _INDEX_32I, 0, kind
    )
    return _SpMM(_BLOCKED_ELL_ALG1, matrix, B, out, values, indices)


# ----------------------------------------------------------------------------------------- torch
def torch_bsr(A: Any, B: Any, out: Any) -> Call:
    """torch's Triton kernel for BSR, with its default parameters."""
    import torch
    from torch.sparse._triton_ops import bsr_dense_addmm

    if A.dtype.name not in ("float16", "bfloat16", "float32"):
        raise NotImplementedError(f"this peer does not support {A.dtype.name}")
    if any(side < _TRITON_LEAST or side & (side - 1) for side in A.blocksize):
        raise NotImplementedError(f"torch's Triton kernel supports only blocks with sides of 2^k >= {_TRITON_LEAST}")

    indptr, indices = (tensor(x.astype(np.int64)) for x in (A.indptr, A.indices))
    dense, result = tensor(B), tensor(out)

    def call() -> Any:
        bsr_dense_addmm(result, bsr, dense, beta=0, alpha=1, out=result)
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BSR is beta; parameters are not tuned for this card
        bsr = torch.sparse_bsr_tensor(indptr, indices, tensor(A.data), size=A.shape)
        call()
    return call


# ------------------------------------------------------------------------------------------ warp
@cache
def _warp() -> Any:
    """warp, started and silent."""
    import warp
    import warp.sparse

    warp.config.quiet, warp.config.log_level = True, logging.WARNING  # of older and of newer versions
    warp.init()
    return warp


@cache
def _warp_stream(device: str, stream: int) -> Any:
    """A stream of CuPy as one of warp, kept: warp forgets a stream with the first object that stands for it."""
    return _warp().Stream(device, cuda_stream=stream or None)


def _warp_device(x: Any) -> str:
    return "cpu" if isinstance(x, np.ndarray) else f"cuda:{x.device.id}"


def _on_current_stream(device: str) -> contextlib.AbstractContextManager[Any]:
    """warp launches on CuPy's stream."""
    if device == "cpu":
        return contextlib.nullcontext()
    from cupy.cuda import get_current_stream

    return _warp().ScopedStream(_warp_stream(device, get_current_stream().ptr), sync_enter=False)


def _warp_array(x: Any, dtype: Any) -> Any:
    return _warp().array(x, dtype=dtype, device=_warp_device(x), copy=False)


def _warp_matrix(A: Any) -> Any:
    """A as a matrix of warp, with its values in the same memory."""
    wp, (R, C) = _warp(), A.blocksize
    kind = {"float32": wp.float32, "float64": wp.float64}.get(A.dtype.name)
    if kind is None:
        raise NotImplementedError(f"this peer does not support {A.dtype.name}")
    block, data = (kind, A.data.reshape(-1)) if R == C == 1 else (wp.types.matrix((R, C), kind), A.data)
    matrix = wp.sparse.bsr_zeros(A.shape[0] // R, A.shape[1] // C, block, _warp_device(A.data))
    matrix.offsets, matrix.columns = (_warp_array(x, wp.int32) for x in _index(A))
    matrix.values = _warp_array(data, block)
    matrix.notify_nnz_changed(nnz=len(A.data))
    return matrix


def _best_tile(device: str, product: Callable[[int], Any]) -> Call:
    """The product on CuPy's stream with the tile size that is the fastest here. On the CPU warp has no tiles."""

    def call_of(tile: int) -> Call:
        def call() -> Any:
            with _on_current_stream(device):
                return product(tile)

        return call

    if device == "cpu":
        return call_of(_WARP_TILES[0])
    return min(map(call_of, _WARP_TILES), key=lambda call: time_gpu(call, _WARP_TRIES, idle=0.05))


def warp_bsr(A: Any, x: Any, out: Any) -> Call:
    """warp.sparse.bsr_mv: float32 and float64 vectors, on either backend. warp has no product with a dense matrix."""
    bsr_mv, matrix, device = _warp().sparse.bsr_mv, _warp_matrix(A), _warp_device(x)
    if x.ndim != 1:
        raise NotImplementedError("warp multiplies a sparse matrix by vectors only")
    vectors = [_warp_array(v, matrix.scalar_type) for v in (x, out)]

    def product(tile: int) -> Any:
        bsr_mv(matrix, *vectors, tile_size=tile)
        return out

    return _best_tile(device, product)


def warp_bsr_bsr(A: Any, B: Any) -> Call:
    """warp.sparse.bsr_mm of two sparse matrices, from the pattern on, into memory that is kept between calls.

    float32 and float64, on either backend. The call returns a matrix of warp, of which `from_warp` makes one of ours.
    """
    wp, device = _warp(), _warp_device(A.data)
    left = _warp_matrix(A)
    right = left if B is A else _warp_matrix(B)
    sides, kind = (A.blocksize[0], B.blocksize[1]), left.scalar_type
    block = kind if sides == (1, 1) else wp.types.matrix(sides, kind)
    if device != "cpu":  # or its pool goes back to the driver whenever a call waits
        wp.set_mempool_release_threshold(device, 1.0)
    with _on_current_stream(device):
        result, kept = wp.sparse.bsr_zeros(left.nrow, right.ncol, block, device), wp.sparse.bsr_mm_work_arrays()

    def product(tile: int) -> Any:
        return wp.sparse.bsr_mm(left, right, result, work_arrays=kept, tile_size=tile)

    return _best_tile(device, product)


def from_warp(matrix: Any) -> bsr_array:
    """A matrix of warp as one of ours, in the same memory."""
    with _on_current_stream(str(matrix.device)):
        blocks = matrix.nnz_sync()
    R, C = matrix.block_shape
    arrays = (matrix.values, matrix.columns, matrix.offsets)
    data, indices, indptr = (x.numpy() if x.device.is_cpu else module_of(None).asarray(x) for x in arrays)
    lists = indices[:blocks], indptr[: matrix.nrow + 1]
    return bsr_array((data.reshape(-1, R, C)[:blocks], *lists), shape=matrix.shape)
