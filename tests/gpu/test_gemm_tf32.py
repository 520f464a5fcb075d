"""Products in tf32 and float32 on Hopper's tensor cores: with a column-major B, and with a copy by columns_tf32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._products import copies

from .marks import on_hopper, some_under_memcheck
from .product_cases import dense, device, exact_product, pattern, served_by, strided, values
from .repeats import bystanders, captured, differing, intact, new_stream

pytestmark = pytest.mark.gpu

F32 = np.dtype(np.float32)
#: The largest error of a product of two factors that are cut to 10 bits after the point, of two that are rounded, and
#: of two in two parts.
CUT, ROUNDED, PARTS = 2**-9, 1.5 * 2**-10, 5e-7
BLOCKS = [(32, 32), (16, 16), (48, 24), (32, 96), (16, 8), (80, 16), (64, 40), (128, 32), (192, 64)]


@pytest.fixture
def every_copy_pays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies by columns pay for every matrix; with more than 700,000 bytes they come in panels."""
    monkeypatch.setattr(copies, "_WORTH_COLUMNS", {1: (0, 0, 0, 0), 2: (0, 0, 0, 0)})
    monkeypatch.setattr(copies, "_LEAST_COLUMNS", 1)
    monkeypatch.setattr(copies, "_PANEL_BYTES", 700_000)
    monkeypatch.setattr(copies, "_PANEL_COLUMNS", 64)
    copies.column_panel.cache_clear()
    yield
    copies.column_panel.cache_clear()


@pytest.mark.parametrize("block", some_under_memcheck(BLOCKS, [(32, 32), (48, 24), (64, 40)]))
def test_a_column_major_operand(block, rng) -> None:
    import cupy

    for N, index, order, beta in [(16, "i4", "C", 0), (72, "i8", "F", -1), (256, "i4", "C", 0.5), (520, "i4", "F", 0)]:
        A = pattern(rng, 5, 4, *block, F32, np.dtype(index))
        B = values(rng, (A[3][1], N), F32)
        want, size = exact_product(A, B)
        dA, out = device(A), cupy.full(want.shape, 0.25, F32, order=order)
        bg.matmul(dA, strided(B, "F"), out=out, alpha=2, beta=beta, precision="tf32")
        assert served_by(dA) or N <= 64 or not len(A[1])
        assert (np.abs(out.get() - 2 * want - 0.25 * beta) <= CUT * 2 * size + 1e-6).all()


@pytest.mark.parametrize("block", some_under_memcheck(BLOCKS, [(32, 32), (48, 24), (64, 40)]))
@pytest.mark.parametrize("precision", ["tf32", "float32"])
def test_a_copy_of_any_other_operand(block, precision, rng, every_copy_pays) -> None:
    import cupy

    bound = PARTS if precision == "float32" else CUT if block[0] % 64 == 0 else ROUNDED
    for N, layout, beta in [(128, "C", 0), (70, "C", -1), (700, "C", 0), (320, "strided", 0.5), (136, "F", 2)]:
        A = pattern(rng, 5, 4, *block, F32)
        B = values(rng, (A[3][1], N), F32)
        want, size = exact_product(A, B)
        dA, X, out = device(A), strided(B, layout), cupy.full(want.shape, 0.25, F32)
        got = bg.matmul(dA, X, out=out, beta=beta, precision=precision)
        assert served_by(dA) or not len(A[1])  # nothing is stored
        assert (np.abs(got.get() - want - 0.25 * beta) <= bound * size + 2e-6).all()
        np.testing.assert_array_equal(X.get(), B)
    batch = values(rng, (3, A[3][1], 210), F32)
    got = bg.matmul(device(A), cupy.asarray(batch), precision=precision)
    for one, B in zip(got.get(), batch, strict=True):
        want, size = exact_product(A, B)
        assert (np.abs(one - want) <= bound * size + 2e-6).all()


@pytest.mark.parametrize("block", [(128, 64), (32, 32), (16, 16)], ids=str)
@pytest.mark.parametrize("precision", ["tf32", "float32"])
def test_it_repeats_and_keeps_nan_to_stored_blocks(block, precision, rng, every_copy_pays) -> None:
    import cupy

    A = pattern(rng, 20, 12, *block, F32)
    B = values(rng, (A[3][1], 400), F32)
    B[block[1] + 3, 7], B[block[1] + 3, 9] = np.inf, np.nan
    dA, X = device(A), cupy.asarray(B)
    product = partial(bg.matmul, dA, X, precision=precision)
    first = product()
    assert differing(product, first, 300) == 0
    D = dense(A, np.dtype(np.float64))
    rows = np.repeat((D[:, block[1] : 2 * block[1]] != 0).reshape(20, -1).any(axis=1), block[0])
    got = first.get()
    for column in (7, 9):
        assert not np.isfinite(got[rows, column]).any() and np.isfinite(got[~rows, column]).all()
    assert np.isfinite(np.delete(got, (7, 9), axis=1)).all()


