"""Ranks: where lists are cut, what is kept, which files are read, and the words of errors, beside plain loops."""

from __future__ import annotations

import itertools
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._attention.mask import BlockMask
from bsrgemm.interop import communicator, mpi
from bsrgemm.interop.communicator import OneRank, same, together
from bsrgemm.interop.mpi import matrix, multigrid, panels, ring_plan, sparse

from .ranks import outcomes_of, run


def chain(n: int, block: int = 1) -> Any:
    dense = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    return bg.bsr_array(np.kron(dense, np.eye(block) + 0.1), blocksize=(block, block))


# ------------------------------------------------------------------------------------------------- plans of a ring
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (1, 1), (0, 3), (1 << 30, 0), (1 << 30, 1 << 30), (4, 2)])
def test_calls_are_the_smallest_that_see_everything(left: int, right: int) -> None:
    """No window is told where the whole rectangle is seen."""
    for place, n, m, start in itertools.product((-3, 0, 2), (1, 2, 4), (1, 3, 5), (0, 2)):
        ring = ring_plan.Ring(20, 20, 1, 1, left, right, place)
        queries, keys = (start, start + n), (3, 3 + m)
        seen = np.array([[-left <= k - (q + place) <= right for k in range(*keys)] for q in range(*queries)])
        call = ring_plan._seen(ring, queries, keys)
        if not seen.any():
            assert call is None
            continue
        assert call is not None
        rows, columns = np.flatnonzero(seen.any(axis=1)), np.flatnonzero(seen.any(axis=0))
        assert call.queries == slice(rows[0], rows[-1] + 1) and call.keys == slice(columns[0], columns[-1] + 1)
        part = seen[call.queries, call.keys]
        i, j = np.indices(part.shape)
        window = call.options.get("window", (-1, -1))
        assert bool(call.options) is not bool(part.all())
        if call.options:
            assert call.options == {"window": window, "align": "top-left"}
        shown = ((j >= i - window[0]) | (window[0] < 0)) & ((j <= i + window[1]) | (window[1] < 0))
        np.testing.assert_array_equal(shown, part)
        # a side that cuts nothing off is left open
        assert (window[0] < 0) is bool(part[i >= j].all()) and (window[1] < 0) is bool(part[j >= i].all())


def test_chunks_begin_at_multiples_and_are_about_as_long() -> None:
    assert ring_plan.bounds(64, 2, 1) == (0, 16, 32, 48, 64)
    assert ring_plan.bounds(10, 2, 4) == (0, 0, 4, 8, 10)
    assert ring_plan.bounds(0, 2, 4) == (0, 0, 0, 0, 0)
    assert ring_plan.bounds(33, 1, 16) == (0, 16, 33)
    assert ring_plan.chunks_of(1, 3) == (1, 4)
    assert ring_plan.ranges(64, 1, 2, 1) == ((16, 32), (32, 48))
    assert ring_plan.local_length(10, 0, 2, 4) == 2 and ring_plan.local_length(10, 1, 2, 4) == 8


def test_calls_that_are_neighbours_are_joined() -> None:
    def call(a: int, b: int, c: int, d: int, **options: Any) -> ring_plan.Call:
        return ring_plan.Call(slice(a, b), slice(c, d), options)

    joined = ring_plan._joined
    assert joined([call(0, 2, 0, 3), call(2, 4, 0, 3)]) == [call(0, 4, 0, 3)]
    assert joined([call(0, 2, 0, 3), call(0, 2, 3, 5)]) == [call(0, 2, 0, 5)]
    four = [call(0, 2, 0, 3), call(2, 4, 0, 3), call(0, 2, 3, 5), call(2, 4, 3, 5)]
    assert joined(four) == [call(0, 4, 0, 5)]
    apart = [
        [call(0, 2, 0, 3), call(3, 4, 0, 3)],
        [call(0, 2, 0, 3), call(0, 2, 4, 5)],
        [call(0, 2, 0, 3), call(2, 4, 0, 4)],
        [call(0, 2, 0, 3), call(0, 3, 3, 5)],
        [call(0, 2, 0, 3, causal=True), call(2, 4, 0, 3)],
        [call(0, 2, 0, 3), call(2, 4, 0, 3, causal=True)],
    ]
    for calls in apart:
        assert joined(calls) == calls
    between = [call(0, 2, 0, 3), call(7, 8, 7, 8), call(2, 4, 0, 3)]
    assert joined(between) == [call(0, 4, 0, 3), call(7, 8, 7, 8)]


