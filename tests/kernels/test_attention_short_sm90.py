"""All that is promised of attention_short_sm90: attention of short sequences on Hopper's tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import attention_sm90
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device
from ..gpu.repeats import differing
from .attentions import (
    BANDS,
    BF16,
    F16,
    Case,
    cases,
    check,
    check_garbage_behind_the_diagonal,
    check_nan_reaches_those_who_see_it,
    check_one_weight_is_one,
    check_scores_of_minus_infinity,
    climbing,
    forbidden,
    operands,
    run,
)

KERNEL = "AttentionShort"
CAUSAL = {"causal": True}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def shapes(D: int) -> list[tuple[int, ...]]:
    """Those of the rule: two shares of the keys, tiles of 128 keys, two groups of rows, and one slot."""
    both = (attention_sm90.SHORT_SHAPES, attention_sm90.SHORTER_SHAPES)
    return list(dict.fromkeys(shape for found in both for _, shape in found[D]))


@pytest.fixture(autouse=True)
def hopper(device: Device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the first shape of the rule for 64 columns, whatever the problem."""
    device.needs("sm_90a")
    given = getattr(request.node, "callspec", None)
    shape = given.params.get("shape") if given else None
    monkeypatch.setattr(attention_sm90, "_short_shape", lambda problem: shape or shapes(64)[0])


#: Every shape of the rule for heads of 64 columns.
every_shape = pytest.mark.parametrize("shape", shapes(64), ids=str)


