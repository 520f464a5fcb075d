"""What a matrix remembers for its kernels is kept by everything that it was made from."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._products.matrix_cache import MatrixCache

import bsrgemm as bg
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import matrix_cache, row_matching, work_list, work_list_launch
from bsrgemm._products.work_list import Share

from ..emulator import emulator
from .test_launch import Matrix

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 2)]
SHARES = [Share(64, 1, 9), Share(64, 1, 40), Share(64, 3, 9), Share(16, 1, 9)]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[MatrixCache]:
    """The cache of a matrix with one long block row, whose lists are built by array functions instead of kernels."""
    rng = np.random.default_rng(0)
    A = Matrix()
    lengths = [40, 1, 0, 3, 2, 7, 1, 5]
    A.indices = emulator.put(np.concatenate([rng.permutation(64)[:n] for n in lengths]).astype(np.int32))
    A.indptr = emulator.put(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    A.data = emulator.put(np.ones((sum(lengths), 64, 64), np.float16))
    A._shape = (len(lengths) * 64, 64 * 64)
    with (
        emulator.emulated(tmp_path),
        patch.multiple(work_list_launch, merged=lambda *args: None, whole=lambda *args: None),
        patch.object(row_matching, "matched", lambda *args: None),
    ):
        yield MatrixCache(A)


def test_the_extents_are_those_of_all_three_arrays(cache: MatrixCache) -> None:
    """A result must not overlap any of them."""
    assert cache.extents == tuple((x.data.ptr, x.data.ptr + x.nbytes) for x in cache.source)
    assert len(set(cache.extents)) == 3


def same(a: Any, b: Any) -> bool:
    """Are two lists of the same numbers?"""
    names = a.__dataclass_fields__
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def fresh_groups(pattern: work_list.Pattern, per_row: int, per_group: int) -> work_list.Groups:
    if per_group == 1:
        return work_list.single(HOST, pattern, per_row)
    return work_list.merged(HOST, pattern, per_row, per_group)


@pytest.mark.parametrize("transposed", [False, True])
def test_items_are_those_of_their_own_groups(cache: MatrixCache, transposed: bool) -> None:
    """Threads that make the first product at once drop groups, whose address another object may then have."""
    pattern = cache.pattern(64, transposed)
    for _ in range(3):
        for shape in SHAPES:
            groups = fresh_groups(pattern, *shape)
            with patch.object(MatrixCache, "groups", lambda *args, groups=groups: groups):
                found = cache.whole_items(pattern, *shape)
            assert same(found, work_list.whole(HOST, groups)), shape
            del groups, found
            gc.collect(0)  # all generations take a second in a large process


@pytest.mark.parametrize("transposed", [False, True])
def test_split_items_are_those_of_their_own_share(cache: MatrixCache, transposed: bool) -> None:
    pattern = cache.pattern(64, transposed)
    for shape, share in itertools.product(SHAPES, SHARES):
        groups = fresh_groups(pattern, *shape)
        split = work_list.may_split(groups, pattern, share)
        want = work_list.split(HOST, groups, share) if split else work_list.whole(HOST, groups)
        for _ in range(2):
            assert same(cache.split_items(pattern, *shape, share), want), (shape, share)


def test_long_rows_and_shares_are_those_of_their_own_limit(cache: MatrixCache) -> None:
    indptr = cache.index(64, False)[1]
    for longest, count in itertools.product((2, 5, 30), (1, 3, 7)):
        for piece in (longest, 2 * longest, 2 * longest):
            want = work_list.long_rows(HOST, indptr, cache.blocks, longest, piece)
            assert same(cache.long_rows(64, False, longest, piece), want)
            found = cache.shares(64, False, longest, count)
            assert np.array_equal(found, work_list.shares(HOST, indptr, longest, count))


def test_threads_that_make_the_same_thing_at_once_share_one(cache: MatrixCache) -> None:
    """The second one to come finds what the first has made meanwhile, and drops its own."""
    made: list[object] = []

    def make() -> object:
        made.append(object())
        if len(made) == 1:  # another thread comes in between
            cache.remembered("key", make)
        return made[-1] if len(made) == 1 else made[1]

    first = cache.remembered("key", make)
    assert cache.remembered("key", make) is first and len(made) == 2


# ------------------------------------------------------------------------------------------------- copies
def remembering() -> Any:
    """A matrix on the CPU with everything beside its arrays that a matrix may come to have."""
    A = bg.bsr_array(np.arange(16.0).reshape(4, 4), blocksize=(2, 2))
    A._matrix_cache, A._transposed_copy = object(), object()
    A._kept_transpose = A.T
    return A


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda A: pickle.loads(pickle.dumps(A))])
def test_a_copy_takes_nothing_along_but_the_matrix(how: Any) -> None:
    A = remembering()
    B = how(A)
    assert type(B) is type(A) and np.array_equal(B.toarray(), A.toarray())
    assert B._matrix_cache is None
    assert not {"_transposed_copy", "_transposes", "_kept_transpose", "_origin"} & vars(B).keys()


def test_the_state_of_a_matrix_is_its_arrays_and_flags() -> None:
    state = remembering().__getstate__()
    assert set(state) == {
        *("data", "indices", "indptr", "_shape", "maxprint"),
        *("_has_sorted_indices", "_has_canonical_format", "_canonical_indices"),
    }


def test_a_matrix_with_other_arrays_has_another_cache() -> None:
    A = Matrix()
    with patch.object(matrix_cache, "contiguous", lambda x: x):
        first = matrix_cache.matrix_cache_of(A)
        assert matrix_cache.matrix_cache_of(A) is first
        for name in ("data", "indices", "indptr"):
            setattr(A, name, emulator.put(getattr(A, name)))
            other = matrix_cache.matrix_cache_of(A)
            assert other is not first
            first = other
        A._shape = (A._shape[0], 2 * A._shape[1])
        assert matrix_cache.matrix_cache_of(A) is not first
