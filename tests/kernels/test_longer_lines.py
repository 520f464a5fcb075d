"""All that is promised of copies of keys and values with longer lines: the same bits, and memory for one call."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import longer_lines
from bsrgemm._kernels.card import Card
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device
from .attentions import BF16, F16, Case, attend, cases, check, check_nan_reaches_those_who_see_it, operands

KERNEL = "AttentionSm90"
CAUSAL = {"causal": True}
ROWS = ("rows",) * 4
NEVER, ALWAYS = 0.0, 1e9


@pytest.fixture(autouse=True)
def hopper(device: Device, many: None) -> None:
    device.needs("sm_90a")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made however few lines are read."""
    monkeypatch.setattr(longer_lines, "_LATE_CYCLES", ALWAYS)


def fresh(device: Device) -> None:
    """Forget the launches of earlier calls."""
    from bsrgemm._attention import choose

    choose._calls.clear()


@cases(
    Case((70, 150), (72, 72), CAUSAL),
    Case((70, 300), (72, 72), heads=(4, 4)),  # lines that are copied along their columns
    Case((130, 140), (88, 104), {"window": (40, 3)}, BF16, heads=(4, 2), batch=2, layout="bshd"),
    Case((70, 90), (120, 64), heads=(2, 2)),  # keys alone
    Case((70, 90), (64, 72), lse=False),  # values alone
    Case((40, 70), (72, 72), CAUSAL, heads=(4, 2), batch=2, lie=(*("heads between rows",) * 3, "pitch 80")),
    Case((40, 70), (72, 88), CAUSAL, heads=(4, 2), batch=2, lie=(*("fused",) * 3, "rows")),
    Case((40, 70), (72, 72), heads=(4, 2), batch=2, lie=(*("heads before batches",) * 3, "rows")),
    Case((150, 200), (72, 72), CAUSAL, mask="mixed", block=64),
    Case("three", (72, 72), CAUSAL),
    large=(
        Case((S_q, S_k), (D, D_v), band, dtype, heads=(6, 2), batch=2, layout=layout)
        for (S_q, S_k), (D, D_v), band, dtype, layout in itertools.product(
            ((300, 777), (1, 1000), (515, 64)), ((72, 72), (88, 120), (104, 80)), ({}, CAUSAL), (F16, BF16),
            ("bhsd", "bshd"),
        )
    ),
)  # fmt: skip
def test_copies_change_no_bit(
    case: Case, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, found = operands(rng, case), {}
    for cycles in (NEVER, ALWAYS):
        monkeypatch.setattr(longer_lines, "_LATE_CYCLES", cycles)
        fresh(device)
        with device.kernels() as kernels:
            found[cycles] = attend(device, KERNEL, case, some)
        assert ("rearrange" in kernels) == (cycles == ALWAYS)
    for one, other in zip(*found.values(), strict=True):
        if one is not None:
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
    check(device, KERNEL, case, some)


@pytest.mark.usefixtures("always")
@cases(
    Case((70, 90), (80, 80)),
    Case((70, 90), (72, 72), lie=("rows", "pitch 80", "pitch 80", "rows")),
    Case((70, 90), (40, 40)),
    Case((70, 90), (136, 72)),
)
def test_nothing_else_is_copied(case: Case, device: Device, rng: np.random.Generator) -> None:
    fresh(device)
    with device.kernels() as kernels:
        check(device, KERNEL, case, operands(rng, case))
    assert "rearrange" not in kernels


@pytest.mark.usefixtures("always")
def test_keys_that_are_no_batch_of_matrices_are_not_copied(device: Device, rng: np.random.Generator) -> None:
    q, k, v = (device.asarray(x) for x in operands(rng, Case((70, 90), (72, 72), heads=(2, 2), batch=2)))
    apart = device.cupy.zeros((3, 3, 99, 72), F16)[:2, :2, :90]
    apart[...] = k
    found = []
    for keys in (k, apart):
        fresh(device)
        with force_kernel(KERNEL), device.kernels() as kernels:
            found.append(device.asnumpy(bg.attention(q, keys, v)))
        assert kernels.count("rearrange") == 1, "one launch for both, or the values alone"
    np.testing.assert_array_equal(*found)


@pytest.mark.usefixtures("always")
def test_numbers_that_are_not_finite_reach_those_who_see_them(device: Device, rng: np.random.Generator) -> None:
    """Rows that are computed again read the copies; zeros behind a head meet no infinity."""
    fresh(device)
    check_nan_reaches_those_who_see_it(device, KERNEL, Case((70, 150), (72, 72), CAUSAL), rng)


@pytest.mark.usefixtures("always")
def test_repeated_calls_and_graphs_copy_what_the_operands_have_by_then(
    device: Device, rng: np.random.Generator
) -> None:
    q, k, v = (device.asarray(x) for x in operands(rng, Case((70, 150), (72, 72))))
    out = device.cupy.zeros_like(q)

    def act() -> None:
        with force_kernel(KERNEL):
            bg.attention(q, k, v, causal=True, out=out)

    fresh(device)
    act()
    first = device.asnumpy(out)
    v *= -1
    with device.kernels() as kernels:
        act()
    assert kernels == [], "the call was remembered"
    np.testing.assert_array_equal(device.asnumpy(out), -first)
    graph = device.captured(act)
    bystanders = device.bystanders()
    v *= -1
    out[...] = 0
    graph.launch()
    device.synchronize()
    np.testing.assert_array_equal(device.asnumpy(out), first)
    assert bystanders()


@pytest.mark.usefixtures("always")
def test_without_memory_for_copies_the_operands_are_read_as_they_lie(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((70, 150), (72, 72), CAUSAL)
    some = operands(rng, case)
    monkeypatch.setattr(longer_lines, "MOST_BYTES", 2 * 150 * 256 - 1)
    fresh(device)
    with device.kernels() as kernels:
        check(device, KERNEL, case, some)
    assert "rearrange" not in kernels


#: A card, an attention of 16 heads, and whether it pays to copy keys and values of 72 columns.
H200 = Card("sm_90a", 132)
WORTH = [
    ((4096, 4096), {}, True),
    ((4096, 4096), CAUSAL, True),
    ((16384, 16384), CAUSAL, True),
    ((1024, 1024), {}, False),
    ((1, 65536), {}, False),
    ((65536, 65536), {"window": (128, 0)}, False),
    ((1 << 20, 1 << 20), {}, False),  # copies would have 8 GB
]


@pytest.mark.parametrize(("lengths", "options", "pays"), WORTH, ids=str)
def test_copies_are_made_where_they_pay(lengths: Any, options: Any, pays: bool) -> None:
    from bsrgemm._attention.attention_sm90 import AttentionSm90
    from bsrgemm._attention.call import AttentionCall
    from bsrgemm._kernels.rearrange import Lie

    q, k = (Lie.in_order(F16, (1, 16, n, 72)) for n in lengths)
    left, right = options.get("window", (lengths[1], 0 if options else lengths[1]))
    call = AttentionCall(q, k, k, q, None, np.dtype(np.float32), 1.0, None, left, right, True)
    kernel = AttentionSm90("f16", "f16", 80, 80, 0, True, 2, 128)
    assert bool(longer_lines.copies_of(kernel, call, H200)) == pays
    assert not longer_lines.copies_of(replace(kernel, consumers=1, tile_k=64), call, H200)
