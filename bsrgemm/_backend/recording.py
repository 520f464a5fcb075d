"""Public calls while a CUDA graph is captured: whatever they read, and whatever they allocate, lives as long as it.

Launches of kernels keep what they point to (`_kernels.launch`). Around them, CuPy's own kernels copy, convert
and scale; these are known to the call alone, which therefore keeps everything that its arguments lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar, cast

from .index_arrays import plain_array

_Method = TypeVar("_Method", bound=Callable[..., Any])
_PACKAGE = __name__.partition(".")[0]


def recorded(method: _Method) -> _Method:
    """Decorate a method of an object with a `_backend`, so that a graph that is captured keeps what it works with."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not self._backend.is_recording():
            return method(self, *args, **options)
        with self._backend.recording(self, args, options):
            return method(self, *args, **options)

    return cast(_Method, call)


def arrays_of(backend: Any, x: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the arrays of a backend that an object leads to, through containers and objects of this package."""
    seen = set() if seen is None else seen
    if id(x) in seen or isinstance(x, type):
        return
    seen.add(id(x))
    if backend.is_dense(x):
        yield plain_array(x)  # to read the memory of an array that counts writes would count as one
    elif isinstance(x, dict):
        for part in list(x.values()):
            yield from arrays_of(backend, part, seen)
    elif isinstance(x, tuple | list | set):
        for part in list(x):
            yield from arrays_of(backend, part, seen)
    elif type(x).__module__.partition(".")[0] == _PACKAGE and not callable(getattr(x, "is_dense", None)):
        names = [name for cls in type(x).__mro__ for name in getattr(cls, "__slots__", ())]
        yield from arrays_of(backend, getattr(x, "__dict__", {}), seen)
        yield from arrays_of(backend, [getattr(x, name, None) for name in names if name != "__weakref__"], seen)