def test_sixteen_plans_are_kept_on_a_mask_and_the_next_one_drops_them() -> None:
    mask = BlockMask.causal(64, block=16, device="cpu")
    rings = [ring_plan.Ring(64, 64, 2, 16, 1 << 30, right, 0) for right in range(17)]
    plans = [ring_plan.plan_of(ring, 0, mask) for ring in rings[:16]]
    assert all(ring_plan.plan_of(ring, 0, mask) is plan for ring, plan in zip(rings[:16], plans, strict=True))
    last = ring_plan.plan_of(rings[16], 0, mask)
    assert mask.__dict__["_plans"] == {(rings[16], 0): last}
    assert ring_plan.plan_of(rings[0], 0, mask) is not plans[0] and ring_plan.plan_of(rings[16], 0, mask) is last
    for plan in (*plans, ring_plan.plan_of(rings[0], 0, None)):
        assert plan.needs.dtype == np.int64 and plan.needs.shape == (4, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_only_keys_between_the_first_and_the_last_that_a_mask_shows_are_needed(causal: bool) -> None:
    shown = np.zeros((8, 8), bool)
    shown[0, [3, 5]] = shown[7, 6] = shown[3, 3] = True
    mask = BlockMask.from_dense(np.kron(shown, np.ones((16, 16))) > 0, block=16)
    ring = ring_plan.Ring(128, 128, 2, 16, 1 << 30, 0 if causal else 1 << 30, 0)
    plan = ring_plan.plan_of(ring, 0, mask)  # block rows 0, 1, 6 and 7
    want = [[0, 0], [0, 0], [0, 0], [0, 16]] if causal else [[0, 0], [16, 32], [16, 32], [0, 16]]
    assert plan.needs.tolist() == want


# ------------------------------------------------------------------------------------------------- files
def written(path: Path, **change: Any) -> Path:
    A = chain(6, 2)
    arrays = {"format": b"bsr", "shape": (12, 12), "data": A.data, "indices": A.indices, "indptr": A.indptr}
    np.savez(path, **(arrays | change))
    return path


@pytest.mark.parametrize("dtype", [">f8", "<f8", ">f4", ">c16", ">i2"])
def test_numbers_of_another_byte_order_are_turned(tmp_path: Path, dtype: str) -> None:
    A = chain(6, 2)
    path = written(tmp_path / "A.npz", data=(8 * A.data).astype(dtype), indices=A.indices.astype(">i4"))
    (rows, columns), pointers = panels._read_pattern(str(path))
    assert (rows, columns) == (12, 12) and pointers.tolist() == A.indptr.tolist()
    data, indices, indptr = panels._read_panel(str(path), pointers, 2, 5)
    begin, end = A.indptr[2], A.indptr[5]
    assert data.dtype.isnative and indices.dtype.isnative and data.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(data, (8 * A.data[begin:end]).astype(data.dtype))
    np.testing.assert_array_equal(indices, A.indices[begin:end])
    assert indptr.tolist() == (A.indptr[2:6] - begin).tolist()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_arrays_are_skipped_and_read_in_pieces(
    tmp_path: Path, compressed: bool, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = chain(6, 2)
    bg.save_npz(tmp_path / "A.npz", A, compressed=compressed)
    most: list[int] = []
    skipped: list[int] = []
    read, seek = zipfile.ZipExtFile.read, zipfile.ZipExtFile.seek

    def seeking(self: Any, offset: int, whence: int = 0) -> int:
        assert whence == 1 and offset > 0
        skipped.append(offset)
        return seek(self, offset, whence)

    monkeypatch.setattr(panels, "_SKIPPED", step)
    monkeypatch.setattr(zipfile.ZipExtFile, "seek", seeking)
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda self, n=-1: (most.append(n), read(self, n))[1])
    pointers = A.indptr
    for first, last in ((0, 6), (1, 3), (5, 6), (3, 3), (6, 6)):
        data, indices, _ = panels._read_panel(str(tmp_path / "A.npz"), pointers, first, last)
        np.testing.assert_array_equal(data, A.data[pointers[first] : pointers[last]])
        np.testing.assert_array_equal(indices, A.indices[pointers[first] : pointers[last]])
    assert most.count(step) > 10  # beside the headers
    assert bool(skipped) is not compressed  # what is stored as it is need not be read to be skipped


def test_rows_that_a_file_does_not_have_are_named(tmp_path: Path) -> None:
    path = str(written(tmp_path / "A.npz"))
    for first, last in ((-1, 2), (3, 2), (0, 99)):
        with (
            panels._opened(path) as archive,
            pytest.raises(ValueError, match=r"data: wanted rows .* to .*, got an"),
        ):
            panels._read(archive, "data", first, last)
    with panels._opened(path) as archive:
        assert len(panels._read(archive, "data", 16, 16)) == 0 and len(panels._read(archive, "data", 0, 16)) == 16
        assert panels._read(archive, "format").tolist() == [b"bsr"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indptr": np.array([1, 2])}, "indptr: wanted integers from 0 on"),
        ({"indptr": np.array([[0, 1]])}, "indptr: wanted integers from 0 on"),
        ({"indptr": np.zeros(0, int)}, "indptr: wanted integers from 0 on"),
        ({"indptr": np.array([0, 1], np.uint32)}, "indptr: wanted integers from 0 on"),
        ({"indptr": np.array([0, 2, 1])}, "indptr: does not describe block rows of a matrix of 12 rows"),
        ({"shape": (-12, 12)}, "indptr: does not describe block rows of a matrix of -12 rows"),
        ({"shape": (13, 12)}, "indptr: does not describe block rows of a matrix of 13 rows"),
        ({"data": np.zeros((16, 2, 2), object)}, "data: wanted plain numbers in C order, got object"),
        ({"data": np.zeros((2, 2, 16)).T}, "data: wanted plain numbers in C order, got float64"),
        ({"format": b"csr"}, "wanted the format bsr, as save_npz writes it, got csr"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = written(tmp_path / "A.npz", **change)
    with pytest.raises(ValueError, match=f"path: .*A.npz.* holds no matrix that can be read by panels: {words}"):
        mpi.from_file(path)


def test_block_rows_and_the_shape_of_a_file_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 6 block rows of 2, and shape \(18, 12\)"):
        mpi.from_file(written(tmp_path / "A.npz", shape=(18, 12)))


# ------------------------------------------------------------------------------------------------- panels
@pytest.mark.parametrize(
    ("pointers", "size", "want"),
    [
        ([0, 2, 5, 8, 11, 13], 1, [0, 5]),
        ([0, 2, 5, 8, 11, 13], 2, [0, 3, 5]),
        ([0, 0, 0, 0, 0], 2, [0, 2, 4]),  # rows count too
        ([0, 9, 9, 9, 9], 2, [0, 1, 4]),
        ([0, 0, 0, 0, 9], 2, [0, 4, 4]),
        ([0, 3], 3, [0, 1, 1, 1]),
        ([0], 2, [0, 0, 0]),
    ],
)
def test_ranks_get_about_as_many_blocks_and_rows(pointers: list[int], size: int, want: list[int]) -> None:
    assert panels._row_starts(np.array(pointers), size, None).tolist() == want


def test_rows_that_are_given_add_up() -> None:
    assert panels._given([2, 0, 3], 3, 5, "rows").tolist() == [0, 2, 2, 5]
    assert panels._given(np.array([5]), 1, 5, "rows").tolist() == [0, 5]
    for wrong, words in (
        ([2, 3], "rows: wanted 3 numbers, one for each rank of the communicator, got 2"),
        ([2, -1, 4], r"rows: wanted block rows that add up to 5, got \[2, -1, 4\]: panels consist of whole blocks"),
        ([2, 2, 2], "rows: wanted block rows that add up to 5"),
        ([2, 2, 0], "rows: wanted block rows that add up to 5"),
    ):
        with pytest.raises(ValueError, match=words):
            panels._given(wrong, 3, 5, "rows")
    with pytest.raises(ValueError, match="columns: wanted block columns that add up to 5"):
        panels._given([1], 1, 5, "columns")
    for odd in (5, [1.0, 4], "ab"):
        with pytest.raises(TypeError, match="rows: wanted a sequence of integers, one for each rank, got "):
            panels._given(odd, 2, 5, "rows")


def test_columns_are_spread_as_rows_of_square_matrices_and_evenly_otherwise() -> None:
    square, wide = chain(6, 2), bg.random(12, 20, blocksize=(2, 2), density=0.5, seed=1)
    oblong = bg.random(12, 12, blocksize=(2, 3), density=0.5, seed=1)

    def program(comm: Any) -> list[Any]:
        found = [mpi.partition(A, comm, rows=[1, 2, 3]) for A in (square, wide, oblong)]
        return [(D.rows, D.columns) for D in found]

    assert run(3, program) == [
        [(range(0, 2), range(0, 2)), (range(0, 2), range(0, 6)), (range(0, 2), range(0, 3))],
        [(range(2, 6), range(2, 6)), (range(2, 6), range(6, 12)), (range(2, 6), range(3, 6))],
        [(range(6, 12), range(6, 12)), (range(6, 12), range(12, 20)), (range(6, 12), range(6, 12))],
    ]


# ------------------------------------------------------------------------------------------------- matrices
def test_block_rows_with_ghosts_are_kept_apart_if_they_are_few() -> None:
    """A chain has one such row at each end of a panel; in a dense matrix all rows have some."""
    A, full = chain(24, 2), bg.bsr_array(np.arange(1.0, 65).reshape(8, 8), blocksize=(2, 2))

    def program(comm: Any) -> Any:
        D, F = mpi.partition(A, comm), mpi.partition(full, comm)
        assert D._ghost_rows is not None and F._ghost_rows is None
        assert D._ghost.shape == (2, 2) and D.ghost_panel().shape == (24, 2)
        np.testing.assert_array_equal(D.panel().toarray(), A[D.rows.start : D.rows.stop].toarray())
        np.testing.assert_array_equal(F.panel().toarray(), full[F.rows.start : F.rows.stop].toarray())
        assert (D.nnz, D.first_row, F.nnz) == (A.nnz, D.rows.start, 64)
        assert D.halo_bytes() == 2 * 8 and D.halo_bytes(3) == 48 and D.astype("float32").halo_bytes(3) == 24
        assert D._halo.index.dtype == np.int64 and D._halo.bytes(8) == 16
        return D._ghost_rows.tolist()

    assert run(2, program) == [[22, 23], [0, 1]]
    limit = matrix._MOST_ROWS
    assert 0 < limit <= 1
    for filled, apart in ((int(limit * 8), False), (int(limit * 8) - 1, True)):
        dense = np.kron(np.eye(16), np.ones((1, 1)))
        dense[8 - filled : 8, 8] = 1
        B = bg.bsr_array(dense, blocksize=(1, 1))
        found = run(2, lambda comm, B=B: mpi.partition(B, comm, rows=[8, 8])._ghost_rows is not None)
        assert found[0] is apart


def test_matrices_over_ranks_are_said_to_be_canonical_and_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody then looks for duplicates again."""
    made: list[Any] = []
    new = bg.bsr_array._new

    def noting(self: Any, *args: Any, **options: Any) -> Any:
        found = new(self, *args, **options)
        if "/interop/mpi/" in sys._getframe(1).f_code.co_filename:
            assert found._known_canonical
            made.append((sys._getframe(1).f_code.co_name, found))
        return found

    monkeypatch.setattr(bg.bsr_array, "_new", noting)
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 4)
    A = chain(40, 2)

    def program(comm: Any) -> None:
        D = mpi.partition(A, comm, rows=[20, 0, 20])
        linalg.smoothed_aggregation(D, max_coarse=4)

    run(3, program)
    names = {name for name, _ in made}
    assert names == {"_split", "_set_ghost", "ghost_panel", "__call__", "_tentative", "_shifted"}
    for _, found in made:
        row = np.repeat(np.arange(len(found.indptr) - 1), np.diff(found.indptr)).astype(np.int64)
        assert (np.diff(row * found._block_shape[1] + found.indices) > 0).all()
        assert found.indices.dtype == found.indptr.dtype == A.indices.dtype


def test_parts_of_a_concatenation_leave_out_ranks_without_one() -> None:
    assert sparse._slices([2, 0, 3, 0]) == {0: slice(0, 2), 2: slice(2, 5)}
    assert sparse._slices([]) == {}
    assert sparse._pointers(np, np.array([2, 0, 3], np.int32)).tolist() == [0, 2, 2, 5]
    assert sparse._pointers(np, np.array([2, 0, 3], np.int32)).dtype == np.int64
    assert sparse._within(None, slice(1, 3)) == slice(1, 3)
    assert sparse._within(np.array([0, 2, 2, 5]), slice(1, 3)) == slice(2, 5)


def test_whole_vectors_come_and_go_by_either_axis() -> None:
    A = bg.random(12, 20, blocksize=(2, 2), density=0.5, seed=1)
    whole = np.arange(60.0).reshape(20, 3)

    def program(comm: Any) -> None:
        D = mpi.partition(A, comm)
        for axis, length in ((0, 12), (1, 20)):
            for given in (whole[:length], whole[:length, 0], np.asfortranarray(whole[:length])):
                part = D.scatter(given if comm.rank == 0 else None, axis)
                rows = (D.rows, D.columns)[axis]
                np.testing.assert_array_equal(part, given[rows.start : rows.stop])
                back = D.gather(part, axis)
                assert (back is None) is bool(comm.rank)
                if back is not None:
                    np.testing.assert_array_equal(back, given)
        for call in (D.scatter, D.gather):
            for wrong in (2, -1, None):
                with pytest.raises(ValueError, match=f"axis: wanted 0 or 1, got {wrong}"):
                    call(whole[:12], wrong)
        with pytest.raises(ValueError, match=r"b: wanted shape \(12,\) or \(12, k\), got \(20, 3\)"):
            D.scatter(whole)
        with pytest.raises(ValueError, match=r"y: wanted shape \(\d+,\) or \(\d+, k\), got \(\d, \d, 1\)"):
            D.gather(np.ones((len(D.rows), 1, 1)))

    run(2, program)


# ------------------------------------------------------------------------------------------------- hierarchies
def test_levels_of_a_thousand_rows_for_each_rank_are_gathered() -> None:
    n = 1000
    data = np.concatenate([np.full((n + 1, 1, 1), 2.0), np.full((n, 1, 1), -1.0), np.full((n, 1, 1), -1.0)])
    i = np.arange(n + 1)
    place = np.concatenate([i, i[1:], i[:-1]]), np.concatenate([i, i[:-1], i[1:]])
    A = bg.bsr_array((data, place), shape=(n + 1, n + 1))
    M = linalg.smoothed_aggregation(mpi.partition(A, OneRank()), max_coarse=100)
    assert len(M._levels) == 1
    rows = [level.shape[0] for level in M.levels]
    assert rows[0] == 1001 and rows[-1] <= 100 < rows[-2]
    lines = M.report().splitlines()
    assert lines[0] == "level         rows  block size  elements a row  where"
    assert lines[1] == "    0        1,001       1 x 1             3.0  1 ranks" and lines[2].endswith("  every rank")
    assert lines[-1] == f"operator complexity {M.operator_complexity:.2f}, V-cycle, chebyshev of degree 2"
    few = linalg.smoothed_aggregation(mpi.partition(A[:1000, :1000], OneRank()), max_coarse=100)
    assert not few._levels and few.levels[0].shape == (1000, 1000)
    most = linalg.smoothed_aggregation(mpi.partition(A, OneRank()), max_coarse=1001)
    assert not most._levels and len(most.levels) == 1
    for count in (1, 2, 3):
        limited = linalg.smoothed_aggregation(mpi.partition(A, OneRank()), max_coarse=10, max_levels=count)
        assert len(limited.levels) == count
    options = {"smoother": "jacobi", "degree": 3, "cycle": "W"}
    other = linalg.smoothed_aggregation(mpi.partition(A, OneRank()), max_coarse=100, **options)
    assert other.report().splitlines()[-1].endswith("W-cycle, jacobi of degree 3")
    assert other._inverse.rest.report().splitlines()[-1].endswith("W-cycle, jacobi of degree 3")


# ------------------------------------------------------------------------------------------------- errors
def test_ranks_that_fail_are_named_and_the_error_of_the_lowest_is_raised() -> None:
    def program(comm: Any, failing: tuple[int, ...]) -> None:
        with together(comm):
            if comm.rank in failing:
                raise (KeyError if comm.rank == failing[0] else ValueError)(f"from {comm.rank}\nand more")

    for failing, where in (((1,), "rank 1"), ((0, 2), "ranks 0, 2"), ((0, 1, 2), "all ranks")):
        for error in outcomes_of(3, lambda comm, failing=failing: program(comm, failing)):
            assert type(error) is KeyError
            assert error.args[0].endswith(f"[on {where}]") and f"from {failing[0]}" in error.args[0]


def test_an_error_that_nobody_catches_is_printed_once_and_ends_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[Any] = []
    world = SimpleNamespace(Get_rank=lambda: 3, Abort=lambda code: events.append(code))
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: events.append((kind, error, trace)))
    communicator._abort_on_uncaught_errors(SimpleNamespace(COMM_WORLD=world))
    hook = sys.excepthook
    communicator._abort_on_uncaught_errors(SimpleNamespace(COMM_WORLD=world))
    assert sys.excepthook is hook  # a second communicator adds none
    error = ArithmeticError("wrong")
    hook(ArithmeticError, error, None)
    assert events == [(ArithmeticError, error, None), 1]
    assert capsys.readouterr().err == "bsrgemm: rank 3 has failed (ArithmeticError): all ranks are ended\n"


@pytest.mark.parametrize(("kinds", "want"), [(None, False), ("", False), ("system,mpi", False), ("system,cuda", True)])
def test_a_library_says_whether_it_reads_cards(kinds: str | None, want: bool) -> None:
    freed: list[int] = []
    info = SimpleNamespace(get={"mpi_memory_alloc_kinds": kinds}.get, Free=lambda: freed.append(1))
    assert communicator._says_cuda(SimpleNamespace(Get_info=lambda: info)) is want
    assert freed == [1]


@pytest.mark.parametrize("operation", ["sum", "max", "min"])
def test_reductions_follow_the_order_of_the_ranks(operation: str) -> None:
    parts = np.array([[1e16, 1.0], [1.0, 3.0], [-1e16, 2.0]])
    want = {"sum": [(1e16 + 1.0) - 1e16, 6], "max": [1e16, 3], "min": [-1e16, 1]}[operation]
    assert communicator._reduced(parts, operation).tolist() == want
    assert communicator._reduced(parts[:1], operation).tolist() == parts[0].tolist()


def test_the_first_rank_that_differs_is_named() -> None:
    for error in outcomes_of(3, lambda comm: same(comm, "b", "one" if comm.rank == 0 else f"other {comm.rank}")):
        assert str(error) == "b: wanted the same on all ranks, got one on rank 0 and other 1 on rank 1"
    same(OneRank(), "b", "anything")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((-1, 0, 1, 1), "length: wanted an integer from 0 on, got -1"),
        ((8, 0, 0, 1), "size: wanted an integer from 1 on, got 0"),
        ((8, -1, 1, 1), "rank: wanted an integer from 0 on, got -1"),
        ((8, 0, 1, 0), "multiple: wanted an integer from 1 on, got 0"),
        ((8, 2, 2, 1), "rank: wanted 0 to 1, got 2"),
        ((True, 0, 1, 1), "length: wanted an integer from 0 on, got True"),
        ((8.0, 0, 1, 1), "length: wanted an integer from 0 on, got 8.0"),
    ],
)
def test_numbers_of_a_split_have_bounds(given: tuple[Any, ...], words: str) -> None:
    *three, multiple = given
    with pytest.raises(ValueError, match=words):
        mpi.zigzag_positions(*three, multiple=multiple)


def test_positions_are_counted_in_64_bits_and_axes_have_bounds() -> None:
    assert mpi.zigzag_positions(np.int32(8), np.int8(1), 2).dtype == np.int64
    assert mpi.zigzag_positions(0, 0, 1).tolist() == []
    x = np.arange(24).reshape(2, 3, 4)
    for axis in (0, 1, 2, -1, -2, -3):
        parts = [mpi.zigzag_split(x, rank, 2, axis=axis) for rank in range(2)]
        np.testing.assert_array_equal(mpi.zigzag_join(parts, axis=axis), x)
        np.testing.assert_array_equal(parts[1], x.take(mpi.zigzag_positions(x.shape[axis], 1, 2), axis=axis))
    np.testing.assert_array_equal(mpi.zigzag_split(x, 0, 2), mpi.zigzag_split(x, 0, 2, axis=1))
    for wrong in (3, -4, True, 1.0, None):
        with pytest.raises(ValueError, match="axis: wanted an integer from -3 to 2, got "):
            mpi.zigzag_split(x, 0, 2, axis=wrong)
    with pytest.raises(ValueError, match="parts: wanted those of at least one rank, got none"):
        mpi.zigzag_join([])
    short = [mpi.zigzag_split(np.arange(8), rank, 2, axis=0) for rank in range(2)]
    for wrong_parts in ([short[0], short[1].astype(float)], [short[0][:2], short[1]], [short[0], short[1][:, None]]):
        with pytest.raises(ValueError, match=r"parts\[\d\]: wanted int64 of shape "):
            mpi.zigzag_join(wrong_parts, axis=0)
