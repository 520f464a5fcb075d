"""Plans of sparse products: the numbers of ``A @ B`` with whatever values, on the CPU and (marked) on a card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.base import Blocks
from bsrgemm.dtypes import BFLOAT16

PLACES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])]


def matrix(rng: np.random.Generator, rows: int, cols: int, block: tuple[int, int], dtype: Any, device: str) -> Any:
    R, C = block
    there = rng.random((rows, cols)) < 0.4
    there[0] = False
    i, j = np.nonzero(there)
    order = rng.permutation(len(i))  # unsorted, and some twice
    i, j = np.concatenate([i[order], i[:2]]), np.concatenate([j[order], j[:2]])
    data = (10 * rng.standard_normal((len(i), R, C))).astype(dtype)
    return bg.bsr_array((data, (i, j)), shape=(rows * R, cols * C), device=device)


def dense(x: Any) -> np.ndarray:
    y = x.toarray()
    return y.get() if hasattr(y, "get") else y


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "float16", BFLOAT16, "int32"], ids=str)
@pytest.mark.parametrize("block", [(1, 1, 1), (2, 3, 4), (16, 16, 16)], ids=str)
def test_a_plan_gives_the_product_of_any_values(block, dtype, device) -> None:
    rng = np.random.default_rng(1)
    R, K, C = block
    A, B = matrix(rng, 7, 6, (R, K), dtype, device), matrix(rng, 6, 9, (K, C), dtype, device)
    plan = bg.plan(A, B)
    for factor in (1, 2, -3):
        A.data *= factor
        got, want = plan(A, B), A @ B
        assert got.shape == plan.shape == (7 * R, 9 * C) and got.blocksize == plan.blocksize == (R, C)
        assert got.dtype == want.dtype and got.has_canonical_format
        exact = np.promote_types(np.float64, A.dtype) if np.dtype(dtype) != BFLOAT16 else np.float64
        a, b = (dense(x).astype(exact) for x in (A, B))
        tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}.get(str(np.dtype(dtype)), 1e-12)
        error = np.abs(dense(got).astype(exact) - a @ b)
        assert (error <= tolerance * (np.abs(a) @ np.abs(b)) + tolerance).all()
    assert plan.pairs >= plan.blocks == len(got.indices)


def test_results_share_their_index_arrays_and_write_to_none_of_ours() -> None:
    A = bg.bsr_array(np.kron([[1, 0], [1, 1]], np.ones((2, 2))), blocksize=(2, 2))
    plan = bg.plan(A, A)
    first, second = plan(A, A), plan(A, A)
    assert first.indices is second.indices and first.indptr is second.indptr and first.data is not second.data
    other = A.copy()  # equal arrays that are others
    other.data[...] = 5
    np.testing.assert_array_equal(plan(other, A).toarray(), other.toarray() @ A.toarray())


def test_values_that_cancel_out_keep_their_blocks() -> None:
    A = bg.bsr_array(np.array([[1.0, -1.0]]), blocksize=(1, 1))
    B = bg.bsr_array(np.array([[1.0], [1.0]]), blocksize=(1, 1))
    got = bg.plan(A, B)(A, B)
    assert got.nnz == 1 and got.toarray()[0, 0] == 0


def test_empty_patterns() -> None:
    A = bg.bsr_array((4, 6), blocksize=(2, 3), dtype="float64")
    B = bg.bsr_array((6, 8), blocksize=(3, 4), dtype="float64")
    plan = bg.plan(A, B)
    assert plan.blocks == plan.pairs == 0
    assert plan(A, B).shape == (4, 8) and plan(A, B).nnz == 0


def _wrong() -> dict[str, tuple[Any, type[Exception], str]]:
    A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    plan = bg.plan(A, A)
    moved = bg.bsr_array(np.eye(4)[::-1].copy(), blocksize=(2, 2))
    twice = bg.bsr_array((np.ones((2, 2, 2), np.int8), ([0, 0], [0, 0])), shape=(2, 2))
    wide = bg.bsr_array(np.ones((2, 2), np.int32), blocksize=(2, 2))
    return {
        "no matrix": (lambda: bg.plan(np.eye(4), A), TypeError, "A: wanted a bsr_array or bsr_matrix, got ndarray"),
        "shapes": (lambda: bg.plan(A, bg.bsr_array(np.eye(6), blocksize=(2, 2))), ValueError, "dimension mismatch"),
        "blocks": (lambda: bg.plan(A, A.tobsr((1, 1))), ValueError, "B: wanted blocks of 2 rows"),
        "other matrix": (lambda: plan(A, np.eye(4)), TypeError, "B: wanted a bsr_array or bsr_matrix on 'cpu'"),
        "other shape": (lambda: plan(bg.bsr_array(np.eye(6), blocksize=(2, 2)), A), ValueError, "A: wanted the shape"),
        "other blocksize": (lambda: plan(A, A.tobsr((4, 4))), ValueError, "B: wanted the blocksize of the plan"),
        "other blocks": (lambda: plan(moved, A), ValueError, "A: wanted the blocks of the plan, got other indices"),
        "duplicates": (lambda: bg.plan(twice, wide)(twice, wide), ValueError, "A: holds a block twice, in int8"),
    }


@pytest.mark.parametrize("case", _wrong())
def test_bad_input(case) -> None:
    call, error, text = _wrong()[case]
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


def test_patterns_of_2_to_31_block_rows_are_left_to_array_code() -> None:
    """Warps claim rows by a counter of 31 bits, and the list of rows is as long as the index array alone."""
    spgemm_pattern = pytest.importorskip("bsrgemm._products.spgemm_pattern")
    long, none = np.broadcast_to(np.int32(0), 2**31 + 1), np.zeros(0, np.int32)
    assert spgemm_pattern._patterns(Blocks(none, none, long), Blocks(none, none, np.zeros(2, np.int32)), 1) is None
