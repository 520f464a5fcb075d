"""Whatever can be chosen for a product is exact: every kernel with every copy of its operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels.card import Card
from bsrgemm._products import cuda, dense, prepared
from bsrgemm._products.call import Problem
from bsrgemm._products.dense import Dense

from ..devices import Device
from .products import BF16, C64, C128, E4M3, F16, F32, F64, I8, I32, Bsr, Case, cases, check, matrix, numbers


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the n-th option be chosen, and say how many there are."""
    monkeypatch.setattr(dense, "_LARGE", 0)
    found: dict[str, Any] = {"n": 0, "options": []}

    def choose(problem: Problem, card: Card, copies: bool = True) -> Dense:
        found["options"] = list(prepared.options(problem))
        return found["options"][found["n"]]

    monkeypatch.setattr(cuda, "choose", choose)
    return found


def described(option: Any) -> str:
    return f"{type(option).__name__} {getattr(option, 'kernel', '')} {option}"


def every_option(chosen: Any, checked: Callable[[], Any]) -> Iterator[str]:
    while True:
        try:
            checked()
        except AssertionError as error:
            raise AssertionError(described(chosen["options"][chosen["n"]])) from error
        yield described(chosen["options"][chosen["n"]])
        chosen["n"] += 1
        if chosen["n"] >= len(chosen["options"]):
            return


@cases(
    *(
        Case(dtype, block, N, beta=beta, b=b, transposed=turned, batches=batches, rows=4, cols=4)
        for dtype, block, N, beta, b, turned, batches in (
            (F16, (24, 24), 72, 0, "C16", False, 0),
            (F16, (40, 20), 64, 0, "C", True, 0),
            (BF16, (12, 50), 33, -1, "C", False, 2),
            (F16, (100, 100), 130, 0, "F16", False, 0),
            (F16, (120, 72), 65, 0, "F", True, 0),
            (F16, (8, 8), 24, 0, "gaps", False, 0),
            (F32, (24, 20), 40, -1, "C", False, 0),
            (F32, (33, 36), 33, 0, "F", True, 0),
            (F64, (25, 3), 24, 0, "C16", False, 0),
            (F64, (50, 7), 17, -1, "C", True, 2),
            (F64, (3, 3), 130, 0, "F16", False, 0),
            (I8, (24, 40), 48, 0, "C16", False, 0),
            (F16, (32, 32), 64, 0, "C16", False, 0),
            (F16, (16, 16), 256, 0, "C16", False, 0),
        )
    ),
    Case(F16, (24, 56), 72, beta=0, c="F", rows=4, cols=4, transposed=True),
    Case(F64, (6, 8), 34, beta=0, b="F", c="F", rows=4, cols=4, batches=2),
    Case(F16, (24, 24), 512, beta=0, rows=9, cols=9, density=0.3),
    Case(F32, (20, 12), 40, precision="tf32", b="C", beta=0, rows=4, cols=4),
    Case(F32, (12, 12), 40, beta=0, rows=4, cols=31),  # filled up, lines of 124 elements
    Case(F16, (4, 20), 24, beta=0, rows=8, cols=34, transposed=True),  # of 136
    Case(F64, (3, 33), 24, beta=0, rows=8, cols=13),  # of all
    Case(F64, (6, 10), 24, beta=0, rows=8, cols=29),  # of 58
    Case(I8, (17, 33), 40, I32, b="C", beta=0, rows=4, cols=4),
    Case(C64, (16, 24), 3, beta=0, rows=4, cols=4),
    Case(C64, (32, 16), 1, beta=0.5j, rows=4, cols=4, transposed=True),
    Case(C64, (16, 16), None, beta=0, rows=4, cols=4),
    Case(C128, (48, 8), 17, alpha=1j, beta=0, b="F", c="F", rows=4, cols=4, transposed=True),
    Case(C64, (5, 7), 33, beta=3, batches=2, rows=4, cols=4),
    Case(C64, (24, 3), 24, beta=0, b="gaps", rows=4, cols=4, batches=2, transposed=True),
    Case(C128, (9, 31), 12, alpha=1j, beta=2 - 1j, rows=4, cols=4),
    Case(C64, (24, 3), 24, alpha=1j, beta=0, rows=4, cols=4, transposed=True),
    Case(C64, (5, 7), 20, alpha=2 - 1j, beta=0, rows=4, cols=5),
    Case(C128, (17, 16), 1, beta=0, rows=4, cols=4),
    *(
        Case(E4M3, block, N, out, b=b, c=c, beta=beta, transposed=turned, batches=batches, rows=4, cols=4)
        for block, N, out, b, c, beta, turned, batches in (
            ((24, 20), 40, F16, "C", "C", 0, False, 0),
            ((17, 33), 33, F32, "F", "F", 0, True, 0),
            ((50, 50), 24, BF16, "C16", "C", -1, False, 2),
            ((3, 3), 1, F32, "C", "C", 0, True, 0),
            ((64, 32), 72, F16, "F16", "C", 0, False, 0),
        )
    ),
)
def test_every_option_is_exact(case: Case, device: Device, chosen: Any, rng: np.random.Generator) -> None:
    device.needs("sm_90a")
    A = matrix(rng, case, unique=case.dtype == I8)
    said = list(every_option(chosen, lambda: check(device, None, case, A)))
    print("\n".join(said))
    assert len(said) == len(chosen["options"]) > 1


