"""All that is promised of attention_sm90 where keys are split: few tiles of queries over many keys, on Hopper."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import attention_split, choose
from bsrgemm._attention.attention_sm90 import AttentionSm90
from bsrgemm._attention.call import AttentionCall
from bsrgemm._kernels.card import Card
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._kernels.rearrange import Lie

from ..devices import Device
from ..gpu.repeats import differing
from .attentions import (
    BANDS,
    BF16,
    CLIMBS,
    E4M3,
    F16,
    F32,
    MASKS,
    Case,
    bad_numbers,
    cases,
    check,
    check_nan_reaches_those_who_see_it,
    check_rows_that_see_nothing,
    check_scores_of_minus_infinity,
    check_spoiled_masks,
    exact,
    operands,
    run,
    seen_keys,
)

KERNEL = "AttentionSplit"
CAUSAL = {"causal": True}


@pytest.fixture(autouse=True)
def any_number_of_keys(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are split into up to five, whatever would be faster."""
    device.needs("sm_90a")
    monkeypatch.setattr(attention_split._Tiles, "splits", lambda self, entries, _: (min(entries, 5), -(-entries // 5)))
    monkeypatch.setattr(attention_split, "_pays", lambda problem: True)


@cases(
    *(Case((5, 150), (128, 128), band, heads=(4, 2)) for band in BANDS),
    Case((5, 300), options=CAUSAL, heads=(7, 1)),
    Case((16, 300), (128, 128), CAUSAL, BF16, heads=(8, 2), batch=2),  # 64 lines
    Case((16, 200), (128, 128), CAUSAL, heads=(5, 1)),  # 80 lines: two warpgroups
    Case((32, 300), (128, 128), CAUSAL, heads=(4, 1)),
    Case((40, 300), (128, 128), CAUSAL, heads=(5, 1)),  # three heads in a tile, then two
    Case((70, 300), (128, 128), heads=(2, 1)),
    Case((150, 300), (128, 128), CAUSAL, heads=(2, 2)),  # two tiles, of different lengths
    Case((200, 130), options=CAUSAL, heads=(2, 2)),  # the first queries see nothing
    Case((13, 130), (80, 96), {"softcap": 3.0}, heads=(2, 2)),
    Case((3, 200), (192, 128), {"scale": -0.2}, heads=(4, 1)),
    Case((3, 200), (256, 256), CAUSAL, heads=(2, 1)),
    Case((13, 130), (72, 40), out=F32, heads=(4, 2)),
    Case((4, 200), heads=(4, 2), batch=2, layout="bshd", lie=("heads between rows", "rows", "rows", "part"), lse=False),
    Case((4, 200), options=CAUSAL, heads=(4, 2), batch=2, lie=("fused", "rows", "rows", "columns")),
    *(Case((37, 200), mask=mask, block=16, heads=(4, 2), batch=2) for mask in ("random", "random heads", "elements")),
    Case((37, 200), (128, 128), mask="mixed batches", block=64, heads=(4, 2), batch=2),
    Case((100, 300), (128, 128), CAUSAL, mask="mixed", block=48, heads=(4, 2)),
    Case((30, 200), mask="none"),
    Case((20, 200), (64, 64), CAUSAL, E4M3, heads=(4, 2), scales=((4,), (2,), (2,))),
    Case((20, 200), (128, 128), {}, E4M3, out=F16, heads=(4, 2), batch=2),
    large=(
        *(
            Case((S_q, S_k), (D, D), band, dtype, heads=(8, 2), batch=3)
            for S_q, S_k, D, band, dtype in itertools.product(
                (1, 7, 16, 33, 64, 130), (300, 4097), (64, 80, 128), BANDS, (F16, BF16)
            )
        ),
        *(Case((70, 515), (96, 96), CAUSAL, heads=(4, 2), batch=2, mask=name, block=b) for name in MASKS if name not in
          ("each head", "mixed") for b in (16, 64, 96)),
    ),
)  # fmt: skip
def test_attention_is_right(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.races
@pytest.mark.parametrize(
    "case",
    [
        Case((5, 300), (128, 128), CAUSAL, heads=(4, 1)),
        Case((40, 300), (128, 128), CAUSAL, heads=(5, 1)),
        Case((20, 200), mask="elements", block=16, heads=(2, 1)),
    ],
    ids=str,
)
def test_threads_of_a_cta_do_not_race(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.parametrize("D", [64, 128])
def test_results_repeat_bit_by_bit_with_and_without_lse(D: int, device: Device, rng: np.random.Generator) -> None:
    q, k, v = map(device.asarray, operands(rng, Case((9, 700), (D, D), heads=(4, 2))))
    with force_kernel(KERNEL):
        first, _ = bg.attention(q, k, v, causal=True, return_lse=True)
        assert differing(lambda: bg.attention(q, k, v, causal=True), first, 3) == 0


@pytest.mark.parametrize("dtype", [F16, BF16, E4M3], ids=str)
def test_rows_that_see_nothing_are_zero(dtype: Any, device: Device) -> None:
    check_rows_that_see_nothing(device, KERNEL, dtype)


def test_scores_that_are_all_minus_infinity_give_nan(device: Device, rng: np.random.Generator) -> None:
    check_scores_of_minus_infinity(device, KERNEL, rng)


def test_a_split_without_weights_leaves_the_others_as_they_are(device: Device, rng: np.random.Generator) -> None:
    """Scores of minus infinity in a whole split are no reason for NaN, if another split has keys with a weight."""
    case = Case((6, 300), heads=(2, 1))
    q, k, v = operands(rng, case)
    q[..., 0], k[:, :, :200, 0] = 1, -np.inf
    want = exact(q, k, v, seen_keys(6, 300))
    out, lse = run(device, KERNEL, case, [q, k, v])
    np.testing.assert_allclose(out, want.out, rtol=0, atol=2e-3 * np.abs(v.astype(float)).max())
    np.testing.assert_allclose(lse, want.lse, rtol=1e-3)
    k[..., 0] = -np.inf
    out, lse = run(device, KERNEL, case, [q, k, v])
    assert np.isnan(out).all() and np.isnan(lse).all()


@pytest.mark.parametrize("case", [Case((9, 300), options=CAUSAL), Case((5, 270), (128, 128), dtype=BF16)], ids=str)
def test_nan_and_infinity_reach_those_who_see_them(case: Case, device: Device, rng: np.random.Generator) -> None:
    check_nan_reaches_those_who_see_it(device, KERNEL, case, rng)


@pytest.mark.parametrize("climb", CLIMBS)
def test_maxima_may_climb_from_split_to_split(climb: str, device: Device, rng: np.random.Generator) -> None:
    case = Case((10, 1500), (64, 64), heads=(2, 1))
    q, k, v = operands(rng, case)
    q[..., 0], k[..., 0] = 8, CLIMBS[climb](rng)
    check(device, KERNEL, case, [q, k, v])


@bad_numbers
def test_spoiled_masks_stay_inside_of_the_arrays(bad: int, device: Device, rng: np.random.Generator) -> None:
    check_spoiled_masks(device, KERNEL, F16, 64, bad, rng)


def test_a_captured_call_reads_what_the_operands_have_by_then(device: Device, rng: np.random.Generator) -> None:
    q, k, v = map(device.asarray, operands(rng, Case((20, 300), heads=(4, 2))))
    out = device.cupy.zeros_like(q)

    def act() -> None:
        with force_kernel(KERNEL):
            bg.attention(q, k, v, causal=True, out=out)

    act()
    first = device.asnumpy(out)
    graph = device.captured(act)
    v *= -1
    for _ in range(2):  # its counters are zero again after each run
        graph.launch()
        device.synchronize()
        np.testing.assert_array_equal(device.asnumpy(out), -first)


@pytest.mark.parametrize("lengths", ["three"])
def test_sequences_of_different_lengths_are_left_to_others(
    lengths: str, device: Device, rng: np.random.Generator
) -> None:
    with pytest.raises(ValueError, match="AttentionSplit cannot compute this attention"):
        check(device, KERNEL, Case(lengths), operands(rng, Case(lengths)))


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "group", "chosen"),
    [
        *((4, 4096, 4, 4, "AttentionFew"), (8, 4096, 4, 4, "AttentionFew"), (16, 65536, 4, 4, KERNEL)),
        *((64, 65536, 4, 4, KERNEL), (64, 65536, 1, 1, KERNEL), (500, 4096, 1, 1, KERNEL)),
        *(
            (2048, 4096, 4, 4, "AttentionSm90"),
            (8, 65536, 64, 1, "AttentionFew"),
            (70, 65536, 64, 1, "AttentionSm90"),
            (17, 257, 1, 1, "AttentionFew"),
        ),
    ],
)
def test_keys_are_split_where_tiles_are_few(
    queries: int, keys: int, batch: int, group: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 heads of keys."""
    monkeypatch.undo()
    q, k = (Lie.in_order(F16, (batch, h, n, 128)) for h, n in ((8 * group, queries), (8, keys)))
    call = AttentionCall(q, k, k, q, None, np.dtype(F32), 0.1, None, keys, 0, True)
    assert type(choose.choose(choose.problem_of(call, Card("sm_90a", 132)))).__name__ == chosen


@pytest.mark.parametrize(
    ("queries", "D", "consumers"), [(40, 128, 1), (64, 64, 1), (100, 128, 2), (100, 64, 1), (150, 128, 1), (300, 64, 3)]
)
def test_tiles_are_not_larger_than_their_queries(queries: int, D: int, consumers: int) -> None:
    """Many heads of few queries: two and three warpgroups would multiply rows that nobody asked for."""
    q, k = (Lie.in_order(F16, (64, 32, n, D)) for n in (queries, 4096))
    call = AttentionCall(q, k, k, q, None, np.dtype(F32), 0.1, None, 4096, 0, True)
    assert AttentionSm90.best(choose.problem_of(call, Card("sm_90a", 132))).consumers == consumers


@pytest.mark.parametrize(
    ("left", "splits"),
    [(4096, (8, 8)), (1000, (6, 3)), (100, (1, 3))],  # 64, 17 and 3 entries
)
def test_splits_follow_what_a_window_shows(left: int, splits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k = (Lie.in_order(F16, (4, h, n, 128)) for h, n in ((32, 16), (8, 4096)))
    call = AttentionCall(q, k, k, q, None, np.dtype(F32), 0.1, None, left, 0, True)
    kernel = attention_split.AttentionSplit("f16", "f16", 128, 128, 0, False, 1, 64)
    found = kernel.splits(call, 1, Card("sm_90a", 132))
    assert (found.most, found.least) == splits
    assert (found.heads, found.box, found.slots, found.joins) == (4, 64, 32, 8)
