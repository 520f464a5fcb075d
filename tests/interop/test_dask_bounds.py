"""Matrices in panels: where they are cut, how sums are made, names and dtypes of what is not computed yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from dask.task_spec import TaskRef  # noqa: E402

from bsrgemm.interop import dask as panels  # noqa: E402
from bsrgemm.interop.dask import base, products, sources, tasks  # noqa: E402

S = bg.random(60, 48, blocksize=(4, 3), density=0.4, seed=0)
X = np.random.default_rng(2).standard_normal((48, 5))
A = panels.from_bsr(S, 16)


@pytest.fixture(autouse=True)
def _in_this_thread() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


# ------------------------------------------------------------------------------------------------- layouts
def test_a_layout_knows_panels_along_either_axis() -> None:
    rows = tasks.Layout((4, 8, 0), 6, (4, 3), np.dtype(float))
    assert (rows.device, rows.axis, rows.count, rows.shape) == ("cpu", 0, 3, (12, 6))
    assert rows.chunks == ((4, 8, 0), (6,)) and rows.bounds == ((0, 4), (4, 12), (12, 12))
    assert rows.shape_of(1) == (8, 6) and rows.key("x", 2) == ("x", 2, 0)
    columns = rows.transposed()
    assert (columns.axis, columns.blocksize, columns.shape) == (1, (3, 4), (6, 12))
    assert columns.chunks == ((6,), (4, 8, 0)) and columns.shape_of(1) == (6, 8) and columns.key("x", 2) == ("x", 0, 2)
    assert columns.transposed() == rows and rows.with_sides((12,)).shape == (12, 6)
    tasks.check_sides((0, 4, 8), 4, "rows")
    for side, words in ((6, "4 and 8 are"), (-4, "-4 and 0 are"), (3, "0 and 4 are")):
        with pytest.raises(ValueError, match=f"rows: panel 1 has {side} columns, .* the 4 columns of a block; {words}"):
            tasks.check_sides((4, side), 4, "rows", 1)


@pytest.mark.parametrize(
    ("shape", "rows", "sides"),
    [((60, 48), 16, (16, 16, 16, 12)), ((60, 48), 60, (60,)), ((60, 48), 64, (60,)), ((0, 48), 4, (0,)),
     ((60, 48), 20, (20, 20, 20)), ((60, 0), 32, (32, 28))],
)  # fmt: skip
def test_the_last_panel_may_have_fewer_rows(shape: tuple[int, int], rows: int, sides: tuple[int, ...]) -> None:
    made = panels.from_bsr(S[: shape[0], : shape[1]], rows)
    assert made.chunks == (sides, (shape[1],)) and made.compute().shape == shape
    for k, (start, stop) in enumerate(tasks.bounds_of(sides)):
        panel = made.partitions[k].compute()
        np.testing.assert_array_equal(panel.toarray(), S[start:stop, : shape[1]].toarray())
    for wrong in (True, 4.0, "4", -4, None):
        with pytest.raises(ValueError, match="rows_per_chunk: wanted an integer that is not negative"):
            panels.from_bsr(S, wrong)
    with pytest.raises(ValueError, match="rows_per_chunk: wanted a positive number, got 0"):
        panels.from_bsr(S, 0)
    assert panels.from_bsr(S, np.int32(16)).chunks == A.chunks
    some = sources._rows(S, 2, 5)
    assert some.shape == (12, 48) and np.shares_memory(some.data, S.data)


# ------------------------------------------------------------------------------------------------- sums
@pytest.mark.parametrize(("count", "inner"), [(1, 0), (8, 0), (9, 2), (16, 2), (17, 3), (64, 8), (65, 9 + 2)])
def test_each_task_of_a_sum_adds_eight_parts_in_their_order(count: int, inner: int) -> None:
    parts = [TaskRef(("part", i)) for i in range(count)]
    made = base.tree_sum("name", ("name", 0, 3), parts, (np.dtype("f4"), np.dtype("f2")))
    assert len(made) == inner + 1 and list(made)[-1] == ("name", 0, 3)
    values: dict[Any, list[int]] = {("part", i): [i] for i in range(count)}
    for key, task in made.items():
        used = sorted(task.dependencies, key=lambda k: values[k][0])
        assert len(used) <= 8
        values[key] = [i for k in used for i in values[k]]
        assert task.kwargs["dtype"] == ("f2" if key == ("name", 0, 3) else "f4")
        if key != ("name", 0, 3):
            assert key[0] == "name-sum" and key[3:] == (0, 3)
    assert values["name", 0, 3] == list(range(count))


def test_sums_leave_their_parts_alone_and_have_the_order_of_the_parts() -> None:
    parts = [np.array([x], np.float32) for x in (1e8, 1, -1e8, 1)]
    kept = [x.copy() for x in parts]
    found = tasks.added(parts, np.dtype("f8"))
    assert found.dtype == np.float64 and found[0] == 1
    assert all((x == y).all() for x, y in zip(parts, kept, strict=True))
    chunks, bounds = [X[:12], X[12:48]], [(0, 12), (12, 48)]
    whole = tasks.product_of_chunks(S, chunks, bounds, False, np.dtype("f8"))
    np.testing.assert_allclose(whole, S.toarray() @ X)
    left = tasks.product_of_chunks(S, [X.T[:, :20], X.T[:, 20:40]], [(0, 20), (20, 40)], True, np.dtype("f8"))
    np.testing.assert_allclose(left, X.T[:, :20] @ S.toarray()[:20] + X.T[:, 20:40] @ S.toarray()[20:40])
    assert tasks.product_of_chunks(S, [X], [(0, 48)], False, np.dtype("f4")).dtype == np.float32


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "complex64"])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, -2])
def test_sums_know_their_dtype_shape_and_chunks(dtype: str, axis: int | None) -> None:
    M = bg.bsr_array((S.toarray() > 0.2).astype(dtype), blocksize=(4, 3))
    for matrix, made in ((M, panels.from_bsr(M, 16)), (M.T, panels.from_bsr(M, 16).T)):
        found, want = made.sum(axis), matrix.sum(axis=axis)
        assert found.dtype == want.dtype == found._meta.dtype and found.shape == np.shape(want)
        assert found.ndim == found._meta.ndim and found.compute().dtype == want.dtype
        np.testing.assert_array_equal(found.compute(), want)
    assert panels.from_bsr(M, 16).sum(1).chunks == ((16, 16, 16, 12),)
    assert panels.from_bsr(M, 16).sum(0).chunks == ((48,),) and panels.from_bsr(M, 16).T.sum(0).chunks == A.chunks[:1]
    for wrong in (2, -3, "0", 0.5):
        with pytest.raises(ValueError, match="axis: wanted None, 0 or 1, got "):
            A.sum(wrong)


# ------------------------------------------------------------------------------------------------- operators
@pytest.mark.parametrize("dtype", ["bool", "int32", "float32", "float64", "complex64"])
@pytest.mark.parametrize("number", [2, 2.5, 1j, True, np.float32(3), np.int64(2)], ids=repr)
def test_factors_promote_as_those_of_the_matrix_in_memory(dtype: str, number: Any) -> None:
    M = bg.bsr_array((4 * S.toarray()).astype(dtype), blocksize=(4, 3))
    P = panels.from_bsr(M, 16)
    for made, want in ((P * number, M * number), (number * P, M * number), (P / number, M / number)):
        assert made.dtype == want.dtype == made.compute().dtype
        np.testing.assert_array_equal(made.compute().toarray(), want.toarray())
    if dtype != "bool":
        for made, want in (
            (-P, -M),
            (P + P.astype("f8"), M + M.astype("f8")),
            (P - P.astype("f8"), M - M.astype("f8")),
        ):
            assert made.dtype == want.dtype
            np.testing.assert_array_equal(made.compute().toarray(), want.toarray())


def test_other_matrices_have_other_names_and_the_same_have_the_same() -> None:
    P = A
    x, y = X[:, 0], X[:, 1]
    calls = [
        lambda: P[0:16], lambda: P[16:32], lambda: P[:, 0:24], lambda: P[:, 24:48], lambda: P[0:32, 0:24],
        lambda: P.partitions[0], lambda: P.partitions[1], lambda: P.partitions[0:2], lambda: P.rechunk(20),
        lambda: P.rechunk(32), lambda: P.sum(), lambda: P.sum(0), lambda: P.sum(1), lambda: P.astype("f4"),
        lambda: P.astype("c8"), lambda: P * 2, lambda: P * 3, lambda: P / 2, lambda: -P, lambda: P + P, lambda: P - P,
        lambda: P.T, lambda: P.toarray(), lambda: P.map_panels(abs), lambda: P.map_panels(abs, dtype="f4"),
        lambda: P.map_panels(abs, blocksize=(2, 3)), lambda: P @ x, lambda: P @ y, lambda: P @ X, lambda: P.T @ P,
        lambda: panels.from_bsr(S, 20), lambda: panels.from_bsr(2 * S, 16), lambda: P + 2 * P, lambda: P.T @ (2 * P),
    ]  # fmt: skip
    names = [call().name for call in calls]
    assert len(set(names)) == len(names)
    assert names == [call().name for call in calls]


# ------------------------------------------------------------------------------------------------- cuts
@pytest.mark.parametrize(
    ("index", "chunks"),
    [
        (slice(0, 0), ((0,), (48,))),
        (slice(8, 4), ((0,), (48,))),
        (slice(4, 400), ((12, 16, 16, 12), (48,))),
        (slice(-12, None), ((12,), (48,))),
        (slice(16, 32), ((16,), (48,))),
        (slice(12, 36), ((4, 16, 4), (48,))),
        ((slice(None), slice(3, 9)), ((16, 16, 16, 12), (6,))),
        ((slice(8, 20, 1), slice(6, 6)), ((8, 4), (0,))),
    ],
    ids=str,
)
def test_slices_are_those_of_the_whole_matrix(index: Any, chunks: Any) -> None:
    made = A[index]
    assert made.chunks == chunks
    both = index if isinstance(index, tuple) else (index, slice(None))
    rows, columns = (slice(*x.indices(n)) for x, n in zip(both, (60, 48), strict=True))
    np.testing.assert_array_equal(made.compute().toarray(), S.toarray()[rows, columns])
    turned = A.T[both[::-1]]
    assert turned.chunks == chunks[::-1]
    np.testing.assert_array_equal(turned.compute().toarray(), S.toarray()[rows, columns].T)


def test_whole_panels_are_taken_as_they_are() -> None:
    """Neither a slice nor other panels copy what they need not cut."""
    kept = A.persist()
    whole = [kept.partitions[k].compute(optimize_graph=False) for k in range(4)]
    assert all(panel.shape[0] in (16, 12) for panel in whole)
    assert tasks.regrouped([S], [(0, 60)], 0) is S and tasks.regrouped([S], [(0, 48)], 1) is S
    assert tasks.regrouped([S], [(0, 56)], 0).shape == (56, 48) and tasks.regrouped([S], [(3, 48)], 1).shape == (60, 45)
    both = tasks.regrouped([S, S], [(56, 60), (0, 8)], 0)
    np.testing.assert_array_equal(both.toarray(), np.vstack([S.toarray()[56:], S.toarray()[:8]]))
    names = [str(task.func.__name__) for key, task in A[16:40].dask.items() if key[0].startswith("bsr-getitem")]
    assert names == ["given", "cut"]
    sparse = tasks.plus_sparse_product(None, S, S.T, (0, 48))
    np.testing.assert_allclose(sparse.toarray(), S.toarray() @ S.toarray().T)
    more = tasks.plus_sparse_product(sparse, S, S.T[3:9], (3, 9))
    np.testing.assert_allclose(more.toarray(), sparse.toarray() + S.toarray()[:, 3:9] @ S.toarray().T[3:9])


@pytest.mark.parametrize(
    ("chunks", "sides"),
    [(20, (20, 20, 20)), (32, (32, 28)), ({0: 24}, (24, 24, 12)), ({-2: 24}, (24, 24, 12)), (-1, (60,)),
     ({0: -1}, (60,)), ({1: -1}, (16, 16, 16, 12)), ({}, (16, 16, 16, 12)), (((4, 56), -1), (4, 56)),
     ({0: (4, 0, 56)}, (4, 0, 56)), (100, (60,))],
    ids=str,
)  # fmt: skip
def test_other_panels_hold_the_same_matrix(chunks: Any, sides: tuple[int, ...]) -> None:
    made = A.rechunk(chunks)
    assert made.chunks == (sides, (48,))
    np.testing.assert_array_equal(made.compute().toarray(), S.toarray())
    for k, (start, stop) in enumerate(tasks.bounds_of(sides)):
        np.testing.assert_array_equal(made.partitions[k].compute().toarray(), S.toarray()[start:stop])


def test_panels_are_taken_by_number() -> None:
    for index, want in ((-1, [3]), (np.int64(2), [2]), (slice(1, 3), [1, 2]), (slice(None, None, -2), [3, 1])):
        made = A.partitions[index]
        assert made.chunks[0] == tuple(A.chunks[0][k] for k in want)
        rows = [S.toarray()[16 * k : 16 * k + 16] for k in want]
        np.testing.assert_array_equal(made.compute().toarray(), np.vstack(rows))
    for wrong in (4, -5, 1.0, None):
        with pytest.raises(IndexError, match="partitions: wanted the number of a panel below 4, or a slice, got "):
            A.partitions[wrong]


# ------------------------------------------------------------------------------------------------- products
def test_products_know_their_dtype_shape_and_chunks() -> None:
    Y = np.ones((60, 5), np.complex64)
    for made, chunks in (
        (A @ X.astype("f4"), ((16, 16, 16, 12), (5,))),
        (A @ X[:, 0], ((16, 16, 16, 12),)),
        (Y.T @ A, ((5,), (48,))),
        (Y[:, 0] @ A, ((48,),)),
        (A.T @ Y, ((48,), (5,))),
        (X.T @ A.T, ((5,), (16, 16, 16, 12))),
        (A @ da.from_array(X, chunks=(12, 2)), ((16, 16, 16, 12), (2, 2, 1))),
        (da.from_array(Y.T, chunks=(2, 16)) @ A, ((2, 2, 1), (48,))),
    ):
        assert made.chunks == chunks and made._meta.ndim == made.ndim == len(chunks)
        assert made._meta.dtype == made.dtype == made.compute().dtype and type(made._meta) is np.ndarray
    B = bg.random(48, 40, blocksize=(3, 5), density=0.4, seed=1)
    PB = panels.from_bsr(B, 9)
    for made, chunks, blocksize in (
        (A @ PB, ((16, 16, 16, 12), (40,)), (4, 5)),
        (A @ B, ((16, 16, 16, 12), (40,)), (4, 5)),
        (S @ PB, ((60,), (40,)), (4, 5)),
        (PB.T @ A.T, ((40,), (16, 16, 16, 12)), (5, 4)),
        (A.T @ A, ((48,), (48,)), (3, 3)),
        (PB.T.rechunk({1: -1}) @ S.T, ((40,), (60,)), (5, 4)),
    ):
        found = made.compute()
        assert made.chunks == chunks and made.blocksize == found.blocksize == blocksize and made.dtype == found.dtype
        assert found.shape == made.shape


def test_chunks_of_unknown_sizes_along_one_axis_are_named() -> None:
    whole = da.from_array(X, chunks=(48, 5))
    unknown = whole[da.from_array(X[:, 0], chunks=48) > -9]
    assert np.isnan(unknown.shape[0]) and unknown.shape[1] == 5
    with pytest.raises(ValueError, match=r"B: has chunks of unknown sizes; B.compute_chunk_sizes\(\) finds them"):
        A @ unknown


class Foreign:
    """An array of another library, which offers its memory by DLPack."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_arrays_of_other_libraries_are_operands() -> None:
    for x in (X.copy(), X[:, 0].copy()):
        np.testing.assert_allclose((A @ Foreign(x)).compute(), S.toarray() @ x)
        np.testing.assert_allclose((Foreign(x.T.copy()) @ A.T).compute(), x.T @ S.toarray().T)


