"""All that is promised of gemm_sm80: products on the tensor cores of Ampere and every card since."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._products import copied as copied_module
from bsrgemm._products import dense, gemm_sm80, prepared
from bsrgemm._products.real_views import RealViews

from ..devices import Device
from .products import BF16, C64, C128, F16, F32, F64, I8, I32, Case, cases, check, few_ctas, matrix, numbers

KERNEL = "GemmSm80"
SMALL = Case(F16, (32, 32), 72, F32, rows=4, cols=4)
MOST = float(np.finfo(F32).max)
#: Every type of product: dtypes of operands and of the result, and the precision.
TYPES = (
    *((F16, F16, None), (F16, F32, None), (BF16, BF16, None), (F32, F32, None), (F32, F32, "tf32")),
    *((F64, F64, None), (I8, I32, None)),
)


@pytest.fixture(autouse=True)
def ampere(device: Device) -> None:
    device.needs("sm_80")


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tensor cores take few columns of any matrix."""
    monkeypatch.setattr(dense, "_LARGE", 0)


def unique(case: Case) -> bool:
    """Blocks that are stored twice are added up in another matrix before a product of integers."""
    return case.dtype == I8


@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (2, -1)])
@cases(
    Case(F16, (32, 64), 72),
    Case(F16, (32, 48), 40, F32, b="F16", transposed=True),
    Case(BF16, (64, 64), 100, F32, c="F"),
    Case(F32, (32, 32), 72),
    Case(F32, (64, 48), 33, b="F16", precision="tf32"),
    Case(F64, (16, 16), 72),
    Case(F64, (48, 32), 24, b="F16", c="F", transposed=True),
    Case(I8, (32, 64), 48, I32, b="F16"),
    Case(F16, (32, 80), 72),  # the last stage along K has one step
    Case(F32, (32, 40), 72, b="F16"),
    Case(F64, (16, 24), 24, b="F16"),
    Case(F16, (128, 64), 130, F32, transposed=True, rows=3),
    large=tuple(
        Case(dtype, block, N, out, b=b, precision=precision, transposed=turned, index="i8")
        for dtype, out, precision in TYPES
        for block in ((128, 128), (64, 96), (32, 32), (16, 64), (48, 160))
        for N, b, turned in ((16, "C16", False), (208, "F16", False), (130, "C16", True), (144, "F16", True))
    ),
)
def test_products_are_exact(case: Case, alpha: Any, beta: Any, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, replace(case, alpha=alpha, beta=beta), matrix(rng, case, unique(case)))


@cases(
    *(
        replace(case, density=2, rows=80 if case.transposed else 3, cols=3 if case.transposed else 80)
        for case in (
            Case(F16, (32, 64), 40, F32),
            Case(BF16, (24, 40), 33, batches=2),
            Case(F32, (16, 32), 24, b="F16", transposed=True),
            Case(F32, (48, 32), 17, precision="tf32"),
            Case(F64, (20, 16), 20, batches=2),
            Case(I8, (32, 64), 20, I32, b="F16"),
        )
    ),
    Case(F16, (40, 64), 72, F32, rows=2, cols=60, density=2, alpha=1, beta=0),
    large=(Case(F64, (256, 256), 40, rows=3, cols=20, density=2), Case(F16, (48, 48), 300, rows=4, cols=200)),
)
@pytest.mark.sanitizer
def test_long_rows_are_cut_and_their_sums_added(
    case: Case, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, nothing_is_small: None
) -> None:
    """The sums of a split are those of some of the blocks; the last CTA that has some adds all, in their order."""
    made: list[int] = []
    scratch = gemm_sm80.Scratch
    monkeypatch.setattr(gemm_sm80, "Scratch", lambda *given: made.append(given[0]) or scratch(*given))
    A = matrix(rng, case, unique(case))
    on_device = check(device, KERNEL, case, A)
    assert made and made[0] > 0
    check(device, KERNEL, case, A, on_device)  # counters are zero again


