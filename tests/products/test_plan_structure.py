"""A plan of `A @ B` takes matrices with its blocks, whichever of its arrays they share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.base import Blocks

pytestmark = pytest.mark.fake


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shared", ["indices", "indptr"])
def test_a_matrix_that_shares_one_index_array_with_the_plan_is_refused(shared: str, device: str) -> None:
    """On a device that counts writes nothing is compared if both arrays are the plan's own; with one of them it is."""
    A = bg.bsr_array((np.ones((3, 2, 2)), np.array([0, 1, 1]), np.array([0, 2, 3])), shape=(4, 4)).to_device(device)
    B = bg.bsr_array(np.eye(4), blocksize=(2, 2)).to_device(device)
    plan = bg.plan(A, B)
    plan(A, B)
    data, indices, indptr = A._blocks
    numbers, other = ([1, 0, 1], "indices") if shared == "indptr" else ([0, 1, 3], "indptr")
    written: Any = A._backend.from_host(np.array(numbers, indices.dtype))
    changed = A._new(Blocks(data, written, indptr) if other == "indices" else Blocks(data, indices, written))
    with pytest.raises(ValueError, match=f"A: wanted the blocks of the plan, got other {other}"):
        plan(changed, B)
