"""Every mask against dense booleans: odd lengths, blocks of two sizes, alignments, patterns per batch and head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm._backend.registry import Backend

from .. import fake_cupy
from ..conftest import BACKENDS, LONG
from ..fake_cupy import functions

quickly = settings(max_examples=200 if LONG else 12, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths = st.integers(1, 150)
sides = st.sampled_from([16, 32, 48, 80])
blocks = st.one_of(st.sampled_from([16, 64, 256]), st.tuples(sides, sides))
aligns = st.sampled_from(["bottom-right", "top-left"])


def dense(mask: BlockMask) -> np.ndarray:
    """The mask as booleans, its other descriptions checked against them."""
    allowed = np.asarray(mask._backend.to_host(mask.to_dense()))
    bq, bk = mask.block
    rows, cols = -(-mask.shape[0] // bq), -(-mask.shape[1] // bk)
    assert mask.allowed == allowed.sum()
    assert mask.density == pytest.approx(allowed.mean())
    tiles = np.zeros((mask.heads[0] * mask.heads[1], rows * bq, cols * bk), bool)
    tiles[:, : mask.shape[0], : mask.shape[1]] = allowed.reshape(-1, *mask.shape)
    valid = np.zeros((rows * bq, cols * bk), bool)
    valid[: mask.shape[0], : mask.shape[1]] = True

    def by_block(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, bq, cols, bk).swapaxes(1, 2).reshape(-1, cols, bq * bk)

    count = by_block(tiles).sum(axis=2)
    whole = (by_block(tiles) | ~np.tile(by_block(valid), (tiles.shape[0], 1, 1))).all(axis=2)
    indptr, indices, kinds = (mask._backend.to_host(x) for x in (mask.indptr, mask.indices, mask.kinds))
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    np.testing.assert_array_equal(np.stack([row, indices]), np.stack(np.nonzero(count)))
    np.testing.assert_array_equal(kinds < 0, whole[row, indices])
    bits = np.asarray(mask._backend.to_host(mask.bits))
    assert len(np.unique(bits.reshape(len(bits), bq * bits.shape[2]), axis=0)) == len(bits)
    assert set(kinds[kinds >= 0]) == set(range(len(bits)))
    for kind in range(min(3, len(bits))):
        r, c = row[kinds == kind][0], indices[kinds == kind][0]
        elements = mask._backend.to_host(mask.elements(kind))
        np.testing.assert_array_equal(elements, by_block(tiles)[r, c].reshape(bq, bk))
    return allowed


def places(queries: int, keys: int, align: str) -> tuple[np.ndarray, np.ndarray]:
    """The place of every query, and the keys, such that they can be compared."""
    offset = keys - queries if align == "bottom-right" else 0
    return np.arange(queries)[:, None] + offset, np.arange(keys)[None]


def draw_mask(data: Any, queries: int, keys: int, block: Any, align: str, device: str) -> tuple[BlockMask, np.ndarray]:
    """Some mask, and what it should be."""
    i, j = places(queries, keys, align)
    common = {"block": block, "device": device}
    name = data.draw(st.sampled_from(["full", "causal", "window", "sinks", "prefix", "global", "dilated", "random"]))
    n = data.draw(st.integers(0, 70))
    if name == "full":
        return BlockMask.full(queries, keys, **common), np.ones((queries, keys), bool)
    if name == "causal":
        return BlockMask.causal(queries, keys, align=align, **common), i >= j
    if name == "window":
        left, right = data.draw(st.integers(-1, 60)), data.draw(st.integers(-1, 60))
        want = np.ones((queries, keys), bool)
        want &= (j >= i - left) | (left < 0)
        want &= (j <= i + right) | (right < 0)
        return BlockMask.window(queries, keys, left=left, right=right, align=align, **common), want
    if name == "sinks":
        return BlockMask.sinks(queries, keys, count=n, **common), (j < n) & (i == i)
    if name == "prefix":
        return BlockMask.prefix(queries, keys, length=n, align=align, **common), (j < n) | (i >= j)
    if name == "global":
        tokens = data.draw(st.lists(st.integers(0, keys - 1), max_size=6))
        return BlockMask.global_tokens(queries, keys, tokens=tokens, align=align, **common), (
            np.isin(i, tokens) | np.isin(j, tokens)
        )
    if name == "dilated":
        count, dilation = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 9))
        want = (i >= j) & ((i - j) % dilation == 0) & ((i - j) // dilation < count)
        return BlockMask.dilated(queries, keys, count=count, dilation=dilation, align=align, **common), want
    heads = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 3)]))
    cols = -(-keys // (block if isinstance(block, int) else block[1]))
    mask = BlockMask.random(queries, keys, per_row=min(3, cols), heads=heads, seed=n, **common)
    return mask, dense(mask)


@quickly
@given(st.data(), lengths, lengths, blocks, aligns)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_masks_and_their_combinations(
    backend: Backend, data: Any, queries: int, keys: int, block: Any, align: str
) -> None:
    a, want_a = draw_mask(data, queries, keys, block, align, backend.name)
    b, want_b = draw_mask(data, queries, keys, block, align, backend.name)
    np.testing.assert_array_equal(dense(a), want_a)
    np.testing.assert_array_equal(dense(b), want_b)
    np.testing.assert_array_equal(dense(a & b), want_a & want_b)
    np.testing.assert_array_equal(dense(a | b), want_a | want_b)
    np.testing.assert_array_equal(dense(~a), ~want_a)
    if a.heads == b.heads == (1, 1):
        stacked = BlockMask.stack([a, b, a])
        np.testing.assert_array_equal(dense(stacked), np.stack([want_a, want_b, want_a])[None])
        np.testing.assert_array_equal(
            dense(BlockMask.stack([stacked, stacked], axis="batch")), np.stack([[want_a, want_b, want_a]] * 2)
        )


@quickly
@given(st.data(), lengths, lengths, blocks, st.sampled_from([(), (1, 1), (2, 3)]))
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_dense_masks_come_back(backend: Backend, data: Any, queries: int, keys: int, block: Any, heads: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    want = rng.random((*heads, queries, keys)) < data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    got = dense(BlockMask.from_dense(backend.from_host(want), block=block))
    np.testing.assert_array_equal(got.reshape(want.shape), want)


@quickly
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), blocks)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_documents_see_themselves(backend: Backend, sizes: list[int], block: Any) -> None:
    bounds = np.cumsum([0, *sizes])
    mask = BlockMask.documents(bounds, block=block, device=backend.name)
    document = np.repeat(np.arange(len(sizes)), sizes)
    if bounds[-1]:
        np.testing.assert_array_equal(dense(mask), document[:, None] == document)
        causal = BlockMask.causal(int(bounds[-1]), block=block, device=backend.name)
        np.testing.assert_array_equal(dense(mask & causal), np.tril(document[:, None] == document))


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_bsr_goes_in_and_out(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    want = rng.random((96, 160)) < 0.02
    A = bg.bsr_array(want, blocksize=(32, 16))
    mask = BlockMask.from_bsr(A)
    np.testing.assert_array_equal(dense(mask), want)
    back = mask.to_bsr()
    np.testing.assert_array_equal(back.toarray(), want)
    assert back.blocksize == (32, 16) and back.dtype == bool
    numbers = bg.bsr_array(want.astype(np.float32), blocksize=(32, 16))
    stored = BlockMask.from_bsr(numbers)
    assert (stored.kinds < 0).all() and len(stored.indices) == len(numbers.indices)
    rows = np.repeat(np.arange(3), np.diff(numbers.indptr))
    again = BlockMask.from_block_indices(numbers.indptr, numbers.indices, shape=(96, 160), block=(32, 16))
    np.testing.assert_array_equal(dense(again), dense(stored))
    assert dense(again)[rows[0] * 32, numbers.indices[0] * 16]
    moved = mask.to_device(backend.name)
    assert moved._backend is backend
    np.testing.assert_array_equal(dense(moved.get()), want)


def test_duplicate_blocks_are_joined() -> None:
    mask = BlockMask.from_block_indices([0, 3, 3], [1, 0, 1], shape=(32, 32), block=16)
    np.testing.assert_array_equal(mask.indices, [0, 1])
    data = np.zeros((3, 16, 16), bool)
    data[0, 0, 0] = data[1, 0, 1] = data[2, 0, 2] = True
    A = bg.bsr_array((data, np.array([1, 1, 1]), np.array([0, 3])), shape=(16, 32))
    np.testing.assert_array_equal(dense(BlockMask.from_bsr(A))[0, 16:20], [True, True, True, False])


def test_a_long_window_takes_little_room() -> None:
    mask = BlockMask.window(524288, left=2047, right=0, block=128, device="cpu")
    assert mask.nbytes <= 1 << 20
    assert len(mask.bits) == 2  # where the window begins, and the diagonal
    assert mask.allowed == 2048 * 524288 - 2047 * 2048 // 2


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_many_element_masks_are_worked_out_where_they_are(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bsrgemm._attention.mask._FEW", 0)
    common = {"block": (32, 48), "device": backend.name}
    i, j = places(150, 170, "bottom-right")
    a, want_a = BlockMask.window(150, 170, left=37, right=5, **common), (j >= i - 37) & (j <= i + 5)
    b = BlockMask.dilated(150, 170, count=9, dilation=7, **common)
    want_b = (i >= j) & ((i - j) % 7 == 0) & (i - j < 63)
    np.testing.assert_array_equal(dense(b), want_b)
    np.testing.assert_array_equal(dense(a | b), want_a | want_b)
    np.testing.assert_array_equal(dense(a & b), want_a & want_b)
    np.testing.assert_array_equal(dense(~a), ~want_a)
    np.testing.assert_array_equal(dense(BlockMask.stack([a, b])), [[want_a, want_b]])
    np.testing.assert_array_equal(dense(BlockMask.from_dense(backend.from_host(want_b), block=(32, 48))), want_b)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_blocks_listed_by_the_host_and_by_the_device_are_the_same(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def masks() -> list[BlockMask]:
        common = {"block": (32, 48), "device": backend.name}
        return [
            BlockMask.window(150, 170, left=37, right=5, **common),
            BlockMask.causal(170, 150, **common),
            BlockMask.documents([0, 40, 41, 150], **common),
            BlockMask.full(0, 170, **common),
        ]

    few = masks()
    monkeypatch.setattr("bsrgemm._attention.mask._FEW_BLOCKS", -1)
    for a, b in zip(few, masks(), strict=True):
        for name in ("indptr", "indices", "kinds", "bits"):
            x, y = (backend.to_host(getattr(mask, name)) for mask in (a, b))
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


@pytest.mark.fake
def test_masks_take_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in (*functions.UFUNCS, *functions.FUNCTIONS):
        count(fake_cupy.xp, name)
    for name in ("__getitem__", "__setitem__", "astype", "get", "item", "__bool__", "__int__"):
        count(fake_cupy.ndarray, name)
    for name in ("from_host", "to_host", "expand"):
        count(fake_cupy.backend(), name)
    waits = {"get", "item", "__bool__", "__int__", "to_host", "nonzero", "flatnonzero", "unique"}
    common = {"block": 16, "device": "cuda"}
    parametric = {
        "full": lambda: BlockMask.full(1000, **common),
        "causal": lambda: BlockMask.causal(1000, 900, **common),
        "window": lambda: BlockMask.window(1000, left=99, right=0, **common),
        "sinks": lambda: BlockMask.sinks(1000, count=4, **common),
        "prefix": lambda: BlockMask.prefix(1000, length=99, **common),
        "documents": lambda: BlockMask.documents([0, 99, 120, 1000], **common),
    }
    for name, make in parametric.items():
        calls.clear()
        make()
        assert len(calls) <= 25 and not waits & set(calls), (name, calls)
    window, sinks = parametric["window"](), parametric["sinks"]()
    for combine in (lambda: window | sinks, lambda: window & sinks, lambda: ~window):
        calls.clear()
        combine()
        assert len(calls) <= 60, calls


def test_random_masks_repeat_and_differ_by_seed() -> None:
    a, b, c = (BlockMask.random(1000, per_row=4, heads=(1, 8), seed=s, block=16, device="cpu") for s in (0, 0, 1))
    np.testing.assert_array_equal(a.indices, b.indices)
    assert (a.indices != c.indices).any()
    assert (np.diff(a.indptr) == 4).all()
    heads = dense(a)[0]
    assert all((heads[0] != heads[h]).any() for h in range(1, 8))


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_masks_are_drawn(backend: Backend) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    common = {"block": (32, 48), "device": backend.name}
    parts = [BlockMask.window(200, 230, left=60, right=0, **common), BlockMask.full(200, 230, **common)]
    mask = BlockMask.stack(parts)
    ax = mask.plot(elements=True)
    found = {patch.get_label(): patch.get_path() for patch in ax.patches}
    centers = np.stack(np.meshgrid(np.arange(230), np.arange(200)), axis=2).reshape(-1, 2) + 0.5
    whole, part, seen = (
        found[label].contains_points(centers).reshape(200, 230)
        for label in ("whole block", "block in part", "seen of it")
    )
    np.testing.assert_array_equal(whole | seen, dense(mask)[0, 0])
    stored = backend.to_host(parts[0].to_dense())
    for row, col in np.ndindex(7, 5):
        tile = slice(row * 32, (row + 1) * 32), slice(col * 48, (col + 1) * 48)
        assert whole[tile].all() == whole[tile].any() == stored[tile].all()
        assert part[tile].all() == part[tile].any() == (stored[tile].any() and not stored[tile].all())
    assert not (seen & ~part).any()
    assert mask.plot(ax) is ax
    assert f"{stored.mean():.1%}" in ax.get_title() and "100.0%" in mask.plot(head=1).get_title()
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize("shape", [(1, 16 * 65), (16 * 65 - 3, 16), (0, 16), (0, 0)])
def test_masks_of_any_shape_are_drawn(shape: tuple[int, int]) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    mask = BlockMask.causal(*shape, block=16, device="cpu")
    ax = mask.plot()
    if max(shape) > 16 * 64:  # as an image: with many blocks shapes would take long
        picture = ax.images[0].get_array()
        allowed = np.zeros((picture.shape[0] * 16, picture.shape[1] * 16), bool)
        allowed[: shape[0], : shape[1]] = mask.to_dense()
        np.testing.assert_array_equal(
            picture > 0, allowed.reshape(picture.shape[0], 16, picture.shape[1], 16).any(axis=(1, 3))
        )
    ax.figure.canvas.draw()
    assert ax.get_xlim() == (0, max(1, shape[1])) and ax.get_ylim() == (max(1, shape[0]), 0)
    matplotlib.pyplot.close("all")


def test_scipys_boolean_bsr_matrices_are_taken() -> None:
    dense = np.random.default_rng(0).random((48, 64)) < 0.1
    S = sp.bsr_array(dense, blocksize=(16, 16))
    np.testing.assert_array_equal(BlockMask.from_bsr(S).to_dense(), dense)


def test_no_block_indices_are_a_mask_of_nothing() -> None:
    assert BlockMask.from_block_indices([0, 0, 0], [], shape=(32, 32), block=16).allowed == 0


M = BlockMask
SMALL = {"block": 16, "device": "cpu"}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: M.full(-1, **SMALL), ValueError, "queries: wanted an integer from 0 on, got -1"),
        (lambda: M.full(8, 2.5, **SMALL), ValueError, "keys: wanted an integer from 0 on, got 2.5"),
        (lambda: M.full(8, block=8), ValueError, "block: wanted multiples of 16 up to 256, got 8"),
        (lambda: M.full(8, block=(16, 16, 16)), ValueError, "block: wanted one or two integers"),
        (lambda: M.full(8, block=512), ValueError, "block: wanted multiples of 16 up to 256, got 512"),
        (lambda: M.full(8, device="tpu"), ValueError, "device: got 'tpu'"),
        (lambda: M.causal(8, align="left", **SMALL), ValueError, "wanted 'bottom-right' or 'top-left', got 'left'"),
        (lambda: M.window(8, left=-2, **SMALL), ValueError, "left: wanted an integer from -1 on, got -2"),
        (lambda: M.window(8, right=True, **SMALL), ValueError, "right: wanted an integer from -1 on, got True"),
        (lambda: M.sinks(8, count=-1, **SMALL), ValueError, "count: wanted an integer from 0 on, got -1"),
        (lambda: M.dilated(8, count=2, dilation=0, **SMALL), ValueError, "dilation: wanted an integer from 1 on"),
        (lambda: M.global_tokens(8, tokens=[8], **SMALL), ValueError, "tokens: wanted a number or places from 0 to 7"),
        (lambda: M.documents([1, 4], **SMALL), ValueError, "cu_seqlens: wanted bounds that climb from 0"),
        (lambda: M.documents([0, 4, 3], **SMALL), ValueError, "cu_seqlens: wanted bounds that climb from 0"),
        (lambda: M.documents([0], **SMALL), ValueError, "cu_seqlens: wanted the bounds of documents"),
        (lambda: M.random(8, per_row=1, heads=(0, 1), **SMALL), ValueError, "heads: wanted an integer from 1 on"),
        (lambda: M.from_dense([[True]]), TypeError, "allowed: wanted a NumPy or CuPy array, got list"),
        (lambda: M.from_dense(np.ones((2, 2))), TypeError, "allowed: wanted booleans, got dtype float64"),
        (lambda: M.from_dense(np.ones(3, bool)), ValueError, "allowed: wanted 2 or 4 dimensions, got 1"),
        (lambda: M.from_bsr(np.eye(16)), TypeError, "A: wanted a BSR matrix, got ndarray"),
        (
            lambda: M.from_block_indices([0, 1], [2], shape=(16, 32), block=16),
            ValueError,
            "indices: wanted block columns from 0 to 1",
        ),
        (
            lambda: M.from_block_indices([0, 2], [1], shape=(16, 32), block=16),
            ValueError,
            "indptr: wanted numbers that climb from 0 to 1",
        ),
        (
            lambda: M.from_block_indices([0], [1], shape=(16, 32), block=16),
            ValueError,
            "indptr: wanted 2 integers, got int64 of shape",
        ),
        (lambda: M.stack([]), ValueError, "masks: wanted at least one"),
        (lambda: M.stack([M.full(8, **SMALL)], axis="keys"), ValueError, "axis: wanted 'heads' or 'batch', got 'keys'"),
        (lambda: M.full(8, **SMALL) & M.full(9, **SMALL), ValueError, "do not go together"),
        (lambda: M.full(8, **SMALL) | M.full(8, block=32, device="cpu"), ValueError, "do not go together"),
        (lambda: M.full(8, **SMALL) & 3, TypeError, "unsupported operand"),
        (lambda: M.full(8, **SMALL).to_bsr(), ValueError, "is no multiple of the block"),
        (lambda: M.random(16, per_row=1, heads=(1, 2), **SMALL).plot(head=2), IndexError, "head: wanted 0 to 1, got 2"),
        (lambda: M.random(16, per_row=1, heads=(1, 2), **SMALL).to_bsr(), ValueError, "wanted one pattern, got 1 x 2"),
    ],
)  # fmt: skip
def test_bad_input_is_named(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
