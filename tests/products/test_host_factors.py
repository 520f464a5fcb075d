"""Factors, index dtypes and overlaps of products on the host, and structures that a plan or a pattern compares."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.registry import Backend
from bsrgemm._products import host as products_host


def matrix(dtype: Any, block: tuple[int, int] = (2, 3)) -> bg.bsr_array:
    """Small integers; a block twice, an empty block row."""
    rng = np.random.default_rng(2)
    data = rng.integers(-3, 4, (5, *block)).astype(dtype)
    indices, indptr = np.array([1, 0, 1, 2, 0], np.int32), np.array([0, 3, 3, 5], np.int32)
    return bg.bsr_array((data, indices, indptr), shape=(3 * block[0], 3 * block[1]))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "complex128"])
@pytest.mark.parametrize("width", [1, 2, 9], ids="{} columns".format)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_alpha_and_beta_counts_in_the_loops_and_in_panels(
    dtype: str, width: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = matrix(dtype).T if transposed else matrix(dtype)
    rng = np.random.default_rng(3)
    B, C = (rng.integers(-3, 4, (n, width)).astype(dtype) for n in A.shape[::-1])
    dense = A.toarray()
    numbers = (-2, -1, 0, 1, 3)
    for flops in (products_host._PANEL_FLOPS, 0):
        monkeypatch.setattr(products_host, "_PANEL_FLOPS", flops)
        for alpha, beta in itertools.product(numbers, numbers):
            out = C.copy()
            assert bg.matmul(A, B, out=out, alpha=alpha, beta=beta) is out
            np.testing.assert_array_equal(out, alpha * (dense @ B) + beta * C, err_msg=f"{alpha}, {beta}")


def test_columns_beyond_31_bits_are_counted_in_64() -> None:
    """Blocks as CSR, whose columns are elements: their indices fit 32 bits, the elements' do not."""
    indptr, indices = np.array([0, 2, 3], np.int32), np.array([0, 1 << 30, 5], np.int32)
    values = np.arange(12.0).reshape(3, 2, 2)
    starts, columns, flat = products_host._as_csr(indptr, indices, values, (1 << 30) + 1)
    assert starts.dtype == columns.dtype == np.int64
    assert starts.tolist() == [0, 4, 8, 10, 12]
    assert columns.tolist() == [*[0, 1, 1 << 31, (1 << 31) + 1] * 2, *[10, 11] * 2]
    assert flat.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10, 11]
    narrow = products_host._as_csr(indptr, np.array([0, 1, 2], np.int32), values, (1 << 30) - 1)
    assert narrow[0].dtype == narrow[1].dtype == np.int32


@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
def test_out_must_not_lie_over_an_array_of_the_matrix(name: str) -> None:
    rows = 6
    data, indices, indptr = np.ones((rows, 1, 1)), np.arange(rows), np.arange(rows + 1)
    A = bg.bsr_array((data, indices, indptr), shape=(rows, rows))
    assert A.indices.dtype == np.int64
    out = getattr(A, name).reshape(-1)[-rows:].view(np.float64)
    before = [x.copy() for x in (A.data, A.indices, A.indptr)]
    with pytest.raises(ValueError, match=rf"out: overlaps A\.{name}"):
        bg.matmul(A, np.ones(rows), out=out)
    for x, kept in zip((A.data, A.indices, A.indptr), before, strict=True):
        np.testing.assert_array_equal(x, kept)


def two_blocks(backend: Backend, indptr: list[int]) -> Any:
    A = bg.bsr_array((np.ones((2, 2, 2)), np.array([0, 1]), np.array(indptr)), shape=(4, 4))
    return A if backend.name == "cpu" else A.to_device(backend.name)


@pytest.mark.parametrize("which", [0, 1])
def test_a_plan_refuses_the_same_columns_in_other_rows(which: int, backend: Backend) -> None:
    A, other = two_blocks(backend, [0, 1, 2]), two_blocks(backend, [0, 2, 2])
    plan = bg.plan(A, A)
    operands = [A, A]
    operands[which] = other
    with pytest.raises(ValueError, match=f"{'AB'[which]}: wanted the blocks of the plan, got other indptr"):
        plan(*operands)


def test_a_pattern_refuses_a_result_with_the_same_columns_in_other_rows(backend: Backend) -> None:
    A, other = two_blocks(backend, [0, 1, 2]), two_blocks(backend, [0, 2, 2])
    X = backend.from_host(np.ones((4, 4)))
    with pytest.raises(ValueError, match="out: wanted the blocks of the pattern, got other indptr"):
        bg.sddmm(X, X, A, out=other)
