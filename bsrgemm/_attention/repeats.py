"""Attention whose arguments were checked before: the same kind of call is started without checking them again.

Calls are of the same kind if their arrays have the same shapes, strides and dtypes, and their options are equal and of
the same types. Only addresses differ between them. Only engines whose launches can be started again take part: that of
a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._backend.base import Array, Backend
from .._kernels.movable import ALIGNMENT, Launches
from .call import asked_for
from .engine import Launch

#: Kinds of calls that are remembered for one mask, or without a mask.
_MOST_CALLS = 64
#: Addresses of q, k, v, the result and the logarithms of the sums; 0 where these are not wanted.
Places = tuple[int, int, int, int, int]
#: Classes of arrays whose engine returns launches.
_array_types: set[type] = set()
#: The calls without a mask; those with a mask are kept on the mask.
_calls: dict[Any, Repeat] = {}


@dataclass(slots=True)
class Repeat:
    """What is known of a call after its arguments were checked: what its results are, and its launches."""

    backend: Backend
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    #: shape of the logarithms of the sums, and their dtype; None if they are not wanted
    lse: tuple[tuple[int, ...], np.dtype[Any]] | None
    launches: Launches[Launch] = field(default_factory=Launches)

    def again(self, q: Array, k: Array, v: Array, out: Array | None) -> Any:
        """Start the call; None if it has to be checked, since its addresses are new.

        With new addresses, an `out` of the caller may overlap an operand. An array that is allocated here does not.
        """
        backend = self.backend
        result = backend.empty(self.shape, self.dtype) if out is None else out
        lse = None if self.lse is None else backend.empty(*self.lse)
        places = _places(q, k, v, result, lse)
        launch = self.launches.kept.get(places)
        if launch is not None:
            if not launch.start((q, k, v, result, lse)):
                return None
        else:
            moved = None if out is not None or _misaligned(places) else self.launches.take(places)
            if moved is None or not moved.start((q, k, v, result, lse)):
                return None
            self.launches.give_back(places, moved)
        return result if lse is None else (result, lse)

    def remember(self, places: Places, launch: Launch) -> None:
        """Keep a launch for the next call with these addresses."""
        self.launches.keep(places, launch, not _misaligned(places))


def _places(q: Array, k: Array, v: Array, result: Array, lse: Array | None) -> Places:
    return q.data.ptr, k.data.ptr, v.data.ptr, result.data.ptr, 0 if lse is None else lse.data.ptr


def _misaligned(places: Places) -> int:
    q, k, v, result, _ = places
    return (q | k | v | result) % ALIGNMENT


#: The arguments of a call that its key depends on: q, k and v; out; window; all other options.
Asked = tuple[tuple[Any, Any, Any], Any, Any, tuple[Any, ...]]


def lookup(asked: Asked, mask: Any) -> Repeat | None:
    """Return what is known of calls of this kind, or None."""
    try:
        return _calls_of(mask).get(_key_of(*asked))
    except TypeError:  # an option is an array or a list, which cannot be looked up
        return None


def remember(asked: Asked, mask: Any, repeat: Repeat, results: tuple[Array, Array | None], launch: Launch) -> None:
    """Keep the launch of a call whose arguments were checked."""
    _array_types.add(type(results[0]))
    calls, key = _calls_of(mask), _key_of(*asked)
    if key is None:
        return
    try:
        found = calls.get(key)
    except TypeError:
        return
    if found is None:
        if len(calls) >= _MOST_CALLS:
            calls.clear()
        found = calls.setdefault(key, repeat)
    found.remember(_places(*asked[0], *results), launch)


def _calls_of(mask: Any) -> dict[Any, Repeat]:
    found: dict[Any, Repeat] = _calls if mask is None else mask.__dict__.setdefault("_calls", {})
    return found


def _key_of(operands: tuple[Any, Any, Any], out: Any, window: Any, options: tuple[Any, ...]) -> Any:
    """Return everything that the checks of a call depend on, apart from addresses; None if it cannot be remembered.

    Options of another type are another call: ``causal=1`` equals ``causal=True``, but is refused.
    """
    q, k, v = operands
    kind = type(q)
    if kind not in _array_types or type(k) is not kind or type(v) is not kind:
        return None
    asked = asked_for(kind, out, window, options)
    if asked is None:
        return None
    return q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype, asked
