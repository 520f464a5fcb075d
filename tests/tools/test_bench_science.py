"""bench/run/spmv.py, spgemm.py and sddmm.py on tiny matrices: what is counted, checked, shown and written."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import bsrgemm as bg
from bsrgemm._backend import registry
from bsrgemm._benchmark import internals, machine, runner, timing
from bsrgemm._benchmark import table as table_module
from bsrgemm._benchmark.cases import small_blocks
from bsrgemm._benchmark.checks import products as checks
from bsrgemm._benchmark.measure import sddmm, spgemm, spmv
from bsrgemm._benchmark.peers import products as product_peers
from bsrgemm._products.engine import ENGINES

#: Script -> its sections; "all" of them are run
SECTIONS = {
    "spmv": ["table", "blocks", "columns", "uneven"],
    "spgemm": ["blocks", "mesh"],
    "sddmm": ["table"],
}
#: Lines of a section where nothing fails
LINES = {
    "spmv_table": 12, "spmv_blocks": 23, "spmv_columns": 9, "spmv_uneven": 4, "spgemm_blocks": 4, "spgemm_mesh": 1,
    "sddmm_table": 6,
}  # fmt: skip
SECONDS = 1e-3


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """The three scripts and what they share, without a GPU and much smaller."""
    both = ("cpu", "cuda")
    for module, name, value in (
        (machine, "has_gpu", lambda: False),
        (table_module, "RESULTS", tmp_path / "results"),
        (timing, "repeats_for", lambda once: 1),
        (timing, "ROUNDS", dict.fromkeys(both, (1, 1))),
        (spmv, "COPIED", dict.fromkeys(both, 1 << 16)),
        (spmv, "ROWS", dict.fromkeys(both, 120)),
        (spgemm, "BLOCKS", dict.fromkeys(both, ((512, 128, 400.0), (512, 64, None)))),
        (spgemm, "MESHES", dict.fromkeys(both, (2,))),
        (sddmm, "SIDES", {device: {"float16": 256, "tf32": 128, "float64": 128} for device in both}),
        (sddmm, "BLOCKS", {"float16": {128: 0.8}, "tf32": {32: None}, "float64": {32: None}}),
    ):
        monkeypatch.setattr(module, name, value)
    return types.SimpleNamespace(cases=small_blocks, checks=checks, spmv=spmv, spgemm=spgemm, sddmm=sddmm)


@pytest.fixture
def as_gpu(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts as on a GPU, with NumPy instead of CuPy; everything takes a millisecond."""

    def dense(A: Any, B: Any, out: Any, *_: Any) -> Callable[[], Any]:
        def call() -> Any:
            out[...] = A.astype(np.float64) @ B.astype(np.float64)
            return out

        return call

    def missing(*_: Any) -> Any:
        raise RuntimeError("out of order")

    for module, name, value in (
        (machine, "has_gpu", lambda: True),
        (machine, "describe", lambda: {"date": "2031-05-04"}),
        (runner.Bench, "xp", np),
        (runner.Bench, "release", lambda self: None),
        (timing.Clock, "samples", lambda self, call: [SECONDS]),
        (product_peers, "cusparse_bsrmv", missing),
        (product_peers, "cusparse_bsr", missing),
        (product_peers, "_warp", product_peers._warp.__wrapped__),
        (product_peers, "dense_cublas", dense),
        (internals.registry, "by_name", lambda _: registry.host()),
        (sddmm, "dense_cublas", dense),
        (sddmm, "torch_sampled", missing),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "warp", None)  # not installed
    return scripts


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    found = json.loads((folder / f"{name}.json").read_text())
    assert "date" in found["machine"]
    return found["rows"]


