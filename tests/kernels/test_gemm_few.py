"""All that is promised of gemm_few: products with up to 8 columns of 16-bit floats, 16 rows of a block row by a CTA."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._kernels.launch import Launch
from bsrgemm._kernels.rearrange import Rearrange
from bsrgemm._products.gemm_simt import GemmFew

from ..devices import Device
from .products import BF16, F16, F32, Bsr, Case, cases, check, few_ctas, matrix, numbers

KERNEL = "GemmFew"
SMALL = Case(F16, (32, 64), 3, F32, rows=4)


@pytest.fixture(params=[4, 8], ids=lambda warps: f"{warps} warps")
def warps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both numbers of warps, whatever the number of block rows."""
    monkeypatch.setattr(GemmFew, "_few_tiles", 0 if request.param == 4 else 1 << 30)
    return int(request.param)


@cases(
    Case(F16, (16, 32), 1),
    Case(BF16, (32, 64), 3, F32, b="F16", c="F"),
    Case(F16, (48, 96), 8, b="C"),
    Case(BF16, (64, 160), 5, alpha=1, beta=0),
    Case(F16, (16, 32), None),
    Case(F16, (32, 32), 7, index="i8"),
    Case(F16, (32, 32), 7, batches=3, b="F16", c="gaps"),
    Case(F16, (32, 32), 4, batches=3, b="gaps", c="F", index="i8"),
    Case(F16, (16, 64), 2, b="backwards", c="backwards"),
    large=tuple(
        Case(dtype, block, N, out, b=layout, c=layout, rows=23, cols=17, density=0.4)
        for dtype in (F16, BF16)
        for block in ((64, 64), (128, 128), (160, 32))
        for N, layout, out in ((1, "C", None), (5, "F16", F32), (8, "C", F32))
    ),
)
def test_products_are_exact(case: Case, device: Device, rng: np.random.Generator, warps: int) -> None:
    device.needs("sm_80")
    check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.parametrize("N", [2, 4, 6, 8])
def test_rows_of_b_are_read_in_pieces_of_any_width(N: int, device: Device, rng: np.random.Generator) -> None:
    """Columns between the rows of B leave pieces of 16, 8, 4 and 2 bytes aligned."""
    device.needs("sm_80")
    case = Case(F16, (16, 96), N, F32)
    A = matrix(rng, case)
    on_device = None
    for pitch in range(N, N + 9):
        on_device = check(device, KERNEL, replace(case, b=f"C{2 * pitch}"), A, on_device)


@pytest.mark.parametrize("step", [256, 257, 258, 260])
def test_batches_of_b_begin_anywhere(step: int, device: Device, rng: np.random.Generator) -> None:
    """Rows of 8 columns are aligned to 16 bytes in the first batch, and to 2, 4 or 8 in the next one."""
    device.needs("sm_80")
    A = matrix(rng, Case(F16, (16, 32), 8, cols=1))
    B = numbers(rng, (3, 32, 8), F16)
    room = device.asarray(np.zeros((3, step), F16))[:, :256].reshape(3, 32, 8)
    room[...] = device.asarray(B)
    with force_kernel(KERNEL):
        got = bg.matmul(A.on(device), room, out_dtype=F32)
    np.testing.assert_array_equal(device.asnumpy(got), A.dense @ B.astype(float))


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [3, 4, 2, 3], [0, 0, 0, 4], [1, 3, 2, 2], [0, 0, 0, 0]], ids=str)
def test_rows_that_could_be_equally_long_are_read_where_they_are(
    lengths: list[int], device: Device, rng: np.random.Generator, warps: int
) -> None:
    """The kernel guesses where the blocks of a row are if the mean is a whole number; it may be wrong."""
    device.needs("sm_80")
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("i4")
    data, col = numbers(rng, (int(indptr[-1]), 32, 64), F16), rng.integers(0, 5, indptr[-1]).astype("i4")
    check(device, KERNEL, SMALL, Bsr(data, col, indptr, (128, 320)))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_matrix_may_be_read_ahead(overlaps: bool, device: Device, rng: np.random.Generator, warps: int) -> None:
    device.needs("sm_90")
    with bg.overlapping() if overlaps else contextlib.nullcontext():
        check(device, KERNEL, replace(SMALL, rows=6), matrix(rng, SMALL))


