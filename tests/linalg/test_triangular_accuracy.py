"""Solutions with triangles whose diagonal blocks are badly conditioned, tiny, or narrower than the right-hand side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg


@pytest.mark.parametrize(
    ("dense", "b", "wanted"),
    [
        (np.array([[1, 0], [7e6, 3]], np.float32), [1.0, 7e6 + 3], [1, 1]),
        (np.array([[1.0, 0], [1e200, 1e-200]]), [1.0, 1e200], [1, 0]),
    ],
    ids=["wider right-hand side", "overflow"],
)
def test_a_triangle_is_divided_after_the_subtraction_where_that_matters(dense: Any, b: Any, wanted: Any) -> None:
    A = bg.bsr_array(dense, blocksize=(1, 1))
    np.testing.assert_allclose(linalg.spsolve_triangular(A, np.array(b)), wanted, rtol=1e-6)
    upper = bg.bsr_array(dense[::-1, ::-1].copy(), blocksize=(1, 1))
    found = linalg.spsolve_triangular(upper, np.array(b[::-1]), lower=False)
    np.testing.assert_allclose(found, wanted[::-1], rtol=1e-6)


@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.parametrize(("condition", "size"), [(10.0, 1.0), (1e4, 1e-4), (1e6, 1e-8)])
def test_ill_conditioned_diagonal_blocks_leave_small_residuals(condition: float, size: float, columns: Any) -> None:
    rng = np.random.default_rng(3)
    R = 4
    dense = np.zeros((2 * R, 2 * R))
    dense[R:, :R] = rng.standard_normal((R, R))
    for own in (slice(0, R), slice(R, 2 * R)):
        u, v = (np.linalg.qr(rng.standard_normal((R, R)))[0] for _ in range(2))
        dense[own, own] = u * np.geomspace(1, 1 / condition, R) * size @ v
    b = dense @ rng.standard_normal((2 * R, *columns))
    x = linalg.spsolve_triangular(bg.bsr_array(dense, blocksize=(R, R)), b)
    scale = abs(dense).sum(axis=1).max() * abs(x).max() + abs(b).max()
    assert abs(dense @ x - b).max() <= 1e-15 * scale


def test_guesses_that_are_no_numbers_are_refused_for_a_batch() -> None:
    A = bg.bsr_array(4 * np.eye(8) - np.eye(8, k=1) - np.eye(8, k=-1), blocksize=(2, 2))
    with pytest.raises(TypeError, match="x0: wanted numbers, got object"):
        linalg.cg(bg.bsr_batch([A, 2 * A]), np.ones((2, 8)), x0=[[None] * 8] * 2)


def test_a_preconditioner_of_a_user_that_is_not_made_yet_has_a_name() -> None:
    class Mine(linalg.Preconditioner):
        def _apply(self, r: Any) -> Any:
            return r

    assert "Mine object at" in repr(Mine())
