"""All that is promised of attention_sm80: attention by the matrix products of a warp, on any card since Ampere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device
from ..gpu.repeats import differing
from .attentions import (
    BADLY,
    BANDS,
    BF16,
    CLIMBS,
    F16,
    F32,
    MASKS,
    SEQUENCES,
    Case,
    bad_numbers,
    cases,
    check,
    check_garbage_behind_the_diagonal,
    check_kinds_beyond_2_to_31,
    check_nan_reaches_those_who_see_it,
    check_rows_that_see_nothing,
    check_scores_of_minus_infinity,
    check_spoiled_bounds,
    check_spoiled_masks,
    forbidden,
    operands,
    run,
    steps,
)

KERNEL = "AttentionSm80"
CAUSAL = {"causal": True}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture(autouse=True)
def ampere(device: Device) -> None:
    device.needs("sm_80")


def spread(how: str) -> tuple[str, str, str, str]:
    return how, how, how, how


@pytest.mark.before
@cases(
    Case((1, 1)),
    Case((20, 30)),
    Case((70, 150), options=CAUSAL),
    Case((130, 70), options=CAUSAL),  # the first rows see nothing
    Case((64, 300), options={"window": (40, 3)}),
    Case((33, 65), (128, 128), {"softcap": 3.0, "scale": -0.2}),
    Case((33, 65), (128, 128), {"scale": 0.0}),
    Case((70, 90), (32, 32), {"causal": True, "align": "top-left"}),
    Case((30, 90), (256, 256)),
    Case((30, 90), (192, 192), CAUSAL, BF16),
    Case((30, 90), (40, 24), CAUSAL),  # tiles of which not all columns are there
    Case((70, 90), (32, 128)),  # the result is wider than the queries whose memory it takes
    Case((30, 90), (256, 80), CAUSAL),
    Case((5, 2300), options=CAUSAL),  # more tiles of keys than one warp looks up at once
    Case((70, 90), options=CAUSAL, dtype=BF16, heads=(6, 2)),
    Case((70, 90), dtype=BF16, out=F32, heads=(6, 2), layout="bshd"),
    Case((40, 70), options=CAUSAL, heads=(4, 2), batch=2, lse=False, lie=spread("heads between rows")),
    Case((40, 70), options=CAUSAL, heads=(4, 2), batch=2, lse=False, lie=(*spread("fused")[:3], "pitch 65")),
    Case((40, 70), options=CAUSAL, heads=(4, 2), batch=2, out=F32, lie=(*spread("part")[:3], "every second column")),
    Case((40, 70), (80, 80), heads=(4, 2), batch=2, out=F32, lie=(*spread("pitch 88")[:3], "pitch 81")),
    *(Case((70, 40), (72, 40), lie=(*spread("rows")[:3], how)) for how in BADLY),
    Case((150, 200), mask="random", block=32),
    Case((150, 200), mask="elements", options=CAUSAL),
    Case((150, 200), mask="each head", block=16, options={"window": (60, 20)}),
    Case((100, 130), mask="random heads", block=32, heads=(4, 2), batch=2),  # two heads share a pattern
    Case((100, 130), mask="mixed batches", block=(48, 80), heads=(4, 2), batch=2),
    Case((130, 100), mask="none", block=32),
    Case("three", options=CAUSAL),
    Case("many", dtype=BF16, heads=(2, 2)),
    large=(
        *(Case((S, S), (D, D), band) for S in (1, 63, 129, 300, 515) for D in (64, 128) for band in BANDS),
        *(
            Case(lengths, (128, 128), band, heads=(6, 2), batch=2)
            for lengths in ((300, 777), (777, 300), (1, 1000))
            for band in BANDS
        ),
        *(
            Case((200, 333), dims, options, dtype, out, heads=(4, 1), layout=layout)
            for dtype in (F16, BF16)
            for dims in ((64, 64), (80, 80), (96, 96), (192, 192), (256, 256), (72, 40), (192, 128))
            for options, out, layout in ((CAUSAL, None, "bhsd"), ({}, F32, "bshd"))
        ),
        *(
            Case((140, 300), (128, 128), {"causal": True, **how})
            for how in ({"softcap": 7.0}, {"scale": -0.3}, {"scale": 0.0}, {"scale": 2.0})
        ),
        *(
            Case((333, 401), (128, 128), options, heads=(4, 2), batch=2, mask=name, block=block)
            for name in MASKS
            if name not in ("each head", "mixed")
            for block in (16, (48, 80), 64, 128, 256)
            for options in ({}, {"window": (100, 20)})
        ),
        *(Case(name, (128, 128), band, heads=(4, 2)) for name in SEQUENCES for band in ({}, CAUSAL)),
    ),
)
def test_attention_is_right(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.emulated
def test_ordinary_queries_are_not_computed_twice(device: Device, rng: np.random.Generator) -> None:
    """A wrong sum that is not finite, or 0, would be mended by the care that is taken of infinity and NaN."""
    with forbidden(device, "repair(redo);"):
        for case in (Case((70, 150), options=CAUSAL), Case((64, 200), options={"softcap": 3.0}, dtype=BF16)):
            check(device, KERNEL, case, operands(rng, case))
        case = Case((64, 200))
        q, k, v = operands(rng, case)
        for key in (38, 97, 120, 183):  # one key that outweighs all others, at an even place or at an odd one
            q[...], k[...] = 1, 0
            k[:, :, key] = 3.5
            check(device, KERNEL, case, [q, k, v], independent=False)


def test_maxima_that_climb_from_tile_to_tile(device: Device, rng: np.random.Generator) -> None:
    case = Case((64, 300))
    q, k, v = operands(rng, case)
    k[...] = steps(q, 300, np.linspace(0, 24, 300))
    q[...] = q[:, :1, :1]
    check(device, KERNEL, case, [q, k, v])


@pytest.mark.large
@pytest.mark.parametrize("climb", CLIMBS)
def test_maxima_that_climb(climb: str, device: Device, rng: np.random.Generator) -> None:
    case = Case((200, 1500), options={"scale": 1.0}, heads=(2, 2))
    q, k, v = operands(rng, case)
    q[...] = 0.01 * q
    q[..., 0], k[..., 0] = 1, CLIMBS[climb](rng)
    check(device, KERNEL, case, [q, k, v])


@pytest.mark.races
def test_queries_beside_a_nan_that_they_do_not_see_are_computed_again(device: Device, rng: np.random.Generator) -> None:
    case = Case((20, 90), options=CAUSAL, heads=(1, 1))
    q, k, v = operands(rng, case)
    v[:, :, 82, 3] = np.nan
    out, _ = run(device, KERNEL, case, [q, k, v])
    spoiled = np.zeros(out.shape, bool)
    spoiled[:, :, 12:, 3] = True
    np.testing.assert_array_equal(np.isnan(out), spoiled)


@pytest.mark.parametrize(
    "case",
    [
        Case((100, 150), options=CAUSAL),
        Case((70, 90), (80, 72), dtype=BF16, mask="elements"),
        Case((70, 90), (80, 72), heads=(4, 2), batch=2, lse=True, options={"window": (20, 30)}),
    ],
    ids=str,
)
def test_nan_and_infinity_reach_those_who_see_them(case: Case, device: Device, rng: np.random.Generator) -> None:
    check_nan_reaches_those_who_see_it(device, KERNEL, case, rng)


def test_nan_in_a_column_of_each_lane_of_a_row(device: Device, rng: np.random.Generator) -> None:
    case = Case((100, 150), options=CAUSAL)
    q, k, v = operands(rng, case)
    for bad, column in ((np.nan, 0), (np.inf, 3), (np.nan, 5), (np.inf, 7)):
        spoiled_v = v.copy()
        spoiled_v[:, :, 90, column] = bad
        out, _ = run(device, KERNEL, case, [q, k, spoiled_v])
        spoiled = np.zeros(out.shape, bool)
        spoiled[:, :, np.arange(100) + 50 >= 90, column] = True
        np.testing.assert_array_equal(np.isfinite(out), ~spoiled)


def test_scores_that_are_all_minus_infinity_give_nan(device: Device, rng: np.random.Generator) -> None:
    check_scores_of_minus_infinity(device, KERNEL, rng)


@pytest.mark.sanitizer
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_garbage_behind_the_diagonal_changes_nothing_before_it(
    bad: float, device: Device, rng: np.random.Generator
) -> None:
    check_garbage_behind_the_diagonal(device, KERNEL, bad, rng)


def test_rows_that_see_nothing_are_0_whatever_the_operands_hold(device: Device) -> None:
    check_rows_that_see_nothing(device, KERNEL, F16)


@pytest.mark.before
@pytest.mark.sanitizer
@bad_numbers
def test_masks_and_bounds_that_were_spoiled_touch_nothing_outside(
    bad: int, device: Device, rng: np.random.Generator
) -> None:
    check_spoiled_masks(device, KERNEL, F16, 64, bad, rng)
    check_spoiled_bounds(device, KERNEL, F16, bad, rng)


@pytest.mark.emulated
def test_a_mask_of_so_many_blocks_that_their_kinds_need_64_bits(device: Any, rng: np.random.Generator) -> None:
    check_kinds_beyond_2_to_31(device, KERNEL, F16, 128, rng)


@pytest.mark.large
def test_results_are_the_same_bits_every_time(device: Device, rng: np.random.Generator) -> None:
    case = Case((700, 900), (128, 128), CAUSAL, heads=(8, 2), batch=2)
    some = operands(rng, case)
    first = device.asarray(check(device, KERNEL, case, some))
    q, k, v = map(device.asarray, some)
    with force_kernel(KERNEL):
        assert differing(lambda: bg.attention(q, k, v, causal=True), first, 200) == 0
