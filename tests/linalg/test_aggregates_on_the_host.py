"""Aggregates on the CPU: the highest neighbour of each node is found place by place, with the same result."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._backend.registry import host
from bsrgemm.linalg import aggregation

from .problems import connections


@pytest.mark.parametrize("kind", ["grid", "star", "random", "one-sided", "single"])
def test_the_highest_neighbour_is_found_place_by_place(kind: str) -> None:
    rng = np.random.default_rng(3)
    n = 1 if kind == "single" else 90
    S: Any = sp.eye_array(n)
    if kind == "grid":
        line = sp.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(9, 9))
        S = (
            S
            + sp.kron(line, sp.eye_array(10))
            + sp.kron(sp.eye_array(9), sp.diags_array([1.0], offsets=[1], shape=(10, 10)))
        )
    elif kind == "star":
        S = S + sp.csr_array((np.ones(n - 1), (np.zeros(n - 1, int), np.arange(1, n))), shape=(n, n))
    elif kind != "single":
        S = S + sp.random_array((n, n), density=0.05, rng=rng)
        S = S if kind == "one-sided" else S + S.T
    S = sp.csr_array(S)
    x = rng.integers(-1, 1 << 62, n)
    highest = aggregation._highest_by_places(S.indices, S.indptr)
    if kind == "star":
        assert highest is None  # the table would have 90 places for each node
        return
    assert highest is not None
    np.testing.assert_array_equal(highest(x), np.maximum.reduceat(x[S.indices], S.indptr[:-1]))


def test_aggregates_are_the_same_by_segments_and_by_places() -> None:
    A = linalg.constrain(bg.bsr_array(_grid(20), blocksize=(1, 1)), np.ones(400), np.arange(25))[0]
    found = aggregation.aggregates(host(), *aggregation.strong_connections(A, 0.0))
    with patch.object(aggregation, "_highest_by_places", lambda *_: None):
        want = aggregation.aggregates(host(), *aggregation.strong_connections(A, 0.0))
    np.testing.assert_array_equal(found[0], want[0])
    assert found[1] == want[1]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_roots_are_the_same_if_undecided_nodes_are_looked_at_alone(symmetric: bool, seed: int) -> None:
    """Looked at alone from the first round on, never, and as it is, also where some nodes are outside."""
    rng = np.random.default_rng(seed)
    S = connections(rng, 400, 0.012, symmetric)
    with patch.object(aggregation, "_MOST_REPEATED", 100):
        places = aggregation._highest_by_places(S.indices.astype(np.int64), S.indptr)
    assert places is not None
    key = aggregation.hashed(np, 400)
    for inside in (None, rng.random(400) < 0.6):
        able = key if inside is None else np.where(inside & (rng.random(400) < 0.8), key, -1)
        want = aggregation._roots(np, lambda x: np.maximum.reduceat(x[S.indices], S.indptr[:-1]), able, inside)
        assert 5 < want.sum() < 300
        for share in (2.0, 0.0, aggregation._FEW):
            with patch.object(aggregation, "_FEW", share):
                before = able.copy()
                np.testing.assert_array_equal(aggregation._roots(np, places, able, inside), want)
                np.testing.assert_array_equal(able, before)


def test_undecided_nodes_are_looked_at_alone_as_soon_as_they_are_few() -> None:
    """The search for roots on a cube of 8,000 nodes looks at less than half of what whole rounds look at."""
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(20, 20))
    S = sp.csr_array(sp.kronsum(sp.kronsum(line, line), line))
    places = aggregation._highest_by_places(S.indices.astype(np.int64), S.indptr)
    looked, call = list[int](), aggregation._Places.__call__

    def counted(self: Any, x: Any) -> Any:
        found = call(self, x)
        looked.append(len(found))
        return found

    assert places is not None
    with patch.object(aggregation._Places, "__call__", counted):
        aggregation._roots(np, places, aggregation.hashed(np, 8000))
    assert len(looked) >= 8 and sum(looked) < 0.6 * 8000 * len(looked)


def _grid(n: int) -> Any:
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    return sp.csr_array(sp.kronsum(line, line))
