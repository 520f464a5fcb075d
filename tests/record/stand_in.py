"""A stand-in for CuPy on a machine without a card: the launch code runs as on an H200, and kernels are only logged.

`install` puts modules `cupy` and `cupyx` into `sys.modules`. Their arrays are those of tests/fake_device with
addresses: memory that NumPy owns, in allocations that begin at multiples of 512 bytes as those of CuPy's pool do.
What a kernel would have computed comes from the host, see host_results.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.machinery
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import fake_device
from . import elementwise, log

_ALIGNMENT = 512
#: Larger allocations are left to a card.
_MOST_BYTES = 1 << 30
#: What a launch asks a card about: those of an H200.
ATTRIBUTES: dict[str, int] = {
    "MultiProcessorCount": 132,
    "L2CacheSize": 52428800,
    "MaxSharedMemoryPerBlockOptin": 232448,
    "MaxSharedMemoryPerMultiprocessor": 233472,
    "MaxThreadsPerBlock": 1024,
    "MaxThreadsPerMultiProcessor": 2048,
    "WarpSize": 32,
    "ClockRate": 1980000,
}
ABOUT: dict[str, Any] = {"card": "NVIDIA H200", "nvrtc": "12.9", "driver": 13000, "capability": "90"}
#: Those that NVRTC 12.9 compiles for.
_ARCHS = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)


class NotOnStandIn(Exception):
    """A test asks for something that only a card can do."""


def _unable(what: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotOnStandIn(what)

    return call


# ------------------------------------------------------------------------------------------------ memory
class Memory:
    """An allocation: `ptr` and `size` as those of CuPy's pool."""

    __slots__ = ("device_id", "ptr", "size")

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr, self.size, self.device_id = ptr, size, 0


class MemoryPointer:
    __slots__ = ("device_id", "mem", "ptr")

    def __init__(self, mem: Memory, ptr: int) -> None:
        self.mem, self.ptr, self.device_id = mem, ptr, 0

    @property
    def device(self) -> Device:
        return Device(0)


_NO_MEMORY = Memory(0, 0)
#: By the identity of the array that owns the memory.
_allocations: dict[int, Memory] = {}


def _allocate(shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None) -> Any:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    if size > _MOST_BYTES:
        raise NotOnStandIn(f"an allocation of {size} bytes")
    rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
    owner = np.empty(rounded + _ALIGNMENT, np.uint8)
    skip = -owner.ctypes.data % _ALIGNMENT
    memory = Memory(owner.ctypes.data + skip, rounded)
    serial = log.ALLOCATIONS.note(memory.ptr, rounded)
    key = id(owner)
    _allocations[key] = memory
    weakref.finalize(owner, _free, key, memory.ptr, serial).atexit = False
    return np.ndarray(shape, dtype, owner.data, skip, strides)  # type: ignore[call-overload]


def _free(key: int, ptr: int, serial: int) -> None:
    _allocations.pop(key, None)
    log.ALLOCATIONS.forget(ptr, serial)


def _owner(memory: Any) -> Any:
    """The array that owns the memory of a view."""
    while True:
        base = memory.base
        if isinstance(base, memoryview):
            base = base.obj
        if base is None:
            return memory
        memory = base


def _placed(memory: np.ndarray[Any, Any], order: str = "K") -> np.ndarray[Any, Any]:
    """A view of device memory as it is; anything else moved to an allocation of its own."""
    if not memory.size or id(_owner(memory)) in _allocations:
        return memory
    strides = np.empty_like(memory, order=order).strides  # type: ignore[call-overload]
    found = _allocate(memory.shape, memory.dtype, strides)
    found[...] = memory
    return found