@pytest.mark.before
@cases(
    Case(F16, (32, 80), 40, batches=2, density=2.0),
    Case(F16, (32, 48), 136, b="F16", batches=2, transposed=True, density=2.0),
    Case(F32, (32, 40), 36, c="F", batches=2, density=2.0),
    Case(F64, (16, 24), 26, b="F16", batches=2, density=2.0),
    Case(I8, (32, 64), 48, I32, batches=2, density=2.0),
    Case(F32, (64, 32), 132, b="F16", c="F", batches=2, transposed=True, density=2.0),
)
def test_nothing_is_read_or_written_beside_the_arrays(case: Case, device: Device, rng: np.random.Generator) -> None:
    """There are several batches, and every block is stored, the last block column too."""
    check(device, KERNEL, case, matrix(rng, replace(case, rows=4, cols=4), unique(case)))


@pytest.mark.parametrize("N", [2, 5, 15, 33, 101])
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
def test_any_number_of_columns(
    dtype: Any, N: int, device: Device, rng: np.random.Generator, nothing_is_small: None
) -> None:
    """Rows of B that do not begin at multiples of 16 bytes are copied to some that do."""
    case = Case(dtype, (32, 32), N, b="C", cols=4, rows=5)
    check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.parametrize(("block", "order"), [((32, 32), "C"), ((64, 40), "F")], ids=str)
def test_float32_keeps_24_bits_beside_infinity_nan_and_huge_numbers(
    block: tuple[int, int], order: str, device: Device, rng: np.random.Generator
) -> None:
    """Three products of tf32: exact where a sum meets none of these, and NaN or infinite where float64 says so."""
    A = matrix(rng, Case(F32, block, 72, rows=3, cols=3, density=2.0), unique=True)
    K, M = block[1], A.on(device)
    B = rng.integers(-(2**18), 2**18, (A.shape[1], 72)).astype(F32)
    exact = A.dense @ B.astype(np.float64)

    def product(right: Any) -> Any:
        with force_kernel(KERNEL):
            return device.asnumpy(bg.matmul(M, device.lying(right, order)))

    np.testing.assert_array_equal(product(B), exact.astype(F32))
    for bad in (-np.inf, np.nan, 3e38, 3.4020e38, MOST, -MOST):
        spoiled = B.copy()
        spoiled[[3, K + 5, 2 * K + 7], [2, 33, 71]] = bad
        want = np.zeros(exact.shape)
        R = block[0]
        with np.errstate(all="ignore"):
            for i in range(3):
                for p in range(A.indptr[i], A.indptr[i + 1]):
                    c = A.indices[p]
                    want[i * R : i * R + R] += A.data[p].astype(float) @ spoiled[c * K : c * K + K].astype(float)
            want = want.astype(F32)
        got = product(spoiled)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        others = [n for n in range(72) if n not in (2, 33, 71)]
        np.testing.assert_array_equal(got[:, others], exact[:, others])


@pytest.mark.parametrize("N", [72, 264])
@pytest.mark.parametrize("b", ["C16", "F16"])
def test_float64_in_blocks_of_64_rows_has_wide_tiles(
    b: str, N: int, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_sm80, "_WIDE", 0)
    case = Case(F64, (64, 24), N, b=b, rows=3)
    check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.races
@pytest.mark.parametrize(
    ("dtype", "block", "b"),
    [(F16, (32, 64), "C"), (F16, (32, 32), "F"), (F16, (32, 32), "C"), (F64, (64, 24), "F")],
    ids=str,
)
def test_warps_that_go_ahead_of_others(
    dtype: Any, block: tuple[int, int], b: str, device: Device, rng: np.random.Generator
) -> None:
    """Rows of very different lengths by one CTA, whose stages and indices come round again many times."""
    case = Case(dtype, block, 72, F32 if dtype == F16 else None, b=b, cols=40, density=0.4)
    with few_ctas(1):
        check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.emulated
@pytest.mark.parametrize("most", [1, 3])
def test_tiles_of_several_batches_for_few_ctas(most: int, device: Device, rng: np.random.Generator) -> None:
    case = Case(F16, (32, 32), 200, F32, batches=3, rows=7)
    with few_ctas(most):
        check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.parametrize(("first", "pitch", "batch"), [(0, 128, 8192), (1, 128, 8192), (0, 129, 8256), (0, 128, 8193)])
