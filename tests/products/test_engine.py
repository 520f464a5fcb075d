"""What the engine of a card does around its kernels: copies, overlaps, and what it leaves to others."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import block_products, lists, pairs, sampled, spgemm_pattern
from bsrgemm._products import cuda as products_cuda
from bsrgemm._products import host as products_host
from bsrgemm._products.engine import ProductEngine
from bsrgemm._products.transposed import transposed_copy

from ..devices import Device

ENGINE = products_cuda.CudaProducts(HOST)


def test_a_transpose_with_too_many_rows_is_copied_for_each_product(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists count rows with 31 bits. The copy has the values that the matrix has by then."""
    rng = np.random.default_rng(0)
    host = bg.bsr_array(rng.integers(-3, 4, (32, 24)).astype("f"), blocksize=(16, 8))
    A = bg.bsr_array(tuple(map(device.asarray, host._blocks)), shape=host.shape)
    B = rng.integers(-3, 4, (32, 5)).astype("f")
    monkeypatch.setattr(products_cuda, "_MOST_INT32", 32)
    for factor in (1, 2):
        A.data[...] = factor * A.data
        host.data[...] = factor * host.data
        with patch.object(products_cuda, "transposed_copy", side_effect=transposed_copy) as copied:
            np.testing.assert_array_equal(device.asnumpy(A.T @ device.asarray(B)), host.toarray().T @ B)
        assert copied.call_count == 1
    monkeypatch.setattr(products_cuda, "_MOST_INT32", 33)
    with patch.object(products_cuda, "transposed_copy", side_effect=transposed_copy) as copied:
        np.testing.assert_array_equal(device.asnumpy(A.T @ device.asarray(B)), host.toarray().T @ B)
    assert not copied.call_count


@pytest.mark.parametrize(
    "x, extents, asked",
    [
        ((1000, 100), [(500, 600)], False),  # far away
        ((200, 100), [(500, 600)], False),  # the right-hand side begins where the result ends
        ((0, 100), [(500, 600)], False),  # and ends where it begins
        ((199, 100), [(500, 600)], True),
        ((1, 100), [(500, 600)], True),
        ((1000, 100), [(500, 600), (200, 300)], False),
        ((1000, 100), [(500, 600), (0, 100)], False),
        ((1000, 100), [(500, 600), (199, 300)], True),
        ((1000, 100), [(500, 600), (0, 101)], True),
    ],
    ids=str,
)
def test_bytes_are_compared_only_where_extents_meet(
    x: tuple[int, int], extents: list[tuple[int, int]], asked: bool
) -> None:
    """The result lies from 100 to 200; what its memory says of its size does not count."""
    questions: list[Any] = []
    with (
        patch.object(products_cuda, "operand_of", lambda A: SimpleNamespace(extents=extents)),
        patch.object(ProductEngine, "overlapping", lambda *args: questions.append(args) or 7),
        patch.object(type(HOST), "extent", lambda self, array: (array[0], array[0] + array[1])),
    ):
        found = ENGINE.overlapping((100, 100), x, "A")
    assert found == (7 if asked else None) and len(questions) == asked


@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
@pytest.mark.parametrize("end", ["first", "last"])
def test_out_must_not_lie_over_an_array_of_the_matrix(name: str, end: str, device: Device) -> None:
    """One byte is enough."""
    room, place, size = device.asarray(np.zeros(1 << 17, np.uint8)), 1 << 16, 128 * 64 * 2
    host = bg.bsr_array(np.ones((128, 128), "e"), blocksize=(64, 64))
    A = bg.bsr_array(tuple(map(device.asarray, host._blocks)), shape=host.shape)
    array = getattr(host._blocks, name)
    there = room[place : place + array.nbytes]
    there[...] = device.asarray(array.reshape(-1).view(np.uint8))
    A = A._new(A._blocks._replace(**{name: there.view(array.dtype).reshape(array.shape)}))
    B = device.asarray(np.ones((128, 64), "e"))
    start = place - size + 2 if end == "first" else place + array.nbytes - 2

    def out(begin: int) -> Any:
        return room[begin : begin + size].view(np.float16).reshape(128, 64)

    with pytest.raises(ValueError, match=rf"out: overlaps A\.{name}"):
        bg.matmul(A, B, out=out(start))
    bg.matmul(A, B, out=out(start + (-2 if end == "first" else 2)))


