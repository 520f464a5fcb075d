"""Direct solution: SuperLU on the host; cuDSS on a card, and on a fake card with a stand-in for nvmath-python."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as spla

import bsrgemm as bg
from bench.solvers.problems import cube
from bsrgemm import linalg
from bsrgemm._backend.registry import by_name
from bsrgemm.linalg import direct

from .problems import hermitian, lopsided, numbers

pytestmark = pytest.mark.fake

#: What a pivot is at least, over the largest element.
PIVOT = 1e-13


@pytest.fixture
def calls(fake: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What `nvmath.sparse.advanced.direct_solver` was called with. It refuses what that function refuses."""
    made: list[tuple[Any, Any]] = []

    def direct_solver(a: Any, b: Any, /, **options: Any) -> Any:
        assert options == {"options": {"multithreading_lib": None}}
        made.append((a, b))
        assert fake.is_sparse(a) and a.format == "csr" and fake.is_dense(b)
        matrix = a.get()
        for i in range(matrix.shape[0]):
            row = matrix.indices[matrix.indptr[i] : matrix.indptr[i + 1]]
            assert (np.diff(row) > 0).all(), "columns in order, and each once"
        assert matrix.indices.dtype == matrix.indptr.dtype == np.int32
        if a.dtype != b.dtype:
            raise TypeError(f"The LHS dtype {a.dtype} does not match the RHS dtype {b.dtype}.")
        strides = [s // b.dtype.itemsize for s in b.strides]
        if strides[0] != 1 or (b.ndim == 2 and strides[1] < b.shape[0]):
            raise TypeError("The RHS must be in column-major layout.")
        # cuDSS replaces a pivot that is too small; a shift of the diagonal has the same effect
        shift = PIVOT * abs(matrix).max() * sp.eye_array(matrix.shape[0])
        found = spla.splu((matrix + shift).tocsc()).solve(fake.to_host(b))
        return fake.from_host(np.asarray(found, b.dtype))

    modules = {name: types.ModuleType(name) for name in ("nvmath", "nvmath.sparse", "nvmath.sparse.advanced")}
    modules["nvmath.sparse.advanced"].direct_solver = direct_solver  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3)])
def test_a_system_on_a_device_is_solved_there(fake: Any, calls: Any, dtype: str, shape: tuple[int, ...]) -> None:
    A, b = lopsided(40, dtype), numbers(shape, dtype)
    x = linalg.spsolve(A.to_device("cuda"), fake.from_host(b))
    assert len(calls) == 1 and fake.is_dense(x) and x.shape == shape and x.dtype == dtype
    tolerance = 1e-3 if x.dtype.itemsize // (1 + (x.dtype.kind == "c")) == 4 else 1e-9
    np.testing.assert_allclose(fake.to_host(x), np.linalg.solve(A.toarray(), b), rtol=tolerance, atol=tolerance)


def test_rows_by_rows_and_strided_right_hand_sides_are_given_by_columns(fake: Any, calls: Any) -> None:
    A = hermitian(40)
    wide = numbers((40, 6))
    for b in (wide, wide.T.copy().T, wide[:, ::2]):
        x = linalg.spsolve(A.to_device("cuda"), fake.from_host(wide)[:, ::2] if b.shape[1] == 3 else fake.from_host(b))
        np.testing.assert_allclose(fake.to_host(x), np.linalg.solve(A.toarray(), b), rtol=1e-9)
    before = fake.from_host(wide[:, 0])
    linalg.spsolve(A.to_device("cuda"), before)
    np.testing.assert_array_equal(fake.to_host(before), wide[:, 0])
    assert linalg.spsolve(A.to_device("cuda"), fake.from_host(wide[:, :0])).shape == (40, 0) and len(calls) == 4


def test_duplicates_are_added_up_in_a_copy(fake: Any, calls: Any) -> None:
    twice = bg.bsr_array((np.array([[[3.0]], [[1.0]], [[2.0]]]), [0, 0, 1], [0, 2, 3]), shape=(2, 2)).to_device("cuda")
    x = linalg.spsolve(twice, fake.from_host(np.array([8.0, 6.0])))
    np.testing.assert_allclose(fake.to_host(x), [2.0, 3.0])
    assert len(twice.indices) == 3


