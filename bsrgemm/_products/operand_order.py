"""The order, along rows or along columns, in which the copy engine can read a dense operand."""

from __future__ import annotations

from .._backend.base import Array

#: Limits of strides in bytes: between matrices of a batch (a limit of tensor maps), and between rows, which the kernels
#: for few columns hold in 32 bits.
_MOST_STRIDE, _MOST_PITCH = 2**40, 2**32


def order_of(x: Array) -> str:
    """Return "C" or "F" for matrices that the copy engine can read along rows or along columns, otherwise ""."""
    strides = x.strides
    if x.data.ptr % 16 or (len(strides) == 3 and x.shape[0] > 1 and not 0 < strides[0] < _MOST_STRIDE):
        return ""
    if len(strides) == 3 and strides[0] % 16:
        return ""
    size = x.itemsize
    row, col = strides[-2:]
    rows, cols = x.shape[-2:]
    if cols == 1 and row == size:
        return "F"  # with a single column, the stride between columns does not matter
    if col == size and row % 16 == 0 and size * cols <= row < _MOST_PITCH:
        return "C"
    if row == size and col % 16 == 0 and size * rows <= col < _MOST_PITCH:
        return "F"
    return ""
