"""Arrays of other libraries through DLPack, bfloat16 included, and the reason where one cannot be read.

The protocol hands over a capsule with a `DLTensor`: address, device, sizes, strides and a type code. Array modules that
do not know the code of bfloat16 read such a tensor as uint16, after its type code was changed in the capsule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ..dtypes import BFLOAT16
from .base import Array
from .names import class_of

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
ON_HOST, ON_DEVICE = (CPU, CUDA_HOST), (CUDA, CUDA_MANAGED)
#: DLDataType begins with the type code and the number of bits, each one byte.
_UINT_16, _BFLOAT_16 = bytes((1, 16)), bytes((4, 16))
#: Name of a capsule -> where its DLTensor begins: after version, context, deleter and flags if it has a version.
_TENSOR_AT = {b"dltensor": 0, b"dltensor_versioned": 32}
#: Where the DLDataType of a DLTensor begins: after the address, the device and the number of dimensions.
_DTYPE_AT = 20
#: What libraries and array modules raise for a tensor that they do not export, or cannot read.
REFUSALS = (BufferError, RuntimeError, TypeError, ValueError, KeyError)

_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype, _capsule_is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class Unreadable(TypeError):
    """An array of another library is on the right device but cannot be read; the message has the reason."""


def device_kind(x: Any) -> int | None:
    """The number that DLPack has for the kind of device of `x`; None if `x` offers no DLPack or is on no device."""
    if not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        return None
    try:
        return int(x.__dlpack_device__()[0])
    except REFUSALS:
        return None


def has_cuda_interface(x: Any) -> bool:
    """Tell whether `x` offers the CUDA array interface; torch raises RuntimeError if a tensor requires a gradient."""
    try:
        return getattr(x, "__cuda_array_interface__", None) is not None
    except REFUSALS:
        return False


def read(x: Any, from_dlpack: Callable[[Any], Array]) -> Array:
    """Return `x` as an array by an array module's `from_dlpack`, without a copy; bfloat16 through uint16.

    `Unreadable` if the library of `x` does not export it, or the array module does not know its dtype.
    """
    try:
        return from_dlpack(x)
    except REFUSALS as error:
        raise_if_cuda(error)
        first = error
    bits = _Bits(x)
    try:
        array = from_dlpack(bits)
    except REFUSALS:
        raise unreadable(x, first) from first
    if not bits.changed:  # the array module could read it the second time
        return array
    return array.view(BFLOAT16)


def raise_if_cuda(error: BaseException) -> None:
    """Raise an error of CUDA itself again, such as one of an earlier kernel: it says nothing about the array."""
    if type(error).__module__.startswith("cupy"):
        raise error


def unreadable(x: Any, error: BaseException) -> Unreadable:
    """The error for `x`, with the reason that its library or the array module gave."""
    name = f"a {class_of(x)}"
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if getattr(x, "requires_grad", False) is True:
        hint = "Nothing here is recorded for autograd: pass x.detach()."
    elif "conj" in reason:
        hint = "Pass x.resolve_conj()."
    elif "float8" in reason:
        hint = "Numbers of 8 bits are taken as bytes: pass x.view(torch.uint8) and a scale."
    elif "layout" in reason:
        hint = "bsr_array(x) takes torch's BSR layout; x.to_dense() makes a dense tensor."
    else:
        hint = f"Convert it first, to a dense array of dtype {np.dtype(np.float32)} for example."
    return Unreadable(f"{name} cannot be read through DLPack: {reason}. {hint}")


class _Bits:
    """Exports a tensor of bfloat16 as uint16, and any other tensor as it is."""

    def __init__(self, x: Any) -> None:
        self._x = x
        self.changed = False

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        capsule = self._x.__dlpack__(*args, **options)
        for name, tensor in _TENSOR_AT.items():
            if _capsule_is_valid(capsule, name):
                dtype = _capsule_pointer(capsule, name) + tensor + _DTYPE_AT
                if ctypes.string_at(dtype, len(_BFLOAT_16)) == _BFLOAT_16:
                    ctypes.memmove(dtype, _UINT_16, len(_UINT_16))
                    self.changed = True
        return capsule
