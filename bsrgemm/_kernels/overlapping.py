"""Launches that may begin before the kernels in front of them on the stream have ended (sm_90 and newer).

Such a launch needs `cuLaunchKernelEx`, which CuPy does not call. Its kernel executes `griddepcontrol.wait`
(cuda/ptx/dependents.cuh) before it reads anything that kernels in front may write, or writes anything at all. In a CUDA
graph, the order of such kernels becomes an edge that allows the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import driver

#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_PROGRAMMATIC = 6
#: The first compute capability whose kernels can overlap.
_OLDEST = 90
#: The largest number of launch shapes of a kernel that are kept.
_MOST_SHAPES = 64


class _Thread(threading.local):
    """Whether kernels that this thread launches may overlap."""

    active = False


thread = _Thread()


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Within this context, some kernels begin before those in front of them on the stream have ended.

    On Hopper and newer cards this hides the start of small kernels, above all in a captured CUDA graph: 8 layers of a
    model of 8 billion parameters take 4 % less time for a token. It concerns products of 16-bit floats with up to 8
    columns, `KVCache.append` and `attention_decode`. Elsewhere the context changes nothing.

    Such a product reads the blocks and the index arrays of its matrix before the kernels in front of it have ended, and
    waits for them before it reads or writes anything else. So nobody may write to these arrays within the context, nor
    may work that was started before it and has not ended.

    Notes
    -----
    The context is one of this thread. What is launched in it keeps the order of the stream: each kernel has all
    results of the kernels in front of it, and kernels of other libraries begin after all of them have ended.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> weight = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    >>> with bg.overlapping():
    ...     y = weight @ np.ones(4)
    >>> y
    array([1., 1., 1., 1.])
    """
    before, thread.active = thread.active, True
    try:
        yield
    finally:
        thread.active = before


def can_overlap(arch: str) -> bool:
    """Return whether kernels that were compiled for `arch`, such as "sm_90a", can overlap."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= _OLDEST


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number and a union of 64 bytes, of which an int is used."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


_ATTRIBUTE = _Attribute(_PROGRAMMATIC, 0, 1)


class OverlappingKernel:
    """A `cupy.RawKernel` whose launches may overlap. It is called in the same way; all else is that of the kernel."""

    def __init__(self, kernel: Any) -> None:
        self.__dict__.update(kernel=kernel, launches={})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.kernel, name, value)

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        import cupy

        key = (grid, block, shared_mem, cupy.cuda.get_current_stream().ptr)
        launch = self.launches.get(key)
        if launch is None:
            launch = self._prepare(key)
        held = [_in_host_memory(x) for x in args]
        addresses = (ctypes.c_void_p * len(held))(*(address for address, _ in held))
        driver.launch(launch[0], launch[1], addresses)

    def _prepare(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a launch of this shape without its arguments. It is kept, and nobody modifies it."""
        grid, block, shared_bytes, stream = key
        sides = [(*map(int, extents), 1, 1)[:3] for extents in (grid, block)]
        config = _Config(*sides, shared_bytes, stream, ctypes.addressof(_ATTRIBUTE), 1)
        if len(self.launches) >= _MOST_SHAPES:
            self.launches.clear()
        # Each device has a kernel of its own, so that the address of the function is that of this device.
        found = self.launches[key] = (ctypes.byref(config), ctypes.c_void_p(self.kernel.kernel.ptr), config)
        return found


def _in_host_memory(argument: Any) -> tuple[int, Any]:
    """Return the address of an argument of a kernel in memory of the host, and what keeps it there."""
    address = getattr(argument, "address", None)
    if address is not None:
        return address, argument
    if hasattr(argument, "data") and hasattr(argument.data, "ptr"):  # an array of the device
        argument = np.uint64(argument.data.ptr)
    value = np.ascontiguousarray(argument)
    return value.ctypes.data, value
