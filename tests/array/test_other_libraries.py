"""Company for other libraries: scipy's files, solvers and matrices, arrays by DLPack, CuPy's own sparse functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as spla

import bsrgemm as bg

from ..strategies import Place, Sample, assert_values, eps, rounding
from .random_matrices import HERE, each_flavour, random_sample


def spd_sample(n: int = 6, R: int = 3) -> Sample:
    """A block tridiagonal, symmetric positive definite matrix."""
    rng = np.random.default_rng(1)
    coupling = rng.standard_normal((n, R, R)) / R
    dense = np.zeros((n * R, n * R))
    for i in range(n):
        here = slice(i * R, (i + 1) * R)
        dense[here, here] = 6 * np.eye(R)
        if i:
            before = slice((i - 1) * R, i * R)
            dense[here, before], dense[before, here] = coupling[i], coupling[i].T
    S = sp.bsr_array(dense, blocksize=(R, R))
    return Sample(S.data, S.indices, S.indptr, S.shape)


# ------------------------------------------------------------------------------------------- scipy's files
@each_flavour
@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint16", "float32", "float64", "complex128"])
def test_scipy_saves_and_loads_our_matrices(tmp_path: Path, flavour: type, dtype: str) -> None:
    s = random_sample((3, 2), (2, 3), dtype, seed=8)
    A = HERE.bsr(s, flavour)
    sp.save_npz(tmp_path / "ours.npz", A)
    S = sp.load_npz(tmp_path / "ours.npz")
    assert S.format == "bsr" and S.blocksize == (2, 3) and S.dtype == np.dtype(dtype)
    assert isinstance(S, sp.sparray) == (flavour is bg.bsr_array)
    assert_values(S.toarray(), s.dense)
    sp.save_npz(tmp_path / "theirs.npz", s.scipy(flavour))
    B = flavour(sp.load_npz(tmp_path / "theirs.npz"))
    assert B.blocksize == (2, 3) and B.dtype == np.dtype(dtype)
    assert_values(HERE.blocks(B, flavour).dense, s.dense)


# ---------------------------------------------------------------------------------------- scipy's solvers
@pytest.fixture(scope="module")
def system() -> tuple[Sample, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A positive definite matrix, a right-hand side and the solution."""
    s = spd_sample()
    solution = np.random.default_rng(9).standard_normal(s.shape[0])
    return s, s.dense @ solution, solution


@each_flavour
@pytest.mark.parametrize("solve", [spla.cg, spla.gmres, spla.bicgstab, spla.minres], ids=lambda f: f.__name__)
def test_scipys_iterative_solvers_accept_our_matrix(flavour: type, solve: Callable[..., Any], system: Any) -> None:
    s, b, solution = system
    x, info = solve(HERE.bsr(s, flavour), b, rtol=1e-12, maxiter=500)
    assert info == 0
    # The smallest eigenvalue bounds how far a residual of 1e-12 leaves the solution off.
    floor = np.linalg.eigvalsh(s.dense)[0]
    assert np.linalg.norm(x - solution) <= 1e-10 * np.linalg.norm(b) / floor


@each_flavour
def test_scipys_other_linear_algebra_accepts_our_matrix(flavour: type, system: Any) -> None:
    s, b, solution = system
    A = HERE.bsr(s, flavour)
    floor, top = np.linalg.eigvalsh(s.dense)[[0, -1]]
    off = 1e3 * eps(s.dtype) * (top / floor) * np.linalg.norm(solution)
    assert np.linalg.norm(spla.spsolve(A.tocsc(), b) - solution) <= off
    assert np.linalg.norm(spla.spsolve(A, b) - solution) <= off
    assert np.linalg.norm(spla.splu(A.tocsc()).solve(b) - solution) <= off
    linear = spla.aslinearoperator(A)
    assert linear.shape == s.shape and linear.dtype == s.dtype
    assert_values(linear @ b, A @ b)
    assert_values(linear.rmatvec(b), A.T @ b, rounding(s.dtype, s.weight.T @ np.abs(b), 40))
    for order in (None, 1, np.inf, "fro"):
        expected = np.linalg.norm(s.dense, "fro" if order is None else order)
        assert abs(spla.norm(A, order) - expected) <= 100 * eps(s.dtype) * expected
    start = np.random.default_rng(10).standard_normal((s.shape[0], 2))
    values, _ = spla.lobpcg(A, start, largest=True, maxiter=200, tol=1e-8)
    assert abs(values.max() - top) <= 1e-6 * top
    values = spla.eigsh(A, k=1, which="LA", return_eigenvectors=False)
    assert abs(values[0] - top) <= 1e-10 * top


