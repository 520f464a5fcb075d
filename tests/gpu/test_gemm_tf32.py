"""Products in tf32 on Hopper's tensor cores: with a column-major B, and with a copy that columns_tf32 makes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._products import copies

from .marks import kernel, on_hopper, some_under_memcheck
from .product_cases import dense, device, exact_product, pattern, served_by, strided, values
from .repeats import differing

pytestmark = pytest.mark.gpu

F32 = np.dtype(np.float32)
#: The largest error of a product of two factors that are cut to 10 bits after the point, and of two that are rounded.
CUT, ROUNDED = 2**-9, 1.5 * 2**-10
BLOCKS = [(32, 32), (16, 16), (48, 24), (32, 96), (16, 8), (80, 16), (64, 40), (128, 32), (192, 64)]


@pytest.fixture
def every_copy_pays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies by columns pay for every matrix; with more than 100,000 bytes they come in panels."""
    for name in ("_WORTH_COLUMNS", "_USES", "_USES_OF_16"):
        monkeypatch.setattr(copies, name, 0)
    monkeypatch.setattr(copies, "_PANEL_BYTES", 100_000)
    monkeypatch.setattr(copies, "_PANEL_COLUMNS", 16)
    copies.tf32_panel.cache_clear()
    yield
    copies.tf32_panel.cache_clear()


@kernel("gemm_sm90", "row_matching")
@pytest.mark.parametrize("block", some_under_memcheck(BLOCKS, [(32, 32), (48, 24), (64, 40)]))
def test_a_column_major_operand(block, rng, checksum) -> None:
    import cupy

    for N, index, order, beta in [(16, "i4", "C", 0), (72, "i8", "F", -1), (256, "i4", "C", 0.5), (520, "i4", "F", 0)]:
        A = pattern(rng, 5, 4, *block, F32, np.dtype(index))
        B = values(rng, (A[3][1], N), F32)
        want, size = exact_product(A, B)
        dA, out = device(A), cupy.full(want.shape, 0.25, F32, order=order)
        bg.matmul(dA, strided(B, "F"), out=out, alpha=2, beta=beta, precision="tf32")
        assert served_by(dA) or N <= 64 or not len(A[1])
        checksum(cupy.ascontiguousarray(out))
        assert (np.abs(out.get() - 2 * want - 0.25 * beta) <= CUT * 2 * size + 1e-6).all()


@kernel("gemm_sm90", "columns_tf32", "row_matching")
@pytest.mark.parametrize("block", some_under_memcheck(BLOCKS, [(32, 32), (48, 24), (64, 40)]))
def test_a_copy_of_any_other_operand(block, rng, checksum, every_copy_pays) -> None:
    import cupy

    bound = CUT if block[0] % 64 == 0 else ROUNDED
    for N, layout in [(128, "C"), (65, "C"), (700, "C"), (320, "strided")]:
        A = pattern(rng, 5, 4, *block, F32)
        B = values(rng, (A[3][1], N), F32)
        want, size = exact_product(A, B)
        X = cupy.asarray(B) if layout == "C" else cupy.asarray(np.repeat(np.repeat(B, 3, 0), 2, 1))[::3, ::2]
        dA = device(A)
        got = bg.matmul(dA, X, precision="tf32")
        assert served_by(dA) or not len(A[1])  # nothing is stored
        checksum(got)
        assert (np.abs(got.get() - want) <= bound * size + 1e-6).all()
        np.testing.assert_array_equal(X.get(), B)
    batch = values(rng, (3, A[3][1], 200), F32)
    got = bg.matmul(device(A), cupy.asarray(batch), precision="tf32")
    for one, B in zip(got.get(), batch, strict=True):
        want, size = exact_product(A, B)
        assert (np.abs(one - want) <= bound * size + 1e-6).all()


@kernel("gemm_sm90", "columns_tf32", "row_matching")
@pytest.mark.parametrize("block", [(128, 64), (32, 32), (16, 16)], ids=str)
def test_it_repeats_and_keeps_nan_to_stored_blocks(block, rng, every_copy_pays) -> None:
    import cupy

    A = pattern(rng, 20, 12, *block, F32)
    B = values(rng, (A[3][1], 400), F32)
    B[block[1] + 3, 7], B[block[1] + 3, 9] = np.inf, np.nan
    dA, X = device(A), cupy.asarray(B)
    product = partial(bg.matmul, dA, X, precision="tf32")
    first = product()
    assert differing(product, first, 300) == 0
    D = dense(A, np.dtype(np.float64))
    rows = np.repeat((D[:, block[1] : 2 * block[1]] != 0).reshape(20, -1).any(axis=1), block[0])
    got = first.get()
    for column in (7, 9):
        assert not np.isfinite(got[rows, column]).any() and np.isfinite(got[~rows, column]).all()
    assert np.isfinite(np.delete(got, (7, 9), axis=1)).all()


@kernel("columns_tf32")
@pytest.mark.sanitizer
def test_the_copy_has_every_element_rounded(rng, checksum) -> None:
    import cupy

    if not on_hopper():
        pytest.skip("the kernel is for Hopper alone")
    from bsrgemm._products import launch

    for shape in ((64, 64), (1, 1), (8, 300), (129, 63), (3, 70, 66)):
        wide = rng.standard_normal((*shape[:-1], shape[-1] + 3)).astype(F32)
        for exact, x in [(wide[..., 2:-1], cupy.asarray(wide)[..., 2:-1]), (np.round(wide * 64),) * 2]:
            got = launch._columns_tf32(cupy.asarray(x))
            checksum(cupy.ascontiguousarray(got))
            assert got.shape == exact.shape and got.strides[-2] == 4
            read = (np.ascontiguousarray(got.get()).view(np.uint32) & np.uint32(0xFFFFE000)).view(F32)
            assert (np.abs(read - exact) <= 0.73 * 2**-10 * np.abs(exact)).all()
            assert (read == exact).all() or (exact != np.round(exact)).any()
