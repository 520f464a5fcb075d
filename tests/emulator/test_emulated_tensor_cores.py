"""gemm_sm90 as it is, launched as it is, on the CPU: copy engine, barriers and products of warpgroups are emulated.

What a card does at the same time is done here in any order, copies some time and products at once: the bookkeeping of
the pipeline is tested, not what the hardware leaves under way. Numbers are small integers, whose sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import device, graphs, jit, workspace
from bsrgemm._products import copies, launch, sm90_tiles, work_list
from bsrgemm._products.call import ProductCall
from bsrgemm.dtypes import BFLOAT16

from . import emulator
from .emulator import Array, guarded, put

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder, arch="sm_90a"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


class Matrix:
    """Random blocks with an empty row, and the same matrix dense."""

    def __init__(
        self,
        rng: np.random.Generator,
        block: tuple[int, int],
        dtype: Any = F16,
        rows: int = 4,
        cols: int = 4,
        share: float = 0.6,
    ):
        R, K = block
        there = rng.random((rows, cols)) < share
        there[1], there[0, :2] = False, True
        row, col = np.nonzero(there)
        self.data = put(rng.integers(-2, 3, (len(row), R, K)).astype(dtype))
        self.indices = put(col.astype(np.int32))
        self.indptr = put(np.searchsorted(row, np.arange(rows + 1)).astype(np.int32))
        self._shape = (rows * R, cols * K)
        self.blocks = np.zeros((rows, cols, R, K))
        self.blocks[row, col] = self.data.astype(np.float64)

    @property
    def dense(self) -> np.ndarray[Any, Any]:
        return self.blocks.swapaxes(1, 2).reshape(self._shape)


def laid_out(x: np.ndarray[Any, Any], order: str) -> Array:
    return put(x) if order == "C" else put(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)


def multiply(A: Matrix, B: Array, out: Array, alpha: float = 1.0, beta: float = 0.0, **how: Any) -> Any:
    """out = alpha * A @ B + beta * out by gemm_sm90; its plan."""
    plan = emulator.run_product(A, B, out, F32, alpha, beta, **how)
    assert plan.config.spec().entry == "gemm_sm90"
    assert not any(counters.any() for counters in workspace._zeroed.values())  # as the next launch wants them
    return plan


@pytest.mark.parametrize(
    ("block", "columns", "orders", "transposed", "out_dtype", "beta"),
    [
        ((128, 64), 64, "CC", False, F16, 0.0),
        ((128, 128), 256, "CC", False, F16, 0.0),
        ((128, 64), 72, "FF", False, F16, 0.0),
        ((128, 64), 72, "FC", False, F32, 2.0),
        ((64, 64), 64, "CC", True, F16, 0.0),
        ((64, 112), 200, "FC", False, F16, 0.0),
        ((32, 32), 256, "CC", False, F16, 0.0),
        ((16, 16), 72, "CC", True, F32, -1.0),
        ((48, 80), 64, "FC", False, F16, 0.0),
        ((16, 32), 24, "CC", False, F16, 3.0),
    ],
)
@pytest.mark.parametrize("few", [0, sm90_tiles.FEW_TILES], ids=["tiles of 128 rows", "by rule"])
def test_products_are_exact(block, columns, orders, transposed, out_dtype, beta, few, rng, monkeypatch) -> None:
    monkeypatch.setattr(sm90_tiles, "FEW_TILES", few)
    A = Matrix(rng, block)
    dense = A.dense.T if transposed else A.dense
    B = laid_out(rng.integers(-2, 3, (dense.shape[1], columns)).astype(F16), orders[0])
    out = laid_out(rng.integers(-2, 3, (dense.shape[0], columns)).astype(out_dtype), orders[1])
    want = 2 * (dense @ np.asarray(B).astype(np.float64)) + beta * np.asarray(out).astype(np.float64)
    multiply(A, B, out, 2.0, beta, transposed=transposed)
    np.testing.assert_array_equal(np.asarray(out).astype(np.float64), want)


def test_bfloat16_and_fp8(rng) -> None:
    for dtype, fp8 in ((BFLOAT16, False), (np.dtype(ml_dtypes.float8_e4m3fn), True)):
        A = Matrix(rng, (64, 64), dtype)
        b = rng.integers(-2, 3, (A._shape[1], 64)).astype(dtype)
        B = laid_out(b, "F")
        if fp8:
            A.data, B = put(np.asarray(A.data).view(np.uint8)), laid_out(b.view(np.uint8), "F")
        out = put(np.full((A._shape[0], 64), 7, F32))
        multiply(A, B, out, fp8=fp8)
        np.testing.assert_array_equal(out, A.dense @ b.astype(np.float64))


@pytest.mark.parametrize(
    ("block", "columns"), [((32, 32), 256), ((16, 16), 72), ((32, 64), 40), ((48, 24), 136), ((128, 40), 20)], ids=str
)
def test_tf32(block, columns, rng) -> None:
    A = Matrix(rng, block, F32)
    B = laid_out(rng.integers(-2, 3, (A._shape[1], columns)).astype(F32), "F")
    out = put(rng.integers(-2, 3, (A._shape[0], columns)).astype(F32))
    want = A.dense @ np.asarray(B) - np.asarray(out)
    multiply(A, B, out, 1.0, -1.0, tf32=True)
    np.testing.assert_array_equal(out, want)


@pytest.fixture
def every_copy_pays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies by columns pay for every matrix; with more than 100,000 bytes they come in panels."""
    monkeypatch.setattr(copies, "_WORTH_COLUMNS", {1: (0, 0, 0, 0), 2: (0, 0, 0, 0)})
    monkeypatch.setattr(copies, "_LEAST_COLUMNS", 1)
    monkeypatch.setattr(copies, "_PANEL_BYTES", 100_000)
    monkeypatch.setattr(copies, "_PANEL_COLUMNS", 64)
    copies.column_panel.cache_clear()
    yield
    copies.column_panel.cache_clear()


