"""Rectangles of masks: they allow what the mask allows there, for every kind of mask, and are refused inside blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm._attention.mask_ops import banded, selected

pytestmark = pytest.mark.fake

S_Q, S_K = 90, 150
WHERE: dict[str, Any] = {"block": (16, 32), "device": "cpu"}
ELEMENTS = np.random.default_rng(0).random((2, 3, S_Q, S_K)) < 0.02
MASKS: dict[str, Callable[[], BlockMask]] = {
    "full": lambda: BlockMask.full(S_Q, S_K, **WHERE),
    "causal": lambda: BlockMask.causal(S_Q, S_K, **WHERE),
    "causal, top-left": lambda: BlockMask.causal(S_Q, S_K, align="top-left", **WHERE),
    "window": lambda: BlockMask.window(S_Q, S_K, left=20, right=3, **WHERE),
    "sinks and window": lambda: (
        BlockMask.sinks(S_Q, S_K, count=5, **WHERE) | BlockMask.window(S_Q, S_K, left=9, **WHERE)
    ),
    "prefix": lambda: BlockMask.prefix(S_Q, S_K, length=37, **WHERE),
    "global": lambda: BlockMask.global_tokens(S_Q, S_K, tokens=[3, 70], **WHERE),
    "dilated": lambda: BlockMask.dilated(S_Q, S_K, count=9, dilation=5, **WHERE),
    "random": lambda: BlockMask.random(S_Q, S_K, per_row=2, **WHERE),
    "random by head": lambda: BlockMask.random(S_Q, S_K, per_row=2, heads=(2, 3), **WHERE),
    "elements": lambda: BlockMask.from_dense(ELEMENTS[0, 0], block=(16, 32)),
    "elements by batch and head": lambda: BlockMask.from_dense(ELEMENTS, block=(16, 32)),
    "nothing": lambda: BlockMask.from_dense(np.zeros((S_Q, S_K), bool), block=(16, 32)),
}
QUERIES = (slice(None), slice(0, 16), slice(32, 64), slice(64, None), slice(-10, None), slice(80, 90), slice(32, 32))
KEYS = (slice(None), slice(32, 96), slice(128, 150), slice(150, 150), slice(0, -22), slice(96, 32))


@pytest.fixture(params=["cpu", "cuda"])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", MASKS)
def test_a_rectangle_allows_what_the_mask_allows_there(name: str, place: str) -> None:
    mask = MASKS[name]().to_device(place)
    allowed = mask.get().to_dense()
    for queries in QUERIES:
        for keys in KEYS:
            found = mask[queries, keys]
            want = allowed[..., queries, keys]
            assert found.shape == want.shape[-2:] and found.heads == mask.heads and found.block == mask.block
            np.testing.assert_array_equal(found.get().to_dense(), want)
            assert found.is_empty == (not want.any())
            # It is as good as a mask that was built: equal to one, with no element mask that is not used.
            if want.size:
                assert found == BlockMask.from_dense(want, block=mask.block).to_device(place)
            host = found.get()
            assert set(host.kinds[host.kinds >= 0]) == set(range(len(host.bits)))
            for got, own in zip(
                (host.indptr, host.indices, host.kinds, host.bits), ("i4", "i4", "i4", "u4"), strict=True
            ):
                assert got.dtype == own


def test_the_whole_mask_is_not_copied() -> None:
    mask = MASKS["elements by batch and head"]()
    assert mask[:, :] is mask and mask[:, :, 0:S_Q, :S_K] is mask


@pytest.mark.parametrize("batches", [slice(None), 1, slice(0, 1)], ids=str)
@pytest.mark.parametrize("heads", [slice(None), 2, -3, slice(1, 3), slice(None, None, -1)], ids=str)
def test_patterns_are_chosen_too(batches: Any, heads: Any, place: str) -> None:
    mask = BlockMask.from_dense(ELEMENTS, block=(16, 32)).to_device(place)
    rows, cols = (slice(x, x + 1 or None) if isinstance(x, int) else x for x in (batches, heads))
    found = mask[batches, heads, 16:64, 32:]
    want = ELEMENTS[rows, cols, 16:64, 32:]
    assert found.heads == want.shape[:2]
    np.testing.assert_array_equal(found.get().to_dense().reshape(want.shape), want)
    np.testing.assert_array_equal(mask[rows, cols, :, :].get().to_dense().reshape(-1), ELEMENTS[rows, cols].reshape(-1))


def test_one_pattern_serves_all_batches_and_heads_of_a_slice() -> None:
    mask = MASKS["elements"]()
    np.testing.assert_array_equal(mask[3, 4:6, :16, :].to_dense(), ELEMENTS[0, 0, :16])


def test_ranges_after_each_other() -> None:
    """What the ring takes: several ranges of rows and of columns, of which the last may end inside a block."""
    allowed = ELEMENTS[0, 0]
    found = selected(MASKS["elements"](), [(16, 32), (80, 90)], [(0, 32), (64, 96), (128, 150)])
    rows, cols = np.r_[16:32, 80:90], np.r_[0:32, 64:96, 128:150]
    np.testing.assert_array_equal(found.to_dense(), allowed[np.ix_(rows, cols)])


@pytest.mark.parametrize("name", MASKS)
def test_attention_with_a_rectangle(name: str) -> None:
    mask = MASKS[name]()
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 3, n, 8)) for n in (S_Q, S_K, S_K))
    outs, lses = [], []
    for keys in (slice(0, 64), slice(64, S_K)):
        part = mask[32:, keys]
        out, lse = bg.attention(q[:, :, 32:], k[:, :, keys], v[:, :, keys], mask=part, return_lse=True)
        outs.append(out)
        lses.append(lse)
    out, lse = bg.merge_states(outs, lses)
    want, want_lse = bg.attention(q, k, v, mask=mask, return_lse=True)
    np.testing.assert_allclose(out, want[:, :, 32:], atol=1e-13)
    np.testing.assert_allclose(lse, want_lse[:, :, 32:], atol=1e-13)


@pytest.mark.parametrize(
    ("key", "error", "said"),
    [
        (np.s_[3:20, :], ValueError, r"queries: wanted a slice of whole blocks of 16, got 3:20. Slice 0:32, build the"),
        (np.s_[:, :40], ValueError, r"keys: wanted a slice of whole blocks of 32, got 0:40. Slice 0:64, .*from_dense"),
        (np.s_[:, 140:], ValueError, r"got 140:150. Slice 128:150"),
        (np.s_[::2, :], ValueError, "queries: wanted a slice of neighbours, got the step 2"),
        (np.s_[0, :], TypeError, r"queries: wanted a slice such as 0:16, got 0"),
        (np.s_[:, np.arange(3)], TypeError, "keys: wanted a slice such as 0:32"),
        (np.s_[0:16], TypeError, r"wanted mask\[queries, keys\] or .* got 1 index$"),
        (np.s_[:, 0:16, 0:32], TypeError, "got 3 indices"),
        (np.s_[0, 3, :, :], IndexError, r"head: wanted 0 to 2, got 3"),
        (np.s_[:, 3:, :, :], IndexError, r"head: wanted at least one of 3 patterns, got slice\(3, None, None\)"),
        (np.s_["a", :, :, :], TypeError, "batch: wanted a slice or an integer, got 'a'"),
        (np.s_[True, :, :, :], TypeError, "batch: wanted a slice or an integer, got True"),
    ],
    ids=str,
)
def test_refusals(key: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        MASKS["elements by batch and head"]()[key]


def test_the_ways_out_lead_there() -> None:
    mask = MASKS["elements"]()
    np.testing.assert_array_equal(mask[0:32, :].to_dense(), ELEMENTS[0, 0, 0:32])
    again = BlockMask.from_dense(mask.to_dense()[3:20, :40], block=16)
    np.testing.assert_array_equal(again.to_dense(), ELEMENTS[0, 0, 3:20, :40])


def test_iteration_is_refused() -> None:
    with pytest.raises(TypeError, match="got 1 index"):
        list(MASKS["full"]())


@pytest.mark.parametrize("name", ["full", "causal", "elements by batch and head"])
@pytest.mark.parametrize("place", [-200, -40, 0, 60, 400])
@pytest.mark.parametrize("sides", [(0, 0), (30, 5), (1 << 30, 0), (1 << 30, 1 << 30), (20, 1 << 30)], ids=str)
def test_bands_at_any_position(name: str, place: int, sides: tuple[int, int]) -> None:
    mask = MASKS[name]()
    distance = np.arange(S_K) - np.arange(S_Q)[:, None] - place
    seen = (distance >= -sides[0]) & (distance <= sides[1])
    np.testing.assert_array_equal(banded(mask, place, *sides).to_dense(), mask.to_dense() & seen)
