"""What a matrix remembers for its kernels is kept by everything that it was made from."""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels.element_types import types
from bsrgemm._products import lists, work_list
from bsrgemm._products.call import Problem, unevenness
from bsrgemm._products.costs import H200
from bsrgemm._products.gemm_simt import GemmSimt
from bsrgemm._products.operand import operand_of
from bsrgemm._products.prepared import fastest
from bsrgemm._products.work_list import Pattern, Share

from ..devices import Device
from .row_shares import long_rows, shares

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 2)]
SHARES = [Share(64, 1, 9), Share(64, 1, 40), Share(64, 3, 9), Share(16, 1, 9)]


@pytest.fixture
def A(device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A matrix with one long block row; row tiles of its groups are neighbours."""
    monkeypatch.setattr(lists, "matched", lambda *args: None)
    rng = np.random.default_rng(0)
    lengths = [40, 1, 0, 3, 2, 7, 1, 5]
    indices = np.concatenate([rng.permutation(64)[:n] for n in lengths]).astype("i4")
    arrays = np.ones((sum(lengths), 4, 4), "e"), indices, np.concatenate([[0], np.cumsum(lengths)]).astype("i4")
    return bg.bsr_array(tuple(map(device.asarray, arrays)), shape=(len(lengths) * 4, 64 * 4))


def host(x: Any) -> Any:
    """A list with arrays of the host."""
    if hasattr(x, "get"):
        return x.get()
    return replace(x, **{f.name: host(getattr(x, f.name)) for f in fields(x)}) if hasattr(x, "__slots__") else x


def same(a: Any, b: Any) -> bool:
    """Are two lists of the same numbers, as far as they go?"""
    if hasattr(a, "items"):
        count = int(a.count[0])
        return count == int(b.count[0]) and np.array_equal(a.items[:count], b.items[:count])
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def groups_of(pattern: Pattern, per_row: int, per_group: int) -> work_list.Groups:
    if per_group == 1:
        return work_list.single(HOST, pattern, per_row)
    return work_list.merged(HOST, pattern, per_row, per_group)


@pytest.mark.parametrize("transposed", [False, True])
def test_items_are_those_of_their_own_groups_and_share(transposed: bool, A: Any) -> None:
    operand = operand_of(A)
    pattern = operand.pattern(64, transposed)
    on_host = host(pattern)
    for shape, share, _ in itertools.product(SHAPES, SHARES, range(2)):
        groups = groups_of(on_host, *shape)
        assert same(host(operand.whole_items(pattern, *shape)), work_list.whole(HOST, groups)), shape
        split = work_list.may_split(groups, on_host, share)
        want = work_list.split(HOST, groups, share) if split else work_list.whole(HOST, groups)
        assert same(host(operand.split_items(pattern, *shape, share)), want), (shape, share)


def test_long_rows_and_shares_are_those_of_their_own_limit(A: Any) -> None:
    operand = operand_of(A)
    indptr = A.indptr.get()
    for longest, count in itertools.product((2, 5, 30), (1, 3, 7)):
        for piece in (longest, 2 * longest, 2 * longest):
            want = long_rows(indptr, operand.blocks, longest, piece)
            rows, bounds = operand.row_shares(64, False, longest, piece, count)
            found, pieces = host(rows), int(want.count[0])
            assert int(found.count[0]) == pieces
            assert np.array_equal(found.pieces[:pieces], want.pieces[:pieces])
            assert np.array_equal(found.parents[:pieces], want.parents[:pieces])
            assert operand.row_shares(64, False, longest, piece, 0)[1] is None
            assert np.array_equal(host(bounds), shares(indptr, longest, count))


def test_threads_that_make_the_same_thing_at_once_share_one(A: Any) -> None:
    """The second one to come finds what the first has made meanwhile, and drops its own."""
    operand, made = operand_of(A), list[object]()

    def make() -> object:
        made.append(object())
        if len(made) == 1:  # another thread comes in between
            operand.remembered("key", make)
        return made[-1] if len(made) == 1 else made[1]

    first = operand.remembered("key", make)
    assert operand.remembered("key", make) is first and len(made) == 2


def test_a_matrix_with_other_arrays_or_another_shape_is_another_operand(A: Any) -> None:
    found = [operand_of(A)]
    assert operand_of(A) is found[0]
    for name in ("data", "indices", "indptr"):
        setattr(A, name, getattr(A, name).copy())
        found.append(operand_of(A))
        assert operand_of(A) is found[-1]
    A._shape = (A._shape[0], 2 * A._shape[1])
    found.append(operand_of(A))
    assert len(set(map(id, found))) == 5


def test_a_matrix_that_has_another_array_multiplies_what_it_has(device: Device, A: Any) -> None:
    x, other = np.arange(256.0).astype("e"), bg.bsr_array(tuple(x.get() for x in A._blocks), shape=A.shape)
    changed = other.data * 2, other.indices[::-1].copy(), other.indptr[-1] - other.indptr[::-1]
    for name, array in zip(("data", "indices", "indptr"), changed, strict=True):
        for matrix, put in ((A, device.asarray), (other, np.asarray)):
            setattr(matrix, name, put(array))
        np.testing.assert_array_equal(device.asnumpy(A @ device.asarray(x)), other @ x)


# ------------------------------------------------------------------------------------------------- copies
def remembering() -> Any:
    """A matrix on the CPU with everything beside its arrays that a matrix may come to have."""
    A = bg.bsr_array(np.arange(16.0).reshape(4, 4), blocksize=(2, 2))
    A._memo, A._transposed_copy = object(), object()
    A._kept_transpose = A.T
    return A


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda A: pickle.loads(pickle.dumps(A))])
def test_a_copy_takes_nothing_along_but_the_matrix(how: Any) -> None:
    A = remembering()
    B = how(A)
    assert type(B) is type(A) and np.array_equal(B.toarray(), A.toarray())
    assert B._memo is None
    assert not {"_transposed_copy", "_transposes", "_kept_transpose", "_origin"} & vars(B).keys()


def test_the_state_of_a_matrix_is_its_arrays_and_flags() -> None:
    state = remembering().__getstate__()
    assert set(state) == {
        *("data", "indices", "indptr", "_shape", "maxprint"),
        *("_has_sorted_indices", "_has_canonical_format", "_canonical_indices"),
    }


@pytest.mark.parametrize("way", ["on the card", "from the host", "times two", "added", "written", "unsorted"])
def test_a_matrix_knows_its_longest_row_from_the_check_of_its_arrays(way: str, device: Device) -> None:
    """Whoever has its pattern knows it too; where nobody has looked, rows count as equally long."""
    indptr = np.array([0, 40, 41, 41, 44], "i4")
    indices = np.concatenate([np.arange(40), [3], [1, 5, 9]]).astype("i4")
    if way == "unsorted":
        indices[:2] = 1, 0
    arrays = np.ones((44, 2, 3), "f4"), indices, indptr
    if way == "from the host":
        A = bg.bsr_array(arrays, shape=(8, 192)).to_device("cuda")
    else:
        A = bg.bsr_array(tuple(map(device.asarray, arrays)), shape=(8, 192))
    A = A * 2 if way == "times two" else A + A if way == "added" else A
    if way == "written":
        A.indptr[1] = 39
    assert operand_of(A).longest == (0 if way in ("written", "unsorted") else 40)


def test_long_rows_decide_the_kernel() -> None:
    """A kernel that gives a row to one CTA is predicted to wait for the longest."""
    problem = Problem(
        "sm_90a", types(*[np.dtype("f4")] * 4, np.dtype("i4")), R=8, K=8, N=40, batches=1, block_rows=500,
        block_cols=500, blocks=5000, transposed=False, b_order="C", c_order="C", overwrite=True, aligned=True,
    )  # fmt: skip
    uneven = replace(problem, uneven=unevenness(500, 5000, 500))
    assert unevenness(500, 5000, 500) == 32 and fastest(uneven, H200, True) != fastest(problem, H200, True)
    assert GemmSimt.best(uneven).seconds(uneven, H200) > 5 * GemmSimt.best(problem).seconds(problem, H200)