def test_float32_takes_large_numbers_and_long_sums_of_one_sign(rng, every_copy_pays) -> None:
    import cupy

    A = pattern(rng, 4, 200, 32, 32, F32)
    A[0][...] = np.abs(A[0])
    B = np.abs(values(rng, (A[3][1], 96), F32))
    want, size = exact_product(A, B)
    got = bg.matmul(device(A), cupy.asarray(B)).get()
    assert (np.abs(got - want) <= 2e-6 * size).all()  # the tensor cores truncate sums of 32 products
    B[3, 5], A[0][0, 4, 3] = 3.4028235e38, 3.4e38  # they round to infinity with 11 bits
    want = dense(A, np.dtype(np.float64)) @ B.astype(np.float64)
    got, fits = bg.matmul(device(A), cupy.asarray(B)).get(), np.abs(want) < 3.4e38
    assert (np.isfinite(got) == fits).all() and (np.abs(got - want)[fits] <= 1e-5 * want[fits]).all()


@pytest.mark.parametrize("precision", ["tf32", "float32"])
def test_a_captured_product_keeps_its_copies(precision, rng, every_copy_pays) -> None:
    """Arrays made after the capture are not where panels of B are copied."""
    import cupy

    A = device(pattern(rng, 6, 6, 32, 32, F32))
    B = cupy.asarray(values(rng, (A.shape[1], 1600), F32))  # two panels, or three
    want, out, stream = bg.matmul(A, B, precision=precision), cupy.empty((A.shape[0], 1600), F32), new_stream()
    with stream:
        product = partial(bg.matmul, A, B, out=out, precision=precision)
        product()
        graph = captured(stream, product)
        others = bystanders([700_000, 400_000, 200_000])
        out.fill(0)
        graph.launch()
        graph.launch()
        stream.synchronize()
        assert bool((out == want).all()) and intact(others)


@pytest.mark.sanitizer
def test_the_copy_has_every_element_rounded(rng) -> None:
    import cupy

    if not on_hopper():
        pytest.skip("the kernel is for Hopper alone")
    from bsrgemm._products import launch

    for shape in ((64, 64), (1, 1), (8, 300), (129, 63), (3, 70, 66)):
        wide = rng.standard_normal((*shape[:-1], shape[-1] + 3)).astype(F32)
        for exact, x in [(wide[..., 2:-1], cupy.asarray(wide)[..., 2:-1]), (np.round(wide * 64),) * 2]:
            got = launch._columns_tf32(cupy.asarray(x), 1, cupy.empty(x.size, F32))
            assert got.shape == exact.shape and got.strides[-2] == 4
            read = (np.ascontiguousarray(got.get()).view(np.uint32) & np.uint32(0xFFFFE000)).view(F32)
            assert (np.abs(read - exact) <= 0.73 * 2**-10 * np.abs(exact)).all()
            assert (read == exact).all() or (exact != np.round(exact)).any()


@pytest.mark.sanitizer
def test_every_element_of_a_copy_has_two_parts(rng) -> None:
    import cupy

    if not on_hopper():
        pytest.skip("the kernel is for Hopper alone")
    from bsrgemm._products import launch

    for shape in ((64, 64), (1, 1), (8, 300), (129, 63), (3, 70, 66)):
        x = rng.standard_normal(shape).astype(F32)
        x.reshape(-1)[-2:] = (np.inf, 3.4028235e38)[-x.size :]
        for exact in (x, x.swapaxes(-1, -2)):
            first = launch._columns_tf32(cupy.asarray(exact), 2, cupy.empty(2 * x.size, F32))
            both = cupy.ndarray((*exact.shape[:-2], 2, *exact.shape[:-3:-1]), F32, first.data).get().swapaxes(-1, -2)
            np.testing.assert_array_equal(both.sum(axis=-3), exact)
            assert not (np.ascontiguousarray(both[..., 0, :, :]).view(np.uint32) & 0x1FFF).any()
