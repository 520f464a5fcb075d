"""What vstack, hstack, block_array, block_diag and kron refuse, and how they say it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg

from ..strategies import Place, assert_values, each_place
from .random_matrices import HERE

pytestmark = pytest.mark.fake


def matrix(place: Place, shape: tuple[int, int] = (4, 6), blocksize: tuple[int, int] = (2, 3)) -> Any:
    return bg.bsr_array(place.put(np.ones(shape)), blocksize=blocksize)


def elsewhere(place: Place) -> Place:
    return Place("cuda" if place.is_host else "cpu")


@dataclass(frozen=True)
class Refused:
    """`attempt` raises `error` with `text` in its message."""

    id: str
    attempt: Callable[[Place], Any]
    error: type[Exception]
    text: str


REFUSED = [
    # sequences
    Refused("a matrix alone", lambda p: bg.vstack(matrix(p)), TypeError, "blocks: wanted a sequence of matrices, got "),
    Refused("an array alone", lambda p: bg.hstack(p.put(np.ones((2, 2)))), TypeError, "blocks: wanted a sequence"),
    Refused("a number", lambda p: bg.block_diag(3), TypeError, "mats: wanted a sequence of matrices, got int"),  # type: ignore[arg-type]
    Refused(
        "a flat list as a grid",
        lambda p: bg.block_array([matrix(p)]),
        TypeError,
        "grid[0]: wanted a sequence of matrices",
    ),
    Refused(
        "rows of different lengths",
        lambda p: bg.block_array([[matrix(p), None], [None, None], [matrix(p)]]),
        ValueError,
        "grid: wanted rows of one length, got 2 entries in grid[0] and 1 in grid[2]",
    ),
    # none of ours
    Refused(
        "nothing",
        lambda p: bg.vstack([]),
        TypeError,
        "blocks: wanted at least one bsr_array or bsr_matrix, got nothing",
    ),
    Refused("an empty grid", lambda p: bg.block_array([]), TypeError, "grid: wanted at least one bsr_array"),
    Refused("a grid of None", lambda p: bg.block_array([[None]]), TypeError, "grid: wanted at least one bsr_array"),
    Refused(
        "none of ours",
        lambda p: bg.block_diag([p.put(np.ones((2, 2))), p.sparse("csr", sp.csr_array(np.eye(2)))]),
        TypeError,
        "mats: wanted at least one bsr_array or bsr_matrix, got ndarray, csr_array",
    ),
    Refused(
        "none of ours in kron",
        lambda p: bg.kron(p.put(np.ones((2, 2))), p.sparse("csr", sp.csr_array(np.eye(2)))),
        TypeError,
        "A, B: wanted a bsr_array or bsr_matrix among the operands, got ndarray and csr_array",
    ),
    # other places
    Refused(
        "a dense array elsewhere",
        lambda p: bg.vstack([elsewhere(p).put(np.ones((2, 6))), matrix(p)]),
        TypeError,
        "blocks[0]: a {other} ndarray cannot meet a matrix on '{here}': nothing is moved silently. {bring}",
    ),
    Refused(
        "one of ours elsewhere",
        lambda p: bg.block_array([[matrix(p), None], [None, matrix(elsewhere(p))]]),
        TypeError,
        "grid[1][1]: a bsrgemm {there}_bsr_array cannot meet a matrix on '{here}': nothing is moved silently. {bring}",
    ),
    Refused(
        "kron elsewhere",
        lambda p: bg.kron(matrix(p), elsewhere(p).put(np.ones((2, 2)))),
        TypeError,
        "B: a {other} ndarray cannot meet a matrix on '{here}': nothing is moved silently. {bring}",
    ),
    # no matrices
    Refused(
        "None in a stack",
        lambda p: bg.hstack([matrix(p), None]),
        TypeError,
        "blocks[1]: wanted a matrix or a dense 2-D array on '{here}', got NoneType",
    ),
    Refused(
        "an object",
        lambda p: bg.kron(object(), matrix(p)),
        TypeError,
        "A: wanted a matrix or a dense 2-D array on '{here}'",
    ),
    Refused(
        "a vector",
        lambda p: bg.vstack([matrix(p), p.put(np.ones(6))]),
        ValueError,
        "blocks[1]: wanted 2 dimensions, got 1 in shape (6,)",
    ),
    Refused(
        "a cube in kron",
        lambda p: bg.kron(matrix(p), p.put(np.ones((2, 2, 2)))),
        ValueError,
        "B: wanted 2 dimensions, got 3 in shape (2, 2, 2)",
    ),
    # block sizes
    Refused(
        "two block sizes",
        lambda p: bg.vstack([p.put(np.ones((4, 6))), matrix(p), matrix(p), matrix(p, blocksize=(1, 2))]),
        ValueError,
        "blocks: wanted one block size, got (2, 3) in blocks[1] and (1, 2) in blocks[3]; "
        "convert one, for example blocks[3].tobsr((2, 3))",
    ),
    Refused(
        "a transpose has other blocks",
        lambda p: bg.block_diag([matrix(p), matrix(p).T]),
        ValueError,
        "mats: wanted one block size, got (2, 3) in mats[0] and (3, 2) in mats[1]",
    ),
    Refused(
        "an array that our blocks do not divide",
        lambda p: bg.vstack([matrix(p), p.put(np.ones((3, 6)))]),
        ValueError,
        "blocks[1]: shape (3, 6) does not divide into blocks of (2, 3), those of blocks[0]",
    ),
    Refused(
        "a CSR that our blocks do not divide",
        lambda p: bg.block_array([[p.sparse("csr", sp.csr_array(np.ones((4, 4)))), matrix(p)]]),
        ValueError,
        "grid[0][0]: shape (4, 4) does not divide into blocks of (2, 3), those of grid[0][1]",
    ),
    # shapes
    Refused(
        "different columns",
        lambda p: bg.vstack([matrix(p), matrix(p, (4, 9))]),
        ValueError,
        "blocks[1]: wanted 6 columns, as blocks[0] has, got 9",
    ),
    Refused(
        "different rows",
        lambda p: bg.hstack([matrix(p), matrix(p), matrix(p, (2, 6))]),
        ValueError,
        "blocks[2]: wanted 4 rows, as blocks[0] has, got 2",
    ),
    Refused(
        "different rows in a grid",
        lambda p: bg.block_array([[None, matrix(p)], [matrix(p), matrix(p, (6, 6))]]),
        ValueError,
        "grid[1][1]: wanted 4 rows, as grid[1][0] has, got 6",
    ),
    Refused(
        "different columns in a grid",
        lambda p: bg.block_array([[None, matrix(p)], [matrix(p), matrix(p, (4, 3))]]),
        ValueError,
        "grid[1][1]: wanted 6 columns, as grid[0][1] has, got 3",
    ),
    Refused(
        "rows beside none",
        lambda p: bg.hstack([bg.bsr_array((0, 3), blocksize=(2, 3), device=p.backend.name), matrix(p)]),
        ValueError,
        "blocks[1]: wanted 0 rows, as blocks[0] has, got 4",
    ),
    Refused(
        "more elements than can be counted",
        lambda p: bg.kron(*[bg.bsr_array((2**31, 2**31), blocksize=(2**20, 2**20), device=p.backend.name)] * 2),
        ValueError,
        "A, B: (4611686018427387904, 4611686018427387904) has more elements than a 64-bit integer can count",
    ),
    # dtypes
    Refused(
        "a dtype that nobody holds",
        lambda p: bg.vstack([matrix(p)], dtype="M8[s]"),
        TypeError,
        "dtype: does not support",
    ),
    Refused(
        "NaN as an integer",
        lambda p: bg.vstack([matrix(p) * np.nan], dtype="int32"),
        ValueError,
        "dtype: cannot cast NaN or infinity to int32",
    ),
]


@each_place
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_errors_name_the_place_what_came_and_what_is_wanted(place: Place, case: Refused) -> None:
    other = elsewhere(place)
    words = {"here": place.backend.name, "bring": place.backend.bring, "other": "numpy" if other.is_host else "cupy"}
    words["there"] = "host" if other.is_host else "cuda"
    text = case.text
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", value)
    with pytest.raises(case.error, match=re.escape(text)):
        case.attempt(place)


def test_the_host_refuses_dtypes_that_it_does_not_hold() -> None:
    A = matrix(HERE)
    for x in (np.ones((4, 6), object), np.full((4, 6), "a"), np.zeros((4, 6), "M8[s]")):
        with pytest.raises(TypeError, match=r"blocks\[1\]: does not support dtype"):
            bg.hstack([A, x])
        with pytest.raises(TypeError, match="B: does not support dtype"):
            bg.kron(A, x)


def test_long_double_stays_on_the_host() -> None:
    A = bg.bsr_array(np.ones((2, 2), np.longdouble), blocksize=(1, 1))
    assert bg.vstack([A, A]).dtype == bg.kron(A, np.ones((1, 1), np.float16)).dtype == np.longdouble


def test_arrays_of_the_other_byte_order_are_taken() -> None:
    x = np.arange(24.0).reshape(4, 6)
    result = bg.vstack([matrix(HERE), x.astype(">f8")])
    assert result.dtype == np.float64 and result.dtype.isnative
    assert_values(result.toarray(), np.vstack([np.ones((4, 6)), x]))
    assert_values(bg.kron(matrix(HERE), x.astype(">f8")).toarray(), np.kron(np.ones((4, 6)), x))