def by_copies(A: Matrix, B: Array, out: Array, beta: float = 0.0, tf32: bool = False) -> list[str]:
    """out = A @ B + beta * out by copies of B; the kernels that were launched."""
    launched: list[str] = []
    load = jit.load
    with patch.object(jit, "load", lambda spec, arch: launched.append(spec.entry) or load(spec, arch)):
        A._backend, A._matrix_cache = HOST, None
        launch.product(ProductCall(A, B, out, F32, 1, beta, tf32=tf32))
    return launched


@pytest.mark.parametrize("most", [None, 1], ids=["a whole grid", "one CTA along each side"])
@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "float32"])
def test_products_by_copies_of_panels(most, tf32, rng, every_copy_pays, monkeypatch) -> None:
    monkeypatch.setattr(copies, "_PANEL_BYTES", 100_000 if tf32 else 200_000)
    A = Matrix(rng, (32, 40), F32, cols=3)
    wide = put(rng.integers(-2, 3, (2, A._shape[1], 299)).astype(F32))
    for B, panels in ((wide[0, :, :296], 2), (wide[:, :, :297], 5), (wide[0, :, ::3], 1)):
        out = put(np.full((*B.shape[:-2], A._shape[0], B.shape[-1]), 7, F32))
        with emulator.few_ctas(most) if most else nullcontext():
            launched = by_copies(A, B, out, 1, tf32)
        np.testing.assert_array_equal(out, 7 + A.dense @ np.asarray(B))
        assert launched.count("columns_tf32") == panels and launched.count("gemm_sm90") >= 1


@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "float32"])
def test_a_product_without_memory_for_a_copy_is_computed_without_it(tf32, rng, every_copy_pays, monkeypatch) -> None:
    def full(*how: Any) -> Any:
        raise MemoryError  # as CuPy's OutOfMemoryError is

    without_memory = SimpleNamespace(**vars(launch.cupy) | {"empty": full})
    A = Matrix(rng, (32, 40), F32)
    B = put(rng.integers(-2, 3, (A._shape[1], 96)).astype(F32))
    out = put(np.full((A._shape[0], 96), 7, F32))
    with monkeypatch.context() as little:
        little.setattr(launch, "cupy", without_memory)
        launched = by_copies(A, B, out, 0, tf32)
        np.testing.assert_array_equal(out, A.dense @ np.asarray(B))
        assert "gemm_sm80" in launched and "columns_tf32" not in launched
        little.setattr(graphs, "is_capturing", lambda: True)
        with pytest.raises(MemoryError):
            by_copies(A, B, out, 0, tf32)
    call = ProductCall(A, B, out, F32, tf32=tf32)
    with patch.object(launch, "cupy", without_memory):
        assert launch.product(call) is None  # nothing is remembered: the next call copies
    with patch.object(launch, "_columns_tf32", wraps=launch._columns_tf32) as copied:
        assert launch.product(call) is None
    assert copied.call_count >= 1
    np.testing.assert_array_equal(out, A.dense @ np.asarray(B))


