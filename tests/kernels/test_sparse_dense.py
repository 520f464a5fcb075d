"""All that is promised of products of two BSR matrices that are computed as dense ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._products import sparse_dense, spgemm_pattern
from bsrgemm._products.operand import operand_of
from bsrgemm._products.sparse_dense import SparseDense

from ..devices import Device
from .products import BF16, C64, C128, F16, F32, F64, Bsr, exact, numbers


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    device.needs("sm_90a")


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every product of two BSR matrices be a dense one."""
    monkeypatch.setattr(SparseDense, "other_seconds", lambda self, card: np.inf)
    sparse_dense._chosen.cache_clear()
    yield
    sparse_dense._chosen.cache_clear()


def bsr(rng: np.random.Generator, there: Any, block: tuple[int, int], dtype: Any, index: str = "i4") -> Bsr:
    """A matrix of small integers that stores blocks there."""
    row, col = np.nonzero(there)
    indptr = np.searchsorted(row, np.arange(len(there) + 1)).astype(index)
    shape = (there.shape[0] * block[0], there.shape[1] * block[1])
    return Bsr(numbers(rng, (len(row), *block), dtype), col.astype(index), indptr, shape)


def check(device: Device, A: Bsr, B: Bsr, pattern: Any) -> list[str]:
    """Compare ``A @ B`` with the product of both as dense matrices, and its pattern with another one."""
    with device.kernels() as kernels:
        for _ in range(2):  # the second one is a known call
            got = A.on(device) @ B.on(device)
    row, col = np.nonzero(pattern)
    np.testing.assert_array_equal(device.asnumpy(got.indices), col)
    np.testing.assert_array_equal(device.asnumpy(got.indptr), np.searchsorted(row, np.arange(len(pattern) + 1)))
    want = (A.dense.astype(exact(A.data.dtype)) @ B.dense.astype(exact(A.data.dtype))).astype(A.data.dtype)
    rows, cols = pattern.shape
    blocks = want.reshape(rows, A.data.shape[1], cols, B.data.shape[2]).swapaxes(1, 2)[row, col]
    np.testing.assert_array_equal(device.asnumpy(got.data), blocks)
    return kernels


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("dtype", "block", "N"),
    [(F16, (7, 9), 5), (BF16, (40, 24), 8), (F32, (3, 3), 3), (F64, (20, 10), 16), (C64, (5, 6), 7), (C128, (4, 3), 1)],
    ids=str,
)
@pytest.mark.parametrize("index", ["i4", "i8"])
def test_blocks_of_a_dense_product_are_those_that_meet(
    dtype: Any, block: tuple[int, int], N: int, index: str, device: Device, dense: None, rng: np.random.Generator
) -> None:
    """Some rows of either are empty, and columns of the result are more than a word of bits has."""
    left, right = rng.random((9, 6)) < 0.4, rng.random((6, 37)) < 0.3
    left[2], right[1], left[:, 3] = False, False, True
    A, B = bsr(rng, left, block, dtype, index), bsr(rng, right, (block[1], N), dtype, index)
    kernels = check(device, A, B, left.astype(int) @ right > 0)
    assert kernels.count("take_blocks") == 2 and "list_at_once" not in kernels


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 1025, 2100])
def test_patterns_of_many_columns(columns: int, device: Device, dense: None, rng: np.random.Generator) -> None:
    left, right = rng.random((40, 50)) < 0.2, rng.random((50, columns)) < 0.1
    check(device, bsr(rng, left, (1, 1), F32), bsr(rng, right, (1, 1), F32), left.astype(int) @ right > 0)


def test_zeros_that_are_not_stored_meet_no_infinity(device: Device, dense: None, rng: np.random.Generator) -> None:
    """An infinity or NaN of one matrix reaches what it is multiplied by, and nothing else."""
    left, right = rng.random((8, 7)) < 0.5, rng.random((7, 9)) < 0.5
    A, B = bsr(rng, left, (3, 4), F32), bsr(rng, right, (4, 5), F32)
    A.data[1, 0, 1], A.data[4, 2, 3], B.data[3, 1, 2], B.data[5, 0, 0] = np.inf, np.nan, -np.inf, np.nan
    wide = np.zeros((8, 9, 3, 5))
    with np.errstate(all="ignore"):
        for i in range(8):
            for p in range(A.indptr[i], A.indptr[i + 1]):
                for q in range(B.indptr[A.indices[p]], B.indptr[A.indices[p] + 1]):
                    wide[i, B.indices[q]] += A.data[p].astype(float) @ B.data[q].astype(float)
    got = A.on(device) @ B.on(device)
    np.testing.assert_array_equal(device.asnumpy(got.data), wide[np.nonzero(left.astype(int) @ right > 0)])
    assert np.isfinite(device.asnumpy(got.data)).any() and not np.isfinite(device.asnumpy(got.data)).all()


def test_a_block_that_is_stored_twice_counts_twice(device: Device, dense: None, rng: np.random.Generator) -> None:
    """In A it is added up; where B has one, the pairs are listed."""
    there = np.ones((4, 4), bool)
    A, B = bsr(rng, there, (3, 3), F32), bsr(rng, there, (3, 3), F32)
    for twice, kernel in ((A, "take_blocks"), (B, "list_at_once")):
        twice.indices[5] = twice.indices[4]
        with device.kernels() as kernels:
            got = A.on(device) @ B.on(device)
        np.testing.assert_array_equal(device.asnumpy(got.todense()), A.dense @ B.dense)
        assert kernel in kernels


