"""Tensor maps, which tell TMA, the copy engine of sm_90 and newer cards, how a tensor lies in global memory.

A kernel takes a map by value, as a member of its argument that is aligned to 64 bytes.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from . import driver
from .structs import TENSOR_MAP_BYTES

#: Name -> (CUtensorMapDataType, bytes per element).
DTYPES = {
    "uint8": (0, 1),
    "int32": (3, 4),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (9, 2),
}
#: Name -> (CUtensorMapSwizzle, largest extent of the box along the first dimension in bytes).
SWIZZLES = {"none": (0, None), "32B": (1, 32), "64B": (2, 64), "128B": (3, 128)}
#: Name -> CUtensorMapL2promotion.
L2_PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}

_ALIGNMENT = 64
_MAX_BOX = 256
_MAX_DIM = 2**32
_MAX_STRIDE = 2**40


class Layout:
    """A tensor map without an address: its arguments are checked and converted once. The fastest dimension comes first.

    Maps are not kept here: operands that come again find their whole launch. Reads outside the tensor give zeros. A
    tile must start at a multiple of 16 bytes along the first dimension; negative multiples are allowed. Any other start
    makes the kernel fail with an illegal instruction (observed on an H200).

    Parameters
    ----------
    dtype_name : str
        Element type, a key of `DTYPES`.
    dims, box : tuple of int
        Extents of the tensor and of one tile, in elements. There are 1 to 5 dimensions; a tile has at most 256
        elements along each.
    strides_bytes : tuple of int
        Distance in bytes between neighbours along every dimension except the first, which is contiguous. Each is a
        multiple of 16.
    swizzle : {"none", "32B", "64B", "128B"}
        Swizzle pattern of a tile in shared memory.
    l2 : {"none", "64B", "128B", "256B"}
        Number of bytes that the L2 cache fetches at once.

    Raises
    ------
    ValueError
        If an argument, or later an address, breaks one of these limits.
    RuntimeError
        If the driver has no tensor maps or refuses one.
    """

    __slots__ = ("_after", "_before", "arguments")

    def __init__(
        self,
        dtype_name: str,
        dims: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: str,
        l2: str = "256B",
    ) -> None:
        self.arguments = (dtype_name, dims, strides_bytes, box, swizzle, l2)
        self._before, self._after = _driver_arguments(*self.arguments)

    def at(self, pointer: int) -> bytes:
        """Return the bytes of the map of a tensor that lies at an address."""
        memory, address = aligned_memory(TENSOR_MAP_BYTES)
        self.write(address, pointer)
        return memory.tobytes()

    def write(self, target: int, pointer: int) -> None:
        """Write the map of a tensor that lies at an address to 128 bytes of the host; `target` is a multiple of 64."""
        _check_address(pointer)
        status = driver.tensor_map_encoder()(target, *self._before, pointer, *self._after)
        if status != 0:
            raise RuntimeError(
                f"cuTensorMapEncodeTiled failed with CUDA error {status} for pointer={pointer:#x}, {self}; "
                "tensor maps need a card of compute capability 9.0 or newer"
            )

    def move(self, target: int, pointer: int) -> None:
        """Write another address into a map that `write` has written to 128 bytes of the host."""
        _check_address(pointer)
        if driver.replace_address(target, pointer):
            self.write(target, pointer)  # which raises the error

    def __str__(self) -> str:
        names = ("dtype_name", "dims", "strides_bytes", "box", "swizzle", "l2")
        return ", ".join(f"{name}={value!r}" for name, value in zip(names, self.arguments, strict=True))


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, as `Layout` wants it; NumPy composes it anew each time, which takes 4 us."""
    return str(dtype)


def aligned_memory(size: int) -> tuple[memoryview, int]:
    """Return memory of the host that is aligned for a map, and its address."""
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    skip = -buffer.ctypes.data % _ALIGNMENT
    return memoryview(buffer[skip : skip + size]), buffer.ctypes.data + skip  # type: ignore[arg-type]


# Operands of new plans have known layouts, as a rule.
@lru_cache(maxsize=1024)
def _driver_arguments(
    dtype_name: str, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: str, l2: str
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the driver's arguments between the address of the map and that of the tensor, and those after both."""
    _check(dtype_name, dims, strides, box, swizzle, l2)
    rank = len(dims)
    return (DTYPES[dtype_name][0], rank), (
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * rank)(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # no interleaving
        SWIZZLES[swizzle][0],
        L2_PROMOTIONS[l2],
        0,  # reads out of bounds give zeros
    )


def _check_address(pointer: int) -> None:
    if pointer <= 0 or pointer % 16:
        raise ValueError(f"pointer={pointer:#x}: expected a device address that is a multiple of 16")


def _check(
    dtype_name: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: str,
    l2: str,
) -> None:
    for name, value, known in (
        ("dtype_name", dtype_name, DTYPES),
        ("swizzle", swizzle, SWIZZLES),
        ("l2", l2, L2_PROMOTIONS),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")
    rank = len(dims)
    if not 1 <= rank <= 5:
        raise ValueError(f"dims={dims}: expected 1 to 5 dimensions")
    if not all(1 <= n <= _MAX_DIM for n in dims):
        raise ValueError(f"dims={dims}: expected 1 to 2**32 elements in each dimension")
    if len(strides) != rank - 1:
        raise ValueError(f"strides_bytes={strides}: expected {rank - 1}, one per dimension but the first")
    if not all(0 < n < _MAX_STRIDE and n % 16 == 0 for n in strides):
        raise ValueError(f"strides_bytes={strides}: expected positive multiples of 16 below 2**40")
    if len(box) != rank:
        raise ValueError(f"box={box}: expected {rank} extents, one per dimension of dims={dims}")
    if not all(1 <= n <= _MAX_BOX for n in box):
        raise ValueError(f"box={box}: expected extents of 1 to {_MAX_BOX}")
    inner = box[0] * DTYPES[dtype_name][1]
    if inner % 16:
        raise ValueError(f"box={box}: its rows take {inner} bytes of {dtype_name}, expected a multiple of 16")
    limit = SWIZZLES[swizzle][1]
    if limit is not None and inner > limit:
        raise ValueError(
            f"box={box}: its rows take {inner} bytes of {dtype_name}, expected at most {limit} with swizzle={swizzle!r}"
        )
