"""Dtypes of the arrays of a mask however it was made, long masks, and sizes at which 32 bits would be too few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm._attention import mask as mask_module
from bsrgemm._attention import mask_base
from bsrgemm._attention.mask_base import Grid
from bsrgemm._backend.numpy_backend import HOST

from .. import fake_cupy

pytestmark = pytest.mark.fake


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on(device: str, x: Any) -> Any:
    return fake_cupy.backend().from_host(x) if device == "cuda" else x


TRI = np.tri(70, 100, dtype=bool)
#: Every way to make a mask, given how it is told where.
MADE: dict[str, Callable[[str], BlockMask]] = {
    "full": lambda device: BlockMask.full(70, block=16, device=device),
    "causal": lambda device: BlockMask.causal(70, block=16, device=device),
    "window": lambda device: BlockMask.window(70, left=20, right=3, block=32, device=device),
    "sinks": lambda device: BlockMask.sinks(70, count=20, block=16, device=device),
    "prefix": lambda device: BlockMask.prefix(70, length=20, block=16, device=device),
    "global tokens": lambda device: BlockMask.global_tokens(70, tokens=[3, 50], block=16, device=device),
    "no global tokens": lambda device: BlockMask.global_tokens(70, tokens=[], block=16, device=device),
    "documents": lambda device: BlockMask.documents(np.array([0, 10, 70], np.uint8), block=16, device=device),
    "dilated": lambda device: BlockMask.dilated(70, count=5, dilation=3, block=16, device=device),
    "random": lambda device: BlockMask.random(70, per_row=2, heads=(2, 3), block=16, device=device),
    "from dense": lambda device: BlockMask.from_dense(on(device, TRI), block=16),
    "from block indices": lambda device: BlockMask.from_block_indices(
        on(device, np.array([0, 1, 1, 2])), on(device, np.array([2, 0])), shape=(40, 40), block=16
    ),
    "stack": lambda device: BlockMask.stack([MADE["causal"](device), MADE["full"](device)]),
    "and": lambda device: MADE["causal"](device) & MADE["dilated"](device),
    "or": lambda device: MADE["causal"](device) | MADE["random"](device),
    "not": lambda device: ~MADE["causal"](device),
    "moved": lambda device: MADE["causal"](device).get(),
    "one pattern": lambda device: MADE["or"](device)._pattern(4),
}


@pytest.mark.parametrize("limits", ["host", "device"])
@pytest.mark.parametrize("how", MADE)
def test_the_arrays_of_a_mask_have_the_dtypes_that_kernels_read(
    how: str, limits: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limits == "device":
        monkeypatch.setattr(mask_module, "_FEW", 0)
        monkeypatch.setattr(mask_module, "_FEW_BLOCKS", -1)
    mask = MADE[how](device)
    assert [x.dtype for x in (mask.indptr, mask.indices, mask.kinds)] == [np.int32] * 3
    assert mask.bits.dtype == np.uint32 and mask.bits.shape[1:] == (mask.block[0], -(-mask.block[1] // 32))
    assert mask._rows().dtype == mask._keys().dtype == np.int64  # `row * keys` is computed with them
    assert mask_base.counts_of(mask._backend.xp, mask.bits).dtype == np.int64
    assert mask.to_dense().dtype == bool


@pytest.mark.parametrize("make", [sp.bsr_array, bg.bsr_array])
def test_a_mask_of_booleans_in_blocks_has_the_dtypes_that_kernels_read(make: Any) -> None:
    data = np.zeros((2, 16, 16), bool)
    data[:, 3] = True
    mask = BlockMask.from_bsr(make((data, np.array([1, 0]), np.array([0, 1, 2, 2])), shape=(48, 48)))
    assert mask.bits.dtype == np.uint32 and mask.indices.dtype == mask.indptr.dtype == mask.kinds.dtype == np.int32
    back = mask.to_bsr()
    assert back.shape == (48, 48) and back.dtype == bool and back.blocksize == (16, 16)
    np.testing.assert_array_equal(back.toarray(), mask.to_dense())


def test_elements_of_blocks_are_counted_beyond_32_bits() -> None:
    grid = Grid(40, 2**33 - 56, (16, 256), "cpu")
    col = np.array([0, 2**25 - 1, 2**25 - 1], np.int32)
    found = grid.sizes(np.array([0, 1, 2]), col)
    assert found.tolist() == [16 * 256, 16 * 200, 8 * 200]


def numbered(order: np.ndarray[Any, Any]) -> BlockMask:
    """A mask of 220 x 220 blocks, each with elements of its own: bits of the block's number, stored in this order."""
    side, count = 220, 220 * 220
    number = np.arange(count, dtype=np.uint32)
    bits = np.zeros((count, 16, 1), np.uint32)
    bits[:, 0, 0], bits[:, 1, 0] = number & 0xFFFF, number >> 16 | 256
    kinds = np.empty(count, np.int32)
    kinds[order] = np.arange(count)
    indptr = np.arange(side + 1, dtype=np.int32) * side
    indices = np.tile(np.arange(side, dtype=np.int32), side)
    shape = (16 * side, 16 * side)
    return BlockMask(HOST, shape, (16, 16), (1, 1), indptr, indices, kinds, bits[order])


