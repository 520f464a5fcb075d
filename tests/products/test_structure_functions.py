"""The functions over the arrays of a matrix by themselves, on the host and on a device that NumPy plays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bsrgemm._backend import array_kernels, base, dlpack, numpy_backend, registry, structure
from bsrgemm._backend.base import Blocks
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products.engine import ProductEngine
from bsrgemm._products.host import ENGINE as HOST_PRODUCTS
from bsrgemm.dtypes import BFLOAT16

pytestmark = pytest.mark.fake

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "cuda"], ids=["host", "device"], indirect=True)
INDEX = pytest.mark.parametrize("index", [np.int32, np.int64])
I64 = np.dtype(np.int64)


def stored(backend: Any, index: Any = np.int32, dtype: Any = "d", R: int = 2, C: int = 3) -> Blocks:
    """Four block rows of three block columns; one row is empty, columns are out of order, one block stands twice."""
    data = np.random.default_rng(R).integers(1, 9, (6, R, C)).astype(dtype)
    parts = data, np.array([2, 0, 1, 1, 0, 2], index), np.array([0, 2, 2, 5, 6], index)
    return Blocks(*(backend.from_host(x) for x in parts))


def on_host(backend: Any, *arrays: Any) -> list[Any]:
    return [backend.to_host(x) for x in arrays]


def dense(backend: Any, blocks: Any, cols: int = 3) -> np.ndarray[Any, Any]:
    data, indices, indptr = on_host(backend, *blocks)
    R, C = data.shape[1:]
    out = np.zeros(((len(indptr) - 1) * R, cols * C), data.dtype)
    for i in range(len(indptr) - 1):
        for p in range(indptr[i], indptr[i + 1]):
            out[i * R : (i + 1) * R, indices[p] * C : (indices[p] + 1) * C] += data[p]
    return out


# ------------------------------------------------------------------------------------------------ keys
def test_indices_have_64_bits_where_a_number_or_an_array_needs_them() -> None:
    narrow, wide, short = np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(1, np.int16)
    assert structure.index_dtype(2**31 - 1, narrow, short) == np.int32 == structure.index_dtype(0)
    assert structure.index_dtype(2**31) == structure.index_dtype(0, narrow, wide) == np.int64


@BACKENDS
@INDEX
def test_keys_order_blocks_by_row_and_column_and_back(backend: Any, index: Any) -> None:
    blocks = stored(backend, index)
    keys = structure.block_keys(backend, blocks.indices, blocks.indptr, 3)
    assert backend.to_host(keys).tolist() == [2, 0, 7, 7, 6, 11] and keys.dtype == np.int64
    for dtype in (np.dtype(np.int32), I64):
        unique = backend.from_host(np.array([0, 2, 6, 7, 11]))
        indices, indptr = structure.keys_to_index(backend, unique, 4, 3, dtype)
        assert [x.tolist() for x in on_host(backend, indices, indptr)] == [[0, 2, 0, 1, 2], [0, 2, 2, 4, 5]]
        assert indices.dtype == indptr.dtype == dtype
    starts = structure.first_of_runs(backend, backend.from_host(np.array([2, 2, 3, 7, 7, 7, 8])))
    assert backend.to_host(starts).tolist() == [0, 2, 3, 6]
    nothing = structure.first_of_runs(backend, backend.from_host(np.zeros(0, np.int64)))
    assert nothing.dtype == np.int64 and nothing.shape == (0,)


@BACKENDS
def test_a_matrix_without_columns_has_keys(backend: Any) -> None:
    none, indptr = backend.from_host(np.zeros(0, np.int32)), backend.from_host(np.zeros(4, np.int32))
    keys = structure.block_keys(backend, none, indptr, 0)
    indices, rows = structure.keys_to_index(backend, keys, 3, 0, np.dtype(np.int32))
    assert indices.shape == (0,) and backend.to_host(rows).tolist() == [0, 0, 0, 0]


# ------------------------------------------------------------------------------------------------ order
@BACKENDS
@pytest.mark.parametrize(
    "indices, is_sorted, strictly",
    [
        ([0, 2, 1, 2], True, True),
        ([0, 2, 0, 2], True, True),
        ([2, 0, 1, 2], False, False),
        ([1, 1, 0, 2], True, False),
        ([0, 2, 2, 2], True, False),
        ([0, 2, 2, 1], False, False),
        ([1], True, True),
        ([], True, True),
        ([2, 1], False, False),
        ([1, 1], True, False),
    ],
)
def test_rows_are_in_order_or_not(backend: Any, indices: list[int], is_sorted: bool, strictly: bool) -> None:
    n = len(indices)
    for pointer in (np.int32, np.int64):  # the loop of the host wants both index arrays in one dtype
        arrays = [np.array(indices, np.int32), np.array([0, min(2, n), n, n], pointer)]
        arrays = [backend.from_host(x) for x in arrays]
        assert structure.is_sorted(backend, *arrays, strictly=False) is is_sorted
        assert structure.is_sorted(backend, *arrays, strictly=True) is strictly
        duplicates = structure.has_duplicates(backend, *arrays, 3)
        assert duplicates is any(len(set(row)) < len(row) for row in (indices[:2], indices[2:]))


@BACKENDS
@INDEX
def test_blocks_are_sorted_and_added_and_selected(backend: Any, index: Any) -> None:
    blocks = stored(backend, index)
    data = backend.to_host(blocks.data)
    found = structure.sort_blocks(backend, blocks, 3)
    assert on_host(backend, found.indices)[0].tolist() == [0, 2, 0, 1, 1, 2]
    np.testing.assert_array_equal(backend.to_host(found.data), data[[1, 0, 4, 2, 3, 5]])
    summed = structure.sum_duplicates(backend, blocks, 3)
    assert [x.tolist() for x in on_host(backend, *summed[1:])] == [[0, 2, 0, 1, 2], [0, 2, 2, 4, 5]]
    np.testing.assert_array_equal(backend.to_host(summed.data), [data[1], data[0], data[4], data[2] + data[3], data[5]])
    keep = backend.from_host(np.array([True, False, False, True, True, False]))
    some = structure.select_blocks(backend, blocks, keep)
    assert [x.tolist() for x in on_host(backend, *some[1:])] == [[2, 1, 0], [0, 1, 1, 3, 3]]
    np.testing.assert_array_equal(backend.to_host(some.data), data[[0, 3, 4]])
    for made in (found, summed, some):
        assert made.indices.dtype == made.indptr.dtype == index


@BACKENDS
def test_a_block_with_one_element_is_not_zero(backend: Any) -> None:
    data = np.zeros((4, 2, 3))
    data[1, 0, 2], data[3, 1, 0] = 1, np.nan
    found = structure.nonzero_blocks(backend, backend.from_host(data))
    assert backend.to_host(found).tolist() == [False, True, False, True]


# ------------------------------------------------------------------------------------------------ formats
@BACKENDS
@INDEX
@pytest.mark.parametrize("block", [(2, 3), (1, 3), (2, 1), (1, 1)], ids=str)
def test_other_formats_have_every_element(backend: Any, index: Any, block: tuple[int, int]) -> None:
    blocks = stored(backend, index, "f", *block)
    whole = dense(backend, blocks)
    R, C = block
    turned = backend.transpose(blocks, 3)
    np.testing.assert_array_equal(dense(backend, turned, 4), whole.T)
    assert on_host(backend, turned.indices)[0].tolist() == [0, 2, 2, 2, 0, 3]
    assert turned.indices.dtype == turned.indptr.dtype == index and turned.data.flags.c_contiguous
    for dtype in (np.dtype(np.int32), I64):
        _, row, col = backend.to_coo(blocks, 3, dtype)
        found = np.zeros_like(whole)
        np.add.at(found, (backend.to_host(row), backend.to_host(col)), backend.to_host(blocks.data).ravel())
        np.testing.assert_array_equal(found, whole)
        assert row.dtype == col.dtype == dtype
        values, columns, indptr = backend.to_csr(blocks, 3, dtype)
        assert columns.dtype == indptr.dtype == dtype and values.dtype == np.float32
        assert backend.to_host(indptr).tolist() == [0, *np.cumsum(np.repeat([2 * C, 0, 3 * C, C], R))]
        found[...] = 0
        rows = np.repeat(np.arange(4 * R), np.diff(backend.to_host(indptr)))
        np.add.at(found, (rows, backend.to_host(columns)), backend.to_host(values))
        np.testing.assert_array_equal(found, whole)
        if R > 1:
            assert backend.to_host(columns)[: 2 * C].tolist() == [*range(2 * C, 3 * C), *range(C)]


@BACKENDS
@pytest.mark.parametrize("unique", [False, True])
def test_elements_become_blocks(backend: Any, unique: bool) -> None:
    row, col = np.array([5, 0, 1, 3, 0]), np.array([8, 4, 0, 3, 5])
    values = np.array([1.0, 2, 3, 4, 5])
    if not unique:
        row, col, values = (np.append(x, y) for x, y in ((row, [0, 5]), (col, [4, 8]), (values, [10, 20])))
    given = [backend.from_host(x) for x in (row.astype(np.int32), col.astype(np.int32), values)]
    for dtype in (np.dtype(np.int32), I64):
        found = structure.from_coo(backend, *given, (6, 9), (2, 3), dtype, unique=unique)
        want = np.zeros((6, 9))
        np.add.at(want, (row, col), values)
        np.testing.assert_array_equal(dense(backend, found), want)
        assert on_host(backend, found.indices)[0].tolist() == [0, 1, 1, 2]
        assert found.indices.dtype == found.indptr.dtype == dtype


def added(backend: Any, x: np.ndarray[Any, Any]) -> Any:
    """The sum from the first to the last; NumPy adds the sum of all others to the first."""
    return np.add.reduceat(x, [0])[0] if backend is HOST else np.cumsum(x)[-1]


@BACKENDS
def test_elements_at_one_place_are_added_in_the_order_given(backend: Any) -> None:
    row, col = backend.from_host(np.array([1, 0, 0, 0])), backend.from_host(np.array([1, 0, 0, 0]))
    values = np.array([7, 1e16, -1e16, 1])
    want, other = (added(backend, x) for x in (values[1:], values[:0:-1]))
    found = structure.from_coo(backend, row, col, backend.from_host(values), (2, 2), (1, 1), I64)
    assert backend.to_host(found.data).ravel().tolist() == [want, 7] and want != other


@BACKENDS
def test_blocks_at_one_place_are_added_in_the_order_of_storage(backend: Any) -> None:
    values = np.array([1e16, -1e16, 1])
    want, other = (added(backend, x) for x in (values, values[::-1]))
    parts = values.reshape(3, 1, 1), np.array([1, 1, 1]), np.array([0, 3])
    found = structure.sum_duplicates(backend, Blocks(*(backend.from_host(x) for x in parts)), 2)
    assert backend.to_host(found.data).ravel().tolist() == [want] and want != other


def test_many_blocks_and_elements_at_few_places_keep_their_order() -> None:
    """NumPy's usual sort keeps the order of up to 16 equal keys by chance."""
    rng = np.random.default_rng(0)
    n = 400
    values = rng.standard_normal(n) * 10.0 ** rng.integers(-9, 9, n)
    col = rng.integers(0, 3, n)
    order = np.argsort(col, kind="stable")
    sums = np.add.reduceat(values[order], np.searchsorted(col[order], [0, 1, 2]))
    found = structure.from_coo(HOST, np.zeros(n, int), col, values, (1, 3), (1, 1), I64)
    assert found.data.ravel().tolist() == sums.tolist()
    blocks = Blocks(values.reshape(n, 1, 1), col, np.array([0, n]))
    assert structure.sort_blocks(HOST, blocks, 3).data.ravel().tolist() == values[order].tolist()
    assert structure.sum_duplicates(HOST, blocks, 3).data.ravel().tolist() == sums.tolist()
    one = Blocks(np.ones((3, 1, 1)), np.zeros(3, int), np.arange(4))
    pattern = ProductEngine.product_pattern(HOST_PRODUCTS, blocks, one, 1)
    assert pattern.left.tolist() == list(range(n)) and pattern.right.tolist() == col.tolist()
    turned = HOST.transpose(Blocks(blocks.data, col, np.arange(n + 1)), 3)
    assert turned.indices.tolist() == order.tolist()