class ndarray(fake_device.ndarray):
    """An array of the fake device with an address; lenient where CuPy is."""

    __slots__ = ("__weakref__",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"):
        if not isinstance(shape, np.ndarray):  # as CuPy's own constructor has it
            if memptr is not None:
                raise NotOnStandIn("an array around memory from elsewhere")
            shape = np.empty(shape, dtype, order)  # type: ignore[call-overload]
        super().__init__(_placed(shape))

    @property
    def data(self) -> MemoryPointer:
        if not self._memory.size:
            mem = _allocations.get(id(_owner(self._memory)), _NO_MEMORY)
            return MemoryPointer(mem, self._memory.ctypes.data if mem.ptr else 0)
        return MemoryPointer(_allocations[id(_owner(self._memory))], self._memory.__array_interface__["data"][0])

    @property
    def base(self) -> Any:
        return None if self._memory.base is None else self

    @property
    def device(self) -> Device:
        return Device(0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "version": 3,
        }

    def __getitem__(self, key: Any) -> Any:
        parts = fake_device.arrays._key(key)
        found = self._memory[parts]
        if any(isinstance(part, np.ndarray | list) for part in parts):
            found = np.array(found, order="C")  # gathered elements come row by row
        return self._derived(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        value = value._memory if isinstance(value, ndarray) else value
        with np.errstate(all="ignore"):
            self._memory[fake_device.arrays._key(key)] = value

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        if out is None:
            return super().get(stream, order)
        out[...] = self._memory
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        super().set(arr)

    def argmax(self, axis: Any = None) -> Any:
        return fake_device.xp.argmax(self, axis)

    def clip(self, *bounds: Any) -> Any:
        return _call(np.clip, self, *bounds)

    def std(self, *args: Any, **kwargs: Any) -> Any:
        return _call(np.std, self, *args, **kwargs)

    def copy(self, order: str = "C") -> Any:
        return ndarray(self._memory.copy(order=order))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotOnStandIn("DLPack of device memory")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def toDlpack(self) -> Any:
        raise NotOnStandIn("DLPack of device memory")


def _copyto(dst: Any, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    """As CuPy has it: a copy of bytes names the memory of both arrays."""
    if isinstance(src, ndarray) and where is None and src.dtype == dst.dtype and src.shape == dst.shape:
        assert dst.data and src.data
    dst[...] = src if where is None else fake_device.xp.where(where, src, dst)


def _unwrapped(x: Any) -> Any:
    if isinstance(x, fake_device.ndarray):
        return x._memory
    if isinstance(x, tuple | list):
        return type(x)(map(_unwrapped, x))
    return x


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A NumPy function on memory of the device."""
    with np.errstate(all="ignore"):
        result = function(*map(_unwrapped, args), **{name: _unwrapped(x) for name, x in kwargs.items()})
    return kwargs["out"] if kwargs.get("out") is not None else fake_device.arrays._wrap(result)


# ------------------------------------------------------------------------------------------------ streams
class Graph:
    """What the host computes for the launches of a capture."""

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self._work = work

    def launch(self, stream: Any = None) -> None:
        for step in self._work:
            step()

    def upload(self, stream: Any = None) -> None:
        pass


class Event:
    done = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream:
    """Work is done at once; a capture collects it."""

    null: Stream
    ptds: Stream
    _addresses = itertools.count(0x1000, 16)
    _captures = itertools.count(1)

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, **_: Any) -> None:
        self.ptr = 0 if null else 2 if ptds else next(self._addresses)
        self.work: list[Callable[[], None]] | None = None
        self.capture = 0
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(_streams.current)
        _streams.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        _streams.current = self._before.pop()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    @property
    def done(self) -> bool:
        return True

    def use(self) -> Stream:
        _streams.current = self
        return self

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return self.work is not None

    def begin_capture(self, mode: Any = None) -> None:
        self.work, self.capture = [], next(self._captures)

    def end_capture(self) -> Graph:
        work, self.work = self.work, None
        return Graph(work or [])

    def record(self, event: Any = None) -> Event:
        return event or Event()

    def wait_event(self, event: Any) -> None:
        pass

    def launch_host_func(self, callback: Callable[[Any], Any], argument: Any) -> None:
        raise NotOnStandIn("functions of the host in a stream")


class _Streams(threading.local):
    current: Stream

    def __init__(self) -> None:
        self.current = Stream.null


Stream.null, Stream.ptds = Stream(null=True), Stream(ptds=True)
_streams = _Streams()


def do(work: Callable[[], None]) -> None:
    """Do what a launch would do: now, or when the graph runs that is being captured."""
    stream = _streams.current
    if stream.work is None:
        work()
    else:
        stream.work.append(work)


def capture_info() -> Callable[..., int]:
    """cuStreamGetCaptureInfo_v2: the number of the capture that a stream is in."""

    def ask(pointer: int, status: Any, number: Any, *_: Any) -> int:
        number._obj.value = _streams.current.capture if _streams.current.ptr == pointer else 0
        return 0

    return ask


# ------------------------------------------------------------------------------------------------ devices
class Device:
    def __init__(self, device: Any = None) -> None:
        self.id = 0
        self.compute_capability = ABOUT["capability"]
        self.attributes = ATTRIBUTES
        self.mem_info = (100 << 30, 141 << 30)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Device) or other == 0

    def __hash__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "<CUDA Device 0>"

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class MemoryPool:
    def __init__(self, *_: Any) -> None:
        pass

    malloc = None

    def free_all_blocks(self, *_: Any, **__: Any) -> None:
        pass

    def used_bytes(self) -> int:
        raise NotOnStandIn("how much memory a pool holds")

    total_bytes = get_limit = used_bytes


@contextlib.contextmanager
def _using_allocator(allocator: Any = None) -> Iterator[None]:
    yield


class Kernel:
    """What `jit.load` returns: a launch runs nothing."""

    #: By entry: what the host does in place of a kernel whose result the launch code reads.
    results: ClassVar[dict[str, Callable[[tuple[Any, ...]], None]]] = {}
    max_dynamic_shared_size_bytes = 0

    def __init__(self, entry: str) -> None:
        self.entry = entry

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        result = self.results.get(self.entry)
        if result is not None:
            result(args)


def load(spec: Any, arch: str, *, root: Path | None = None) -> Kernel:
    """As `jit.load`, without a compiler."""
    if root is not None:
        raise NotOnStandIn("kernels that are not of the package")
    key = (spec, arch)
    if key not in _kernels:
        _kernels[key] = Kernel(spec.entry)
    return _kernels[key]


_kernels: dict[Any, Kernel] = {}


def encode_tensor_map() -> Callable[..., int]:
    """cuTensorMapEncodeTiled: the bytes are a digest of what was given."""

    def encode(
        result: int, dtype: int, rank: int, pointer: int, dims: Any, strides: Any, box: Any, steps: Any, *how: int
    ) -> int:
        given = repr((dtype, rank, pointer, *(list(x) for x in (dims, strides, box, steps)), how))
        ctypes.memmove(result, hashlib.sha512(given.encode()).digest() * 2, 128)
        return 0

    return encode


# ---------------------------------------------------------------------------------------------- the modules
def _module(name: str, **contents: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    made.__dict__.update(contents)
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, made)
    return made


def _elementwise(operands: str, results: str, operation: str, name: str = "kernel") -> Callable[..., Any]:
    """cupy.ElementwiseKernel for those of the package."""
    compute = elementwise.KERNELS.get(name)
    return _unable(f"the kernel {name}") if compute is None else partial(_call, compute)


class _Fallback(types.ModuleType):
    """Functions that tests use and the fake device lacks are NumPy's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(np, name, None)
        if found is None:
            raise NotOnStandIn(f"{self.__name__}.{name}")
        if isinstance(found, type) or not callable(found):
            return found
        return lambda *args, **kwargs: _call(found, *args, **kwargs)


#: Further functions whose results CuPy writes row by row, where NumPy may keep the order of an operand.
_IN_ROWS = (
    *(
        "all",
        "any",
        "argsort",
        "around",
        "concatenate",
        "cumsum",
        "diff",
        "max",
        "mean",
        "min",
        "prod",
        "repeat",
        "sort",
    ),
    *("stack", "sum", "take", "where"),
)


def _in_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """CuPy's element-wise functions write their results row by row."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, ndarray) and kwargs.get("out") is None and not result.flags.c_contiguous:
            return ndarray(_placed(np.ascontiguousarray(result._memory)))
        return result

    return call


def _empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    shape = tuple(int(n) for n in shape) if isinstance(shape, tuple | list) else (int(shape),)
    dtype = fake_device.arrays._check_dtype(dtype)
    strides = None
    if order == "F":
        strides = tuple(int(x) for x in dtype.itemsize * np.cumprod([1, *shape[:-1]])) if shape else ()
    return ndarray(_allocate(shape, dtype, strides))


class _Held(MemoryPointer):
    """Memory without an array around it, as `cupy.cuda.alloc` returns it."""

    __slots__ = ("array",)

    def __init__(self, size: int) -> None:
        self.array = _empty(size, np.uint8)
        pointer = self.array.data
        super().__init__(pointer.mem, pointer.ptr)


def _zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    found = _empty(shape, dtype, order)
    found._memory[...] = 0
    return found


def _asarray(a: Any, dtype: Any = None, order: Any = None, *, blocking: bool = False) -> Any:
    if isinstance(a, ndarray):
        same = dtype is None or np.dtype(dtype) == a.dtype
        return a if same else a.astype(dtype)
    if type(a).__module__.partition(".")[0] in ("torch", "numba"):
        raise NotOnStandIn("memory of other libraries")
    found = fake_device.functions._asarray(a, dtype)
    if isinstance(a, np.ndarray) and order in (None, "K", "A"):
        # CuPy keeps columns as they are, and makes anything else row by row.
        layout = "F" if a.flags.f_contiguous and not a.flags.c_contiguous else "C"
        return ndarray(_placed(np.asarray(found._memory, order=layout)))  # type: ignore[call-overload]
    return found


def _array(
    obj: Any, dtype: Any = None, copy: bool = True, order: Any = "K", subok: bool = False, ndmin: int = 0
) -> Any:
    found = _asarray(obj, dtype)
    if found is obj and copy:
        found = found.copy()
    return found if found.ndim >= ndmin else found.reshape((1,) * (ndmin - found.ndim) + found.shape)


def _from_dlpack(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        raise BufferError("memory of the host")
    raise NotOnStandIn("DLPack of device memory")


class _Random:
    """cupy.random.Generator: NumPy's numbers, since no launch depends on them."""

    def __init__(self, seed: Any = None) -> None:
        self._generator = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._generator, name)
        return lambda *args, **kwargs: _call(method, *args, **kwargs)


def install(record: dict[str, Any] | None = None) -> types.ModuleType:
    """Replace CuPy by the stand-in, before anything imports CuPy, and return the module.

    It answers as the card of a record did, where there is one.
    """
    if record is not None and record.get("attributes") and record["card"] != "stand-in":
        ATTRIBUTES.update(record["attributes"])
        ABOUT.update({key: record[key] for key in ("card", "nvrtc", "driver")})
    if "cupy" in sys.modules:
        raise RuntimeError("CuPy is imported already")
    for module in (fake_device, fake_device.arrays, fake_device.functions, fake_device.backend):
        module.ndarray = ndarray  # type: ignore[attr-defined]
    ndarray.__module__ = "cupy"
    for foreign in fake_device.backend._CLASSES.values():
        foreign.__module__ = "cupyx.scipy.sparse"
    xp = fake_device.xp
    cupy = _Fallback("cupy")
    cupy.__spec__, cupy.__path__ = importlib.machinery.ModuleSpec("cupy", None, is_package=True), []
    cupy.__version__ = "14.0.0"  # type: ignore[attr-defined]
    sys.modules["cupy"] = cupy
    for name in (*fake_device.FUNCTIONS, *fake_device.UFUNCS):
        function = getattr(xp, name)
        setattr(cupy, name, _in_rows(function) if name in (*fake_device.UFUNCS, *_IN_ROWS) else function)
        setattr(xp, name, getattr(cupy, name))
    for name, value in {
        "ndarray": ndarray,
        "empty": _empty,
        "zeros": _zeros,
        "asarray": _asarray,
        "array": _array,
        "get_array_module": lambda *args: cupy if any(isinstance(x, ndarray) for x in args) else np,
        "get_default_memory_pool": MemoryPool,
        "get_default_pinned_memory_pool": MemoryPool,
        "asnumpy": lambda x, *_, **__: x.get() if isinstance(x, ndarray) else np.asarray(x),
        "clear_memo": lambda: None,
        "copyto": _copyto,
        "from_dlpack": _from_dlpack,
        "ElementwiseKernel": _elementwise,
        "RawModule": _unable("kernels that are compiled"),
        "RawKernel": _unable("kernels that are compiled"),
        "newaxis": None,
        "linspace": lambda *args, **kwargs: _call(np.linspace, *args, **kwargs),
        "asfortranarray": lambda a, dtype=None: _call(np.asfortranarray, a, dtype=dtype),
        "float16": np.float16,
    }.items():
        setattr(cupy, name, value)
    _module("cupy.linalg", **{name: getattr(xp.linalg, name) for name in fake_device.LINALG})
    cupy.linalg.norm = lambda *args, **kwargs: _call(np.linalg.norm, *args, **kwargs)  # type: ignore[attr-defined]
    _module("cupy.random", default_rng=_Random)
    memory = {
        "MemoryPool": MemoryPool,
        "using_allocator": _using_allocator,
        "set_allocator": lambda allocator=None: None,
        "get_allocator": lambda: None,
        "MemoryPointer": MemoryPointer,
    }
    runtime_error = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy.cuda.runtime"})
    _module(
        "cupy.cuda",
        Stream=Stream,
        Event=Event,
        Graph=Graph,
        Device=Device,
        is_available=lambda: True,
        get_current_stream=lambda *_: _streams.current,
        get_device_id=lambda: 0,
        alloc=_Held,
        get_elapsed_time=_unable("times on a card"),
        **memory,
    )
    _module("cupy.cuda.memory", **memory)
    _module("cupy.cuda.stream", Stream=Stream, Event=Event)
    _module(
        "cupy.cuda.runtime",
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        setDevice=lambda device: None,
        deviceSynchronize=lambda: None,
        getDeviceProperties=lambda device: {"name": ABOUT["card"].encode(), "major": 9, "minor": 0},
        driverGetVersion=lambda: ABOUT["driver"],
        runtimeGetVersion=lambda: 12090,
        memGetInfo=lambda: (100 << 30, 141 << 30),
        streamCaptureModeGlobal=0,
        streamCaptureModeThreadLocal=1,
        streamCaptureModeRelaxed=2,
        CUDARuntimeError=runtime_error,
    )
    _module(
        "cupy.cuda.nvrtc",
        getVersion=lambda: tuple(map(int, ABOUT["nvrtc"].split("."))),
        getSupportedArchs=lambda: list(_ARCHS),
        createProgram=_unable("a compiler"),
        NVRTCError=type("NVRTCError", (RuntimeError,), {}),
    )
    _module("cupyx")
    _module("cupyx.scipy")
    sparse = _module("cupyx.scipy.sparse")
    sparse.__dict__.update({k: v for k, v in vars(fake_device.sparse).items() if not k.startswith("__")})
    _module(
        "cupyx.scipy.sparse._base",
        _spbase=fake_device.backend._spbase,
        sparray=fake_device.sparray,
        spmatrix=fake_device.spmatrix,
    )
    return cupy
