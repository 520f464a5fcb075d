"""A device refuses blocks whose elements its kernels cannot count; the CPU takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

from ..fake_device import install


def test_a_device_refuses_blocks_of_2_to_31_elements() -> None:
    """The memory of these zeros is never touched."""
    device = install()

    def matrix(xp: Any, *blocksize: int) -> Any:
        index = xp.asarray(np.zeros(1, np.int32)), xp.asarray(np.arange(2, dtype=np.int32))
        return bg.bsr_array((xp.zeros((1, *blocksize), np.int8), *index), shape=blocksize)

    assert matrix(device.xp, 2**15 - 1, 2**16).blocksize == (2**15 - 1, 2**16)
    message = r"blocksize: got \(32768, 65536\) on device 'fake', whose blocks have fewer than 2\*\*31 elements"
    with pytest.raises(ValueError, match=message):
        matrix(device.xp, 2**15, 2**16)
    on_cpu = matrix(np, 2**15, 2**16)
    with pytest.raises(ValueError, match=message):
        on_cpu.to_device(device.name)