@pytest.mark.races
@pytest.mark.parametrize("block", [(32, 32), (16, 16), (64, 64), (128, 40), (48, 24), (16, 8)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_float32_in_two_parts_is_as_accurate_as_float32(block, order, rng, every_copy_pays) -> None:
    A = Matrix(rng, block, F32, rows=5, cols=3)
    A.data[...] = rng.standard_normal(A.data.shape).astype(F32)
    A.blocks[A.blocks.any(axis=(2, 3))] = A.data
    B = laid_out(rng.standard_normal((A._shape[1], 96)).astype(F32), order)
    out = put(np.full((A._shape[0], 96), 7, F32))
    assert {"columns_tf32", "gemm_sm90"} <= set(by_copies(A, B, out))
    b = np.asarray(B).astype(np.float64)
    assert (np.abs(np.asarray(out) - A.dense @ b) <= 4e-7 * (np.abs(A.dense) @ np.abs(b))).all()


def test_float32_in_two_parts_keeps_large_numbers_infinity_and_nan(rng, every_copy_pays) -> None:
    A = Matrix(rng, (32, 32), F32, rows=4, cols=2)
    stored = A.blocks.any(axis=(2, 3))
    A.data[...] = rng.standard_normal(A.data.shape).astype(F32)
    b = rng.standard_normal((A._shape[1], 80)).astype(F32)
    b[3, :7] = np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 1e38, 1e-30
    A.data[0, 5, 3], A.data[1, 6, 4], A.data[2, 7, 5] = 3.4e38, np.inf, np.nan
    A.blocks[stored] = A.data
    out = put(np.full((A._shape[0], 80), 7, F32))
    by_copies(A, put(b), out)
    with np.errstate(all="ignore"):
        a = A.dense.astype(F32)
        want = sum(np.where(a[:, [k]] == 0, F32.type(0), a[:, [k]] * b[k]) for k in range(len(b)))  # as exact_sum
        scale = np.abs(a) @ np.abs(b)
    got, finite = np.asarray(out), np.isfinite(want) & (scale < 1e38)
    assert (np.abs(got[finite] - want[finite]) <= 1e-6 * scale[finite]).all()
    lost = ~np.isfinite(want)
    np.testing.assert_array_equal(got[lost], want[lost])
    assert finite.mean() > 0.8 and lost.mean() > 0.02


def test_the_copy_for_tf32_is_tf32(rng) -> None:
    x = rng.standard_normal((2, 70, 65)).astype(F32)
    x[0, 3, :4] = np.nan, np.inf, -np.inf, 0.0
    got = np.asarray(launch._columns_tf32(put(x), 1, put(np.empty(x.size, F32)))).swapaxes(-1, -2)
    words = np.ascontiguousarray(got).view(np.uint32)
    assert not (words & 0x1FFF).any()
    want, finite = x.swapaxes(-1, -2), np.isfinite(x.swapaxes(-1, -2))
    np.testing.assert_array_equal(got[~finite], want[~finite])
    assert (np.abs(got[finite] - want[finite]) <= 0.73 * 2**-10 * np.abs(want[finite])).all()


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_two_parts_of_a_copy_add_up_to_it(order, rng) -> None:
    x = (rng.standard_normal((2, 70, 65)) * 10.0 ** rng.integers(-30, 30, (2, 70, 65))).astype(F32)
    x[0, 3, :8] = np.nan, np.inf, -np.inf, 0.0, 3.4028235e38, -3.4028235e38, 1e-45, -1e-40
    x.view(np.uint32)[1, 5, :3] = 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF  # any NaN
    room = put(np.empty(2 * x.size, F32))
    launch._columns_tf32(laid_out(x, order), 2, room)
    both = np.asarray(room).reshape(2, 2, 65, 70)
    assert not (np.ascontiguousarray(both[:, 0]).view(np.uint32) & 0x1FFF).any()
    np.testing.assert_array_equal(both[:, 0] + both[:, 1], x.swapaxes(-1, -2))
    finite = np.isfinite(x.swapaxes(-1, -2))
    assert (np.abs(both[:, 1][finite]) <= 2.0**-10 * np.abs(x.swapaxes(-1, -2)[finite]) + 1e-38).all()


def test_batches_are_one_launch(rng) -> None:
    A = Matrix(rng, (64, 32))
    B = put(rng.integers(-2, 3, (3, A._shape[1], 64)).astype(F16))
    out = put(np.full((3, A._shape[0], 64), 7, F16))
    multiply(A, B, out)
    np.testing.assert_array_equal(np.asarray(out).astype(np.float64), A.dense @ np.asarray(B).astype(np.float64))


@pytest.mark.parametrize(("block", "order"), [((64, 32), "C"), ((32, 32), "C"), ((64, 64), "F")], ids=str)
def test_many_tiles_are_dealt_and_then_claimed_each_once(block, order, rng) -> None:
    """Items of equal length: a CTA has rounds of tiles of its own before it claims others."""
    A = Matrix(rng, block, rows=3, cols=3, share=2.0)
    B = laid_out(rng.integers(-2, 3, (7, A._shape[1], 136)).astype(F16), order)
    out = put(np.full((7, A._shape[0], 136), 7, F32))
    multiply(A, B, out, 1.0, 1.0)
    np.testing.assert_array_equal(np.asarray(out), 7 + A.dense @ np.asarray(B).astype(np.float64))


@pytest.mark.races
def test_long_rows_come_in_pieces_that_are_added_up(rng) -> None:
    A = Matrix(rng, (128, 64), rows=2, cols=60)
    B = put(rng.integers(-1, 2, (A._shape[1], 64)).astype(F16))
    out = put(np.full((A._shape[0], 64), 7, F32))
    plan = multiply(A, B, out)
    assert plan.scratch.floats > 0
    np.testing.assert_array_equal(out, A.dense @ np.asarray(B).astype(np.float64))


@pytest.mark.parametrize("columns", [40, 64, 136])
def test_bits_do_not_depend_on_what_a_cta_did_before(columns, rng) -> None:
    """Rows of odd and even lengths: warpgroups that take turns begin anew at each tile."""
    A = Matrix(rng, (64, 64), rows=9, cols=7)
    A.data[...] = rng.standard_normal(A.data.shape).astype(F16)
    B = put(rng.standard_normal((A._shape[1], columns)).astype(F16))
    bits = []
    for ctas in (1, 2, 64):
        A._matrix_cache = None
        out = put(np.full((A._shape[0], columns), 7, F32))
        with (
            patch.object(device, "multiprocessors", lambda ctas=ctas: ctas),
            patch.object(work_list, "_LEAST_COLUMNS", 1 << 20),
        ):
            plan = multiply(A, B, out)
        assert plan.config.tile_m == 64
        bits.append(np.asarray(out).tobytes())
    assert bits[0] == bits[1] == bits[2]


@pytest.mark.races
@pytest.mark.parametrize("block", [(32, 32), (128, 64)], ids=str)
def test_nan_spreads_only_through_stored_blocks(block, rng) -> None:
    A = Matrix(rng, block)
    b = rng.integers(-2, 3, (A._shape[1], 64)).astype(F16)
    b[block[1] * 2 + 3, 5] = np.nan  # block column 2
    out = put(np.full((A._shape[0], 64), 7, F16))
    multiply(A, put(b), out)
    want = np.zeros(out.shape, bool)
    want[:, 5] = np.repeat(A.blocks[:, 2].any(axis=(1, 2)), block[0])
    np.testing.assert_array_equal(np.isnan(np.asarray(out)), want)


@pytest.mark.races
@pytest.mark.parametrize(("block", "rows", "cols"), [((32, 32), 24, 30), ((128, 64), 7, 14)], ids=str)
def test_one_cta_has_more_tiles_and_stages_than_it_holds(block, rows, cols, rng) -> None:
    """What comes next takes the places of what all lanes have read."""
    many, long = (Matrix(rng, block, F16, *size, share=2.0) for size in ((rows, 2), (2, cols)))
    with patch.object(device, "multiprocessors", lambda: 1):
        for each in (many, long):
            B = put(rng.integers(-2, 3, (each._shape[1], 64)).astype(F16))
            out = put(np.full((each._shape[0], 64), 7, F16))
            multiply(each, B, out)
            np.testing.assert_array_equal(out.astype(np.float64), each.dense @ np.asarray(B).astype(np.float64))


@pytest.mark.parametrize("block", [(32, 32), (64, 64), (128, 64), (64, 112)], ids=str)
def test_infinity_and_nan_in_many_places_spread_only_through_stored_blocks(block, rng) -> None:
    """In every block column of B, in columns of every tile; sums that meet none of them are exact."""
    A = Matrix(rng, block, rows=6, cols=5)
    K = block[1]
    b = rng.integers(-2, 3, (A._shape[1], 136)).astype(F16)
    for c in range(5):
        b[c * K + 7 * c, 20 * c + 3], b[c * K + 2, 20 * c + 40] = np.inf, np.nan
    for beta in (0.0, 1.0):
        out = put(np.full((A._shape[0], 136), 1, F32))
        multiply(A, put(b), out, 1.0, beta)
        stored = np.abs(A.blocks).max(axis=(2, 3)) > 0
        want = np.full(out.shape, beta)
        for i, c in zip(*np.nonzero(stored), strict=True):
            rows = slice(i * block[0], (i + 1) * block[0])
            with np.errstate(invalid="ignore"):
                want[rows] += A.blocks[i, c] @ b[c * K : (c + 1) * K].astype(np.float64)
        np.testing.assert_array_equal(np.asarray(out), want)


@pytest.mark.parametrize(
    ("block", "columns", "orders", "transposed", "out_dtype", "size"),
    [
        ((32, 32), 72, "CC", False, F16, (3, 4)),
        ((16, 16), 136, "FC", True, F32, (5, 4)),
        ((48, 80), 72, "CF", False, F16, (3, 2)),
        ((32, 32), 64, "CC", False, F32, (2, 90)),  # in pieces
        ((64, 64), 72, "CF", False, F32, (3, 3)),
        ((128, 64), 136, "FC", False, F16, (3, 3)),
    ],
    ids=str,
)
def test_batches_beside_which_nothing_is_touched(
    block, columns, orders, transposed, out_dtype, size, folder, rng
) -> None:
    """The second batch meets an infinity and a NaN; arrays end, or begin, where the process would."""

    def lying(x: Any, order: str, before: bool) -> Array:
        return guarded(x, before) if order == "C" else guarded(x.swapaxes(1, 2).copy(), before).swapaxes(1, 2)

    for before, beta in ((False, 0.0), (True, -1.0)):
        with emulator.emulated(folder, lambda x, before=before: guarded(x, before), arch="sm_90a"):
            A = Matrix(rng, block, F16, *size)
            A.data, A.indices, A.indptr = (guarded(x, before) for x in (A.data, A.indices, A.indptr))
            blocks = A.blocks.swapaxes(0, 1).swapaxes(2, 3) if transposed else A.blocks
            (rows, cols), (R, K) = blocks.shape[:2], blocks.shape[2:]
            b = rng.integers(-2, 3, (2, cols * K, columns)).astype(F16)
            b[1, [K + 2, 2 * K - 1], [columns - 1, 3]] = np.inf, np.nan
            B = lying(b, orders[0], before)
            out = lying(rng.integers(-2, 3, (2, rows * R, columns)).astype(out_dtype), orders[1], before)
            want = beta * np.asarray(out).astype(np.float64)
            for i, c in zip(*np.nonzero(np.abs(blocks).max(axis=(2, 3)) > 0), strict=True):
                with np.errstate(invalid="ignore"):
                    want[:, i * R : (i + 1) * R] += 2 * (blocks[i, c] @ b[:, c * K : (c + 1) * K].astype(np.float64))
            plan = multiply(A, B, out, 2.0, beta, transposed=transposed)
            assert (plan.scratch.floats > 0) == (size[1] == 90)
            np.testing.assert_array_equal(np.asarray(out).astype(np.float64), want)


@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, 77, -(2**31)])
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (16, 16)], ids=str)
def test_spoiled_indices_are_left_out_and_read_nothing_outside(block, garbage, folder, rng) -> None:
    """Whatever is read or written outside of the arrays ends the process."""
    with emulator.emulated(folder, guarded, arch="sm_90a"):
        A = Matrix(rng, block)
        A.data, A.indices, A.indptr = map(guarded, (A.data, A.indices, A.indptr))
        row = np.repeat(np.arange(4), np.diff(A.indptr))
        A.blocks[row[1::2], np.asarray(A.indices)[1::2]] = 0
        A.indices[1::2] = garbage
        B = guarded(rng.integers(-2, 3, (A._shape[1], 64)).astype(F16))
        out = guarded(np.full((A._shape[0], 64), np.nan, F16))
        multiply(A, B, out)
        np.testing.assert_array_equal(out.astype(np.float64), A.dense @ np.asarray(B).astype(np.float64))
        spoiled = np.array(B)
        spoiled[:: block[1], 3] = np.inf  # sums that are computed again leave them out too
        multiply(A, guarded(spoiled), out)
        assert not np.isfinite(out[:, 3].astype(np.float64)).all()
        wanted = A.dense @ np.asarray(B).astype(np.float64)
        np.testing.assert_array_equal(np.delete(out, 3, axis=1).astype(np.float64), np.delete(wanted, 3, axis=1))
        A.indptr[[1, 3]] = garbage
        out[...] = np.nan
        multiply(A, B, out)
        assert np.isfinite(out.astype(np.float64)).all()  # every row is written
