"""All that is promised of products without a work list: gemm_simt, spmv, spmv_small, spmm and spmm_f64.

Blocks that spmm stages in shared memory come a chunk ahead. On the emulator a copy is there only when it has been
waited for, so that a wait too few gives numbers that are wrong.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels import element_types
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._products import spmv_small as spmv_small_rules
from bsrgemm.dtypes import BFLOAT16, FP8_VALUES

from ..devices import Device
from ..gpu.repeats import differing
from .products import BF16, F16, F32, F64, Bsr, Case, cases, check, few_ctas, matrix, numbers

DTYPES = [*(np.dtype(c) for c in ("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16")), BFLOAT16]
LAYOUTS = ("C", "F", "gaps", "backwards")
#: Blocks of every kernel, and a number of columns: the kernel without staging, and that of a card that can stage.
PLAIN = [
    *((SPMV_SMALL := "SpmvSmall", block, 1) for block in ((1, 1), (4, 3), (8, 8), (9, 4), (16, 16))),
    *((SPMV := "Spmv", block, 1) for block in ((17, 13), (24, 32), (40, 5))),
    *((SPMM := "Spmm", block, 7) for block in ((1, 1), (4, 3), (8, 8), (9, 4), (16, 16))),
    *((SIMT := "GemmSimt", block, 7) for block in ((17, 13), (24, 32), (3, 2))),
]
STAGED = [(1, 1), (2, 3), (3, 3), (4, 4), (5, 4), (6, 6), (7, 5), (9, 11), (8, 2), (15, 16), (17, 5), (40, 12)]


def staged(block: tuple[int, int], dtype: np.dtype[Any]) -> str:
    """The kernel of a card with tensor cores for few columns of small blocks."""
    return "SpmmF64" if dtype == F64 and block[0] >= 6 else SPMM


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 5, 40])
def test_products_of_every_dtype(N: int, dtype: np.dtype[Any], device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_75")
    case = Case(dtype, (3, 2), N)
    case = replace(case, alpha=1, beta=1) if dtype.kind == "b" else case
    check(device, SPMV_SMALL if N == 1 else SPMM, case, matrix(rng, case))


@pytest.mark.parametrize(("kernel", "block", "N"), PLAIN, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_of_every_kind_and_their_transposes(
    transposed: bool, kernel: str, block: tuple[int, int], N: int, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_75")
    for index in ("i4", "i8"):
        case = Case(F32, block, N, beta=0, index=index, transposed=transposed)
        check(device, kernel, case, matrix(rng, case))


@pytest.mark.before
@pytest.mark.parametrize(("kernel", "block", "N"), PLAIN[1::3], ids=str)
def test_nothing_is_read_or_written_beside_the_arrays(
    kernel: str, block: tuple[int, int], N: int, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_75")
    for transposed in (False, True):
        case = Case(F32, block, N if N == 1 else 40, beta=0, transposed=transposed, density=2.0)
        check(device, kernel, case, matrix(rng, case))


@pytest.mark.parametrize("b", LAYOUTS)
@pytest.mark.parametrize("c", LAYOUTS)
@pytest.mark.parametrize(("kernel", "block", "N"), [(SPMV_SMALL, (3, 4), 1), (SPMM, (3, 4), 6)], ids=str)
def test_layouts_beta_and_batches(
    kernel: str, block: tuple[int, int], N: int, b: str, c: str, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_75")
    A = M = None
    for beta in (0, -2):
        case = Case(F32, block, N, b=b, c=c, alpha=3, beta=beta)
        A = A or matrix(rng, case)
        M = check(device, kernel, case, A, M)
    check(device, SPMM if N > 1 else SPMV, replace(case, batches=3), A)


@pytest.mark.parametrize("N", [1, 5])
def test_nothing_is_written_beside_a_view(N: int, device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_75")
    A = matrix(rng, Case(F64, (3, 2), N))
    B = numbers(rng, (A.shape[1], N), F64)
    room = device.asarray(np.full((A.shape[0] + 2, N + 2), 7.0))
    bg.matmul(A.on(device), device.asarray(B), out=room[1:-1, 1:-1])
    want = np.full(room.shape, 7.0)
    want[1:-1, 1:-1] = A.dense @ B
    np.testing.assert_array_equal(device.asnumpy(room), want)


@pytest.mark.parametrize(("N", "R", "kernel"), [(1, 4, SPMV_SMALL), (1, 64, SPMV), (5, 4, SPMM), (40, 64, SIMT)])
def test_every_number_of_fp8_is_read(N: int, R: int, kernel: str, device: Device) -> None:
    """Bytes of A times 1, and 1 times bytes of B; each row and each column has a single number, so NaN stays alone."""
    device.needs("sm_75")
    each, ones = np.arange(256, dtype=np.uint8), partial(np.full, fill_value=0x38, dtype=np.uint8)

    def product(A: Bsr, B: np.ndarray[Any, Any]) -> Any:
        with force_kernel(kernel):
            return device.asnumpy(bg.matmul(A.on(device), device.asarray(B), scale_a=1, out_dtype=F32))

    indices, indptr = np.zeros(256 // R, np.int32), np.arange(256 // R + 1, dtype=np.int32)
    got = product(Bsr(each.reshape(-1, R, 1), indices, indptr, (256, 1)), ones((1, N)))
    np.testing.assert_array_equal(got, np.repeat(FP8_VALUES[:, None], N, axis=1))
    diagonal = Bsr(ones((256, R, 1)), each.astype(np.int32), np.arange(257, dtype=np.int32), (256 * R, 256))
    B = each[:, None] + np.arange(N, dtype=np.uint8)
    np.testing.assert_array_equal(product(diagonal, B), np.repeat(FP8_VALUES[B], R, axis=0))


@pytest.mark.parametrize("N", [1, 6])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_sums_are_rounded_to_nearest_even(dtype: np.dtype[Any], N: int, device: Device) -> None:
    """Products of two numbers of 8 bits have up to 16: many are ties. Some overflow, some vanish, some are NaN."""
    device.needs("sm_75")
    few = [1.0, 255, 129, 131, 193, 1.5, -1.0078125, 3.0, 257, 1e-4, 6e-8, -65504, 1e30, 1e-38, 3.3e38, np.inf, np.nan]
    with np.errstate(over="ignore"):
        x = np.array([*few, *np.arange(128, 256), *np.arange(-31, 32) / 7]).astype(dtype)
        y = np.array(few[:N] if N > 1 else [131.0]).astype(dtype)
    A = Bsr(x[:, None, None], np.zeros(len(x), "i4"), np.arange(len(x) + 1, dtype="i4"), (len(x), 1))
    for column in (y, y[::-1] * dtype.type(129)):
        got = device.asnumpy(A.on(device) @ device.asarray(column[None]))
        with np.errstate(all="ignore"):
            want = (x.astype(F32)[:, None] * column.astype(F32)).astype(dtype)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        there = ~np.isnan(want)
        np.testing.assert_array_equal(got[there].view(np.uint16), want[there].view(np.uint16))


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("kernel", "block", "N"),
    [(SPMV_SMALL, (3, 2), 1), (SPMM, (3, 2), 4), (SPMV, (17, 13), 1), (SPMV, (24, 32), 1), (SIMT, (17, 13), 5)],
    ids=str,
)
@pytest.mark.parametrize("which", ["indices", "indptr"])
def test_index_arrays_that_were_spoiled_are_believed_where_they_are_inside(
    which: str, kernel: str, block: tuple[int, int], N: int, device: Device, rng: np.random.Generator
) -> None:
    """No foreign memory is touched."""
    device.needs("sm_75")
    for index in ("i4", "i8"):
        for bad in (-1, 5, 2**31 - 1, -(2**31), *((2**32 + 3,) if index == "i8" else ())):
            case = Case(F64, block, N, index=index)
            A = matrix(rng, case)
            M = A.on(device)
            places = {"indices": [2, -1], "indptr": [2, 4]}[which]
            for x in (getattr(A, which), getattr(M, which)):
                x[places] = bad
            check(device, kernel, case, A, M)
            A.indptr[-1] = bad
            M.indptr[-1] = bad
            check(device, kernel, replace(case, beta=0), A, M)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("kernel", "block", "N"), [*PLAIN[1::4], ("SpmmF64", (6, 3), 10), (SPMM, (2, 3), 10)], ids=str)
def test_nan_and_infinity_reach_the_rows_that_meet_them_and_no_others(
    kernel: str, block: tuple[int, int], N: int, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_80")
    A = matrix(rng, Case(F64, block, N))
    A.data[A.data == 0] = 1
    for bad in (np.nan, np.inf):
        B = numbers(rng, (A.shape[1], N), F64)
        B[block[1], N - 1] = bad
        with force_kernel(kernel):
            got = device.asnumpy(bg.matmul(A.on(device), device.asarray(B)))
        assert A.stored(1).any() and not A.stored(1).all()
        np.testing.assert_array_equal(~np.isfinite(got[:, N - 1]), A.stored(1))
        np.testing.assert_array_equal(got, A.times(B))


@pytest.mark.emulated
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "block", "N", "batches"), [(SPMM, (2, 3), 70, 3), (SPMV, (17, 9), 1, 3), (SPMV, (40, 5), 1, 3),
                                          (SIMT, (17, 13), 70, 3), (SPMV_SMALL, (2, 3), 1, 0)], ids=str
)  # fmt: skip
def test_loops_go_on_beyond_a_small_grid(
    kernel: str, block: tuple[int, int], N: int, batches: int, most: int, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_75")
    case = Case(F64, block, N, b="C", rows=37, batches=batches)
    with few_ctas(most):
        check(device, kernel, case, matrix(rng, case))


# ------------------------------------------------------------------------------- rows of every length
def rows_of(
    rng: np.random.Generator, lengths: Any, block: tuple[int, int], cols: int, index: str = "i4", dtype: Any = F64
) -> Bsr:
    """A matrix whose block rows have so many blocks, at any columns."""
    lengths = np.asarray(lengths)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    data, col = numbers(rng, (int(indptr[-1]), *block), dtype), rng.integers(0, cols, indptr[-1])
    shape = (len(lengths) * block[0], cols * block[1])
    return Bsr(data, col.astype(index), indptr.astype(index), shape)


@pytest.mark.races
@pytest.mark.parametrize("block", [(2, 2), (3, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("index", ["i4", "i8"])
def test_long_rows_are_added_up_piece_by_piece(
    block: tuple[int, int], index: str, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_75")
    for beta in (0, 2):
        A = rows_of(rng, [0, 3000, 2, 1024, 0, 1025, 7], block, 5, index)
        check(device, SPMV_SMALL, Case(F64, block, 1, alpha=1, beta=beta), A)


@pytest.mark.parametrize("block", [(3, 3), (1, 2), (5, 4)], ids=str)
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.emulated
def test_ctas_take_turns_at_rows_of_the_transpose(
    block: tuple[int, int], most: int, device: Any, rng: np.random.Generator
) -> None:
    """Columns of none, of few and of more than 512 blocks; blocks of up to 100 bytes are computed by turns."""
    device.needs("sm_75")
    A = rows_of(rng, rng.integers(0, 4, 1100), block, 7)
    A.indices[...] = rng.choice(7, len(A.indices), p=[0.6, 0.1, 0, 0.1, 0.1, 0.05, 0.05])
    with few_ctas(most):
        check(device, SPMV_SMALL, Case(F64, block, 1, alpha=2, beta=3, transposed=True), A)
    defines = dict(device.card.launches[-1].spec.defines)
    assert (defines["EAGER"], defines["IN_CHUNKS"]) == (int(block != (5, 4)), 0)


def spmv_small(*shape: Any, **how: Any) -> spmv_small_rules.SpmvSmall:
    names = element_types.types(F64, F64, F64, F64, np.dtype("i4"))
    return spmv_small_rules.SpmvSmall(names, *shape, **({"x_adjacent": True, "ctas": 1} | how))


def forced(monkeypatch: pytest.MonkeyPatch, config: spmv_small_rules.SpmvSmall) -> Any:
    """Let the rules choose these constants of spmv_small."""
    monkeypatch.setattr(spmv_small_rules, "spmv_small", lambda *_: config)
    return force_kernel(SPMV_SMALL)


@pytest.mark.races
def test_pieces_of_long_rows_whose_rows_several_lanes_have(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warp that adds the pieces up finds what all lanes of the others wrote."""
    device.needs("sm_75")
    with forced(monkeypatch, spmv_small(4, 4, 16, 4, 2, 2, False, threads=128)):
        check(device, SPMV_SMALL, Case(F64, (4, 4), 1), rows_of(rng, [3, 900, 1], (4, 4), 5))


