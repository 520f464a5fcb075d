"""Index arrays of CuPy itself: each way to write into them, or to hand out their memory, is known. Nothing runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bsrgemm._backend import index_arrays
from bsrgemm._backend.index_arrays import Unwritten, plain_array

from .test_index_arrays import counted

cupy = pytest.importorskip("cupy")


#: What of CuPy's arrays neither writes into them nor hands out their memory.
READING = """
    T __abs__ __add__ __and__ __array__ __array_finalize__ __array_priority__ __bool__ __bytes__ __class__
    __class_getitem__ __complex__ __copy__ __deepcopy__ __delattr__ __delitem__ __dir__ __div__ __divmod__
    __dlpack_device__ __doc__ __eq__ __float__ __floordiv__ __format__ __ge__ __getattribute__ __getitem__
    __getstate__ __gt__ __hash__ __hex__ __init__ __init_subclass__ __int__ __invert__ __iter__ __le__ __len__
    __lshift__ __lt__ __matmul__ __mod__ __module__ __mul__ __ne__ __neg__ __new__ __oct__ __or__ __pos__
    __pow__ __pyx_vtable__ __radd__ __rand__ __rdivmod__ __reduce__ __reduce_ex__ __repr__ __rfloordiv__
    __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__
    __rxor__ __setattr__ __setstate__ __sizeof__ __slots__ __str__ __sub__ __subclasshook__ __truediv__ __xor__
    _add_reduceat _astype _c_contiguous _check_kind_sort _f_contiguous _index_32_bits _init
    _set_shape_and_strides _shape _strides all any argmax argmin argpartition argsort astype choose clip
    compress conj conjugate copy cumprod cumsum device diagonal dot dtype dump dumps flags flat flatten get imag
    item itemsize mT max mean min nbytes ndim nonzero prod ptp ravel real reduced_view repeat reshape round
    searchsorted shape size squeeze std strides sum swapaxes take tobytes tofile tolist trace transpose var
"""


def test_every_method_of_cupys_arrays_is_known_to_read_or_to_write() -> None:
    watched = index_arrays.watched_class(cupy.ndarray, lambda x: None)
    for name in dir(cupy.ndarray):
        overridden = getattr(watched, name) is not getattr(cupy.ndarray, name)
        assert name in READING.split() or overridden, f"{name}: does it write into the array, or hand out its memory?"


def cupy_array() -> Any:
    """An array of CuPy that begins at no memory: kernels cannot be started on it, and need not be."""
    if cupy.cuda.is_available():
        pytest.skip("kernels would run on memory that is none; tests/gpu/test_written_indices.py tells more")
    from bsrgemm._backend.cupy_backend import CupyBackend

    memory = cupy.cuda.memory.UnownedMemory(1 << 20, 4096, None, 0)
    plain = cupy.ndarray((6,), np.int32, cupy.cuda.MemoryPointer(memory, 0))
    return CupyBackend().watched(plain)


CUPY_WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "x[k] = v": lambda cupy, x: x.__setitem__(1, 7),
    "a slice": lambda cupy, x: x[2:4].__setitem__(1, 7),
    "a reshaped one": lambda cupy, x: x.reshape(2, 3).__setitem__((1, 1), 7),
    "+=": lambda cupy, x: x.__iadd__(1),
    "fill": lambda cupy, x: x.fill(7),
    "put": lambda cupy, x: x.put(1, 7),
    "cupy.put": lambda cupy, x: cupy.put(x, 1, 7),
    "set": lambda cupy, x: x.set(np.zeros(6, np.int32)),
    "sort": lambda cupy, x: x.sort(),
    "partition": lambda cupy, x: x.partition(1),
    "scatter_add": lambda cupy, x: x.scatter_add(1, 7),
    "add.at": lambda cupy, x: cupy.add.at(x, 1, 7),
    "flat": lambda cupy, x: x.flat.__setitem__(1, 7),
    "an output by position": lambda cupy, x: cupy.add(plain_array(x), 1, x),
    "an output that is an input": lambda cupy, x: cupy.add(x, 1, out=x),
    "an output of NumPy": lambda cupy, x: np.add(plain_array(x), 1, out=x),
    "an output of an element-wise kernel": lambda cupy, x: cupy.ElementwiseKernel("T x", "T y", "y = x")(
        plain_array(x), x
    ),
    "copyto": lambda cupy, x: cupy.copyto(x, plain_array(x)),
    "copyto of a number": lambda cupy, x: cupy.copyto(x, 1),
}
CUPY_ESCAPES: dict[str, Callable[[Any], Any]] = {
    "data": lambda x: x.data,
    "base": lambda x: x.base,
    "cstruct": lambda x: x.cstruct,
    "the CUDA array interface": lambda x: x.__cuda_array_interface__,
    "DLPack": lambda x: x.__dlpack__(),
    "toDlpack": lambda x: x.toDlpack(),
    "a plain view": lambda x: x.view(type(plain_array(x))),
    "a plain view by keyword": lambda x: x.view(type=type(plain_array(x))),
    "the memory of a view": lambda x: x[1:].data,
}
CUPY_READS: dict[str, Callable[[Any, Any], Any]] = {
    "x + 1": lambda cupy, x: x + 1,
    "x == x": lambda cupy, x: x == x,
    "sum": lambda cupy, x: x.sum(),
    "get": lambda cupy, x: x.get(),
    "copy": lambda cupy, x: x.copy(),
    "astype": lambda cupy, x: x.astype(np.int64),
    "x[k]": lambda cupy, x: x[1],
    "as an index": lambda cupy, x: plain_array(x)[x],
    "argsort": lambda cupy, x: cupy.argsort(x),
    "concatenate": lambda cupy, x: cupy.concatenate([x, x]),
    "diff": lambda cupy, x: cupy.diff(x),
    "where": lambda cupy, x: cupy.where(x, x, x),
    "repr": lambda cupy, x: repr(x),
    "may_share_memory": lambda cupy, x: cupy.may_share_memory(x, x),
    "shape": lambda cupy, x: (x.shape, x.dtype, x.flags.c_contiguous, len(x), x.device),
}


@pytest.mark.parametrize("write", CUPY_WRITES.values(), ids=CUPY_WRITES)
def test_writes_into_an_array_of_cupy_count(write: Callable[[Any, Any], Any]) -> None:
    x = cupy_array()

    def attempt() -> None:
        with contextlib.suppress(RuntimeError):  # there is no GPU that could do it
            write(cupy, x)

    assert counted(x, attempt)


@pytest.mark.parametrize("read", CUPY_READS.values(), ids=CUPY_READS)
def test_reading_an_array_of_cupy_does_not_count(read: Callable[[Any, Any], Any]) -> None:
    x = cupy_array()

    def attempt() -> None:
        with contextlib.suppress(RuntimeError):
            read(cupy, x)

    assert not counted(x, attempt)


@pytest.mark.parametrize("escape", CUPY_ESCAPES.values(), ids=CUPY_ESCAPES)
def test_memory_of_cupy_that_is_handed_out_may_always_have_been_written(escape: Callable[[Any], Any]) -> None:
    x = cupy_array()
    assert Unwritten(x, x).holds()
    with contextlib.suppress(RuntimeError):
        escape(x)
    assert not Unwritten(x, x).holds()


def test_the_backend_reads_addresses_without_handing_them_out() -> None:
    x = cupy_array()
    from bsrgemm._backend import registry

    assert registry.backend_of(x) is registry.cuda()
    assert registry.cuda().extent(x) == (1 << 20, (1 << 20) + 24)
    assert Unwritten(x, x).holds()
