"""Index dtypes, shared arrays, flags and messages of the array code, on the host and on a fake card."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm._array import assemble, base, construct, convert, files, reduce, select
from bsrgemm._backend import loops, structure
from bsrgemm._backend.numpy_backend import HOST

from .. import fake_cupy
from .test_frameworks import BsrTensor

pytestmark = pytest.mark.fake

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DEVICES = ("cpu", "cuda")
each_device = pytest.mark.parametrize("device", DEVICES)


def on(A: Any, device: str) -> Any:
    return A if device == "cpu" else A.to_device("cuda")


def numpy_of(x: Any) -> Any:
    """An array or a matrix of either device, in NumPy."""
    x = x.toarray() if hasattr(x, "toarray") else x
    return x.get() if isinstance(x, fake_cupy.ndarray) else np.asarray(x)


# --------------------------------------------------------------------------------------------- index dtypes
#: In these tests an index of 32 bits counts to this number alone.
LIMIT = 20
#: Shapes and numbers of blocks of one element: all small, many rows, many columns, many blocks.
KINDS = {"small": (4, 4, 3), "tall": (24, 4, 3), "wide": (4, 24, 3), "full": (6, 6, 36)}
each_kind = pytest.mark.parametrize("kind", KINDS)


def elements(kind: str) -> tuple[tuple[int, int], Any, Any]:
    """The shape and the places of elements, spread over the whole matrix."""
    M, N, n = KINDS[kind]
    flat = np.unique(np.linspace(0, M * N - 1, n).astype(np.int64))
    return (M, N), (flat // N).astype(np.int32), (flat % N).astype(np.int32)


def narrow(kind: str, device: str = "cpu") -> Any:
    """A matrix whose indices have 32 bits, made before the limit is lowered."""
    shape, row, col = elements(kind)
    A = bg.bsr_array((np.arange(1.0, len(row) + 1), (row, col)), shape=shape, blocksize=(1, 1))
    assert A.indices.dtype == A.indptr.dtype == np.int32
    return on(A, device)


def lower(monkeypatch: pytest.MonkeyPatch) -> None:
    device_arrays = pytest.importorskip("bsrgemm._backend.device_arrays")
    for module in (structure, loops, device_arrays):
        monkeypatch.setattr(module, "INT32_MAX", LIMIT)


def index_dtypes(A: Any) -> set[Any]:
    return {np.dtype(A.indices.dtype), np.dtype(A.indptr.dtype)}


def put(device: str, x: Any) -> Any:
    return x if device == "cpu" else fake_cupy.backend().from_host(np.asarray(x))


#: What is made of a matrix, and which of (rows, columns, blocks) have to fit into its indices.
MADE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "all rows chosen": (lambda A: A.select_blocks(rows=np.arange(A.shape[0])), "rows cols blocks"),
    "all columns chosen": (lambda A: A.select_blocks(cols=np.arange(A.shape[1])), "rows cols blocks"),
    "all columns backwards": (lambda A: A.select_blocks(cols=np.arange(A.shape[1])[::-1].copy()), "rows cols blocks"),
    "other blocks": (lambda A: A.tobsr((2, 2)), "rows cols blocks"),
    "blocks of two": (lambda A: A.tobsr((1, 2)), "rows cols blocks"),
    "stack": (lambda A: bg.vstack([A, A[:0]]), "rows cols blocks"),
    "Kronecker product": (lambda A: bg.kron(A, bg.eye(1).to_device(A._backend.name)), "rows cols blocks"),
    "Kronecker product with an array": (lambda A: bg.kron(A, A[:1, :1].toarray() * 0 + 1), "rows cols blocks"),
    "from dense": (lambda A: A._from_full(A.toarray(), (1, 1)), "rows cols"),
    "sum": (operator.add, "blocks"),
}


@each_device
@each_kind
@pytest.mark.parametrize("name", MADE)
def test_indices_have_64_bits_where_a_side_or_the_blocks_need_them(
    name: str, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = narrow(kind, device)
    want = numpy_of(A)
    make, what = MADE[name]
    arguments = (A, A) if make is operator.add else (A,)
    lower(monkeypatch)
    B = make(*arguments)
    counts = {"rows": A.shape[0], "cols": A.shape[1], "blocks": 2 * KINDS[kind][2] if name == "sum" else A.nnz}
    wide = max(counts[x] for x in what.split()) > LIMIT
    if name == "sum" and device == "cuda":
        wide = A.nnz > LIMIT  # the union is known here
    assert index_dtypes(B) == {np.dtype(np.int64 if wide else np.int32)}
    found = numpy_of(B)
    if name == "all columns backwards":
        want = want[:, ::-1]
    np.testing.assert_array_equal(found, 2 * want if name == "sum" else want)


@pytest.mark.parametrize("rows, cols, wide", [(3, 3, False), (21, 3, True), (3, 21, True), (5, 5, True)])
def test_a_selection_of_many_blocks_rows_or_columns_has_wide_indices(
    rows: int, cols: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = bg.bsr_array(np.arange(1.0, 5).reshape(2, 2), blocksize=(1, 1))
    some, others = np.arange(rows) % 2, np.arange(cols) % 2
    lower(monkeypatch)
    for found in (
        A.select_blocks(some, others),
        A[some][:, others],
        A.select_blocks(cols=others).select_blocks(rows=some),
    ):
        np.testing.assert_array_equal(found.toarray(), A.toarray()[some][:, others])
    assert index_dtypes(A.select_blocks(some, others)) == {np.dtype(np.int64 if wide else np.int32)}


@each_device
@each_kind
def test_constructors_make_indices_that_are_wide_enough(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (M, N), row, col = elements(kind)
    n = len(row)
    lower(monkeypatch)
    values, blocks = np.arange(1.0, n + 1), np.arange(1.0, n + 1).reshape(-1, 1, 1)
    dense = np.zeros((M, N))
    dense[row, col] = values
    indptr = np.searchsorted(row, np.arange(M + 1)).astype(np.int32)
    kinds = {
        "elements": (bg.bsr_array((values, (row, col)), shape=(M, N), blocksize=(1, 1), device=device), max(M, N, n)),
        "blocks": (bg.bsr_array((blocks, (row, col)), shape=(M, N), device=device), max(M, N, n)),
        "arrays": (bg.bsr_array((blocks, col, indptr), shape=(M, N), device=device), max(M, N, n)),
        "dense": (bg.bsr_array(put(device, dense), blocksize=(1, 1), device=device), max(M, N)),
        "from_dense": (bg.from_dense(put(device, dense), (1, 1)), max(M, N)),
        "diagonals": (bg.diags([1.0], [0], shape=(M, N), device=device), max(M, N)),
    }
    assert all(A._backend.name == device for A, _ in kinds.values())
    for name, (A, most) in kinds.items():
        assert index_dtypes(A) == {np.dtype(np.int64 if most > LIMIT else np.int32)}, name
        if name != "diagonals":
            np.testing.assert_array_equal(numpy_of(A), dense)


@pytest.mark.parametrize("shape", [(4, 4), (24, 4), (4, 24)])
def test_rules_make_indices_that_are_wide_enough(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    lower(monkeypatch)
    want = {np.dtype(np.int64 if max(shape) > LIMIT else np.int32)}
    assert index_dtypes(bg.eye(*shape)) == want
    assert index_dtypes(bg.random(*shape, blocksize=(1, 1), density=0.1, seed=0)) == want
    assert index_dtypes(bg.bsr_array(shape)) == want
    assert index_dtypes(bg.bsr_array((shape[0] * 30, shape[1] * 30), blocksize=(30, 30))) == {np.dtype(np.int64)}
    assert index_dtypes(bg.random(6, 6, blocksize=(1, 1), density=1.0, seed=0)) == {np.dtype(np.int64)}
    assert index_dtypes(bg.diags([1.0, 2.0, 3.0, 4.0], [0, 1, 2, 3], shape=(8, 8))) == {np.dtype(np.int64)}
    A = bg.bsr_matrix(np.ones((6, 6)), blocksize=(6, 6))
    A.set_shape((4, 9))
    assert index_dtypes(A) == {np.dtype(np.int64)}  # 36 blocks of one element


@pytest.mark.parametrize("given", [np.int32, np.int64])
def test_a_matrix_narrows_indices_only_where_they_fit(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = np.ones((1, 1, 1)), np.array([0], given), np.array([0, 1], given)
    lower(monkeypatch)
    assert index_dtypes(bg.bsr_matrix(parts, shape=(1, LIMIT))) == {np.dtype(np.int32)}
    assert index_dtypes(bg.bsr_matrix(parts, shape=(1, LIMIT + 1))) == {np.dtype(np.int64)}
    assert index_dtypes(bg.bsr_array(parts, shape=(1, LIMIT))) == {np.dtype(given)}


@each_device
@each_kind
def test_other_formats_get_indices_that_are_wide_enough(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classes of scipy may narrow them again."""
    A = narrow(kind, device)
    M, N = A.shape
    seen: list[Any] = []

    def note(self: Any, format: str, arrays: Any, shape: Any, dtype: Any) -> Any:
        flat = [x for part in arrays for x in (part if isinstance(part, tuple) else (part,))]
        seen.append((format, {np.dtype(x.dtype) for x in flat if np.dtype(x.dtype).kind == "i"}, shape, len(flat[0])))
        raise KeyboardInterrupt

    monkeypatch.setattr(convert.Conversions, "_foreign", note)
    lower(monkeypatch)
    column = on(bg.bsr_array(np.ones((M, 1)), blocksize=(1, 1)), device)
    calls = {
        "tocoo": (lambda: A.tocoo(), max(M, N)),
        "tocsr": (lambda: A.tocsr(), max(M, N, A.nnz)),
        "todia": (lambda: A.todia(), max(M, N)),
        "reshape": (lambda: A.reshape(N // 2, M * 2), max(N // 2, M * 2)),
        "product with an array": (lambda: A.multiply(put(device, np.ones((M, N)))), max(M, N)),
        "product with a column": (lambda: A.multiply(column), max(M, N, A.nnz)),
        "comparison": (lambda: A != 0.5, 0),
        "maximum of columns": (lambda: A.max(axis=0), N),
        "maximum of rows": (lambda: A.max(axis=1), M),
    }
    for name, (call, most) in calls.items():
        seen.clear()
        with pytest.raises(KeyboardInterrupt), pytest.warns(Warning) if name == "comparison" else nullcontext():
            call()
        (_, dtypes, shape, count), *_ = seen
        most = max(M, N, count) if name == "comparison" else most
        assert dtypes == {np.dtype(np.int64 if most > LIMIT else np.int32)}, (name, shape)


def test_32_bits_hold_what_they_hold() -> None:
    assert structure.INT32_MAX == loops.INT32_MAX == reduce._INT32_MAX == 2**31 - 1
    assert select.INT64 == assemble.INT64 == convert._INDEX64 == np.int64


def test_nonzeros_of_lines_are_counted_in_64_bits_where_a_line_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    test_32_bits_hold_what_they_hold()
    seen: list[Any] = []
    add_blocks = loops.HostLoops.add_blocks

    def note(self: Any, blocks: Any, block_cols: int, axis: int) -> Any:
        seen.append(blocks.data.dtype)
        return add_blocks(self, blocks, block_cols, axis)

    monkeypatch.setattr(loops.HostLoops, "add_blocks", note)
    monkeypatch.setattr(reduce, "_INT32_MAX", LIMIT)
    for kind in KINDS:
        A = narrow(kind)
        for axis in (0, 1):
            np.testing.assert_array_equal(A.count_nonzero(axis=axis), (A.toarray() != 0).sum(axis=axis))
            assert seen.pop() == (np.int64 if max(A.shape) >= LIMIT else np.int32)


# ---------------------------------------------------------------------------------------------- construction
def test_blocks_of_the_size_asked_for_are_shared_and_copies_are_not() -> None:
    A = bg.bsr_array(np.arange(24.0).reshape(4, 6), blocksize=(2, 3))
    for source in (A, sp.bsr_array(np.arange(24.0).reshape(4, 6), blocksize=(2, 3))):
        for blocksize in (None, (2, 3)):
            B = bg.bsr_array(source, blocksize=blocksize)
            assert np.shares_memory(B.data, source.data) and np.shares_memory(B.indices, source.indices)
            C = bg.bsr_array(source, blocksize=blocksize, copy=True)
            for x, y in zip(C._blocks, (source.data, source.indices, source.indptr), strict=True):
                assert not np.shares_memory(x, y)
        other = bg.bsr_array(source, blocksize=(1, 3))
        assert other.blocksize == (1, 3)
        np.testing.assert_array_equal(other.toarray(), A.toarray())
    parts = A.data, A.indices, A.indptr
    assert np.shares_memory(bg.bsr_array(parts).data, A.data)
    assert not any(np.shares_memory(x, y) for x, y in zip(bg.bsr_array(parts, copy=True)._blocks, parts, strict=True))


@pytest.mark.parametrize(
    "values, shape", [(np.ones((1, 2, 2)), (1, 2, 2)), (np.ones((1, 2, 2, 3)), (2, 2)), (np.ones((1, 2)), (2, 2))]
)
def test_a_bsr_tensor_has_two_dimensions_and_blocks_of_numbers(values: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="arg1: wanted a BSR tensor of two dimensions with blocks of numbers"):
        bg.bsr_array(BsrTensor(values, np.array([0]), np.array([0, 1]), shape))


@each_device
def test_an_empty_matrix_has_no_blocks_and_room_for_all_rows(device: str) -> None:
    for dtype in (None, np.float32, BFLOAT16, bool):
        A = bg.bsr_array((6, 9), blocksize=(2, 3), dtype=dtype, device=device)
        assert A.dtype == (np.float64 if dtype is None else dtype) and A.blocksize == (2, 3)
        assert A._known_canonical and A.nnz == 0 and A.indices.shape == (0,)
        np.testing.assert_array_equal(numpy_of(A.indptr), np.zeros(4))
        np.testing.assert_array_equal(numpy_of(A), np.zeros((6, 9)))


@pytest.mark.parametrize(
    "pattern, side",
    [
        (np.ones((12, 12)), 6),
        (np.kron(np.eye(6), np.ones((2, 2))), 2),
        (np.kron(np.eye(4), np.ones((3, 3))), 3),
        (np.kron(np.eye(3), np.ones((4, 4))), 4),
        (np.kron(np.eye(2), np.ones((6, 6))), 6),
        (np.eye(12), 1),
        (np.kron(np.eye(6), [[1, 1], [1, 0]]), 2),  # 75 % of the blocks are filled
        (np.kron(np.eye(6), [[1, 1], [0, 0]]), 1),
        (np.kron(np.ones((2, 2)) - np.eye(2), np.ones((6, 6))), 6),
        (np.zeros((12, 12)), 1),
        (np.ones((9, 9)), 3),
        (np.ones((10, 10)), 2),
        (np.ones((8, 12)), 4),
        (np.ones((7, 12)), 1),
        (np.ones((12, 7)), 1),
        (np.ones((6, 9)), 3),
    ],
)
@each_device
def test_the_block_size_that_is_guessed_is_that_of_scipy(pattern: Any, side: int, device: str) -> None:
    S = sp.csr_array(pattern)
    assert sp.csr_array(pattern).tobsr().blocksize == (side, side) or not S.nnz
    coo = S.tocoo()
    for given in (S, coo, put(device, pattern), (coo.data, (coo.row, coo.col))):
        shape = pattern.shape if isinstance(given, tuple) else None
        A = bg.bsr_array(given, shape=shape, device=device)
        assert A.blocksize == (side, side)
        np.testing.assert_array_equal(numpy_of(A), pattern)


def test_the_share_of_a_block_that_is_filled_decides_at_its_limits() -> None:
    def best(two: float, three: float, four: float, six: float) -> int:
        filled = {2: two, 3: three, 4: four, 6: six}
        return construct._best_side((12, 12), 1000, lambda side: 1000 / (side * side * filled[side]))[0]

    assert best(0.86, 0.86, 1.0, 0.71) == 6
    assert best(0.86, 0.86, 1.0, 0.69) == 3
    assert best(0.84, 0.86, 0.71, 1.0) == 4
    assert best(0.86, 0.84, 0.69, 1.0) == 3
    assert best(0.71, 0.69, 0.69, 1.0) == 2
    assert best(0.69, 0.69, 0.69, 1.0) == 1


@each_device
@pytest.mark.parametrize("given", [np.uint8, np.int16, np.uint32, np.int32, np.int64, np.uint64])
def test_elements_at_one_place_are_added_in_order(device: str, given: Any) -> None:
    """In another order the small number would be lost."""
    row, col = np.array([5, 0, 5, 5, 0], given), np.array([1, 2, 1, 1, 2], given)
    values = np.array([1e30, 3.0, -1e30, 1.0, 4.0])
    A = bg.bsr_array((values, (row, col)), shape=(6, 4), blocksize=(2, 2), device=device)
    want = np.zeros((6, 4))
    want[5, 1], want[0, 2] = 1.0, 7.0
    np.testing.assert_array_equal(numpy_of(A), want)
    half = bg.bsr_array((values[1:2].astype(BFLOAT16).repeat(3), (row[:3], col[:3])), shape=(6, 4), device=device)
    assert numpy_of(half)[5, 1] == 6


# ------------------------------------------------------------------------------------------- what is known
@each_device
def test_a_selection_knows_that_it_is_sorted(device: str) -> None:
    sorted_ = bg.bsr_array((np.ones((4, 1, 1)), [0, 0, 1, 2], [0, 3, 4]), shape=(2, 3))  # duplicates, in order
    assert sorted_.has_sorted_indices and not sorted_.has_canonical_format
    A = on(sorted_, device)
    assert A.has_sorted_indices
    for B in (A.select_blocks(rows=[1, 0]), A.select_blocks(cols=[0, 1]), A.select_blocks(cols=[1, 0]), A[1:], A[[1]]):
        assert B._has_sorted_indices and not B._known_canonical
    A.sum_duplicates()
    for B in (A.select_blocks(rows=[1, 0]), A.select_blocks(cols=[1, 0]), A[1:], A[[1]]):
        assert B._known_canonical
    mixed = on(bg.bsr_array((np.ones((3, 1, 1)), [2, 0, 1], [0, 2, 3]), shape=(2, 3)), device)
    assert not mixed.select_blocks(rows=[0])._has_sorted_indices
    assert not mixed.select_blocks(cols=[0, 1, 2])._has_sorted_indices
    assert mixed.select_blocks(cols=[2, 1, 0])._has_sorted_indices  # it had to be sorted


def test_a_column_with_duplicates_is_not_said_to_have_none() -> None:
    column = bg.bsr_array((np.array([[[1]], [[2]]]), [0, 0], [0, 2]), shape=(1, 1))
    tall = bg.vstack([column, column])
    row = bg.bsr_array(np.array([[3, 5, 7]]), blocksize=(1, 1))
    assert not row._coerce_columns(tall)._known_canonical
    np.testing.assert_array_equal(row.multiply(tall).toarray(), [[9, 15, 21]] * 2)


# --------------------------------------------------------------------------------------------- arithmetic
def test_values_of_the_same_kind_may_change_in_place() -> None:
    A = bg.bsr_array(np.array([[1.5, 2.5]], np.float32), blocksize=(1, 2))
    data = A.data
    A *= np.float64(2)
    A /= np.float64(4)
    assert A.data is data and A.dtype == np.float32
    np.testing.assert_array_equal(A.toarray(), [[0.75, 1.25]])
    B = bg.bsr_array(np.array([[1, 2]], np.int8), blocksize=(1, 2))
    B *= np.int64(3)
    np.testing.assert_array_equal(B.toarray(), [[3, 6]])
    with pytest.raises(TypeError, match="cannot keep float64 values in a matrix of int8"):
        B *= 0.5
    half = bg.bsr_array(np.ones((1, 2), BFLOAT16), blocksize=(1, 2))
    with pytest.raises(TypeError, match="cannot keep complex64 values in a matrix of bfloat16"):
        half *= 1j
    half *= 3
    np.testing.assert_array_equal(half.toarray().astype(float), [[3, 3]])


@pytest.mark.parametrize("own", [(4, 6), (1, 6), (4, 1), (1, 1)])
@pytest.mark.parametrize("other", [(4, 6), (1, 6), (4, 1), (1, 1), (6,), (1,), (4, 5), (3, 6), (3, 1), (1, 5), (3, 5)])
@each_device
def test_products_with_arrays_broadcast_as_in_numpy(own: Any, other: Any, device: str) -> None:
    dense = np.arange(1.0, 1 + np.prod(own)).reshape(own)
    factor = np.arange(2.0, 2 + np.prod(other)).reshape(other)
    A = on(bg.bsr_array(dense, blocksize=(own[0] // 2 or 1, own[1] // 3 or 1)), device)
    try:
        want = dense * factor
    except ValueError:
        with pytest.raises(ValueError, match=re.escape(f"inconsistent shapes {own} and {other}")):
            A.multiply(put(device, factor))
        if len(other) == 2:
            with pytest.raises(ValueError, match=re.escape(f"inconsistent shapes {own} and {other}")):
                A.multiply(on(bg.bsr_array(factor, blocksize=(1, 1)), device))
        return
    np.testing.assert_array_equal(numpy_of(A.multiply(put(device, factor))), want)
    if len(other) == 2:
        np.testing.assert_array_equal(numpy_of(A.multiply(on(bg.bsr_array(factor, blocksize=(1, 1)), device))), want)


@each_device
def test_a_python_number_is_compared_with_bfloat16_in_single_precision(device: str) -> None:
    A = on(bg.bsr_array(np.ones((1, 2), BFLOAT16), blocksize=(1, 2)), device)
    near = 1 + 2.0**-30  # 1 in float32
    with pytest.warns(sp.SparseEfficiencyWarning):
        assert not numpy_of(operator.ne(A, near)).any()
    assert numpy_of(operator.ge(A, near)).all() and not numpy_of(operator.gt(A, near)).any()


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_the_mean_of_halves_is_that_of_single_precision(axis: int | None) -> None:
    A = bg.bsr_array(np.full((2, 2), 3e38, BFLOAT16), blocksize=(2, 2))
    with np.errstate(over="ignore"):
        assert np.isinf(np.asarray(A.mean(axis=axis)).astype(np.float32)).all()


def test_copies_are_made_where_they_are_asked_for() -> None:
    A = bg.bsr_array(np.arange(8.0).reshape(2, 4), blocksize=(1, 2))
    for make in (A.conjugate, A.conj, lambda copy=True: A.astype(np.float64, copy=copy)):
        assert make(copy=False) is A
        B = make()
        assert B is not A and not np.shares_memory(B.data, A.data)
        np.testing.assert_array_equal(B.toarray(), A.toarray())
    assert A.reshape(2, 4) is A and A.reshape((2, 4), copy=True) is not A
    assert np.shares_memory(A.reshape(4, 2).data, A.data)
    assert not np.shares_memory(A.reshape(4, 2, copy=True).data, A.data)
    Z = A * 1j
    shared, own = Z.conjugate(copy=False), Z.conjugate()
    assert np.shares_memory(shared.indices, Z.indices) and not np.shares_memory(own.indices, Z.indices)
    np.testing.assert_array_equal(shared.toarray(), -Z.toarray())


@each_device
def test_a_value_beside_the_stored_blocks_is_refused_if_any_element_is_not_zero(device: str) -> None:
    A = on(bg.bsr_array((np.ones((1, 2, 2)), [0], [0, 1, 1]), shape=(4, 4)), device)
    value = np.zeros((4, 4))
    value[:2, :2] = 5
    A[:, :] = put(device, value)
    np.testing.assert_array_equal(numpy_of(A), value)
    value[3, 2] = 1  # a single element of a block
    with pytest.raises(ValueError, match="value: not zero where no block is stored"):
        A[:, :] = put(device, value)
    with pytest.raises(ValueError, match=r"value: shape \(3,\) does not fit the window \(2, 4\)"):
        A[:2] = put(device, np.ones(3))


# ------------------------------------------------------------------------------------------------ selection
AXIS, CHOSEN = select.Axis("index", "row", 3, 2), select.chosen
WIDE_AXIS = select.Axis("index", "column", 2, 6)


@pytest.mark.parametrize(
    "axis, index, kind, message",
    [
        (AXIS, [0, 2], NotImplementedError, "index: entries 0 to 1 are the rows 0, 2; wanted one whole block there, "
         "2 consecutive rows from a multiple of 2; use A.tocsr()[I] for single rows, or A.select_blocks for block "
         "numbers"),
        (AXIS, [0, 1, 3, 4], NotImplementedError, "index: entries 2 to 3 are the rows 3, 4; wanted one whole block"),
        (AXIS, [0, 1, -5, -4], NotImplementedError, "index: entries 2 to 3 are the rows -5, -4; wanted one whole"),
        (AXIS, [0, 6], IndexError, "index: row 6 is out of range for 6 rows"),
        (AXIS, [-7, 1], IndexError, "index: row -7 is out of range for 6 rows"),
        (AXIS, [0, 1, 2], NotImplementedError, "index: 3 rows are no whole number of blocks of 2 rows; use A.tocsr()"),
        (AXIS, [[0, 1]], NotImplementedError, "index: wanted a 1-D index of rows, got shape (1, 2); use A[np.ix_("),
        (AXIS, [0.0, 1.0], IndexError, "index: wanted integers or booleans, got dtype float64"),
        (AXIS, [[0], [1, 2]], IndexError, "index: wanted integers or booleans, got a ragged list"),
        (AXIS, [True] * 5, IndexError, "index: wanted 6 booleans, one for each row, got 5"),
        (AXIS, [True, True, False, True, False, False], NotImplementedError, "index: the booleans select 1 of the 2 "
         "rows of block 1 (rows 2 to 3); wanted all or none of them; use A.tocsr()[I] for single rows, or"),
        (WIDE_AXIS, [0, 1, 2, 3, 4, 6], NotImplementedError, "index: entries 0 to 5 are the columns 0, 1, 2, 3, ...; "
         "wanted one whole block there, 6 consecutive columns from a multiple of 6; use A.tocsr()[:, J] for single"),
        (AXIS._replace(block=4), [0, 1, 2, 5], NotImplementedError, "are the rows 0, 1, 2, 5; wanted one whole"),
        (AXIS._replace(blocks=0), [0, 1], IndexError, "index: got 2 rows of a matrix that has none"),
        (AXIS, np.array([2**64 - 1, 0], np.uint64), IndexError, f"index: row {2**64 - 1} is out of range for 6 rows"),
    ],
)  # fmt: skip
def test_an_index_that_is_no_selection_of_blocks_is_explained(axis: Any, index: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind) as caught:
        CHOSEN(HOST, index, axis)
    assert message in str(caught.value)
    assert type(caught.value) is kind


def test_what_counts_as_an_index() -> None:
    for x in ([0], (0,), range(2), np.array([1]), fake_cupy.backend().from_host(np.array([1]))):
        assert select.is_index(x)
    for x in (slice(None), 3, np.int64(3), np.array(3), None, Ellipsis):
        assert not select.is_index(x)


@each_device
@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("loop", [True, False], ids=["loops", "sorts"])
def test_selections_of_matrices_with_duplicates_are_those_of_their_blocks(
    device: str, width: Any, loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not loop:
        monkeypatch.setattr(loops, "_LEAST_LINES", -(10**6))
    test_32_bits_hold_what_they_hold()
    rng = np.random.default_rng(5)
    for _ in range(6):
        n, (m, k) = int(rng.integers(0, 9)), rng.integers(1, 5, 2)
        row, col = np.sort(rng.integers(0, m, n)), rng.integers(0, k, n)
        data = rng.integers(1, 100, (n, 2, 3)).astype(float)
        indptr = np.searchsorted(row, np.arange(m + 1)).astype(width)
        host_matrix = bg.bsr_array((data, col.astype(width), indptr), shape=(2 * m, 3 * k))
        A, tiles = on(host_matrix, device), host_matrix.toarray().reshape(m, 2, k, 3)
        for rows in (None, rng.integers(-m, m, 7), rng.random(m) < 0.5, slice(None, None, -1)):
            for cols in (
                None,
                rng.integers(-k, k, 5),
                np.sort(rng.integers(0, k, 5)),
                rng.random(k) < 0.5,
                slice(0, 1),
            ):
                B = A.select_blocks(rows, cols)
                want = tiles[slice(None) if rows is None else rows][:, :, slice(None) if cols is None else cols]
                assert B.shape == (want.shape[0] * 2, want.shape[2] * 3)
                np.testing.assert_array_equal(numpy_of(B), want.reshape(B.shape))
                assert B.indices.dtype == B.indptr.dtype == width


# ---------------------------------------------------------------------------------------------------- files
def test_arrays_of_a_file_are_refused_by_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"an array has the shape \(-2, -3\)"):
        files._product((-2, -3))
    assert files._product((0, 3)) == 0 and files._product((2**40, 2**40)) == 2**80 and files._product(()) == 1
    with pytest.raises(ValueError, match=f"row: {2**63} does not fit into 64 bits with a sign"):
        files._indices(np.array([0, 2**63], np.uint64), "row")
    given = {np.int8: 4, np.uint16: 4, np.int32: 4, np.uint32: 8, np.int64: 8, np.uint64: 8}
    for dtype, size in given.items():
        for x in (np.array([7], dtype), np.zeros(0, dtype)):
            found = files._indices(x, "row")
            assert found.dtype.kind == "i" and found.itemsize == size
            np.testing.assert_array_equal(found, x)
    assert files._indices(np.array([2**40], np.uint64), "row")[0] == 2**40
    for x in (np.zeros((1, 1), int), np.zeros(1), np.zeros(1, bool)):
        with pytest.raises(ValueError, match="row: wanted integers in one dimension, got"):
            files._indices(x, "row")


# ------------------------------------------------------------------------------------ 16-bit floats in float32
def test_bfloat16_is_scaled_in_single_precision() -> None:
    """The number is 1 + 2**-8 in float32, half way between two numbers of bfloat16, and above it in float64."""
    A = bg.bsr_array(np.ones((1, 2), BFLOAT16), blocksize=(1, 2))
    near = 1 + 2.0**-8 + 2.0**-40
    for found in (A * near, A.multiply(near), near * A):
        assert found.dtype == BFLOAT16 and (found.toarray().astype(float) == 1).all()
    A *= near
    assert (A.toarray().astype(float) == 1).all()


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_bfloat16_is_added_in_single_precision(axis: int | None) -> None:
    """The sum of the first two overflows there; a card adds them in another order."""
    line = np.array([3e38, 3e38, -3e38, -3e38])
    dense = line.reshape((-1, 1) if axis == 0 else (1, -1)).astype(BFLOAT16)
    A = bg.bsr_array(dense, blocksize=dense.shape)
    with np.errstate(over="ignore"):
        assert np.isinf(numpy_of(A.sum(axis=axis)).astype(np.float32)).all()


@pytest.mark.parametrize("shape, blocksize", [((2, 0), (4, 3)), ((0, 2), (2, 6)), ((0, 0), (2, 3)), ((2, 2), (4, 6))])
@each_device
def test_the_blocks_of_a_kronecker_product_have_the_size_of_both(shape: Any, blocksize: Any, device: str) -> None:
    A = on(bg.bsr_array(np.ones((4, 6)), blocksize=(2, 3)), device)
    K = bg.kron(A, put(device, np.ones(shape)))
    assert K.blocksize == blocksize and K.shape == (4 * shape[0], 6 * shape[1])
    np.testing.assert_array_equal(numpy_of(K.indptr), np.arange(len(K.indptr)) * (2 if all(shape) else 0))


@pytest.mark.parametrize(
    "row, col, message",
    [
        ([1, -1], [0, 1], "negative row or column index found: row -1, column 0"),
        ([0, 1], [1, -2], "negative row or column index found: row 0, column -2"),
        ([0, 4], [1, 1], r"row index 4 exceeds matrix dimension 4 \(shape=\(4, 6\)\)"),
        ([0, 1], [6, 1], r"column index 6 exceeds matrix dimension 6 \(shape=\(4, 6\)\)"),
    ],
)
@each_device
def test_a_place_outside_of_the_matrix_is_named(row: Any, col: Any, message: str, device: str) -> None:
    with pytest.raises(ValueError, match=message):
        bg.bsr_array((np.ones(2), (row, col)), shape=(4, 6), device=device)
    with pytest.raises(ValueError, match=message.replace("4, 6", "8, 18")):
        bg.bsr_array((np.ones((2, 2, 3)), (row, col)), shape=(8, 18), device=device)
    inside = bg.bsr_array((np.ones(2), (np.abs(row), np.abs(col))), device=device)
    assert inside.shape == (max(map(abs, row)) + 1, max(map(abs, col)) + 1)


def test_an_ellipsis_between_two_slices_stands_for_nothing() -> None:
    A = bg.bsr_array(np.arange(24.0).reshape(4, 6), blocksize=(2, 3))
    for key in ((slice(2, 4), ..., slice(0, 3)), (..., slice(2, 4), slice(0, 3)), (slice(2, 4), slice(0, 3), ...)):
        np.testing.assert_array_equal(A[key].toarray(), A.toarray()[2:4, :3])
    for key in ((slice(None),) * 3, (..., slice(None), slice(None), slice(None))):
        with pytest.raises(IndexError, match=f"wanted at most two parts, for rows and columns, got {len(key)}"):
            A[key]
    with pytest.raises(IndexError, match="single ellipsis"):
        A[..., ...]


def test_a_pair_of_integers_is_a_shape_and_no_other_pair_is() -> None:
    assert construct._is_shape((2, 3)) and construct._is_shape((np.int64(2), 3))
    for x in ((2, 3.0), (2, None), ("2", 3), (True, 3), (2, False), (2,), (2, 3, 4), [2, 3]):
        assert not construct._is_shape(x)


def test_sides_and_their_product_fit_into_64_bits() -> None:
    assert base.check_shape((2**62, 1)) == (2**62, 1) and base.check_shape((0, 2**63 - 1)) == (0, 2**63 - 1)
    for shape in ((2**63, 0), (0, 2**63), (2**32, 2**32)):
        with pytest.raises(ValueError):
            base.check_shape(shape)
