"""All that is promised of gemm_turned_sm90: products of row tiles of 48, 80, 96 or 160 rows, as their transpose."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import matmul
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._products.swap_ab_sm90 import GemmTurnedSm90

from ..devices import Device
from ..gpu.repeats import delay, differing
from .products import BF16, F16, Case, cases, check, in_pieces, matrix, numbers

KERNEL = "GemmTurnedSm90"
Small = partial(Case, beta=0, rows=3, cols=3)
BLOCKS = ((96, 96), (160, 160), (80, 80), (80, 16), (48, 48), (96, 32), (240, 112), (288, 64), (48, 80))


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    device.needs("sm_90a")


@cases(
    Small(F16, (96, 96), 136),
    Small(BF16, (96, 16), 192),
    Small(F16, (80, 80), 520),
    Small(F16, (48, 80), 192),
    Small(F16, (160, 160), 192),
    Small(F16, (240, 32), 136),  # three row tiles of 80 rows
    Small(F16, (48, 48), 136, batches=3),
    large=tuple(
        Case(dtype, block, N, index=index, beta=0, rows=7, cols=6)
        for dtype in (F16, BF16)
        for block in BLOCKS
        for N, index in ((136, "i4"), (256, "i8"), (1528, "i4"))
    ),
)
def test_products_are_exact(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.parametrize(("depth", "wide"), [(16, True), (32, False), (48, True)])
def test_lines_of_every_length_are_multiplied(
    depth: int, wide: bool, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 16 or 32 columns has lines of 32 or 64 bytes in shared memory, a deeper one lines of 128 bytes."""
    made = GemmTurnedSm90.best

    def other(problem: Any) -> Any:
        return replace(made(problem), depth=depth, tail=80 % depth, wide=wide)

    monkeypatch.setattr(GemmTurnedSm90, "best", other)
    case = Case(F16, (80, 80), 192, beta=0, rows=3, cols=2)
    check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.races
@cases(
    Case(F16, (48, 48), 136, beta=0, rows=3, cols=30),
    large=(Case(F16, (96, 96), 200, beta=0, rows=3, cols=90, batches=2, density=0.4),),
)
def test_long_rows_come_in_pieces_that_are_added_up(case: Case, device: Device, rng: np.random.Generator) -> None:
    assert in_pieces(check(device, KERNEL, case, matrix(rng, case)))


@pytest.mark.races
@pytest.mark.emulated
@pytest.mark.parametrize(("rows", "cols"), [(11, 2), (2, 9)])
def test_one_cta_has_more_tiles_stages_and_slabs_than_it_holds(
    rows: int, cols: int, device: Any, rng: np.random.Generator
) -> None:
    """What comes next takes the places of what all lanes have read."""
    device.becomes(1)
    case = Case(F16, (48, 16), 136, beta=0, rows=rows, cols=cols, density=2.0)
    check(device, KERNEL, case, matrix(rng, case))


@pytest.mark.parametrize("block", [(48, 80), (96, 96)], ids=str)
def test_infinity_and_nan_spread_only_through_stored_blocks(
    block: tuple[int, int], device: Device, rng: np.random.Generator
) -> None:
    A = matrix(rng, Case(F16, block, 136, rows=4, cols=4))
    B = numbers(rng, (A.shape[1], 136), F16)
    B[block[1] * 2 + 3, 5], B[block[1] * 3 - 1, 100] = np.nan, np.inf
    with force_kernel(KERNEL):
        got = device.asnumpy(bg.matmul(A.on(device), device.asarray(B)))
    assert A.stored(2).any() and not A.stored(2).all()
    np.testing.assert_array_equal(got, A.times(B).astype(F16))


@pytest.mark.before
@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(48, 80), (96, 16)], ids=str)
def test_spoiled_indices_are_left_out_and_nothing_is_touched_beside_the_arrays(
    block: tuple[int, int], device: Device, rng: np.random.Generator
) -> None:
    case = Case(F16, block, 136, beta=0, rows=4, cols=4)
    A = matrix(rng, case)
    M = check(device, KERNEL, case, A)
    for bad in (-1, 2**31 - 1, 77):
        A.indices[1] = bad
        M.indices[1] = bad
        check(device, KERNEL, case, A, M)


@pytest.mark.emulated
@pytest.mark.parametrize(("group", "ctas"), [(1, 1), (4, 2), (5, 2)])
def test_column_tiles_are_computed_in_sections(
    group: int, ctas: int, device: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last section has the longest item first, the one before it the shortest one, and one may be narrower."""
    monkeypatch.setattr(GemmTurnedSm90, "group", lambda self, K: group)
    device.becomes(ctas)
    case = Case(F16, (48, 16), 520, beta=0, batches=2, rows=7, cols=3)  # six column tiles
    check(device, KERNEL, case, matrix(rng, case))
    assert device.card.launches[-1].grid == (ctas,)


@pytest.mark.emulated
@pytest.mark.parametrize("block", [(48, 16), (80, 32)], ids=str)
def test_rows_have_more_blocks_than_lanes_hold_at_once(
    block: tuple[int, int], device: Any, rng: np.random.Generator
) -> None:
    device.becomes(1)
    case = Case(F16, block, 136, beta=0, rows=4, cols=71, density=0.9)
    A = matrix(rng, case)
    assert not in_pieces(check(device, KERNEL, case, A)) and np.diff(A.indptr).max() > 32


@pytest.mark.large
@pytest.mark.parametrize("block", [(96, 96), (80, 80), (48, 80), (160, 32)], ids=str)
def test_results_repeat_bit_by_bit_also_with_delays_and_poisoned_stages(
    block: tuple[int, int], device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = matrix(rng, Case(F16, block, 1528, rows=30, cols=20))
    A.data[...] = rng.standard_normal(A.data.shape).astype(F16)
    B = device.asarray(rng.standard_normal((A.shape[1], 1528)).astype(F16))
    with force_kernel(KERNEL):
        M = A.on(device)
        calm = M @ B
        assert differing(partial(matmul, M, B), calm, 200) == 0
        delay(GemmTurnedSm90, monkeypatch)
        assert differing(partial(matmul, A.on(device), B), calm, 20) == 0
