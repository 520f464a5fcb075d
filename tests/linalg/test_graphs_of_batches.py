"""Conjugate gradients of a batch replayed as a graph, on a fake card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.linalg import graphs

from .capture_model import Card, told  # noqa: F401  (fixtures)
from .problems import numbers, plate
from .test_batch import systems

pytest.importorskip("cupy")

pytestmark = pytest.mark.fake

FIRST = ["step", "synchronize", "begin", "end", "launch"]

PRECONDITIONERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda A: None,
    "block_jacobi": linalg.block_jacobi,
    "one for all": lambda A: linalg.block_jacobi(A[2]),
    "matrix for all": lambda A: A[2].inverse_block_diagonal(),
    "multigrid for all": lambda A: linalg.smoothed_aggregation(A[2], max_coarse=8),
}


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_a_graph_finds_the_bits_of_the_plain_loop(
    fake: Any, monkeypatch: pytest.MonkeyPatch, kind: str, columns: int | None, dtype: str
) -> None:
    A = systems(5, dtype, 6).to_device("cuda")
    b = fake.from_host(numbers((5, 72) if columns is None else (5, 72, columns), dtype))
    M, rtol = PRECONDITIONERS[kind](A), 1e-4 if dtype == "float32" else 1e-9
    want, info = linalg.cg(A, b, M=M, rtol=rtol)
    card = Card(monkeypatch)
    for events in (FIRST, ["launch"]):
        x, replayed = linalg.cg(A, b, M=M, rtol=rtol)
        np.testing.assert_array_equal(replayed, info)
        assert not replayed.any()
        np.testing.assert_array_equal(fake.to_host(x), fake.to_host(want))
        assert card.happened() == events


def broken() -> tuple[bg.bsr_batch, Any]:
    """Systems that are solved at once, slowly, not at all, and one of each breakdown."""
    A = plate(6)[0]
    n = A.shape[0]
    unit = bg.eye(n, blocksize=A.blocksize)
    data = [A.copy(), A + 100 * unit, A + unit * 0, -1.0 * A, A + 0 * unit]
    data[2].data[...] = (A - 3 * unit).data
    data[4].data[...] = A.data
    data[4].data[5] = 1e200
    b = numbers((5, n))
    b[1] = 0
    return bg.bsr_batch([bg.bsr_array((x.data, A.indices, A.indptr), shape=A.shape) for x in data]), b


@pytest.mark.parametrize("maxiter", [None, 3, 9, 10, 11])
@pytest.mark.parametrize("callback", [None, lambda x: None])
def test_each_system_ends_as_in_the_plain_loop(
    fake: Any, monkeypatch: pytest.MonkeyPatch, maxiter: int | None, callback: Any
) -> None:
    host, b = broken()
    A, b = host.to_device("cuda"), fake.from_host(b)
    found = []
    for graph in (False, True, True):
        if graph:
            Card(monkeypatch)
            monkeypatch.setattr(graphs, "iterations_left", lambda left: np.inf)
        with pytest.warns(linalg.SolverWarning) as said:
            x, info = linalg.cg(A, b, rtol=1e-11, maxiter=maxiter, callback=callback if graph is False else None)
        found.append((fake.to_host(x), info, str(said[0].message)))
    assert (found[0][1] == -1).sum() >= 2 and found[0][1][1] == 0
    for x, info, message in found[1:]:
        np.testing.assert_array_equal(x, found[0][0])
        np.testing.assert_array_equal(info, found[0][1])
        assert message == found[0][2]


def test_the_host_reads_once_for_several_iterations(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = systems(5, n=8).to_device("cuda"), fake.from_host(numbers((5, 128)))
    batches, make = list[int](), graphs.Iterations.make

    def counted(self: Any, left: Any, most: int) -> Any:
        found = make(self, left, most)
        batches.append(len(found))
        return found

    monkeypatch.setattr(graphs.Iterations, "make", counted)
    Card(monkeypatch)
    linalg.cg(A, b, rtol=1e-9)
    assert sum(batches) > 30 and len(batches) < sum(batches) / 2
    batches.clear()
    linalg.cg(A, b, rtol=1e-9, callback=lambda x: None)
    assert set(batches) == {1}


def test_numbers_in_place_are_read_and_other_batches_are_captured_anew(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, b = systems(3).to_device("cuda"), fake.from_host(numbers((3, 32)))
    card = Card(monkeypatch)
    x = fake.to_host(linalg.cg(A, b, rtol=1e-10)[0])
    assert card.happened() == FIRST
    A.data[...] *= 2
    np.testing.assert_allclose(2 * fake.to_host(linalg.cg(A, b, rtol=1e-10)[0]), x, rtol=1e-6)
    assert card.happened() == ["launch"]
    other = A.with_data(A.data * 2)
    np.testing.assert_allclose(4 * fake.to_host(linalg.cg(other, b, rtol=1e-10)[0]), x, rtol=1e-6)
    assert card.happened() == FIRST
    before = len(graphs._graphs)
    assert before == 2
    del other
    assert len(graphs._graphs) == 1