def test_axes_of_tensordot() -> None:
    D = S.toarray()
    for axes, a, b, want in (
        (((1,), (0,)), S, X, D @ X),
        (((-1,), (-2,)), S, X, D @ X),
        (((0,), (0,)), S, D, D.T @ D),
        (((1,), (1,)), S, D, D @ D.T),
        (((0,), (1,)), X, S, X.T @ D.T),
        (((0,), (0,)), D[:, 0], S, D[:, 0] @ D),
        (((1,), (0,)), S, X[:, 0], D @ X[:, 0]),
    ):
        np.testing.assert_allclose(tasks._tensordot(a, b, axes), want)
    for axes in (((0, 1), (0, 1)), ((), ())):
        with pytest.raises(NotImplementedError, match="wanted one axis of each operand, got axes="):
            tasks._tensordot(S, S, axes)


def test_operands_in_memory_are_cut_as_the_panels_are() -> None:
    x = np.arange(12.0).reshape(6, 2)
    made = products._in_graph(x, 0, (2, 4))
    assert made.chunks == ((2, 4), (2,)) and made._meta.shape == (0, 0)
    np.testing.assert_array_equal(made.compute(), x)
    made = products._in_graph(x, 1, (1, 1))
    assert made.chunks == ((6,), (1, 1))
    np.testing.assert_array_equal(made.compute(), x)
    assert products._in_graph(x, 1, (1, 1)).name == made.name != products._in_graph(x, 0, (6,)).name


