"""gemm_few as it is, launched as it is, on the CPU; see test_emulated_kernels.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from bsrgemm._kernels import overlapping
from bsrgemm._kernels.element_types import Types
from bsrgemm._products import heuristics
from bsrgemm.dtypes import BFLOAT16

from . import emulator
from .emulator import Array, guarded
from .test_emulated_kernels import LAYOUTS, Matrix, believed, lying, numbers

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder, guarded, arch="sm_80"):
        yield


@pytest.fixture(params=[4, 8], ids=lambda warps: f"{warps} warps")
def warps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both numbers of warps, whatever the number of block rows."""
    monkeypatch.setattr(heuristics, "_FEW_ROW_TILES", 0 if request.param == 4 else 1 << 30)
    return int(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def assert_product(A: Matrix, B: Array, out: Array, alpha: Any = 1, beta: Any = 0, entry: str = "gemm_few") -> None:
    want = alpha * (A.dense @ np.asarray(B).astype(np.float64)) + beta * np.asarray(out).astype(np.float64)
    assert emulator.run_product(A, B, out, F32, alpha, beta).config.spec().entry == entry
    np.testing.assert_array_equal(out.get(), want.astype(out.dtype))


@pytest.mark.parametrize(
    ("block", "N", "dtype"),
    [((16, 32), 1, F16), ((32, 64), 3, BFLOAT16), ((48, 96), 8, F16), ((64, 160), 5, BFLOAT16)],
    ids=str,
)
def test_products_are_exact(block: tuple[int, int], N: int, dtype: Any, rng: np.random.Generator, warps: int) -> None:
    A = Matrix(rng, *block, dtype, put=guarded)
    for out_dtype, layout in ((dtype, "C"), (F32, "F")):
        B = guarded(numbers(rng, (A._shape[1], N), dtype))
        assert_product(
            A,
            B if layout == "C" else lying(np.asarray(B), "F"),
            guarded(np.full((A._shape[0], N), 3, out_dtype)),
            2,
            -1,
        )


@pytest.mark.parametrize("N", [2, 4, 6, 8])
def test_rows_of_b_are_read_in_pieces_of_any_width(N: int, rng: np.random.Generator, warps: int) -> None:
    A = Matrix(rng, 16, 96, F16, put=guarded)
    for more in (0, 1, 2, 4, 8):  # columns between the rows of B: pieces of 16, 8, 4 and 2 bytes are aligned
        wide = guarded(numbers(rng, (A._shape[1], N + more), F16))
        assert_product(A, wide[:, :N], guarded(np.ones((A._shape[0], N), F32)), 1, 3)


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [3, 4, 2, 3], [0, 0, 0, 4], [1, 3, 2, 2], [0, 0, 0, 0]], ids=str)
def test_rows_that_could_be_equally_long_are_read_where_they_are(
    lengths: list[int], rng: np.random.Generator, warps: int
) -> None:
    """The kernel guesses where the blocks of a row are if the mean is a whole number; it may be wrong."""
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("i4")
    data, col = numbers(rng, (indptr[-1], 32, 64), F16), rng.integers(0, 5, indptr[-1]).astype("i4")
    A = SimpleNamespace(data=guarded(data), indices=guarded(col), indptr=guarded(indptr), _shape=(128, 320))
    A.dense = scipy.sparse.bsr_array((data.astype(float), col, indptr), shape=A._shape).toarray()
    assert_product(A, guarded(numbers(rng, (320, 3), F16)), guarded(np.ones((128, 3), F32)), 1, 2)


