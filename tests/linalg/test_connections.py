"""Which nodes of a matrix are connected."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm.linalg import aggregation


@pytest.mark.parametrize("theta", [0.0, 0.1])
def test_a_stored_block_of_zeros_connects_no_nodes_and_a_node_stays_with_itself(theta: float) -> None:
    dense = np.kron(np.diag([4.0, 0.0, 4.0]), np.eye(2))
    dense[1, 4] = 1  # node 0 sees node 2
    A = bg.bsr_array(np.ones((6, 6)), blocksize=(2, 2))  # all blocks are stored
    A.data[...] = bg.bsr_array(dense + 1, blocksize=(2, 2)).data - 1
    assert len(A.data) == 9
    indices, indptr, coupled = aggregation.strong_connections(A, theta)
    found = [set(indices[a:b].tolist()) for a, b in itertools.pairwise(indptr)]
    assert found == [{0, 2}, {1}, {2}] and coupled.tolist() == [True, False, False]