@pytest.mark.parametrize("at_once", [2, 4])
@pytest.mark.parametrize(
    ("block", "lanes", "together", "how"),
    [
        ((3, 3), (4, 1, 3), 1, {"in_chunks": True, "eager": True}),
        ((2, 3), (8, 1, 3), 2, {"in_chunks": True, "eager": True}),
        ((3, 3), (4, 3, 1), 2, {"in_chunks": False, "eager": True}),
        ((3, 2), (2, 1, 2), 3, {"in_chunks": True, "eager": False}),
        ((2, 2), (4, 1, 2), 1, {"in_chunks": False, "eager": False, "x_adjacent": False}),
    ],
    ids=str,
)
def test_rows_under_way_together_change_nothing(
    at_once: int, block: tuple[int, int], lanes: tuple[int, int, int], together: int, how: dict[str, Any],
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows of none, of one, of many and of too many blocks, in numbers that no group of lanes divides: bit for bit."""
    device.needs("sm_75")
    config = spmv_small(*block, *lanes, together, **({"threads": 64} | how))
    for lengths in ([1] * 45, [0] * 3, rng.integers(0, 9, 83), [1, 0, 300, 2, 256, 0, 257, 1]):
        A = rows_of(rng, lengths, block, 7)
        A.data[...] = rng.standard_normal(A.data.shape)
        x, before = device.asarray(rng.standard_normal(A.shape[1])), rng.standard_normal(A.shape[0])
        results = []
        for chosen in (config, replace(config, rows_together=at_once)):
            out = device.asarray(before)
            with forced(monkeypatch, chosen):
                bg.matmul(A.on(device), x, out=out, alpha=2, beta=-1)
            results.append(device.asnumpy(out))
        want = 2 * (A.dense @ device.asnumpy(x)) - before
        np.testing.assert_allclose(results[0], want, rtol=1e-12, atol=1e-11)
        np.testing.assert_array_equal(results[1], results[0])


# ------------------------------------------------------------------------------- blocks through shared memory
@pytest.mark.before
@pytest.mark.parametrize(
    ("block", "dtype"), [*((b, F64) for b in STAGED), *((b, F32) for b in STAGED[1:10:3])], ids=str
)
def test_staged_blocks_of_every_kind(
    block: tuple[int, int], dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_80")
    A = matrix(rng, Case(dtype, block, 4))
    M = None
    for N, beta in ((4, 0), (20, -2), (34, 1)):
        M = check(device, staged(block, dtype), Case(dtype, block, N, alpha=3, beta=beta), A, M)
    check(
        device, staged(block, dtype), Case(dtype, block, 4, batches=3, index="i8"), matrix(rng, Case(dtype, block, 4))
    )


@pytest.mark.races
@pytest.mark.parametrize("block", [(2, 2), (6, 6), (9, 9)], ids=str)
def test_rows_of_many_chunks(block: tuple[int, int], device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    A = rows_of(rng, [0, 90, 2, 28, 0, 29, 7, 0], block, 5)
    check(device, staged(block, F64), Case(F64, block, 16, alpha=1, beta=1), A)


@pytest.mark.parametrize("block", [(3, 3), (6, 6)], ids=str)
def test_columns_beside_an_odd_number_of_them_stay_as_they_are(
    block: tuple[int, int], device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_80")
    A = matrix(rng, Case(F64, block, 5))
    B = np.full((A.shape[1], 8), np.nan)
    B[:, :5] = numbers(rng, (A.shape[1], 5), F64)
    room = device.asarray(np.full((A.shape[0], 8), 7.0))
    with force_kernel(SPMM):
        bg.matmul(A.on(device), device.asarray(B)[:, :5], out=room[:, :5])
    got = device.asnumpy(room)
    np.testing.assert_array_equal(got[:, :5], A.dense @ B[:, :5])
    assert (got[:, 5:] == 7).all()


@pytest.mark.parametrize("block", [(3, 2), (7, 5)], ids=str)
@pytest.mark.parametrize(("index", "bad"), [("i4", -1), ("i4", 2**31 - 1), ("i8", 5), ("i8", 2**32)])
def test_staged_blocks_at_columns_that_are_outside_are_not_met_at_all(
    block: tuple[int, int], index: str, bad: int, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_80")
    case = Case(F64, block, 16, index=index)
    A = matrix(rng, case)
    M = A.on(device)
    A.indices[2] = bad
    M.indices[2] = bad
    M.data[2] = np.nan
    check(device, staged(block, F64), case, A, M)


def test_what_lies_otherwise_is_copied_for_tensor_cores(device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    for transposed, b in ((True, "C"), (False, "F")):
        case = Case(F64, (7, 3), 4, b=b, transposed=transposed)
        check(device, "SpmmF64", case, matrix(rng, case))
        check(device, SPMM, case, matrix(rng, case))


# ------------------------------------------------------------------------------- large ones
LARGE_BLOCKS = [*((n, n) for n in range(1, 17)), (2, 3), (3, 2), (1, 16), (16, 1), (13, 11), (6, 16), (5, 8)]


@pytest.mark.large
@cases(
    *(
        Case(dtype, block, N, b="C", index=index, transposed=turned, rows=37, cols=29, density=0.3)
        for dtype in (F64, F32, F16, np.dtype("c16"))
        for block in LARGE_BLOCKS
        for index, turned in (("i4", False), ("i8", True))
        for N in (1, 2, 5, 16, 48, 64, 100)
    ),
    *(
        Case(F64, block, N, b="C", rows=37, cols=29, density=0.3)
        for block in ((17, 5), (20, 20), (32, 32), (40, 100), (64, 64), (128, 128))
        for N in (2, 16, 34, 64)
    ),
)
def test_large_products_of_small_blocks(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, None, case, matrix(rng, case))


@pytest.mark.large
@pytest.mark.parametrize("dtype", [F64, F32, F16, np.dtype("c8"), np.dtype("i4")], ids=str)
@pytest.mark.parametrize("block", [(1, 1), (2, 2), (3, 3), (2, 4), (6, 3), (4, 4), (8, 8), (16, 16)], ids=str)
def test_many_rows_of_one_length_and_of_any(
    block: tuple[int, int], dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    """The fewer blocks a row has, the fewer lanes share it; long rows are cut, also those of the transpose."""
    several = [np.full(1001, n) for n in (1, 2, 3, 5, 9, 14, 18, 27)]
    short = rng.integers(0, 3, 1003)
    short[17] = 300
    for lengths in (*several, short, [0, 20_000, 2, 256, 0, 257, 1025, 7, 5000, *[3] * 500]):
        A = rows_of(rng, lengths, block, 40, dtype=dtype)
        if dtype == F16:
            A.data[np.arange(len(A.data)) % 64 != 0] = 0  # the sums are exact
        for transposed in (False, True):
            case = Case(dtype, block, 1, out=F32 if dtype == F16 else None, alpha=1, beta=0, transposed=transposed)
            M = check(device, SPMV_SMALL, case, A)
        x = device.asarray(rng.standard_normal(A.shape[1]).astype(dtype))
        assert differing(lambda M=M, x=x: M @ x, M @ x, 20) == 0


@pytest.mark.large
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("block", [(1, 1), (2, 3), (4, 4), (6, 6), (9, 9), (15, 16)], ids=str)
def test_many_chunks_and_batches_repeat_bit_by_bit(
    block: tuple[int, int], dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    A = rows_of(rng, [0, 3000, 2, 28, 0, 29, 7, 500, *rng.integers(0, 30, 300), 0], block, 90, dtype=dtype)
    for N, batches in ((2, 0), (16, 0), (34, 0), (8, 3)):
        M = check(device, None, Case(dtype, block, N, b="C", batches=batches), A)
        B = device.asarray(rng.standard_normal((A.shape[1], N)).astype(dtype))
        assert differing(partial(bg.matmul, M, B), bg.matmul(M, B), 100) == 0