@pytest.mark.emulated
def test_a_copy_of_the_blocks_is_not_read_ahead(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is made by the kernel in front: blocks that begin at no multiple of 16 bytes are copied first."""
    device.needs("sm_90a")
    A = matrix(rng, Case(F16, (16, 32), 4, rows=3, cols=3), unique=True)
    data = device.asarray(np.zeros(A.data.size + 1, F16))[1:].reshape(A.data.shape)
    data[...] = device.asarray(A.data)
    M = bg.bsr_array((data, device.asarray(A.indices), device.asarray(A.indptr)), shape=A.shape)
    started, start = [], Launch.start

    def noting(self: Launch, *operands: Any, **how: Any) -> bool:
        started.append(self.kernel)
        return start(self, *operands, **how)

    monkeypatch.setattr(Launch, "start", noting)
    B = numbers(rng, (A.shape[1], 4), F16)
    with bg.overlapping(), force_kernel(KERNEL):
        got = M @ device.asarray(B)
    np.testing.assert_array_equal(device.asnumpy(got), A.dense @ B.astype(float))
    copying, multiplying = started
    assert isinstance(copying, Rearrange) and isinstance(multiplying, GemmFew) and not multiplying.read_ahead


@pytest.mark.races
@pytest.mark.before
@pytest.mark.sanitizer
def test_warps_share_a_row(device: Device, rng: np.random.Generator, warps: int) -> None:
    device.needs("sm_80")
    for b in ("C", "F16"):
        case = replace(SMALL, b=b)
        check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.sanitizer
@pytest.mark.parametrize("which", ["indices", "indptr"])
def test_index_arrays_that_were_spoiled_are_believed_where_they_are_inside(
    which: str, device: Device, rng: np.random.Generator
) -> None:
    """No foreign memory is touched, and a block at a column that is outside does not count, whatever it holds."""
    device.needs("sm_80")
    case = Case(F16, (16, 64), 4)
    for bad in (-1, 5, 2**31 - 1, -(2**31)):
        A = matrix(rng, case)
        M = A.on(device)
        if which == "indices":
            A.indices[[2, -1]] = bad
            M.indices[[2, -1]] = bad
            M.data[2] = np.nan
        else:
            A.indptr[[2, 4]] = bad
            M.indptr[[2, 4]] = bad
        check(device, KERNEL, case, A, M)


@pytest.mark.sanitizer
def test_nan_reaches_the_rows_that_meet_it_and_no_others(device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    A = matrix(rng, Case(F16, (16, 32), 2))
    B = numbers(rng, (A.shape[1], 2), F16)
    B[40] = np.nan
    got = np.isnan(device.asnumpy(bg.matmul(A.on(device), device.asarray(B))))
    assert A.stored(40 // 32).any() and not A.stored(40 // 32).all()
    np.testing.assert_array_equal(got, np.repeat(A.stored(40 // 32)[:, None], 2, axis=1))


@pytest.mark.emulated
def test_loops_go_on_beyond_a_small_grid(device: Device, rng: np.random.Generator) -> None:
    case = Case(F16, (32, 32), 2, rows=7, batches=3)
    with few_ctas(2):
        check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.parametrize(
    "case",
    [Case(F16, (16, 32), 9), Case(F16, (16, 16), 1), Case(F16, (24, 32), 2), Case(F16, (16, 24), 1)],
    ids=str,
)
def test_other_products_go_elsewhere(case: Case, device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    with pytest.raises(ValueError, match="GemmFew cannot multiply this"):
        check(device, KERNEL, case, matrix(rng, case))
    check(device, None, case, matrix(rng, case))


@pytest.mark.large
def test_results_repeat_bit_by_bit(device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    case = Case(F16, (64, 64), 4, rows=64, cols=300, density=0.4)
    A = matrix(rng, case).on(device)
    A.data[...] = device.asarray(rng.standard_normal(A.data.shape).astype(F16))
    B = device.asarray(rng.standard_normal((A.shape[1], 4)).astype(F16))
    first = device.asnumpy(bg.matmul(A, B))
    assert all((device.asnumpy(bg.matmul(A, B)) == first).all() for _ in range(100))
