"""Triangles are put into an order in time that grows with the number of their nodes, also if all are in one chain."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.linalg import ordering


def chain(n: int) -> Any:
    """A lower triangle in which each node needs the one before it."""
    place = np.arange(n)
    data = np.concatenate([np.full((n, 1, 1), 2.0), np.full((n - 1, 1, 1), -1.0)])
    at = np.concatenate([place, place[1:]]), np.concatenate([place, place[:-1]])
    return bg.bsr_array((data, at), shape=(n, n))


def seconds(n: int) -> float:
    """Processor time of this thread for the groups of a chain."""
    L = chain(n)
    inverse = L.inverse_block_diagonal().data
    start = time.thread_time()
    number, count = ordering.levels(L)
    ordering.groups(L, number, count, inverse)
    return time.thread_time() - start


def test_a_chain_of_four_times_as_many_nodes_takes_about_four_times_as_long() -> None:
    """If each step looked at all nodes, it would take more than ten times as long."""
    few = min(seconds(2_000) for _ in range(3))
    many = min(seconds(8_000) for _ in range(2))
    assert many < 7 * few


def test_the_groups_of_a_chain_are_its_nodes() -> None:
    n = 300
    L, place = chain(n), np.arange(n)
    number, count = ordering.levels(L)
    assert count == n and (number == place).all()
    assert (ordering.levels(L.T.copy(), lower=False)[0] == place[::-1]).all()
    groups = ordering.groups(L, number, count, L.inverse_block_diagonal().data)
    first, *others = groups.several
    assert first.before is None and all(g.before.nnz == 1 for g in others)
    assert all(g.after is None for g in groups.several)
    assert [(g.first, g.last) for g in groups.several] == [(i, i + 1) for i in range(n)]
    assert groups.place.tolist() == list(range(n))
