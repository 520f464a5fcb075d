"""Matrices from a rule: the identity, block diagonals and random blocks, in every backend, against NumPy and scipy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm._backend.base import Backend
from bsrgemm.dtypes import BFLOAT16, BOOL, HALF_DTYPES, HOST_DTYPES

each_dtype = pytest.mark.parametrize("dtype", HOST_DTYPES, ids=str)


def checked(A: Any, backend: Backend, shape: tuple[int, int]) -> Any:
    """The matrix on the host; it is an array of the backend that is as canonical as it says."""
    assert A._backend is backend and isinstance(A, bg.bsr_array) and A.shape == shape and A.has_canonical_format
    A.check_format(full_check=True)
    H = A.get()
    H = bg.bsr_array((H.data, H.indices, H.indptr), shape=H.shape)
    assert H.has_canonical_format and H.indices.dtype == H.indptr.dtype
    return H


# --------------------------------------------------------------------------------------------- eye
@pytest.mark.parametrize("blocksize", [(1, 1), (2, 3), (3, 2), (6, 6)])
@pytest.mark.parametrize("shape", [(6, 6), (6, 12), (12, 6), (0, 6), (0, 0)])
def test_eye_has_ones_on_its_diagonal_and_stores_no_other_block(
    backend: Backend, shape: tuple[int, int], blocksize: tuple[int, int]
) -> None:
    for k in (-20, -12, -7, -6, -2, 0, 1, 5, 6, 11, 12, 30):
        A = checked(bg.eye(*shape, k=k, blocksize=blocksize, device=backend.name), backend, shape)
        np.testing.assert_array_equal(A.toarray(), np.eye(*shape, k=k))
        assert A.blocksize == blocksize and all(block.any() for block in A.data)


@each_dtype
def test_eye_takes_every_dtype(backend: Backend, dtype: Any) -> None:
    if dtype not in backend.dtypes:
        with pytest.raises(TypeError, match=r"^dtype: does not support"):
            bg.eye(4, dtype=dtype, device=backend.name)
        return
    A = checked(bg.eye(4, dtype=dtype, blocksize=(2, 2), device=backend.name), backend, (4, 4))
    assert A.dtype == dtype
    np.testing.assert_array_equal(A.toarray().astype(complex), np.eye(4))


def test_eye_is_square_in_single_elements_by_default() -> None:
    A = bg.eye(3)
    assert A.shape == (3, 3) and A.blocksize == (1, 1) and A.dtype == np.float64 and A.device == "cpu"


def test_wrong_arguments_of_eye_are_told() -> None:
    with pytest.raises(ValueError, match=r"^m, n: wanted two non-negative integers"):
        bg.eye(-1)
    with pytest.raises(ValueError, match="does not divide"):
        bg.eye(5, blocksize=(2, 2))
    with pytest.raises(TypeError, match=r"^k: wanted an integer, got 0\.5"):
        bg.eye(4, k=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^device: "):
        bg.eye(4, device="tpu")


# ------------------------------------------------------------------------------------------- diags
def placed(diagonals: dict[int, Any], grid: tuple[int, int], blocksize: tuple[int, int]) -> Any:
    """The dense matrix with these blocks."""
    R, C = blocksize
    dense = np.zeros((grid[0] * R, grid[1] * C))
    for k, blocks in diagonals.items():
        for j, block in enumerate(blocks):
            i, c = (j, j + k) if k >= 0 else (j - k, j)
            dense[i * R : (i + 1) * R, c * C : (c + 1) * C] = block
    return dense


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (5, 3)])
def test_diags_puts_blocks_on_their_diagonals(backend: Backend, grid: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    R, C = 2, 3
    diagonals = {}
    for k in (1, -2, 0, 2, -1):
        length = len(np.diagonal(np.zeros(grid), k))
        diagonals[k] = rng.random((length, R, C))
    shape = (grid[0] * R, grid[1] * C)
    blocks = [backend.from_host(x) for x in diagonals.values()]
    A = checked(bg.diags(blocks, list(diagonals), shape), backend, shape)
    np.testing.assert_array_equal(A.toarray(), placed(diagonals, grid, (R, C)))
    assert len(A.data) == sum(map(len, diagonals.values()))


def test_one_diagonal_of_blocks_makes_a_square_grid(backend: Backend) -> None:
    D = np.arange(18.0).reshape(3, 2, 3)
    for k in (0, 2, -1):
        A = checked(bg.diags(backend.from_host(D), k), backend, ((3 + abs(k)) * 2, (3 + abs(k)) * 3))
        np.testing.assert_array_equal(A.toarray(), placed({k: D}, (3 + abs(k),) * 2, (2, 3)))
    assert bg.diags(D, device=backend.name)._backend is backend
    B = bg.diags(backend.from_host(D[:, :, :2]))
    np.testing.assert_array_equal(backend.to_host(B.block_diagonal()), D[:, :, :2])


def test_one_block_is_repeated_along_its_diagonal(backend: Backend) -> None:
    D, E = np.arange(8.0).reshape(2, 2, 2), np.full((2, 2), 5.0)
    for one in (E, E[None]):
        A = checked(bg.diags([backend.from_host(D), backend.from_host(one)], [-1, 0]), backend, (6, 6))
        np.testing.assert_array_equal(A.toarray(), placed({-1: D, 0: [E] * 3}, (3, 3), (2, 2)))


def test_diags_of_numbers_is_that_of_scipy(backend: Backend) -> None:
    for diagonals, offsets, shape in (
        ([[1, 2, 3, 4], [5, 6, 7], [8, 9]], [0, -1, 2], None),
        ([1.0, -2.0, 1.0], [-1, 0, 1], (4, 5)),
        ([1, 2, 3], 0, None),
        ([1, 2, 3], -1, (4, 3)),
    ):
        expected: Any = sp.diags_array(diagonals, offsets=offsets, shape=shape, dtype=None)  # type: ignore[arg-type]
        A = checked(bg.diags(diagonals, offsets, shape, device=backend.name), backend, expected.shape)
        np.testing.assert_array_equal(A.toarray(), expected.toarray())
        assert A.blocksize == (1, 1)


def test_the_dtypes_of_diagonals_are_promoted(backend: Backend) -> None:
    one = np.ones((1, 2, 2))
    for dtypes, expected in (
        ((BFLOAT16, BFLOAT16), BFLOAT16),
        ((BFLOAT16, np.float16), np.float32),
        ((np.int8, np.float16), np.float16),
        ((np.float32, np.complex64), np.complex64),
    ):
        blocks = [backend.from_host(one.astype(dtype)) for dtype in dtypes]
        A = checked(bg.diags(blocks, [0, 1], (4, 4)), backend, (4, 4))
        assert A.dtype == expected
        np.testing.assert_array_equal(A.toarray().astype(complex), placed({0: [one] * 2, 1: [one]}, (2, 2), (2, 2)))
    assert bg.diags(backend.from_host(one), dtype=BFLOAT16).dtype == BFLOAT16


def test_the_result_of_diags_does_not_share_memory(backend: Backend) -> None:
    D = backend.from_host(np.ones((2, 2, 2)))
    A = bg.diags(D)
    D[...] = 7
    assert float(A.max()) == 1


def test_wrong_arguments_of_diags_are_told(backend: Backend) -> None:
    D = np.ones((2, 2, 2))
    for arguments, kind, message in (
        (([D], [0, 1]), ValueError, "blocks, offsets: wanted as many of both, got 1 and 2"),
        (([], []), ValueError, "blocks, offsets: wanted as many of both, got 0 and 0"),
        (([D, D], [1, 1]), ValueError, "offsets: wanted each diagonal once"),
        (([D, D[:, :1]], [0, 1]), ValueError, r"blocks\[1\]: wanted blocks of \(2, 2\), as blocks\[0\] has"),
        ((D, 0, (6, 6)), ValueError, r"blocks\[0\]: wanted 3 blocks \(or 1\) for the shape \(6, 6\), got 2"),
        (([D, D[:1]], [0, 2]), ValueError, r"offsets\[1\]: diagonal 2 is outside a matrix of 2 x 2 blocks"),
        ((D, 0, (5, 4)), ValueError, r"blocksize \(2, 2\) does not divide"),
        ((D[None], 0), ValueError, r"blocks\[0\]: wanted shape \(n, R, C\)"),
        ((D, 0.5), TypeError, "blocks, offsets: wanted two sequences"),
        (([D], [0.5]), TypeError, r"offsets\[0\]: wanted an integer"),
        ((D, True), TypeError, "offsets: wanted an integer"),
    ):
        with pytest.raises(kind, match=rf"^{message}"):
            bg.diags(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot cast NaN or infinity to int"):
        bg.diags(backend.from_host(D * np.nan), dtype=int)
    if backend.name != "cpu":
        with pytest.raises(
            TypeError, match=rf"^blocks: the diagonals are on different devices \(cpu, {backend.name}\)"
        ):
            bg.diags([D, backend.from_host(D)], [0, 1])


# ------------------------------------------------------------------------------------------ random
@each_dtype
def test_random_is_repeated_by_its_seed_on_every_device(backend: Backend, dtype: Any) -> None:
    if dtype not in backend.dtypes:
        return
    options: dict[str, Any] = {"blocksize": (2, 3), "density": 0.3, "dtype": dtype}
    A = checked(bg.random(20, 30, seed=5, device=backend.name, **options), backend, (20, 30))
    B = bg.random(20, 30, seed=np.random.default_rng(5), **options)
    assert A.dtype == dtype and A.data.shape == (30, 2, 3)
    assert [x.tobytes() for x in A._blocks] == [x.tobytes() for x in B._blocks]
    C = bg.random(20, 30, seed=6, **options)
    assert C.data.tobytes() != A.data.tobytes() and C.indices.tobytes() != A.indices.tobytes()


def test_random_without_a_seed_differs_each_time() -> None:
    A, B = (bg.random(8, 8, blocksize=(2, 2), density=1) for _ in range(2))
    assert (A.data != B.data).any()


@each_dtype
def test_random_values_fill_their_range(dtype: Any) -> None:
    data = bg.random(64, 64, blocksize=(8, 8), density=1, seed=1, dtype=dtype).data
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        span = float(limits.max) - float(limits.min)
        low, high = ((float(x) - float(limits.min)) / span for x in (data.min(), data.max()))
    else:
        parts = (data.real, data.imag) if dtype.kind == "c" else (data.astype(dtype if dtype.kind == "f" else "f4"),)
        assert all((x >= 0).all() for x in parts)
        assert dtype == BOOL or all((x < 1).all() for x in parts)
        low, high = max(float(x.min()) for x in parts), min(float(x.max()) for x in parts)
    assert low < 0.02 and high > 0.98


def test_random_halves_are_not_rounded_up_to_one() -> None:
    for dtype in HALF_DTYPES:
        assert float(bg.random(512, 512, blocksize=(64, 64), density=1, seed=1, dtype=dtype).max()) < 1


def test_random_draws_every_block_alike() -> None:
    rng = np.random.default_rng(3)
    seen = np.zeros((4, 5))
    for _ in range(400):
        A = bg.random(8, 15, blocksize=(2, 3), density=0.25, seed=rng)
        assert len(A.data) == 5
        seen += A.toarray()[::2, ::3] != 0
    assert seen.min() > 60 and seen.max() < 140  # 100 on average, with a standard deviation of 9


def test_wrong_arguments_of_random_are_told() -> None:
    for density in (-0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match=r"^density: wanted a number from 0 to 1"):
            bg.random(4, 4, blocksize=(2, 2), density=density)
    with pytest.raises(ValueError, match="does not divide"):
        bg.random(5, 4, blocksize=(2, 2))
    assert bg.random(0, 4, blocksize=(2, 2), density=1).shape == (0, 4)


# ------------------------------------------------------------------------------------------ nbytes
def test_nbytes_counts_all_three_arrays_of_a_matrix_and_of_its_transpose(backend: Backend) -> None:
    A = bg.random(20, 60, blocksize=(2, 3), density=0.3, seed=5, dtype=np.float32, device=backend.name)
    assert A.nbytes == 60 * 6 * 4 + 60 * 4 + 11 * 4
    T = A.T
    bytes_ = T.nbytes
    assert T._origin is not None, "asking for its size does not build a transpose"
    assert bytes_ == sum(x.nbytes for x in T._blocks) == 60 * 6 * 4 + 60 * 4 + 21 * 4
