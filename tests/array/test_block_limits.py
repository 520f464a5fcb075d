"""A device refuses blocks whose elements its kernels cannot count; the CPU takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

from .. import fake_cupy

pytestmark = pytest.mark.fake


def stored(xp: Any, *blocksize: int) -> Any:
    """A matrix of one block of zeros, whose memory is never touched."""
    index = xp.asarray(np.zeros(1, np.int32)), xp.asarray(np.arange(2, dtype=np.int32))
    zeros = np.zeros if xp is np else fake_cupy.untouched
    return bg.bsr_array((zeros((1, *blocksize), np.int8), *index), shape=blocksize)


def test_a_device_refuses_blocks_of_2_to_31_elements() -> None:
    device = fake_cupy.backend()
    assert stored(device.xp, 2**15 - 1, 2**16).blocksize == (2**15 - 1, 2**16)
    message = r"blocksize: got \(32768, 65536\) on device 'cuda', whose blocks have fewer than 2\*\*31 elements"
    with pytest.raises(ValueError, match=message):
        stored(device.xp, 2**15, 2**16)
    on_cpu = stored(np, 2**15, 2**16)
    with pytest.raises(ValueError, match=message):
        on_cpu.to_device(device.name)


def test_a_device_refuses_to_make_blocks_of_2_to_31_elements() -> None:
    xp = fake_cupy.backend().xp
    column, row, empty = stored(xp, 2**15, 1), stored(xp, 1, 2**16), bg.bsr_array((1, 2**16), blocksize=(1, 2**16))
    message = r"got \(32768, 65536\) on device 'cuda', whose blocks have fewer than 2\*\*31 elements; "
    for make in (
        lambda: column @ row,
        lambda: bg.plan(column, row),
        lambda: bg.kron(column, xp.zeros((1, 2**16), np.int8)),
        lambda: bg.kron(column, row.toarray()),
    ):
        with pytest.raises(ValueError, match=r"^blocksize of the (product|result): " + message):
            make()
    index = xp.asarray(np.zeros(1, np.int32)), xp.asarray((np.arange(2**15 + 1) > 0).astype(np.int32))
    small = bg.bsr_array((xp.zeros((1, 1, 1), np.int8), *index), shape=(2**15, 2**16))
    with pytest.raises(ValueError, match=r"^blocksize: " + message):
        small.tobsr((2**15, 2**16))
    assert (column @ empty.to_device("cuda")).nnz == 0
