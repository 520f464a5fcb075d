"""All that is promised of gemm_sm90: products on Hopper's tensor cores, whose operands the copy engine brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._products import copied as copied_module
from bsrgemm._products import dense, gemm_sm90, prepared, work_list

from ..devices import Device
from ..gpu.repeats import delay, differing, on_streams
from .products import BF16, E4M3, F16, F32, Bsr, Case, cases, check, in_pieces, matrix, numbers

KERNEL = "GemmSm90"
#: From shared memory with and without a tail; from registers, in one piece of memory or not.
BLOCKS = (
    *((64, 64), (128, 128), (128, 64), (64, 16), (192, 48), (256, 80), (64, 112), (128, 256)),
    *((16, 16), (32, 32), (16, 64), (32, 16), (48, 80), (96, 96), (80, 48), (32, 192)),
)


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    device.needs("sm_90a")


@pytest.fixture(params=[0, gemm_sm90.FEW_TILES], ids=["tiles of 128 rows", "by rule"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are computed in tiles of 64 rows, or in tiles of 128 rows as large ones are."""
    monkeypatch.setattr(gemm_sm90, "FEW_TILES", request.param)


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tensor cores take few columns of any matrix."""
    monkeypatch.setattr(dense, "_LARGE", 0)


@pytest.mark.usefixtures("tiles")
@cases(
    Case(F16, (128, 64), 64, beta=0),
    Case(F16, (128, 128), 256, beta=0),
    Case(F16, (128, 64), 72, b="F", c="F", beta=0),
    Case(F16, (128, 64), 72, F32, b="F"),
    Case(F16, (64, 64), 64, transposed=True, beta=0),
    Case(F16, (64, 112), 200, b="F", beta=0),
    Case(F16, (32, 32), 256, beta=0),
    Case(F16, (16, 16), 72, F32, transposed=True),
    Case(F16, (48, 80), 64, b="F", beta=0),
    Case(F16, (16, 32), 24, beta=3),
    Case(BF16, (64, 64), 64, F32),
    Case(E4M3, (64, 64), 64, F32, b="F"),
    large=tuple(
        Case(dtype, block, N, out, b=b, c=c, beta=beta, transposed=turned, index=index)
        for dtype in (F16, BF16)
        for block in BLOCKS
        for N, index, b, turned in (
            *((16, "i4", "C", False), (72, "i8", "F", False), (256, "i4", "F", True), (520, "i4", "C", True)),
        )
        for out, c, beta in ((None, "C", 0), (F32, "C", -1), (None, "F", 0))
    ),
)
def test_products_are_exact(case: Case, device: Device, rng: np.random.Generator) -> None:
    case = replace(case, rows=4, cols=4)
    check(device, KERNEL, case, matrix(rng, case, unique=case.dtype == E4M3))


@cases(
    Case(F32, (32, 32), 256, b="F"),
    Case(F32, (16, 16), 72, b="F"),
    Case(F32, (32, 64), 40, b="F"),
    Case(F32, (48, 24), 136, b="F"),
    Case(F32, (128, 40), 20, b="F"),
    Case(F32, (192, 64), 520, b="F", c="F", index="i8", rows=3),
    large=tuple(
        Case(F32, block, N, b="F", c=c)
        for block in ((32, 32), (16, 16), (48, 24), (32, 96), (16, 8), (80, 16), (64, 40), (128, 32), (192, 64))
        for N, c in ((72, "F"), (256, "C"), (520, "F"))
    ),
)
def test_tf32_of_columns_of_b(case: Case, device: Device, rng: np.random.Generator) -> None:
    case = replace(case, precision="tf32")
    check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.parametrize("N", [2, 7, 15, 33, 101])
@pytest.mark.parametrize("block", [(64, 64), (48, 80)], ids=str)
@pytest.mark.parametrize("layout", ["C", "F", "gaps", "backwards"])
def test_any_number_of_columns_in_any_layout(
    block: tuple[int, int], N: int, layout: str, device: Device, rng: np.random.Generator, nothing_is_small: None
) -> None:
    case = Case(F16, block, N, b=layout, cols=4, rows=4)
    A = matrix(rng, case)
    M = check(device, KERNEL, case, A)
    check(device, KERNEL, replace(case, out=F32, batches=2, beta=0), A, M)


def test_a_vector_with_the_matrix_on_the_right(device: Device, rng: np.random.Generator) -> None:
    A = matrix(rng, Case(F16, (64, 64), 72))
    X = numbers(rng, (72, A.shape[0]), F16)
    with force_kernel(KERNEL):
        got = device.asnumpy(device.asarray(X) @ A.on(device))
    np.testing.assert_array_equal(got, X.astype(float) @ A.dense)


@pytest.mark.parametrize("block", [(128, 32), (32, 32)], ids=str)
def test_nothing_beyond_a_view_is_written(block: tuple[int, int], device: Device, rng: np.random.Generator) -> None:
    A = matrix(rng, Case(F16, block, 96))
    B, old = numbers(rng, (A.shape[1], 96), F16), numbers(rng, (A.shape[0], 100), F16)
    for alpha, beta in ((0.5, 0), (1, 1), (-2, 0.25)):
        out = device.asarray(old)
        with force_kernel(KERNEL):
            bg.matmul(A.on(device), device.asarray(B), out=out[:, :96], alpha=alpha, beta=beta)
        want = old.astype(float)
        want[:, :96] = alpha * (A.dense @ B.astype(float)) + beta * want[:, :96]
        np.testing.assert_array_equal(device.asnumpy(out), want.astype(F16))


@pytest.mark.parametrize(("block", "b"), [((64, 32), "C"), ((32, 32), "C"), ((64, 64), "F")], ids=str)
def test_many_tiles_are_dealt_and_then_claimed_each_once(
    block: tuple[int, int], b: str, device: Device, rng: np.random.Generator
) -> None:
    """Items of equal length: a CTA has rounds of tiles of its own before it claims others."""
    case = Case(F16, block, 136, F32, b=b, batches=7, rows=4, cols=3, density=2.0)
    check(device, KERNEL, case, matrix(rng, case, unique=True))


@pytest.mark.races
@cases(
    Case(F16, (128, 64), 64, F32, rows=2, cols=60, density=0.6),
    Case(F16, (32, 32), 64, F32, rows=3, cols=90, density=0.6),
    large=tuple(
        Case(F16, block, N, F32, rows=12, cols=4096 // block[1], density=density)
        for block in ((128, 128), (64, 64), (32, 32), (16, 16))
        for N in (64, 256, 1000)
        for density in (0.1, 0.5)
    ),
)
def test_long_rows_come_in_pieces_that_are_added_up(case: Case, device: Device, rng: np.random.Generator) -> None:
    A = matrix(rng, case, unique=True)
    first, last = A.indptr[1:3]
    A.indptr[3:] = last  # one block row has all that there is
    A = Bsr(A.data[first:last], A.indices[first:last], np.clip(A.indptr - first, 0, last - first), A.shape)
    assert in_pieces(check(device, KERNEL, case, A))


@pytest.mark.emulated
@pytest.mark.parametrize("N", [40, 64, 136])
def test_bits_do_not_depend_on_what_a_cta_did_before(
    N: int, device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of odd and even lengths: warpgroups that take turns begin anew at each tile."""
    monkeypatch.setattr(work_list.Share, "least_entries", 1 << 20)
    A = matrix(rng, Case(F16, (64, 64), N, rows=9, cols=7))
    A.data[...] = rng.standard_normal(A.data.shape).astype(F16)
    B = rng.standard_normal((A.shape[1], N)).astype(F16)
    bits = []
    for ctas in (1, 2, 64):
        device.becomes(ctas)
        with force_kernel(KERNEL):
            bits.append(device.asnumpy(bg.matmul(A.on(device), device.asarray(B), out_dtype=F32)).tobytes())
    assert bits[0] == bits[1] == bits[2]


