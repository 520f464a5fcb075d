"""Masks of intervals by rows of blocks, with blocks of a few elements so that every edge lies everywhere in a block."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention.mask_base import BlockRows, Line, distinct_rows, documents, flat, lines

Booleans = np.ndarray[Any, Any]


def test_masks_for_the_same_lengths_share_no_memory() -> None:
    """What somebody writes into one of them is not in the next one."""
    first, second = (bg.BlockMask.window(100, left=20, block=16, device="cpu") for _ in range(2))
    want = second.to_dense().copy()
    for x in (first.indptr, first.indices, first.kinds, first.bits):
        x[...] = 0
    np.testing.assert_array_equal(second.to_dense(), want)
    np.testing.assert_array_equal(bg.BlockMask.window(100, left=20, block=16, device="cpu").to_dense(), want)


def dense(found: BlockRows, shape: tuple[int, int], block: tuple[int, int]) -> Booleans:
    """The booleans of stored blocks; all that a mask is built from is checked on the way."""
    (S_q, S_k), (bq, bk) = shape, block
    rows, cols = -(-S_q // bq), -(-S_k // bk)
    allowed = np.zeros((rows * bq, cols * bk), bool)
    bits = np.unpackbits(found.bits.astype("<u4").view(np.uint8), axis=2, bitorder="little").astype(bool)
    kinds = dict(zip(found.positions.tolist(), found.kinds.tolist(), strict=True))
    assert len(kinds) == len(found.positions) and set(found.kinds.tolist()) == set(range(len(bits)))
    assert len({x.tobytes() for x in found.bits}) == len(bits)
    assert found.bits.dtype == np.uint32 and not bits[:, :, bk:].any()
    for row in range(rows):
        for position in range(found.starts[row], found.starts[row + 1]):
            col = found.first[row] + position - found.starts[row]
            elements = bits[kinds[position], :, :bk] if position in kinds else True
            allowed[row * bq : (row + 1) * bq, col * bk : (col + 1) * bk] = elements
    return allowed[:S_q, :S_k]


def wanted(shape: tuple[int, int], low: Line, high: Line, queries: tuple[int, int]) -> Booleans | None:
    """The booleans of intervals; None if some are empty, or those of two neighbours do not touch."""
    S_q, S_k = shape
    i, j = np.arange(S_q), np.arange(S_k)
    lows, highs = (np.minimum(np.maximum(i + x.shift, x.least), S_k) for x in (low, high))
    seeing = (i >= queries[0]) & (i < queries[1]) & (lows < S_k) & (highs > 0)
    if (lows[seeing] >= highs[seeing]).any() or (lows[seeing][1:] > highs[seeing][:-1]).any():
        return None
    return seeing[:, None] & (j >= lows[:, None]) & (j < highs[:, None])


@pytest.mark.parametrize("shape", [(11, 13), (13, 8)], ids=str)
@pytest.mark.parametrize("block", [(3, 4), (4, 4), (5, 2)], ids=str)
def test_lines_are_the_intervals_between_them(shape: tuple[int, int], block: tuple[int, int]) -> None:
    lows = [flat(0), flat(3), *(Line(shift, least) for shift in (-9, -6, -2, 1) for least in (0, 2))]
    highs = [flat(shape[1]), flat(7), *(Line(shift, least) for shift in (-4, 0, 3, 5) for least in (0, 5))]
    tried = 0
    for low, high, queries in itertools.product(lows, highs, (None, (2, 9), (4, 8), (0, 7))):
        want = wanted(shape, low, high, queries or (0, shape[0]))
        if want is not None:
            found = dense(lines(shape, block, low, high, queries), shape, block)
            np.testing.assert_array_equal(found, want, f"{low} {high} {queries}")
            tried += 1
    assert tried > 100


@pytest.mark.parametrize("block", [(3, 4), (4, 3), (4, 4), (5, 2), (2, 7)], ids=str)
def test_documents_are_squares_on_the_diagonal(block: tuple[int, int]) -> None:
    rng = np.random.default_rng(8)
    for most in (3, 5, 9, 14) * 8:
        sizes = rng.integers(0, most, 6)
        bounds = np.cumsum([0, *sizes])
        if bounds[-1]:
            document = np.repeat(np.arange(6), sizes)
            shape = (len(document), len(document))
            np.testing.assert_array_equal(dense(documents(bounds, block), shape, block), document[:, None] == document)


def test_equal_rows_are_found_once_in_the_order_of_the_first() -> None:
    chosen, same = distinct_rows(np.array([[5, 1], [2, 2], [5, 1], [0, 7], [2, 2]]))
    assert chosen.tolist() == [0, 1, 3] and same.tolist() == [0, 1, 0, 2, 1]
