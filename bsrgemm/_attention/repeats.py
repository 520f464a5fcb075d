"""Attention that was computed before: a call with the same arguments is started again without checking them again.

A call is the same if its operands have the same addresses, shapes, strides and dtypes and its options are equal and of
the same types. Only engines whose launches can be started again take part: those of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._backend.base import Array, Backend
from .engine import Launch

#: Calls that are remembered for one mask, or without a mask; and sets of result arrays for each of them.
_MOST_CALLS, _MOST_RESULTS = 256, 16
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
    #: by the addresses, strides, shapes and dtypes of the result and of the logarithms
    launches: dict[Any, Launch] = field(default_factory=dict)

    def again(self, out: Array | None) -> Any:
        """Start the call with a result array that it was started with before; None if there is no such launch."""
        xp = self.backend.xp
        result = xp.empty(self.shape, self.dtype) if out is None else out
        if type(result) not in _array_types:
            return None
        lse = None if self.lse is None else xp.empty(*self.lse)
        launch = self.launches.get(_results_key(result, lse))
        if launch is None or not launch.start():
            return None
        return result if lse is None else (result, lse)

    def remember(self, result: Array, lse: Array | None, launch: Launch) -> None:
        """Keep a launch for the next call with these result arrays."""
        if len(self.launches) >= _MOST_RESULTS:
            self.launches.clear()
        self.launches[_results_key(result, lse)] = launch


@dataclass(slots=True)
class Calls:
    """Where a call is looked up: the calls of its mask, its key among them, and what is known of it."""

    known: dict[Any, Repeat]
    key: tuple[Any, ...] | None = None
    repeat: Repeat | None = None

    def remember(self, repeat: Repeat, results: tuple[Array, Array | None], launch: Launch) -> None:
        """Keep the launch of a call whose arguments were checked."""
        _array_types.add(type(results[0]))
        if self.key is None:
            return
        if len(self.known) >= _MOST_CALLS:
            self.known.clear()
        self.known.setdefault(self.key, repeat).remember(*results, launch)


def lookup(operands: tuple[Any, Any, Any], mask: Any, window: Any, options: tuple[Any, ...]) -> Calls:
    """Look up a call by everything that its checks depend on, apart from `out`.

    Options of another type are another call: ``causal=1`` equals ``causal=True``, but is refused.
    """
    q, k, v = operands
    calls = Calls(_calls if mask is None else mask.__dict__.setdefault("_calls", {}))
    kind = type(q)
    if kind not in _array_types or type(k) is not kind or type(v) is not kind:
        return calls
    sides = None
    if window is not None:
        if type(window) is not tuple:
            return calls
        sides = tuple(map(type, window))
    key = (
        q.data.ptr, q.shape, q.strides, q.dtype, k.data.ptr, k.shape, k.strides, k.dtype, v.data.ptr, v.shape,
        v.strides, v.dtype, window, sides, options, tuple(map(type, options)),
    )  # fmt: skip
    try:
        calls.repeat = calls.known.get(key)
        calls.key = key
    except TypeError:  # an option is an array or a list, which cannot be looked up
        pass
    return calls


def _results_key(result: Array, lse: Array | None) -> tuple[Any, ...]:
    own = (result.data.ptr, result.shape, result.strides, result.dtype)
    return own if lse is None else (*own, lse.data.ptr)