@pytest.mark.races
@pytest.mark.emulated
@pytest.mark.parametrize(
    ("block", "rows", "cols"), [((32, 32), 24, 2), ((32, 32), 2, 30), ((128, 64), 7, 2), ((128, 64), 2, 14)], ids=str
)
def test_one_cta_has_more_tiles_and_stages_than_it_holds(
    block: tuple[int, int], rows: int, cols: int, device: Any, rng: np.random.Generator
) -> None:
    """What comes next takes the places of what all lanes have read."""
    device.becomes(1)
    case = Case(F16, block, 64, beta=0, rows=rows, cols=cols, density=2.0)
    check(device, KERNEL, case, matrix(rng, case, unique=True))


@pytest.mark.races
@pytest.mark.parametrize("block", [(32, 32), (128, 64)], ids=str)
def test_nan_reaches_the_rows_that_meet_it_and_no_others(
    block: tuple[int, int], device: Device, rng: np.random.Generator
) -> None:
    A = matrix(rng, Case(F16, block, 64, rows=4, cols=4))
    B = numbers(rng, (A.shape[1], 64), F16)
    B[block[1] * 2 + 3, 5] = np.nan
    with force_kernel(KERNEL):
        got = device.asnumpy(bg.matmul(A.on(device), device.asarray(B)))
    want = np.zeros(got.shape, bool)
    want[:, 5] = A.stored(2)
    assert want.any() and not want[:, 5].all()
    np.testing.assert_array_equal(np.isnan(got), want)


