"""gemm_turned_sm90 on the CPU, as test_emulated_tensor_cores.py has gemm_sm90."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bsrgemm._kernels import device, workspace
from bsrgemm._products import heuristics
from bsrgemm._products.configs import GemmTurnedSm90
from bsrgemm.dtypes import BFLOAT16

from ..products.test_choices import problem
from . import emulator
from .emulator import Array, guarded, put
from .test_emulated_tensor_cores import Matrix

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder, arch="sm_90a"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(12)


def multiply(A: Matrix, B: Array, out: Array, alpha: float = 1.0) -> Any:
    """out = alpha * A @ B by gemm_turned_sm90; its plan."""
    with patch.object(heuristics, "_many_turned_tiles", lambda problem: True):
        plan = emulator.run_product(A, B, out, F32, alpha)
    assert plan.config.spec().entry == "gemm_turned_sm90"
    assert not any(counters.any() for counters in workspace._zeroed.values())  # as the next launch wants them
    return plan


def assert_exact(A: Matrix, B: Array, out: Array, alpha: float = 1.0) -> None:
    want = alpha * (A.dense @ np.asarray(B).astype(np.float64))
    np.testing.assert_array_equal(np.asarray(out).astype(np.float64), want)


@pytest.mark.parametrize(
    ("block", "columns", "dtype"),
    [
        ((96, 96), 136, F16),
        ((96, 16), 192, BFLOAT16),
        ((80, 80), 520, F16),
        ((48, 80), 192, F16),
        ((160, 160), 192, F16),
        ((240, 32), 136, F16),  # three row tiles of 80 rows
    ],
    ids=str,
)
def test_products_are_exact(block, columns, dtype, rng) -> None:
    A = Matrix(rng, block, dtype, rows=3, cols=3)
    B = put(rng.integers(-2, 3, (A._shape[1], columns)).astype(dtype))
    out = put(np.full((A._shape[0], columns), np.nan, dtype))
    multiply(A, B, out, 2.0)
    assert_exact(A, B, out, 2.0)


@pytest.mark.parametrize(("depth", "wide"), [(16, True), (32, False), (48, True)])
def test_lines_of_every_length_are_multiplied(depth, wide, rng) -> None:
    """A step of 16 or 32 columns has lines of 32 or 64 bytes in shared memory, a deeper one lines of 128 bytes."""
    A = Matrix(rng, (80, 80), rows=3, cols=2)
    B = put(rng.integers(-2, 3, (A._shape[1], 192)).astype(F16))
    out = put(np.full((A._shape[0], 192), np.nan, F16))
    found = heuristics.gemm_turned_sm90(problem(R=80, K=80, N=192))
    config = replace(found, depth=depth, tail=80 % depth, wide=wide)
    plan = emulator.run_product(A, B, out, F32, config=config)
    assert plan.config == config
    assert_exact(A, B, out)


def test_batches_are_one_launch(rng) -> None:
    A = Matrix(rng, (48, 48), rows=3, cols=2)
    B = put(rng.integers(-2, 3, (3, A._shape[1], 136)).astype(F16))
    out = put(np.full((3, A._shape[0], 136), 7, F16))
    multiply(A, B, out)
    assert_exact(A, B, out)


@pytest.mark.races
def test_long_rows_come_in_pieces_that_are_added_up(rng) -> None:
    A = Matrix(rng, (48, 48), rows=3, cols=30)
    B = put(rng.integers(-1, 2, (A._shape[1], 136)).astype(F16))
    out = put(np.full((A._shape[0], 136), 7, F16))
    plan = multiply(A, B, out)
    assert plan.scratch.floats > 0
    assert_exact(A, B, out)


@pytest.mark.races
def test_one_cta_has_more_tiles_stages_and_slabs_than_it_holds(rng) -> None:
    """What comes next takes the places of what all lanes have read."""
    many, long = (Matrix(rng, (48, 16), F16, *size, share=2.0) for size in ((11, 2), (2, 9)))
    with patch.object(device, "multiprocessors", lambda: 1):
        for each in (many, long):
            B = put(rng.integers(-2, 3, (each._shape[1], 136)).astype(F16))
            out = put(np.full((each._shape[0], 136), 7, F16))
            multiply(each, B, out)
            assert_exact(each, B, out)


@pytest.mark.parametrize("block", [(48, 80), (96, 96)], ids=str)
def test_infinity_and_nan_spread_only_through_stored_blocks(block, rng) -> None:
    A = Matrix(rng, block)
    b = rng.integers(-2, 3, (A._shape[1], 136)).astype(F16)
    b[block[1] * 2 + 3, 5], b[block[1] * 3 - 1, 100] = np.nan, np.inf  # block column 2
    out = put(np.full((A._shape[0], 136), 7, F16))
    multiply(A, put(b), out)
    rows = np.repeat(A.blocks[:, 2].any(axis=(1, 2)), block[0])
    finite = np.ones(out.shape, bool)
    finite[np.ix_(rows, [5])] = False
    finite[:, 100] = A.dense[:, block[1] * 3 - 1] == 0  # 0 * Inf is NaN in rows that have the block
    finite[rows, 100] = False
    np.testing.assert_array_equal(np.isfinite(np.asarray(out)), finite)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("block", [(48, 80), (96, 16)], ids=str)
def test_nothing_is_touched_beside_the_arrays(block, before, folder, rng) -> None:
    """Arrays end, or begin, where the process would; indices that a user has spoiled are left out."""
    with emulator.emulated(folder, lambda x: guarded(x, before), arch="sm_90a"):
        A = Matrix(rng, block)
        A.data, A.indices, A.indptr = (guarded(x, before) for x in (A.data, A.indices, A.indptr))
        B = guarded(rng.integers(-2, 3, (A._shape[1], 136)).astype(F16), before)
        out = guarded(np.full((A._shape[0], 136), np.nan, F16), before)
        multiply(A, B, out)
        assert_exact(A, B, out)
        row = np.repeat(np.arange(4), np.diff(A.indptr))
        A.blocks[row[1], A.indices[1]] = 0
        for garbage in (-1, 2**31 - 1, 77):
            A.indices[1] = garbage
            out[...] = np.nan
            multiply(A, B, out)
            assert_exact(A, B, out)


@pytest.mark.parametrize(("group", "ctas"), [(1, 1), (4, 2), (5, 2)])
def test_column_tiles_are_computed_in_sections(group, ctas, rng) -> None:
    """The last section has the longest item first, the one before it the shortest one, and one may be narrower."""
    A = Matrix(rng, (48, 16), rows=7, cols=3)
    B = put(rng.integers(-2, 3, (2, A._shape[1], 520)).astype(F16))  # six column tiles
    out = put(np.full((2, A._shape[0], 520), np.nan, F16))
    with (
        patch.object(device, "multiprocessors", lambda: ctas),
        patch.object(GemmTurnedSm90, "group", lambda self, K: group),
    ):
        plan = multiply(A, B, out)
    assert plan.config.tile_n == 256 and plan.grid == (ctas,)
    assert_exact(A, B, out)


@pytest.mark.parametrize("block", [(48, 16), (80, 32)], ids=str)
def test_rows_have_more_blocks_than_lanes_hold_at_once(block, rng) -> None:
    A = Matrix(rng, block, rows=4, cols=71, share=0.9)
    B = put(rng.integers(-1, 2, (A._shape[1], 136)).astype(F16))
    out = put(np.full((A._shape[0], 136), np.nan, F16))
    with patch.object(device, "multiprocessors", lambda: 1):
        plan = multiply(A, B, out)
    assert plan.scratch.floats == 0 and np.diff(A.indptr).max() > 32
    assert_exact(A, B, out)
