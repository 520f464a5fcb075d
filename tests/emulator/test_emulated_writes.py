"""Products see what was written into the index arrays of their matrix: the kernels as they are, on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsrgemm._backend.index_arrays import Unwritten, watched, watched_class
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import launch
from bsrgemm._products.call import ProductCall
from bsrgemm._products.matrix_cache import matrix_cache_of

from . import emulator
from .emulator import Array, guarded, put
from .test_emulated_tensor_cores import Matrix

F16, F32, F64 = (np.dtype(x) for x in "efd")
#: A matrix has arrays of this class, as one on a GPU has CuPy's.
INDEX = watched_class(Array, lambda x: x.ctypes.data)


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder, arch="sm_80"):
        yield


@pytest.fixture
def A(request: pytest.FixtureRequest) -> Any:
    A = Matrix(np.random.default_rng(7), *request.param, share=0.5)
    A.indices, A.indptr = (watched(INDEX, put(x)) for x in (A.indices, A.indptr))
    A._backend, A._matrix_cache = HOST, None
    return A


def dense_of(A: Any) -> np.ndarray:
    """The matrix as its arrays tell; blocks that are stored twice are added up."""
    R, C = A.data.shape[1:]
    found = np.zeros(A._shape)
    indices, indptr = np.asarray(A.indices), np.asarray(A.indptr)
    for i in range(len(indptr) - 1):
        for k in range(indptr[i], indptr[i + 1]):
            found[i * R : (i + 1) * R, indices[k] * C : (indices[k] + 1) * C] += np.asarray(A.data[k], np.float64)
    return found


def multiply(A: Any, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    dense = dense_of(A).T if transposed else dense_of(A)
    dtype = A.data.dtype
    numbers = np.random.default_rng(8).integers(-2, 3, (dense.shape[1], 32)).astype(dtype)
    out = put(np.full((dense.shape[0], 32), 77, F32 if dtype == F16 else dtype))
    acc = F32 if dtype == F16 else dtype
    launch.product(ProductCall(A, put(numbers), out, acc, transposed=transposed, may_copy=False))
    return np.asarray(out, np.float64), dense @ numbers.astype(np.float64)


def another_row(A: Any) -> None:
    """The last block of a block row becomes the first of the next."""
    row = next(i for i in range(1, len(A.indptr) - 1) if A.indptr[i] > A.indptr[i - 1])
    A.indptr[row] -= 1


WRITES: dict[str, Callable[[Any], Any]] = {
    "one column": lambda A: A.indices.__setitem__(0, A._shape[1] // A.data.shape[2] - 1),
    "another order": lambda A: A.indices.__setitem__(slice(None), np.asarray(A.indices)[::-1].copy()),
    "through a view": lambda A: A.indices[1:].fill(0),
    "an operator": lambda A: A.indices[:1].__isub__(A.indices[:1]),
    "another row": another_row,
}


@pytest.mark.parametrize("A", [((16, 16), F16), ((64, 64), F16), ((3, 3), F64)], indirect=True, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_sees_every_write(A: Any, transposed: bool) -> None:
    found, want = multiply(A, transposed)
    np.testing.assert_array_equal(found, want)
    for name, write in WRITES.items():
        before = want
        write(A)
        found, want = multiply(A, transposed)
        np.testing.assert_array_equal(found, want, name)
        assert not np.array_equal(before, want), name


@pytest.mark.parametrize("A", [((64, 64), F16)], indirect=True, ids=str)
def test_products_and_transposes_neither_write_nor_hand_out_the_memory(A: Any) -> None:
    state = Unwritten(A.indices, A.indptr)
    cache = matrix_cache_of(A)
    for transposed in (False, True):
        multiply(A, transposed)
    assert state.holds() and matrix_cache_of(A) is cache


@pytest.mark.parametrize("A", [((64, 64), F16)], indirect=True, ids=str)
def test_a_matrix_whose_memory_was_handed_out_is_prepared_for_each_product(A: Any) -> None:
    pointer = A.indices.data
    cache = matrix_cache_of(A)
    assert pointer.ptr and matrix_cache_of(A) is not cache
    multiply(A, False)
    np.asarray(A.indices.view(Array))[0] = 0  # as a kernel of somebody else does
    found, want = multiply(A, False)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("A", [((16, 16), F16), ((64, 64), F16), ((3, 3), F64)], indirect=True, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("name", "wrong"), [("indices", 1 << 30), ("indices", -5), ("indptr", 1 << 30), ("indptr", -5)]
)
def test_an_index_out_of_range_is_clamped(A: Any, transposed: bool, name: str, wrong: int, folder: Path) -> None:
    """All arrays end where reading ends the process."""
    with emulator.emulated(folder, guarded, arch="sm_80"):
        A.data = guarded(A.data)
        A.indices, A.indptr = (watched(INDEX, guarded(x)) for x in (A.indices, A.indptr))
        M, K = A._shape[::-1] if transposed else A._shape
        out = guarded(np.zeros((M, 32), F32 if A.data.dtype == F16 else A.data.dtype))
        call = ProductCall(A, guarded(np.ones((K, 32), A.data.dtype)), out, out.dtype, transposed=transposed)
        call = replace(call, may_copy=False)
        launch.product(call)
        getattr(A, name)[1] = wrong
        with contextlib.suppress(ValueError):  # NumPy's own functions, which stand for CuPy's here, may refuse it
            launch.product(call)