@pytest.mark.before
@pytest.mark.parametrize(
    "case",
    [
        Case(F16, (32, 32), 72, batches=2, rows=3, cols=4),
        Case(F16, (16, 16), 136, F32, b="F", batches=2, transposed=True, cols=4),
        Case(F16, (48, 80), 72, c="F", batches=2, rows=3, cols=3),
        Case(F16, (32, 32), 64, F32, batches=2, rows=3, cols=90),
        Case(F16, (64, 64), 72, F32, c="F", batches=2, rows=3, cols=3),
        Case(F16, (128, 64), 136, b="F", batches=2, rows=3, cols=3),
        Case(F16, (64, 112), 136, F32, batches=2, rows=6),
    ],
    ids=str,
)
def test_infinity_and_nan_spread_only_through_stored_blocks(
    case: Case, device: Device, rng: np.random.Generator
) -> None:
    """In several block columns of B and columns of every tile; sums that meet none of them are exact."""
    A = matrix(rng, case, unique=True)
    stored = A if not case.transposed else transposed(A)
    K = case.block[1]
    B = numbers(rng, (2, stored.shape[1], case.N or 1), F16)
    for c in range(min(case.cols, 3)):
        B[1, c * K + 2, 20 * c + 3], B[1, c * K + K - 1, 20 * c + 7] = np.inf, np.nan
    out_dtype = case.out or F16
    for beta in (0, -1):
        old = numbers(rng, (2, stored.shape[0], case.N or 1), out_dtype)
        out = device.lying(old, case.c)
        M = A.on(device)
        with force_kernel(KERNEL):
            bg.matmul(M.T if case.transposed else M, device.lying(B, case.b), out=out, alpha=2, beta=beta)
        want = 2 * stored.times(B) + beta * old.astype(float)
        np.testing.assert_array_equal(device.asnumpy(out), want.astype(out_dtype))


def transposed(A: Bsr) -> Bsr:
    """The transposed matrix."""
    row = np.repeat(np.arange(len(A.indptr) - 1), np.diff(A.indptr))
    order = np.lexsort((row, A.indices))
    count = A.shape[1] // A.data.shape[2]
    indptr = np.searchsorted(A.indices[order], np.arange(count + 1))
    return Bsr(A.data[order].swapaxes(1, 2), row[order], indptr, A.shape[::-1])


