"""Short cuts of the set-up on the CPU: each gives what the way without it gives, to the bit."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._backend.registry import host
from bsrgemm._products.spgemm import FactorPlan
from bsrgemm.linalg import aggregation

from .problems import connections, plate

pytestmark = pytest.mark.fake


def stencil(n: int, points: int) -> Any:
    """The Laplacian of n x n x n nodes with 7 or 27 points."""
    line = sp.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(n, n))
    if points == 7:
        chain = 2 * sp.eye_array(n) - line
        return sp.csr_array(sp.kronsum(sp.kronsum(chain, chain), chain))
    near = sp.eye_array(n) + line
    return sp.csr_array(27 * sp.eye_array(n**3) - sp.kron(sp.kron(near, near), near))


def equal(A: Any, B: Any) -> None:
    for x, y in zip((A.data, A.indices, A.indptr), (B.data, B.indices, B.indptr), strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_places_do_what_segments_do(symmetric: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    S = connections(rng, 500, 0.01, symmetric)
    with patch.object(aggregation, "_MOST_REPEATED", 100), patch.object(aggregation, "_NODES_AT_A_TIME", 64):
        places = aggregation._highest_by_places(S.indices, S.indptr)
        segments = aggregation._Segments(host(), S.indices, S.indptr)
        assert places is not None
        for x in (rng.integers(-1, 1 << 62, 500), rng.integers(0, 2, 500).astype(np.uint8)):
            np.testing.assert_array_equal(places(x), segments(x))
            for share in (0.0, 0.3, 1.0):
                chosen = rng.random(500) < share
                found = places.where(chosen, x, x[::-1])
                np.testing.assert_array_equal(found, segments.where(chosen, x, x[::-1]))
                assert found.dtype == x.dtype
                np.testing.assert_array_equal(places.count(chosen)[chosen], segments.count(chosen)[chosen])


@pytest.mark.parametrize("kind", ["chain", "no diagonal", "one each", "zeros", "an empty row"])
def test_connections_of_single_elements_are_found_as_those_of_blocks_are(kind: str) -> None:
    n = 40
    dense = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    if kind == "no diagonal":
        dense[::3, ::3] = 0
    elif kind == "one each":
        dense = np.eye(n)[np.random.default_rng(0).permutation(n)]
        dense[:5] = np.eye(n)[:5]
    elif kind == "an empty row":
        dense[7] = 0
    A = bg.bsr_array(dense, blocksize=(1, 1))
    if kind == "zeros":
        A.data[::4] = 0
    found = aggregation.strong_connections(A, 0.0)
    with patch.object(np, "count_nonzero", lambda x: -1):
        want = aggregation.strong_connections(A, 0.0)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype


@pytest.mark.parametrize("points", [7, 27])
def test_roots_and_what_is_between_them_are_those_of_segments(points: int) -> None:
    """Also where the search has to begin with all nodes and ends with few, in several pieces."""
    A = bg.bsr_array(stencil(12, points), blocksize=(1, 1))
    connections = aggregation.strong_connections(A, 0.0)
    with patch.object(aggregation, "_highest_by_places", lambda *_: None):
        want, count = aggregation.aggregates(host(), *connections)
    for together in (100, 1 << 14):
        with patch.object(aggregation, "_NODES_AT_A_TIME", together):
            found = aggregation.aggregates(host(), *connections)
        np.testing.assert_array_equal(found[0], want)
        assert found[1] == count and found[0].dtype == want.dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128], ids=lambda d: d.__name__)
@pytest.mark.parametrize("blocks", [(1, 1, 1), (3, 3, 2), (2, 2, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_factor_in_any_order_gives_the_same_product(blocks: tuple[int, int, int], dtype: Any, zeros: bool) -> None:
    R, K, C = blocks
    rng = np.random.default_rng([R, C])

    def made(rows: int, cols: int, block: tuple[int, int], seed: int) -> Any:
        found = bg.random(rows * block[0], cols * block[1], density=0.2, blocksize=block, seed=seed).astype(dtype)
        found.data[...] = rng.integers(-1 if zeros else 1, 3, found.data.shape)
        return found

    A, B, left = made(30, 20, (R, K), 1), made(20, 25, (K, C), 2), made(10, 30, (C, R), 3)
    factor, usual = FactorPlan(A, B), bg.plan(A, B)
    first, want = factor(A, B), usual(A, B)
    assert first.shape == want.shape and len(first.indices) == len(want.indices) and factor.pairs == usual.pairs
    np.testing.assert_array_equal(first.toarray(), want.toarray())
    assert not first.has_sorted_indices and not first.has_canonical_format
    equal(bg.plan(left, first)(left, first), bg.plan(left, want)(left, want))
    A.data *= 3
    equal(bg.plan(left, first)(left, factor(A, B)), bg.plan(left, want)(left, usual(A, B)))


def test_a_factor_of_large_blocks_is_sorted() -> None:
    """BLAS multiplies their pairs, which are listed in order."""
    A = bg.random(240, 240, density=0.3, blocksize=(40, 40), seed=0)
    found, want = FactorPlan(A, A)(A, A), bg.plan(A, A)(A, A)
    equal(found, want)


def test_a_factor_on_a_device_is_sorted() -> None:
    A = bg.random(24, 24, density=0.3, blocksize=(2, 2), seed=0).to_device("cuda")
    found, want = FactorPlan(A, A)(A, A), bg.plan(A, A)(A, A)
    equal(found.get(), want.get())
    assert found._known_canonical


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64], ids=lambda d: d.__name__)
def test_single_elements_are_scaled_as_blocks_are(dtype: Any) -> None:
    A = bg.random(30, 40, density=0.3, blocksize=(1, 1), seed=1).astype(dtype)
    A.data[::3] *= -1
    D = np.random.default_rng(0).standard_normal((30, 1, 1)).astype(dtype)
    D[::5] = 0
    found = A.scale_block_rows(D)
    wide = bg.bsr_array((A.data * np.eye(2, dtype=dtype), A.indices, A.indptr), shape=(60, 80))
    want = wide.scale_block_rows(D * np.eye(2, dtype=dtype)).data[:, :1, :1]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.data, want)
    assert not np.signbit(found.data[found.data == 0].real).any()  # a sum of products has no -0
    np.testing.assert_array_equal(A.scale_block_cols(np.full((40, 1, 1), 2, dtype)).toarray(), 2 * A.toarray())


@pytest.mark.parametrize("block", [1, 2])
def test_blocks_on_the_diagonal_are_found_in_any_order_and_added_if_they_are_stored_twice(block: int) -> None:
    rng = np.random.default_rng(block)
    row, col = np.repeat(np.arange(6), 3), rng.integers(0, 7, 18)
    data = rng.standard_normal((18, block, block))
    A = bg.bsr_array((data, col, np.arange(0, 19, 3)), shape=(6 * block, 7 * block))
    for case, kept in (
        ("twice", np.ones(18, bool)),
        ("once", np.r_[True, (row * 7 + col)[1:] != (row * 7 + col)[:-1]]),
    ):
        counts = np.add.reduceat(kept.astype(int), np.arange(0, 18, 3))
        A = bg.bsr_array((data[kept], col[kept], np.r_[0, np.cumsum(counts)]), shape=(6 * block, 7 * block))
        dense = A.toarray()
        want = np.stack([dense[block * i : block * (i + 1), block * i : block * (i + 1)] for i in range(6)])
        np.testing.assert_allclose(A.block_diagonal(), want, rtol=1e-15, err_msg=case)
        np.testing.assert_allclose(A.T.block_diagonal(), want.transpose(0, 2, 1), rtol=1e-15, err_msg=case)
    empty = bg.bsr_array((0, 4), blocksize=(2, 2))
    assert empty.block_diagonal().shape == (0, 2, 2)
    nothing = bg.bsr_array((4, 4), blocksize=(2, 2))
    np.testing.assert_array_equal(nothing.block_diagonal(), np.zeros((2, 2, 2)))


@pytest.mark.parametrize("points", [7, 27])
def test_a_refresh_with_the_same_numbers_changes_no_bit(points: int) -> None:
    A = bg.bsr_array(stencil(14, points), blocksize=(1, 1))
    M = linalg.smoothed_aggregation(A, max_coarse=50)
    before = [(level.A, level.P, level.R) for level in M._levels]
    M.refresh(A.copy())
    assert len(before) == len(M._levels) >= 1
    for old, level in zip(before, M._levels, strict=True):
        for x, y in zip(old, (level.A, level.P, level.R), strict=True):
            equal(x, y)
            assert x.has_canonical_format


def test_levels_have_the_products_of_scipy() -> None:
    for A, modes in ((bg.bsr_array(stencil(14, 27), blocksize=(1, 1)), None), (plate(24)[0], None)):
        M = linalg.smoothed_aggregation(A, modes, max_coarse=50)
        for level, below in zip(M._levels, M.levels[1:], strict=True):
            P = sp.csr_array(level.P.toarray())
            want = (P.conj().T @ sp.csr_array(level.A.toarray()) @ P).toarray()
            np.testing.assert_allclose(below.toarray(), want, atol=1e-12 * abs(want).max())
