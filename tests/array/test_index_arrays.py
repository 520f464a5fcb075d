"""Index arrays of matrices on a device count the writes into them, and what was known before a write is not trusted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.index_arrays import IndexArray, Unwritten, writes_of
from bsrgemm._products.transposed import transposed_copy

from .. import fake_cupy
from ..fake_cupy import xp
from .test_host_properties import numpy_of, on
from .test_written_indices import OPERATIONS as HOST_OPERATIONS
from .test_written_indices import WRITES as PATTERN_WRITES
from .test_written_indices import matrix as host_matrix
from .test_written_indices import other as host_other

pytestmark = pytest.mark.fake


def device(x: Any) -> Any:
    return fake_cupy.backend().from_host(np.asarray(x))


def array(values: Any = (5, 3, 4, 0, 2, 1), dtype: Any = np.int32) -> Any:
    """An index array as a matrix on a fake card has it."""
    return fake_cupy.backend().watched(device(np.array(values, dtype)))


def counted(x: Any, call: Callable[[], Any]) -> bool:
    before = writes_of(x).number
    call()
    return writes_of(x).number != before


# ------------------------------------------------------------------------------------------- the array
WRITES: dict[str, Callable[[Any], Any]] = {
    "x[k] = v": lambda x: x.__setitem__(1, 7),
    "x[...] = v": lambda x: x.__setitem__(..., 7),
    "x[mask] = v": lambda x: x.__setitem__(x > 2, 7),
    "+=": lambda x: x.__iadd__(1),
    "-=": lambda x: x.__isub__(1),
    "*=": lambda x: x.__imul__(2),
    "//=": lambda x: x.__ifloordiv__(2),
    "%=": lambda x: x.__imod__(2),
    "**=": lambda x: x.__ipow__(2),
    "&=": lambda x: x.__iand__(1),
    "|=": lambda x: x.__ior__(8),
    "^=": lambda x: x.__ixor__(8),
    "<<=": lambda x: x.__ilshift__(1),
    ">>=": lambda x: x.__irshift__(1),
    "fill": lambda x: x.fill(7),
    "put": lambda x: x.put(device([1]), device([7])),
    "set": lambda x: x.set(np.zeros(x.shape, x.dtype)),
    "sort": lambda x: x[:3].sort(),
    "partition": lambda x: x.partition(1),
    "scatter_add": lambda x: x.scatter_add(device([1]), 7),
    "an output by position": lambda x: xp.add(device(np.ones(x.shape, x.dtype)), 1, x),
    "an output that is an input": lambda x: xp.add(x, 1, out=x),
    "an output of NumPy": lambda x: np.add(device(np.ones(x.shape, x.dtype)), 1, out=x),
    "a function of NumPy": lambda x: np.cumsum(device(np.ones(x.shape, x.dtype)), out=x),
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "a slice": lambda x: x[0:4],
    "backwards": lambda x: x[::-1],
    "a slice of a slice": lambda x: x[:5][:4],
    "reshape": lambda x: x.reshape(2, 3).reshape(6),
    "ravel": lambda x: x.reshape(2, 3).ravel(),
    "transpose": lambda x: x.T,
    "squeeze": lambda x: x[None].squeeze(0),
    "view": lambda x: x.view(),
    "xp.ravel": lambda x: xp.ravel(x),
    "np.transpose": lambda x: np.transpose(x),
    "asarray": lambda x: xp.asarray(x),
    "real": lambda x: x.real,
}
READS: dict[str, Callable[[Any], Any]] = {
    "x[k]": lambda x: x[1],
    "x[index]": lambda x: x[device([1, 2])],
    "as an index": lambda x: device(np.arange(9))[x],
    "x + 1": lambda x: x + 1,
    "x == x": lambda x: x == x,
    "sum": lambda x: x.sum(),
    "copy": lambda x: x.copy(),
    "astype": lambda x: x.astype(np.int64),
    "get": lambda x: x.get(),
    "tolist": lambda x: x.tolist(),
    "np.add": lambda x: np.add(x, 1),
    "searchsorted": lambda x: xp.searchsorted(x, device([1])),
    "concatenate": lambda x: xp.concatenate([x, x]),
    "argsort": lambda x: xp.argsort(x),
    "shape": lambda x: (x.shape, x.dtype, x.flags.c_contiguous, len(x)),
    "the value of a write": lambda x: device(np.zeros(6, np.int32)).__setitem__(..., x),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_way_of_writing_counts_and_writes(write: Callable[[Any], Any]) -> None:
    x, plain = array(), device(np.array((5, 3, 4, 0, 2, 1), np.int32))
    assert counted(x, lambda: write(x))
    write(plain)
    assert x.tolist() == plain.tolist() != [5, 3, 4, 0, 2, 1]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_writes_through_a_view_count(view: Callable[[Any], Any]) -> None:
    x = array()
    seen = view(x)
    assert isinstance(seen, IndexArray)
    for write in (lambda: seen.__setitem__(0, 9), lambda: seen.fill(3), lambda: seen.__iadd__(1)):
        assert counted(x, write)
    assert 4 in x.tolist()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_does_not_count(read: Callable[[Any], Any]) -> None:
    x = array()
    assert not counted(x, lambda: read(x))


def test_results_that_are_not_views_do_not_count() -> None:
    x = array()
    for y in (x + 1, x.copy(), x.astype(np.int64), x[device([1, 2])], xp.concatenate([x, x]), copy.deepcopy(x), -x):
        assert not isinstance(y, IndexArray)
        assert not counted(x, lambda y=y: y.fill(1))


def test_an_operator_in_place_returns_the_array() -> None:
    x = y = array()
    y += 1
    assert y is x
    assert xp.add(y, 1, out=y) is x


def test_arrays_of_the_same_memory_count_together_and_others_do_not() -> None:
    memory = device(np.arange(8))
    first, second, third = fake_cupy.backend().watched(memory[:4]), fake_cupy.backend().watched(memory[4:]), array()
    assert counted(second, lambda: first.fill(0)) and not counted(third, lambda: first.fill(0))


def test_memory_that_is_used_again_does_not_count_with_what_was_there() -> None:
    for _ in range(20):
        x = array()
        assert writes_of(x).number == 0
        writes_of(x).escape()
        del x


def test_a_pickled_array_is_a_plain_one() -> None:
    assert type(pickle.loads(pickle.dumps(array()))) is fake_cupy.ndarray


def test_once_the_memory_is_handed_out_nothing_holds_any_more() -> None:
    x, y = array(), array()
    state = Unwritten(x, y)
    assert state.holds()
    y.view(type=fake_cupy.ndarray)
    assert not state.holds() and not Unwritten(x, y).holds()
    y.fill(0)
    assert not Unwritten(x, y).holds()
    assert Unwritten(x, x).holds()


# ---------------------------------------------------------------------------------------------- matrices
def matrix() -> Any:
    """A matrix on a fake card of which everything is known, with a product and a transpose behind it."""
    A = on(host_matrix(), "cuda")
    A.sum_duplicates()
    assert A.has_sorted_indices and A.has_canonical_format
    A @ device(np.ones((8, 3))), A + A, A.T @ device(np.ones((8, 3)))
    return A


#: Operations with operands that are not on the device.
SKIPPED = (
    "A @ x",
    "A @ X",
    "A.T @ X",
    "X @ A",
    "an index array",
    "columns in another order",
    "nonzero",
    "assemble",
    "kron",
)
OPERATIONS = {name: f for name, f in HOST_OPERATIONS.items() if name not in SKIPPED} | {
    "A @ X": lambda A: A @ device(np.ones((8, 3))),
    "A.T @ X": lambda A: A.T @ device(np.ones((8, 3))),
    "X @ A": lambda A: device(np.ones((3, 8))) @ A,
    "sddmm": lambda A: bg.sddmm(device(np.ones((8, 3))), device(np.ones((3, 8))), A),
    "A[I]": lambda A: A[device(np.array([6, 7, 0, 1]))],
    "assemble": lambda A: A.assemble(device(np.ones((2, 2, 2))), device([0, 2]), device([0, 3])),
    "get": lambda A: A.get(),
    "to the device and back": lambda A: on(A.get(), "cuda"),
}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of the operations are on a fake card."""
    from . import test_written_indices

    monkeypatch.setattr(test_written_indices, "other", lambda: on(host_other(), "cuda"))


