"""The modules `cupy` and `cupyx` of a fake card."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from . import arrays, elementwise, functions, memory, sparse, streams
from .arrays import call, ndarray
from .card import Card
from .operators import recorded


class NotThere(NotImplementedError):
    """The fake CuPy lacks something that CuPy has."""


def _unable(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotThere(f"the fake CuPy has no {what}")

    return refuse


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Functions whose results CuPy writes row by row, where NumPy may keep the order of an operand.
_IN_ROWS = _words("all any argsort around concatenate cumsum diff max mean min prod repeat sort stack sum take where")
#: Functions whose results have as many elements as the numbers say: they wait for the card.
_COUNTING = _words("bincount flatnonzero nonzero unique")
#: Functions that ask about arrays and do no work.
_ASKING = _words("can_cast isscalar may_share_memory ndim result_type shape size")
#: Functions that CuPy has and tests use, which the package does not call.
_MORE = _words(
    "abs allclose array_equal array_split clip copysign cumprod dot einsum eye hstack identity isclose kron linspace "
    "moveaxis outer pad roll rollaxis signbit split std swapaxes tensordot tile trace tri tril triu var vdot vstack"
)
#: Types and constants of NumPy that CuPy has too.
_SAME = _words(
    "newaxis pi inf nan bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128 dtype ndindex iinfo finfo"
)


def _in_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, ndarray) and kwargs.get("out") is None and not result.flags.c_contiguous:
            return ndarray(np.ascontiguousarray(result._memory))
        return result

    if hasattr(function, "nin"):
        run.nin = function.nin  # type: ignore[attr-defined]
    run.__name__ = function.__name__
    return run


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        streams.wait(f"cupy.{function.__name__}")
        return function(*args, **kwargs)

    return run


def _empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def _empty_like(prototype: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None) -> ndarray:
    like = np.empty_like(prototype._memory, dtype, order, True, shape)  # type: ignore[call-overload]
    found = ndarray(like)
    found._memory[...] = arrays._garbage(found.dtype)
    return found


def _zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    found = ndarray(shape, dtype, order=order)
    found.fill(0)
    return found


def _asarray(a: Any, dtype: Any = None, order: Any = None, *, blocking: bool = False) -> Any:
    if isinstance(a, ndarray):
        return a if dtype is None or np.dtype(dtype) == a.dtype else a.astype(dtype)
    found = functions._asarray(a, dtype)
    if isinstance(a, np.ndarray) and order in (None, "K", "A"):
        # CuPy keeps columns as they are, and makes anything else row by row.
        layout = "F" if a.flags.f_contiguous and not a.flags.c_contiguous else "C"
        return ndarray(np.asarray(found._memory, order=layout))  # type: ignore[call-overload]
    return found


def _array(
    obj: Any, dtype: Any = None, copy: bool = True, order: Any = "K", subok: bool = False, ndmin: int = 0
) -> Any:
    found = _asarray(obj, dtype)
    if found is obj and copy:
        found = found.copy()
    return found if found.ndim >= ndmin else found.reshape((1,) * (ndmin - found.ndim) + found.shape)


class OnHost:
    """What `np.from_dlpack` reads of an export that says that it is on a card."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule


def _from_dlpack(x: Any) -> ndarray:
    """The memory of another library as it is; CuPy asks for the newest version first."""
    if isinstance(x, np.ndarray):
        raise BufferError("memory of the host")
    stream = streams.current().ptr or 1
    try:
        capsule = x.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:
        capsule = x.__dlpack__(stream=stream)
    return ndarray(memory.foreign(np.from_dlpack(OnHost(capsule))))


