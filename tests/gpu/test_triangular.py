"""Solutions with triangles on a card: diagonal blocks that are badly conditioned, tiny, or narrower than b."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg

pytestmark = pytest.mark.gpu


def triangle(rng: Any, rows: int, R: int, condition: float, lower: bool) -> Any:
    """Pairs of block rows, the second of which has a block beside its diagonal block of this condition.

    The worse the diagonal blocks are conditioned, the smaller they are: to divide the other block by them costs digits.
    """
    dense = np.zeros((rows * R, rows * R))
    for i in range(rows):
        own = slice(i * R, i * R + R)
        if i % 2:
            dense[own, i * R - R : i * R] = rng.standard_normal((R, R))
        u, v = (np.linalg.qr(rng.standard_normal((R, R)))[0] for _ in range(2))
        dense[own, own] = u * np.geomspace(1, 1 / condition, R) * condition ** (-4 / 3) @ v
    return dense if lower else dense.T.copy()


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("columns", [(), (3,)], ids=str)
@pytest.mark.parametrize("condition", [10.0, 1e6])
@pytest.mark.parametrize("R", [3, 4, 8])
def test_residuals_are_small_whatever_the_condition(
    R: int, condition: float, columns: tuple[int, ...], lower: bool, rng: Any
) -> None:
    import cupy

    dense = triangle(rng, 30, R, condition, lower)
    b = dense @ rng.standard_normal((30 * R, *columns))
    A = bg.bsr_array(dense, blocksize=(R, R)).to_device("cuda")
    x = linalg.spsolve_triangular(A, cupy.asarray(b), lower=lower)
    again = linalg.spsolve_triangular(A, cupy.asarray(b), lower=lower)
    cupy.testing.assert_array_equal(x, again)
    found = x.get()
    scale = abs(dense).sum(axis=1).max() * abs(found).max() + abs(b).max()
    assert abs(dense @ found - b).max() <= 6e-16 * scale


@pytest.mark.parametrize(
    ("dense", "b", "wanted"),
    [
        (np.array([[1, 0], [7e6, 3]], np.float32), [1.0, 7e6 + 3], [1, 1]),
        (np.array([[1.0, 0], [1e200, 1e-200]]), [1.0, 1e200], [1, 0]),
    ],
    ids=["wider right-hand side", "overflow"],
)
def test_a_triangle_is_divided_after_the_subtraction_where_that_matters(dense: Any, b: Any, wanted: Any) -> None:
    import cupy

    A = bg.bsr_array(dense, blocksize=(1, 1)).to_device("cuda")
    x = linalg.spsolve_triangular(A, cupy.array(b))
    np.testing.assert_allclose(x.get(), wanted, rtol=1e-6)
    upper = bg.bsr_array(dense[::-1, ::-1].copy(), blocksize=(1, 1)).to_device("cuda")
    x = linalg.spsolve_triangular(upper, cupy.array(b[::-1]), lower=False)
    np.testing.assert_allclose(x.get(), wanted[::-1], rtol=1e-6)


def test_complex_numbers_and_a_transposed_triangle(rng: Any) -> None:
    import cupy

    dense = triangle(rng, 20, 4, 1e6, True) + 1j * np.diag(rng.standard_normal(76) / 200, -4)
    A = bg.bsr_array(dense, blocksize=(4, 4)).to_device("cuda")
    for matrix, lower in ((A, True), (A.T, False)):
        b = matrix.toarray().get() @ rng.standard_normal(80)
        x = linalg.spsolve_triangular(matrix, cupy.asarray(b), lower=lower)
        wide = matrix.toarray().get()
        scale = abs(wide).sum(axis=1).max() * abs(x.get()).max() + abs(b).max()
        assert abs(wide @ x.get() - b).max() <= 6e-16 * scale