@pytest.mark.parametrize("blocks", [0, 3])
@pytest.mark.parametrize("K", [0, 4])
def test_a_sampled_product_of_nothing_is_zero(blocks: int, K: int, device: Device) -> None:
    indices, indptr = np.arange(blocks, dtype="i4"), np.array([0, blocks, blocks], "i4")
    given = np.ones((blocks, 16, 16), "f"), indices, indptr
    P = bg.bsr_array(tuple(map(device.asarray, given)), shape=(32, 48))
    X, Y = device.asarray(np.ones((32, K), "f")), device.asarray(np.ones((K, 48), "f"))
    found = bg.sddmm(X, Y, P)
    assert found.data.shape == (blocks, 16, 16) and bool((found.data == K).all())


def test_a_pattern_that_the_card_cannot_find_is_sorted() -> None:
    a: Any = "A"
    b: Any = "B"
    with (
        patch.object(products_cuda.spgemm_pattern, "product_pattern", lambda *args: None),
        patch.object(ProductEngine, "product_pattern", lambda self, *args: ("sorted", *args)),
    ):
        assert ENGINE.product_pattern(a, b, 1) == ("sorted", a, b, 1)
    with patch.object(products_cuda.spgemm_pattern, "product_pattern", lambda *args: args):
        assert ENGINE.product_pattern(a, b, 1) == (a, b, 1)


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_a_transposed_copy_is_kept_and_its_values_follow(index: Any) -> None:
    data = np.arange(30.0).reshape(5, 2, 3)
    A = bg.bsr_array((data, np.array([2, 0, 1, 1, 2], index), np.array([0, 2, 4, 5], index)), shape=(6, 9))
    T = transposed_copy(A)
    for factor in (1, 2, -3):
        A.data[...] = factor * data
        assert transposed_copy(A) is T
        np.testing.assert_array_equal(T.toarray(), A.toarray().T)
    changes: list[tuple[str, Any]] = [
        ("data", A.data.copy()),
        ("indices", A.indices.copy()),
        ("indptr", A.indptr.copy()),
    ]
    for name, value in changes:
        setattr(A, name, value)
        other = transposed_copy(A)
        assert other is not T and transposed_copy(A) is other
        np.testing.assert_array_equal(other.toarray(), A.toarray().T)
        T = other
    A._shape = (6, 12)
    assert transposed_copy(A) is not T and transposed_copy(A).shape == (12, 6)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_blocks_of_a_product_are_numbered_with_31_bits(
    arch: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows, and the rows and columns of dense operands, are fewer than 2**31; all others go to other kernels."""
    device.needs(arch)
    assert block_products.MOST == 2**31 and block_products._COUNTED_BEYOND == 2**20
    monkeypatch.setattr(block_products, "_COUNTED_BEYOND", 0)
    a, one = device.asarray(np.ones((2, 64, 64), "e")), device.asarray(np.zeros(1, np.int64))
    X, indptr = device.asarray(np.ones((128, 64), "e")), device.asarray(np.array([0, 1, 1], np.int32))
    small, index = device.asarray(np.ones((64, 64), "e")), device.asarray(np.zeros(1, np.int32))
    for most, served in ((129, True), (128, False)):
        for module in (block_products, pairs, sampled):
            monkeypatch.setattr(module, "MOST", most)
        pairs._computed.cache_clear()
        for left, right in ((a, a[:1]), (a[:1], a)):
            found = pairs.pair_products(left, one, right, one, one, np.dtype("e"))
            assert (found is not None) == served
        dtype = np.dtype("e")
        assert (sampled.sampled_launch(X, small, index, indptr, (64, 64), dtype) is not None) == served
        assert (sampled.sampled_launch(small, X.T, index, indptr[:2], (64, 64), dtype) is not None) == served
    pairs._computed.cache_clear()


def test_lists_and_pairs_are_numbered_with_31_bits() -> None:
    assert spgemm_pattern._MOST + 2**20 == lists._MOST == products_cuda._MOST_INT32 == 2**31
    assert lists._KEY_BITS == 63  # a sort key is a signed integer of 64 bits


# ------------------------------------------------------------------------------------------------ shared index arrays
def sampling(device: Device) -> tuple[Any, Any, Any]:
    P = bg.bsr_array(device.asarray(np.kron(np.eye(2), np.ones((16, 16))).astype("e")), blocksize=(16, 16))
    return device.asarray(np.ones((32, 8), "e")), device.asarray(np.ones((8, 32), "e")), P


def test_results_for_a_pattern_share_index_arrays_until_one_is_read(device: Device) -> None:
    """Who reads them gets arrays of that matrix alone."""
    X, Y, P = sampling(device)
    first, second = bg.sddmm(X, Y, P), bg.sddmm(X, Y, P)
    assert first._unread is second._unread is not None
    before = device.asnumpy(P.indices)
    assert second.indices is second.indices
    second.indices[0] = 1
    third = bg.sddmm(X, Y, P)
    assert third._unread is first._unread
    for kept in (first, third, P):
        np.testing.assert_array_equal(device.asnumpy(kept.indices), before)
        np.testing.assert_array_equal(device.asnumpy(kept.indptr), device.asnumpy(P.indptr))


def test_an_earlier_result_is_an_out_until_it_is_written_to(device: Device) -> None:
    X, Y, P = sampling(device)
    out = bg.sddmm(X, Y, P)
    assert bg.sddmm(2 * X, Y, P, out=out) is out and bool((out.data == 16).all())
    out.indices[0] = 1
    with pytest.raises(ValueError, match="out: wanted the blocks of the pattern, got other indices"):
        bg.sddmm(X, Y, P, out=out)


def test_each_product_of_bytes_in_a_wider_dtype_looks_for_duplicates(device: Device) -> None:
    """They may have been written since: int8 wraps, and their sum in int32 is another."""
    given = np.full((2, 16, 16), 100, "b"), np.array([0, 1], "i4"), np.array([0, 2], "i4")
    A = bg.bsr_array(tuple(map(device.asarray, given)), shape=(16, 32))
    B, out = device.asarray(np.ones((32, 16), "b")), device.asarray(np.zeros((16, 16), "i4"))
    for column in (1, 1, 0, 1):
        A.indices[1] = column
        want = 3200 if column else 16 * int(np.int8(200 - 256))
        assert bool((bg.matmul(A, B, out=out) == want).all()), column


# ------------------------------------------------------------------------------------------------ on the host
def test_booleans_are_added_to_a_result_by_or() -> None:
    A = bg.bsr_array(np.array([[True, False], [False, False]]), blocksize=(1, 1))
    out = np.array([[False, False], [True, False]])
    bg.matmul(A, np.ones((2, 2), bool), out=out, beta=1)
    np.testing.assert_array_equal(out, [[True, True], [True, False]])


def test_a_matrix_of_numpy_times_a_sparse_one_is_a_matrix() -> None:
    A = bg.bsr_matrix(np.arange(6.0).reshape(2, 3), blocksize=(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        left = np.asmatrix(np.arange(4.0).reshape(2, 2))
    found = A.__rmatmul__(left)
    assert isinstance(found, np.matrix)
    np.testing.assert_array_equal(found, np.asarray(left) @ A.toarray())
    S = bg.bsr_array(np.arange(4.0).reshape(2, 2), blocksize=(1, 1)).tocsr()
    product = bg.bsr_array(A).__rmatmul__(S)
    np.testing.assert_array_equal(product.toarray(), S.toarray() @ A.toarray())


def test_a_plan_of_matrices_on_two_devices_is_refused(monkeypatch: Any) -> None:
    A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    B = bg.bsr_matrix(np.eye(4), blocksize=(2, 2))
    monkeypatch.setattr(type(B), "_backend", SimpleNamespace(name="elsewhere"))
    with pytest.raises(TypeError, match="B: wanted a matrix on 'cpu', as A is, got one on 'elsewhere'"):
        bg.plan(A, B)


@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_sampled_product_passes_its_precision_on(precision: str | None, lazy: bool, monkeypatch: Any) -> None:
    """A transpose that is not built is computed as the transpose of another product."""
    pattern = bg.bsr_array(np.ones((4, 6), np.float32), blocksize=(2, 3))
    X, Y = np.ones((4, 5), np.float32), np.ones((5, 6), np.float32)
    asked: list[bool] = []
    sampled = products_host.HostProducts.sampled

    def noting(self: Any, *args: Any) -> Any:
        asked.append(args[-1])
        return sampled(self, *args)

    monkeypatch.setattr(products_host.HostProducts, "sampled", noting)
    if lazy:
        found = bg.sddmm(Y.T, X.T, pattern.T, precision=precision, alpha=2)
    else:
        found = bg.sddmm(X, Y, pattern, precision=precision, alpha=2)
    assert asked == [precision == "tf32"] and (found.toarray() == 10).all()