@every_shape
@cases(
    Case((20, 30)),
    Case((64, 720)),  # more tiles of keys than slots
    Case((70, 150), options=CAUSAL),
    Case((130, 70), options=CAUSAL),  # the first rows see nothing
    Case((64, 300), options={"window": (40, 3)}),
    Case((70, 90), dtype=BF16, layout="bshd"),
    Case((70, 90), (64, 64), CAUSAL, heads=(4, 2), batch=2, lse=False, lie=("heads between rows",) * 4),
    Case((70, 90), (64, 64), CAUSAL, heads=(4, 2), batch=2, lse=False, lie=("fused", "fused", "part", "pitch 72")),
    large=(
        *(Case((S, S), options=band) for S in (1, 63, 129, 515) for band in BANDS),
        *(
            Case(lengths, options=band, heads=(6, 2), batch=2, dtype=dtype)
            for lengths in ((300, 777), (777, 300), (1, 1000))
            for dtype in (F16, BF16)
            for band in BANDS
        ),
    ),
)
def test_heads_of_64_columns(case: Case, shape: Any, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.parametrize("shape", shapes(128), ids=str)
@cases(
    Case((70, 330), (128, 128), CAUSAL, BF16, heads=(4, 2), batch=2),
    Case((70, 330), (128, 128), {"window": (100, 3)}),
    large=(
        *(Case((S, S), (128, 128), band) for S in (1, 63, 129, 515) for band in BANDS),
        *(
            Case(lengths, (128, 128), band, heads=(6, 2), batch=2, dtype=dtype)
            for lengths in ((300, 777), (777, 300), (1, 1000))
            for dtype in (F16, BF16)
            for band in BANDS
        ),
    ),
)
def test_heads_of_128_columns(case: Case, shape: Any, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.emulated
@every_shape
def test_ordinary_queries_are_not_computed_twice(shape: Any, device: Device, rng: np.random.Generator) -> None:
    """A wrong sum that is not finite, or 0, would be mended by the care that is taken of infinity and NaN."""
    with forbidden(device, "repair(upper, lower);"):
        # In the second, the first 8 of 16 rows see nothing of the first tile.
        for case in (Case((70, 150), options=CAUSAL), Case((64, 184), options=CAUSAL)):
            check(device, KERNEL, case, operands(rng, case))
        case = Case((64, 400))
        q, k, v = operands(rng, case)
        for some in climbing(q, k):
            check(device, KERNEL, case, [some, k, v])
        for key in (38, 97, 383):  # one key that outweighs all others, at an even place or at an odd one
            q[...], k[...] = 1, 0
            k[:, :, key] = 3.5
            check(device, KERNEL, case, [q, k, v])


def test_results_that_are_not_finite_go_into_lines_of_any_length(device: Device, rng: np.random.Generator) -> None:
    for pitch in ("pitch 64", "pitch 72"):
        case = Case((70, 90), options=CAUSAL, heads=(4, 2), batch=2, lie=(*("heads between rows",) * 3, pitch))
        q, k, v = operands(rng, case)
        v[1, 1, 65, 5] = np.inf
        assert not np.isfinite(check(device, KERNEL, case, [q, k, v])).all()


def test_scores_that_are_all_minus_infinity_give_nan(device: Device, rng: np.random.Generator) -> None:
    check_scores_of_minus_infinity(device, KERNEL, rng)


@pytest.mark.races
def test_nan_reaches_those_who_see_it_and_nobody_else(device: Device, rng: np.random.Generator) -> None:
    case = Case((20, 150), options=CAUSAL, heads=(1, 1))
    q, k, v = operands(rng, case)
    v[:, :, 142, 3] = np.nan
    spoiled = np.zeros(q.shape, bool)
    spoiled[:, :, 12:, 3] = True
    np.testing.assert_array_equal(np.isnan(run(device, KERNEL, case, [q, k, v])[0]), spoiled)


@pytest.mark.parametrize(
    "case", [Case((70, 150), options=CAUSAL), Case((70, 90), dtype=BF16, options={"window": (20, 30)})], ids=str
)
def test_nan_and_infinity_reach_those_who_see_them(case: Case, device: Device, rng: np.random.Generator) -> None:
    check_nan_reaches_those_who_see_it(device, KERNEL, case, rng)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_garbage_behind_the_diagonal_changes_nothing_before_it(
    bad: float, device: Device, rng: np.random.Generator
) -> None:
    check_garbage_behind_the_diagonal(device, KERNEL, bad, rng)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_weight_that_outweighs_all_others_is_one_however_large_its_score(
    dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    check_one_weight_is_one(device, KERNEL, dtype, rng, halves=False)


@pytest.mark.emulated
@pytest.mark.parametrize("rows", [slice(0, None, 16), slice(8, None, 16)], ids=["upper", "lower"])
def test_a_large_maximum_of_some_rows_is_noticed_by_their_warp(
    rows: slice, device: Device, rng: np.random.Generator
) -> None:
    """In one row of sixteen, one key outweighs all others by far; its weight, which is not 1, cancels out."""
    case = Case((64, 256), heads=(1, 1))
    q, k, v = operands(rng, case)
    q[...], k[...] = 0.01, 29.25
    # For these queries the weight lies halfway between two numbers of 16 bits.
    q[:, :, rows] = np.array([107.375, 93.3125, 115.9375, 96.375])[:, None]
    k[:, :, 255] = 30
    v[:, :, 255] = 1 + np.linspace(0, 1, 64, endpoint=False)
    with forbidden(device, "repair(upper, lower);"):
        out, _ = run(device, KERNEL, case, [q, k, v])
    np.testing.assert_array_equal(out[0, 0, rows], np.broadcast_to(v[0, 0, 255], (4, 64)).astype(float))


def test_maxima_that_climb_beyond_all_bounds_are_computed_again(device: Device, rng: np.random.Generator) -> None:
    """Weights that no float32 holds: the first tile, of the last keys, has scores far below those that follow."""
    case = Case((20, 200), heads=(1, 1))
    q, k, v = operands(rng, case)
    q[...], k[...] = 1, np.linspace(20, 0, 200)[:, None]
    check(device, KERNEL, case, [q, k, v])


@pytest.mark.large
@pytest.mark.parametrize("shape", [*shapes(64), *shapes(128)], ids=str)
def test_results_are_the_same_bits_every_time(shape: Any, device: Device, rng: np.random.Generator) -> None:
    D = 64 if shape in shapes(64) else 128
    q, k, v = map(device.asarray, operands(rng, Case((500, 500), (D, D), heads=(64, 64))))
    with force_kernel(KERNEL):
        first = bg.attention(q, k, v, causal=True)
        assert differing(lambda: bg.attention(q, k, v, causal=True), first, 50) == 0
