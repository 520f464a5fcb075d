"""Rows of the host's products on several threads: each once, the same bits, and BLAS as it was before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import bsrgemm as bg
from bsrgemm._attention import host_tiles
from bsrgemm._backend import threads
from bsrgemm._products import host as products_host

from ..strategies import assert_values, magnitude, rounding, widened


def blas_threads() -> list[int]:
    return [library.num_threads for library in threads._blas()]


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crew of four, whatever the machine has; everything is worth their while."""

    @contextmanager
    def crew() -> Iterator[int]:
        yield 4

    monkeypatch.setattr(threads, "_crew", crew)
    for name in ("_LOOP_SHARED", "_PANEL_SHARED", "_CALL_SHARED"):
        monkeypatch.setattr(products_host, name, 0)
    monkeypatch.setattr(host_tiles, "_SHARED", 0)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 20))
def test_ranges_are_all_rows_once_in_order(work: list[int], count: int) -> None:
    starts = np.concatenate([[0], np.cumsum(work)]).astype(np.int64)
    found = threads.ranges(starts, count)
    assert [i for first, last in found for i in range(first, last)] == list(range(len(work)))
    assert all(first < last for first, last in found)


def test_every_range_is_worked_on_once(four: None) -> None:
    seen: list[tuple[int, int]] = []
    threads.share(lambda a, b: seen.append((a, b)), np.arange(101), most=8, worthwhile=True, blas=False)
    assert sorted(i for first, last in seen for i in range(first, last)) == list(range(100))
    assert len(seen) == 16


@pytest.mark.parametrize(("most", "worthwhile", "rows"), [(1, True, 9), (8, False, 9), (8, True, 1), (8, True, 0)])
def test_what_is_not_worthwhile_stays_in_one_piece(four: None, most: int, worthwhile: bool, rows: int) -> None:
    seen: list[tuple[int, int, str]] = []
    name = threading.current_thread().name

    def work(first: int, last: int) -> None:
        seen.append((first, last, threading.current_thread().name))

    threads.share(work, np.arange(rows + 1), most=most, worthwhile=worthwhile, blas=False)
    assert seen == [(0, rows, name)]


def test_an_error_in_a_thread_is_raised_when_all_have_ended(four: None) -> None:
    before = threading.active_count()

    def work(first: int, last: int) -> None:
        if first <= 50 < last:
            raise ValueError("row 50")

    with pytest.raises(ValueError, match="row 50"):
        threads.share(work, np.arange(101), most=4, worthwhile=True, blas=True)
    assert threading.active_count() == before


def test_blas_has_one_thread_meanwhile_and_as_many_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    if not threads._blas():
        pytest.skip("threadpoolctl finds no BLAS whose number of threads it can set")
    monkeypatch.setattr(threads, "cores", lambda: 3)
    before = blas_threads()
    with threadpool_limits(3, user_api="blas"):
        with threads._crew() as count:
            assert count == 3 and set(blas_threads()) == {1}
            with threads._crew() as inner:  # beside another, or within it
                assert inner == 1
        assert set(blas_threads()) == {3}
        with pytest.raises(KeyError), threads._crew():
            raise KeyError
        assert set(blas_threads()) == {3}
    assert blas_threads() == before
    assert not threads._taken.locked()


def test_a_limit_of_one_thread_is_heeded() -> None:
    with threadpool_limits(1, user_api="blas"), threads._crew() as count:
        assert count == 1


