"""Smoothed aggregation: aggregates, prolongators, cycles, refreshing, and hierarchies of pyamg."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as spla

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._backend.registry import host
from bsrgemm.linalg import aggregation, multigrid

from .problems import hermitian, laplacian, numbers, plate

pyamg = pytest.importorskip("pyamg")


def grid(n: int, dtype: Any = np.float64) -> Any:
    """The five-point Laplacian of n x n nodes."""
    return bg.bsr_array(pyamg.gallery.poisson((n, n), format="csr").astype(dtype), blocksize=(1, 1))


def iterations(A: Any, b: Any, M: Any, rtol: float = 1e-8) -> int:
    steps: list[Any] = []
    x, info = linalg.cg(A, b, M=M, rtol=rtol, callback=steps.append)
    assert info == 0
    assert np.linalg.norm(b - A @ x) <= 1.01 * rtol * np.linalg.norm(b)
    return len(steps)


# ------------------------------------------------------------------------------------------------- aggregates
def neighbours(A: Any) -> Any:
    S = sp.csr_array((np.ones(len(A.indices)), A.indices, A.indptr), shape=A._block_shape)
    return S.toarray() != 0


@pytest.mark.parametrize("n", [2, 5, 13, 20])
def test_aggregates_cover_all_nodes_and_hold_together(n: int) -> None:
    A = grid(n)
    number, count = aggregation.aggregates(host(), *aggregation.strong_connections(A, 0.0))
    assert set(number.tolist()) == set(range(count))
    graph = neighbours(A)
    reach = (graph @ graph) > 0
    for k in range(count):
        members = np.flatnonzero(number == k)
        centre = [i for i in members if reach[i, members].all()]
        assert centre, k  # a root sees all members in two steps
    sizes = np.bincount(number)
    assert n < 5 or 3 <= sizes.mean() <= 13
    again, _ = aggregation.aggregates(host(), *aggregation.strong_connections(A, 0.0))
    np.testing.assert_array_equal(number, again)


@pytest.mark.parametrize("inside", [range(144), range(30, 130)], ids=str)
def test_roots_have_no_common_neighbour_and_no_other_fits(inside: range) -> None:
    A = grid(12)
    graph = neighbours(A).astype(bool)
    there = np.isin(np.arange(144), inside)
    able = there & (np.arange(144) % 5 != 0)

    def highest(x: np.ndarray) -> np.ndarray:
        return np.where(graph, x, 0).max(axis=1)

    root = aggregation._roots(np, highest, np.where(able, aggregation.hashed(np, 144), -1), there)
    apart = (graph[:, there].astype(int) @ graph[there].astype(int)) > 0
    assert root.any() and not (root & ~able).any()
    assert (apart[np.ix_(root, root)].sum(axis=1) == 1).all()  # each reaches itself alone
    assert apart[np.ix_(able, root)].any(axis=1).all()


def test_gaps_between_aggregates_become_aggregates_too() -> None:
    A = grid(12)
    indices, indptr, _ = aggregation.strong_connections(A, 0.0)
    number, count = aggregation.aggregates(host(), indices, indptr)
    graph = neighbours(A).astype(bool)
    roots = aggregation._roots(np, lambda x: np.where(graph, x, 0).max(axis=1), aggregation.hashed(np, 144))
    alone = ~graph[roots].any(axis=0)
    assert roots.sum() < count
    first = number < roots.sum()
    assert (first | alone | graph[:, first].any(axis=1)).all()
    # In a gap, a node with half of its neighbours in the gap is in reach of one of its roots.
    wide = alone & (2 * graph[:, alone].sum(axis=1) >= graph.sum(axis=1))
    assert wide.any() and not (first & wide).all()


def test_weak_connections_are_left_out_and_nodes_without_any_stay_alone() -> None:
    A = bg.bsr_array(np.diag([1.0, 1, 1, 1]) + 1e-3 * np.eye(4, k=1) + 1e-3 * np.eye(4, k=-1), blocksize=(1, 1))
    indices, indptr, _ = aggregation.strong_connections(A, 0.1)
    np.testing.assert_array_equal(indices, np.arange(4))
    np.testing.assert_array_equal(indptr, np.arange(5))
    number, count = aggregation.aggregates(host(), indices, indptr)
    assert count == 4 and len(set(number.tolist())) == 4
    assert len(aggregation.strong_connections(A, 0.0)[0]) == 10
    for theta, kept in ((0.9e-3, 10), (1.1e-3, 4)):
        assert len(aggregation.strong_connections(A, theta)[0]) == kept


def test_a_direction_of_weak_coupling_is_not_aggregated_along() -> None:
    """Anisotropic diffusion: nodes hold together along x alone."""
    n = 12
    strong, weak = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1), np.eye(n)
    A = bg.bsr_array(np.kron(weak, strong) + 1e-3 * np.kron(strong, weak), blocksize=(1, 1))
    number, count = aggregation.aggregates(host(), *aggregation.strong_connections(A, 0.08))
    line = np.arange(n * n) // n
    for k in range(count):
        assert len(set(line[number == k].tolist())) == 1


# ------------------------------------------------------------------------------------------------- prolongators
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_the_tentative_prolongator_spans_the_modes_with_orthonormal_columns(dtype: str) -> None:
    A, place = plate(9)
    A = A.astype(dtype)
    modes = linalg.rigid_body_modes(place).astype(dtype)
    number, count = aggregation.aggregates(host(), *aggregation.strong_connections(A, 0.0))
    T, coarse = aggregation.tentative(A, number, count, modes)
    assert T.shape == (A.shape[0], 3 * count) and T.blocksize == (2, 3)
    np.testing.assert_allclose(T.toarray() @ coarse, modes, atol=1e-12)
    gram = (T.conj().T @ T).toarray()
    np.testing.assert_allclose(gram, np.diag(np.round(np.diag(gram).real)), atol=1e-12)


def test_modes_that_depend_on_others_get_no_column() -> None:
    A = laplacian(6)
    modes = np.stack([np.ones(6), 2 * np.ones(6)], axis=1)
    T, coarse = aggregation.tentative(A, np.array([0, 0, 0, 1, 1, 1]), 2, modes)
    np.testing.assert_allclose(T.toarray() @ coarse, modes, atol=1e-14)
    assert not T.toarray()[:, 1::2].any()


def test_rigid_bodies_have_no_energy() -> None:
    from bench.solvers.problems import cell_blocks

    corners = np.mgrid[:2, :2, :2].reshape(3, -1).T.astype(float)
    stiffness = cell_blocks(1.0).transpose(0, 2, 1, 3).reshape(24, 24)
    modes = linalg.rigid_body_modes(corners)
    assert modes.shape == (24, 6) and np.linalg.matrix_rank(modes) == 6
    np.testing.assert_allclose(stiffness @ modes, 0, atol=1e-12)
    flat = linalg.rigid_body_modes(np.array([[0, 0], [1, 0], [0, 1]]))
    assert flat.dtype == np.float64 and np.linalg.matrix_rank(flat) == 3
    turned = flat[:, 2].reshape(3, 2)
    np.testing.assert_allclose(turned[:, 0] @ np.array([0, 0, 1.0]) + turned[:, 1] @ np.array([0, -1.0, 0]), -4 / 3)


# ------------------------------------------------------------------------------------------------- cycles
@pytest.mark.parametrize("cycle", ["V", "W"])
@pytest.mark.parametrize("smoother", ["chebyshev", "jacobi"])
def test_a_cycle_is_linear_symmetric_and_positive(cycle: str, smoother: str) -> None:
    A = grid(11)
    M = linalg.smoothed_aggregation(A, max_coarse=4, smoother=smoother, cycle=cycle)
    assert len(M.levels) >= 3
    dense = M @ np.eye(A.shape[0])
    np.testing.assert_allclose(dense, dense.T, atol=1e-12)
    assert np.linalg.eigvalsh(dense).min() > 0
    x = numbers(A.shape[0])
    np.testing.assert_allclose(M @ x, dense @ x, atol=1e-12)
    # What is left of an error after one cycle.
    left = np.abs(np.linalg.eigvals(np.eye(len(dense)) - dense @ A.toarray())).max()
    assert left < (0.75 if smoother == "jacobi" else 0.5)


def test_a_w_cycle_reduces_the_error_more() -> None:
    A = grid(12)
    rates = []
    for cycle in "VW":
        M = linalg.smoothed_aggregation(A, max_coarse=4, cycle=cycle) @ np.eye(A.shape[0])
        rates.append(np.abs(np.linalg.eigvals(np.eye(len(M)) - M @ A.toarray())).max())
    assert rates[1] <= rates[0]


def test_iterations_do_not_grow_with_the_size() -> None:
    sizes = (20, 40, 80)
    counts = [iterations(grid(n), np.ones(n * n), linalg.smoothed_aggregation(grid(n), max_coarse=50)) for n in sizes]
    assert max(counts) <= 14 and counts[-1] <= counts[0] + 5


@pytest.mark.parametrize("case", ["poisson", "elasticity"])
def test_iterations_are_about_those_of_pyamg(case: str) -> None:
    if case == "poisson":
        A, modes = grid(60), None
    else:
        A, place = plate(40)
        modes = linalg.rigid_body_modes(place)
    b = numbers(A.shape[0])
    ours = iterations(A, b, linalg.smoothed_aggregation(A, modes, max_coarse=100))
    smoother = ("chebyshev", {"degree": 2})
    S = sp.bsr_matrix((A.data, A.indices, A.indptr), shape=A.shape) if case == "elasticity" else A.tocsr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ml = pyamg.smoothed_aggregation_solver(
            S, B=modes, strength=None, max_coarse=100, presmoother=smoother, postsmoother=smoother
        )
        left: list[float] = []
        ml.solve(b, tol=1e-8, accel="cg", residuals=left)
    assert ours <= 1.2 * (len(left) - 1) + 1


def test_the_modes_matter_for_elasticity() -> None:
    A, place = plate(40)
    b = numbers(A.shape[0])
    with_rotations = iterations(A, b, linalg.smoothed_aggregation(A, linalg.rigid_body_modes(place), max_coarse=100))
    without = iterations(A, b, linalg.smoothed_aggregation(A, max_coarse=100))
    assert with_rotations < without


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_other_dtypes(dtype: str) -> None:
    A = hermitian(600, dtype)
    M = linalg.smoothed_aggregation(A, max_coarse=60)
    assert M.dtype == np.dtype(dtype) and len(M.levels) > 1
    assert iterations(A, numbers(600, dtype), M, rtol=1e-5 if dtype != "complex128" else 1e-10) < 20


def test_a_hierarchy_in_float32_serves_a_system_in_float64() -> None:
    A, place = plate(30)
    b, modes = numbers(A.shape[0]), linalg.rigid_body_modes(place)
    wide = iterations(A, b, linalg.smoothed_aggregation(A, modes, max_coarse=100), 1e-10)
    narrow = linalg.smoothed_aggregation(A.astype("float32"), modes, max_coarse=100)
    assert narrow.dtype == np.float32
    assert abs(iterations(A, b, narrow, 1e-10) - wide) <= 1


def test_several_columns_and_other_solvers() -> None:
    A = grid(30)
    M, b = linalg.smoothed_aggregation(A, max_coarse=50), numbers((900, 3))
    x, info = linalg.cg(A, b, M=M, rtol=1e-9)
    assert info == 0
    np.testing.assert_allclose(A @ x, b, atol=1e-6)
    for solve in (spla.cg, spla.gmres):
        y, info = solve(A, b[:, 0], M=M, rtol=1e-9)
        assert info == 0
        np.testing.assert_allclose(y, x[:, 0], rtol=1e-5, atol=1e-5)
    values, _ = linalg.lobpcg(A, numbers((900, 3)), M=M, largest=False, tol=1e-8, maxiter=60)
    want = spla.eigsh(A.tocsc(), k=3, sigma=0, return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(values), np.sort(want), rtol=1e-6)


def test_the_same_call_gives_the_same_bits() -> None:
    A, place = plate(20)
    b, modes = numbers(A.shape[0]), linalg.rigid_body_modes(place)
    found = [linalg.cg(A, b, M=linalg.smoothed_aggregation(A, modes, max_coarse=50), rtol=1e-8)[0] for _ in range(2)]
    np.testing.assert_array_equal(*found)


def test_a_small_matrix_is_solved_directly() -> None:
    A = laplacian(20, 2)
    M = linalg.smoothed_aggregation(A)
    assert len(M.levels) == 1 and M.operator_complexity == 1
    np.testing.assert_allclose(A @ (M @ np.ones(40)), 1)
    M.refresh(A * 2)
    np.testing.assert_allclose(A @ (M @ np.ones(40)), 0.5)


def test_a_singular_matrix_is_solved_where_it_can_be() -> None:
    """A chain without supports: constants are mapped to 0, and a load without a mean has a solution."""
    n = 400
    A = bg.bsr_array(sp.csr_array(laplacian(n).toarray() - np.diag([1.0] + [0] * (n - 2) + [1.0])), blocksize=(1, 1))
    b = numbers(n)
    b -= b.mean()
    x, info = linalg.cg(A, b, M=linalg.smoothed_aggregation(A, max_coarse=20), rtol=1e-8)
    assert info == 0 and np.linalg.norm(A @ x - b) <= 1e-7 * np.linalg.norm(b)


# ------------------------------------------------------------------------------------------------- new numbers
def test_refreshing_is_setting_up_again_for_the_same_pattern() -> None:
    A, place = plate(20)
    modes = linalg.rigid_body_modes(place)
    M = linalg.smoothed_aggregation(A, modes, max_coarse=50)
    other = A.copy()
    factors = 1 + 0.5 * np.random.default_rng(1).random(A._block_shape[0])
    other = other.scale_block_rows(np.sqrt(factors)).scale_block_cols(np.sqrt(factors))
    fresh = linalg.smoothed_aggregation(other, modes, max_coarse=50)
    M.refresh(other)
    b = numbers(A.shape[0])
    np.testing.assert_allclose(M @ b, fresh @ b, rtol=1e-9, atol=1e-12)
    assert [x.shape for x in M.levels] == [x.shape for x in fresh.levels]
    np.testing.assert_array_equal(M.levels[0].data, other.data)
    assert iterations(other, b, M) <= iterations(other, b, fresh) + 1


def test_blocks_that_were_zero_may_get_numbers() -> None:
    """Aggregates stay, and patterns have place for all blocks of A from the beginning."""
    A, _ = plate(20)
    B, row = A.copy(), np.repeat(np.arange(A.shape[0] // 2), np.diff(A.indptr))
    B.data[(row % 20 < 10) != (A.indices % 20 < 10)] = 0  # two halves without a coupling
    M = linalg.smoothed_aggregation(B, max_coarse=50)
    b = numbers(A.shape[0])
    before = M @ b
    M.refresh(A)
    assert iterations(A, b, M) <= iterations(A, b, linalg.smoothed_aggregation(A, max_coarse=50)) + 3
    for wanted, found in zip(linalg.smoothed_aggregation(B, max_coarse=50).levels, M.levels, strict=True):
        assert wanted.shape == found.shape
    M.refresh(B)  # and back again
    np.testing.assert_array_equal(M @ b, before)
    assert iterations(B, b, M) <= 40


# ------------------------------------------------------------------------------------------------- pyamg
@pytest.mark.parametrize("case", ["poisson", "elasticity"])
def test_a_hierarchy_of_pyamg_is_taken_as_it_is(case: str) -> None:
    if case == "poisson":
        S, modes = pyamg.gallery.poisson((40, 40), format="csr"), None
    else:
        S, modes = pyamg.gallery.linear_elasticity((24, 24), format="bsr")
    ml = pyamg.smoothed_aggregation_solver(S, B=modes, max_coarse=60)
    M = linalg.from_pyamg(ml, degree=3)
    assert [A.shape for A in M.levels] == [level.A.shape for level in ml.levels]
    A = bg.bsr_array(S, blocksize=(1, 1) if case == "poisson" else S.blocksize)
    assert iterations(A, numbers(A.shape[0]), M) <= 20
    B = A.scale_block_rows(np.geomspace(1, 2, A._block_shape[0]))
    B = B + B.T
    before = M @ np.ones(A.shape[0])
    M.refresh(B)
    for fine, coarse, level in zip(M.levels[:-1], M.levels[1:], M._levels, strict=True):
        np.testing.assert_allclose(coarse.toarray(), (level.R @ (fine @ level.P)).toarray(), atol=1e-12)
    assert iterations(B, numbers(A.shape[0]), M) <= 20
    M.refresh(A)
    np.testing.assert_allclose(M @ np.ones(A.shape[0]), before, rtol=1e-9)


# ------------------------------------------------------------------------------------------------- looking at it
def test_reports_and_pictures_show_the_levels() -> None:
    import matplotlib

    matplotlib.use("Agg")
    A = grid(40)
    M = linalg.smoothed_aggregation(A, max_coarse=50, cycle="W", smoother="jacobi", degree=3)
    text = M.report().splitlines()
    assert len(text) == len(M.levels) + 2
    assert text[1].split()[:3] == ["0", "1,600", f"{len(A.indices):,}"]
    assert text[-1] == f"operator complexity {M.operator_complexity:.2f}, W-cycle, jacobi of degree 3"
    assert repr(M).startswith("<Multigrid on 'cpu', float64, levels of 1,600, ")
    ax = M.plot()
    assert [bar.get_height() for bar in ax.containers[0]] == [x.shape[0] for x in M.levels]
    assert M.plot(ax) is ax


A, B = laplacian(30, 2), np.ones((60, 2))
#: As many blocks as A has, at other places.
SHIFTED = bg.bsr_array(
    np.kron(3 * np.eye(30) - np.eye(30, k=1) - np.eye(30, k=-2) - np.eye(30, k=29), np.eye(2)), blocksize=(2, 2)
)
BROKEN = laplacian(2, 2)
BROKEN.data[-1] = 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: linalg.smoothed_aggregation(A.toarray()), TypeError, "A: wanted a bsr_array or bsr_matrix, got"),
        (lambda: linalg.smoothed_aggregation(A.astype(int)), TypeError, "A: wanted float32"),
        (lambda: linalg.smoothed_aggregation(A[:2]), ValueError, "A: wanted a square matrix"),
        (lambda: linalg.smoothed_aggregation(A, B[:4]), ValueError, r"near_nullspace: wanted shape \(60, m\), got"),
        (lambda: linalg.smoothed_aggregation(A, B[:, :0]), ValueError, "near_nullspace: wanted shape"),
        (lambda: linalg.smoothed_aggregation(A, B * 1j), TypeError, "near_nullspace: wanted real numbers"),
        (lambda: linalg.smoothed_aggregation(A, B * np.nan), ValueError, "near_nullspace: wanted finite numbers"),
        (lambda: linalg.smoothed_aggregation(A, {1.0}), TypeError, "near_nullspace: wanted a dense array on 'cpu'"),
        (lambda: linalg.smoothed_aggregation(A, theta=1), ValueError, "theta: wanted a number from 0 to 1, got 1"),
        (lambda: linalg.smoothed_aggregation(A, max_coarse=0), ValueError, "max_coarse: wanted an integer from 1 on"),
        (lambda: linalg.smoothed_aggregation(A, degree=True), ValueError, "degree: wanted an integer from 1 on"),
        (lambda: linalg.smoothed_aggregation(A, smoother="sor"), ValueError, "smoother: wanted 'chebyshev' or"),
        (lambda: linalg.smoothed_aggregation(A, cycle="F"), ValueError, "cycle: wanted 'V' or 'W', got 'F'"),
        (lambda: linalg.smoothed_aggregation(BROKEN, max_coarse=1), ValueError, "A: diagonal block 1 is singular"),
        (lambda: linalg.smoothed_aggregation(A).refresh(A.astype("float32")), TypeError, "A: wanted float64 on 'cpu'"),
        (lambda: linalg.smoothed_aggregation(A).refresh(laplacian(20, 2)), ValueError, "A: wanted the shape of the"),
        (lambda: linalg.smoothed_aggregation(A).refresh(SHIFTED), ValueError, "A: wanted the blocks of the matrix of"),
        (lambda: linalg.from_pyamg(A), TypeError, "ml: wanted a MultilevelSolver of pyamg, got "),
        (lambda: linalg.rigid_body_modes({0.0}), TypeError, "coordinates: wanted a NumPy or CuPy array"),
        (lambda: linalg.rigid_body_modes(np.ones((4, 1))), ValueError, r"coordinates: wanted shape \(n, 2\) or"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_coarsening_that_stalls_is_told_with_what_to_try() -> None:
    n = 5000
    A = bg.bsr_array(sp.csr_array(sp.diags_array(np.arange(1.0, n + 1))), blocksize=(1, 1))
    with pytest.raises(ValueError, match=r"A: no node of level 0 is connected with another one.*take block_jacobi"):
        linalg.smoothed_aggregation(A)
    chain = sp.diags_array([1e-3, 1e-3], offsets=[-1, 1], shape=(n, n))
    weak = A + bg.bsr_array(sp.csr_array(chain), blocksize=(1, 1))
    with pytest.raises(ValueError, match=r"A: coarsening stalls at level 0: 5,000 rows become 5,000\. Try a"):
        linalg.smoothed_aggregation(weak, theta=0.1)
    few = bg.bsr_array(np.diag(np.arange(1.0, 91)), blocksize=(1, 1))
    assert len(linalg.smoothed_aggregation(few, max_coarse=20).levels) == 1
    many = linalg.smoothed_aggregation(laplacian(60), numbers((60, 5)), max_coarse=20)  # 5 modes for 4 nodes
    assert len(many.levels) == 1
    with pytest.raises(ValueError, match="max_levels: 1 levels leave 6,400 rows"):
        linalg.smoothed_aggregation(grid(80), max_levels=1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("kind", ["definite", "rows of zeros", "singular", "indefinite", "nothing"])
def test_the_coarsest_matrix_is_inverted_as_far_as_it_can_be(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    B = rng.standard_normal((12, 12)) + (1j * rng.standard_normal((12, 12)) if dtype == "complex128" else 0)
    dense = B @ B.conj().T + np.eye(12)
    if kind == "rows of zeros":
        dense[[3, 7]] = 0
        dense[:, [3, 7]] = 0
    elif kind == "singular":
        dense = B[:, :5] @ B[:, :5].conj().T
    elif kind == "indefinite":
        dense -= 20 * np.eye(12)
    elif kind == "nothing":
        dense *= 0
    found = multigrid._pseudo_inverse(bg.bsr_array(dense.astype(dtype), blocksize=(3, 3)))
    want = np.linalg.pinv(dense, 1e-5, hermitian=True)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found, want, rtol=0, atol=(1e-3 if dtype == "float32" else 1e-9) * abs(want).max(initial=1)
    )
    quick = multigrid._definite_inverse(dense.astype(dtype), 1e-12 if dtype != "float32" else 1e-6)
    assert (quick is not None) == (kind in ("definite", "rows of zeros"))
