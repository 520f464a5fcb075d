"""Plans of products on the CPU: the pattern is found without a list of pairs, which is made when BLAS needs it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.base import Blocks
from bsrgemm._backend.registry import host
from bsrgemm._products.host import HostProducts

ENGINE = HostProducts(host())


def blocks(rows: int, cols: int, block: tuple[int, int], seed: int, index: Any = np.int32) -> Blocks:
    """Blocks at random places without an order, some of them twice; some rows are empty."""
    rng = np.random.default_rng([seed, rows, cols])
    row = np.sort(rng.integers(0, rows, rows * 2)) if rows else np.zeros(0, int)
    col = rng.integers(0, max(cols, 1), len(row)) if cols else np.zeros(0, int)
    row = row[: len(col)]
    pointers = np.searchsorted(row, np.arange(rows + 1)).astype(index)
    return Blocks(rng.standard_normal((len(row), *block)), col.astype(index), pointers)


@pytest.mark.parametrize("sides", [(1, 1, 1), (7, 5, 9), (30, 40, 20), (5, 3, 0), (0, 4, 4), (4, 0, 3)])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_the_pattern_is_that_of_the_sorted_pairs(sides: tuple[int, int, int], index: Any) -> None:
    rows, inner, cols = sides
    a, b = blocks(rows, inner, (2, 3), 0, index), blocks(inner, cols, (3, 2), 1, index)
    found, want = ENGINE.planned_pattern(a, b, cols), ENGINE.product_pattern(a, b, cols)
    assert found.pairs == want.pairs == len(want.left)
    for x, y in ((found.indices, want.indices), (found.indptr, want.indptr), *zip(found, want, strict=True)):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype


def test_pairs_are_listed_if_blas_multiplies_them_and_once() -> None:
    """Small blocks go by SciPy's loop. Arrays that a user writes into later do not matter."""
    rng = np.random.default_rng(0)
    listed: list[int] = []
    original = HostProducts.product_pattern

    def counted(self: Any, *operands: Any) -> Any:
        listed.append(1)
        return original(self, *operands)

    with patch.object(HostProducts, "product_pattern", counted):
        for side, lists in ((2, 0), (40, 1)):
            data = rng.standard_normal((4, side, side))
            A = bg.bsr_array((data, ([0, 0, 1, 2], [0, 2, 1, 0])), shape=(3 * side, 3 * side))
            dense = A.toarray()
            plan = bg.plan(A, A)
            kept = A.copy()
            A.indices[:] = 0
            listed.clear()
            for _ in range(2):
                np.testing.assert_allclose(plan(kept, kept).toarray(), dense @ dense)
            assert len(listed) == lists
            assert plan.blocks == 5 and plan.pairs == 6
