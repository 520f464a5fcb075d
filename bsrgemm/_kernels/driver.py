"""Calls of the CUDA driver that CuPy does not make, by ctypes. They need a card; nothing here is asked without one."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

#: CU_USER_OBJECT_NO_DESTRUCTOR_SYNC and CU_GRAPH_USER_OBJECT_MOVE
_NO_SYNC, _MOVE = 1, 1
#: The size of a sem_t on every platform that CuPy supports, with room to spare.
_SEMAPHORE_BYTES = 64


class Recorded(NamedTuple):
    """What a stream records: the driver's number of the capture, which is never used again, and the graph so far."""

    number: int
    #: 0 if the capture was broken by an earlier error
    graph: int


class Signal:
    """Tells that a graph, and all that was instantiated from it, is gone and has ended.

    The driver may call back from a thread of its own, where neither Python nor CUDA may be used. It calls ``sem_post``
    of the C library. The semaphore is not freed if the process ends before the graph does.
    """

    def __init__(self, graph: int) -> None:
        libc = _libc()
        self._semaphore: int | None = libc.malloc(_SEMAPHORE_BYTES)
        libc.sem_init(ctypes.c_void_p(self._semaphore), 0, 0)
        owned, destroy = ctypes.c_void_p(), ctypes.cast(libc.sem_post, ctypes.c_void_p)
        at = ctypes.c_void_p(self._semaphore)
        check(_library().cuUserObjectCreate(ctypes.byref(owned), at, destroy, 1, _NO_SYNC))
        check(_library().cuGraphRetainUserObject(ctypes.c_void_p(graph), owned, 1, _MOVE))

    def given(self) -> bool:
        """Whether the graph is gone; to be asked by one thread at a time."""
        libc = _libc()
        if self._semaphore is not None and libc.sem_trywait(ctypes.c_void_p(self._semaphore)) == 0:
            libc.free(ctypes.c_void_p(self._semaphore))
            self._semaphore = None
        return self._semaphore is None


def recorded(stream: int) -> Recorded:
    """What a stream that is being captured records."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    check(
        _library().cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None
        )
    )
    return Recorded(number.value, graph.value or 0)


def stream_number(stream: int) -> int:
    """The driver's number of a stream, which no later stream has; the address of a stream is used again."""
    found = ctypes.c_uint64()
    check(_library().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(found)))
    return found.value


def launch(config: Any, function: Any, addresses: Any) -> None:
    """Start a kernel by cuLaunchKernelEx, with its arguments at these addresses of the host."""
    check(_library().cuLaunchKernelEx(config, function, addresses, None))


def tensor_map_encoder() -> Callable[..., int]:
    """Return cuTensorMapEncodeTiled, which returns a status; RuntimeError for a driver that has none."""
    needs = "tensor maps need a CUDA 12 driver (525 or newer)"
    try:
        found: Callable[..., int] = _library().cuTensorMapEncodeTiled
    except OSError as error:
        raise RuntimeError(f"{needs}, and none can be loaded: {error}") from error
    except AttributeError as error:
        raise RuntimeError(f"{needs}; the one installed has no cuTensorMapEncodeTiled") from error
    return found


def replace_address(tensor_map: int, pointer: int) -> int:
    """Write another address into a tensor map of the host, by two arguments in place of twelve; return a status."""
    status: int = _library().cuTensorMapReplaceAddress(tensor_map, pointer)
    return status


def check(status: int) -> None:
    """Raise CuPy's error for a status of the driver other than success."""
    if status:
        import cupy

        raise cupy.cuda.driver.CUDADriverError(status)


@cache
def _library() -> Any:
    found, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
    with contextlib.suppress(AttributeError):  # a driver older than tensor maps
        # The other arguments are arrays of ctypes and small numbers, which it passes as they are: declared like the
        # first ones, each of them would be converted at every call, which takes 1.2 us in all.
        found.cuTensorMapEncodeTiled.argtypes = [pointer, ctypes.c_int, ctypes.c_uint32, pointer]
        found.cuTensorMapReplaceAddress.argtypes = [pointer, pointer]
    return found


@cache
def _libc() -> Any:
    found = ctypes.CDLL(None)
    found.malloc.restype = ctypes.c_void_p
    return found