@pytest.mark.sanitizer
@pytest.mark.parametrize("bad", [-1, 2**31 - 1, 77, -(2**31)])
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (16, 16)], ids=str)
def test_spoiled_indices_are_left_out_and_read_nothing_outside(
    block: tuple[int, int], bad: int, device: Device, rng: np.random.Generator
) -> None:
    case = Case(F16, block, 64, beta=0, rows=4, cols=4)
    A = matrix(rng, case)
    M = A.on(device)
    A.indices[1::2] = bad
    M.indices[1::2] = bad
    check(device, KERNEL, case, A, M)
    spoiled = numbers(rng, (A.shape[1], 64), F16)
    exact = A.dense @ spoiled.astype(float)
    spoiled[:: block[1], 3] = np.inf  # sums that are computed again leave them out too
    with force_kernel(KERNEL):
        got = device.asnumpy(bg.matmul(M, device.asarray(spoiled))).astype(float)
    assert not np.isfinite(got[:, 3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, axis=1), np.delete(exact, 3, axis=1))
    M.indptr[[1, 3]] = bad
    for X in (M, M.T):
        out = device.asarray(np.full((X.shape[0], 64), np.nan, F16))
        with force_kernel(KERNEL):
            bg.matmul(X, device.asarray(numbers(rng, (X.shape[1], 64), F16)), out=out)
        assert np.isfinite(device.asnumpy(out).astype(float)).all()


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("block", [(64, 64), (16, 16)], ids=str)
def test_operands_that_lie_badly_are_multiplied_all_the_same(
    block: tuple[int, int], shift: int, device: Device, rng: np.random.Generator
) -> None:
    A = matrix(rng, Case(F16, block, 45, rows=3, cols=3))
    B = numbers(rng, (A.shape[1], 45), F16)  # rows of 90 bytes
    want = A.dense @ B.astype(float)

    def moved(x: np.ndarray[Any, Any]) -> Any:
        found = device.asarray(np.zeros(x.size + 8, F16))[shift : shift + x.size].reshape(x.shape)
        found[...] = device.asarray(x)
        return found

    np.testing.assert_array_equal(device.asnumpy(A.on(device) @ moved(B)), want)
    M = bg.bsr_array((moved(A.data), device.asarray(A.indices), device.asarray(A.indptr)), shape=A.shape)
    np.testing.assert_array_equal(device.asnumpy(M @ device.asarray(B)), want)