def matrix(block: tuple[int, int], dtype: str) -> bg.bsr_array:
    rng = np.random.default_rng(0)
    i, j = np.nonzero(rng.random((23, 17)) < 0.3)
    i, j = i[i != 7], j[i != 7]  # an empty row
    values = (rng.standard_normal((len(i), *block)) * 4).astype(dtype)
    return bg.bsr_array((values, (i, j)), shape=(23 * block[0], 17 * block[1]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex128", "int8", "int64", "bool"])
@pytest.mark.parametrize("block", [(1, 1), (3, 2), (16, 24)])
@pytest.mark.parametrize("columns", [None, 1, 5, 8, 70])
def test_products_have_the_same_bits_on_any_number_of_threads(
    block: tuple[int, int], dtype: str, columns: int | None, request: pytest.FixtureRequest
) -> None:
    A = matrix(block, dtype)
    shape = (A.shape[1],) if columns is None else (A.shape[1], columns)
    B = (np.random.default_rng(1).standard_normal(shape) * 4).astype(dtype)
    left = (np.random.default_rng(2).standard_normal((A.shape[0], *shape[1:])) * 4).astype(dtype)
    with threadpool_limits(1, user_api="blas"):
        alone, turned = A @ B, A.T @ left
        request.getfixturevalue("four")
        np.testing.assert_array_equal(A @ B, alone)
        np.testing.assert_array_equal(A.T @ left, turned)
    if dtype not in ("int8", "bool"):  # these wrap, or saturate
        exact = widened(A.toarray()) @ widened(B)
        # A row stores at most this many values; 8 more for the rounding of the factors and for complex products.
        additions = int(np.diff(A.indptr).max()) * block[1] + 8
        assert_values(alone, exact, rounding(np.dtype(dtype), magnitude(A.toarray()) @ magnitude(B), additions))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (20, 3)}, {"mask": "random"}, {"mask": "per head"}, {"softcap": 5.0}],
    ids=str,
)
def test_attention_has_the_same_bits_on_any_number_of_threads(
    options: dict[str, object], request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 300, 16), np.float32)
    k, v = (rng.standard_normal((2, 2, 300, 16), np.float32) for _ in range(2))
    if "mask" in options:
        heads = (1, 4) if options["mask"] == "per head" else (1, 1)
        options = {"mask": bg.BlockMask.random(300, per_row=3, block=32, heads=heads, device="cpu")}
    with threadpool_limits(1, user_api="blas"):
        alone = bg.attention(q, k, v, return_lse=True, **options)
        request.getfixturevalue("four")
        for got, want in zip(bg.attention(q, k, v, return_lse=True, **options), alone, strict=True):
            np.testing.assert_array_equal(got, want)


def test_products_in_several_threads_at_once_leave_blas_as_it_was() -> None:
    with threadpool_limits(2, user_api="blas"):
        products_in_several_threads_at_once()


