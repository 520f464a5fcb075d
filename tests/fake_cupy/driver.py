"""Functions of CUDA's driver that the library calls by their addresses."""

from __future__ import annotations

import ctypes
from typing import Any

from bsrgemm._kernels import tensor_map

from ..emulator import emulator
from . import streams

_DESTROY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class UserObject:
    """What cuUserObjectCreate makes: it calls a function of C when the last graph that has it is gone."""

    def __init__(self, pointer: int, destroy: int) -> None:
        self._pointer, self._destroy = pointer, _DESTROY(destroy)

    def __del__(self) -> None:
        self._destroy(self._pointer)


#: Objects by their number, until a graph takes them over.
_objects: dict[int, UserObject] = {}


def _value(x: Any) -> int:
    return int(getattr(x, "value", x) or 0)


def cuStreamGetCaptureInfo_v2(stream: Any, status: Any, number: Any, graph: Any, *_: Any) -> int:
    """The number of the capture that the current stream is in, and of its graph."""
    current = streams.current()
    inside = current.ptr == _value(stream) and current.graph is not None
    if status is not None:
        status._obj.value = int(inside)
    number._obj.value = current.capture if inside else 0
    if graph is not None:
        graph._obj.value = current.graph.number if inside and current.graph is not None else 0
    return 0


def cuUserObjectCreate(found: Any, pointer: Any, destroy: Any, count: int, flags: int) -> int:
    number = len(_objects) + 1
    _objects[number] = UserObject(ctypes.cast(pointer, ctypes.c_void_p).value or 0, _value(destroy))
    found._obj.value = number
    return 0


def cuGraphRetainUserObject(graph: Any, found: Any, count: int, flags: int) -> int:
    streams.Graph.by_number[_value(graph)].objects.append(_objects.pop(_value(found)))
    return 0


def cuTensorMapEncodeTiled(
    target: Any, dtype: int, rank: int, pointer: Any, dims: Any, strides: Any, box: Any, steps: Any, *how: int
) -> int:
    """A tensor map for the copies of the emulator."""
    _, swizzle, l2, _ = how
    about = tuple(dims)[:rank], tuple(strides)[: rank - 1], tuple(box)[:rank]
    name, swizzled = _name_in(tensor_map.DTYPES, dtype), _name_in(tensor_map.SWIZZLES, swizzle)
    promoted = next(name for name, value in tensor_map.L2_PROMOTIONS.items() if value == l2)
    found = emulator.encode(_value(pointer), name, *about, swizzled, promoted)
    ctypes.memmove(_value(target), found, len(found))
    return 0


def _name_in(table: dict[str, Any], value: int) -> str:
    return next(name for name, found in table.items() if found[0] == value)


def cuStreamGetId(stream: Any, number: Any) -> int:
    """The number of a stream: its address here, since no address is used twice."""
    number._obj.value = _value(stream)
    return 0


def cuTensorMapReplaceAddress(target: Any, pointer: Any) -> int:
    """Another address for a map of the emulator, which has it first."""
    ctypes.memmove(_value(target), ctypes.byref(ctypes.c_uint64(_value(pointer))), 8)
    return 0
