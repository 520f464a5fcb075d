"""Where the host goes another way to the same numbers: limits that were measured, of which no result tells."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend import threads
from bsrgemm._backend.base import Blocks
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import host

ENGINE = host.HostProducts(HOST)


def blocks(rows: int, per_row: int, R: int, C: int, dtype: Any = np.float64, cols: int = 0) -> Blocks:
    """So many blocks in each row; they share their memory."""
    count = rows * per_row
    data = np.broadcast_to(np.ones((1, 1, 1), dtype), (count, R, C))
    indices = (np.arange(count) % max(1, cols or per_row)).astype(np.int32)
    return Blocks(data, indices, np.arange(0, count + 1, max(1, per_row), dtype=np.int32)[: rows + 1])


# ------------------------------------------------------------------------------------------------ loops or panels
@pytest.mark.parametrize(
    "rows, per_row, R, C, width, dtype, transposed, loops",
    [
        (4, 10, 50, 50, 10, "d", False, False),  # 500,000 flops in each block row
        (4, 10, 50, 49, 10, "d", False, True),
        (4, 5, 50, 49, 10, "D", False, True),
        (4, 5, 50, 50, 10, "D", False, False),  # complex numbers take twice as many
        (4, 5, 50, 50, 10, "F", False, False),
        (4, 1000, 50, 50, 7, "d", False, True),  # few columns
        (4, 1000, 50, 50, 8, "d", False, False),
        (4, 1000, 50, 50, 100, "l", False, True),  # BLAS has no integers
        (4, 1000, 50, 50, 100, "f", False, False),
        (4, 4000, 16, 16, 1, "d", False, True),
        (1, 400, 16, 50, 3125, "d", False, False),
        (1, 25, 16, 50, 50, "d", False, False),  # with 16 rows of a block they count for a quarter
        (1, 25, 16, 50, 49, "d", False, True),
        (1, 1000, 32, 1, 8, "d", False, False),  # with 32 rows they count in full
        (1, 1020, 31, 1, 8, "d", False, True),
        (4, 10, 25, 100, 10, "d", True, False),  # the rows of a transpose are the columns
        (4, 10, 100, 25, 10, "d", True, True),
    ],
)
def test_loops_or_panels(
    rows: int, per_row: int, R: int, C: int, width: int, dtype: str, transposed: bool, loops: bool
) -> None:
    one = blocks(rows, per_row, R, C, dtype)
    high = rows * (C if transposed else R)
    assert host._by_loops(one, high, width, np.dtype(dtype), transposed) == loops


def test_a_product_without_rows_is_left_to_the_loops() -> None:
    assert host._by_loops(blocks(0, 0, 4, 4), 0, 100, np.dtype("d"), False)


# ------------------------------------------------------------------------------------------------ threads
class Shares:
    """How `threads.share` is called; it does all the work, or none."""

    def __init__(self, work: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self.work = work

    def __call__(self, work: Any, starts: Any, **how: Any) -> None:
        self.calls.append(how)
        if self.work:
            work(0, len(starts) - 1)


def test_panels_are_shared_from_so_many_flops_on() -> None:
    """50 million in all, and 2 million in each call."""
    for rows, columns, worthwhile in ((1, 2500, True), (1, 2499, False), (40, 100, True), (40, 99, False)):
        one = blocks(rows, 4, 50, 50)  # 20,000 flops in each row for each column
        shares = Shares()
        with patch.object(threads, "share", shares):
            host._multiply_panels(one, np.ones((200, columns)), np.empty((50 * rows, columns)), False, lambda x: x)
        assert shares.calls[0]["worthwhile"] == worthwhile and shares.calls[0]["blas"] is True


@pytest.mark.parametrize("N, K, worthwhile", [(1250, 250, True), (1250, 249, False)])
def test_sampled_products_are_shared_from_so_many_flops_on(N: int, K: int, worthwhile: bool) -> None:
    indices, indptr = np.arange(8), np.array([0, 4, 8])
    shares = Shares()
    with patch.object(threads, "share", shares):
        ENGINE.sampled(np.ones((20, K)), np.ones((K, 8 * N)), indices, indptr, (10, N), np.dtype("d"))
    assert shares.calls == [{"most": 64, "worthwhile": worthwhile, "blas": True}]
    many = np.arange(0, 41)  # 40 block rows of one block take 2 million flops each
    for K, worthwhile in ((100, True), (99, False)):
        shares = Shares()
        with patch.object(threads, "share", shares):
            ENGINE.sampled(np.ones((400, K)), np.ones((K, 1000)), many[:-1] * 0, many, (10, 1000), np.dtype("d"))
        assert shares.calls[0]["worthwhile"] == worthwhile


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width, worthwhile", [(4, True), (3, False)])
def test_loops_are_shared_from_so_many_products_on_unless_rows_meet(
    transposed: bool, width: int, worthwhile: bool
) -> None:
    one = blocks(100, 100, 10, 10)  # a million elements
    shares = Shares()
    with patch.object(threads, "share", shares):
        host._multiply_loops(one, np.ones(1000 * width), np.ones(1000 * width), width, transposed, lambda x: x)
    assert shares.calls == [{"most": 64, "worthwhile": worthwhile and not transposed, "blas": False}]


@pytest.mark.parametrize("rows, most", [(1, 0), (3, 2), (30, 29), (100, 64)])
def test_panels_of_all_threads_take_no_more_memory_than_the_result(rows: int, most: int) -> None:
    one = blocks(rows, 1, 50, 2)
    N = 400
    shares = Shares()
    with patch.object(threads, "share", shares):
        host._multiply_panels(one, np.ones((2, N)), np.empty((50 * rows, N)), False, lambda x: x)
    # a thread has 2 x 400 numbers of B and 50 x 2 of A; the result has 50 x 400 for each row
    assert shares.calls[0]["most"] == min(64, rows * 50 * N // (2 * (N + 50)))
    assert most <= shares.calls[0]["most"]


# ------------------------------------------------------------------------------------------------ memory
@pytest.mark.parametrize("longest, widths", [(32, [300]), (2048, [256, 44]), (8192, [64, 64, 64, 64, 44])])
def test_panels_take_4_mib_or_64_columns(longest: int, widths: list[int]) -> None:
    one = blocks(2, longest // 2, 1, 2)
    found: list[int] = []
    B, out = np.ones((longest, 300)), np.empty((2, 300))
    with patch.object(threads, "share", Shares(work=True)), patch.object(host.np, "take", wraps=np.take) as taken:
        host._multiply_panels(one, B, out, False, lambda x: np.ascontiguousarray(x))
        found = [call.args[0].shape[1] // 2 for call in taken.call_args_list][::2]
    assert found == widths
    np.testing.assert_array_equal(out, np.full((2, 300), float(longest)))


@pytest.mark.parametrize("K, steps", [(1000, 1), (4096, 1), (4097, 2), (16384, 4), (10**6, 16)])
def test_sampled_blocks_are_gathered_in_panels_of_4_mib(K: int, steps: int) -> None:
    """16 blocks of 8 columns in one block row: a panel holds 4 MiB of their columns, or one block."""
    Row.taken.clear()
    small = np.broadcast_to(np.ones((1, 1)), (K, 8 * 16))
    with (
        patch.object(threads, "share", Shares(work=True)),
        patch.object(host.np, "ascontiguousarray", lambda x, dtype: Row(x.shape)),
    ):
        ENGINE.sampled(np.broadcast_to(1.0, (1, K)), small, np.arange(16), np.array([0, 16]), (1, 8), np.dtype("d"))
    assert len(Row.taken) == steps and sum(Row.taken) == 16


class Row:
    """Stands for the columns of Y and for a row of X, without their memory."""

    taken: list[int] = []  # noqa: RUF012

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def reshape(self, *shape: int) -> Row:
        return self

    def __getitem__(self, key: Any) -> Row:
        Row.taken.append(len(key))
        return self

    @property
    def T(self) -> Row:
        return self

    def __matmul__(self, other: Row) -> Any:
        return np.ones((1, 8 * Row.taken[-1]))


@pytest.mark.parametrize("N, steps", [(1, [5]), (64, [4, 1]), (128, [2, 2, 1]), (129, [1] * 5), (1000, [1] * 5)])
def test_matrices_of_a_batch_are_multiplied_together_up_to_256_columns(N: int, steps: list[int]) -> None:
    A = bg.bsr_array(np.eye(2), blocksize=(1, 1))
    found: list[int] = []

    def multiply(blocks: Any, B: Any, out: Any, *how: Any) -> None:
        found.append(out.shape[1] // N)
        out[...] = B

    with patch.object(host, "_multiply", multiply):
        bg.matmul(A, np.ones((5, 2, N)))
    assert found == steps


def test_pairs_are_multiplied_in_pieces_of_64_mib() -> None:
    """Pairs of 64 x 64 take three blocks of 32 KiB: 682 pairs fit."""
    reduced: list[int] = []

    class Backend:
        def segment_reduce(self, op: str, values: Any, order: Any, starts: Any) -> Any:
            reduced.append(len(starts))
            return np.zeros((len(starts), 64, 64))

    engine = host.HostProducts(Backend())  # type: ignore[arg-type]
    a, index = np.ones((1, 64, 64)), np.zeros(1400, int)
    with patch.object(host.np, "matmul", lambda x, y: np.broadcast_to(0.0, (len(x), 64, 64))):
        few = np.broadcast_to(np.ones((1, 64, 64)), (1, 64, 64))
        engine.pair_products(few.astype("f"), index, a, index, np.arange(1400), np.dtype("d"))
    assert reduced == [682, 682, 36]


@pytest.mark.parametrize("width, form", [(7, "bsr"), (8, "csr")])
def test_wide_products_by_loops_go_by_csr(width: int, form: str) -> None:
    used: list[str] = []
    one = Blocks(np.ones((2, 2, 2), np.int64), np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32))
    with patch.object(host, "_loop", lambda form, *rest: used.append(form)):
        host._multiply_loops(one, np.ones(4 * width, int), np.zeros(4 * width, int), width, False, lambda x: x)
    assert used == [form]


@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_are_cast_or_turned_4_mib_at_a_time(transposed: bool) -> None:
    """16 rows of 16 blocks of 64 x 64: in float64 128 blocks take 4 MiB."""
    one = Blocks(np.ones((256, 64, 64), np.float32), np.tile(np.arange(16, dtype=np.int32), 16), np.arange(0, 257, 16))
    one = one._replace(indptr=one.indptr.astype(np.int32))
    sizes: list[int] = []

    def wide(x: Any) -> Any:
        sizes.append(len(x))
        return x.astype(np.float64)

    with patch.object(host, "_loop", lambda *args: None):
        host._multiply_loops(one, np.ones(1024), np.zeros(1024), 1, transposed, wide)
    assert sizes == [128, 128]