@pytest.mark.parametrize("write", PATTERN_WRITES.values(), ids=PATTERN_WRITES)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_sees_what_was_written(operation, write, on_device) -> None:
    A = matrix()
    write(_Lists(A))
    fresh = bg.bsr_array(tuple(x.copy() for x in A._blocks), shape=A.shape)
    found, want = operation(A), operation(fresh)
    np.testing.assert_allclose(*(np.asarray(numpy_of(x) if hasattr(x, "get") else x) for x in (found, want)))


class _Lists:
    """A matrix whose index arrays take lists in assignments, as those of NumPy do."""

    def __init__(self, A: Any) -> None:
        self.indices, self.indptr = _Lists.Array(A.indices), _Lists.Array(A.indptr)

    class Array:
        def __init__(self, x: Any) -> None:
            self.x = x

        def __setitem__(self, key: Any, value: Any) -> None:
            self.x[key] = device(np.array(value, self.x.dtype))


def test_flags_are_kept_as_on_the_host() -> None:
    A = matrix()
    A.indices[1] = 0
    assert A.has_canonical_format and A.has_sorted_indices
    A.sum_duplicates()
    assert len(A.indices) == 9
    A.has_canonical_format = False
    A.sum_duplicates()
    assert len(A.indices) == 8 and A.has_canonical_format


