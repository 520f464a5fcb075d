"""Properties of CuPy's current device. Each device is queried once, and its values are cached for it alone."""

from __future__ import annotations

from functools import cache

import cupy


def multiprocessors() -> int:
    """Return the number of streaming multiprocessors of CuPy's current device."""
    return _attribute(cupy.cuda.runtime.getDevice(), "MultiProcessorCount")


def l2_bytes() -> int:
    """Return the size of the L2 cache of CuPy's current device, in bytes."""
    return _attribute(cupy.cuda.runtime.getDevice(), "L2CacheSize")


def shared_bytes_per_block() -> int:
    """Return the most shared memory that a thread block of CuPy's current device can request, in bytes."""
    return _attribute(cupy.cuda.runtime.getDevice(), "MaxSharedMemoryPerBlockOptin")


@cache
def _attribute(device: int, name: str) -> int:
    return int(cupy.cuda.Device(device).attributes[name])