def products_in_several_threads_at_once() -> None:
    before = blas_threads()
    A = matrix((16, 24), "float64")
    B = np.random.default_rng(1).standard_normal((A.shape[1], 700))
    want = A @ B
    wrong: list[int] = []

    def many() -> None:
        for _ in range(8):
            if not np.allclose(A @ B, want, rtol=1e-12, atol=1e-12):
                wrong.append(1)

    crowd = [threading.Thread(target=many) for _ in range(6)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert not wrong and blas_threads() == before


@pytest.fixture
def two_threads() -> Iterator[list[int]]:
    """BLAS with two threads, a number that no thread has the right to."""
    before = blas_threads()
    for library in threads._blas():
        threads._limit(library, 2)
    if blas_threads() != [2] * len(before):
        pytest.skip("BLAS has one thread here")
    yield [2] * len(before)
    for library, number in zip(threads._blas(), before, strict=True):
        threads._limit(library, number)


ONE_ROW = {"starts": np.array([0, 1]), "most": 2, "worthwhile": False, "blas": True}


def test_blas_keeps_one_thread_until_the_last_of_several_products_has_ended(two_threads: list[int]) -> None:
    inside, ended, seen = threading.Event(), threading.Event(), []

    def long_product(first: int, last: int) -> None:
        inside.set()
        assert ended.wait(20)
        seen.append(blas_threads())

    other = threading.Thread(target=lambda: threads.share(long_product, **ONE_ROW))
    other.start()
    assert inside.wait(20)
    threads.share(lambda first, last: seen.append(blas_threads()), **ONE_ROW)
    seen.append(blas_threads())  # the first product still runs
    ended.set()
    other.join()
    assert seen == [[1] * len(two_threads)] * 3
    assert blas_threads() == two_threads


def test_a_product_leaves_the_right_to_limit_blas_to_the_program(two_threads: list[int]) -> None:
    threads.share(lambda first, last: None, **ONE_ROW)
    seen = []

    def elsewhere() -> None:
        with threadpool_limits(1, user_api="blas"):
            seen.append(blas_threads())

    other = threading.Thread(target=elsewhere)
    other.start()
    other.join()
    assert seen == [[1] * len(two_threads)] and blas_threads() == two_threads


def test_a_number_that_the_program_sets_meanwhile_stays(two_threads: list[int]) -> None:
    def work(first: int, last: int) -> None:
        for library in threads._blas():
            threads._limit(library, 3)

    threads.share(work, **ONE_ROW)
    assert blas_threads() == [3] * len(two_threads)


# ------------------------------------------------------------------------------------------------ numbers of threads
class Library:
    """A BLAS with so many threads."""

    def __init__(self, number: int) -> None:
        self.num_threads = number
        self.asked: list[int] = []

    def set_num_threads(self, number: int) -> None:
        self.num_threads = number
        self.asked.append(number)


@pytest.mark.parametrize("numbers, cores, allowed", [((2, 4), 8, 4), ((4, 2), 3, 3), ((), 5, 5), ((1,), 8, 1)])
def test_products_have_the_threads_of_the_blas_that_has_most(
    numbers: tuple[int, ...], cores: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = [Library(number) for number in numbers]
    monkeypatch.setattr(threads, "_blas", lambda: libraries)
    monkeypatch.setattr(threads, "cores", lambda: cores)
    limit = threads._OneThread()
    assert limit.begin() == allowed == limit.begin()
    assert [library.num_threads for library in libraries] == [1] * len(libraries)
    limit.end()
    assert [library.num_threads for library in libraries] == [1] * len(libraries)
    limit.end()
    assert [library.num_threads for library in libraries] == list(numbers)
    # a library with one thread is left alone, and so is one whose number the program has set meanwhile
    assert [library.asked for library in libraries] == [[1, number] if number > 1 else [] for number in numbers]
    limit.begin()
    for library in libraries:
        library.num_threads = 3
    limit.end()
    assert all(library.num_threads == 3 for library in libraries)


def test_the_thread_that_asks_works_too() -> None:
    done: list[tuple[int, int, int]] = []
    me = threading.get_ident()
    threads._on_threads(lambda first, last: done.append((first, last, threading.get_ident())), [(0, 3)], 4)
    assert done == [(0, 3, me)]


@pytest.mark.parametrize("count, parts, started", [(4, 2, 1), (2, 9, 1), (3, 3, 2), (1, 5, 0)])
def test_no_more_threads_are_started_than_have_work(
    count: int, parts: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (names.append(self.name), start(self))[1])
    done: list[int] = []
    threads._on_threads(lambda first, last: done.append(first), [(i, i + 1) for i in range(parts)], count)
    assert sorted(done) == list(range(parts)) and names == ["bsrgemm"] * started


@pytest.mark.parametrize(
    "worthwhile, blas, most, rows, cores, ranges",
    [
        (False, False, 4, 100, 4, None),
        (False, True, 4, 100, 4, None),
        (True, False, 4, 100, 4, (16, 4)),
        (True, True, 2, 100, 4, (8, 2)),
        (True, True, 4, 3, 4, (12, 3)),
        (True, True, 1, 100, 4, None),
        (True, True, 4, 100, 1, None),
    ],
)
def test_rows_are_divided_among_as_many_threads_as_are_allowed(
    worthwhile: bool,
    blas: bool,
    most: int,
    rows: int,
    cores: int,
    ranges: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_blas", lambda: [])
    monkeypatch.setattr(threads, "cores", lambda: cores)
    divided: list[int] = []
    monkeypatch.setattr(threads, "ranges", lambda starts, count: divided.append(count) or [])
    monkeypatch.setattr(threads, "_on_threads", lambda work, parts, count: divided.append(count))
    whole: list[tuple[int, int]] = []
    how = {"most": most, "worthwhile": worthwhile, "blas": blas}
    threads.share(lambda first, last: whole.append((first, last)), np.arange(rows + 1), **how)
    assert (tuple(divided) or None) == ranges and whole == ([] if ranges else [(0, rows)])


def test_a_product_within_a_product_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_blas", lambda: [])
    monkeypatch.setattr(threads, "cores", lambda: 4)
    with threads._crew() as first, threads._crew() as second:
        assert (first, second) == (4, 1)
    with threads._crew() as again:
        assert again == 4
