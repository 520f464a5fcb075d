"""What attention asks of its operands before it chooses a kernel: what TMA can read, and masks of small blocks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import choose, forward

from ..fake_cupy import Card, Policy, installed

F16 = np.dtype(np.float16)


@pytest.fixture
def card() -> Iterator[Card]:
    """A card on which launches are noted."""
    found = Card("sm_90a", policy=Policy.RECORD)
    with installed(found):
        yield found


def described(
    strides: tuple[int, ...] = (4096, 1024, 128, 2), shape: tuple[int, ...] = (2, 4, 8, 64), ptr: int = 256
) -> Any:
    return SimpleNamespace(shape=shape, strides=strides, itemsize=2, data=SimpleNamespace(ptr=ptr))


def test_the_copy_engine_reads_contiguous_rows_at_multiples_of_16_bytes() -> None:
    fits = forward.mappable
    assert fits(described()) and fits(described(ptr=16)) and not fits(described(ptr=8)) and not fits(described(ptr=257))
    apart = (4096, 1024, 128, 4)
    assert not fits(described(apart)) and fits(described(apart, (2, 4, 8, 1)))


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize(
    "step, works",
    [(16, True), (2**40 - 16, True), (0, False), (-16, False), (8, False), (24, False), (2**40, False), (2**41, False)],
)
def test_the_copy_engine_takes_steps_of_16_bytes_below_2_to_the_40(axis: int, step: int, works: bool) -> None:
    strides, shape = [4096, 1024, 128, 2], [2, 4, 8, 64]
    strides[axis] = step
    assert forward.mappable(described(tuple(strides))) is works
    shape[axis] = 1
    assert forward.mappable(described(tuple(strides), tuple(shape)))  # no step is made


@pytest.mark.parametrize(
    "block, stored, columns, fine",
    [
        *[((64, 64), 48, 64, True), ((64, 64), 49, 128, False), ((64, 64), 0, 128, True)],
        *[((128, 128), 0, 128, False), ((64, 128), 24, 64, True), ((64, 128), 25, 64, False)],
        *[((128, 64), 24, 128, True), ((256, 112), 9, 128, True), ((256, 112), 10, 128, False)],
        *[((256, 128), 1, 128, False), ((160, 160), 1, 128, False), ((192, 192), 12, 65, True)],
        *[((192, 192), 13, 65, False), ((192, 192), 12, 64, False), ((192, 256), 6, 128, True)],
    ],
)
def test_small_tiles_are_for_small_blocks_and_those_of_192_if_half_of_them_are_stored_at_most(
    block: tuple[int, int], stored: int, columns: int, fine: bool
) -> None:
    """The mask is 250 x 250 in 2 x 3 patterns."""
    mask = SimpleNamespace(block=block, shape=(250, 250), indices=range(stored), heads=(2, 3))
    assert choose._is_fine(mask, columns) is fine  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_as_many_ctas_as_a_card_can_start_where_each_has_one_tile(arch: str) -> None:
    """CTAs of other kernels stay and claim tiles, as many as the multiprocessors hold."""
    for multiprocessors in (1, 2):
        card = Card(arch, multiprocessors, policy=Policy.RECORD)
        with installed(card) as cupy:
            q = cupy.ones((2, 4, 1300, 64), F16)
            bg.attention(q, q, q)
        (launched,) = card.launches
        tiles = -(-1300 // 128)
        want = {"sm_75": (8 * multiprocessors,), "sm_80": (tiles * 8,), "sm_90a": (multiprocessors,)}[arch]
        assert launched.grid == want
        assert (launched.shared_bytes > 0) == (arch != "sm_75")


def test_launches_of_streams_that_do_not_wait_for_each_other_have_counters_of_their_own(card: Card) -> None:
    import cupy

    q, out = cupy.ones((2, 4, 1300, 64), F16), cupy.ones((2, 4, 1300, 64), F16)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for stream in (streams[0], streams[1], streams[0], streams[1]):
        with stream:
            bg.attention(q, q, q, out=out)
    first, other, again, other_again = (x.arguments for x in card.launches)
    assert first == again != other == other_again
