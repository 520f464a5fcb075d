"""Counts of 2^31 or more, as kernels meet them: arrays as long as they can be, of which little is ever touched."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import heuristics, mask_tiles
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.host import ENGINE

from . import emulator
from .forked import forked


def untouched(count: int) -> emulator.Array:
    """Zeros of int32 in pages that the machine provides when they are first written to."""
    return np.frombuffer(mmap.mmap(-1, 4 * count), np.int32).view(emulator.Array)


def placed(x: Any) -> emulator.Array:
    """A copy as on a card; what is untouched stays so."""
    return x if isinstance(x, emulator.Array) else emulator.put(x)


def moved(found: mask_tiles.Tiles) -> mask_tiles.Tiles:
    """The same lists, where the kinds of the blocks in a tile begin at number 2^31 and later."""
    assert found.parts is not None
    size, entries = found.parts_q * found.parts_k, len(found.columns)
    before = math.ceil(2**31 / size)
    columns, kinds = untouched(before + entries), untouched((before + entries) * size)
    columns[:entries], kinds[before * size :] = found.columns, found.kinds
    parts = np.where(found.parts < 0, found.parts, found.parts + np.int32(before))
    return found._replace(columns=columns, parts=parts, kinds=kinds)


@pytest.mark.parametrize(
    ("arch", "head_dim", "dtype", "kernel"),
    [
        ("sm_90a", 128, "float16", "attention_sm90"),
        ("sm_90a", 64, "float16", "attention_sm90"),
        ("sm_80", 128, "float16", "attention_sm80"),
        ("sm_80", 8, "float64", "attention_simt"),
    ],
)
def test_a_mask_of_so_many_blocks_that_their_kinds_need_64_bits(
    arch: str, head_dim: int, dtype: str, kernel: str, folder: Path
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 200, head_dim)).astype(dtype) for _ in range(3))
    mask = bg.BlockMask.from_dense(rng.random((200, 200)) < 0.3, block=16)
    want = bg.attention(*(x.astype(np.float64) for x in (q, k, v)), mask=mask)
    tiles = mask_tiles.tiles

    def attend() -> None:
        with (
            patch.object(mask_tiles, "tiles", lambda *args: moved(tiles(*args))),
            patch.object(heuristics, "SHORT_KEYS", 0),
            emulator.emulated(folder, placed, arch=arch),
            patch.object(ENGINE, "forward", emulator.run_attention),
        ):
            got = bg.attention(q, k, v, mask=mask).astype(np.float64)
            assert {plan.config.spec().entry for plan in attention_launch._plans.values()} == {kernel}
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-2)

    status, said = forked(attend)  # a read outside of the arrays ends the process
    assert status == 0, said
