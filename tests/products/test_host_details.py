"""Products on the host in every way that they can go: which way it is, and that all of them give the same numbers."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend import threads
from bsrgemm._backend.base import Blocks
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import host
from bsrgemm._products.call import ProductPattern
from bsrgemm._products.engine import ProductEngine
from bsrgemm.dtypes import number_of

ENGINE = host.HostProducts(HOST)


def matrix(R: int, C: int, dtype: Any = "d", index: Any = np.int32) -> Any:
    """Four block rows of three block columns with whole numbers; one row is empty, and one block stands twice."""
    rng = np.random.default_rng(R * 17 + C)
    data = rng.integers(0, 2, (6, R, C)).astype(bool) if dtype == "?" else rng.integers(-4, 5, (6, R, C))
    indices, indptr = np.array([2, 0, 1, 1, 1, 2], index), np.array([0, 2, 2, 5, 6], index)
    return bg.bsr_array((data.astype(dtype), indices, indptr), shape=(4 * R, 3 * C))


def numbers(shape: tuple[int, ...], dtype: Any = "d", seed: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


# ------------------------------------------------------------------------------------------------ factors
@pytest.mark.parametrize("flops", [0, 10**9], ids=["panels", "loops"])
@pytest.mark.parametrize("dtype", ["d", "F", "h", "e"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_product_is_scaled_and_added(flops: int, dtype: str, order: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(host, "_PANEL_FLOPS", flops)
    A, N = matrix(3, 2, dtype), 9
    B = numbers((6, N), dtype)
    whole = A.toarray().astype("D") @ B.astype("D")
    for alpha, beta in product((1, -1, 0, 2, -2), (0, 1, 2, -1)):
        for transposed in (False, True):
            out = np.array(numbers((12, N), dtype, seed=9), order=order)
            want = alpha * whole + beta * out.astype("D")
            if transposed:
                bg.matmul(B.T, A.T, out=out.T, alpha=alpha, beta=beta)
            else:
                bg.matmul(A, B, out=out, alpha=alpha, beta=beta)
            np.testing.assert_array_equal(out.astype("D"), want, err_msg=f"{alpha} {beta} {transposed}")


@pytest.mark.parametrize("alpha, beta", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_booleans_are_scaled_by_and_and_added_by_or(alpha: int, beta: int) -> None:
    A, B = matrix(3, 2, "?"), numbers((6, 4)) > 0
    out = numbers((12, 4), seed=5) > 1
    want = (alpha * (A.toarray().astype(int) @ B) + beta * out) > 0
    bg.matmul(A, B, out=out, alpha=alpha, beta=beta)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("dtype", ["b", "B", "h", "I", "l", "L"])
@pytest.mark.parametrize("x", [0, 1, -1, 200, 70_000, -(2**40), 2**63])
def test_factors_of_integers_wrap_around(dtype: str, x: int) -> None:
    found = number_of(np.dtype(dtype), x)
    assert found.dtype == np.dtype(dtype) and (int(found) - x) % (1 << 8 * found.itemsize) == 0


def test_factors_of_floats_take_the_dtype_of_the_sums() -> None:
    for dtype, x in (("f", 0.1), ("d", 0.1), ("F", 0.1 + 1j), ("?", 1)):
        assert number_of(np.dtype(dtype), x) == np.dtype(dtype).type(x)
        assert number_of(np.dtype(dtype), x).dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    "alpha, beta, dtype, out, in_place",
    [
        (1, 1, "d", "contiguous", True),
        (-1, 1, "d", "contiguous", True),
        (1, 2, "l", "contiguous", True),
        (1, 0, "d", "contiguous", False),
        (2, 1, "d", "contiguous", False),
        (0, 1, "d", "contiguous", False),
        (1, 1, "?", "contiguous", False),
        (1, 1, "e", "contiguous", False),  # summed in another dtype
        (1, 1, "d", "strided", False),
        (1, 1, "d", "by panels", False),
    ],
)
def test_loops_add_to_a_result_in_place(
    alpha: int, beta: int, dtype: str, out: str, in_place: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(host, "_PANEL_FLOPS", 0 if out == "by panels" else 10**9)
    A, B = matrix(3, 2, dtype), np.ones((6, 9), dtype)
    room = np.ones((12, 18), dtype)
    asked: list[bool] = []
    multiply = host._multiply
    monkeypatch.setattr(host, "_multiply", lambda *args: (asked.append(True), multiply(*args)))
    bg.matmul(A, B, out=room[:, ::2] if out == "strided" else np.ones((12, 9), dtype), alpha=alpha, beta=beta)
    assert bool(asked) != in_place


# ------------------------------------------------------------------------------------------------ batches
@pytest.mark.parametrize(
    "count, N, steps", [(200, 1, [200]), (300, 1, [256, 44]), (3, 255, [1, 1, 1]), (4, 86, [2, 2])]
)
def test_a_batch_is_multiplied_as_many_at_a_time_as_have_256_columns(count: int, N: int, steps: list[int]) -> None:
    A, B = matrix(1, 2), numbers((count, 6, N))
    taken: list[int] = []
    multiply = host._multiply

    def noting(blocks: Any, B: Any, out: Any, *how: Any) -> None:
        taken.append(out.shape[1] // N)
        multiply(blocks, B, out, *how)

    with patch.object(host, "_multiply", noting):
        np.testing.assert_array_equal(bg.matmul(A, B), A.toarray() @ B)
    assert taken == steps


# ------------------------------------------------------------------------------------------------ small products
def test_small_products_of_plain_floats_are_quick_and_no_others() -> None:
    A = matrix(4, 4)  # 96 numbers
    dense = A.toarray()
    for x in (numbers((12,)), numbers((12, 1)), numbers((12, 42)), numbers((12, 0))):
        np.testing.assert_array_equal(ENGINE.quick(A, x), dense @ x)
    refused = (
        numbers((12, 43)),  # 96 x 43 is more than 4096
        numbers((13,)),
        numbers((11, 2)),
        numbers((12, 12), "f"),
        numbers((2, 12, 2)),
        np.array(3.0),
        numbers((5, 12)).T,
        numbers((24,))[::2],
    )
    for x in refused:
        assert ENGINE.quick(A, x) is None, x.shape
    for dtype in "fdFD":
        found = ENGINE.quick(matrix(2, 3, dtype), np.ones(9, dtype))
        assert found.dtype == np.dtype(dtype) and found.shape == (8,)
    for dtype in "ilg?e":
        assert ENGINE.quick(matrix(2, 3, dtype), np.ones(9, dtype)) is None


# ------------------------------------------------------------------------------------------------ loops
#: (transposed, dtype of A, block, columns) -> the loops that multiply it in float64
WAYS: dict[tuple[bool, str, tuple[int, int], int], list[str]] = {
    (False, "d", (1, 1), 1): ["bsr"],
    (False, "d", (1, 1), 8): ["bsr"],
    (False, "d", (2, 3), 7): ["bsr"],
    (False, "d", (2, 3), 8): ["csr"],
    (False, "d", (2, 1), 8): ["csr"],
    (False, "d", (1, 2), 8): ["csr"],
    (False, "f", (1, 1), 8): ["bsr"],
    (False, "f", (2, 3), 7): ["bsr"],
    (False, "f", (2, 3), 8): ["csr"],
    (True, "d", (1, 1), 1): ["csc"],
    (True, "f", (1, 1), 3): ["csc"],
    (True, "d", (2, 2), 1): ["csc"],
    (True, "d", (2, 3), 1): ["rows"],
    (True, "d", (2, 3), 2): ["csc"],
    (True, "d", (2, 15), 2): ["csc"],
    (True, "d", (2, 16), 2): ["rows"] * 2,
    (True, "f", (1, 16), 16): ["rows"] * 16,
    (True, "d", (2, 16), 17): ["csc"],
    (True, "d", (1, 2), 1): ["csc"],
    (True, "d", (2, 1), 1): ["csc"],
    (True, "d", (3, 1), 1): ["product"],
    (True, "d", (3, 3), 3): ["product"],
    (True, "f", (3, 3), 1): ["product"],
    (True, "d", (8, 8), 2): ["product"],
    (True, "d", (3, 3), 4): ["csc"],
    (True, "d", (9, 9), 1): ["rows"],
    (True, "d", (3, 4), 1): ["rows"],
}


@pytest.mark.parametrize("case", WAYS, ids=str)
def test_each_product_takes_its_loop_and_all_of_them_are_right(case: Any) -> None:
    transposed, dtype, block, width = case
    A = matrix(*block, dtype)
    whole = A.toarray().astype("d").T if transposed else A.toarray().astype("d")
    B, out = numbers((whole.shape[1], width)), np.zeros((whole.shape[0], width))
    used: list[str] = []
    loop, rows, product = host._loop, host._add_transposed, host._add_transposed_product
    R, C = block
    shapes = {"bsr": (4, 3), "csr": (4 * R, 3 * C), "csc": (3 * C, 4 * R)}

    def noting(form: str, shape: Any, *args: Any) -> None:
        assert shape == shapes[form]
        used.append(form)
        loop(form, shape, *args)

    with (
        patch.object(host, "_loop", noting),
        patch.object(host, "_add_transposed", lambda *args: (used.append("rows"), rows(*args))),
        patch.object(host, "_add_transposed_product", lambda *args: (used.append("product"), product(*args))),
    ):
        host._multiply_loops(A._blocks, B.ravel(), out.reshape(-1), width, transposed, lambda x: x.astype("d"))
    np.testing.assert_array_equal(out, whole @ B)
    assert used == WAYS[case]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_rows_that_are_cast_a_few_at_a_time_give_the_whole_product(
    transposed: bool, width: int, index: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(host, "_LOOP_BYTES", 2 * 6 * 8)  # two blocks, or a block row
    A = matrix(2, 3, "f", index)
    whole = A.toarray().astype("d").T if transposed else A.toarray().astype("d")
    B, out = numbers((whole.shape[1], width)), numbers((whole.shape[0], width), seed=8)
    want = whole @ B + out
    pieces: list[int] = []

    def wide(x: Any) -> Any:
        pieces.append(len(x))
        return x.astype("d")

    host._multiply_loops(A._blocks, B.ravel(), out.reshape(-1), width, transposed, wide)
    np.testing.assert_array_equal(out, want)
    assert pieces == [2, 3, 1]


@pytest.mark.parametrize("blocks, block_cols, wide", [(31, 31, False), (32, 31, True), (31, 32, True)])
def test_csr_has_wider_indices_where_its_elements_or_columns_need_them(
    blocks: int, block_cols: int, wide: bool
) -> None:
    """Indices of 8 bits stand for those of 32: they count 127 elements of blocks of 2 x 2 and 124 columns."""
    taken: list[Any] = []
    loops = SimpleNamespace(bsr_tocsr=lambda *args: taken.extend(args))
    with patch.object(host, "_sparsetools", loops):
        found = host._as_csr(np.arange(3, dtype="b"), np.zeros(blocks, "b"), np.ones((blocks, 1, 4)), block_cols)
    kind = np.dtype(np.int64 if wide else np.int8)
    assert [x.dtype for x in found] == [kind, kind, np.dtype("d")] and [len(x) for x in found] == [
        3,
        4 * blocks,
        4 * blocks,
    ]
    assert taken[:4] == [2, block_cols, 1, 4] and taken[4].dtype == taken[5].dtype == kind


# ------------------------------------------------------------------------------------------------ panels
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("N", [1, 5, 64, 67])
def test_panels_are_right_for_every_width(transposed: bool, N: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(host, "_PANEL_BYTES", 1)
    monkeypatch.setattr(host, "_LEAST_PANEL_COLUMNS", 4)
    A = matrix(3, 2)
    whole = A.toarray().T if transposed else A.toarray()
    B, out = numbers((whole.shape[1], N)), np.full((whole.shape[0], N), np.nan)
    host._multiply_panels(A._blocks, B, out, transposed, lambda x: x)
    np.testing.assert_array_equal(out, whole @ B)


def test_a_matrix_without_blocks_gives_zeros_by_panels() -> None:
    out = np.full((6, 5), np.nan)
    empty = Blocks(np.zeros((0, 3, 2)), np.zeros(0, np.int32), np.zeros(3, np.int32))
    host._multiply_panels(empty, np.ones((4, 5)), out, False, lambda x: x)
    assert not out.any()


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_blocks_by_column_keep_their_order(index: Any) -> None:
    order, rows, begins = host._by_column(matrix(2, 2, index=index)._blocks, 3)
    assert [x.tolist() for x in (order, rows, begins)] == [[1, 2, 3, 4, 0, 5], [0, 2, 2, 2, 0, 3], [0, 1, 4, 6]]
    assert {x.dtype for x in (order, rows, begins)} == {np.dtype(index)}


# ------------------------------------------------------------------------------------------------ pairs
@pytest.mark.parametrize(
    "sides, dtype, by_pairs",
    [
        ((16, 32, 32), "d", True),  # 32,768 flops
        ((16, 32, 31), "d", False),
        ((31, 32, 16), "f", False),
        ((16, 31, 32), "F", False),
        ((32, 16, 32), "D", True),
        ((64, 64, 64), "l", False),  # BLAS has no integers
        ((64, 32, 8), "d", True),
        ((8, 64, 16), "d", False),
        ((1, 1, 1), "e", True),  # and SciPy's loop no 16-bit floats
        ((1, 1, 1), "d", False),
    ],
)
def test_pairs_of_large_blocks_go_to_blas(
    sides: tuple[int, int, int], dtype: str, by_pairs: bool, monkeypatch: Any
) -> None:
    R, K, N = sides
    a = Blocks(np.ones((1, R, K), dtype), np.zeros(1, int), np.array([0, 1]))
    b = Blocks(np.ones((1, K, N), dtype), np.zeros(1, int), np.array([0, 1]))
    assert ENGINE._by_pairs(a, b, np.dtype(dtype)) == by_pairs
    pattern = ENGINE.product_pattern(a, b, 1)
    if by_pairs:
        monkeypatch.setattr(host, "_sparsetools", None)
    else:
        monkeypatch.setattr(ProductEngine, "multiply_sparse", None)
        monkeypatch.setattr(ProductEngine, "multiply_planned", None)
    found = ENGINE.multiply_sparse(a, b, 1, np.dtype(dtype))
    assert (found.data == K).all() and found.data.dtype == np.dtype(dtype) and found.data.shape == (1, R, N)
    assert (ENGINE.multiply_planned(a, b, pattern, 1, np.dtype(dtype)) == K).all()


def test_a_planned_product_has_zeros_where_the_loop_finds_no_block() -> None:
    """SciPy drops 1 x 1 blocks that cancel out; the pattern keeps them."""
    a = Blocks(np.array([1.0, 1, 2]).reshape(3, 1, 1), np.array([0, 1, 0], np.int32), np.array([0, 2, 3], np.int32))
    b = Blocks(np.array([5.0, 7, -5]).reshape(3, 1, 1), np.array([0, 1, 0], np.int32), np.array([0, 2, 3], np.int32))
    pattern = ENGINE.product_pattern(a, b, 2)
    assert isinstance(pattern, ProductPattern) and pattern.indices.tolist() == [0, 1, 0, 1]
    assert ENGINE.multiply_planned(a, b, pattern, 2, np.dtype("d")).ravel().tolist() == [0, 7, 10, 14]


@pytest.mark.parametrize("cancel", [False, True])
def test_a_plan_of_single_elements_knows_the_order_in_which_the_loop_finds_them(cancel: bool) -> None:
    """Unless a sum is zero: then the elements are looked for one by one."""
    rng = np.random.default_rng(5)
    dense = [np.where(rng.random((40, 40)) < 0.2, rng.integers(1, 9, (40, 40)), 0).astype("d") for _ in range(2)]
    if cancel:
        dense[0][7], dense[1][:, 3] = 0, 0
        dense[0][7, :2], dense[1][:2, 3] = 1, (2, -2)
    A, B = (bg.bsr_array(x, blocksize=(1, 1)) for x in dense)
    asked: list[bool] = []
    positions = ENGINE.backend.loops.positions
    with patch.object(ENGINE.backend.loops, "positions", lambda *args: (asked.append(True), positions(*args))[1]):
        for factor in (1, 2):
            found = bg.plan(A, B)(factor * A, B)
            np.testing.assert_array_equal(found.toarray(), factor * dense[0] @ dense[1])
            assert found.has_canonical_format
    assert bool(asked) == cancel


@pytest.mark.parametrize("side, single", [(32, True), (31, False)])
@pytest.mark.parametrize("dtype", ["f", "d", "F", "D"])
def test_each_large_block_of_a_result_is_one_call_of_blas(side: int, single: bool, dtype: str) -> None:
    """From 16,384 products of numbers on; 16 x 32 x 32 have as many."""
    a, b = numbers((3, 16, side), dtype), numbers((2, side, 32), dtype)
    ia, ib, starts = np.array([0, 2, 1, 0, 2]), np.array([1, 0, 1, 1, 0]), np.array([0, 2, 3])
    asked: list[bool] = []
    pairs = host._multiply_pairs
    with patch.object(host, "_multiply_pairs", lambda *args: (asked.append(True), pairs(*args))):
        found = ENGINE.pair_products(a, ia, b, ib, starts, np.dtype(dtype))
    products = [a[i] @ b[j] for i, j in zip(ia, ib, strict=True)]
    want = [products[0] + products[1], products[2], products[3] + products[4]]
    np.testing.assert_array_equal(found, want)
    assert bool(asked) == single and found.dtype == np.dtype(dtype)


@pytest.mark.parametrize("dtypes", [("f", "d", "d"), ("d", "f", "d"), ("l", "l", "l"), ("e", "e", "e")])
def test_pairs_of_other_dtypes_are_multiplied_together(dtypes: tuple[str, str, str]) -> None:
    a, b = numbers((2, 64, 16), dtypes[0]), numbers((2, 16, 64), dtypes[1])
    with patch.object(host, "_multiply_pairs", None):
        found = ENGINE.pair_products(a, np.array([0, 1]), b, np.array([1, 1]), np.array([0]), np.dtype(dtypes[2]))
    want = a[0].astype("d") @ b[1].astype("d") + a[1].astype("d") @ b[1].astype("d")
    np.testing.assert_array_equal(found[0].astype("d"), want)
    assert found.dtype == np.dtype(dtypes[2])


@pytest.mark.parametrize("most", [1, 3 * 8 * 12, 10**9])
def test_pairs_are_multiplied_by_whole_blocks_of_the_result(most: int, monkeypatch: Any) -> None:
    """Pairs of 2 x 2 take 12 numbers: one, three or all of them at a time, but for a longer sum."""
    monkeypatch.setattr(host, "_PAIR_BYTES", most)
    a, b = numbers((3, 2, 2)), numbers((3, 2, 2), seed=4)
    starts, ia = np.array([0, 1, 2, 3, 7]), np.array([0, 1, 2, 0, 1, 2, 1, 0, 0])
    lengths: list[int] = []
    matmul = np.matmul
    with patch.object(host.np, "matmul", lambda x, y: (lengths.append(len(x)), matmul(x, y))[1]):
        found = ENGINE.pair_products(a, ia, b, ia[::-1], starts, np.dtype("d"))
    products = [a[i] @ b[j] for i, j in zip(ia, ia[::-1], strict=True)]
    want = [sum(products[i:j]) for i, j in ((0, 1), (1, 2), (2, 3), (3, 7), (7, 9))]
    np.testing.assert_array_equal(found, want)
    assert lengths == {1: [1, 1, 1, 4, 2], 10**9: [9]}.get(most, [3, 4, 2])


@pytest.mark.parametrize("count, worthwhile", [(382, True), (381, False)])
def test_pairs_are_shared_from_so_many_flops_on(count: int, worthwhile: bool) -> None:
    """50 million flops, of which a pair of 32 x 64 and 64 x 32 takes 131,072."""
    a, b, index = np.ones((1, 32, 64)), np.ones((1, 64, 32)), np.zeros(count, int)
    calls: list[Any] = []
    with patch.object(threads, "share", lambda work, starts, **how: calls.append((list(starts), how))):
        ENGINE.pair_products(a, index, b, index, np.array([0, 5]), np.dtype("d"))
    assert calls == [([0, 5, count], {"most": 64, "worthwhile": worthwhile, "blas": True})]


# ------------------------------------------------------------------------------------------------ sparse products
@pytest.mark.parametrize("index", [*product((np.int32, np.int64), repeat=2)])
@pytest.mark.parametrize("dtype", ["d", "l", "?"])
def test_products_of_sparse_matrices_have_the_wider_index(index: tuple[Any, Any], dtype: str) -> None:
    A, B = matrix(2, 3, dtype, index[0]), matrix(3, 2, dtype, index[1])
    B = bg.bsr_array((B.data, B.indices, B.indptr[[0, 1, 2, 4]]), shape=(9, 6))
    a, b = (
        x._blocks._replace(indices=x.indices.astype(i), indptr=x.indptr.astype(i))
        for x, i in zip((A, B), index, strict=True)
    )
    found = ENGINE.multiply_sparse(a, b, 3, np.dtype(dtype))
    assert {found.indices.dtype, found.indptr.dtype} == {np.dtype(max(index, key=lambda i: np.dtype(i).itemsize))}
    dense = bg.bsr_array(tuple(found), shape=(8, 6)).toarray()
    np.testing.assert_array_equal(dense, (A.toarray().astype(int) @ B.toarray()).astype(dtype))


# ------------------------------------------------------------------------------------------------ sampled products
@pytest.mark.parametrize("dtype", ["f", "d", "F", "l", "e"])
@pytest.mark.parametrize("panel", [1, 4 << 20])
def test_sampled_products_are_those_of_the_whole_product(dtype: str, panel: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(host, "_PANEL_BYTES", panel)
    X, Y = numbers((8, 5), dtype), numbers((5, 9), dtype, seed=1)
    indices, indptr = np.array([2, 0, 1, 1, 0]), np.array([0, 2, 2, 4, 5])
    found = ENGINE.sampled(X, Y, indices, indptr, (2, 3), np.dtype(dtype))
    whole = X.astype("D") @ Y.astype("D")
    for block, i, j in zip(found, (0, 0, 2, 2, 3), indices, strict=True):
        np.testing.assert_array_equal(block.astype("D"), whole[2 * i : 2 * i + 2, 3 * j : 3 * j + 3])
    assert found.dtype == np.dtype(dtype) and found.shape == (5, 2, 3)
    nothing = ENGINE.sampled(X[:, :0], Y[:0], indices, indptr, (2, 3), np.dtype(dtype))
    assert nothing.shape == (5, 2, 3) and not nothing.any()


@pytest.mark.parametrize("dtype", ["?", "b", "l", "f", "d", "g", "F", "D"])
@pytest.mark.parametrize("index", [(np.int32, np.int32), (np.int64, np.int64), (np.int32, np.int64)])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("block", [(3, 1), (3, 3), (8, 4)])
def test_transposes_by_a_sparse_product_take_any_order_of_blocks(
    block: tuple[int, int], width: int, index: tuple[Any, Any], dtype: str
) -> None:
    """Columns without order, twice in a row and never; a row without blocks; sums that go on from what is in y."""
    pattern = np.array([0, 3, 3, 5], index[1]), np.array([3, 0, 3, 1, 3], index[0])
    values = (numbers((5, *block)) > 0).astype("?") if dtype == "?" else numbers((5, *block)).astype(dtype)
    x, y = (numbers((n, width), seed=n).astype(dtype) for n in (3 * block[0], 5 * block[1]))
    whole = np.zeros((3 * block[0], 5 * block[1]), values.dtype)
    for b, (i, j) in enumerate(zip([0, 0, 0, 2, 2], pattern[1].tolist(), strict=True)):
        whole[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] += values[b]
    want = y + whole.T @ x
    host._add_transposed_product(pattern, values, x.reshape(-1), y.reshape(-1), width)
    np.testing.assert_array_equal(y, want)
    before = y.copy()
    nothing = np.zeros(4, index[1]), np.zeros(0, index[0])
    host._add_transposed_product(nothing, values[:0], x.reshape(-1), y.reshape(-1), width)
    np.testing.assert_array_equal(y, before)
