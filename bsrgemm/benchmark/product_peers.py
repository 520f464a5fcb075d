"""C = A B by others, on an NVIDIA GPU: cuBLAS with a dense A; cuSPARSE and torch with the blocks of a bsr_array.

Each function prepares one product and returns the call to be timed, which writes `out`. It raises where the peer is not
installed or does not serve the case. B and out are row-major and have the dtype of A.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .random_data import module_of
from .timing import Call

#: cudaDataType_t of <library_types.h>
_CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
#: cusparseIndexType_t and cusparseSpMMAlg_t of <cusparse.h>; CuPy's bindings lack these two algorithms.
_INDEX_32I, _BLOCKED_ELL_ALG1, _BSR_ALG1 = 2, 13, 14
#: The sides of a block that Triton multiplies
_TRITON_LEAST = 16


def _cuda_type(dtype: np.dtype[Any]) -> int:
    if dtype.name not in _CUDA_TYPES:
        raise NotImplementedError(f"no {dtype.name}")
    return _CUDA_TYPES[dtype.name]


def _one_and_zero(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """alpha and beta in host memory, in the dtype that sums of `dtype` are kept in."""
    return np.array([1, 0], np.float64 if dtype == np.float64 else np.float32)


# ---------------------------------------------------------------------------------------- cuBLAS
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


def nvmath_dense(A: Any, B: Any) -> Call:
    """cuBLASLt through nvmath-python, with the algorithm that its heuristic finds."""
    from nvmath.linalg.advanced import Matmul

    product = Matmul(A, B)
    product.plan()
    return lambda: product.execute()


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


def cusparse_bsr(A: Any, B: Any, out: Any) -> Call:
    """cusparseSpMM on the blocks as they are."""
    (R, C), kind = A.blocksize, _cuda_type(A.dtype)
    indptr, indices = (x.astype(np.int32, copy=False) for x in (A.indptr, A.indices))
    matrix = _describe(
        "cusparseCreateBsr", A.shape[0] // R, A.shape[1] // C, len(A.data), R, C, indptr.data.ptr, indices.data.ptr,
        A.data.data.ptr, _INDEX_32I, _INDEX_32I, 0, kind, 2,
    )  # fmt: skip
    return _SpMM(_BSR_ALG1, matrix, B, out, A, indptr, indices)


def cusparse_bsr_vector(A: Any, x: Any, out: Any) -> Call:
    """cusparseSpMV on the blocks as they are, where this cuSPARSE has it."""
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cusparse

    (R, C), kind, factors = A.blocksize, _cuda_type(A.dtype), _one_and_zero(A.dtype)
    indptr, indices = (x.astype(np.int32, copy=False) for x in (A.indptr, A.indices))
    matrix = _describe(
        "cusparseCreateBsr", A.shape[0] // R, A.shape[1] // C, len(A.data), R, C, indptr.data.ptr, indices.data.ptr,
        A.data.data.ptr, _INDEX_32I, _INDEX_32I, 0, kind, 2,
    )  # fmt: skip
    vectors = [cusparse.createDnVec(v.size, v.data.ptr, kind) for v in (x, out)]
    arguments = (
        device.get_cusparse_handle(), 0, factors[:1].ctypes.data, matrix, vectors[0], factors[1:].ctypes.data,
        vectors[1], _CUDA_TYPES[factors.dtype.name], 0,
    )  # fmt: skip
    buffer = cupy.empty(max(1, cusparse.spMV_bufferSize(*arguments)), np.uint8)
    memory = (A, x, indptr, indices, factors)

    def call(_: Any = memory) -> Any:
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
        raise NotImplementedError("Blocked-ELL has square blocks")
    if len(A.data) == 0 or int(cupy.ptp(cupy.diff(A.indptr))) != 0:
        raise NotImplementedError("Blocked-ELL has as many blocks in every block row")
    values, indices = cupy.ascontiguousarray(blocked_ell(A.data, rows)), A.indices.astype(np.int32, copy=False)
    matrix = _describe(
        "cusparseCreateBlockedEll", *A.shape, R, values.shape[1], indices.data.ptr, values.data.ptr, _INDEX_32I, 0, kind
    )
    return _SpMM(_BLOCKED_ELL_ALG1, matrix, B, out, values, indices)


# ----------------------------------------------------------------------------------------- torch
def torch_bsr(A: Any, B: Any, out: Any, tune: bool = False) -> Call:
    """torch's Triton kernel for BSR, with its default parameters or those its own tuner finds (minutes)."""
    import torch
    from torch.sparse._triton_ops import bsr_dense_addmm
    from torch.sparse._triton_ops_meta import tune_bsr_dense_addmm

    if A.dtype.name not in ("float16", "bfloat16", "float32"):
        raise NotImplementedError(f"no {A.dtype.name}")
    if any(side < _TRITON_LEAST or side & (side - 1) for side in A.blocksize):
        raise NotImplementedError(f"Triton's blocks have sides of 2^k >= {_TRITON_LEAST}")

    def tensor(x: Any) -> Any:
        if x.dtype.name == "bfloat16":  # DLPack does not carry CuPy's
            return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(x)

    indptr, indices = (tensor(x.astype(np.int64)) for x in (A.indptr, A.indices))
    dense, result, meta = tensor(B), tensor(out), None

    def call() -> Any:
        bsr_dense_addmm(result, bsr, dense, beta=0, alpha=1, out=result, meta=meta)
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BSR is beta; parameters are not tuned for this card
        bsr = torch.sparse_bsr_tensor(indptr, indices, tensor(A.data), size=A.shape)
        if tune:
            meta = tune_bsr_dense_addmm(result, bsr, dense, beta=0, alpha=1, out=result) or None
        call()
    return call


# ------------------------------------------------------------------------------------------ warp
def warp_bsr(A: Any, x: Any, out: Any) -> Call:
    """warp.sparse.bsr_mv: float32 and float64 vectors, on either home."""
    import warp as wp
    from warp.sparse import bsr_from_triplets, bsr_mv

    kinds = {"float32": wp.float32, "float64": wp.float64}
    if A.dtype.name not in kinds or x.ndim != 1:
        raise NotImplementedError(f"no {A.dtype.name}" if x.ndim == 1 else "vectors only")
    wp.config.quiet = True
    kind, (R, C) = kinds[A.dtype.name], A.blocksize
    xp = module_of(A.data)
    device, stream = "cpu", None
    if xp is not np:
        device = f"cuda:{A.data.device.id}"
        stream = wp.Stream(device, cuda_stream=xp.cuda.get_current_stream().ptr)

    def array(values: Any, dtype: Any) -> Any:
        return wp.array(values, dtype=dtype, device=device, copy=False)

    counts = np.diff(A.indptr if xp is np else A.indptr.get())
    rows = xp.asarray(np.repeat(np.arange(A.shape[0] // R, dtype=np.int32), counts))
    matrix = bsr_from_triplets(
        A.shape[0] // R, A.shape[1] // C, array(rows, wp.int32), array(A.indices.astype(np.int32), wp.int32),
        array(A.data, kind), prune_numerical_zeros=False,
    )  # fmt: skip
    vectors = (
        array(x if C == 1 else x.reshape(-1, C), kind if C == 1 else wp.types.vector(C, kind)),
        array(out if R == 1 else out.reshape(-1, R), kind if R == 1 else wp.types.vector(R, kind)),
    )

    def call() -> Any:
        with wp.ScopedStream(stream, sync_enter=False):
            bsr_mv(matrix, *vectors, alpha=1.0, beta=0.0)
        return out

    return call
