"""All that is promised of `block_elements` and `csr_blocks`: the elements of blocks in CSR and COO, and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._backend import registry, structure
from bsrgemm._backend.base import Blocks, Csr
from bsrgemm._backend.numpy_backend import HOST

from ..devices import Device
from .products import F64, numbers
from .test_array_kernels import (
    _BLOCKS,
    _INT32,
    _INT64,
    _ORDERED,
    _SCATTERED,
    canonical_pattern,
    on,
    same_bits,
    spoiled,
    stored,
)


@pytest.fixture(autouse=True)
def any_card(device: Device) -> None:
    device.needs("sm_75")


@pytest.mark.before
@pytest.mark.parametrize("dtypes", [*itertools.product((_INT32, _INT64), repeat=2)], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(c) for c in "beidD"], ids=str)
def test_elements_of_blocks_by_rows_and_in_order(
    dtype: Any, dtypes: Any, device: Device, rng: np.random.Generator
) -> None:
    for pattern, blocksize in itertools.product((_SCATTERED, _ORDERED, ([0], []), ([0, 0], [])), (*_BLOCKS, (40, 70))):
        blocks = stored(rng, pattern, blocksize, dtype, dtypes[0])
        there, cuda = on(device, blocks), registry.cuda()
        want = HOST.to_coo(blocks, 6, dtypes[1])
        for got, wanted in (
            (cuda.to_csr(there, 6, dtypes[1]), HOST.to_csr(blocks, 6, dtypes[1])),
            *((cuda.to_coo(there, 6, dtypes[1], copy), want) for copy in (False, True)),
        ):
            for one, other in zip(got, wanted, strict=True):
                same_bits(device.asnumpy(one), other)


@pytest.mark.before
@pytest.mark.sanitizer
def test_elements_of_spoiled_indices_stay_inside(device: Device, rng: np.random.Generator) -> None:
    """What is made of them can be used: columns and row pointers are in range."""
    for blocks in spoiled(stored(rng, _ORDERED, (2, 3), F64, _INT32)):
        there = on(device, blocks)
        registry.cuda().inspect(there.indices, there.indptr)
        _, columns, pointers = map(device.asnumpy, registry.cuda().to_csr(there, 6, _INT32))
        assert columns.min() >= 0 and columns.max() < 18
        assert pointers.min() >= 0 and pointers.max() == pointers[-1] == 66
        registry.cuda().to_coo(there, 6, _INT32)
    device.synchronize()


#: Parts of M rows and N columns of an array with twice as many.
_VIEWS = (
    lambda x, M, N: x[:M, :N],
    lambda x, M, N: x[::2, ::2],
    lambda x, M, N: x.reshape(-1)[: M * N].reshape(N, M).T,
)


@pytest.mark.before
@pytest.mark.parametrize("index", [_INT32, _INT64], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(c) for c in "beidD"], ids=str)
def test_blocks_are_put_into_dense_matrices_and_taken_from_them(
    dtype: Any, index: Any, device: Device, rng: np.random.Generator
) -> None:
    """Matrices in rows, in columns, every second element of a larger one, and one row that is repeated."""
    for pattern, blocksize in itertools.product((_ORDERED, ([0, 0], [])), (*_BLOCKS, (40, 70))):
        blocks = stored(rng, pattern, blocksize, dtype, index)
        shape = ((len(blocks.indptr) - 1) * blocksize[0], 6 * blocksize[1])
        there, whole = on(device, blocks), numbers(rng, (2 * shape[0], 2 * shape[1]), np.dtype(dtype))
        for view in _VIEWS:
            want, got = whole.copy(), device.asarray(whole)
            taken = registry.cuda().take_blocks(there, view(got, *shape))
            same_bits(device.asnumpy(taken), HOST.take_blocks(blocks, view(want, *shape)))
            HOST.put_blocks(blocks, view(want, *shape))
            registry.cuda().put_blocks(there, view(got, *shape))
            same_bits(device.asnumpy(got), want)
        row = np.broadcast_to(whole[0, : shape[1]], shape)
        repeated = device.cupy.broadcast_to(device.asarray(whole[0, : shape[1]]), shape)
        same_bits(device.asnumpy(registry.cuda().take_blocks(there, repeated)), HOST.take_blocks(blocks, row))


@pytest.mark.before
@pytest.mark.sanitizer
def test_spoiled_indices_stay_inside_dense_matrices(device: Device, rng: np.random.Generator) -> None:
    whole = device.asarray(np.zeros((10, 18)))
    for blocks in spoiled(stored(rng, _ORDERED, (2, 3), F64, _INT32)):
        registry.cuda().put_blocks(on(device, blocks), whole)
        registry.cuda().take_blocks(on(device, blocks), whole)
    device.synchronize()


def check_blocks_of_csr(device: Device, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int]) -> None:
    """Compare with blocks that are made of single elements, for a matrix without duplicates."""
    rows = np.repeat(np.arange(shape[0]), np.diff(csr.indptr))
    want = structure.from_coo(HOST, rows, csr.indices, csr.data, shape, blocksize, csr.indices.dtype, unique=True)
    there = Csr(*map(device.asarray, csr))
    got = registry.cuda().blocks_of_csr(there, shape, blocksize, lambda: True)
    assert got is not None
    for one, other in zip(got, want, strict=True):
        same_bits(device.asnumpy(one), other)
    assert registry.cuda().count_blocks(there, shape, blocksize) == len(want.indices)


@pytest.mark.before
@pytest.mark.parametrize("index", [_INT32, _INT64], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(c) for c in "beidD"], ids=str)
@pytest.mark.parametrize("blocksize", [(1, 1), (3, 3), (2, 5), (40, 3), (128, 2), (33, 20), (20, 70)], ids=str)
def test_blocks_of_csr(
    blocksize: tuple[int, int], dtype: Any, index: Any, device: Device, rng: np.random.Generator
) -> None:
    """Elements anywhere, most of them in the first rows of blocks; no elements, and no rows."""
    R, C = blocksize
    for rows, share in ((5, 0.2), (5, 0.9), (5, 0), (0, 0)):
        shape = (rows * R, 7 * C)
        full = rng.random(shape) < share * (np.arange(shape[0]) % R < (R + 1) / 2)[:, None]
        full[2 * R : 3 * R] = False
        row, col = np.nonzero(full)
        pointers = np.searchsorted(row, np.arange(shape[0] + 1))
        csr = Csr(numbers(rng, (len(row),), dtype), col.astype(index), pointers.astype(index))
        check_blocks_of_csr(device, csr, shape, blocksize)


@pytest.mark.before
@pytest.mark.parametrize("dtype", [np.dtype(c) for c in "beidD"], ids=str)
@pytest.mark.parametrize("blocksize", [*_BLOCKS, (40, 70)], ids=str)
def test_full_blocks_of_csr(blocksize: tuple[int, int], dtype: Any, device: Device, rng: np.random.Generator) -> None:
    """Nothing has to be counted or known of the matrix; with one element elsewhere, or one less, something has."""
    for pattern, index in itertools.product((_ORDERED, ([0], []), ([0, 0], [])), (_INT32, _INT64)):
        want = stored(rng, pattern, blocksize, dtype, index)
        shape = ((len(want.indptr) - 1) * blocksize[0], 6 * blocksize[1])
        csr = Csr(*HOST.to_csr(want, 6, index))
        there = Csr(*map(device.asarray, csr))
        got = registry.cuda().blocks_of_csr(there, shape, blocksize, lambda: False)
        assert got is not None
        for one, other in zip(got, want, strict=True):
            same_bits(device.asnumpy(one), other)
        if max(blocksize) == 1 or not len(csr.data):
            continue
        for changed in one_change(csr, shape, blocksize):
            there = Csr(*map(device.asarray, changed))
            assert registry.cuda().blocks_of_csr(there, shape, blocksize, lambda: False) is None


def one_change(csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int]) -> Iterator[Csr]:
    """A matrix of full blocks without its last element, and with other columns or row pointers."""
    pointers = csr.indptr.copy()
    pointers[-1] -= 1
    yield Csr(csr.data[:-1], csr.indices[:-1], pointers)
    for at, value in ((0, csr.indices[0] + 1), (len(csr.data) // 2, -1), (-1, shape[1]), (1, csr.indices[0])):
        columns = csr.indices.copy()
        columns[at] = value if columns[at] != value else value + 1
        yield csr._replace(indices=columns)
    for at in (0, 1, len(csr.indptr) // 2, -1):
        for step in (-1, 1):
            pointers = csr.indptr.copy()
            pointers[at] += step
            yield csr._replace(indptr=pointers)


@pytest.mark.before
def test_full_blocks_that_are_not_in_order_are_found_out(device: Device) -> None:
    """Twice the same block, a block that begins between two, a row that falls, and one that falls and climbs again."""
    two = np.array([0, 1, 2, 3, 0, 1, 2, 3], np.int32)
    for columns, pointers in (
        (two[[0, 1, 0, 1, 4, 5, 4, 5]], [0, 4, 8]),
        (two[[2, 3, 0, 1, 2, 3, 0, 1]], [0, 4, 8]),
        (two[[1, 2, 1, 2, 1, 2, 1, 2]], [0, 4, 8]),
        (two, [0, 8, 4, 6, 8]),
        (two, [4, 6, 8, 8, 8]),
        (two, [0, 4, 6, 8, 8]),
    ):
        shape = (len(pointers) - 1, 4)
        csr = Csr(*map(device.asarray, (np.ones(8, np.float32), columns, np.array(pointers, np.int32))))
        assert registry.cuda().blocks_of_csr(csr, shape, (2, 2), lambda: False) is None


@pytest.mark.before
@pytest.mark.sanitizer
def test_blocks_of_spoiled_csr_stay_inside(device: Device, rng: np.random.Generator) -> None:
    tall = canonical_pattern(rng, 40, 40)
    for pattern, shape, blocksizes in (
        (_ORDERED, (5, 6), ((1, 2), (5, 3), (5, 6), (1, 1))),
        (tall, (40, 40), ((20, 20), (40, 8))),
    ):
        for blocks, blocksize in itertools.product(spoiled(stored(rng, pattern, (1, 1), F64, _INT32)), blocksizes):
            csr = Csr(*map(device.asarray, (blocks.data.reshape(-1), *blocks[1:])))
            registry.cuda().blocks_of_csr(csr, shape, blocksize, lambda: True)
    for blocks in spoiled(Blocks(*HOST.to_csr(stored(rng, _ORDERED, (2, 3), F64, _INT32), 6, _INT32))):
        csr = Csr(*map(device.asarray, blocks))
        registry.cuda().blocks_of_csr(csr, (10, 18), (2, 3), lambda: True)
    device.synchronize()