def test_results_that_do_not_begin_at_multiples_of_a_vector(
    first: int, pitch: int, batch: int, device: Device, rng: np.random.Generator
) -> None:
    """Whole tiles of columns, in lines or batches of any length; nothing beside them is written."""
    A = matrix(rng, replace(SMALL, rows=2))
    B = numbers(rng, (2, A.shape[1], 128), F16)
    room = device.asarray(np.full(2 * 8256 + 1, 7, F32))
    out = room[first : first + 2 * batch].reshape(2, batch)[:, : 64 * pitch].reshape(2, 64, pitch)[..., :128]
    with force_kernel(KERNEL):
        bg.matmul(A.on(device), device.asarray(B), out=out)
    np.testing.assert_array_equal(device.asnumpy(out), A.dense @ B.astype(float))
    out[...] = 7
    assert (device.asnumpy(room) == 7).all()


@pytest.mark.races
@pytest.mark.sanitizer
def test_nan_and_infinity_spread_only_through_stored_blocks(device: Device, rng: np.random.Generator) -> None:
    A = matrix(rng, Case(F32, (32, 32), 48, rows=4, cols=4))
    B = numbers(rng, (A.shape[1], 48), F32)
    B[40, 7], B[40, 9] = np.nan, np.inf
    A.data[...] = np.abs(A.data) + 1
    with force_kernel(KERNEL):
        got = device.asnumpy(bg.matmul(A.on(device), device.asarray(B)))
    meets = A.stored(1)
    assert meets.any() and not meets.all()
    want = np.zeros(got.shape, bool)
    want[meets, 7] = True
    np.testing.assert_array_equal(np.isnan(got), want)
    np.testing.assert_array_equal(np.isposinf(got[:, 9]), meets)
    assert np.isfinite(np.delete(got, [7, 9], axis=1)).all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
