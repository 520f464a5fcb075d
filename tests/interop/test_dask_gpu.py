"""Panels on a GPU: Dask's threads in this process, and a worker process that has the card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from bsrgemm.interop import dask as panels  # noqa: E402

pytestmark = pytest.mark.gpu

# 96 x 48 in blocks of 4 x 3; panels of 16 rows
S = bg.random(96, 48, blocksize=(4, 3), density=0.4, seed=0)
X = np.random.default_rng(2).standard_normal((48, 5))
Y = np.random.default_rng(3).standard_normal((96, 5))
D = S.toarray()


@pytest.fixture(params=["threads", "a worker"], scope="module")
def scheduler(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Dask's threads, or one worker process with one thread."""
    import cupy

    if not hasattr(cupy.cuda.runtime, "graphLaunch"):
        pytest.skip("only on a card: workers are threads and processes")
    if request.param == "threads":
        with dask.config.set(scheduler="threads", num_workers=4):
            yield None
        return
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None, "processes": True}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


def same(found: Any, want: Any) -> None:
    """A result that is on the GPU."""
    assert not isinstance(found, np.ndarray)
    np.testing.assert_allclose(found.get(), want, atol=1e-12)


def test_products_sums_and_kept_panels_stay_on_the_card(scheduler: Any) -> None:
    import cupy

    x, y = cupy.asarray(X), cupy.asarray(Y)
    for A in (panels.from_bsr(S.to_device("cuda"), 16), panels.from_bsr(S, 16).to_device("cuda")):
        assert A.device == "cuda"
        for P in (A, A.persist()):
            made = {
                "A @ X": (P @ x, D @ X),
                "A @ x": (P @ x[:, 0], D @ X[:, 0]),
                "Y.T @ A": (panels.matmul(y.T, P), Y.T @ D),
                "A.T @ Y": (P.T @ y, D.T @ Y),
                "A.T @ (A @ X)": (P.T @ (P @ x), D.T @ (D @ X)),
                "chunks": (P @ da.from_array(x, chunks=(12, 2), asarray=False), D @ X),
                "sum of columns": (P.sum(axis=0), D.sum(axis=0)),
                "sum of rows": (P.sum(axis=1), D.sum(axis=1)),
                "sum": (P.sum(), D.sum()),
            }
            for product, want in made.values():
                same(product.compute(), want)
        square = (A.T @ A).compute()
        assert isinstance(square.data, cupy.ndarray)
        np.testing.assert_allclose(square.get().toarray(), D.T @ D, atol=1e-12)
        np.testing.assert_array_equal(A.compute().get().toarray(), D)
        np.testing.assert_array_equal(A.to_device("cpu").compute().toarray(), D)


def test_the_bits_are_those_of_one_process_whatever_the_scheduler(scheduler: Any) -> None:
    import cupy

    x = cupy.asarray(X)
    A = panels.from_bsr(S.to_device("cuda"), 16)
    with dask.config.set(scheduler="synchronous"):
        want = (A.T @ (A @ x)).compute()
    assert (A.T @ (A @ x)).compute().get().tobytes() == want.get().tobytes()


def test_panels_on_disk_are_read_to_the_card(scheduler: Any, tmp_path: Path) -> None:
    import cupy

    panels.to_panels(S, tmp_path / "panels", rows_per_chunk=16)
    A = panels.from_panels(tmp_path / "panels", device="cuda")
    same((A @ cupy.asarray(X)).compute(), D @ X)
    again = panels.to_panels(A * 2, tmp_path / "twice")
    np.testing.assert_array_equal(again.compute().get().toarray(), 2 * D)


def test_operands_on_the_host_are_refused_before_anything_is_computed(scheduler: Any) -> None:
    A = panels.from_bsr(S, 16).to_device("cuda")
    with pytest.raises(TypeError, match=r"'cuda'.*to_device"):
        A @ X
