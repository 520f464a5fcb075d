"""The order in which tiles of queries pass by a tile of keys, on the card: against the reference, and in gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm._attention import mask_tiles
from bsrgemm._attention.backward_sm90 import TurnOrder

from ..attention.turn_orders import turns_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param((700, 900, 64, 3, 5), marks=pytest.mark.sanitizer),
        (8192, 8192, 128, 20, 66),
        (131072, 2048, 128, 7, 33),
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [(1, 1), (2, 3)], ids=str)
def test_the_order_is_that_of_the_reference(case: tuple[int, ...], heads: tuple[int, int]) -> None:
    S_q, S_k, block, per_row, walkers = case
    mask = BlockMask.random(S_q, S_k, per_row=min(per_row, S_k // block), heads=heads, seed=5, block=block)
    mask = mask.to_device("cuda")
    found = mask_tiles.by_keys(mask._backend, mask, 64, 128)
    tiles, rows = -(-S_k // 128), -(-S_q // 64)
    got = TurnOrder().in_turn(found, tiles, rows, walkers)
    first, columns = found.first.get(), found.columns.get()
    order = turns_of(first, columns[: first[-1]], tiles, rows, walkers)
    assert (got.columns.get()[: first[-1]] == columns[order]).all()
    if found.parts is not None:
        assert (got.parts.get()[: first[-1]] == found.parts.get()[order]).all()


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("D", [64, 128])
def test_gradients_are_those_of_another_order_and_repeat(D: int, block: int, rng: Any) -> None:
    """So many tiles of keys that CTAs wait for each other, in an order that is not that of the queries."""
    import cupy

    S = 6144
    q, k, v, dout = (cupy.asarray(rng.standard_normal((1, 4, S, D)).astype(np.float16)) for _ in range(4))
    mask = BlockMask.random(S, per_row=S // block // 4, heads=(1, 4), seed=2, block=block).to_device("cuda")
    out, lse = bg.attention(q, k, v, mask=mask, return_lse=True)
    got = bg.attention_backward(dout, q, k, v, out, lse, mask=mask)
    assert any("by keys" in key and key[-1] > 0 for key in mask._tiles)
    fast = bg.attention_backward(dout, q, k, v, out, lse, mask=mask, deterministic=False)
    for _ in range(20):
        again = bg.attention_backward(dout, q, k, v, out, lse, mask=mask)
        for x, y in zip(got, again, strict=True):
            assert (x.view(np.uint16) == y.view(np.uint16)).all()
    for x, y in zip(got, fast, strict=True):
        assert float(cupy.abs(x - y).max()) <= 3e-3 * float(cupy.abs(y).max())