def test_without_nvmath_the_extra_is_named(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvmath", None)
    with pytest.raises(ImportError, match=r'pip install "bsrgemm\[cudss12\]" for CUDA 12, "bsrgemm\[cudss13\]"'):
        linalg.spsolve(hermitian(8).to_device("cuda"), fake.from_host(np.ones(8)))
    np.testing.assert_allclose(
        linalg.spsolve(hermitian(8), np.ones(8)), np.linalg.solve(hermitian(8).toarray(), np.ones(8))
    )


def test_without_cudss_the_extra_is_named(fake: Any, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvmath-python can be installed without the libraries that it calls."""
    failure: Any = type("DynamicLibNotFoundError", (RuntimeError,), {})("libcudss.so.0")

    def direct_solver(*_: Any, **options: Any) -> None:
        raise failure

    monkeypatch.setattr(sys.modules["nvmath.sparse.advanced"], "direct_solver", direct_solver)
    with pytest.raises(ImportError, match="needs cuDSS") as caught:
        linalg.spsolve(hermitian(8).to_device("cuda"), fake.from_host(np.ones(8)))
    assert caught.value.__cause__ is failure
    failure = ArithmeticError("another one")
    with pytest.raises(ArithmeticError, match="another one"):
        linalg.spsolve(hermitian(8).to_device("cuda"), fake.from_host(np.ones(8)))


def test_cudss_plans_by_the_library_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDSS warns in every call that it was not given one. A library that cannot be loaded is left out."""
    module: Any = types.ModuleType("cuda.pathfinder")
    asked = []

    def load_nvidia_dynamic_lib(name: str) -> Any:
        asked.append(name)
        return types.SimpleNamespace(abs_path=str(tmp_path / "libcudss.so.0"))

    module.load_nvidia_dynamic_lib = load_nvidia_dynamic_lib
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", module)
    assert direct._threading_layer() is None
    (tmp_path / "libcudss_mtlayer_gomp.so.0").write_bytes(b"no library")
    assert direct._threading_layer() is None
    (tmp_path / "libcudss_mtlayer_gomp.so.1").symlink_to(sp._sparsetools.__file__)
    assert direct._threading_layer() == str(tmp_path / "libcudss_mtlayer_gomp.so.1")
    assert asked == ["cudss"] * 3
    del module.load_nvidia_dynamic_lib
    assert direct._threading_layer() is None


def test_what_is_wrong_on_a_device_is_told(fake: Any, calls: Any) -> None:
    A, b = hermitian(8).to_device("cuda"), np.ones(8)
    with pytest.raises(TypeError, match=r"if b is there: got A on 'cuda'; take A.get\(\), or b on 'cuda'"):
        linalg.spsolve(A, b)
    with pytest.raises(ValueError, match=r"b: wanted a dense array \(8,\) or \(8, k\) on 'cuda', got \(7,\)"):
        linalg.spsolve(A, fake.from_host(b[:7]))
    with pytest.raises(ValueError, match="b: wanted finite numbers"):
        linalg.spsolve(A, fake.from_host(np.array([np.nan] * 8)))
    singular = bg.bsr_array(np.diag([1.0, 2, 3, 0]), blocksize=(2, 2)).to_device("cuda")
    with pytest.raises(
        RuntimeError, match="A: singular, or too badly conditioned for float64: the norm of the residual"
    ):
        linalg.spsolve(singular, fake.from_host(np.ones(4)))
    assert len(calls) == 2


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_numbers_of_b_are_not_narrowed(fake: Any, calls: Any, place: str) -> None:
    """A of integers or reals does not truncate b."""
    A = bg.bsr_array(np.array([[4, 1], [2, 3]]), blocksize=(2, 2))
    for matrix, b in (
        (A, np.array([6.5, 8.25])),
        (A.astype("float64"), np.array([6 + 1j, 8.0])),
        (A, np.array([6, 8])),
    ):
        given = b if place == "cpu" else fake.from_host(b)
        x = linalg.spsolve(matrix.to_device(place), given)
        x = x if place == "cpu" else fake.to_host(x)
        np.testing.assert_allclose(x, np.linalg.solve(A.toarray(), b), rtol=1e-12)
    assert len(calls) == 3 * (place == "cuda")


def test_on_the_host_nan_is_told() -> None:
    with pytest.raises(ValueError, match="b: wanted finite numbers"):
        linalg.spsolve(hermitian(8), np.full(8, np.inf))


# ------------------------------------------------------------------------------------------------- on a card
@pytest.fixture
def cudss() -> Any:
    """The backend of the card, where cuDSS is."""
    import cupy

    if not hasattr(cupy.cuda.runtime, "graphLaunch"):
        pytest.skip("only on a card: cuDSS")
    pytest.importorskip("nvmath.sparse.advanced", exc_type=ImportError)
    return by_name("cuda")


def elastic(dtype: str) -> Any:
    """A cube in 3 x 3 blocks with about 1,500 unknowns; complex: damped, which makes it symmetric, not Hermitian."""
    A = bg.bsr_array(cube(1_500).A)
    if np.dtype(dtype).kind == "c":
        place = np.arange(A.shape[0] // 3)
        A = A + bg.bsr_array((0.1j * A.block_diagonal(), (place, place)), shape=A.shape)
    return A.astype(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "complex64"])
@pytest.mark.parametrize("columns", [None, 1, 5])
def test_cudss_solves_elasticity_on_the_card(cudss: Any, dtype: str, columns: int | None) -> None:
    A = elastic(dtype)
    n = A.shape[0]
    b = numbers(n if columns is None else (n, columns), dtype)
    x = cudss.to_host(linalg.spsolve(A.to_device("cuda"), cudss.from_host(b)))
    wide = np.result_type(dtype, np.float64)
    want = spla.spsolve(A.astype(wide).tocsc(), b.astype(wide)).reshape(b.shape)
    assert x.dtype == dtype and x.shape == b.shape
    tolerance = 1e-9 if np.finfo(dtype).bits == 64 else 2e-3
    assert np.linalg.norm(x - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_cudss_solves_matrices_that_are_not_symmetric(cudss: Any, dtype: str) -> None:
    A, wide = lopsided(40, dtype), numbers((40, 6), dtype)
    for index in ("int32", "int64"):
        there = bg.bsr_array((A.data, A.indices.astype(index), A.indptr.astype(index)), shape=A.shape).to_device("cuda")
        for part in (wide, wide[:, ::2], wide.T.copy().T):
            given = cudss.from_host(wide)[:, ::2] if part.shape[1] == 3 else cudss.from_host(part)
            x = cudss.to_host(linalg.spsolve(there, given))
            np.testing.assert_allclose(x, np.linalg.solve(A.toarray(), part), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_cudss_adds_duplicates_and_takes_wider_right_hand_sides(cudss: Any) -> None:
    twice = bg.bsr_array((np.array([[[3.0]], [[1.0]], [[2.0]]]), [0, 0, 1], [0, 2, 3]), shape=(2, 2)).to_device("cuda")
    x = linalg.spsolve(twice, cudss.from_host(np.array([8.0, 6.0])))
    np.testing.assert_allclose(cudss.to_host(x), [2.0, 3.0])
    A = bg.bsr_array(np.array([[4, 1], [2, 3]]), blocksize=(2, 2))
    b = np.array([6 + 1j, 8.0])
    x = cudss.to_host(linalg.spsolve(A.to_device("cuda"), cudss.from_host(b)))
    np.testing.assert_allclose(x, np.linalg.solve(A.toarray(), b), rtol=1e-12)
    assert linalg.spsolve(twice, cudss.from_host(np.ones((2, 0)))).shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
def test_cudss_tells_what_is_singular_or_not_finite(cudss: Any, dtype: str) -> None:
    for dense in (np.diag([1.0, 2, 3, 0]), np.ones((4, 4)), np.kron(np.eye(2), [[1.0, 2], [2, 4]])):
        singular = bg.bsr_array(dense.astype(dtype), blocksize=(2, 2)).to_device("cuda")
        with pytest.raises(RuntimeError, match="A: singular, or too badly conditioned"):
            linalg.spsolve(singular, cudss.from_host(np.array([1, 2, -1, 5]).astype(dtype)))
    A = hermitian(8, dtype).to_device("cuda")
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="b: wanted finite numbers"):
            linalg.spsolve(A, cudss.from_host(np.full(8, bad, dtype)))
    x = linalg.spsolve(A, cudss.from_host(np.ones(8, dtype)))  # the card works on
    np.testing.assert_allclose(cudss.to_host(x), np.linalg.solve(hermitian(8, dtype).toarray(), np.ones(8)), rtol=1e-5)