@BACKENDS
def test_blocks_of_a_dense_array_and_back(backend: Any) -> None:
    whole = np.zeros((6, 9))
    whole[0, 8], whole[3, 3], whole[2, 0] = 1, 2, np.nan
    found = structure.from_dense(backend, backend.from_host(whole), (2, 3), np.dtype(np.int32))
    assert [x.tolist() for x in on_host(backend, *found[1:])] == [[2, 0, 1], [0, 1, 3, 3]]
    assert found.indices.dtype == found.indptr.dtype == np.int32
    np.testing.assert_array_equal(dense(backend, found), whole)
    keep = np.zeros((3, 3), bool)
    keep[2, 1] = keep[0, 2] = True
    some = structure.from_dense(backend, backend.from_host(whole), (2, 3), I64, backend.from_host(keep))
    assert [x.tolist() for x in on_host(backend, *some[1:])] == [[2, 1], [0, 1, 1, 2]]
    out = backend.from_host(np.zeros((6, 9)))
    structure.add_to_dense(backend, found, out)
    np.testing.assert_array_equal(backend.to_host(out), whole)
    nothing = structure.from_dense(backend, backend.from_host(np.zeros((6, 9))), (2, 3), I64)
    structure.add_to_dense(backend, nothing, out)
    np.testing.assert_array_equal(backend.to_host(out), whole)