def test_masks_with_more_element_masks_than_32_bits_have_pairs_of_are_compared() -> None:
    order = np.random.default_rng(0).permutation(220 * 220)
    one, other = numbered(np.arange(220 * 220)), numbered(order)
    assert one == other
    other.bits[-1, 5, 0] ^= 1
    assert one != other


@pytest.mark.parametrize("block", [16, (16, 48), (48, 16)], ids=str)
@pytest.mark.parametrize("shape", [(709, 716), (709, 709), (716, 701), (1003, 395), (395, 1003)], ids=str)
def test_long_masks_whose_edges_lie_inside_of_blocks(shape: tuple[int, int], block: Any) -> None:
    """Blocks with the same number share their elements, so numbers must not collide, however many rows there are."""
    S_q, S_k = shape
    common = {"block": block, "device": "cpu"}
    for align in ("bottom-right", "top-left"):
        j = np.arange(S_k)
        i = np.arange(S_q)[:, None] + (S_k - S_q if align == "bottom-right" else 0)
        masks = (
            (BlockMask.causal(*shape, align=align, **common), j <= i),
            (BlockMask.window(*shape, left=37, right=21, align=align, **common), (j >= i - 37) & (j <= i + 21)),
            (BlockMask.window(*shape, left=90, align=align, **common), j >= i - 90),
            (BlockMask.prefix(*shape, length=70, align=align, **common), (j < 70) | (j <= i)),
            (BlockMask.sinks(*shape, count=25, **common), (j < 25) & (i == i)),
            (
                BlockMask.global_tokens(*shape, tokens=[*range(30, 90), 300], align=align, **common),
                ((j >= 30) & (j < 90)) | (j == 300) | ((i >= 30) & (i < 90)) | (i == 300),
            ),
            (
                BlockMask.dilated(*shape, count=19, dilation=7, align=align, **common),
                (j <= i) & ((i - j) % 7 == 0) & (i - j < 19 * 7),
            ),
        )
        for mask, want in masks:
            np.testing.assert_array_equal(mask.to_dense(), want)


@pytest.mark.parametrize("block", [16, (16, 48), (48, 16)], ids=str)
def test_many_documents_whose_edges_lie_inside_of_blocks(block: Any) -> None:
    sizes = np.random.default_rng(3).integers(0, 90, 40)
    document = np.repeat(np.arange(40), sizes)
    mask = BlockMask.documents(np.cumsum([0, *sizes]), block=block, device="cpu")
    np.testing.assert_array_equal(mask.to_dense(), document[:, None] == document)


@pytest.mark.parametrize("shape", [(0, 0), (0, 40), (40, 0)], ids=str)
def test_masks_without_queries_or_keys(shape: tuple[int, int], device: str) -> None:
    common = {"block": 16, "device": device}
    masks = [
        BlockMask.causal(*shape, **common),
        BlockMask.full(*shape, **common),
        BlockMask.sinks(*shape, count=1, **common),
    ]
    masks += [BlockMask.dilated(*shape, count=2, dilation=3, **common), BlockMask.random(*shape, per_row=0, **common)]
    masks += [masks[0] & masks[1], masks[0] | masks[1], ~masks[0], BlockMask.stack(masks[:2])]
    masks += [BlockMask.from_dense(on(device, np.ones(shape, bool)), block=16)]
    for mask in masks:
        assert mask.shape == shape and mask.to_dense().shape == ((1, 2, *shape) if mask is masks[8] else shape)
        assert not len(mask.indices) and mask.allowed == mask.density == 0
        assert mask == mask.get().to_device(device)