def test_columns_outside_of_the_matrix_touch_nothing(device: Device, dense: None, rng: np.random.Generator) -> None:
    there = np.ones((4, 4), bool)
    A, B = bsr(rng, there, (3, 3), F32), bsr(rng, there, (3, 3), F32)
    on = A.on(device), B.on(device)
    for x, matrix in zip((A, B), on, strict=True):
        x.indices[[3, 9]] = -1, 2**30
        matrix.indices[[3, 9]] = device.asarray(np.array([-1, 2**30], np.int32))
    np.testing.assert_array_equal(device.asnumpy((on[0] @ on[1]).todense()), A.dense @ B.dense)


def test_a_product_without_a_block(device: Device, dense: None, rng: np.random.Generator) -> None:
    left, right = np.zeros((5, 4), bool), np.zeros((4, 3), bool)
    left[:, 1] = right[2] = True
    check(device, bsr(rng, left, (2, 3), F16), bsr(rng, right, (3, 4), F16), np.zeros((5, 3), bool))


def test_what_is_predicted_to_be_faster_is_chosen(device: Device, rng: np.random.Generator) -> None:
    """Many small blocks are a dense product, few are not."""
    said = {}
    for share in (0.5, 0.004):
        there = rng.random((500, 500)) < share
        A = bsr(rng, there, (1, 1), F16).on(device)
        with device.kernels() as kernels:
            A @ A
        said[share] = "take_blocks" in kernels
    assert said == {0.5: True, 0.004: False}


def test_the_pattern_is_found_where_the_lists_of_pairs_have_it(device: Device, rng: np.random.Generator) -> None:
    left, right = rng.random((70, 33)) < 0.1, rng.random((33, 90)) < 0.1
    A, B = bsr(rng, left, (1, 1), F32).on(device), bsr(rng, right, (1, 1), F32).on(device)
    joining = spgemm_pattern.join(A._blocks, B._blocks, 90, spgemm_pattern.row_bits(operand_of(B), B._blocks, 90))
    assert joining is not None
    blocks = joining.finish()
    assert blocks is not None
    listed = spgemm_pattern.product_pattern(A._blocks, B._blocks, 90)
    assert listed is not None and blocks == len(listed.indices)
    for got, want in zip(joining.index(blocks), listed[3:], strict=True):
        np.testing.assert_array_equal(device.asnumpy(got), device.asnumpy(want))


def test_a_matrix_of_other_dtypes_lists_its_pairs(device: Device, dense: None, rng: np.random.Generator) -> None:
    there = np.ones((3, 3), bool)
    A = bsr(rng, there, (2, 2), F32).on(device)
    with device.kernels() as kernels:
        A @ bsr(rng, there, (2, 2), F64).on(device)
        A.astype(np.int32) @ A.astype(np.int32)
    assert "take_blocks" not in kernels


@pytest.mark.parametrize("side", [3, 16])
@pytest.mark.parametrize("way", ["SparseDense", "BlockProducts", "SpgemmSimt"])
def test_the_third_product_of_two_matrices_finds_no_pattern(
    way: str, side: int, device: Device, rng: np.random.Generator
) -> None:
    """Values may change, and results have index arrays of their own; another pattern is found anew."""
    left, right = rng.random((5, 6)) < 0.5, rng.random((6, 7)) < 0.5
    A, B = bsr(rng, left, (side, 4), F32), bsr(rng, right, (4, side), F32)
    on = A.on(device), B.on(device)
    found = []
    with force_kernel(way):
        for n in range(5):
            with device.kernels() as kernels:
                C = on[0] @ on[1]
            found.append("join_rows" in kernels or "list_at_once" in kernels)
            np.testing.assert_array_equal(device.asnumpy(C.todense()), A.dense @ B.dense)
            C.indices[:] = 0
            if n == 3:
                A.indices[:2] = A.indices[1::-1]
                on[0].indices[:2] = device.asarray(A.indices[:2])
            else:
                A.data *= 2
                on[0].data *= 2
    assert found == [True, True, False, False, True]


def test_a_large_pattern_is_not_kept(
    device: Device, dense: None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spgemm_pattern, "_MOST_KEPT", 0)
    there = np.ones((3, 3), bool)
    A, B = bsr(rng, there, (2, 2), F32), bsr(rng, there, (2, 2), F32)
    on = A.on(device), B.on(device)
    for _ in range(4):
        with device.kernels() as kernels:
            C = on[0] @ on[1]
        assert "set_bits" in kernels and "join_rows" in kernels
        np.testing.assert_array_equal(device.asnumpy(C.todense()), A.dense @ B.dense)


def test_a_kept_pattern_keeps_no_matrix(device: Device, dense: None, rng: np.random.Generator) -> None:
    there = np.ones((3, 3), bool)
    A, B = (bsr(rng, there, (2, 2), F32).on(device) for _ in range(2))
    for _ in range(3):
        A @ B
    gone = [ref(operand_of(x)) for x in (A, B)]
    del A, B
    gc.collect()
    assert [x() for x in gone] == [None, None]