@BACKENDS
@INDEX
def test_two_matrices_are_brought_to_one_pattern(backend: Any, index: Any) -> None:
    a = structure.sum_duplicates(backend, stored(backend), 3)
    parts = np.full((3, 2, 3), 5.0), np.array([1, 2, 1], index), np.array([0, 2, 2, 2, 3], index)
    b = Blocks(*(backend.from_host(x) for x in parts))
    data_a, data_b, indices, indptr = structure.align(backend, a, b, 3)
    assert indices.dtype == indptr.dtype == index
    for data, one in ((data_a, a), (data_b, b)):
        np.testing.assert_array_equal(dense(backend, (data, indices, indptr)), dense(backend, one))
    assert len(data_a) == len(data_b) == len(indices) == 7


# ------------------------------------------------------------------------------------------------ checks
@pytest.mark.parametrize(
    "shape, block, smaller, padded",
    [((10, 12), (4, 4), (2, 4), (12, 12)), ((7, 3), (5, 9), (1, 3), (10, 9)), ((0, 8), (3, 6), (1, 4), (0, 12))],
)
def test_the_way_to_divide_a_shape_is_named(shape: Any, block: Any, smaller: Any, padded: Any) -> None:
    want = f"Take blocks of {smaller}, which divide it, or pad the matrix with zeros to {padded}."
    assert structure.way_to_divide(shape, block) == want