@pytest.mark.sanitizer
@cases(
    Case(F16, (24, 40), 136, beta=0, b="C16", rows=4, cols=4),
    Case(BF16, (5, 7), 33, beta=0, rows=9, cols=7, batches=2, index=np.dtype(np.int64)),
    Case(F16, (40, 16), 72, beta=0, b="F", c="F", rows=4, cols=4, transposed=True),
    Case(F32, (20, 33), 40, beta=0, rows=4, cols=4),
    Case(F64, (6, 3), 40, beta=0, rows=8, cols=50, transposed=True),
)
def test_infinity_and_nan_meet_no_zeros_of_any_copy(
    case: Case, device: Device, chosen: Any, rng: np.random.Generator
) -> None:
    """They spread through stored blocks alone; a block that is stored twice is added up."""
    device.needs("sm_90a")
    A = matrix(rng, case)
    M, outer = A.on(device), (case.batches,) if case.batches else ()
    turned = matrix_of(A.dense.T, case.block) if case.transposed else A
    K = case.block[1]
    B = numbers(rng, (*outer, turned.shape[1], case.N or 0), case.dtype)
    B[..., K + 1, 3], B[..., 2 * K, 5], B[..., 3 * K + 2, 7] = np.nan, np.inf, -np.inf
    want = turned.times(B).astype(case.dtype)
    assert not np.isfinite(want).all() and np.isfinite(want[..., 3]).any()

    def checked() -> None:
        out = device.lying(np.zeros_like(want), case.c)
        bg.matmul(M.T if case.transposed else M, device.lying(B, case.b), out=out)
        np.testing.assert_array_equal(device.asnumpy(out).astype(np.float64), want.astype(np.float64))

    said = list(every_option(chosen, checked))
    assert len(said) == len(chosen["options"]) > 1 and any(x.startswith("Filled") for x in said)


def matrix_of(dense: np.ndarray[Any, Any], block: tuple[int, int]) -> Bsr:
    """The blocks of a dense matrix that are not zero."""
    (R, K), (M, N) = block, dense.shape
    blocks = dense.reshape(M // R, R, N // K, K).swapaxes(1, 2)
    rows, columns = blocks.any(axis=(2, 3)).nonzero()
    return Bsr(blocks[rows, columns], columns, np.searchsorted(rows, np.arange(M // R + 1)), (M, N))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [F16, F32, F64, np.dtype("F"), I8], ids=str)
@pytest.mark.parametrize("N", [2, 16, 64, 130])
def test_matrices_without_rows_columns_or_blocks(N: int, dtype: Any, arch: str, device: Device) -> None:
    """Nothing is launched with a grid of no CTAs."""
    device.needs(arch)
    for block in ((2, 3), (16, 16), (24, 40)):
        for rows, columns, beta in itertools.product((0, 3), (0, 4), (0, 3)):
            shape = rows * block[0], columns * block[1]
            A = bg.bsr_array(
                tuple(
                    device.asarray(x)
                    for x in (np.zeros((0, *block), dtype), np.zeros(0, np.int32), np.zeros(rows + 1, np.int32))
                ),
                shape=shape,
            )
            for M, (high, wide) in ((A, shape), (A.T, shape[::-1])):
                out = device.asarray(np.ones((high, N), dtype))
                bg.matmul(M, device.asarray(np.ones((wide, N), dtype)), out=out, beta=beta)
                assert (device.asnumpy(out) == beta).all()
