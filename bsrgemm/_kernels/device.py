"""What CuPy's current device offers. Each device is asked once, and answers for itself alone."""

from __future__ import annotations

from functools import cache

import cupy


def multiprocessors() -> int:
    """Streaming multiprocessors of CuPy's current device."""
    return _attribute(cupy.cuda.runtime.getDevice(), "MultiProcessorCount")


def l2_bytes() -> int:
    """Size of the L2 cache of CuPy's current device."""
    return _attribute(cupy.cuda.runtime.getDevice(), "L2CacheSize")


def shared_bytes_per_block() -> int:
    """Shared memory that a thread block of CuPy's current device may ask for."""
    return _attribute(cupy.cuda.runtime.getDevice(), "MaxSharedMemoryPerBlockOptin")


@cache
def _attribute(device: int, name: str) -> int:
    return int(cupy.cuda.Device(device).attributes[name])