@pytest.mark.parametrize(
    "asked, want",
    [
        ((3, 8, 1, 4, 12), "; slice 0:8, or use A.tocsr()[3:8] for single rows and columns"),
        ((5, 9, 1, 4, 10), "; slice 4:10, or use A.tocsr()[5:9] for single rows and columns"),
        ((4, 8, 2, 4, 12), "; use A.tocsr()[4:8:2] for single rows and columns"),
    ],
)
def test_the_way_to_slice_is_named(asked: Any, want: str) -> None:
    assert structure.way_to_slice(*asked) == want


@pytest.mark.parametrize(
    "data, indices, indptr, shape, message",
    [
        ((2, 2), 2, 3, (4, 4), "BSR data must be 3-dimensional"),
        ((2, 2, 2), (2, 1), 3, (4, 4), "should be 1-D, got 2-D indices and 1-D indptr"),
        ((2, 2, 2), 2, (3, 1), (4, 4), "should be 1-D, got 1-D indices and 2-D indptr"),
        ((2, 0, 2), 2, 3, (4, 4), "at least one element"),
        ((2, 2, 0), 2, 3, (4, 4), "at least one element"),
        ((2, 2, 2), 2, 3, (5, 4), "must be multiple of blocksize"),
        ((2, 2, 2), 2, 3, (4, 5), "must be multiple of blocksize"),
        ((2, 2, 2), 2, 4, (4, 4), "index pointer size 4 should be 3: one more than the 2 block rows"),
        ((2, 2, 2), 3, 3, (4, 4), "got 3 indices and 2 blocks"),
        ((2, 2, 2), 2, 3, (4, 4), ""),
    ],
)
def test_sizes_of_arrays_fit_each_other(data: Any, indices: Any, indptr: Any, shape: Any, message: str) -> None:
    arrays = np.zeros(data), np.zeros(indices, int), np.zeros(indptr, int)
    if not message:
        structure.check_arrays(*arrays, shape)
        return
    with pytest.raises(ValueError, match=message):
        structure.check_arrays(*arrays, shape)


