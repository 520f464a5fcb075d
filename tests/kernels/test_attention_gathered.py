"""All that is promised of attention_sm90 where it gathers keys: masks of small blocks on Hopper's tensor cores."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm._attention import choose, small_blocks
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device
from .attentions import (
    BANDS,
    BF16,
    CLIMBS,
    F16,
    MASKS,
    Case,
    attend,
    bad_numbers,
    cases,
    check,
    check_kinds_beyond_2_to_31,
    check_nan_reaches_those_who_see_it,
    check_spoiled_masks,
    operands,
)

KERNEL = "AttentionGathered"
CAUSAL = {"causal": True}
SIZES = (16, 32, 48, 64, 80, 96, 112, 160, 192, 256)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture(autouse=True)
def hopper(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask is gathered, whatever would be faster."""
    device.needs("sm_90a")
    monkeypatch.setattr(choose, "piece_of", lambda mask: gcd(mask.block[1], 64))


@cases(
    *(Case((130, 200), (128, 128), mask="random", block=b, heads=(1, 1)) for b in SIZES),
    Case((150, 200), mask="random", block=16, options=CAUSAL),
    Case((150, 200), mask="random", block=32, options={"window": (40, 3)}, dtype=BF16),
    Case((100, 130), mask="random heads", block=16, heads=(4, 2), batch=2, options={"softcap": 3.0}),
    Case((100, 130), mask="each head", block=32, heads=(2, 2), batch=2, options={"scale": -0.2}),
    Case((130, 140), mask="elements", block=(16, 64)),
    Case((130, 140), mask="elements", block=32, options=CAUSAL),
    Case((70, 150), (96, 80), mask="mixed", block=(48, 80), heads=(4, 2)),
    Case((70, 150), (72, 40), mask="window", block=16, heads=(4, 2), layout="bshd"),
    Case((130, 100), mask="none", block=16),
    Case((90, 77), mask="full", block=16),
    Case((1, 33), mask="full", block=16),
    Case((500, 70), options=CAUSAL, mask="inverse", block=16, lse=False),
    Case((40, 70), mask="sinks", block=16, heads=(4, 2), batch=2, lie=("fused",) * 3 + ("pitch 72",)),
    Case((40, 70), mask="dilated", block=16, heads=(4, 2), batch=2, lie=("heads between rows",) * 4),
    large=(
        *(
            Case((S_q, S_k), (D, D), options, dtype, heads=(4, 2), batch=2, mask=name, block=block)
            for S_q, S_k, D, dtype in ((333, 401, 128, F16), (401, 260, 64, BF16), (70, 515, 96, F16))
            for name in MASKS
            if name not in ("each head", "mixed")
            for block in (16, 32, (48, 80), 96, (16, 64), (128, 16), 160)
            for options in BANDS
        ),
        *(
            Case((515, 700), (128, 128), options, mask=mask, block=block)
            for mask in ("elements", "few elements")
            for block in (16, 32, 48, 96)
            for options in ({}, CAUSAL, {"scale": -0.1}, {"softcap": 5.0})
        ),
    ),
)
def test_attention_is_right(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.races
@pytest.mark.parametrize(
    "case",
    [
        Case((130, 150), (128, 128), CAUSAL, mask="random", block=16),
        Case((70, 200), mask="elements", block=32),
    ],
    ids=str,
)
def test_threads_of_a_cta_do_not_race(case: Case, device: Device, rng: np.random.Generator) -> None:
    check(device, KERNEL, case, operands(rng, case))


@pytest.mark.parametrize("block", [16, 32])
def test_results_repeat_bit_by_bit_with_and_without_lse(block: int, device: Device, rng: np.random.Generator) -> None:
    case = Case((150, 300), (128, 128), mask="random", block=block)
    some = operands(rng, case)
    want, _ = attend(device, KERNEL, case, some)
    for again in (case, replace(case, lse=False)):
        np.testing.assert_array_equal(attend(device, KERNEL, again, some)[0], want)


@pytest.mark.parametrize("block", [16, 32])
def test_keys_that_nobody_sees_have_no_effect(block: int, device: Device, rng: np.random.Generator) -> None:
    """Not even values that are not finite, next to keys that are seen."""
    case = Case((64, 320), heads=(1, 1))
    q, k, v = operands(rng, case)
    seen = np.zeros((-(-64 // block), -(-320 // block)), bool)
    seen[:, ::2] = True
    mask = BlockMask.from_dense(device.asarray(np.kron(seen, np.ones((block, block)))[:64, :320] > 0), block=block)
    want = check(device, KERNEL, case, [q, k, v], mask=mask)
    hidden = np.arange(320) // block % 2 == 1
    k[:, :, hidden], v[:, :, hidden] = np.nan, np.inf
    np.testing.assert_array_equal(attend(device, KERNEL, case, [q, k, v], mask=mask)[0], want)


@pytest.mark.parametrize("mask", ["random", "elements"])
def test_nan_reaches_those_who_see_it(mask: str, device: Device, rng: np.random.Generator) -> None:
    check_nan_reaches_those_who_see_it(device, KERNEL, Case((100, 130), heads=(1, 1), mask=mask, block=16), rng)


@pytest.mark.parametrize("name", [*CLIMBS])
def test_maxima_that_rise(name: str, device: Device, rng: np.random.Generator) -> None:
    """Weights are too large for the first maximum: it is raised, or scores are computed once more from their pieces."""
    case = Case((40, 1500), heads=(1, 1), mask="inverse", block=16)
    q, k, v = operands(rng, case)
    q[..., 0], k[..., 0] = 8, CLIMBS[name](rng)
    check(device, KERNEL, case, [q, k, v])


@bad_numbers
def test_spoiled_masks(bad: int, device: Device, rng: np.random.Generator) -> None:
    check_spoiled_masks(device, KERNEL, F16, 64, bad, rng)


@pytest.mark.emulated
def test_kinds_beyond_2_to_31(device: Any, rng: np.random.Generator) -> None:
    check_kinds_beyond_2_to_31(device, KERNEL, F16, 64, rng)


def test_the_choice_counts_the_work_of_random_blocks(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few small blocks are gathered; nearly all of them, and blocks that fill tiles, are not, nor are those in part."""
    monkeypatch.undo()
    device.needs("sm_90a")

    def random(share: float, block: int | tuple[int, int]) -> BlockMask:
        side = -(-8192 // (block if isinstance(block, int) else block[1]))
        return BlockMask.random(8192, 8192, per_row=max(1, round(share * side)), block=block, device="cuda")

    def taken(share: float, block: int | tuple[int, int]) -> int:
        return small_blocks.piece_of(random(share, block))

    assert [taken(0.1, b) for b in (16, 32, 48, 80, 96, 112, 160)] == [16, 32, 16, 16, 32, 16, 32]
    assert [taken(1.0, b) for b in (16, 32, 48, 96)] == [0] * 4
    assert [taken(0.2, b) for b in (64, 128, 192, 256, (64, 128), (128, 64))] == [0] * 6
    assert [taken(0.2, b) for b in ((16, 64), (128, 16), (64, 32), (32, 256))] == [64, 16, 32, 64]
    assert [taken(0.6, b) for b in (16, 32, 96)] == [16, 32, 32]
    causal = BlockMask.causal(8192, block=16, device="cuda")
    assert [small_blocks.piece_of(mask) for mask in (causal, causal & random(0.1, 16))] == [0, 0]


def test_a_mask_of_small_blocks_takes_this_kernel(device: Device, rng: np.random.Generator) -> None:
    """By rule: it computes the same bits as the kernel that is forced, and others do not."""
    q, k, v = map(device.asarray, operands(rng, Case((200, 200), heads=(1, 1))))
    mask = MASKS["random"](200, 200, 16)
    found = {"": device.asnumpy(bg.attention(q, k, v, mask=mask))}
    for kernel in (KERNEL, "AttentionSm90"):
        with force_kernel(kernel):
            found[kernel] = device.asnumpy(bg.attention(q, k, v, mask=MASKS["random"](200, 200, 16)))
    assert np.array_equal(found[""], found[KERNEL]) and not np.array_equal(found[""], found["AttentionSm90"])
