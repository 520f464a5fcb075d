"""Matrices in panels on Dask's distributed scheduler: workers that are stopped, and memory that is limited."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

import dask  # noqa: E402
import dask.array as da  # noqa: E402

from bsrgemm.interop import dask as panels  # noqa: E402

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
S = bg.random(96, 48, blocksize=(4, 3), density=0.4, seed=0)
X = np.random.default_rng(2).standard_normal((48, 5))
Y = np.random.default_rng(3).standard_normal((96, 5))
D = S.toarray()


@pytest.fixture
def client() -> Iterator[Any]:
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


def _panel(number: int, folder: str) -> Any:
    """A panel; whoever computes the third one first is stopped in the middle of it."""
    marker = Path(folder, "stopped")
    if number == 3 and not marker.exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return S[16 * number : 16 * number + 16]


def _delayed(folder: Path) -> Any:
    made = [dask.delayed(_panel)(i, str(folder)) for i in range(6)]
    return panels.from_delayed(made, [16] * 6, 48, blocksize=(4, 3), dtype=float)


def test_products_are_right_on_workers(client: Any) -> None:
    A = panels.from_bsr(S, 16)
    x, y = da.from_array(X, chunks=(12, 2)), da.from_array(Y, chunks=(16, 2))
    square = A.T @ A
    for P in (A, A.persist()):
        for made, want in ((P @ X, D @ X), (P @ x, D @ X), (P.T @ y, D.T @ Y), (P.sum(axis=0), D.sum(axis=0))):
            np.testing.assert_allclose(made.compute(), want, atol=1e-12)
    np.testing.assert_allclose(square.compute().toarray(), D.T @ D, atol=1e-12)
    np.testing.assert_allclose(da.dot(A, X).compute(), D @ X, atol=1e-12)


@pytest.mark.parametrize("what", ["A @ X", "A.T @ Y", "persist"])
def test_a_worker_that_is_killed_in_the_middle_changes_no_result(client: Any, tmp_path: Path, what: str) -> None:
    A = _delayed(tmp_path)
    if what == "A @ X":
        found, want = (A @ X).compute(), D @ X
    elif what == "A.T @ Y":
        found, want = (A.T @ Y).compute(), D.T @ Y
    else:
        found, want = A.persist().compute().toarray(), D
    assert (tmp_path / "stopped").exists()  # a worker was indeed stopped
    np.testing.assert_allclose(found, want, atol=1e-12)


def test_panels_that_are_lost_with_their_worker_are_computed_again(client: Any, tmp_path: Path) -> None:
    panels.to_panels(S, tmp_path / "panels", rows_per_chunk=16)
    A = panels.from_panels(tmp_path / "panels").persist()
    distributed.wait(A)
    victim = next(iter(client.run(os.getpid).values()))
    os.kill(victim, signal.SIGKILL)
    np.testing.assert_allclose((A @ X).compute(), D @ X, atol=1e-12)


def test_a_worker_that_is_killed_while_it_writes_leaves_whole_panels(client: Any, tmp_path: Path) -> None:
    written = panels.to_panels(_delayed(tmp_path), tmp_path / "panels")
    assert (tmp_path / "stopped").exists()
    np.testing.assert_array_equal(written.compute().toarray(), D)


def test_errors_of_a_panel_reach_the_client(client: Any) -> None:
    A = panels.from_delayed([dask.delayed(S[:16])], [20], 48, blocksize=(4, 3), dtype=float)
    with pytest.raises(ValueError, match=r"panel 0: wanted shape \(20, 48\), got \(16, 48\)"):
        (A @ X).compute()


def test_workers_know_how_large_panels_are(client: Any) -> None:
    """Otherwise they would not spill to disk before their memory is full."""
    A = panels.from_bsr(S, 16).persist()
    distributed.wait(A)
    sizes = client.run_on_scheduler(_sizes)
    assert sum(size for key, size in sizes.items() if "bsr-from-bsr" in key) >= S.data.nbytes


def _sizes(dask_scheduler: Any) -> dict[str, int]:
    return {str(key): task.nbytes for key, task in dask_scheduler.tasks.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
@pytest.mark.parametrize("part", ["threads", "distributed"])
def test_a_matrix_four_times_larger_than_memory_is_multiplied_from_disk(part: str, tmp_path: Path) -> None:
    """The result is right, no worker is stopped, and the whole matrix does not fit under the limit."""
    from bench.studies import panels as study

    if part == "threads":
        row = study.by_threads(64, str(tmp_path))
        assert row["whole"] == "MemoryError"
    else:
        row = study.by_workers(320, 1, str(tmp_path))
        assert row["stopped"] == 0
    assert row["error"] <= 1 and "failed" not in row and "wrong" not in row