def test_indices_that_were_spoiled_are_left_out_and_bounds_are_not_believed(
    bad: int, dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    """No foreign memory is touched, and every row of the result is written."""
    case = Case(dtype, (32, 32), 72, rows=4, cols=4)
    A = matrix(rng, case)
    M = A.on(device)
    A.indices[1::2] = bad
    M.indices[1::2] = bad
    check(device, KERNEL, case, A, M)
    M.indptr[[1, 3]] = bad
    out = device.asarray(np.full((A.shape[0], 72), np.nan, dtype))
    with force_kernel(KERNEL):
        bg.matmul(M, device.asarray(numbers(rng, (A.shape[1], 72), dtype)), out=out)
    assert np.isfinite(device.asnumpy(out)).all()


@pytest.mark.parametrize(
    "case",
    [
        Case(C64, (32, 32), 100),
        Case(C64, (32, 32), 65),
        Case(C64, (16, 48), 100, alpha=2 - 1j, beta=0),
        Case(C64, (16, 16), 129, alpha=1, beta=0.5j, transposed=True),
        Case(C128, (48, 16), 100, alpha=1, beta=0.5j, transposed=True),
    ],
    ids=str,
)
def test_complex_products_go_through_real_ones(case: Case, device: Device, rng: np.random.Generator) -> None:
    """Values that were written to are read anew."""
    A = matrix(rng, case)
    with device.kernels() as kernels:
        M = check(device, KERNEL, case, A)
    assert "gemm_sm80" in kernels
    M.data *= 2
    A.data *= 2
    check(device, KERNEL, case, A, M)


@pytest.mark.emulated
def test_real_products_of_complex_ones_may_come_in_panels(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their operand is not there yet when the panels are prepared."""
    device.needs("sm_90a")
    monkeypatch.setattr(copied_module, "_PANEL_BYTES", 200_000)
    monkeypatch.setattr(copied_module, "_PANEL_COLUMNS", 64)
    usual = prepared.fastest

    def by_panels(problem: Any, card: Any, copies: bool) -> Any:
        views = (x for x in prepared.options(problem, copies) if isinstance(x, RealViews))
        return next((x for x in views if getattr(x.kernel, "order", "")), None) or usual(problem, card, copies)

    monkeypatch.setattr(prepared, "fastest", by_panels)
    case = Case(C64, (32, 32), 200)
    with device.kernels() as kernels:
        check(device, None, case, matrix(rng, case))
    assert kernels.count("rearrange") > 1 and "gemm_sm90" in kernels


@pytest.mark.large
@pytest.mark.parametrize(("dtype", "out_dtype", "precision"), TYPES, ids=str)
def test_results_repeat_bit_by_bit(
    dtype: Any, out_dtype: Any, precision: str | None, device: Device, rng: np.random.Generator
) -> None:
    for block in ((128, 64), (32, 32), (16, 32)):
        case = Case(dtype, block, 400, rows=20, cols=12)
        A = matrix(rng, case, unique(case)).on(device)
        if dtype != I8:
            A.data[...] = device.asarray(rng.standard_normal(A.data.shape).astype(dtype))
        B = device.asarray(numbers(rng, (A.shape[1], 400), dtype))
        with force_kernel(KERNEL):
            results = [bg.matmul(A, B, out_dtype=out_dtype, precision=precision) for _ in range(100)]
        first = device.asnumpy(results[0])
        assert all((device.asnumpy(x) == first).all() for x in results)


@pytest.mark.large
def test_float32_is_as_accurate_as_cublas(device: Device, rng: np.random.Generator) -> None:
    cupy, n = device.cupy, 2048
    A = matrix(rng, Case(F32, (32, 32), n, rows=n // 32, cols=n // 32), unique=True).on(device)
    A.data[...] = device.asarray(rng.standard_normal(A.data.shape).astype(F32))
    B = device.asarray(rng.standard_normal((n, n)).astype(F32))
    D = A.toarray()
    exact = D.astype(np.float64) @ B.astype(np.float64)
    size = cupy.abs(D).astype(np.float64) @ cupy.abs(B).astype(np.float64)
    size[size == 0] = 1  # empty rows
    with force_kernel(KERNEL):
        ours = float((cupy.abs(A @ B - exact) / size).max())
    assert 0 < ours <= 2 * float((cupy.abs(D @ B - exact) / size).max())


# ------------------------------------------------------------------------------------------------ numbers of any size


def product_of(device: Device, A: Any, B: Any, **how: Any) -> np.ndarray[Any, Any]:
    """A block of 32 x 32 by 32 rows in float32."""
    with force_kernel(KERNEL):
        found = bg.matmul(bg.bsr_array(device.asarray(A), blocksize=(32, 32)), device.asarray(B), **how)
    return device.asnumpy(found)


@pytest.mark.parametrize(
    ("left", "right"),
    [(2 - 2.0**-14, 2.0**127), (2.0**64 * (1 - 2.0**-24), 2.0**64 * (1 - 2.0**-23)), (1, MOST)],
)
def test_float32_products_just_below_overflow_are_finite(left: float, right: float, device: Device) -> None:
    """Their factors may round up in tf32."""
    got = product_of(device, np.diag(np.full(32, left, F32)), np.full((32, 72), right, F32))
    want = F32.type(left) * F32.type(right)
    assert np.isfinite(want)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("small", [2.0**-149, 2.0**-140, 2.0**-126, 2.0**-115])
def test_float32_numbers_that_have_no_remainder_in_tf32_are_whole(
    small: float, device: Device, rng: np.random.Generator
) -> None:
    A, B = rng.integers(-(2**5), 2**5, (32, 32)), rng.integers(-(2**13), 2**13, (32, 72))
    want = ((A @ B) * small).astype(F32)
    np.testing.assert_array_equal(product_of(device, A.astype(F32), (B * small).astype(F32)), want)
    spoiled = (B * small).astype(F32)
    spoiled[3, 5] = np.inf  # beside it are sums that do not meet it
    others = [n for n in range(72) if n != 5]
    np.testing.assert_array_equal(product_of(device, A.astype(F32), spoiled)[:, others], want[:, others])


@pytest.mark.parametrize("fill", [MOST, -MOST, 3.4017e38])
def test_the_largest_numbers_stay_finite_in_tf32(fill: float, device: Device) -> None:
    got = product_of(device, np.diag(np.full(32, 0.5, F32)), np.full((32, 72), fill, F32), precision="tf32")
    np.testing.assert_allclose(got, fill / 2, rtol=0.73 * 2**-10)
