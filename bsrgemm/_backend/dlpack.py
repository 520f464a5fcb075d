"""Arrays of other libraries through DLPack, bfloat16 included, and the reason where one cannot be read.

The protocol hands over a capsule with a `DLTensor`: address, device, sizes, strides and a type code. Not every array
module knows the code of bfloat16: such a tensor is read as uint16, after its type code was changed in the capsule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ..dtypes import BFLOAT16
from .base import Array, class_of

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
ON_HOST, ON_DEVICE = (CPU, CUDA_HOST), (CUDA, CUDA_MANAGED)
#: DLDataType begins with the type code and the number of bits, each one byte.
_UINT_16, _BFLOAT_16 = bytes((1, 16)), bytes((4, 16))
#: Name of a capsule -> where its DLTensor begins: after version, context, deleter and flags if it has a version.
_TENSOR_AT = {b"dltensor": 0, b"dltensor_versioned": 32}
#: Where the DLDataType of a DLTensor begins: after the address, the device and the number of dimensions.
_DTYPE_AT = 20
#: Where the flags of a capsule with a version are, in bytes before its DLTensor, and the one that forbids to write.
_FLAGS_BEFORE, _READ_ONLY = 8, 1
#: What DLPack calls CUDA's default stream, and the default stream of each thread.
_DEFAULT_STREAM, _STREAM_OF_THREAD = 1, 2
#: What libraries and array modules raise for a tensor that they do not export, or cannot read.
REFUSALS = (BufferError, RuntimeError, TypeError, ValueError, KeyError)

_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype, _capsule_is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class Unreadable(TypeError):
    """An array of another library is on the right device but cannot be read; the message has the reason."""


class ReadOnly(ValueError):
    """An array of another library that is to hold a result may not be written to."""


def device_kind(x: Any) -> int | None:
    """The number that DLPack has for the kind of device of `x`; None if `x` offers no DLPack or is on no device."""
    if not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        return None
    try:
        return int(x.__dlpack_device__()[0])
    except REFUSALS:
        return None


def cuda_interface(x: Any) -> Any:
    """What `x` says by the CUDA array interface; None if nothing, as torch's tensors that require a gradient."""
    try:
        return getattr(x, "__cuda_array_interface__", None)
    except REFUSALS:
        return None


def read(x: Any, from_dlpack: Callable[[Any], Array], *, writes: bool = False, stream: int | None = None) -> Array:
    """Return `x` as an array by an array module's `from_dlpack`, without a copy; bfloat16 through uint16.

    `Unreadable` if the library of `x` does not export it, or the array module does not know its dtype; `ReadOnly` if it
    is to be written to and may not be. With `stream`, the work that `x` has to wait for is that of this stream, instead
    of the one that the array module names.
    """
    export = _Export(x, stream)
    try:
        array = from_dlpack(export)
    except REFUSALS as error:
        raise_if_cuda(error)
        raise unreadable(x, error) from error
    if writes and not export.is_writable():
        raise read_only(x)
    return array.view(BFLOAT16) if export.is_bfloat16 else array


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
    elif "negative bit" in reason:
        hint = "Pass x.resolve_neg()."
    elif "device index" in reason:
        hint = "Make its device the current one of its library first, such as by torch.cuda.device(x.device)."
    elif "float8" in reason or "float8" in str(getattr(x, "dtype", "")):
        hint = "Numbers of 8 bits are taken as bytes: pass x.view(torch.uint8) and a scale."
    elif "layout" in reason:
        hint = "bsr_array(x) takes torch's BSR layout; x.to_dense() makes a dense tensor."
    else:
        hint = f"Convert it first, to a dense array of dtype {np.dtype(np.float32)} for example."
    return Unreadable(f"{name} cannot be read through DLPack: {reason}. {hint}")


def read_only(x: Any) -> ReadOnly:
    """The error for an `x` that is to be written to, and whose library does not say that it may be."""
    return ReadOnly(f"a {class_of(x)} that its library exports as read-only cannot hold a result. Pass a copy of it.")


class _Export:
    """Exports `x` as it is, except bfloat16, which becomes uint16, and keeps what the capsule says about it."""

    def __init__(self, x: Any, stream: int | None) -> None:
        self._x, self._stream = x, stream
        self.is_bfloat16 = False
        #: the flags of the capsule; None before version 1 of the protocol, which has none
        self._flags: int | None = None

    def is_writable(self) -> bool:
        """Whether `x` may be written to, as the capsule or else the CUDA array interface says."""
        if self._flags is not None:
            return not self._flags & _READ_ONLY
        interface = cuda_interface(self._x)
        return interface is not None and not interface["data"][1]

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        if getattr(self._x, "is_neg", bool)():  # torch exports the numbers before their signs are changed
            raise BufferError("its negative bit is set")
        if self._stream is not None:
            options["stream"] = self._stream
        try:
            capsule = self._x.__dlpack__(*args, **options)
        except BufferError:
            if options.get("stream") != _STREAM_OF_THREAD:
                raise
            # torch knows no stream of a thread; what such a stream is given later waits for the default stream.
            capsule = self._x.__dlpack__(*args, **(options | {"stream": _DEFAULT_STREAM}))
        for name, tensor in _TENSOR_AT.items():
            if _capsule_is_valid(capsule, name):
                start = _capsule_pointer(capsule, name)
                if tensor:
                    self._flags = ctypes.c_uint64.from_address(start + tensor - _FLAGS_BEFORE).value
                dtype = start + tensor + _DTYPE_AT
                if ctypes.string_at(dtype, len(_BFLOAT_16)) == _BFLOAT_16:
                    ctypes.memmove(dtype, _UINT_16, len(_UINT_16))
                    self.is_bfloat16 = True
                break
        return capsule
