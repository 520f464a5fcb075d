"""A preconditioner says in one line what it is; a hierarchy that cannot be refreshed says what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg

A = bg.bsr_array(2 * np.eye(2000) - np.eye(2000, k=1) - np.eye(2000, k=-1), blocksize=(2, 2))


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (linalg.block_jacobi(A), "<block_jacobi on 'cpu', float64, 2,000 x 2,000, blocks of 2 x 2>"),
        (linalg.chebyshev(A, 4), "<chebyshev on 'cpu', float64, 2,000 x 2,000, degree 4>"),
        (linalg.block_ssor(A, order="natural"), "<block_ssor on 'cpu', float64, 2,000 x 2,000, 1,000 groups>"),
        (linalg.ilu0(A.astype("complex64")), "<ilu0 on 'cpu', complex64, 2,000 x 2,000, {} groups>"),
        (linalg.ic0(A.astype("float32")), "<ic0 on 'cpu', float32, 2,000 x 2,000, {} groups>"),
        (linalg.ilu0(bg.eye(4, blocksize=(2, 2))), "<ilu0 on 'cpu', float64, 4 x 4, 1 group>"),
    ],
)
def test_a_preconditioner_is_shown_in_one_line(made: Any, shown: str) -> None:
    assert repr(made) == str(made) == shown.format(getattr(made, "groups", None))


def test_hierarchies_show_their_levels() -> None:
    M = linalg.smoothed_aggregation(A, max_coarse=100)
    rows = ", ".join(f"{level.shape[0]:,}" for level in M.levels)
    assert repr(M) == f"<Multigrid on 'cpu', float64, levels of {rows} rows>"
    ml = SimpleNamespace(levels=[SimpleNamespace(A=A.tocsr()[:20, :20])])
    assert repr(linalg.from_pyamg(ml)) == "<Multigrid on 'cpu', float64, levels of 20 rows>"


def test_a_preconditioner_of_a_user_is_shown_by_its_class() -> None:
    class Scaled(linalg.Preconditioner):
        def __init__(self) -> None:
            self._made_of(A)

        def _apply(self, r: Any) -> Any:
            return r / 2

    assert repr(Scaled()) == "<Scaled on 'cpu', float64, 2,000 x 2,000>"


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (A[:100, :100], ValueError, "A: wanted the shape of the matrix of the hierarchy, (2000, 2000), got (100, 100)"),
        (A.tobsr((4, 4)), ValueError, "A: wanted the blocksize of the matrix of the hierarchy, (2, 2), got (4, 4)"),
        (A @ A, ValueError, "A: wanted the blocks of the matrix of the hierarchy, got other indices"),
        (A.astype("float32"), TypeError, "A: wanted float64 on 'cpu', got float32 on 'cpu'"),
    ],
)
def test_a_hierarchy_says_how_to_make_one_of_another_matrix(other: Any, error: type[Exception], text: str) -> None:
    M = linalg.smoothed_aggregation(A)
    with pytest.raises(error) as caught:
        M.refresh(other)
    assert str(caught.value) == f"{text}; smoothed_aggregation(A) makes a new hierarchy"
    assert linalg.smoothed_aggregation(other).shape == other.shape