# ------------------------------------------------------------------------------------------------- files
def test_a_list_has_sizes_kinds_and_a_number_of_its_own(tmp_path: Path) -> None:
    made = panels.to_panels(S.astype("f4"), tmp_path / "one", rows_per_chunk=16)
    about = json.loads((tmp_path / "one" / "panels.json").read_text())
    assert about.pop("id") != json.loads(_second(tmp_path))["id"]
    assert about == {
        "kind": "bsrgemm panels", "version": 1, "format": "npz", "rows": [16, 16, 16, 12], "columns": 48,
        "blocksize": [4, 3], "dtype": "float32",
    }  # fmt: skip
    assert made.dtype == np.float32 and made.device == "cpu" and made.chunks == A.chunks
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == [*(f"panel-{k:06d}.npz" for k in range(4)), "panels.json"]


def _second(tmp_path: Path) -> str:
    panels.to_panels(A.astype("f4"), tmp_path / "two")
    return (tmp_path / "two" / "panels.json").read_text()


@pytest.mark.parametrize(
    "change", [{"rows": [1, True]}, {"rows": [1.0, 1]}, {"columns": True}, {"columns": 2.0}], ids=str
)
def test_sizes_in_a_list_are_integers(tmp_path: Path, change: dict[str, Any]) -> None:
    panels.to_panels(bg.eye(2, blocksize=(1, 1)), tmp_path, rows_per_chunk=1)
    path = tmp_path / "panels.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="is damaged: rows and columns are not integers"):
        panels.from_panels(tmp_path)


