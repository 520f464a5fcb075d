"""All that is promised of attention of few queries, which is computed as a decode of keys and values that are given."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import attention_few
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device
from ..gpu.repeats import differing
from .attentions import (
    BF16,
    F16,
    F32,
    Case,
    cases,
    check,
    check_nan_reaches_those_who_see_it,
    exact,
    operands,
    run,
    seen_keys,
)

KERNEL = "AttentionFew"
CAUSAL = {"causal": True}
BANDS: list[dict[str, Any]] = [
    {},
    CAUSAL,
    {"window": (40, 0)},
    {"window": (-1, 5)},
    {"softcap": 3.0, "causal": True},
    {"scale": -0.2},
]


@pytest.fixture(autouse=True)
def any_number_of_keys(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys are served, too, which the rule leaves to other kernels."""
    device.needs("sm_80")
    monkeypatch.setattr(attention_few, "SHORT_KEYS", 0)
    monkeypatch.setattr(attention_few, "_MANY_KEYS", 0)


@cases(
    *(Case((5, 150), options=band, heads=(4, 2)) for band in BANDS),
    Case((1, 300), (128, 128), heads=(8, 2), batch=2),
    Case((8, 300), (128, 128), CAUSAL, BF16, heads=(8, 2), batch=2),  # 32 rows
    Case((16, 130), (128, 128), CAUSAL, heads=(8, 2)),  # two tiles of rows
    Case((13, 130), (80, 96), heads=(2, 2)),
    Case((40, 70), (128, 128), CAUSAL, heads=(4, 1)),  # five tiles of rows
    Case((3, 130), (192, 128), CAUSAL, heads=(4, 1)),
    Case((30, 7), (64, 64), CAUSAL, heads=(1, 1)),  # the first queries see nothing
    Case((30, 7), (64, 64), heads=(1, 1)),
    Case((7, 1), (64, 64), BANDS[3], heads=(8, 2), batch=3),
    Case((16, 1), (64, 64), BANDS[3], BF16, heads=(8, 2), batch=3),
    Case((4, 200), heads=(4, 2), batch=2, layout="bshd", lie=("heads between rows", "rows", "rows", "part"), lse=False),
    Case((4, 200), options=CAUSAL, heads=(4, 2), batch=2, lie=("fused", "rows", "rows", "columns")),
    large=(
        Case((S_q, S_k), (D, D), band, dtype, heads=(8, 2), batch=3)
        for S_q, S_k, D, band, dtype in itertools.product(
            (1, 2, 7, 16), (1, 300, 4097), (64, 80, 128), BANDS, (F16, BF16)
        )
    ),
)
def test_attention_is_right(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.parametrize("heads", [(4, 2), (2, 1)], ids=str)
def test_keys_may_be_the_first_ones_of_a_longer_memory(heads: Any, device: Device, rng: np.random.Generator) -> None:
    q, k, v = operands(rng, Case((3, 90), (64, 80), heads=heads, batch=2))
    memory = [device.cupy.full((*x.shape[:2], 133, x.shape[3]), np.nan).astype(F16) for x in (k, v)]
    for room, x in zip(memory, (k, v), strict=True):
        room[:, :, :90] = device.asarray(x)
    with force_kernel(KERNEL):
        whole = bg.attention(*map(device.asarray, (q, k, v)), causal=True)
        part = bg.attention(device.asarray(q), *(x[:, :, :90] for x in memory), causal=True)
    np.testing.assert_array_equal(device.asnumpy(part), device.asnumpy(whole))


@pytest.mark.parametrize(
    "options",
    [
        *({"window": (40, 3)}, {"window": (40, -1)}, {"causal": True, "align": "top-left"}),
        *({"out_dtype": F32}, {"mask": True}, {"rows": 140}, {"lie": "between"}),
    ],
    ids=str,
)
def test_what_it_does_not_compute_is_left_to_others(options: Any, device: Device, rng: np.random.Generator) -> None:
    options = dict(options)
    case = Case((options.pop("rows", 3), 90), heads=(4, 2))
    q, k, v = map(device.asarray, operands(rng, case))
    if options.pop("lie", None):
        k = device.cupy.ascontiguousarray(k.swapaxes(1, 2)).swapaxes(1, 2)
    if options.get("mask"):
        options["mask"] = bg.BlockMask.full(3, 90, block=64, device="cuda")
    with force_kernel(KERNEL), pytest.raises(ValueError, match="AttentionFew cannot compute this attention"):
        bg.attention(q, k, v, **options)


def test_scores_that_are_all_minus_infinity_give_nan(device: Device, rng: np.random.Generator) -> None:
    """A query whose keys all have no weight has no softmax; where it sees one more key, that one counts."""
    case = Case((20, 20), options=CAUSAL)
    q, k, v = operands(rng, case)
    q[..., 0], k[:, :, :8, 0] = -1, np.inf
    want = exact(q, k, v, seen_keys(20, 20, causal=True))
    out, lse = run(device, KERNEL, case, [q, k, v])
    assert np.isnan(out[:, :, :8]).all() and np.isnan(lse[:, :, :8]).all()
    np.testing.assert_allclose(out, want.out, rtol=0, atol=2e-3 * np.abs(v.astype(float)).max())


@pytest.mark.parametrize("case", [Case((9, 150), options=CAUSAL), Case((5, 70), dtype=BF16)], ids=str)
def test_nan_and_infinity_reach_those_who_see_them(case: Case, device: Device, rng: np.random.Generator) -> None:
    check_nan_reaches_those_who_see_it(device, KERNEL, case, rng)


@pytest.mark.races
def test_pieces_of_the_keys_are_joined_in_one_order(device: Device, rng: np.random.Generator) -> None:
    case = Case((3, 700), options=CAUSAL)
    some = operands(rng, case)
    check(device, KERNEL, case, some)
    q, k, v = map(device.asarray, some)
    with force_kernel(KERNEL):
        first = bg.attention(q, k, v, causal=True)
        assert differing(lambda: bg.attention(q, k, v, causal=True), first, 3) == 0


def test_a_captured_call_reads_what_the_operands_have_by_then(device: Device, rng: np.random.Generator) -> None:
    q, k, v = map(device.asarray, operands(rng, Case((3, 300))))
    out = device.cupy.zeros_like(q)

    def act() -> None:
        with force_kernel(KERNEL):
            bg.attention(q, k, v, causal=True, out=out)

    act()
    first = device.asnumpy(out)
    graph = device.captured(act)
    v *= -1
    graph.launch()
    device.synchronize()
    np.testing.assert_array_equal(device.asnumpy(out), -first)


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "group", "few"),
    [
        *((1, 257, 1, 4, True), (1, 256, 1, 1, False), (8, 4096, 64, 4, True), (32, 4096, 4, 1, True)),
        *((16, 1025, 4, 4, True), (16, 1024, 4, 4, False), (16, 4096, 5, 4, False), (24, 4096, 4, 4, False)),
        *((64, 4096, 1, 4, True), (64, 4096, 2, 4, False), (65, 4096, 1, 4, False), (256, 4096, 1, 1, True)),
        (257, 4096, 1, 1, False),
    ],
)
def test_few_queries_over_many_keys_are_a_decode(
    queries: int, keys: int, batch: int, group: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 heads of keys; with more than 32 rows of a head, few heads of them in all batches."""
    from bsrgemm._attention import choose
    from bsrgemm._attention.call import AttentionCall
    from bsrgemm._kernels.card import Card
    from bsrgemm._kernels.rearrange import Lie

    monkeypatch.undo()
    q, k = (Lie.in_order(F16, (batch, h, n, 128)) for h, n in ((8 * group, queries), (8, keys)))
    call = AttentionCall(q, k, k, q, None, np.dtype(F32), 0.1, None, keys, 0, True)
    chosen = choose.choose(choose.problem_of(call, Card("sm_90a", 132)))
    assert (type(chosen).__name__ == KERNEL) == few
