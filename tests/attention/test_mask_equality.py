"""Masks are compared by what they allow; how many blocks a random mask may have."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from bsrgemm import BlockMask
from bsrgemm._backend.base import Backend

pytestmark = pytest.mark.fake


def causal(backend: Backend, **options: Any) -> BlockMask:
    return BlockMask.causal(100, 90, **({"block": 16, "device": backend.name} | options))


def test_equal_masks_are_equal_however_they_were_made(backend: Backend) -> None:
    a = causal(backend)
    dense = backend.to_host(a.to_dense())
    others = [
        causal(backend),
        BlockMask.from_dense(backend.from_host(dense), block=16),
        ~~a,
        a & BlockMask.full(100, 90, block=16, device=backend.name),
        (a & BlockMask.sinks(100, 90, count=33, block=16, device=backend.name)) | a,
        copy.copy(a),
        a.get().to_device(backend.name),
    ]
    others.append(pickle.loads(pickle.dumps(a)))
    for b in others:
        assert (a == b) is True and (b == a) is True and (a != b) is False and hash(a) == hash(b)
    assert len({a, *others}) == 1


def test_element_masks_in_another_order_are_the_same(backend: Backend) -> None:
    rng = np.random.default_rng(1)
    a = BlockMask.from_dense(backend.from_host(rng.random((64, 64)) < 0.5), block=16)
    n = len(a.bits)
    assert n == 16
    order = rng.permutation(n)
    renumbered = np.argsort(order)[backend.to_host(a.kinds)].astype(np.int32)
    arrays = (a.indptr, a.indices, backend.from_host(renumbered), a.bits[backend.from_host(order)])
    b = BlockMask(a._backend, a.shape, a.block, a.heads, *arrays)
    assert a == b
    b.kinds[3] = b.kinds[4]
    assert a != b


def test_every_difference_counts(backend: Backend) -> None:
    a = causal(backend)
    dense = backend.to_host(a.to_dense())
    one_less = dense.copy()
    one_less[99, 40] = False  # inside a block that is allowed whole
    one_other = dense.copy()
    one_other[20, 16] = ~one_other[20, 16]  # inside a block that is allowed in part
    moved = np.roll(dense, 16, axis=1)
    others = [
        BlockMask.causal(100, 91, block=16, device=backend.name),
        causal(backend, block=32),
        causal(backend, block=(16, 32)),
        causal(backend, align="top-left"),
        ~a,
        BlockMask.stack([a, a]),
        BlockMask.stack([a, a], axis="batch"),
        *(BlockMask.from_dense(backend.from_host(x), block=16) for x in (one_less, one_other, moved)),
    ]
    for b in others:
        assert (a == b) is False and (b == a) is False and (a != b) is True
    assert len({a, *others}) == len(others) + 1


def test_masks_that_differ_in_one_respect_only(backend: Backend) -> None:
    options: dict[str, Any] = {"block": 16, "device": backend.name}
    full = BlockMask.full(96, 96, **options)
    pairs = [
        (full, BlockMask.full(96, 90, **options)),
        (full, BlockMask.full(192, 96, block=(32, 16), device=backend.name)),
        (BlockMask.stack([full, full]), BlockMask.stack([full, full], axis="batch")),
        tuple(BlockMask.random(96, 96, per_row=1, seed=seed, **options) for seed in (1, 2)),
    ]
    for a, b in pairs:
        assert len(a.indices) == len(b.indices) and a == a and a != b


def test_masks_without_blocks_and_other_objects(backend: Backend) -> None:
    a = causal(backend)
    none = ~BlockMask.full(40, block=16, device=backend.name)
    assert none == ~BlockMask.full(40, block=16, device=backend.name)
    assert none != BlockMask.full(40, block=16, device=backend.name)
    assert a != 1 and a is not None and (a == None) is False  # noqa: E711
    assert a in [none, a]


def test_masks_on_two_devices_are_not_compared() -> None:
    a = BlockMask.causal(32, block=16, device="cpu")
    with pytest.raises(TypeError, match=r"^==: masks on 'cpu' and 'cuda' cannot be compared: .* a\.get\(\) == b\.get"):
        a == a.to_device("cuda")  # noqa: B015
    assert a == a.to_device("cuda").get()


def test_a_random_mask_has_no_more_blocks_than_there_are(backend: Backend) -> None:
    options: dict[str, Any] = {"block": 16, "device": backend.name}
    assert BlockMask.random(64, 40, per_row=3, **options) == BlockMask.full(64, 40, **options)
    for keys, columns in ((40, 3), (0, 0)):
        for per_row in (columns + 1, 99):
            with pytest.raises(ValueError, match=rf"^per_row: wanted at most {columns}, .* columns, got {per_row}$"):
                BlockMask.random(64, keys, per_row=per_row, **options)
