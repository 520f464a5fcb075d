"""Matrices that the library makes on a device share index arrays until a user reads those of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg

from ..devices import Device

#: Block rows in canonical format, one of them empty
POINTERS, COLUMNS = [0, 3, 3, 5, 6, 11], [0, 2, 3, 1, 2, 5, 0, 1, 2, 3, 4]


def matrix(device: Device) -> Any:
    device.needs("sm_75")
    arrays = np.ones((11, 2, 2)), np.array(COLUMNS, np.int32), np.array(POINTERS, np.int32)
    return bg.bsr_array(tuple(map(device.asarray, arrays)), shape=(10, 12))


def test_matrices_with_one_pattern_share_index_arrays_until_one_is_read(device: Device) -> None:
    """Who reads them has arrays of that matrix alone, and writes into these reach no other one."""
    A = matrix(device)
    A.data[...] = 1
    twice, minus = A * 2, -A
    again = twice.astype(np.float32)
    assert twice._unread is minus._unread is again._unread is not None
    want = [device.asnumpy(x.toarray()) for x in (A, minus, again)]
    assert twice.indices is twice.indices
    twice.indices[...] = 0
    twice.indptr = device.asarray(np.array(POINTERS, np.int32))
    assert not device.asnumpy(twice.indices).any() and not device.asnumpy(twice._canonical().indices).any()
    T = minus.T
    A.indices[0] = 5
    minus.indices[...] = 3
    for x, before in ((again, want[2]), (A * 1 - A, 0 * want[0]), (T, want[1].T), (T.T, want[1])):
        np.testing.assert_array_equal(device.asnumpy(x.toarray()), before)


def test_index_arrays_are_not_read_for_the_first_time_in_a_graph(device: Device) -> None:
    """Copies that a graph makes when it runs would be read before."""
    A = 2 * matrix(device)
    refused: list[str] = []

    def reading() -> None:
        try:
            A.indices  # noqa: B018
        except RuntimeError as error:
            refused.append(str(error))

    device.captured(reading)
    assert len(refused) == 1 and "read A.indices once before the capture" in refused[0]
    before = A.indices
    device.captured(lambda: refused.append(str(A.indices is before)))
    assert refused[1:] == ["True"]
