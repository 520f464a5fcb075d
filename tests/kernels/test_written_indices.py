"""Products see what was written into the index arrays of their matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg

from ..devices import Device
from .products import F16, F32, F64, Bsr, Case, matrix, numbers

BLOCKS = [((16, 16), F16), ((64, 64), F16), ((3, 3), F64)]


def made(device: Device, block: tuple[int, int], dtype: Any) -> Any:
    device.needs("sm_80")
    return matrix(np.random.default_rng(7), Case(dtype, block, 32, rows=4, cols=4)).on(device)


def told(device: Device, A: Any) -> Bsr:
    """The matrix as its arrays tell."""
    return Bsr(*(device.asnumpy(x) for x in (A.data, A.indices, A.indptr)), A.shape)


def multiply(device: Device, A: Any, transposed: bool) -> np.ndarray[Any, Any]:
    """The product with small integers, which is that of what the arrays tell."""
    dense = told(device, A).dense
    dense = dense.T if transposed else dense
    B = numbers(np.random.default_rng(8), (dense.shape[1], 32), A.dtype)
    got = bg.matmul(A.T if transposed else A, device.asarray(B), out_dtype=F32 if A.dtype == F16 else None)
    want = dense @ B.astype(float)
    np.testing.assert_array_equal(device.asnumpy(got), want)
    return want


def another_row(A: Any) -> None:
    """The last block of a block row becomes the first of the next."""
    A.indptr[2] -= 1


WRITES: dict[str, Callable[[Any], Any]] = {
    "one column": lambda A: A.indices.__setitem__(0, 3 - A.indices[0]),
    "another order": lambda A: A.indices.__setitem__(slice(None), A.indices[::-1].copy()),
    "through a view": lambda A: A.indices[1:].fill(0),
    "an operator": lambda A: A.indices[:1].__isub__(A.indices[:1] - 2),
    "another row": another_row,
}


@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_sees_every_write(block: Any, dtype: Any, transposed: bool, device: Device) -> None:
    A = made(device, block, dtype)
    want = multiply(device, A, transposed)
    for name, write in WRITES.items():
        before = want
        write(A)
        want = multiply(device, A, transposed)
        assert not np.array_equal(before, want), name


def test_a_matrix_is_prepared_once_until_its_memory_is_handed_out(device: Device) -> None:
    """Whoever has the address may write unseen: from then on each product prepares the matrix anew."""
    A = made(device, (64, 64), F16)
    multiply(device, A, False)
    multiply(device, A, True)
    with device.kernels() as kernels:
        multiply(device, A, False)
        multiply(device, A, True)
    assert not [name for name in kernels if name.startswith("gemm")]
    address = A.indices.data.ptr
    for column in (0, 1):
        A.indices.view(type=device.cupy.ndarray)[0] = column  # as a kernel of somebody else does
        with device.kernels() as kernels:
            multiply(device, A, False)
        assert [name for name in kernels if name.startswith("gemm")]
    assert address == A.indices.data.ptr


@pytest.mark.sanitizer
@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("name", "wrong"), [("indices", 1 << 30), ("indices", -5), ("indptr", 1 << 30), ("indptr", -5)]
)
def test_an_index_out_of_range_is_clamped(
    block: Any, dtype: Any, transposed: bool, name: str, wrong: int, device: Device
) -> None:
    """Nothing outside of the arrays is read or written, and every row of the result is."""
    A = made(device, block, dtype)
    multiply(device, A, transposed)
    getattr(A, name)[1] = wrong
    X = A.T if transposed else A
    out = device.asarray(np.full((X.shape[0], 32), np.nan, dtype))
    bg.matmul(X, device.asarray(np.ones((X.shape[1], 32), dtype)), out=out)
    assert np.isfinite(device.asnumpy(out).astype(float)).all()