def test_a_panel_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = sources.NpzFolder(str(tmp_path))
    with pytest.raises(TypeError):
        folder.write(0, "no matrix")
    assert not list(tmp_path.iterdir())
    folder.write(7, S)
    assert [path.name for path in tmp_path.iterdir()] == ["panel-000007.npz"]
    plain = (tmp_path / "panel-000007.npz").stat().st_size
    sources.NpzFolder(str(tmp_path), compressed=True).write(7, S * 0 + S)
    assert (tmp_path / "panel-000007.npz").stat().st_size < plain
    named = sources.NpzFolder(str(tmp_path), files=("a.npz", "b.npz"))
    assert named.name_of(1) == "b.npz"


def test_a_folder_that_holds_anything_of_panels_is_not_written_to(tmp_path: Path) -> None:
    for name in ("panels.json", "panels.json.part", "zarr.json", "other.npz"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / "notes.txt").touch()
        sources.NpzFolder(str(folder)).make()  # other files do not matter
        assert (folder / "panels.json.part").exists()
        (folder / "panels.json.part").unlink()
        (folder / name).touch()
        with pytest.raises(FileExistsError, match="holds panels already; wanted an empty or a new one"):
            sources.NpzFolder(str(folder)).make()
    deep = tmp_path / "a" / "b"
    sources.NpzFolder(str(deep)).make()
    assert deep.is_dir()