# ------------------------------------------------------------------------------- copies of B by columns
@pytest.fixture
def every_copy_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies by columns pay for every matrix; with more than 100,000 bytes they come in panels."""
    usual = prepared.fastest

    def copied(problem: Any, card: Any, copies: bool) -> Any:
        every = (x for x in prepared.options(problem, copies) if isinstance(x, copied_module.Copied) and x.parts)
        return next((x for x in every if isinstance(x.kernel, gemm_sm90.GemmSm90)), None) or usual(
            problem, card, copies
        )

    monkeypatch.setattr(prepared, "fastest", copied)
    monkeypatch.setattr(copied_module, "_PANEL_BYTES", 100_000)
    monkeypatch.setattr(copied_module, "_PANEL_COLUMNS", 64)


#: The largest errors of a product of two factors that are cut to 10 bits, that are rounded, and of two in two parts.
CUT, ROUNDED, PARTS = 2**-9, 1.5 * 2**-10, 5e-7


def by_copies(device: Device, M: Any, B: Any, **how: Any) -> tuple[Any, list[str]]:
    """A product that may copy B, and the kernels that it was prepared for."""
    with device.kernels() as kernels:
        got = bg.matmul(M, B, **how)
    return got, kernels


@pytest.mark.parametrize("precision", ["tf32", "float32"])
@pytest.mark.parametrize(("batches", "N", "step", "panels"), [(0, 296, 1, 2), (2, 297, 1, 5), (0, 100, 3, 1)], ids=str)
def test_products_by_copies_of_panels(
    precision: str, batches: int, N: int, step: int, panels: int, device: Device, rng: np.random.Generator,
    every_copy_pays: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(copied_module, "_PANEL_BYTES", 100_000 if precision == "tf32" else 200_000)
    A = matrix(rng, Case(F32, (32, 40), N, rows=4, cols=3))
    front = (batches,) if batches else ()
    B = numbers(rng, (*front, A.shape[1], N * step), F32)
    out = device.asarray(np.full((*front, A.shape[0], N), 7, F32))
    _, kernels = by_copies(device, A.on(device), device.asarray(B)[..., ::step], out=out, beta=1, precision=precision)
    np.testing.assert_array_equal(device.asnumpy(out), 7 + A.dense @ B[..., ::step])
    assert kernels.count("rearrange") == panels and "gemm_sm90" in kernels


@pytest.mark.emulated
@pytest.mark.parametrize("precision", ["tf32", "float32"])
def test_a_product_without_memory_for_a_copy_is_computed_without_it(
    precision: str, device: Any, rng: np.random.Generator, every_copy_pays: None
) -> None:
    """Once there is memory again, the next call copies as prepared. A capture says that there is none."""
    A = matrix(rng, Case(F32, (32, 40), 96, rows=4, cols=4))
    M, X = A.on(device), numbers(rng, (A.shape[1], 96), F32)
    B, out = device.asarray(X), device.asarray(np.zeros((A.shape[0], 96), F32))
    product = partial(by_copies, device, M, B, out=out, precision=precision)
    device.card.heap.most_bytes = B.nbytes - 1
    _, kernels = product()
    np.testing.assert_array_equal(device.asnumpy(out), A.dense @ X)
    assert {"rearrange", "gemm_sm80"} <= set(kernels)
    with pytest.raises(MemoryError):
        device.captured(product)
    device.card.heap.most_bytes = 1 << 30
    _, kernels = product()
    np.testing.assert_array_equal(device.asnumpy(out), A.dense @ X)
    assert not kernels


@pytest.mark.races
@pytest.mark.parametrize("block", [(32, 32), (16, 16), (64, 64), (128, 40), (48, 24), (16, 8)], ids=str)
@pytest.mark.parametrize("layout", ["C", "F"])
def test_float32_in_two_parts_is_as_accurate_as_float32(
    block: tuple[int, int], layout: str, device: Device, rng: np.random.Generator, every_copy_pays: None
) -> None:
    A = matrix(rng, Case(F32, block, 96, rows=5, cols=3), unique=True)
    A.data[...] = rng.standard_normal(A.data.shape).astype(F32)
    B = rng.standard_normal((A.shape[1], 96)).astype(F32)
    got, kernels = by_copies(device, A.on(device), device.lying(B, layout))
    assert {"rearrange", "gemm_sm90"} <= set(kernels)
    wide = B.astype(float)
    assert (np.abs(device.asnumpy(got) - A.dense @ wide) <= PARTS * (np.abs(A.dense) @ np.abs(wide))).all()


@pytest.mark.parametrize("block", [(32, 32), (64, 40)], ids=str)
def test_tf32_rounds_or_cuts_factors(
    block: tuple[int, int], device: Device, rng: np.random.Generator, every_copy_pays: None
) -> None:
    A = matrix(rng, Case(F32, block, 96, rows=5, cols=3), unique=True)
    A.data[...] = rng.standard_normal(A.data.shape).astype(F32)
    B = rng.standard_normal((A.shape[1], 96)).astype(F32)
    got, kernels = by_copies(device, A.on(device), device.asarray(B), precision="tf32")
    assert {"rearrange", "gemm_sm90"} <= set(kernels)
    wide, bound = B.astype(float), CUT if block[0] % 64 == 0 else ROUNDED
    assert (np.abs(device.asnumpy(got) - A.dense @ wide) <= bound * (np.abs(A.dense) @ np.abs(wide)) + 2e-6).all()


def test_float32_in_two_parts_keeps_large_numbers_infinity_and_nan(
    device: Device, rng: np.random.Generator, every_copy_pays: None
) -> None:
    A = matrix(rng, Case(F32, (32, 32), 80, rows=5, cols=2), unique=True)
    A.data[...] = rng.standard_normal(A.data.shape).astype(F32)
    B = rng.standard_normal((A.shape[1], 80)).astype(F32)
    B[3, :7] = np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 1e38, 1e-30
    A.data[0, 5, 3], A.data[1, 6, 4], A.data[2, 7, 5] = 3.4e38, np.inf, np.nan
    got, kernels = by_copies(device, A.on(device), device.asarray(B))
    assert {"rearrange", "gemm_sm90"} <= set(kernels)
    with np.errstate(all="ignore"):
        want = A.times(B).astype(F32)
        scale = Bsr(np.abs(A.data), A.indices, A.indptr, A.shape).times(np.abs(B))
        got, finite = device.asnumpy(got), np.isfinite(want) & (scale < 1e38)
        assert (np.abs(got[finite] - want[finite]) <= 1e-6 * scale[finite]).all()
    lost = ~np.isfinite(want)
    np.testing.assert_array_equal(got[lost], want[lost])
    assert finite.mean() > 0.8 and lost.mean() > 0.02


def test_float32_in_two_parts_keeps_long_sums_of_one_sign(
    device: Device, rng: np.random.Generator, every_copy_pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor cores cut what they add up. Numbers that round to infinity with 11 bits stay finite."""
    monkeypatch.setattr(copied_module, "_PANEL_BYTES", 2_000_000)
    A = matrix(rng, Case(F32, (32, 32), 96, rows=3, cols=60), unique=True)
    A.data[...] = np.abs(rng.standard_normal(A.data.shape))
    B = np.abs(rng.standard_normal((A.shape[1], 96))).astype(F32)
    got, kernels = by_copies(device, A.on(device), device.asarray(B))
    assert {"rearrange", "gemm_sm90"} <= set(kernels)
    want = A.dense @ B.astype(float)
    assert (np.abs(device.asnumpy(got) - want) <= 2e-6 * want).all()
    B[3, 5], A.data[0, 4, 3] = 3.4028235e38, 3.4e38
    want = A.dense @ B.astype(float)
    got, fits = device.asnumpy(bg.matmul(A.on(device), device.asarray(B))), np.abs(want) < 3.4e38
    np.testing.assert_array_equal(np.isfinite(got), fits)
    assert (np.abs(got - want)[fits] <= 1e-5 * want[fits]).all()


