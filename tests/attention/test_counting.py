"""Places in masks are counted in 64 bits, also where no test can have so many blocks; see tests/array/test_counting."""

from __future__ import annotations

import numpy as np

from bsrgemm import BlockMask
from bsrgemm._attention import mask_base, mask_tiles
from bsrgemm._backend.numpy_backend import HOST

from ..array.test_counting import counting_in_64_bits

#: Makes kinds, which are no places.
ALLOWED = ("whole_kinds",)


def masks() -> list[BlockMask]:
    bounds = np.array([0, 10, 40, 100])
    return [
        BlockMask.causal(100, block=16, device="cpu"),
        BlockMask.documents(bounds, block=16, device="cpu"),
        BlockMask.random(100, block=16, per_row=2, heads=(2, 2), device="cpu", seed=1),
        BlockMask.global_tokens(100, tokens=[3, 50], block=16, device="cpu"),
        BlockMask.from_dense(np.tri(70, 100, dtype=bool), block=16),
    ]


def test_intervals_and_tiles_are_counted_in_64_bits() -> None:
    want = [mask.to_dense() for mask in masks()]
    with counting_in_64_bits(mask_base, mask_tiles, allowed=ALLOWED):
        for mask, dense in zip(masks(), want, strict=True):
            np.testing.assert_array_equal(mask.to_dense(), dense)
            for tile in ((64, 128), (128, 64)):
                found = mask_tiles.tiles(HOST, mask, *tile)
                assert found.columns.dtype == found.first.dtype == found.order.dtype == np.int32  # as kernels read them
        bounds = np.array([0, 10, 40, 100], np.int32)
        lists = mask_tiles.sequences(np, bounds, bounds, 100, 64, True)
        assert all(x.dtype == np.int32 for x in lists)