@each_flavour
def test_scipys_constructors_accept_our_matrix(flavour: type) -> None:
    s, t = random_sample((2, 3), (2, 3), seed=11), random_sample((2, 3), (2, 3), seed=12)
    A, B = HERE.bsr(s, flavour), HERE.bsr(t, flavour)
    for stacked, expected in (
        (sp.vstack([A, B]), np.vstack([s.dense, t.dense])),
        (sp.hstack([A, B]), np.hstack([s.dense, t.dense])),
        (sp.block_array([[A, None], [None, B]]), np.block([[s.dense, 0 * t.dense], [0 * s.dense, t.dense]])),
        (sp.kron(A, np.eye(2)), np.kron(s.dense, np.eye(2))),
        (sp.kron(np.eye(2), A), np.kron(np.eye(2), s.dense)),
        (sp.tril(A), np.tril(s.dense)),
        (sp.triu(A), np.triu(s.dense)),
    ):
        assert sp.issparse(stacked)
        assert_values(stacked.toarray(), expected)
    row, col, values = sp.find(A)
    order = np.lexsort((col, row))
    assert_values(np.stack([row, col])[:, order], np.stack(s.dense.nonzero()))
    assert_values(values[order], s.dense[s.dense.nonzero()])


# --------------------------------------------------------------------------- scipy's matrices as operands
@each_flavour
@pytest.mark.parametrize("format", ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"])
def test_ours_and_scipys_matrices_work_together(flavour: type, format: str) -> None:
    s, t = (random_sample((2, 2), (3, 3), seed=seed, spread="small") for seed in (13, 14))
    A, S = HERE.bsr(s, flavour), t.scipy(flavour).asformat(format)
    for ours, expected in (
        (A + S, s.dense + t.dense),
        (A - S, s.dense - t.dense),
        (A @ S, s.dense @ t.dense),
    ):
        assert_values(HERE.blocks(ours, flavour).dense, expected)
    assert_values(A.multiply(S).toarray(), s.dense * t.dense)
    assert (A + S).blocksize == (3, 3)
    assert (A @ S).blocksize == ((3, 3) if format == "bsr" else (3, 1))
    for theirs, expected in (
        (S + A, s.dense + t.dense),
        (S - A, t.dense - s.dense),
        (S @ A, t.dense @ s.dense),
        (S.multiply(A), s.dense * t.dense),
    ):
        assert sp.issparse(theirs)
        assert_values(theirs.toarray(), expected)
    assert_values((A != S).toarray(), s.dense != t.dense)
    assert_values((S != A).toarray(), s.dense != t.dense)


@each_flavour
def test_ours_and_scipys_bsr_convert_into_each_other(flavour: type) -> None:
    s = random_sample((2, 3), (2, 3), seed=15, duplicates=1)
    S = s.scipy(flavour)
    A = flavour(S)
    assert np.may_share_memory(A.data, S.data) and A.blocksize == S.blocksize
    T = type(S)(A)
    assert T.format == "bsr"
    assert_values(T.toarray(), s.dense, s.bound)
    assert_values(type(S)(A, blocksize=(1, 1)).toarray(), s.dense, s.bound)
    for cls in (sp.csr_array, sp.csc_array, sp.coo_array):
        assert_values(cls(A).toarray(), s.dense, s.bound)


def test_numpy_functions_reach_the_methods() -> None:
    s = random_sample((2, 2), (2, 2), seed=16)
    A = HERE.bsr(s)
    assert_values(HERE.blocks(np.sin(A)).dense, np.sin(s.dense))
    assert_values(HERE.blocks(np.abs(A)).dense, np.abs(s.dense))
    with pytest.raises(TypeError):
        np.cos(A)


# ----------------------------------------------------------------------------- arrays of other libraries
class SpeaksDLPack:
    """An array of a library that we do not know: DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class SpeaksCuda:
    """An array of a library that we do not know: the CUDA array interface and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def foreign_operands(place: Place) -> list[Callable[[Any], Any]]:
    return [SpeaksDLPack] if place.is_host else [SpeaksDLPack, SpeaksCuda]


@pytest.mark.parametrize(
    "place", [pytest.param(HERE, id="numpy"), pytest.param(Place("cuda"), id="cupy", marks=pytest.mark.gpu)]
)
def test_arrays_of_other_libraries_are_operands(place: Place) -> None:
    s = random_sample((2, 3), (2, 3), seed=17, spread="small")
    A = place.bsr(s)
    x = np.arange(18.0).reshape(9, 2)
    for foreign in foreign_operands(place):
        assert_values(place.dense(A @ foreign(place.put(x))), s.dense @ x)
        assert_values(place.dense(A @ foreign(place.put(x[:, 0].copy()))), s.dense @ x[:, 0])
        assert_values(place.dense(bg.matmul(A, foreign(place.put(x)))), s.dense @ x)
        assert_values(place.dense(bg.matmul(foreign(place.put(x.T[:, :4].copy())), A)), x.T[:, :4] @ s.dense)
        assert_values(place.dense(foreign(place.put(np.ones((2, 4)))) @ A), np.ones((2, 4)) @ s.dense)
        assert_values(place.dense(A + foreign(place.put(s.dense))), 2 * s.dense)
        B = bg.bsr_array(foreign(place.put(s.dense)), blocksize=(2, 3))
        assert_values(place.blocks(B).dense, s.dense)
        C = bg.from_dense(foreign(place.put(s.dense)), (2, 3))
        assert_values(place.blocks(C).dense, s.dense)
        data, indices, indptr = (foreign(place.put(v)) for v in (s.data, s.indices, s.indptr))
        D = bg.bsr_array((data, indices, indptr), shape=s.shape)
        assert_values(place.blocks(D).dense, s.dense)


def test_a_dlpack_operand_is_read_without_a_copy() -> None:
    s = random_sample((2, 3), (2, 3), seed=18)
    data = s.data.copy()
    A = bg.bsr_array((SpeaksDLPack(data), s.indices, s.indptr), shape=s.shape)
    assert np.may_share_memory(A.data, data)


@pytest.mark.gpu
def test_arrays_of_other_libraries_on_the_gpu_do_not_meet_host_matrices() -> None:
    place = Place("cuda")
    A = HERE.bsr(random_sample((2, 3), (2, 3)))
    for foreign in (SpeaksDLPack, SpeaksCuda):
        with pytest.raises(TypeError, match="other"):
            A @ foreign(place.put(np.ones(9)))


@pytest.mark.gpu
def test_bfloat16_travels_by_dlpack() -> None:
    place = Place("cuda")
    s = random_sample((2, 3), (2, 3), ml_dtypes.bfloat16, spread="small")
    X = place.put(np.ones((9, 2), ml_dtypes.bfloat16))
    assert_values(place.dense(place.bsr(s) @ SpeaksDLPack(X)), s.dense @ np.ones((9, 2)))


# ------------------------------------------------------------------------------------------------ cupyx
@pytest.mark.gpu
@each_flavour
def test_cupyx_takes_our_matrix_for_its_own(flavour: type) -> None:
    import cupy
    import cupyx
    import cupyx.scipy.sparse as csp

    A = Place("cuda").bsr(spd_sample(), flavour)
    assert csp.issparse(A)
    assert csp.isspmatrix(A) == (flavour is bg.bsr_matrix)
    assert cupy.get_array_module(A) is cupy
    assert cupyx.scipy.get_array_module(A) is cupyx.scipy
    assert bg.get_array_module(A) is cupy


@pytest.mark.gpu
@each_flavour
@pytest.mark.parametrize("name", ["cg", "gmres", "cgs", "bicgstab"])
def test_cupyx_solvers_accept_our_matrix(flavour: type, name: str, system: Any) -> None:
    import cupyx.scipy.sparse.linalg as cspla

    place = Place("cuda")
    s, b, solution = system
    x, info = getattr(cspla, name)(place.bsr(s, flavour), place.put(b), rtol=1e-12, maxiter=500)
    assert info == 0
    floor = np.linalg.eigvalsh(s.dense)[0]
    assert np.linalg.norm(place.dense(x).reshape(-1) - solution) <= 1e-10 * np.linalg.norm(b) / floor


@pytest.mark.gpu
@each_flavour
def test_cupyx_lobpcg_and_operators_accept_our_matrix(flavour: type, system: Any) -> None:
    import cupyx.scipy.sparse.linalg as cspla

    place = Place("cuda")
    s, b, _ = system
    A = place.bsr(s, flavour)
    top = np.linalg.eigvalsh(s.dense)[-1]
    start = place.put(np.random.default_rng(10).standard_normal((s.shape[0], 2)))
    values, _ = cspla.lobpcg(A, start, largest=True, maxiter=200, tol=1e-8)
    assert abs(float(values.max()) - top) <= 1e-6 * top
    linear = cspla.aslinearoperator(A)
    assert_values(
        place.dense(linear.matvec(place.put(b))).reshape(-1),
        s.dense @ b,
        rounding(s.dtype, s.weight @ np.abs(b), 40),
    )
    assert linear.shape == s.shape and linear.dtype == s.dtype