# ------------------------------------------------------------------------------- on a card alone
@pytest.mark.large
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("block", [(64, 64), (128, 128), (32, 32), (16, 16), (48, 80)], ids=str)
def test_results_repeat_bit_by_bit(block: tuple[int, int], device: Device, rng: np.random.Generator) -> None:
    A = matrix(rng, Case(F16, block, 1000, rows=30, cols=20)).on(device)
    A.data[...] = device.asarray(rng.standard_normal(A.data.shape).astype(F16))
    B = device.asarray(rng.standard_normal((A.shape[1], 1000)).astype(F16))
    with force_kernel(KERNEL):
        assert differing(lambda: A @ B, A @ B, 1000) == 0
        want = A.copy() @ B
        assert all(bool((x == want).all()) for x in on_streams(lambda: A @ B, 50))


@pytest.mark.large
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("block", [(64, 64), (128, 80), (256, 128), (32, 32), (16, 16), (48, 80)], ids=str)
@pytest.mark.parametrize("N", [64, 1000])
def test_the_pipeline_survives_delays_and_poisoned_slots(
    block: tuple[int, int], N: int, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = matrix(rng, Case(F16, block, N, rows=30, cols=20))
    B = device.asarray(numbers(rng, (A.shape[1], N), F16))
    with force_kernel(KERNEL):
        calm = A.on(device) @ B
        delay(gemm_sm90.GemmSm90, monkeypatch)
        slow = A.on(device)
        assert differing(lambda: slow @ B, calm, 20) == 0