def test_what_is_known_by_construction_is_not_trusted_after_a_write() -> None:
    for make in (lambda A: A, lambda A: A.copy(), lambda A: A.T.T, lambda A: A.T.copy().T.copy()):
        A = make(on(bg.bsr_array(np.ones((4, 4)), blocksize=(2, 2)), "cuda"))
        assert A._known_canonical
        A.indices[:] = device(np.array([0, 0, 1, 0], np.int32))
        assert not A._known_canonical and not A.copy()._known_canonical and not A.T.copy()._known_canonical
        assert not pickle.loads(pickle.dumps(A))._known_canonical
        assert not A.has_canonical_format


def test_what_the_host_knew_before_a_write_does_not_reach_the_device() -> None:
    A = host_matrix()
    A.indices[1] = 0
    assert A.has_canonical_format and not on(A, "cuda")._known_canonical


def test_a_flag_that_is_set_after_a_write_is_trusted_until_the_next() -> None:
    A = matrix()
    A.indices[1] = 2
    assert not A._known_canonical
    A.has_canonical_format = True
    assert A._known_canonical
    A.indices[1] = 0
    assert not A._known_canonical


def test_blocks_that_took_the_place_of_others_are_watched_too() -> None:
    A = matrix()
    A.eliminate_zeros()
    assert A._known_canonical
    A.indices[1] = 0
    assert not A._known_canonical


def test_matrices_that_share_index_arrays_all_see_a_write() -> None:
    A = matrix()
    others = [A._with_data(A.data * 2, copy=False), A._new(A._blocks, canonical=True), bg.bsr_array(A), A.T.T]
    A.indices[1] = 0
    for B in others:
        assert not B._known_canonical
        np.testing.assert_array_equal(numpy_of(B.indices), numpy_of(A.indices))
    for B in others:
        state = Unwritten(A.indices, A.indptr)
        B.indices[0] = 0
        assert not state.holds()


def test_a_transpose_sees_a_write_until_it_is_built() -> None:
    A, H = matrix(), host_matrix()
    before, built = A.T, A.T
    assert len(built.data)
    dense = numpy_of(A)
    for M in (A, H):
        M.indptr[1] = 2
    np.testing.assert_array_equal(numpy_of(before), H.toarray().T)
    np.testing.assert_array_equal(numpy_of(built), dense.T)
    np.testing.assert_array_equal(numpy_of(A.T.T), H.toarray())