@BACKENDS
@pytest.mark.parametrize(
    "indices, indptr, message",
    [
        ([0, 2], [0, 1, 2], 2),
        ([0, 2], [0, 1, 1], 1),
        ([], [0, 0, 0], 0),
        ([], [0], 0),
        ([0, 2], [1, 1, 2], "should start with 0, got 1"),
        ([0, 2], [0, 2, 1], "non-decreasing"),
        ([0, 2], [0, 1, 3], "last value 3 should be at most the size of indices and data, 2"),
        ([0, 3], [0, 1, 2], r"must be < 3 \(now max 3\)"),
        ([-1, 2], [0, 1, 2], r"must be >= 0 \(now min -1\)"),
        ([3, 1], [0, 1, 1], r"must be < 3 \(now max 3\)"),
    ],
    ids=str,
)
def test_values_of_index_arrays_are_valid(backend: Any, indices: Any, indptr: Any, message: Any) -> None:
    arrays = [backend.from_host(np.array(x, np.int32)) for x in (indices, indptr)]
    if isinstance(message, int):
        assert structure.check_values(backend, *arrays, 3) == message
        return
    with pytest.raises(ValueError, match=message):
        structure.check_values(backend, *arrays, 3)


# ------------------------------------------------------------------------------------------------ the host
@pytest.mark.parametrize("op", ["add", "maximum", "minimum", "fmax", "fmin"])
@pytest.mark.parametrize("dtype", ["d", "?", "e", BFLOAT16, "b"], ids=str)
@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 2, 3), (9, 4, 4), (9, 17), (9, 0)], ids=str)
def test_segments_are_reduced_in_order(op: str, dtype: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    values = rng.integers(0, 2 if dtype == "?" else 5, shape).astype(dtype)
    starts = np.array([0, 1, 5])
    function = np.logical_or if (op, dtype) == ("add", "?") else getattr(np, op)
    for order in (None, rng.permutation(9)[:8].astype(np.int32)):
        rows = values if order is None else values[order]
        found = HOST.segment_reduce(op, values, order, starts)
        parts = [rows[0:1], rows[1:5], rows[5:]]
        want = [function.reduce(x.astype("d") if dtype == BFLOAT16 else x, axis=0) for x in parts]
        np.testing.assert_array_equal(found.astype("d"), np.array(want).astype("d"))
        assert found.dtype == values.dtype and found.shape == (3, *shape[1:])
    nothing = HOST.segment_reduce(op, values[:0], None, starts[:0])
    assert nothing.shape == (0, *shape[1:]) and nothing.dtype == values.dtype


@pytest.mark.parametrize(
    "shape, calls", [((9,), [1]), ((9, 1), [1]), ((9, 4, 4), [1] * 16), ((9, 17), [2]), ((9, 5, 5), [3])]
)
def test_short_rows_are_reduced_column_by_column(shape: tuple[int, ...], calls: list[int], monkeypatch: Any) -> None:
    """The dimensions of each array that NumPy reduces."""
    taken: list[int] = []

    def reduceat(values: Any, *args: Any, **how: Any) -> Any:
        taken.append(values.ndim)
        return np.add.reduceat(values, *args, **how)

    class Noting:
        add = SimpleNamespace(reduceat=reduceat)

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    monkeypatch.setattr(numpy_backend, "np", Noting())
    for order in (None, np.arange(9)):
        taken.clear()
        assert HOST.segment_reduce("add", np.ones(shape), order, np.array([0, 4])).sum() == np.prod(shape)
        assert taken == calls


def test_an_array_of_bytes_reaches_to_its_last_byte() -> None:
    room = np.zeros((4, 8), np.uint8)
    first = HOST.address(room)
    for x, start, stop in (
        (room[:2, :2], 0, 10),
        (room[:2, 1::-1], 0, 10),
        (room[1::-1, :2], 0, 10),
        (room[:1, :2], 0, 2),
    ):
        assert HOST.extent(x) == (first + start, first + stop)


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 20)], ids=str)
@pytest.mark.parametrize("dtype, most", [("e", 2048), (BFLOAT16, 256)], ids=str)
def test_halves_are_added_in_single_precision(shape: tuple[int, ...], dtype: Any, most: int) -> None:
    """Beside the largest number they have no room for 1."""
    column = np.array([most, 1, 1, -most]).reshape(4, *[1] * (len(shape) - 1))
    values = (np.ones(shape) * column).astype(dtype)
    assert (HOST.segment_reduce("add", values, None, np.array([0])).astype("d") == 2).all()


