"""Where operands and temporary memory may lie: at any address, and apart from those of other captures."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

from .product_cases import acc_of, assert_close, dense, pattern, values
from .repeats import captured, new_stream

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("side", "dtype", "columns"), [(64, "float16", 40), (128, "float16", 64), (3, "float64", 1)])
def test_two_captures_on_one_stream_run_in_any_order(side: int, dtype: str, columns: int, rng: Any) -> None:
    import cupy

    blocks = rng.standard_normal((3000 if side == 3 else 96, side, side)).astype(dtype)
    index = np.arange(len(blocks), dtype=np.int32), np.array([0, 0, len(blocks)], np.int32)
    arrays = tuple(map(cupy.asarray, (blocks, *index)))
    A = bg.bsr_array(arrays, shape=(2 * side, len(blocks) * side))
    B = [cupy.asarray(rng.standard_normal((A.shape[1], columns)).astype(dtype)) for _ in range(2)]
    stream = new_stream()
    with stream:
        want = [A @ x for x in B]
        out = [cupy.empty_like(x) for x in want]
        graphs = []
        for x, y in zip(B, out, strict=True):
            graphs.append(captured(stream, partial(bg.matmul, A, x, out=y)))
        for order in ((0, 1), (1, 0), (1, 1)):
            for y in out:
                y.fill(np.nan)
            for number in order:
                graphs[number].launch()
            stream.synchronize()
            for number in set(order):
                assert bool((out[number] == want[number]).all())


@pytest.mark.parametrize("columns", [1, 3, 16, 64])
@pytest.mark.parametrize(
    ("side", "dtype"),
    [(4, "float32"), (16, "float32"), (8, "float64"), (64, "float16"), (128, "float16"), (32, "float64")],
)
def test_blocks_may_begin_at_any_address(side: int, dtype: str, columns: int, rng: Any) -> None:
    """One element after a multiple of 16 bytes, where neither the copy engine nor wide loads can read."""
    import cupy

    host = pattern(rng, 9, 7, side, side, dtype)
    room = cupy.empty(host[0].size + 1, dtype)
    data = room[1:].reshape(host[0].shape)
    data[...] = cupy.asarray(host[0])
    A = bg.bsr_array((data, *map(cupy.asarray, host[1:3])), shape=host[3])
    B = values(rng, (host[3][1], columns), np.dtype(dtype))
    got = A @ cupy.asarray(B)
    stored, wide = dense(host, np.float64), B.astype(np.float64)
    assert_close(got.get(), stored @ wide, np.abs(stored) @ np.abs(wide), 2 * host[3][1], acc_of(np.dtype(dtype)))


@pytest.mark.parametrize("block", [(128, 128), (64, 96), (16, 16)], ids=str)
@pytest.mark.parametrize("columns", [40, 64])
def test_batches_of_fp8_are_read_in_rows_and_in_columns(block: tuple[int, int], columns: int, rng: Any) -> None:
    """Tensor cores read fp8 along columns alone: operands in rows are copied first."""
    import cupy
    from ml_dtypes import float8_e4m3fn

    def fp8(shape: tuple[int, ...]) -> np.ndarray:
        return values(rng, shape, np.dtype(np.float32)).astype(float8_e4m3fn)

    data, indices, indptr, shape = pattern(rng, 5, 4, *block, np.uint8)
    data, B = fp8(data.shape), fp8((3, shape[1], columns))
    A = bg.bsr_array(tuple(map(cupy.asarray, (data.view(np.uint8), indices, indptr))), shape=shape)
    rows = cupy.asarray(B.view(np.uint8))
    in_columns = cupy.asarray(np.ascontiguousarray(B.view(np.uint8).transpose(0, 2, 1))).transpose(0, 2, 1)
    stored = dense((data.astype(np.float64), indices, indptr, shape), np.float64)
    want, size = stored @ B.astype(np.float64), np.abs(stored) @ np.abs(B.astype(np.float64))
    for x in (rows, in_columns):
        got = bg.matmul(A, x, scale_a=1.0).get()
        # The tensor cores keep about 13 bits of each product when they add fp8.
        assert (np.abs(got - want) <= 2**-10 * size + 1e-6).all()