def test_a_transpose_that_is_built_after_a_write_knows_of_its_duplicates() -> None:
    A = matrix()
    T = A.T
    A.indices[1] = 0
    assert not T._source()[0].T.copy()._known_canonical
    assert len(T.data) and not T._known_canonical and not T.has_canonical_format


def test_the_transposed_copy_of_a_matrix_is_made_again() -> None:
    A = matrix()
    T = transposed_copy(A)
    assert transposed_copy(A) is T
    A.indptr[1] = 2
    np.testing.assert_array_equal(numpy_of(transposed_copy(A)), numpy_of(A).T)


def test_the_constructor_copies_index_arrays_and_not_the_values() -> None:
    data, indices, indptr = (device(x) for x in (np.ones((2, 2, 2)), np.array([0, 1]), np.array([0, 1, 2])))
    A = bg.bsr_array((data, indices, indptr))
    indices[0], indptr[1] = 1, 0
    data[0] = 5
    assert A.indices.tolist() == [0, 1] and A.indptr.tolist() == [0, 1, 2]
    assert numpy_of(A)[0, 0] == 5


def test_an_assigned_array_is_copied_when_it_is_used() -> None:
    A = matrix()
    new = device(np.array([1, 2, 3, 1, 2, 0, 2, 3, 2], np.int32))
    A.indices = new
    numpy_of(A)
    new[0] = 3
    assert A.indices.tolist()[0] == 1 and isinstance(A.indices, IndexArray)
    A.indices = B = A.indices[:]
    assert A.indices is B and isinstance(B, IndexArray)


def test_what_was_known_of_other_arrays_is_not_trusted_after_an_assignment() -> None:
    A = matrix()
    A.indices = device(np.zeros(9, np.int32))
    assert A.has_canonical_format and not A._known_canonical
    np.testing.assert_array_equal(numpy_of(A + A), 2 * numpy_of(A.get()))


def test_a_transpose_of_a_matrix_with_an_assigned_array_does_not_share_it() -> None:
    A = matrix()
    A.indices = new = device(np.array([1, 2, 3, 1, 2, 0, 2, 3, 2], np.int32))
    T, B, C = A.T, A._with_data(A.data, copy=False), bg.bsr_array(A)
    want = numpy_of(A)
    new[:] = 0
    for found in (A, T.T, B, C):
        np.testing.assert_array_equal(numpy_of(found), want)


def test_a_pattern_that_is_canonical_after_a_write_is_checked_once() -> None:
    A = matrix()
    A.indices[1] = 2
    assert not A._known_canonical
    A + A
    assert A._known_canonical
    A.indices[1] = 0
    assert not A._known_canonical
    A + A
    assert not A._known_canonical


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_plan_refuses_a_matrix_that_was_written_to(where: str) -> None:
    A = on(host_matrix(), where)
    square = bg.plan(A, A)
    want = numpy_of(square(A, A))
    other = A.copy()
    A.indices[1] = 2
    with pytest.raises(ValueError, match="A: wanted the blocks of the plan, got other indices"):
        square(A, A)
    np.testing.assert_array_equal(numpy_of(square(other, other)), want)
    A.indices[1] = 1
    np.testing.assert_array_equal(numpy_of(square(A, A)), want)
    A.indptr[1] = 2
    with pytest.raises(ValueError, match="A: wanted the blocks of the plan, got other indptr"):
        square(A, A)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_write_into_a_result_of_a_plan_does_not_spoil_the_next(where: str) -> None:
    A = on(host_matrix(), where)
    square = bg.plan(A, A)
    first, second = square(A, A), square(A, A)
    assert first.indices is second.indices
    want = numpy_of(first)
    first.indices[:] = 0
    third = square(A, A)
    np.testing.assert_array_equal(numpy_of(third), want)
    assert third.indices is square(A, A).indices