@INDEX
def test_rows_of_entries(index: Any) -> None:
    found = HOST.expand(np.array([0, 2, 2, 5], index), 5)
    assert found.tolist() == [0, 0, 2, 2, 2] and found.dtype == index
    assert HOST.expand(np.array([0, 2, 2, 5], index), 3).tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    "few, very_few", [(0, 0), (10**9, 10**9), (10**9, 0)], ids=["not remembered", "by values", "by arrays"]
)
@pytest.mark.parametrize(
    "indices, indptr, valid",
    [
        ([0, 2], [0, 1, 2], True),
        ([], [0, 0], True),
        ([0, 3], [0, 1, 2], False),
        ([-1, 2], [0, 1, 2], False),
        ([0, 2], [1, 1, 2], False),
        ([0, 2], [0, 1, 1], False),
        ([0, 2, 1], [0, 3, 2, 3], False),
    ],
)
@INDEX
def test_valid_indices_are_told_from_others(
    few: int, very_few: int, indices: Any, indptr: Any, valid: bool, index: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(numpy_backend, "_FEW", few)
    monkeypatch.setattr(numpy_backend, "_VERY_FEW", very_few)
    arrays = np.array(indices, index), np.array(indptr, index)
    for _ in range(2):
        assert numpy_backend._valid(*arrays, 3) is valid
    blocks = Blocks(np.ones((len(indices), 1, 2)), *arrays)
    if valid:
        assert HOST.validated(blocks, len(indptr) - 1, 3).indices is arrays[0]
        return
    with pytest.raises(ValueError, match=r"indptr|indices"):
        HOST.validated(blocks, len(indptr) - 1, 3)


def test_indices_that_were_valid_are_looked_at_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(numpy_backend, "_VERY_FEW", 0)
    indices, indptr = np.array([0, 2]), np.array([0, 1, 2])
    assert numpy_backend._valid(indices, indptr, 3) and not numpy_backend._valid(indices, indptr, 2)
    for array, place, value in ((indices, 1, 3), (indptr, 1, 3), (indptr, 0, 1)):
        before = array[place]
        array[place] = value
        assert not numpy_backend._valid(indices, indptr, 3)
        array[place] = before
        assert numpy_backend._valid(indices, indptr, 3)


def test_few_index_arrays_are_remembered(monkeypatch: Any) -> None:
    monkeypatch.setattr(numpy_backend, "_VERY_FEW", 0)
    monkeypatch.setattr(numpy_backend, "_PATTERNS", 3)
    monkeypatch.setattr(numpy_backend, "_last_valid", {})
    kept = [(np.array([k]), np.array([0, 1])) for k in range(8)]
    for arrays in kept:
        assert numpy_backend._valid(*arrays, 8)
        assert 1 <= len(numpy_backend._last_valid) <= 3
    assert len(numpy_backend._last_valid) == 2


def test_the_host_takes_index_arrays_of_two_dtypes_and_any_strides() -> None:
    data = np.ones((4, 2, 3))[::2].transpose(0, 2, 1)
    found = HOST.validated(Blocks(data, np.array([0, 1], np.int32), np.array([0, 1, 2])), 2, 2)
    assert found.indices.dtype == found.indptr.dtype == np.int64
    assert all(x.flags.c_contiguous for x in found)
    strided = Blocks(np.ones((2, 1, 1)), np.array([0, 9, 1, 9])[::2], np.array([0, 9, 1, 9, 2, 9])[::2])
    found = HOST.validated(strided, 2, 2)
    assert all(x.flags.c_contiguous for x in found) and found.indices.tolist() == [0, 1]
    for wrong in (
        Blocks(np.ones((2, 1)), np.array([0, 1]), np.array([0, 1, 2])),
        Blocks(np.ones((2, 1, 1)), np.array([0]), np.array([0, 1, 1])),
        Blocks(np.ones((2, 1, 1)), np.array([0, 1]), np.array([0, 2])),
        Blocks(np.ones((2, 0, 1)), np.array([0, 1]), np.array([0, 1, 2])),
    ):
        with pytest.raises(ValueError, match=r"data|indices|indptr"):
            HOST.validated(wrong, 2, 2)


@pytest.mark.parametrize("dtype", ["d", "e", BFLOAT16, "?"], ids=str)
def test_the_host_moves_every_dtype(dtype: Any) -> None:
    blocks = stored(HOST, dtype=dtype)
    whole = dense(HOST, blocks._replace(data=blocks.data.astype("d")))
    whole = whole.astype(bool).astype("d") if dtype == "?" else whole
    turned = HOST.transpose(blocks, 3)
    found = dense(HOST, turned._replace(data=turned.data.astype("d")), 4)
    np.testing.assert_array_equal(found.astype(bool) if dtype == "?" else found, whole.T)
    assert turned.data.dtype == np.dtype(dtype)
    for index in (np.dtype(np.int32), I64):
        values, columns, indptr = HOST.to_csr(blocks, 3, index)
        assert values.dtype == np.dtype(dtype) and columns.dtype == indptr.dtype == index
        out = np.zeros_like(whole)
        np.add.at(out, (np.repeat(np.arange(8), np.diff(indptr)), columns), values.astype("d"))
        np.testing.assert_array_equal(out > 0 if dtype == "?" else out, whole)


# ------------------------------------------------------------------------------------------------ kernels of arrays
@pytest.mark.parametrize(
    "dtype, op, average, width, want",
    [
        ("f", "add", 31, 3, ("f32", "f32", "kAdd", 1, 4)),
        ("f", "add", 32, 3, ("f32", "f32", "kAdd", 32, 1)),
        ("f", "add", 1, 0, ("f32", "f32", "kAdd", 1, 1)),
        ("f", "add", 1, 32, ("f32", "f32", "kAdd", 1, 32)),
        ("f", "add", 1, 33, ("f32", "f32", "kAdd", 1, 32)),
        ("e", "maximum", 1, 1, ("f16", "f32", "kMaximum", 1, 1)),
        ("b", "minimum", 1, 2, ("i8", "i8", "kMinimum", 1, 2)),
        ("b", "add", 1, 2, ("i8", "u32", "kAdd", 1, 2)),
        ("d", "fmax", 40, 9, ("f64", "f64", "kFmax", 32, 1)),
        ("F", "fmin", 1, 9, ("c64", "c64", "kFmin", 1, 16)),
    ],
)
def test_segments_are_reduced_by_warps_or_threads(dtype: str, op: str, average: int, width: int, want: Any) -> None:
    found = array_kernels.segment(np.dtype(dtype), op, average, width)
    assert (found.element_a, found.accumulator, found.operation, found.lanes, found.columns) == want


# ------------------------------------------------------------------------------------------------ where arrays are
class Elsewhere:
    """An array of another library, on a kind of device of DLPack."""

    def __init__(self, kind: Any, **more: Any) -> None:
        self.kind = kind
        self.__dict__.update(more)

    def __dlpack__(self, **options: Any) -> None:
        raise RuntimeError("this one is not exported")

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.kind is None:
            raise RuntimeError("on no device")
        return self.kind, 0


def test_kinds_of_devices() -> None:
    assert [dlpack.device_kind(Elsewhere(kind)) for kind in (1, 2, 3, 13, 9, None)] == [1, 2, 3, 13, 9, None]
    assert dlpack.device_kind(3) is None and dlpack.device_kind(SimpleNamespace(__dlpack__=1)) is None
    assert dlpack.ON_HOST == (1, 3) and dlpack.ON_DEVICE == (2, 13)
    assert dlpack.cuda_interface(Elsewhere(2, __cuda_array_interface__={})) == {}
    assert dlpack.cuda_interface(Elsewhere(2)) is dlpack.cuda_interface(Elsewhere(2, __cuda_array_interface__=None))


@pytest.mark.parametrize(
    "reason, more, hint",
    [
        ("is a conj tensor.", {}, "resolve_conj"),
        ("no float8 here", {}, r"x.view\(torch.uint8\)"),
        ("strange layout", {}, "bsr_array"),
        ("whatever", {}, "Convert it first, to a dense array of dtype float32"),
        ("is a conj tensor", {"requires_grad": True}, "x.detach"),
        ("is a conj tensor", {"requires_grad": 1}, "resolve_conj"),
        ("", {}, "through DLPack: RuntimeError. Convert it first"),
    ],
)
def test_the_reason_decides_the_hint(reason: str, more: dict[str, Any], hint: str) -> None:
    error = dlpack.unreadable(Elsewhere(1, **more), RuntimeError(reason))
    assert isinstance(error, TypeError) and str(error).startswith("a tests Elsewhere cannot be read through DLPack")
    with pytest.raises(TypeError, match=hint):
        raise error


def test_a_device_is_found_by_its_kind(monkeypatch: Any) -> None:
    card = object()
    monkeypatch.setattr(registry, "cuda", lambda: card)
    found = [registry.foreign_backend(Elsewhere(kind)) for kind in (1, 3, 2, 13, 9, None)]
    assert found == [HOST, HOST, card, card, None, None]
    assert registry.foreign_backend(Elsewhere(9, __cuda_array_interface__={})) is card
    assert registry.foreign_backend("text") is None


def test_a_backend_is_found_by_name(monkeypatch: Any) -> None:
    monkeypatch.setattr(registry, "_cuda_with_device", lambda: "card")
    assert registry.by_name("cpu") is HOST and registry.by_name("cuda") == "card"
    with pytest.raises(ValueError, match="device: got 'c', wanted 'cpu' or 'cuda'"):
        registry.by_name("c")


@pytest.mark.parametrize(
    "x, scalar",
    [
        *((x, True) for x in (1, 1j, np.float32(1), np.array(1.0), "text")),
        *((x, False) for x in (np.array(None), np.ones(1), None, [1])),
    ],
    ids=str,
)
def test_scalars_of_the_host(x: Any, scalar: bool) -> None:
    assert registry.host_scalar(x) is scalar


def test_a_device_that_is_missing_says_why(monkeypatch: Any) -> None:
    def count() -> int:
        raise RuntimeError("cudaErrorNoDevice:\n  no device")

    for reason, function in (
        ("no CUDA-capable device is detected", lambda: 0),
        ("cudaErrorNoDevice: no device", count),
    ):
        runtime = SimpleNamespace(getDeviceCount=function)
        xp = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False, runtime=runtime))
        monkeypatch.setattr(registry, "cuda", lambda xp=xp: SimpleNamespace(xp=xp))
        with pytest.raises(RuntimeError, match=rf"device='cuda' needs a CUDA device \({reason}\)"):
            registry._cuda_with_device()
        assert registry.default_device() == "cpu"
    there = SimpleNamespace(xp=SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setattr(registry, "cuda", lambda: there)
    assert registry._cuda_with_device() is there and registry.default_device() == "cuda"


def test_the_device_is_looked_for_before_an_array_is_brought_to_it(monkeypatch: Any) -> None:
    looked: list[bool] = []
    card = SimpleNamespace(is_dense=lambda x: x == "dense", adopt=lambda x, writes: f"{x} there")
    monkeypatch.setattr(registry, "_CUDA", card)
    monkeypatch.setattr(registry, "_cuda_with_device", lambda: looked.append(True))
    assert registry.adopted(card, "dense", "B") == "dense there" and not looked
    assert registry.adopted(card, "other", "B") == "other there" and looked
    assert registry.adopted(HOST, np.ones(2), "B") is not None and len(looked) == 1
    with pytest.raises(
        TypeError, match=r"^B: a tests Elsewhere cannot be read through DLPack: this one is not exported"
    ):
        registry.adopted(HOST, Elsewhere(1), "B")


def test_an_engine_is_loaded_once_and_one_that_is_registered_is_not() -> None:
    table: Any = base.EngineTable("bsrgemm._products", cpu="host")
    engine = table.of(HOST)
    assert engine is table.of(HOST) and engine.backend is HOST
    table.register("elsewhere", "mine")
    assert table.of(SimpleNamespace(name="elsewhere")) == "mine"