def test_a_matrix_may_be_read_ahead(folder: Path, rng: np.random.Generator, warps: int) -> None:
    A = Matrix(rng, 32, 64, F16, put=guarded)
    B = guarded(numbers(rng, (A._shape[1], 5), F16))
    with emulator.emulated(folder, guarded, arch="sm_90a"):
        for active in (False, True):
            with overlapping.overlapping() if active else contextlib.nullcontext():
                out = guarded(np.zeros((A._shape[0], 5), F32))
                assert emulator.run_product(A, B, out, F32).config == heuristics.GemmFew(
                    Types("f16", "f16", "f32", "f32", "i32"), False, warps, active
                )
                np.testing.assert_array_equal(out.get(), A.dense @ np.asarray(B).astype(float))


@pytest.mark.races
def test_warps_share_a_row_without_races(rng: np.random.Generator, warps: int) -> None:
    A = Matrix(rng, 32, 64, F16, put=guarded)
    B, out = (guarded(numbers(rng, (n, 3), F16)) for n in A._shape[::-1])
    assert_product(A, B, out, 2, -1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("index", ["i4", "i8"])
def test_any_strides_and_batches(index: str, layout: str, rng: np.random.Generator) -> None:
    A = Matrix(rng, 32, 32, F16, index, put=guarded)
    for shape in ((), (3,)):
        B = lying(numbers(rng, (*shape, A._shape[1], 7), F16), layout)
        assert_product(A, B, lying(np.ones((*shape, A._shape[0], 7), np.float16), layout), 1, 2)


@pytest.mark.parametrize("which", ["indices", "indptr"])
def test_index_arrays_that_were_spoiled_are_believed_where_they_are_inside(
    which: str, rng: np.random.Generator
) -> None:
    """Whatever is read or written outside of the arrays ends the process."""
    for bad in (-1, 5, 2**31 - 1, -(2**31)):
        A = Matrix(rng, 16, 64, F16, put=guarded)
        if which == "indices":
            A.indices[[2, -1]] = bad
            A.data[2] = np.nan  # a block that is outside does not count
        else:
            A.indptr[[2, 4]] = bad
        spoiled = np.asarray(A.data).copy()
        A.data[np.isnan(spoiled)] = 0
        A.dense = believed(A, 16, 64)
        A.data[...] = spoiled
        B, out = (guarded(numbers(rng, (n, 4), F16)) for n in A._shape[::-1])
        assert_product(A, B, out, 1, 2)


def test_nan_reaches_the_rows_that_meet_it_and_no_others(rng: np.random.Generator) -> None:
    A = Matrix(rng, 16, 32, F16, put=guarded)
    B = guarded(numbers(rng, (A._shape[1], 2), F16))
    B[40] = np.nan
    out = guarded(np.zeros((A._shape[0], 2), np.float16))
    emulator.run_product(A, B, out, F32, 1, 0)
    stored = {i for i in range(6) for p in range(A.indptr[i], A.indptr[i + 1]) if A.indices[p] == 40 // 32}
    meets = np.isin(np.arange(A._shape[0]) // 16, sorted(stored))
    np.testing.assert_array_equal(np.isnan(out.get()).all(axis=1), meets)
    assert 0 < len(stored) < 6 and not np.isnan(out.get()[~meets]).any()


def test_loops_go_on_beyond_a_small_grid(rng: np.random.Generator) -> None:
    A = Matrix(rng, 32, 32, F16, put=guarded, rows=7)
    B, out = (guarded(numbers(rng, (3, n, 2), F16)) for n in A._shape[::-1])
    with emulator.few_ctas(2):
        assert_product(A, B, out, 2, -1)


@pytest.mark.parametrize(
    ("block", "N", "entry"),
    [((16, 32), 9, "gemm_simt"), ((16, 16), 1, "spmv_small"), ((24, 32), 2, "gemm_simt"), ((16, 24), 1, "spmv")],
)
def test_other_products_go_elsewhere(block: tuple[int, int], N: int, entry: str, rng: np.random.Generator) -> None:
    A = Matrix(rng, *block, F16, put=guarded)
    B, out = (guarded(numbers(rng, (n, N), F16)) for n in A._shape[::-1])
    assert_product(A, B, out, entry=entry)