def test_the_number_of_a_panel_has_six_digits_at_least() -> None:
    assert sources.ZarrGroup("x").name_of(1_234_567) == "x/panel-1234567"
    assert sources.ZarrGroup("x").name_of(3) == "x/panel-000003"
    assert sources.NpzFolder("x").name_of(3).endswith("panel-000003.npz")


@pytest.mark.parametrize("rows", [48, 24, 18, 12, 3])
def test_a_matrix_in_memory_is_cut_into_as_many_panels_as_the_other_has(rows: int) -> None:
    B = bg.random(48, 40, blocksize=(3, 5), density=0.4, seed=1)
    P = panels.from_bsr(B, rows)
    assert P._layout.count == -(-48 // rows)
    np.testing.assert_allclose((S @ P).compute().toarray(), (S @ B).toarray(), atol=1e-12)


@pytest.mark.parametrize(
    ("sides", "text"),
    [
        ((16,), "(16,)"),
        ((1, 2, 3, 4, 5, 6), "(1, 2, 3, 4, 5, 6)"),
        ((1, 2, 3, 4, 5, 6, 7), "(1, 2, 3, 4, ... 7 in all)"),
    ],
)
def test_messages_leave_out_the_middle_of_many_panels(sides: tuple[int, ...], text: str) -> None:
    assert tasks.shortened(sides) == text
