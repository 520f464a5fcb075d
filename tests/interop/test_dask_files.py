"""Panels on disk: what is written is read again, and what is damaged or half written is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse

import bsrgemm as bg

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from bsrgemm.interop import dask as panels  # noqa: E402
from bsrgemm.interop.dask import tasks  # noqa: E402

from .. import fake_cupy  # noqa: E402

pytestmark = pytest.mark.fake

S = bg.random(60, 48, blocksize=(4, 3), density=0.4, seed=0)
X = np.random.default_rng(2).standard_normal((48, 5))
D = S.toarray()
FORMATS = ["npz", "zarr"]


@pytest.fixture(autouse=True)
def _in_this_thread() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> str:
    if request.param == "zarr":
        pytest.importorskip("zarr")
    return str(request.param)


@pytest.mark.parametrize("compressed", [False, True])
def test_panels_that_were_written_are_read(tmp_path: Path, format: str, compressed: bool) -> None:
    folder = tmp_path / "a" / "b"
    P = panels.to_panels(S, folder, rows_per_chunk=16, format=format, compressed=compressed)
    assert P.chunks == ((16, 16, 16, 12), (48,))
    again = panels.from_panels(folder)
    assert again.name == P.name and again.dtype == S.dtype and again.blocksize == S.blocksize
    np.testing.assert_array_equal(again.compute().toarray(), D)
    np.testing.assert_allclose((again @ X).compute(), D @ X)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, bool, np.int8, np.complex64, np.longdouble], ids=str)
def test_every_dtype_survives(tmp_path: Path, format: str, dtype: Any) -> None:
    if format == "zarr" and dtype is np.longdouble:
        with pytest.raises(ValueError, match=r"format: zarr cannot hold .*; format='npz' can"):
            panels.to_panels(S.astype(dtype), tmp_path, rows_per_chunk=60, format=format)
        return
    s = S.sign().astype(dtype)
    found = panels.to_panels(s, tmp_path, rows_per_chunk=32, format=format).compute()
    assert found.dtype == s.dtype
    np.testing.assert_array_equal(found.toarray(), s.toarray())


def test_a_matrix_without_rows_or_blocks_survives(tmp_path: Path, format: str) -> None:
    for number, shape in enumerate(((0, 6), (6, 6), (6, 0))):
        empty = bg.bsr_array(shape, dtype=np.float32, blocksize=(2, 3))
        found = panels.to_panels(empty, tmp_path / str(number), rows_per_chunk=4, format=format).compute()
        assert found.shape == shape and found.nnz == 0 and found.blocksize == (2, 3)


def test_a_matrix_is_written_panel_by_panel(tmp_path: Path, format: str) -> None:
    """No more than one panel is alive at a time."""
    alive: list[int] = []

    class Counted(bg.bsr_array):
        def __del__(self) -> None:
            if getattr(self, "counted", False):
                alive.pop()

    most = []

    def panel(i: int) -> Any:
        made = Counted(S[:16])
        made.counted = True
        alive.append(i)
        most.append(len(alive))
        return made

    made = [dask.delayed(panel)(i) for i in range(6)]
    P = panels.from_delayed(made, [16] * 6, 48, blocksize=(4, 3), dtype=float)
    panels.to_panels(P, tmp_path, format=format)
    assert len(most) == 6 and max(most) == 1


@pytest.mark.parametrize(
    ("name", "most", "loads"),
    [
        *((name, 1, 4) for name in ("A @ X", "X in chunks", "A.T @ Y", "A.T @ (A @ X)", "A.T @ A", "sum")),
        ("A @ (A.T @ Y)", 4, 4),
        ("A @ (A.T @ Y).persist()", 1, 8),
    ],
)
def test_panels_are_dropped_as_soon_as_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int, loads: int
) -> None:
    """As docs/dask.md says: only a panel that the graph needs again stays."""
    load, alive, counts = tasks.loaded, set(), []

    def counted(**options: Any) -> Any:
        panel = load(**options)
        alive.add(options["number"])
        weakref.finalize(panel, alive.discard, options["number"])
        counts.append(len(alive))
        return panel

    panels.to_panels(S, tmp_path, rows_per_chunk=16)
    monkeypatch.setattr(tasks, "loaded", counted)
    A, Y = panels.from_panels(tmp_path), np.ones((60, 2))
    make: dict[str, Callable[[], Any]] = {
        "A @ X": lambda: A @ X,
        "X in chunks": lambda: A @ da.from_array(X, chunks=(48, 1)),
        "A.T @ Y": lambda: A.T @ Y,
        "A.T @ (A @ X)": lambda: A.T @ (A @ X),
        "A.T @ A": lambda: A.T @ A,
        "sum": lambda: A.sum(),
        "A @ (A.T @ Y)": lambda: A @ (A.T @ Y),
        "A @ (A.T @ Y).persist()": lambda: A @ (A.T @ Y).persist(),
    }
    make[name]().compute()
    assert (max(counts), len(counts)) == (most, loads)


def test_products_of_panels_are_written_too(tmp_path: Path, format: str) -> None:
    P = panels.from_bsr(S, 16)
    square = panels.to_panels(2 * (P @ bg.eye(48, blocksize=(3, 3))), tmp_path, format=format)
    np.testing.assert_allclose(square.compute().toarray(), 2 * D)


def test_files_of_save_npz_are_panels_in_the_order_of_their_names(tmp_path: Path) -> None:
    for i, (start, stop) in enumerate([(0, 8), (8, 48), (48, 60)]):
        bg.save_npz(tmp_path / f"rows-{i}", S[start:stop].astype(ml_dtypes.bfloat16), compressed=i == 1)
    P = panels.from_panels(str(tmp_path))
    assert P.chunks == ((8, 40, 12), (48,)) and P.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(P.compute().toarray(), S.astype(ml_dtypes.bfloat16).toarray())


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    bg.save_npz(tmp_path / "rows", S)
    before = panels.from_panels(tmp_path).name
    bg.save_npz(tmp_path / "rows", 2 * S)
    os.utime(tmp_path / "rows.npz", ns=(1, 1))
    assert panels.from_panels(tmp_path).name != before


def test_panels_that_are_written_anew_are_not_taken_for_the_old_ones(tmp_path: Path, format: str) -> None:
    names = set()
    for factor in (1, 2):
        P = panels.to_panels(factor * S, tmp_path / "panels", rows_per_chunk=16, format=format)
        np.testing.assert_array_equal(P.compute().toarray(), factor * D)
        names.add(P.name)
        shutil.rmtree(tmp_path / "panels")
    assert len(names) == 2


def test_panels_are_read_to_the_device_that_was_asked_for(tmp_path: Path, format: str) -> None:
    fake = fake_cupy.backend()
    there = panels.to_panels(panels.from_bsr(S.to_device("cuda"), 16), tmp_path, format=format)
    assert there.device == "cuda"
    product = there[:16] @ fake.from_host(X)
    np.testing.assert_allclose(fake.to_host(product.compute()), D[:16] @ X)
    np.testing.assert_array_equal(panels.from_panels(tmp_path).compute().toarray(), D)


# ------------------------------------------------------------------------------------------ bad input
REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "format": (lambda f: panels.to_panels(S, f, rows_per_chunk=4, format="csv"), ValueError, "format: wanted one of"),
    "rows missing": (lambda f: panels.to_panels(S, f), ValueError, "rows_per_chunk: wanted the rows of a panel"),
    "rows of panels": (
        lambda f: panels.to_panels(panels.from_bsr(S, 4), f, rows_per_chunk=8), ValueError, "A.rechunk",
    ),
    "dense": (lambda f: panels.to_panels(D, f), TypeError, "A: wanted a PanelArray"),
    "columns": (lambda f: panels.to_panels(panels.from_bsr(S, 4).T, f), ValueError, "A: is cut along its columns"),
    "nothing there": (lambda f: panels.from_panels(f / "x"), FileNotFoundError, "holds no panels"),
    "bytes": (lambda f: panels.from_panels(b"x"), TypeError, "folder: wanted a str or a path"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_the_words_for_it(name: str, tmp_path: Path) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_url_holds_zarr_and_no_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zarr")
    monkeypatch.chdir(tmp_path)
    url = f"memory://{tmp_path.name}"
    np.testing.assert_array_equal(panels.to_panels(S, url, rows_per_chunk=20, format="zarr").compute().toarray(), D)
    with pytest.raises(ValueError, match=r"folder: wanted a folder for format='npz', got 'memory://.*format='zarr'"):
        panels.to_panels(S, url, rows_per_chunk=20)
    assert not list(tmp_path.iterdir())


def test_panels_are_not_overwritten(tmp_path: Path, format: str) -> None:
    panels.to_panels(S, tmp_path, rows_per_chunk=16, format=format)
    for other in FORMATS:
        with pytest.raises(FileExistsError, match="holds panels"):
            panels.to_panels(S, tmp_path, rows_per_chunk=16, format=other)
    np.testing.assert_array_equal(panels.from_panels(tmp_path).compute().toarray(), D)


def test_panels_whose_writing_was_interrupted_are_refused(tmp_path: Path, format: str) -> None:
    def fails() -> Any:
        raise RuntimeError("stopped")

    made = [dask.delayed(lambda: S)(), dask.delayed(fails)()]
    P = panels.from_delayed(made, [60, 60], 48, blocksize=(4, 3), dtype=float)
    with pytest.raises(RuntimeError, match="stopped"):
        panels.to_panels(P, tmp_path, format=format)
    with pytest.raises(FileNotFoundError, match="to_panels was interrupted"):
        panels.from_panels(tmp_path)
    with pytest.raises(FileExistsError):
        panels.to_panels(S, tmp_path, rows_per_chunk=60, format=format)


def test_a_panel_that_is_damaged_or_another_one_is_named(tmp_path: Path) -> None:
    P = panels.to_panels(S, tmp_path, rows_per_chunk=16)
    path = tmp_path / "panel-000001.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"panel-000001.npz.*truncated"):
        P.compute()
    for other, words in ((S[:12], "shape"), (S[:16].astype("f4"), "dtype"), (S[:16].tobsr((2, 3)), "block size")):
        bg.save_npz(path, other)
        with pytest.raises(ValueError, match=f"panel-000001.npz.*panel 1: wanted {words}"):
            P.compute()
    path.unlink()
    with pytest.raises(FileNotFoundError, match="panel-000001"):
        P.compute()
    np.testing.assert_array_equal(P[:16].compute().toarray(), D[:16])  # other panels are as good as before


def test_a_damaged_zarr_panel_is_named(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    P = panels.to_panels(S, tmp_path, rows_per_chunk=16, format="zarr")
    zarr.open_group(tmp_path, mode="a")["panel-000001"]["indices"][0] = 10**6
    with pytest.raises(ValueError, match=r"panel-000001.*holds no valid matrix"):
        P.compute()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"kind": "other"},
        {"rows": []},
        {"rows": [16, 16, 16, 13]},
        {"rows": [-16, 76]},
        {"rows": [16.0, 44]},
        {"rows": 60},
        {"columns": 47},
        {"columns": "48"},
        {"blocksize": [4, 0]},
        {"blocksize": [4]},
        {"dtype": "object"},
        {"dtype": "none of them"},
        {"dtype": None},
    ],
    ids=str,
)
def test_a_damaged_list_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    panels.to_panels(S, tmp_path, rows_per_chunk=16)
    path = tmp_path / "panels.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"the list of panels of .* is damaged"):
        panels.from_panels(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_list_that_is_no_list_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "panels.json").write_text(text)
    with pytest.raises(ValueError, match="is damaged"):
        panels.from_panels(tmp_path)


def test_files_of_different_kinds_are_refused_by_name(tmp_path: Path) -> None:
    bg.save_npz(tmp_path / "a", S)
    for other in (S.astype("f4"), S.tobsr((2, 3)), S[:, :45]):
        bg.save_npz(tmp_path / "b", other)
        with pytest.raises(ValueError, match=r"b\.npz' has \(columns, block size, dtype\)"):
            panels.from_panels(tmp_path)
    (tmp_path / "b.npz").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"b\.npz' holds no BSR matrix"):
        panels.from_panels(tmp_path)
    scipy.sparse.save_npz(tmp_path / "b", S.tocsr())
    with pytest.raises(ValueError, match=r"b\.npz' holds no BSR matrix"):
        panels.from_panels(tmp_path)


def test_zarr_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match="pip install zarr"):
        panels.to_panels(S, tmp_path, rows_per_chunk=16, format="zarr")
    assert not list(tmp_path.iterdir())
    panels.to_panels(S, tmp_path, rows_per_chunk=16).compute()