# ----------------------------------------------------------------------------------------- scripts
@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_runs_on_the_cpu_and_is_written(
    scripts: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    getattr(scripts, name).main(["all", "--out", str(tmp_path / "new" / "folder")])
    said = capsys.readouterr().out
    assert "on the CPU" in said and "smaller" in said and "WRONG" not in said
    for section in SECTIONS[name]:
        rows = rows_of(tmp_path / "new" / "folder", f"{name}_{section}_cpu")
        assert len(rows) == LINES[f"{name}_{section}"]
        for row in rows:
            assert row["seconds"] > 0 and row["target"] is None and row["reached"] is None
            assert all(row.get("peers", {}).values())
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("name", SECTIONS)
def test_on_a_gpu_targets_are_judged_and_peers_may_fail(
    as_gpu: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    getattr(as_gpu, name).main(["all", "--out", str(tmp_path)])
    assert "out of order" in capsys.readouterr().out or name == "spgemm"
    for section in SECTIONS[name]:
        rows = rows_of(tmp_path, f"{name}_{section}_cuda")
        assert len(rows) == LINES[f"{name}_{section}"]
        assert all(row["seconds"] == SECONDS for row in rows)
        judged = [row for row in rows if row["target"] is not None]
        assert judged and all(isinstance(row["reached"], bool) for row in judged)
        assert all(row["reached"] is None for row in rows if row["target"] is None)


def test_shares_and_ratios_follow_from_the_times(as_gpu: Any, tmp_path: Path) -> None:
    as_gpu.spmv.main(["table", "--out", str(tmp_path)])
    copied = 2 * (1 << 16) / SECONDS
    rows = rows_of(tmp_path, "spmv_table_cuda")
    assert [(row["block"][0], row["dtype"], row["target"]) for row in rows[:2] + rows[-1:]] == [
        (2, "float64", 0.9), (3, "float64", 0.94), (8, "float32", 1.0)
    ]  # fmt: skip
    for row in rows:
        size, b = np.dtype(row["dtype"]).itemsize, row["block"][0]
        assert row["blocks"] == 120 * 27
        assert row["bytes"] == 120 * 27 * (b * b * size + 4) + 4 * 121 + 2 * 120 * b * size
        assert row["share"] == pytest.approx(row["bytes"] / SECONDS / copied)
        assert row["reached"] == (row["share"] >= row["target"])
        assert set(row["peers"]) == {"cuSPARSE BSR", "warp", *(["cupyx csr"] if b in (3, 4, 6) else [])}
        assert row["peers"]["cuSPARSE BSR"] is None
        assert row["peers"].get("cupyx csr", row["share"]) == pytest.approx(row["share"])
    as_gpu.spgemm.main(["blocks", "--out", str(tmp_path)])
    for row in rows_of(tmp_path, "spgemm_blocks_cuda"):
        b, side = row["block"][0], 512 // row["block"][0]
        each = round(0.22 * side)
        assert row["pairs"] == side * each * each and row["flops"] == 2 * row["pairs"] * b**3
        assert row["tflops"] == pytest.approx(row["flops"] / SECONDS / 1e12)
        assert row["target"] == (400 if b == 128 and row["what"] == "products alone" else None)
    as_gpu.sddmm.main(["--out", str(tmp_path)])
    first = rows_of(tmp_path, "sddmm_table_cuda")[0]
    assert first["flops"] == 2 * 2 * 128 * 128 * 256  # two block rows, one block each
    assert first["ratio"] == pytest.approx(first["flops"] / (2 * 256**3)) and first["reached"] is False


def test_an_ms_target_is_a_most(as_gpu: Any, tmp_path: Path) -> None:
    as_gpu.spmv.main(["columns", "--out", str(tmp_path)])
    rows = rows_of(tmp_path, "spmv_columns_cuda")
    assert {(row["block"][0], row["dtype"]): (row["target"], row["reached"]) for row in rows} == {
        (3, "float64"): (0.43, False), (4, "float64"): (0.63, False), (6, "float64"): (1.06, True),
        (8, "float64"): (None, None), (16, "float64"): (None, None), (32, "float64"): (None, None),
        (64, "float64"): (None, None), (3, "float32"): (0.27, False), (16, "float32"): (None, None),
    }  # fmt: skip
    assert all(row["flops"] == 2 * row["rows"] * 27 * row["block"][0] ** 2 * 16 for row in rows)
    assert [row["rows"] for row in rows] == [120, 120, 120, 120, 30, 27, 27, 120, 30]


def test_a_quick_run_leaves_the_results_alone(scripts: Any, tmp_path: Path) -> None:
    scripts.spmv.main(["--quick", "--no-peers", "--json", str(tmp_path / "all.json")])
    found = json.loads((tmp_path / "all.json").read_text())["table"]
    assert [row["block"][0] for row in found] == [3, 8, 3, 8] and all(row["peers"] == {} for row in found)
    assert not (tmp_path / "results").exists()


def test_the_blocks_are_drawn(scripts: Any, tmp_path: Path) -> None:
    scripts.spmv.main(["blocks", "--quick", "--out", str(tmp_path), "--plot", str(tmp_path / "drawn")])
    png, svg = (tmp_path / "drawn" / f"spmv_blocks.{kind}" for kind in ("png", "svg"))
    assert png.read_bytes().startswith(b"\x89PNG") and "13 x 11" in svg.read_text()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_missing_gpu_is_told(scripts: Any, name: str) -> None:
    with pytest.raises(SystemExit, match="--device cuda: there is no GPU"):
        getattr(scripts, name).main(["--device", "cuda"])


# ------------------------------------------------------------------------------------ wrong results
def _spoil_products(monkeypatch: pytest.MonkeyPatch) -> None:
    product, sampled, engine = bg.matmul, bg.sddmm, ENGINES.of(registry.host())
    pairs, blocks = engine.pair_products, engine.multiply_sparse

    def spoiled(value: Any) -> Any:
        data = value.data if isinstance(value, bg.bsr_array) else value
        data[(0,) * data.ndim] += 3
        return value

    monkeypatch.setattr(bg, "matmul", lambda *a, **k: spoiled(product(*a, **k)))
    monkeypatch.setattr(bg, "sddmm", lambda *a, **k: spoiled(sampled(*a, **k)))
    monkeypatch.setattr(engine, "pair_products", lambda *a: spoiled(pairs(*a)))

    def multiply(*a: Any) -> Any:
        found = blocks(*a)
        if found.data.dtype == np.float64:
            spoiled(found.data)
        return found

    monkeypatch.setattr(engine, "multiply_sparse", multiply)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_wrong_result_is_shown_and_not_timed(
    scripts: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil_products(monkeypatch)
    getattr(scripts, name).main(["all", "--out", str(tmp_path), "--no-peers"])
    said = capsys.readouterr().out
    for section in SECTIONS[name]:
        rows = rows_of(tmp_path, f"{name}_{section}_cpu")
        assert len(rows) == LINES[f"{name}_{section}"]
        for row in rows:
            assert row["wrong"] and row["deviation"] > 0.01 and "seconds" not in row and row["what"]
    assert said.count("WRONG: off by") == sum(LINES[f"{name}_{section}"] for section in SECTIONS[name])


def test_nan_is_wrong(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(A: Any, x: Any, out: Any) -> Any:
        out[...] = np.nan
        return out

    monkeypatch.setattr(bg, "matmul", nothing)
    scripts.spmv.main(["columns", "--out", str(tmp_path), "--no-peers"])
    assert all(row["wrong"] for row in rows_of(tmp_path, "spmv_columns_cpu"))


def test_what_raises_has_a_line_and_its_reason(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(bg, "sddmm", fails)
    monkeypatch.setattr(scripts.spmv, "banded_matrix", fails)
    scripts.sddmm.main(["--out", str(tmp_path)])
    scripts.spmv.main(["uneven", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "bsrgemm: MemoryError: no room" in said and "bench: MemoryError: no room" in said
    for name in ("sddmm_table", "spmv_uneven"):
        rows = rows_of(tmp_path, f"{name}_cpu")
        assert len(rows) == LINES[name] and all(row["failed"] for row in rows)


def test_a_wrong_peer_is_not_timed(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.spmv, "as_scipy", lambda A: 2 * scripts.cases.as_scipy(A))
    scripts.spmv.main(["columns", "--out", str(tmp_path)])
    assert "scipy bsr: ValueError: wrong result: off by" in capsys.readouterr().out
    for row in rows_of(tmp_path, "spmv_columns_cpu"):
        assert row["peers"]["scipy bsr"] is None and row["peers"]["scipy csr"] > 0


# -------------------------------------------------------------------------------------------- warp
def peers_of(scripts: Any, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of A @ x and of A @ A."""
    scripts.spmv.main(["table", "--out", str(folder)])
    scripts.spgemm.main(["mesh", "--out", str(folder)])
    return rows_of(folder, "spmv_table_cuda"), rows_of(folder, "spgemm_mesh_cuda")


def test_warp_is_a_dash_where_it_is_not_installed(
    as_gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors, meshes = peers_of(as_gpu, tmp_path)
    assert all(row["peers"]["warp"] is None for row in vectors + meshes)
    assert all(row["ratio"] == 1 for row in meshes)  # of cupyx
    said = capsys.readouterr().out
    assert said.count("  - warp: ModuleNotFoundError") == 2 and "warp     -" in said


@pytest.mark.parametrize("scale", [1, 2])
def test_warp_is_timed_where_it_is_right(
    as_gpu: Any, scale: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def vector(A: Any, x: Any, out: Any) -> Callable[[], Any]:
        return lambda: np.multiply(scale, as_gpu.cases.as_scipy(A) @ x, out=out)

    monkeypatch.setattr(product_peers, "warp_bsr", vector)
    monkeypatch.setattr(product_peers, "warp_bsr_bsr", lambda A, B: lambda: {"theirs": scale * (A @ B)})
    monkeypatch.setattr(product_peers, "from_warp", lambda C: C["theirs"])
    vectors, meshes = peers_of(as_gpu, tmp_path)
    for row in vectors:
        assert row["peers"]["warp"] == (pytest.approx(row["share"]) if scale == 1 else None)
    assert [row["peers"]["warp"] for row in meshes] == [SECONDS if scale == 1 else None]
    assert ("warp: ValueError: wrong result" in capsys.readouterr().out) == (scale == 2)


def test_warp_has_its_fastest_tile_size(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {-1: 3.0, 32: 1.0, 64: 2.0, 128: 4.0}
    monkeypatch.setattr(product_peers, "_on_current_stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(product_peers, "time_gpu", lambda call, _, idle: taken[call()])
    assert product_peers._best_tile("cuda:0", lambda tile: tile)() == 32
    assert product_peers._best_tile("cpu", lambda tile: tile)() == -1


@pytest.mark.parametrize("block", [(1, 1), (3, 3), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_warp_multiplies_in_our_memory(scripts: Any, block: tuple[int, int], dtype: str) -> None:
    pytest.importorskip("warp", reason="warp-lang, of the extra 'long', is not installed")
    A = scripts.cases.banded_matrix(np, np.resize([3, 0, 7], 12), block, dtype)
    B = scripts.cases.banded_matrix(np, np.resize([2, 5], 12), block[::-1], dtype)
    rng, most = np.random.default_rng(0), 50 * np.finfo(dtype).eps
    x, out = rng.standard_normal(A.shape[1]).astype(dtype), np.full(A.shape[0], np.nan, dtype)
    call = product_peers.warp_bsr(A, x, out)
    assert call() is out and scripts.checks.vector_deviation(A, x, out) < most
    A.data[0] *= 2
    assert scripts.checks.vector_deviation(A, x, call()) < most
    product = product_peers.warp_bsr_bsr(A, B)
    for _ in range(2):  # the second finds its memory
        C = product_peers.from_warp(product())
        assert C.dtype == A.dtype and C.blocksize == (block[0], block[0])
        np.testing.assert_allclose(C.toarray(), A.toarray() @ B.toarray(), rtol=0, atol=most * 20)
        B.data[0] *= 3
    with pytest.raises(NotImplementedError, match="by vectors only"):
        product_peers.warp_bsr(A, np.ones((A.shape[1], 2), dtype), out)
    with pytest.raises(NotImplementedError, match="does not support float16"):
        product_peers.warp_bsr(A.astype(np.float16), x, out)


# ------------------------------------------------------------------------------- matrices and counts
@pytest.mark.parametrize("longest", [3, 40, 200])
def test_banded_rows_have_sorted_different_columns_near_the_diagonal(
    scripts: Any, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.cases, "REACH", 10)
    lengths = np.resize([5, 0, longest, 1], 200)
    indices, indptr = scripts.cases.banded(np, lengths, 200)
    assert indices.dtype == indptr.dtype == np.int32
    np.testing.assert_array_equal(np.diff(indptr), lengths)
    for row, own in enumerate(np.split(indices, indptr[1:-1])):
        assert (np.diff(own) > 0).all() and (own.size == 0 or 0 <= own[0] <= own[-1] < 200)
        away = (own - row + 100) % 200 - 100
        assert (np.abs(away) <= max(10, 3 * len(own) // 2 + 1)).all()


def test_bytes_are_those_of_all_arrays_once(scripts: Any) -> None:
    A = bg.bsr_array((np.ones((3, 2, 3)), np.array([0, 1, 0], np.int32), np.array([0, 2, 3], np.int32)), shape=(4, 6))
    # 18 values, 6 of x and 4 of y in float64; 3 + 3 indices in int32
    assert scripts.spmv.traffic(A, np.ones(6), np.ones(4)) == 8 * (18 + 6 + 4) + 4 * 6
    assert scripts.spgemm.pairs_of(bg.bsr_array(np.kron([[1, 1], [0, 1]], np.ones((2, 2))), blocksize=(2, 2))) == 4


def test_uneven_rows_have_as_many_blocks_as_they_should(scripts: Any) -> None:
    found = {name.split(",")[0]: lengths for name, (lengths, _) in scripts.spmv.uneven_lengths(300_000).items()}
    assert found["one row of 100"].max() == 100_000 and found["one row of 100"].sum() == 8_199_973
    _, shuffled, ordered = (lengths for lengths, _ in scripts.spmv.uneven_lengths(300).values())
    assert shuffled.sum() == ordered.sum() == 300 * 27 and (np.diff(ordered) <= 0).all()
    assert sorted(shuffled) == sorted(ordered) and (np.diff(shuffled) > 0).any()


def test_nodes_of_a_mesh_meet_those_of_the_same_cells(scripts: Any) -> None:
    A = scripts.spgemm.mesh_matrix(np, 1)
    assert A.shape == (24, 24) and len(A.data) == 64 and scripts.spgemm.pairs_of(A) == 512
    line = scipy.sparse.diags_array([np.ones(3), np.ones(4), np.ones(3)], offsets=[-1, 0, 1])
    near = scipy.sparse.kron(scipy.sparse.kron(line, line, "csr"), line, "csr")
    A = scripts.spgemm.mesh_matrix(np, 3)
    np.testing.assert_array_equal(A.indices, near.indices)
    np.testing.assert_array_equal(A.indptr, near.indptr)
    assert np.diff(A.indptr).max() == 27


@pytest.mark.parametrize("transposed", [False, True])
def test_exact_products_are_those_of_dense_matrices(
    scripts: Any, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.checks, "EXACT_CHUNK", 20)  # several pieces
    A = scripts.cases.banded_matrix(np, np.resize([3, 0, 7], 12), (3, 2), "float32")
    D = A.toarray().astype(np.float64)
    D = D.T if transposed else D
    rng = np.random.default_rng(0)
    x, X = rng.standard_normal(D.shape[1]), rng.standard_normal((D.shape[1], 4))
    np.testing.assert_allclose(scripts.checks.exact(A, x, transposed), D @ x, atol=1e-12)
    assert scripts.checks.vector_deviation(A, X, D @ X, transposed) < 1e-14
    for row in (0, len(D) - 1):  # an empty row of blocks is among those that are looked at
        wrong = D @ X
        wrong[row, 1] += 1
        assert scripts.checks.vector_deviation(A, X, wrong, transposed) > 0.05


def test_sampled_elements_of_csr_are_found_in_their_blocks(scripts: Any) -> None:
    sddmm = scripts.sddmm
    pattern = sddmm.pattern_matrix(np, 64, 8, "float64")
    want = np.random.default_rng(0).standard_normal((64, 64))
    S = bg.bsr_array((np.ones_like(pattern.data), pattern.indices, pattern.indptr), shape=(64, 64)).tocsr()
    S.data[:] = want[S.tocoo().row, S.indices]
    result = types.SimpleNamespace(values=lambda: S.data)
    assert sddmm.csr_deviation(want, pattern, result) == 0
    S.data[77] += 8
    assert sddmm.csr_deviation(want, pattern, result) == pytest.approx(1)