def _copyto(dst: Any, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    dst[...] = src if where is None else arrays.xp.where(where, src, dst)


class _ElementwiseKernel:
    """`cupy.ElementwiseKernel`, for those that the package has."""

    def __init__(self, operands: str, results: str, operation: str, name: str = "kernel") -> None:
        self.nin, self._compute = operands.count(",") + 1, elementwise.KERNELS.get(name) or _unable(name)
        self.name = name
        self._run = recorded(self._plain, writes=True)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        return call(self._compute, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for x in args:
            if hasattr(x, "__cupy_override_elementwise_kernel__"):
                return x.__cupy_override_elementwise_kernel__(self, *args, **kwargs)
        return self._run(*args, **kwargs)


class _Random:
    """`cupy.random.Generator`, with NumPy's numbers."""

    def __init__(self, seed: Any = None) -> None:
        self._generator = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._generator, name)
        return lambda *args, **kwargs: call(method, *args, **kwargs)


class Modules:
    """The modules, and the card on which they are."""

    def __init__(self) -> None:
        self.card: Card | None = None
        self.by_name: dict[str, types.ModuleType] = {}
        self.cupy = self._module("cupy", **self._functions())
        self.cupy.__version__ = "14.0.0"  # type: ignore[attr-defined]
        linalg = {name: recorded(function) for name, function in functions.offered_in_linalg().items()}
        self._module("cupy.linalg", **linalg, norm=recorded(lambda *args, **how: call(np.linalg.norm, *args, **how)))
        self._module("cupy.random", default_rng=_Random)
        self._cuda()
        self._sparse()

    def _module(self, name: str, **contents: Any) -> types.ModuleType:
        made = self.by_name[name] = arrays.xp if name == "cupy" else types.ModuleType(name)
        made.__path__ = []
        made.__dict__.update(contents)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(self.by_name[parent], last, made)
        return made

    @property
    def _heap(self) -> memory.Heap:
        return self._there.heap

    @property
    def _there(self) -> Card:
        if self.card is None:
            raise NotThere("no fake card is installed")
        return self.card

    def _functions(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, function in functions.offered().items():
            if name in _COUNTING:
                function = _waiting(function)
            elif name not in _ASKING:
                in_rows = name in _IN_ROWS or name in functions.UFUNCS
                function = recorded(_in_rows(function) if in_rows else function)
            found[name] = function
        for name in _MORE:
            plain = getattr(np, name)
            found[name] = recorded(lambda *args, plain=plain, **kwargs: call(plain, *args, **kwargs))
        found |= {name: getattr(np, name) for name in _SAME}
        return found | {
            "ndarray": ndarray,
            "empty": _empty,
            "empty_like": _empty_like,
            "zeros": _zeros,
            "asarray": _asarray,
            "array": _array,
            "asnumpy": lambda x, *_, **__: x.get() if isinstance(x, ndarray) else np.asarray(x),
            "asfortranarray": recorded(lambda a, dtype=None: call(np.asfortranarray, a, dtype=dtype)),
            "copyto": _copyto,
            "from_dlpack": _from_dlpack,
            "get_array_module": lambda *xs: self.cupy if any(isinstance(x, ndarray) for x in xs) else np,
            "get_default_memory_pool": lambda: memory.MemoryPool(self._heap, of_card=True),
            "get_default_pinned_memory_pool": lambda: memory.MemoryPool(self._heap, of_card=True),
            "ElementwiseKernel": _ElementwiseKernel,
            "RawKernel": lambda source, name: lambda grid, threads, args, **_: None,  # the delay of a measurement
            "RawModule": _unable("kernels that are compiled by NVRTC"),
            "clear_memo": lambda: None,
        }

    def _cuda(self) -> None:
        modules = self

        class Device:
            """`cupy.cuda.Device`; there is one, and its number is that of the card."""

            def __init__(self, device: Any = None) -> None:
                self.id = modules._there.number
                self.attributes = modules._there.attributes
                self.compute_capability = modules._there.capability
                self.mem_info = (100 << 30, 141 << 30)

            def __enter__(self) -> Device:
                return self

            def __exit__(self, *_: Any) -> None:
                pass

            def __eq__(self, other: Any) -> bool:
                return int(other) == self.id

            def __hash__(self) -> int:
                return self.id

            def __int__(self) -> int:
                return self.id

            def __repr__(self) -> str:
                return f"<CUDA Device {self.id}>"

            def use(self) -> None:
                pass

            def synchronize(self) -> None:
                streams.wait("Device.synchronize")

        pools = {
            "MemoryPool": lambda *_: memory.MemoryPool(self._heap),
            "MemoryPointer": memory.pointing,
            "UnownedMemory": memory.UnownedMemory,
            "using_allocator": memory.using_allocator,
        }
        self._module(
            "cupy.cuda",
            Stream=streams.Stream,
            Event=streams.Event,
            Graph=streams.Graph,
            Device=Device,
            is_available=lambda: self.card is not None,
            get_current_stream=lambda *_: streams.current(),
            get_device_id=lambda: self._there.number,
            alloc=lambda size: memory.pointer(self._heap, size),
            alloc_pinned_memory=memory.pinned,
            get_elapsed_time=lambda start, stop: max(1e-3, stop.time - start.time),
            **pools,
        )
        self._module("cupy.cuda.memory", OutOfMemoryError=memory.OutOfMemory, **pools)
        self._module("cupy.cuda.stream", Stream=streams.Stream, Event=streams.Event)
        self._module(
            "cupy.cuda.runtime",
            getDevice=lambda: self._there.number,
            getDeviceCount=lambda: 1,
            setDevice=lambda device: None,
            deviceSynchronize=lambda: streams.wait("deviceSynchronize"),
            getDeviceProperties=lambda device: {
                "name": b"an emulated card",
                "major": int(self._there.capability) // 10,
                "minor": int(self._there.capability) % 10,
                "totalGlobalMem": 141 << 30,
            },
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 12090,
            memGetInfo=lambda: (100 << 30, 141 << 30),
            streamCaptureModeGlobal=0,
            streamCaptureModeThreadLocal=1,
            streamCaptureModeRelaxed=2,
            CUDARuntimeError=streams.CUDARuntimeError,
        )
        self._module(
            "cupy.cuda.nvrtc",
            getVersion=lambda: (12, 9),
            getSupportedArchs=lambda: [75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121],
            createProgram=_unable("compiler"),
            NVRTCError=type("NVRTCError", (RuntimeError,), {}),
        )

    def _sparse(self) -> None:
        self._module("cupyx")
        self._module("cupyx.scipy")
        self._module("cupyx.scipy.sparse", **sparse.OFFERED)
        kinds = {"_spbase": sparse._spbase, "sparray": sparse.sparray, "spmatrix": sparse.spmatrix}
        self._module("cupyx.scipy.sparse._base", **kinds)


ndarray.__module__ = "cupy"
__all__ = ["Modules", "NotThere", "arrays"]
