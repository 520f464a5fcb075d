"""Lengths, tiles and sequences that 31 bits cannot count are refused; no memory of their size is ever touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import checks


def repeated(*shape: int) -> Any:
    """Zeros that are all one in memory."""
    return np.broadcast_to(np.float16(0), shape)


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_sequence_of_2_to_30_positions_is_refused(name: str) -> None:
    """A window without a bound has 2**30 keys on each side: a query would miss some of the keys."""
    shapes = {x: (1, 1, 2**30 if x == name else 1, 8) for x in "qk"}
    q, k = (repeated(*shapes[x]) for x in "qk")
    message = rf"^{name}: wanted at most 1073740800 positions, got 1073741824; .*merge_states"
    with pytest.raises(ValueError, match=message):
        bg.attention(q, k, k)
    with pytest.raises(ValueError, match=message):
        bg.vjp(bg.attention, q, k, k)


def test_more_tiles_of_all_heads_than_31_bits_number_are_refused() -> None:
    many = repeated(2**16, 2**15, 1, 8)
    message = (
        r"^q: 2147483648 tiles of 32 rows in all heads and batches, wanted less than 2146435072; .* batch at a time"
    )
    with pytest.raises(ValueError, match=message):
        bg.attention(many, many, many)


def test_sequences_of_different_lengths_have_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = repeated(2**29, 2, 8), repeated(2**29, 1, 8)
    with pytest.raises(
        ValueError, match=r"^cu_seqlens_q: .* 1073740800 queries and keys together, got 2 and 1073741824; "
    ):
        bg.attention(q, k, k, cu_seqlens_q=[0, 2**29], cu_seqlens_k=[0, 2**29])
    few = np.zeros((8, 2, 8), np.float16)
    lengths = {"cu_seqlens_q": [0, 1, 2, 8], "cu_seqlens_k": [0, 3, 4, 8]}
    bg.attention(few, few, few, **lengths)
    monkeypatch.setattr(checks, "_MOST_SEQUENCES", 3)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: wanted at most 3 bounds and .* got 4 and 16; attend to some"):
        bg.attention(few, few, few, **lengths)
    monkeypatch.undo()
    monkeypatch.setattr(checks, "_MOST_TILES", 8)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: 8 tiles of 32 rows .* wanted less than 8; attend to some of"):
        bg.attention(few, few, few, **lengths)


@pytest.mark.parametrize("shape", [(16, 2**35), (2**35, 16)])
def test_a_mask_has_fewer_than_2_to_31_blocks_along_a_side(shape: tuple[int, int]) -> None:
    """The number of a block column is an int32: 2**32 would be column 0."""
    name = "keys" if shape[1] > 16 else "queries"
    with pytest.raises(
        ValueError, match=rf"^{name}: 2147483648 blocks of 16 along a side, wanted less than 2\*\*31; take"
    ):
        bg.BlockMask.from_block_indices([0, 1], [2**31 - 1], shape=shape, block=16)
    wide = bg.BlockMask.from_block_indices([0, 1], [2**31 - 2], shape=(16, 2**35 - 16), block=16)
    assert wide.indices[0] == 2**31 - 2