def test_element_masks_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_cupy.backend()
    rows = np.array([[[1], [2]], [[2], [1]], [[1], [2]], [[3], [0]]], np.uint32)
    mixed, poor = mask_base.mixed, [True]

    def hashed(x: Any) -> Any:
        """Weights of which all are 1: then the hash is the sum of the words."""
        return x * np.uint64(0) if poor[0] else mixed(x)

    def once(x: Any) -> Any:
        found = hashed(x)
        poor[0] = False
        return found

    monkeypatch.setattr(mask_base, "mixed", once)
    chosen, same = (fake.to_host(x) for x in mask_base.distinct(fake.xp, fake.from_host(rows)))
    assert len(chosen) == 3 and not poor[0]
    np.testing.assert_array_equal(rows[chosen][same], rows)
    poor[0] = True
    monkeypatch.setattr(mask_base, "mixed", hashed)
    with pytest.raises(AssertionError, match="a hundred hashes in a row collided"):
        mask_base.distinct(fake.xp, fake.from_host(rows))
    chosen, same = mask_base.distinct(fake.xp, fake.from_host(rows[:0]))
    assert len(chosen) == len(same) == 0


# ------------------------------------------------------------------------------------------------- masks with gaps
def drawn(rows: int, cols: int, per_row: int, seed: int) -> list[int]:
    """Block columns of a random mask, by numbers of Python: splitmix64 of the seed and the number of the block."""
    low = 2**64 - 1
    found = []
    for number in range(rows * per_row):
        x = (seed % 2**32 << 32) + number
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & low
        x = (x ^ x >> 27) * 0x94D049BB133111EB & low
        strip = number % per_row
        first, end = strip * cols // per_row, (strip + 1) * cols // per_row
        found.append(first + (x ^ x >> 31) % (end - first))
    return found


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31 + 5, 2**32 - 1, 2**32 + 7, 2**40 + 3, -1])
@pytest.mark.parametrize("per_row", [1, 2, 3, 7])
def test_random_masks_are_the_same_on_every_machine(seed: int, per_row: int, device: str) -> None:
    mask = BlockMask.random(70, 100, per_row=per_row, heads=(2, 3), seed=seed, block=16, device=device)
    indices, indptr = (mask._backend.to_host(x).tolist() for x in (mask.indices, mask.indptr))
    assert indices == drawn(2 * 3 * 5, 7, per_row, seed)
    assert indptr == [per_row * row for row in range(2 * 3 * 5 + 1)]
    assert mask._backend.to_host(mask.kinds).tolist() == [-1] * len(indices)


@pytest.mark.parametrize("tokens", [[0], [39], [0, 39], [1, 3, 4, 9], [0, 2, 4], [5, 6, 7], [9, 3, 3, 10]], ids=str)
def test_global_tokens_lie_anywhere(tokens: list[int], device: str) -> None:
    for queries, align in ((40, "bottom-right"), (25, "bottom-right"), (25, "top-left"), (50, "bottom-right")):
        i = np.arange(queries)[:, None] + (40 - queries if align == "bottom-right" else 0)
        mask = BlockMask.global_tokens(queries, 40, tokens=tokens, align=align, block=16, device=device)
        want = np.isin(i, tokens) | np.isin(np.arange(40), tokens)
        np.testing.assert_array_equal(mask._backend.to_host(mask.to_dense()), want)


@pytest.mark.parametrize("dilation", [1, 2, 15, 16, 17, 31, 32, 33, 60])
def test_dilations_around_the_side_of_a_block(dilation: int, device: str) -> None:
    i, j = np.indices((90, 90))
    for count in (0, 1, 2, 5):
        mask = BlockMask.dilated(90, count=count, dilation=dilation, block=16, device=device)
        want = (j <= i) & ((i - j) % dilation == 0) & (i - j < count * dilation)
        np.testing.assert_array_equal(mask._backend.to_host(mask.to_dense()), want)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (1, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("axis", ["heads", "batch"])
def test_masks_of_one_block_are_stacked(heads: tuple[int, int], axis: str, device: str) -> None:
    rng = np.random.default_rng(5)
    dense = [rng.random((*heads, 10, 12)) < 0.5 for _ in range(3)]
    masks = [BlockMask.from_dense(on(device, x), block=16) for x in dense]
    found = BlockMask.stack(masks, axis=axis)
    want = np.concatenate(dense, axis=1 if axis == "heads" else 0)
    np.testing.assert_array_equal(found._backend.to_host(found.to_dense()), want)


def test_one_document_and_empty_documents(device: str) -> None:
    for bounds in ([0, 20], [0, 0, 20], [0, 7, 7, 20], [0, 20, 20], [0, 0]):
        document = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        mask = BlockMask.documents(bounds, block=16, device=device)
        np.testing.assert_array_equal(mask._backend.to_host(mask.to_dense()), document[:, None] == document)
